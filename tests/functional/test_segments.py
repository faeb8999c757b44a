import pytest
import torch

from captum_norm.functional.segments import add_own, members, segment_vectors


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("most", [1, 200, 10**6])
def test_vectors_of_segments_are_sums_over_their_keys(seed: int, most: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, heads, queries, keys, width, model, count = 2, 3, 4, 7, 2, 5, 3
    weights = torch.rand(batch, heads, queries, keys, generator=generator, dtype=torch.float64)
    values = torch.randn(batch, heads, keys, width, generator=generator, dtype=torch.float64)
    projection = torch.randn(heads, width, model, generator=generator, dtype=torch.float64)
    stream = torch.randn(batch, queries, model, generator=generator, dtype=torch.float64)
    numbers = torch.randint(-1, count, (batch, keys), generator=generator)
    own = numbers[:, -queries:]
    every = torch.einsum("bhqk,bhkd,hde->bqke", weights, values, projection)
    expected = torch.zeros(batch, queries, count, model, dtype=torch.float64)
    for example in range(batch):
        for key in range(keys):
            if (number := int(numbers[example, key])) >= 0:
                expected[example, :, number] += every[example, :, key]
        for query in range(queries):
            if (number := int(own[example, query])) >= 0:
                expected[example, query, number] += stream[example, query]
    found, together = torch.full_like(expected, torch.nan), torch.full_like(expected[:, :1], torch.nan)
    for rows, columns, vectors in segment_vectors(weights, values, projection, members(numbers, count), most):
        found[:, rows, columns] = add_own(vectors, stream[:, rows], own[:, rows], columns)
    torch.testing.assert_close(found, expected)
    summed = weights.sum(2, keepdim=True)
    for rows, columns, vectors in segment_vectors(summed, values, projection, members(numbers, count), most):
        together[:, rows, columns] = add_own(vectors, stream, own, columns)
    torch.testing.assert_close(together, expected.sum(1, keepdim=True))
    for rows, columns, vectors in segment_vectors(weights, values, projection, None, most):
        torch.testing.assert_close(vectors, every[:, rows, columns])


def test_members_of_an_empty_segment() -> None:
    (first, second) = members(torch.tensor([[-1, 2, 2], [0, 0, 0]]), 3)
    assert [keys.tolist() for keys in first] == [[], [], [1, 2]]
    assert [keys.tolist() for keys in second] == [[0, 1, 2], [], []]

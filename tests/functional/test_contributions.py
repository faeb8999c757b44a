"""L1 and cosine distances, against every vector formed."""

import pytest
import torch

from captum_norm.functional import cosine_distance, l1_distances, nearness


@pytest.mark.parametrize("most", [1, 50, 333, 2**18])
@pytest.mark.parametrize("seed", range(2))
def test_distances_in_pieces_equal_those_of_all_vectors(seed: int, most: int) -> None:
    torch.manual_seed(seed)
    whole, weights, transformed = torch.randn(5, 7), torch.rand(3, 5, 4), torch.randn(4, 3, 7)
    vectors = torch.einsum("hqk,khd->qkd", weights.double(), transformed.double())
    expected = (whole.double()[:, None] - vectors).abs().sum(-1)
    found = l1_distances(whole.double(), weights.double(), transformed.double(), most)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    near = nearness(found, whole.double().abs().sum(-1))
    torch.testing.assert_close(near, (whole.double().abs().sum(-1)[:, None] - expected).clamp(min=0))
    assert (near >= 0).all()


def test_gradients_flow_through_distances() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (2, 3, 5), (5, 2, 4))]
    assert torch.autograd.gradcheck(lambda y, a, f: l1_distances(y, a, f, 9), tensors)


def test_small_angles_keep_their_digits() -> None:
    angle = torch.tensor([0.0, 1e-5, 0.3, torch.pi], dtype=torch.float64)
    vectors = 3 * torch.stack([angle.cos(), angle.sin()], -1)
    exact = 2 * (angle / 2).sin().square()
    found = cosine_distance(vectors.float(), torch.tensor([2.0, 0.0]))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)

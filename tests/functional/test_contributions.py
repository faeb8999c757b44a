"""L1 and cosine distances against every vector formed; shares of biases by hand."""

import pytest
import torch

from captum_norm.functional import cosine_distance
from captum_norm.functional.contributions import BIAS_SHARES, add_bias, l1_distances, nearness


@pytest.mark.parametrize("most", [1, 50, 333, 2**18])
@pytest.mark.parametrize("seed", range(2))
def test_distances_in_pieces_equal_those_of_all_vectors(seed: int, most: int) -> None:
    torch.manual_seed(seed)
    shapes = ((5, 7), (3, 5, 4), (3, 4, 2), (3, 2, 7))
    whole, weights, values, projection = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    vectors = torch.einsum("hqk,hkd,hde->qke", weights, values, projection)
    expected = (whole[:, None] - vectors).abs().sum(-1)
    found = l1_distances(whole, weights, values, projection, most)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    near = nearness(found, whole.abs().sum(-1))
    torch.testing.assert_close(near, (whole.abs().sum(-1)[:, None] - expected).clamp(min=0))
    assert (near >= 0).all()


def test_gradients_flow_through_distances() -> None:
    torch.manual_seed(0)
    shapes = ((3, 4), (2, 3, 5), (2, 5, 3), (2, 3, 4))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda y, a, v, w: l1_distances(y, a, v, w, 9), tensors)


def test_small_angles_keep_their_digits() -> None:
    angle = torch.tensor([0.0, 1e-5, 0.3, torch.pi], dtype=torch.float64)
    vectors = 3 * torch.stack([angle.cos(), angle.sin()], -1)
    exact = 2 * (angle / 2).sin().square()
    found = cosine_distance(vectors.float(), torch.tensor([2.0, 0.0]))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


PARTS = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]], [[-1.0, 0.0]]])
BIAS = torch.tensor([1.0, -1.0])


@pytest.mark.parametrize(
    ("sharing", "weights"),
    [
        ("absdot", [1, 0, 1]),
        ("abssim", [1 / 5, 0, 1]),
        ("norm", [5, 0, 1]),
        ("equal", [1, 0, 1]),
        ("cls", [1, 0, 0]),
    ],
)
def test_shares_are_in_proportion(sharing: str, weights: list[float]) -> None:
    shares = torch.tensor(weights) / sum(weights)
    torch.testing.assert_close(add_bias(PARTS, BIAS, sharing), PARTS + shares[:, None, None] * BIAS)


@pytest.mark.parametrize("sharing", BIAS_SHARES)
def test_a_bias_that_stands_apart_from_all_parts_is_not_lost(sharing: str) -> None:
    for parts in (torch.zeros(4, 2, 2), torch.tensor([[[1.0, 1.0]], [[0.0, 0.0]], [[2.0, 2.0]]])):
        shared = add_bias(parts, BIAS, sharing)
        torch.testing.assert_close(shared.sum(0), parts.sum(0) + BIAS)
    assert sharing == "cls" or not shared[1].any()


@pytest.mark.parametrize("sharing", ["absdot", "abssim", "norm"])
def test_shares_of_biases_do_not_depend_on_the_size_of_parts(sharing: str) -> None:
    generator = torch.Generator().manual_seed(0)
    parts, bias = torch.randn(5, 6, 24, generator=generator), torch.randn(24, generator=generator)
    expected = add_bias(parts, bias, sharing) - parts
    for scale, size in ((2.0**-100, 1.0), (2.0**-100, 2.0**-36), (2.0**-60, 1.0), (2.0**60, 1.0)):
        shares = add_bias(parts * scale, bias * size, sharing) - parts * scale
        torch.testing.assert_close(shares, size * expected, rtol=1e-5, atol=size * 1e-6 * max(1, scale))

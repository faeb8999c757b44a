"""The fast norms equal the direct ones, on random weights with biases, γ, β and causal masks."""

import pytest
import torch
from torch import Tensor

from captum_norm import functional as F
from tests import oracle

SHAPES = [(1, 1, 4, 3, 5), (2, 4, 7, 3, 12), (3, 6, 5, 8, 16)]  # B, H, K, d, D


def random_attention(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, keys, width, model_width = shape
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(batch, heads, keys, keys, generator=generator, dtype=torch.float64)
    causal = torch.ones(keys, keys, dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal if seed % 2 else torch.zeros_like(causal), -torch.inf).softmax(-1)
    values = torch.randn(batch, heads, keys, width, generator=generator, dtype=torch.float64) + 0.3
    projection = torch.randn(heads, width, model_width, generator=generator, dtype=torch.float64)
    return weights.to(dtype), values.to(dtype), projection.to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_norms_equal_the_direct_ones(shape: tuple[int, ...], seed: int, dtype: torch.dtype, tolerance: float) -> None:
    weights, values, projection = random_attention(seed, shape, dtype)
    vectors = oracle.vectors_per_head(weights.double(), values.double(), projection.double())
    form = F.key_gram(values.transpose(1, 2), F.weight_gram(projection))
    transformed = F.transformed_norms(form)
    direct_transformed = torch.einsum("bhkd,hde->bhke", values.double(), projection.double()).norm(dim=-1)

    def close(fast: Tensor, direct: Tensor) -> None:
        torch.testing.assert_close(fast.double(), direct, rtol=tolerance, atol=tolerance * direct.max().item())

    close(transformed, direct_transformed)
    close(F.head_norms(weights, transformed), vectors.norm(dim=-1))
    close(F.summed_norms(weights, form), vectors.sum(1).norm(dim=-1))


def test_heads_that_cancel_leave_zero_and_not_nan() -> None:
    values = torch.randn(1, 1, 6, 4, dtype=torch.float64).repeat(1, 2, 1, 1)
    half = torch.randn(1, 4, 9, dtype=torch.float64)
    form = F.key_gram(values.transpose(1, 2).float(), F.weight_gram(torch.cat([half, -half]).float()))
    weights = torch.full((1, 2, 6, 6), 1 / 6)
    norms = F.summed_norms(weights, form)
    scale = F.head_norms(weights, F.transformed_norms(form)).max()
    assert (norms >= 0).all()
    # A square is known to float32 rounding of its largest term, so its root to the root of that rounding.
    assert norms.max() < 2e-3 * scale


def test_the_gradient_is_finite_where_a_norm_is_zero() -> None:
    weights = torch.zeros(1, 2, 3, 3, requires_grad=True)
    form = F.key_gram(torch.randn(1, 3, 2, 4), F.weight_gram(torch.randn(2, 4, 8)))
    F.summed_norms(weights, form).sum().backward()
    assert weights.grad is not None
    assert weights.grad.isfinite().all()


@pytest.mark.parametrize("seed", range(3))
def test_gradients_equal_those_of_the_direct_norms(seed: int) -> None:
    weights, values, projection = random_attention(2 * seed, SHAPES[1], torch.float64)
    cotangent = torch.rand(weights.shape[0], *weights.shape[2:], dtype=torch.float64)
    gradients = []
    for fast in (True, False):
        leaves = [tensor.clone().requires_grad_() for tensor in (weights, values, projection)]
        if fast:
            norms = F.summed_norms(leaves[0], F.key_gram(leaves[1].transpose(1, 2), F.weight_gram(leaves[2])))
        else:
            norms = oracle.vectors_per_head(*leaves).sum(1).norm(dim=-1)
        gradients.append(torch.autograd.grad((norms * cotangent).sum(), leaves))
    for fast_gradient, direct_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(fast_gradient, direct_gradient, rtol=1e-10, atol=1e-12)


def test_the_ratio_is_zero_where_nothing_arrives() -> None:
    nothing = torch.zeros(2, 3)
    assert torch.equal(F.ratio(nothing, nothing), nothing)
    assert torch.equal(F.ratio(torch.ones(2, 3), nothing), torch.ones(2, 3))


@pytest.mark.parametrize("seed", [0, 1])
def test_lengths_of_single_heads_need_the_diagonal_alone(seed: int) -> None:
    torch.manual_seed(seed)
    values, projection = torch.randn(2, 5, 3, 4, dtype=torch.float64), torch.randn(3, 4, 7, dtype=torch.float64)
    direct = torch.einsum("bkhd,hde->bhke", values, projection).norm(dim=-1)
    norms = F.value_norms(values, F.weight_gram(projection))
    torch.testing.assert_close(norms, direct)
    assert F.value_norms_error(norms[..., 2], values[:, 2], projection).max() < 1e-14
    sizes = torch.einsum("bhd,hef->bh", values[:, 2].square(), projection.square())
    changed = F.value_norms_error(norms[..., 2], values[:, 2], 1.1 * projection)
    torch.testing.assert_close(changed, ((1.1**2 - 1) * direct[..., 2].square() / (1.1**2 * sizes)).amax(1))

"""Fast norms equal direct ones, and lengths keep their digits whatever the size of the vectors."""

import pytest
import torch
from torch import Tensor

from captum_norm import functional as F
from captum_norm.functional.vectors import (
    balanced,
    cancelling_keys,
    estimated_length,
    random_directions,
    refined_head_norms,
    refined_summed_norms,
    term_sizes,
    value_norms,
    value_norms_error,
)
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


def test_only_keys_whose_heads_cannot_cancel_are_left_out() -> None:
    left = 0
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        values, projection = torch.randn(1, 60, 6, 4, generator=generator), torch.randn(6, 4, 16, generator=generator)
        projection[1] = -projection[0] + 0.1 * projection[1]
        # At some keys the first two heads are alike, so they cancel for some weights.
        values[:, ::3, 1] = values[:, ::3, 0] + torch.rand(20, 1, generator=generator) * values[:, ::3, 1]
        sizes = term_sizes(values, projection.norm(dim=-1))
        found = cancelling_keys(F.key_gram(values, F.weight_gram(projection)), sizes).tolist()
        weights = torch.rand(1, 6, 2000, 60, generator=generator) ** 4
        weights[:, 2:, :1000] = 0
        vectors = torch.einsum("bhqk,bkhd,hde->bqke", weights, values, projection)
        terms = (weights * sizes.unsqueeze(2)).square().sum(1).sqrt()
        smallest = (vectors.norm(dim=-1) / terms).amin((0, 1))
        cancel = (smallest < 2**8 * torch.finfo(torch.float32).eps ** 0.5).nonzero().flatten().tolist()
        assert set(cancel) <= set(found)
        left += 60 - len(found)
    assert left > 60


def test_the_gradient_is_finite_where_a_norm_is_zero() -> None:
    weights = torch.zeros(1, 2, 3, 3, requires_grad=True)
    form = F.key_gram(torch.randn(1, 3, 2, 4), F.weight_gram(torch.randn(2, 4, 8)))
    (gradient,) = torch.autograd.grad(F.summed_norms(weights, form).sum(), weights)
    assert gradient.isfinite().all()


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
    norms = value_norms(values, F.weight_gram(projection))
    torch.testing.assert_close(norms, direct)
    assert value_norms_error(norms[..., 2], values[:, 2], projection).max() < 1e-14
    sizes = torch.einsum("bhd,hef->bh", values[:, 2].square(), projection.square())
    changed = value_norms_error(norms[..., 2], values[:, 2], 1.1 * projection)
    torch.testing.assert_close(changed, ((1.1**2 - 1) * direct[..., 2].square() / (1.1**2 * sizes)).amax(1))


SCALES = [1e-37, 1e-30, 1e-25, 1e-22, 1e-19, 1e-12, 1.0, 1e12, 1e18, 1e25, 1e36]


def vectors(seed: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 6, 24, generator=generator) * scale


@pytest.mark.parametrize("scale", SCALES)
def test_lengths_of_any_size(scale: float) -> None:
    for seed in range(3):
        found = vectors(seed, scale)
        found[0, 1] = 0
        found[1, 2, 1:] *= 1e-3
        exact = found.double().norm(dim=-1)
        torch.testing.assert_close(F.length(found).double(), exact, rtol=1e-6, atol=0)
        cosine = (found.double() * found[:1].double()).sum(-1) / (exact * exact[:1]).clamp(min=1e-300)
        expected = torch.where((exact > 0) & (exact[:1] > 0), 1 - cosine, (exact != exact[:1]) / 2)
        torch.testing.assert_close(F.cosine_distance(found, found[:1]).double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(F.unit(found).double().norm(dim=-1), (exact > 0).double(), rtol=1e-6, atol=0)
        halved, power = balanced(found)
        assert torch.equal(halved * power, found)
        assert (halved.abs().amax(-1)[exact > 0] >= 1).all()
        assert (halved.abs().amax(-1) < 2).all()


def test_lengths_in_range_are_those_of_torch_bit_for_bit() -> None:
    for scale in (1e-12, 1.0, 1e12):
        found = vectors(0, scale)
        assert torch.equal(F.length(found), found.norm(dim=-1))
        # Powers of two change no digit on either side of the limit.
        assert torch.equal(F.length(found * 2.0**-40), found.norm(dim=-1) * 2.0**-40)


def test_lengths_of_what_is_not_finite_and_of_nothing() -> None:
    odd = torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0], [0.0, 0.0]])
    assert F.length(odd)[0] == torch.inf
    assert F.length(odd)[1].isnan()
    assert F.length(odd)[2] == 0
    assert F.length(torch.zeros(0, 4)).shape == (0,)
    assert F.length(torch.full((4,), 1e-30)) == torch.tensor(2e-30)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_gradients_of_lengths(scale: float) -> None:
    found = vectors(0, scale).requires_grad_()
    (gradient,) = torch.autograd.grad(F.length(found).sum(), found)
    torch.testing.assert_close(
        gradient.double(), found.detach().double() / found.detach().double().norm(dim=-1)[..., None]
    )


@pytest.mark.parametrize("scale", SCALES[:-1])
@pytest.mark.parametrize("part", ["values", "projection", "weights", "one head"])
def test_norms_of_sums_over_heads_of_any_size(part: str, scale: float) -> None:
    """The two or three that lose digits in the quadratic form are computed anew, gradients included."""
    if part in ("weights", "one head") and scale > 1:
        return  # weights are shares
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        weights = (
            torch.randn(2, 3, 5, 5, generator=generator).tril().masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
        )
        weights, values = weights.softmax(-1), torch.randn(2, 5, 3, 4, generator=generator)
        projection = torch.randn(3, 4, 7, generator=generator)
        values = values * scale if part == "values" else values
        projection = projection * scale if part == "projection" else projection
        if part == "weights":
            weights[:, :, 2:, 1] *= scale
        if part == "one head":
            values[:, :, 0] *= scale
            weights[:, 1:, :, 0] = 0
        weights = weights.requires_grad_()
        exact_weights = weights.detach().double().requires_grad_()
        exact = oracle.vectors_per_head(exact_weights, values.transpose(1, 2).double(), projection.double())
        form = F.key_gram(values, F.weight_gram(projection))

        def rows(projection: Tensor = projection) -> Tensor:
            return projection.double()

        sizes = term_sizes(values, projection.norm(dim=-1))
        keys = cancelling_keys(form, sizes)
        norms = refined_summed_norms(F.summed_norms(weights, form), weights, values, sizes, keys, rows)
        direct = exact.sum(1).norm(dim=-1)
        torch.testing.assert_close(norms.double(), direct, rtol=1e-5, atol=0)
        heads = refined_head_norms(F.transformed_norms(form), values, sizes, rows)
        torch.testing.assert_close(F.head_norms(weights, heads).double(), exact.norm(dim=-1), rtol=1e-5, atol=0)
        alone = refined_head_norms(value_norms(values, F.weight_gram(projection)), values, sizes, rows)
        torch.testing.assert_close(alone, heads, rtol=1e-5, atol=0)
        if scale > 1e18:
            continue  # 0 · ∞ is in the gradient of what overflowed
        (gradient,) = torch.autograd.grad((norms / norms.detach().clamp(min=1e-38)).sum(), weights)
        (expected,) = torch.autograd.grad((direct / direct.detach().clamp(min=1e-300)).sum(), exact_weights)
        live = direct.detach()[:, None] > 0
        torch.testing.assert_close((gradient * live).double(), expected * live, rtol=1e-4, atol=0)


def test_errors_and_ratios_of_any_size() -> None:
    for scale in SCALES:
        reference, error = F.length(vectors(0, scale)) + scale, 1e-3 * (vectors(1, scale)[..., 0].abs() + scale)
        expected = error.double().norm(dim=1) / reference.double().norm(dim=1)
        torch.testing.assert_close(F.relative_error(error, reference, None).double(), expected, rtol=1e-5, atol=0)
        expected = reference.double() / (reference.double() + error.double())
        torch.testing.assert_close(F.ratio(reference, error).double(), expected, rtol=1e-6, atol=0)
    large = torch.tensor([2e38, 3e38])
    torch.testing.assert_close(F.ratio(large, large.flip(0)), torch.tensor([0.4, 0.6]))


def estimated_error(error: Tensor, reference: Tensor, real: Tensor | None = None) -> Tensor:
    sketch = error @ random_directions(error.shape[-1], error)
    return F.relative_error(estimated_length(sketch), reference.norm(dim=-1), real)


def test_the_estimate_is_near_the_error() -> None:
    torch.manual_seed(0)
    reference = torch.randn(3, 400, 64, dtype=torch.float64)
    error = 1e-4 * torch.randn_like(reference)
    exact = error.flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1)
    # 400 positions, each estimated from 8 directions: a relative deviation of about 1/sqrt(2·8·400) ≈ 1 %.
    torch.testing.assert_close(estimated_error(error, reference), exact, rtol=0.1, atol=0)


def test_one_wrong_coordinate_is_seen() -> None:
    reference = torch.ones(1, 3, 16)
    for coordinate in range(16):
        error = torch.zeros_like(reference)
        error[0, 1, coordinate] = 0.5
        assert estimated_error(error, reference).item() > 0.05


def test_padded_positions_do_not_count_and_nan_does() -> None:
    reference, error = torch.ones(1, 2, 4), torch.zeros(1, 2, 4)
    error[0, 1] = torch.nan
    assert estimated_error(error, reference, torch.tensor([[True, False]])).item() == 0
    assert estimated_error(error, reference).isnan().item()

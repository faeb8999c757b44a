"""Parts carried through frozen norms equal the direct way and add up; products of the weights follow the weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import NormAttribution, NormMeter
from captum_norm import functional as F
from captum_norm.functional import weight_gram
from captum_norm.functional.carry import measure_end, scaled
from captum_norm.functional.vectors import random_directions
from tests import encoder_decoders, families, oracle


def random_norm(generator: torch.Generator, width: int, centered: bool) -> tuple[F.Normalization, oracle.DirectNorm]:
    gain = 1 + torch.randn(width, generator=generator, dtype=torch.float64)
    bias = torch.randn(width, generator=generator, dtype=torch.float64)
    return F.Normalization(centered, gain, bias, 1e-3), oracle.DirectNorm(centered, gain, bias, 1e-3)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("final", [True, False])
def test_carried_norms_equal_the_direct_ones(
    seed: int, centered: bool, branch: bool, residual: bool, final: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch, heads, keys, width, model_width = 2, 3, 5, 4, 10
    weights = random(batch, heads, keys, keys).softmax(-1)
    values, projection, bias = random(batch, heads, keys, width), random(heads, width, model_width), random(model_width)
    stream = random(batch, keys, model_width)
    norms = [random_norm(generator, model_width, centered) for _ in range(2)]
    carry = F.Carry(norms[0][0] if branch else None, residual, norms[1][0] if final else None)

    direct, constant = oracle.block_vectors(
        oracle.vectors_per_head(weights, values, projection).sum(1),
        bias,
        stream,
        norms[0][1] if branch else None,
        residual,
        norms[1][1] if final else None,
    )
    attention = (weights @ values).transpose(1, 2).flatten(2) @ projection.flatten(0, 1)
    projected = attention + bias
    before_sum = norms[0][1].whole(projected) if branch else projected
    scales = carry.scales(projected, before_sum + stream if residual else before_sum)
    own_weights = weights.diagonal(dim1=-2, dim2=-1)
    own = torch.einsum("bhq,bhqd,hde->bqe", own_weights, values, projection)
    directions = random_directions(model_width, stream)

    form = F.key_gram(values.transpose(1, 2), F.weight_gram(carry.linear(projection)))
    fast = scales.divide(F.summed_norms(weights, form))
    off_diagonal = ~torch.eye(keys, dtype=torch.bool)
    exact = direct.norm(dim=-1)
    torch.testing.assert_close(fast[:, off_diagonal], exact[:, off_diagonal], rtol=1e-11, atol=1e-12)

    sketch = projected @ carry.transposed(directions)
    torch.testing.assert_close(sketch, carry.linear(projected) @ directions)
    wrong = 1e-3 * random(batch, keys, model_width)
    reference = direct.sum(2) + constant - wrong
    others = carry.linear(attention - own).norm(dim=-1)
    own_norm, others, ratio, lacking, whole = measure_end(
        carry, scales, carry.linear(own), others, sketch, stream, reference, directions
    )
    torch.testing.assert_close(own_norm, exact[:, ~off_diagonal].reshape(batch, keys), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(
        others, (direct.sum(2) - direct.diagonal(dim1=1, dim2=2).mT).norm(dim=-1), rtol=1e-11, atol=1e-12
    )
    torch.testing.assert_close(ratio, oracle.mixing_ratio(direct), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lacking, wrong @ directions, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(whole, reference @ directions)


@pytest.mark.parametrize("centered", [True, False])
def test_normalize_equals_torch(centered: bool) -> None:
    norm, _ = random_norm(torch.Generator().manual_seed(0), 8, centered)
    inputs = torch.randn(3, 8, dtype=torch.float64)
    if centered:
        expected = torch.nn.functional.layer_norm(inputs, (8,), norm.gain, norm.bias, norm.eps)
    else:
        assert norm.bias is not None
        expected = torch.nn.functional.rms_norm(inputs, (8,), norm.gain, norm.eps) + norm.bias
    torch.testing.assert_close(F.normalize(norm, inputs), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [torch.tensor(0.3, dtype=torch.float64), torch.linspace(-1, 2, 6).double()])
def test_scaled_is_the_factor_times_the_normalisation(seed: int, factor: Tensor) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole, gain, bias = (torch.randn(*shape, 6, generator=generator).double() for shape in ((2, 5), (), ()))
    for norm in (F.Normalization(True, gain, bias, 1e-5), F.Normalization(False, gain, None, 1e-6)):
        torch.testing.assert_close(F.normalize(scaled(norm, factor), whole), factor * F.normalize(norm, whole))
    bare = F.Normalization(False, None, None, 1e-6)
    torch.testing.assert_close(F.normalize(scaled(bare, factor), whole), factor * F.normalize(bare, whole))
    alone = scaled(None, factor)
    assert torch.equal(F.normalize(alone, whole), factor * whole)
    assert torch.equal(F.apply_linear(alone, whole), factor * whole)
    assert torch.equal(F.inverse_scale(alone, whole), torch.ones(2, 5, 1).double())


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.encoder.layer[0].attention.output.dense.weight.mul_(-1.7)


def replaced(model: Any) -> None:
    dense = model.encoder.layer[0].attention.output.dense
    dense.weight = torch.nn.Parameter(torch.randn_like(dense.weight))


def behind_the_back(model: Any) -> None:
    model.encoder.layer[0].attention.output.dense.weight.data.add_(0.3)


def gain_behind_the_back(model: Any) -> None:
    model.encoder.layer[1].attention.output.LayerNorm.weight.data.mul_(1.5)


def other_dtype(model: Any) -> None:
    model.double()


@pytest.mark.parametrize("change", [in_place, replaced, behind_the_back, gain_behind_the_back, other_dtype])
@pytest.mark.parametrize("scope", ["attn", "attn_res_ln"])
def test_a_changed_weight_changes_the_norms(change: Callable[[Any], None], scope: Any) -> None:
    model, ids = families.build("bert"), families.inputs("bert")
    method = NormAttribution(model, scope)
    method.maps(ids)
    change(model)
    torch.testing.assert_close(method.maps(ids).encoder, NormAttribution(model, scope).maps(ids).encoder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_slightly_changed_weight_changes_the_lengths(dtype: torch.dtype) -> None:
    """A difference that half precision's tolerance for whole layers would let pass."""
    model, ids = families.build("bert", dtype=dtype), families.inputs("bert")
    meter = NormMeter(model)
    meter.measure(ids, head_norms=True, maps=False)
    for layer in model.encoder.layer:
        layer.attention.output.dense.weight.data.mul_(1 + 2**-5)
    found, fresh = (one.measure(ids, head_norms=True, maps=False)["encoder"] for one in (meter, NormMeter(model)))
    assert found.transformed_norms is not None
    torch.testing.assert_close(found.transformed_norms, fresh.transformed_norms, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "blocks"), [("bert", 2), ("albert", 1), ("marian", 6)])
def test_the_weights_are_multiplied_once(name: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(projection: Tensor) -> Tensor:
        made.append(projection)
        return weight_gram(projection)

    monkeypatch.setattr("captum_norm.functional.vectors.weight_gram", counted)
    models: Any = families if name in families.FAMILIES else encoder_decoders
    model, inputs = models.build(name), models.inputs(name)
    method = NormAttribution(model)
    for _ in range(3):
        method.maps(inputs)
    assert len(made) == blocks

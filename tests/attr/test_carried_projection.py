"""Products of the weights follow the weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import NormAttribution, NormMeter
from captum_norm.functional import weight_gram
from tests import encoder_decoders, families


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

    monkeypatch.setattr("captum_norm.attr.layer_norms.weight_gram", counted)
    models: Any = families if name in families.FAMILIES else encoder_decoders
    model, inputs = models.build(name), models.inputs(name)
    method = NormAttribution(model)
    for _ in range(3):
        method.maps(inputs)
    assert len(made) == blocks

"""Half-precision models: norms are accumulated in float32, so what is off is the model's own rounding."""

from typing import Any

import pytest
import torch

from benchmarks.precision import COMPARABLE, errors
from captum_norm import TOLERANCE, AttentionBlockAttribution, AttentionWeights, InvalidInputError
from tests import families
from tests.families import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
def test_norms_are_accumulated_in_single_precision(name: str, dtype: torch.dtype, tolerance: float) -> None:
    found = errors(name, dtype)
    assert found.accumulation < 1e-6
    assert found.completeness < TOLERANCE[dtype]
    if name in COMPARABLE:
        assert found.mixing_ratio < tolerance
        assert found.maps < tolerance


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2", "t5-encoder"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_pieces_differ_by_a_rounding_of_the_model(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model, inputs = families.build(name, dtype=dtype), families.inputs(name)
    whole = AttentionBlockAttribution(model).maps(inputs).self_attention
    pieces = AttentionBlockAttribution(model, memory_budget=1).maps(inputs).self_attention
    assert (pieces - whole).norm() <= tolerance * whole.norm()


@pytest.mark.parametrize("scope", ["atb", "atb_ff_res"])
def test_automatic_mixed_precision_is_refused(scope: Any) -> None:
    model, ids = families.build("bert"), families.inputs("bert")
    with torch.autocast("cpu"), pytest.raises(InvalidInputError, match=r"torch\.autocast is on"):
        AttentionBlockAttribution(model, scope).maps(ids)
    with torch.autocast("cpu"):
        assert AttentionWeights(model).maps(ids).encoder is not None

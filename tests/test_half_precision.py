"""Half-precision models: norms are accumulated in float32, so what is off is the model's own rounding."""

import pytest
import torch

from benchmarks.precision import COMPARABLE, errors
from captum_norm import AttentionBlockAttribution
from tests import families
from tests.families import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
def test_norms_are_accumulated_in_single_precision(name: str, dtype: torch.dtype, tolerance: float) -> None:
    found = errors(name, dtype)
    assert found.accumulation < 1e-6
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

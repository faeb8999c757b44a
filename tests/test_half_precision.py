"""Half-precision models: norms are accumulated in float32, so what is off is the model's own rounding."""

from typing import Any

import pytest
import torch

from benchmarks.precision import COMPARABLE, errors
from captum_norm import TOLERANCE, AttentionBlockAttribution, AttentionWeights, InvalidInputError, NormMeter
from tests import families, feed_forwards, oracle
from tests.families import arrangement_of, tiers
from tests.test_matrix import SCOPES


@pytest.mark.parametrize("name", tiers(kind=arrangement_of))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
def test_norms_are_accumulated_in_single_precision(name: str, dtype: torch.dtype, tolerance: float) -> None:
    found = errors(name, dtype)
    assert found.accumulation < 1e-6
    assert found.completeness < TOLERANCE[dtype]
    if name in COMPARABLE:
        assert found.mixing_ratio < tolerance
        assert found.maps < tolerance


@pytest.mark.parametrize("name", tiers(feed_forwards.PARTS, arrangement_of))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 6e-2), (torch.float16, 8e-3)])
def test_the_first_layer_stays_near_the_same_weights_in_float64(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    """The model rounds each activation to 2⁻⁸ (2⁻¹¹); behind the first layer rounding may choose other experts."""
    model, inputs = families.build(name, 0, dtype), families.inputs(name, dtype=dtype)
    style = feed_forwards.EVERY[name].style
    scopes = (*SCOPES[style], *feed_forwards.SCOPES[style])
    (measured,) = NormMeter(model).measure(inputs, scopes=scopes).values()
    assert measured.convergence_delta is not None
    assert measured.convergence_delta.max() < TOLERANCE[dtype]
    assert measured.convergence_delta.dtype == torch.float32
    model, inputs = model.double(), inputs.double() if inputs.is_floating_point() else inputs
    layer = oracle.layers(feed_forwards.EVERY[name], model, inputs)[0]
    behind = feed_forwards.vectors(name, model, inputs)[0]
    for scope in scopes:
        expected = (behind[scope] if scope in behind else layer.vectors(scope))[0].norm(dim=-1)
        maps = measured.norms[scope][:, 0]
        assert maps.dtype == torch.float32
        error = (maps.double() - expected).flatten(1).norm(dim=-1) / expected.flatten(1).norm(dim=-1)
        assert error.max() < tolerance


@pytest.mark.parametrize("scope", ["atb", "atb_ff_res"])
def test_automatic_mixed_precision_is_refused(scope: Any) -> None:
    model, ids = families.build("bert"), families.inputs("bert")
    with torch.autocast("cpu"), pytest.raises(InvalidInputError, match=r"torch\.autocast is on"):
        AttentionBlockAttribution(model, scope).maps(ids)
    with torch.autocast("cpu"):
        assert AttentionWeights(model).maps(ids).encoder is not None

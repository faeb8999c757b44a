"""Further families: one test for each, which checks in float64 what the matrix checks of the others one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import AttentionBlockAttribution, NormMeter
from tests import families, feed_forwards, oracle
from tests.families import FURTHER
from tests.test_matrix import SCOPES, relative


def state_of(model: Any) -> dict[Any, Any]:
    """What explaining a model must not change."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), frozenset(vars(m))) for m in model.modules()]
    configs = [dict(vars(m.config)) for m in model.modules() if hasattr(m, "config")]
    return {"hooks": hooks, "configs": configs}


@pytest.mark.parametrize("name", FURTHER)
def test_a_further_family(name: str) -> None:
    family = FURTHER[name]
    dtype = torch.float32 if family.narrow else torch.float64
    tolerance = 1e-5 if family.narrow else 1e-6 if family.single else 1e-11
    model, inputs = families.build(name, 0, dtype), families.inputs(name, 0, 2, 7, dtype=dtype)
    exact = oracle.layers(family, model, inputs)
    with torch.no_grad():
        output = model(inputs)[0]
    state = state_of(model)

    scopes = SCOPES[family.style]
    behind = () if name in feed_forwards.NOT_UNDERSTOOD else feed_forwards.SCOPES[family.style]
    meter = NormMeter(model)
    stacks = meter.measure(inputs, scopes=(*scopes, *behind), weights=True)
    assert list(stacks) == ["decoder" if family.causal else "encoder"]
    (measured,) = stacks.values()
    for scope in scopes:
        vectors = torch.stack([layer.vectors(scope)[0] for layer in exact], 1)
        assert relative(measured.norms[scope], vectors.norm(dim=-1)) < tolerance
        ratios = torch.stack([oracle.mixing_ratio(v) for v in vectors.unbind(1)], 1)
        assert (measured.mixing_ratio[scope] - ratios).abs().max() < tolerance
    for scope in behind:
        assert measured.norms[scope].isfinite().all()
        assert measured.norms[scope].any()
    assert measured.weights is not None
    assert relative(measured.weights, torch.stack([layer.weights.mean(1) for layer in exact], 1)) < tolerance
    assert measured.convergence_delta is not None
    assert measured.convergence_delta.max() < tolerance

    if not family.signal:
        expect_the_same_if_padded(model, inputs)
    with torch.no_grad():
        assert torch.equal(model(inputs)[0], output)
    assert state_of(model) == state


def expect_the_same_if_padded(model: Any, inputs: Tensor) -> None:
    """The second example is cut and padded on the left; both give what they give alone."""
    length, cut = inputs.shape[1], 3
    batch, mask = inputs.clone(), torch.ones_like(inputs)
    batch[1, :cut], mask[1, :cut] = 0, 0
    method = AttentionBlockAttribution(model)
    maps = method.maps({"input_ids": batch, "attention_mask": mask}).self_attention
    for row, start in ((0, 0), (1, cut)):
        alone = method.maps(inputs[row : row + 1, start:]).self_attention[0]
        torch.testing.assert_close(maps[row, :, start:, start:], alone, rtol=1e-5, atol=1e-6)
        assert alone.shape[-1] == length - start

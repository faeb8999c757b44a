"""On a GPU: the numbers of the CPU, within its memory, in half precision, and on several devices at once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import NormAttribution, NormMeter
from captum_norm.attr.layer_maps import TOLERANCE
from tests import families
from tests.test_matrix import SCOPES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is at hand")

GPU = torch.device("cuda", 0)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (actual.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_gpu_gives_what_the_cpu_gives(name: str) -> None:
    model, inputs = families.build(name), families.inputs(name)
    scopes = SCOPES[families.FAMILIES[name].style]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 8e-2), (torch.float16, 1e-2)):
        rounded = inputs.to(dtype) if inputs.is_floating_point() else inputs
        # In the same precision, in which routers choose the same experts.
        expected = families.measured(model.to(dtype), rounded, scopes=scopes, weights=True)
        for budget in (None, 1):
            meter: Any = NormMeter(model.to(GPU), memory_budget=budget)
            (measured,) = meter.measure(rounded.to(GPU), scopes=scopes, weights=True).values()
            assert measured.convergence_delta.max() < TOLERANCE[dtype]
            for scope in scopes:
                assert measured.norms[scope].device == GPU
                close(measured.norms[scope], expected.norms[scope], tolerance)
        model.cpu().float()
        model.load_state_dict(families.build(name).state_dict())


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma2", "gpt-neox"])
def test_a_model_on_two_devices(name: str) -> None:
    """The last layer on the CPU, as accelerate's ``device_map`` would place it."""
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    model, inputs = families.build(name), families.inputs(name)
    mask = torch.ones_like(inputs)
    mask[1, -3:] = 0
    scopes = SCOPES[families.FAMILIES[name].style]
    (expected,) = NormMeter(model).measure(inputs, mask, scopes=scopes).values()
    last: Any = model.get_submodule(families.FAMILIES[name].layer.format(1))
    hooks.add_hook_to_module(model, hooks.AlignDevicesHook(GPU, io_same_device=True))
    model.to(GPU)
    hooks.add_hook_to_module(last, hooks.AlignDevicesHook("cpu", io_same_device=True, place_submodules=True))
    (measured,) = NormMeter(model).measure(inputs.to(GPU), mask.to(GPU), scopes=scopes).values()
    for scope in scopes:
        close(measured.norms[scope], expected.norms[scope], 1e-5)
    assert NormAttribution(model).attribute(inputs.to(GPU), additional_forward_args=mask.to(GPU)).shape == inputs.shape

"""Models whose weights hooks of accelerate keep elsewhere between the calls of their modules."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from captum_norm import AttentionBlockAttribution, NormAttribution, NormMeter, UnsupportedModelError
from captum_norm.errors import NonFiniteError
from captum_norm.models.offloading import expect_same_inputs
from tests import families, feed_forwards
from tests.test_matrix import SCOPES

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

CPU = torch.device("cpu")


def to_memory(model: nn.Module, _: Path) -> None:
    accelerate.cpu_offload(model, execution_device=CPU)


def to_disk(model: nn.Module, folder: Path) -> None:
    accelerate.disk_offload(model, folder, execution_device=CPU)


def some_to_disk(model: nn.Module, folder: Path) -> None:
    """The parts of a model with weights, every other one inside the layers on disk, as a ``device_map`` shards it."""
    shards: dict[str, str] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{shard}.") for shard in shards)
        if not inside and next(module.parameters(recurse=False), None) is not None:
            in_a_layer = any(part.isdigit() for part in name.split("."))
            shards[name] = "disk" if in_a_layer and len(shards) % 2 else "cpu"
    accelerate.dispatch_model(model, shards, main_device="cpu", offload_dir=folder, force_hooks=True)


Offload = Callable[[nn.Module, Path], None]
# What accelerate cannot run: they hand a parameter from one module to another.
NOT_RUN = {"deberta", "deberta-v2", "llama4", "siglip-vision"}
OFFLOADED: list[Any] = [
    *(
        pytest.param(*case.values, to_memory, marks=case.marks)
        for case in families.tiers((name for name in families.FAMILIES if name not in NOT_RUN), families.arrangement_of)
    ),
    *((name, offload) for name in ("bert", "gpt2", "gemma2") for offload in (to_disk, some_to_disk)),
]


def own(module: nn.Module) -> dict[str, Any]:
    """What accelerate keeps on a module."""
    hook = getattr(module, "_hf_hook", None)
    return {"forward": vars(module).get("forward"), "hook": hook, "devices": [p.device for p in module.parameters()]}


@pytest.mark.few
@pytest.mark.parametrize(("name", "offload"), OFFLOADED)
def test_an_offloaded_model_gives_what_the_plain_one_gives(name: str, offload: Offload, tmp_path: Path) -> None:
    model, inputs = families.build(name), families.inputs(name)
    style = families.FAMILIES[name].style
    scopes = (*SCOPES[style], *(() if name in feed_forwards.NOT_UNDERSTOOD else feed_forwards.SCOPES[style]))
    expected = families.measured(model, inputs, scopes=scopes, weights=True)
    with torch.no_grad():
        before = model(inputs)[0]
    offload(model, tmp_path)
    kept = {module: own(module) for module in model.modules()}
    assert any(parameter.is_meta for parameter in model.parameters())
    meter: Any = NormMeter(model)
    for _ in range(2):  # with products of the weights made, and kept
        (measured,) = meter.measure(inputs, scopes=scopes, weights=True).values()
        for scope in scopes:
            torch.testing.assert_close(measured.norms[scope], expected.norms[scope], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(measured.mixing_ratio[scope], expected.mixing_ratio[scope])
        torch.testing.assert_close(measured.weights, expected.weights)
        assert measured.convergence_delta.max() < 1e-5
    assert {module: own(module) for module in model.modules()} == kept
    with torch.no_grad():
        assert torch.equal(model(inputs)[0], before)


def test_hooks_come_off_as_before(tmp_path: Path) -> None:
    model, inputs = families.build("bert"), families.inputs("bert")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = NormAttribution(model).maps(inputs).encoder
    some_to_disk(model, tmp_path)
    method = NormAttribution(model)
    method.maps(inputs)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(method.maps(inputs).encoder, expected)


def test_offloaded_half_precision(tmp_path: Path) -> None:
    model, inputs = families.build("llama", dtype=torch.bfloat16), families.inputs("llama")
    expected = NormAttribution(model).maps(inputs).decoder
    to_disk(model, tmp_path)
    torch.testing.assert_close(NormAttribution(model).maps(inputs).decoder, expected)


def test_a_weight_that_is_not_finite_is_named() -> None:
    model, inputs = families.build("bert"), families.inputs("bert")
    with torch.no_grad():
        model.encoder.layer[1].attention.output.dense.bias[3] = float("nan")
    accelerate.cpu_offload(model, execution_device=CPU)
    with pytest.raises(NonFiniteError, match=r'weight "encoder\.layer\.1\.attention\.output\.dense\.bias"'):
        NormAttribution(model).maps(inputs)


def test_weights_that_only_a_module_around_brings_are_read_while_they_are_there() -> None:
    model, inputs = families.build("llama"), families.inputs("llama")
    expected: Any = NormAttribution(model).maps(inputs).decoder
    accelerate.cpu_offload(model, execution_device=CPU, preload_module_classes=["LlamaDecoderLayer"])
    assert torch.equal(NormAttribution(model).maps(inputs).decoder, expected)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match=r"of a Linear are on no device.*without preload_module_classes"):
        AttentionBlockAttribution(model, "atb_ff_res").maps(inputs)


def test_a_model_loaded_with_a_device_map(tmp_path: Path) -> None:
    model, inputs = families.build("gpt2"), families.inputs("gpt2")
    expected = NormAttribution(model).maps(inputs).decoder
    model.save_pretrained(tmp_path / "model")
    parts = ["transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"]
    places = dict.fromkeys(parts, "cpu") | {"transformer.h.0": "cpu", "transformer.h.1": "disk"}
    loaded = type(model).from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload")
    assert loaded.transformer.h[1].attn.c_proj.weight.is_meta
    torch.testing.assert_close(NormAttribution(loaded).maps(inputs).decoder, expected)


def test_inputs_that_differ_are_told_apart_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[set[str]] = []
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda _, own, **__: told.append(own))
    ones = torch.ones(2)
    different = ["1", 1, None, nn.ReLU(), [1, "1"], ones, ones[:, None], ones.double(), {"a": ones}, {"b": ones}]
    for value in (*different, *map(copy.deepcopy, different)):
        expect_same_inputs(SimpleNamespace(get_all_groups=lambda: [0]), value)
    assert told[: len(different)] == told[len(different) :]
    assert len(set().union(*told)) == len(different)

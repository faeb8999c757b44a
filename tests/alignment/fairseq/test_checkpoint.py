"""Reading checkpoints: what they say, and that nothing in them runs."""

import argparse
import builtins
import enum
import importlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from alignment.fairseq.checkpoint import read_checkpoint
from captum_norm import InvalidInputError
from tests.alignment.fairseq.small import settings, weights
from tests.fuzzing import bounded, limited


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


def save(path: Path, *, old: bool = False, **state: object) -> Path:
    torch.save(state, path, _use_new_zipfile_serialization=not old)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(InvalidInputError) as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "builtins.exec"])
def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path: Path, name: str, old: bool) -> None:
    marker = tmp_path / "marker"
    code = f"open({str(marker)!r}, 'w').close()"
    attack = Call(os.system, f"touch {marker}") if name == "os.system" else Call(getattr(builtins, name[9:]), code)
    path = save(tmp_path / "model.pt", old=old, model=weights(), args=attack)
    assert name.replace("os.", f"{os.name}.") in refusal(path)
    assert not marker.exists()
    torch.load(path, weights_only=False)  # the attack is real
    assert marker.exists()


@pytest.mark.parametrize("old", [False, True])
def test_what_only_looks_like_fairseqs_does_nothing(tmp_path: Path, old: bool) -> None:
    marker = tmp_path / "marker.npy"
    attack = Call(np.save, str(marker), 1)
    path = save(tmp_path / "model.pt", old=old, model=weights(), args=argparse.Namespace(**settings(), extra=attack))
    assert read_checkpoint(path).settings["source_lang"] == "fr"
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists()


@pytest.mark.parametrize("old", [False, True])
def test_what_torch_itself_does_not_build_is_refused(tmp_path: Path, old: bool) -> None:
    path = save(tmp_path / "model.pt", old=old, model=weights(), args=Call(torch.set_num_threads, 1))
    assert "torch.set_num_threads" in refusal(path)


@pytest.mark.parametrize("old", [False, True])
def test_settings_of_a_namespace(tmp_path: Path, old: bool) -> None:
    saved = weights()
    path = save(tmp_path / "model.pt", old=old, model=saved, args=argparse.Namespace(**settings(layers=[1, (2,)])))
    checkpoint = read_checkpoint(path)
    assert checkpoint.settings == settings(layers=[1, [2]])
    assert checkpoint.weights.keys() == saved.keys()
    for name, tensor in checkpoint.weights.items():
        assert torch.equal(tensor, saved[name])


def test_settings_of_a_namespace_that_the_user_has_declared_safe(tmp_path: Path) -> None:
    path = save(tmp_path / "model.pt", model=weights(), args=argparse.Namespace(**settings()))
    before = set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert read_checkpoint(path).settings == settings()
        assert set(torch.serialization.get_safe_globals()) == before | {argparse.Namespace}
    assert set(torch.serialization.get_safe_globals()) == before


def test_settings_of_the_model_go_before_those_of_the_task(tmp_path: Path) -> None:
    task = {"source_lang": "fr", "max_source_positions": 10}
    model = argparse.Namespace(max_source_positions=20)
    path = save(tmp_path / "model.pt", model=weights(), args=None, cfg={"task": task, "model": model, "bpe": None})
    assert read_checkpoint(path).settings == {"source_lang": "fr", "max_source_positions": 20}


def test_nested_settings_are_flattened(tmp_path: Path) -> None:
    model = {"_name": "transformer", "encoder": {"layers": 2}, "decoder": {"layers": 3}, "quant_noise": {"pq": 0}}
    path = save(tmp_path / "model.pt", model=weights(), cfg={"model": model, "task": None})
    expected = {"_name": "transformer", "encoder_layers": 2, "decoder_layers": 3, "quant_noise_pq": 0}
    assert read_checkpoint(path).settings == expected


def test_enumerations_and_numbers_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = types.ModuleType("fairseq.constants")
    Choices = enum.Enum("Choices", {"relu": "relu"}, module="fairseq.constants")
    monkeypatch.setattr(constants, "Choices", Choices, raising=False)
    monkeypatch.setitem(sys.modules, "fairseq", types.ModuleType("fairseq"))
    monkeypatch.setitem(sys.modules, "fairseq.constants", constants)
    cfg = {"model": {"activation_fn": Choices.relu, "best": np.float64(2.5)}}
    path = save(tmp_path / "model.pt", model=weights(), cfg=cfg)
    monkeypatch.delitem(sys.modules, "fairseq.constants")
    assert read_checkpoint(path).settings["activation_fn"] == "relu"


def test_files_that_hold_no_translation_model(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    assert "there is no file" in refusal(path)
    path.write_text("not a checkpoint\n", encoding="utf-8")
    assert "is damaged or not a torch checkpoint" in refusal(path)
    save(path, optimizer={})
    assert "contains no model" in refusal(path)
    save(path, model={"encoder.weight": 3})
    assert "contains no model" in refusal(path)
    torch.save([1, 2], path)
    assert "contains no model" in refusal(path)
    save(path, model={"decoder.weight": torch.zeros(1)}, cfg={"model": {"a": 1}})
    assert "expected an encoder and a decoder, found a decoder alone" in refusal(path)
    save(path, model={"weight": torch.zeros(1)}, cfg={"model": {"a": 1}})
    assert "found neither" in refusal(path)
    for state in ({}, {"args": None, "cfg": None}, {"cfg": {"model": None}}, {"args": 3}):
        save(path, model=weights(), **state)
        assert "contains no settings" in refusal(path)


@pytest.mark.parametrize("old", [False, True])
def test_damaged_files(tmp_path: Path, old: bool) -> None:
    path = save(tmp_path / "model.pt", old=old, model=weights(), args=argparse.Namespace(**settings()))
    content = path.read_bytes()
    for end in range(0, len(content), len(content) // 50):
        path.write_bytes(content[:end])
        assert "damaged" in refusal(path)


@pytest.mark.parametrize("old", [False, True])
def test_settings_that_hold_themselves_are_refused(tmp_path: Path, old: bool) -> None:
    value: list[Any] = []
    value.append(value)
    path = save(tmp_path / "model.pt", old=old, model=weights(), args=argparse.Namespace(**settings(extra=value)))
    assert "its settings contain each other endlessly" in refusal(path)
    # What is no part of the settings is left alone.
    path = save(tmp_path / "model.pt", old=old, model=weights(), args=settings(), extra_state=value)
    assert read_checkpoint(path).settings == settings()


@pytest.mark.parametrize(
    "name", ["builtins.bytearray", "torch.Tensor", "torch.storage.UntypedStorage", "torch._utils._rebuild_qtensor"]
)
@pytest.mark.parametrize("old", [False, True])
def test_functions_that_make_objects_of_any_size_are_refused(tmp_path: Path, name: str, old: bool) -> None:
    """Torch's reader itself would call ``bytearray(10 ** 11)``."""
    module, _, function = name.rpartition(".")
    made = getattr(importlib.import_module(module), function)
    path = save(tmp_path / "model.pt", old=old, model=weights(), args=Call(made, 0))
    with limited(), bounded(50):
        assert f"it refers to {name}" in refusal(path).replace("torch._C.", "torch.")


@pytest.mark.parametrize("old", [False, True])
def test_weights_come_without_hooks_and_gradients(tmp_path: Path, old: bool) -> None:
    model = {"encoder.parameter": nn.Parameter(torch.ones(2)), "encoder.hooked": Hooked()}
    for tensor in read_checkpoint(save(tmp_path / "model.pt", old=old, model=model, args=settings())).weights.values():
        assert (type(tensor), tensor.requires_grad, tensor._backward_hooks) == (Tensor, False, None)
        assert tensor.tolist() == [1, 1]


class Hooked:
    """Pickled as a tensor with a class in place of hooks, as one damaged byte made it."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        function, arguments = torch.ones(2).__reduce_ex__(2)
        return function, (*arguments[:-1], dict)

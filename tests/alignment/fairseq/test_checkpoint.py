"""Reading checkpoints: what they say, and that nothing in them runs."""

import argparse
import builtins
import enum
import importlib
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from alignment.fairseq import load_fairseq_checkpoint
from alignment.fairseq.checkpoint import read_checkpoint
from captum_norm import InvalidInputError
from tests.alignment.fairseq import make_reference
from tests.alignment.fairseq.small import save_checkpoint, settings, weights
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


def test_settings_of_the_model_go_before_those_of_the_task_and_nested_ones_are_flattened(tmp_path: Path) -> None:
    task = {"source_lang": "fr", "max_source_positions": 10}
    plain = argparse.Namespace(max_source_positions=20)
    path = save(tmp_path / "model.pt", model=weights(), args=None, cfg={"task": task, "model": plain, "bpe": None})
    assert read_checkpoint(path).settings == {"source_lang": "fr", "max_source_positions": 20}
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
    save(path, model={}, generator={}, vocab={})
    assert "is a checkpoint of OpenNMT-py, expected one of fairseq; docs/how-to/align-formats.md says" in refusal(path)
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
    "name",
    [
        *("builtins.bytearray", "torch.Tensor", "torch.storage.UntypedStorage", "torch._utils._rebuild_qtensor"),
        "torch.set_num_threads",
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_other_functions_are_refused_as_those_that_make_objects_of_any_size(
    tmp_path: Path, name: str, old: bool
) -> None:
    """Torch's reader itself would call ``bytearray(10 ** 11)``."""
    module, _, function = name.rpartition(".")
    made = getattr(importlib.import_module(module), function)
    path = save(tmp_path / "model.pt", old=old, model=weights(), args=Call(made, 1))
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


@pytest.mark.parametrize("case", make_reference.CASES, ids=lambda case: f"{case.name}-{case.form}")
def test_model_computes_what_fairseq_computes(case: make_reference.Case, reference: Path) -> None:
    same_as_fairseq(reference / f"{case.name}.pt", reference / case.name)


@pytest.mark.parametrize("program", ["train", pytest.param("hydra_train", marks=pytest.mark.rest)])
def test_checkpoint_of_a_training(program: str, fairseq_python: Path, tmp_path: Path) -> None:
    def run(*command: str) -> None:
        variables = os.environ | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "PYTHONWARNINGS": "ignore"}
        command = (str(fairseq_python), *command)
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]

    for language, symbols in (("fr", "abcdefghijkl"), ("en", "abcdefghijklmnopqrst")):
        lines = [" ".join(symbols[start:] + symbols[:start]) + "\n" for start in range(len(symbols))]
        (tmp_path / f"text.{language}").write_text("".join(lines[:12]), encoding="utf-8")
    texts = "--trainpref=text", "--validpref=text"
    run("-m", "fairseq_cli.preprocess", "--source-lang=fr", "--target-lang=en", *texts, "--destdir=data")
    run("-m", f"fairseq_cli.{program}", *TRAININGS[program].split())
    run(make_reference.__file__, str(tmp_path), "checkpoint_last.pt")
    same_as_fairseq(tmp_path / "checkpoint_last.pt", tmp_path / "data")


TRAININGS = {
    "train": """data --arch=transformer_iwslt_de_en --encoder-layers=2 --decoder-layers=2 --encoder-embed-dim=16
        --decoder-embed-dim=16 --encoder-attention-heads=2 --share-decoder-input-output-embed --optimizer=adam --lr=0.1
        --max-tokens=200 --max-update=2 --save-dir=. --cpu""",
    "hydra_train": """task=translation task.data=${hydra:runtime.cwd}/data task.source_lang=fr task.target_lang=en
        +model._name=transformer +model.encoder_layers=2 +model.decoder_layers=2 +model.encoder_embed_dim=16
        +model.decoder_embed_dim=16 +model.encoder_attention_heads=2 +model.decoder_attention_heads=4
        +model.activation_fn=gelu criterion=cross_entropy optimizer=adam lr_scheduler=fixed optimization.lr=[0.1]
        dataset.max_tokens=200 optimization.max_update=2 checkpoint.save_dir=${hydra:runtime.cwd} common.cpu=true
        distributed_training.distributed_world_size=1""",
}


def same_as_fairseq(checkpoint: Path, data: Path) -> None:
    """The model is what fairseq, which wrote the arrays beside the checkpoint, computes."""
    expected = {name: torch.from_numpy(array) for name, array in np.load(checkpoint.with_suffix(".npz")).items()}
    model: Any = load_fairseq_checkpoint(checkpoint, data, codes=False)[0]
    model.set_attn_implementation("eager")
    source, target = make_reference.batch()
    left = source.ne(make_reference.PAD)
    right = left.flip(1)
    moved = torch.full_like(source, make_reference.PAD).masked_scatter(right, source[left])
    with torch.no_grad():
        found = model(input_ids=moved, attention_mask=right.long(), decoder_input_ids=target, output_attentions=True)
    encoded, logits, cross = expected["encoder"], expected["logits"], expected["cross"]
    steps = target.ne(make_reference.PAD)
    # Rounding in float32, of sums in another order, through three layers; relative to the largest logit.
    close(found.logits[steps], logits[steps], 1e-5 * float(logits[steps].abs().max()))
    close(found.encoder_last_hidden_state[right], encoded[left], 1e-5)
    attention = torch.stack(found.cross_attentions, 1)
    for example in range(len(source)):
        real = attention[example, :, :, steps[example]][..., right[example]]
        close(real, cross[example, :, :, steps[example]][..., left[example]], 1e-6)


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_the_tokenizer_has_the_ids_of_fairseq(reference: Path) -> None:
    _, tokenizer = load_fairseq_checkpoint(reference / "post-learned-tied.pt", reference / "post-learned-tied")
    assert (tokenizer.source_language, tokenizer.target_language) == ("fr", "en")
    [source] = tokenizer.encode_source([["word4", "word11", "word12", "word19"]])
    [target] = tokenizer.encode_target([["word4", "word11", "word12", "word19"]])
    assert (source.ids, target.ids) == ([4, 11, 3, 3, 2], [4, 11, 12, 19, 2])


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    data = save_checkpoint(tmp_path)
    (data / "dict.en.txt").rename(data / "dict.de.txt")
    with pytest.raises(InvalidInputError, match=r"found no dict\.en\.txt"):
        load_fairseq_checkpoint(data / "model.pt", data)
    (save_checkpoint(data, target_lang=None) / "dict.en.txt").unlink()
    with pytest.raises(InvalidInputError, match=r"does not name its languages.*expected one pair in .*, found none"):
        load_fairseq_checkpoint(data / "model.pt", data)
    for pair in ("fr-de", "fr-en"):
        (data / f"train.{pair}.fr.idx").touch()
    with pytest.raises(InvalidInputError, match=r"expected one pair in .*, found fr-de, fr-en"):
        load_fairseq_checkpoint(data / "model.pt", data)

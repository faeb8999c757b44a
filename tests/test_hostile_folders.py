"""Folders of models and adapters that would run code, never end, or fill the memory, are refused in one sentence."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from captum_norm.cli import main
from captum_norm.errors import InvalidInputError
from captum_norm.loading import limits, load, load_model, load_poolings, load_sentence_transformer
from tests.fuzzing import bounded, limited
from tests.tiny import bert_config, edit_json, save_tiny

POOLING = "sentence_transformers.sentence_transformer.modules.Pooling"
# It tries all ways to share the letters among the groups.
ENDLESS = r"(\w+\.?)+(\w+\.?)+!"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(transformers.BertModel(bert_config()), tmp_path_factory.mktemp("base"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(transformers.BertModel(bert_config()), tmp_path / "model")


def adapter(base: Path, folder: Path, config: Any, **changes: Any) -> Path:
    """An adapter of a model, and changes of its settings."""
    model = transformers.AutoModel.from_pretrained(base)
    peft.get_peft_model(model, config).save_pretrained(str(folder))
    edit_json(folder / "adapter_config.json", **changes)
    return folder


def refusal(load: Callable[[str], object], folder: Path) -> str:
    with pytest.raises(InvalidInputError) as caught, limited(20), bounded():
        load(str(folder))
    message = str(caught.value)
    assert str(folder) in message
    assert message.isprintable()
    assert len(message) < 500
    return message


@pytest.mark.parametrize("load", [load_sentence_transformer, load_poolings])
@pytest.mark.parametrize("kind", ["harmful.Pooling", "sentence_transformers.", "sentence_transformers/../x.Pooling"])
def test_a_sentence_encoder_runs_no_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[str], object], kind: str
) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "harmful.py").write_text("raise SystemExit('was run')", encoding="utf-8")
    modules = [{"idx": 0, "name": "0", "path": "", "type": POOLING}, {"idx": 1, "name": "1", "path": "", "type": kind}]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    expected = f"its modules.json names '{kind}', which is no part of sentence-transformers and could run code"
    assert expected in refusal(load, folder)
    assert "harmful" not in sys.modules


def test_a_router_runs_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "harmful.py").write_text("raise SystemExit('was run')", encoding="utf-8")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.Router"}]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    routes = {"types": {"0": "harmful.Pooling"}, "structure": {"query": ["0"]}, "parameters": {}}
    (folder / "router_config.json").write_text(json.dumps(routes), encoding="utf-8")
    assert "harmful.Pooling" in refusal(load_sentence_transformer, folder)
    assert "harmful" not in sys.modules


def test_older_versions_of_sentence_transformers_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "modules.json").write_text("[]", encoding="utf-8")
    monkeypatch.setattr("sentence_transformers.__version__", "5.9.1")
    assert "got sentence-transformers 5.9.1; expected 6 or later" in refusal(load_sentence_transformer, folder)


LORA = {"target_modules": ["query"], "r": 1}


@pytest.mark.few
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"target_modules": ENDLESS}, "its regular expressions take more than 1 s, "),
        ({"exclude_modules": ENDLESS}, "its regular expressions take more than 1 s, "),
        ({"rank_pattern": {ENDLESS: 1}}, "its regular expressions take more than 1 s, "),
        ({"layers_to_transform": [0], "layers_pattern": ENDLESS}, "its regular expressions take more than 1 s, "),
        ({"modules_to_save": [ENDLESS]}, "its regular expressions take more than 1 s, "),
        ({"init_lora_weights": "pissa_niter_1000000"}, "got 1000000 iterations of PiSSA; expected at most 99"),
        ({"loftq_config": {"loftq_iter": 10**6}}, "got loftq_iter=1000000 in its settings; expected at most 100"),
        ({"layer_replication": [[0, 10**9]]}, "got layer_replication layers=1000000000 in its settings; expected"),
        ({"r": 10**9}, "got r=1000000000 in its settings; expected at most 65,536"),
        ({"r": 60000}, "size mismatch"),
        ({"rank_pattern": {"query": 1e9}}, "got query=1000000000 in its settings; expected at most 65,536"),
        ({"megatron_config": {}, "megatron_core": "harmful"}, "its megatron_config imports Megatron"),
        ({"base_model_name_or_path": "/dev/zero"}, "/dev/zero: it is a file; expected a folder"),
    ],
)
def test_settings_of_an_adapter(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: str
) -> None:
    monkeypatch.setattr(limits, "_MOST_SECONDS", 1)
    config: Any = peft.LoraConfig(**LORA)  # type: ignore[arg-type]
    assert expected in refusal(load_model, adapter(base, tmp_path / "adapter", config, **changes))


INITIAL = ("gaussian", "eva", "orthogonal", "olora", "pissa", "pissa_niter_16")


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": r"(?:.*?(?:encoder|text).*?(?:attention|mlp).*?(?:query|key).*?)|(?:\bmodel\.[\d]{1,}\.q)"},
        {"rank_pattern": {r".*\.layer\.[01]\..*query": 1}},
        *({"init_lora_weights": name} for name in INITIAL),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(eva|EVA):UserWarning")
def test_usual_settings_of_an_adapter(base: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    config: Any = peft.LoraConfig(**LORA | {"r": 2} | changes)  # type: ignore[arg-type]
    folder = adapter(base, tmp_path / "adapter", config)
    expected = peft.PeftModel.from_pretrained(transformers.AutoModel.from_pretrained(base), str(folder)).eval()
    torch.manual_seed(0)
    found: Any = load_model(str(folder))
    if "niter" not in str(changes):  # whose first weights are random
        assert torch.equal(found(torch.tensor([[2, 5, 3]]))[0], expected(torch.tensor([[2, 5, 3]]))[0])


def test_virtual_tokens_are_those_of_the_file(base: Path, tmp_path: Path) -> None:
    few = peft.PrefixTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=2)
    load_model(str(adapter(base, tmp_path / "adapter", few)))
    edit_json(tmp_path / "adapter" / "adapter_config.json", num_virtual_tokens=60000)
    assert "its virtual tokens have 960,000 values, but its files fewer" in refusal(load_model, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_hidden_layers": 60000}, "got num_hidden_layers=60000 in its settings; expected at most 1,024"),
        ({"deep": {"num_experts": 10**30}}, "got num_experts=1"),
        (
            {"num_layers": 1000, "num_experts": 1000},
            "got 1000 layers of 1000 experts in its settings; expected 131,072",
        ),
        ({"num_labels": 10**9}, "got num_labels=1000000000 in its settings; expected at most 1,048,576"),
        ({"vocab_size": 10**10}, "its settings have 80,000,001,"),
        ({"max_position_embeddings": 10**9}, "its settings have 8,000,00"),
    ],
)
def test_settings_of_a_model(folder: Path, changes: dict[str, Any], expected: str) -> None:
    edit_json(folder / "config.json", **changes)
    assert expected in refusal(load, folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "adapter_config.json"])
def test_pipes_devices_and_huge_files(folder: Path, name: str) -> None:
    file = folder / name
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/zero")
    assert f"its {name} is no regular file" in refusal(load, folder)
    file.unlink()
    os.mkfifo(file)
    assert f"its {name} is no regular file" in refusal(load, folder)
    file.unlink()
    with file.open("wb") as stream:
        stream.truncate(1 << 33)
    expected = "more than 256 MiB" if name.endswith("json") else "cannot load the weights of"
    assert expected in refusal(load, folder)


def test_commands_say_so_and_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(folder / "config.json", num_hidden_layers=60000)
    assert main(["explain", "a dog", "--model", str(folder)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "num_hidden_layers=60000" in told

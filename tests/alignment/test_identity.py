"""What tells two models, configurations and tokenizers apart, and what does not."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alignment.identity import configuration_digest, tokenizer_digest, weights_digest
from captum_norm.errors import InvalidInputError
from captum_norm.loading import load_tokenizer
from captum_norm.models import Layout, Site, layouts, register_layout
from tests.alignment.translation_models import FAMILIES
from tests.lab.analysis.small import bert, tokenizer


def test_every_value_type_shape_and_name_of_the_weights_counts() -> None:
    def digest(**tensors: torch.Tensor) -> str:
        module = torch.nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        return weights_digest(module)

    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    others = [
        digest(a=values),
        digest(b=values),
        digest(a=values.T),
        digest(a=values.reshape(3, 2)),
        digest(a=values.view(torch.int32)),
        digest(a=values.bfloat16()),
        digest(a=values + torch.tensor([[0, 0, 0], [0, 0, 1e-6]])),
        digest(a=values, b=torch.zeros(0)),
        digest(a=values, adapter=torch.ones(1)),
    ]
    assert len(set(others)) == len(others)
    assert digest(a=values.clone()) == others[0]
    assert digest(a=values.T.contiguous().T) == others[0]


def _adapter(alpha: int) -> Callable[[Any], object]:
    told = SimpleNamespace(to_dict=lambda: {"lora_alpha": alpha, "target_modules": {"query", "value"}})
    return lambda model: setattr(model, "peft_config", {"default": told})


OUTPUT = Site.parse("output")
CHANGES: dict[str, Callable[[Any], object]] = {
    "activation": lambda model: setattr(model.config, "hidden_act", "relu"),
    "epsilon": lambda model: setattr(model.config, "layer_norm_eps", 1e-5),
    "one layer's epsilon": lambda model: setattr(model.encoder.layer[1].output.LayerNorm, "eps", 1e-3),
    "one layer's activation": lambda model: setattr(model.encoder.layer[0].output, "dense", torch.nn.ReLU()),
    "an adapter": _adapter(8),
    "another adapter": _adapter(16),
    "a layout": lambda _: register_layout("BertLayer", Layout("attention", "attention.output", OUTPUT, OUTPUT)),
    "another layout": lambda _: register_layout("BertLayer", Layout("attention", "output.dense", OUTPUT, OUTPUT)),
}


def test_whatever_decides_how_the_weights_are_used_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_layouts", {})
    digests = [configuration_digest(bert())]
    for change in CHANGES.values():
        layouts._layouts.clear()
        model = bert()
        change(model)
        digests.append(configuration_digest(model))
    assert len(set(digests)) == len(digests)


def test_neither_place_nor_weights_nor_other_layouts_are_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_layouts", {})
    expected = configuration_digest(bert())
    register_layout("NoLayerOfIt", Layout("attention", "output", OUTPUT, OUTPUT))
    moved = bert(seed=3)
    moved.config._name_or_path = "elsewhere"
    assert configuration_digest(moved) == expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer's folder."""
    tokenizer().save_pretrained(tmp_path / "first")
    return tmp_path / "first"


def _exchange(told: Any) -> None:
    vocabulary = told["model"]["vocab"]
    vocabulary["the"], vocabulary["a"] = vocabulary["a"], vocabulary["the"]


FILES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "vocabulary": ("tokenizer.json", _exchange),
    "case": ("tokenizer_config.json", lambda told: told.update(do_lower_case=False)),
    "special tokens": ("tokenizer_config.json", lambda told: told.update(sep_token="[MASK]")),
    "length": ("tokenizer_config.json", lambda told: told.update(model_max_length=9)),
}


@pytest.mark.few
@pytest.mark.parametrize("change", FILES)
def test_whatever_decides_the_tokens_counts(folder: Path, change: str) -> None:
    expected = tokenizer_digest(load_tokenizer(str(folder)))
    name, edit = FILES[change]
    told = json.loads((folder / name).read_text(encoding="utf-8"))
    edit(told)
    (folder / name).write_text(json.dumps(told), encoding="utf-8")
    assert tokenizer_digest(load_tokenizer(str(folder))) != expected


def test_neither_place_nor_use_nor_chat_is_the_tokenizer(folder: Path) -> None:
    first = load_tokenizer(str(folder))
    expected = tokenizer_digest(first)
    first(["a long text", "short"], truncation=True, max_length=3, padding=True)
    assert tokenizer_digest(first) == expected
    first.chat_template = "{{ messages }}"
    assert tokenizer_digest(first) == expected
    assert tokenizer_digest(load_tokenizer(str(folder.rename(folder.with_name("second"))))) == expected


@pytest.mark.few
@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_tokenizer_has_a_digest_that_its_files_decide(name: str, tmp_path: Path) -> None:
    found = set()
    for place in ("first", "second"):
        (tmp_path / place).mkdir()
        made = FAMILIES[name].tokenizer(tmp_path / place)
        digests = [tokenizer_digest(made)]
        made(["das Haus"], truncation=True, max_length=3, padding=True)
        found |= {*digests, tokenizer_digest(made)}
    assert len(found) == 1
    made.add_tokens(["Häuser"])
    assert tokenizer_digest(made) not in found


def test_tokenizer_that_cannot_be_saved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tokenizer()), "save_pretrained", full)
    with pytest.raises(InvalidInputError, match=r"cannot hash this .*, which cannot be saved: .*No space left"):
        tokenizer_digest(tokenizer())

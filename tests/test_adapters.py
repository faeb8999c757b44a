"""PEFT adapters are loaded by their folder, onto their base model; a half-loaded one is refused in one sentence."""

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from captum_norm.errors import InvalidInputError
from captum_norm.loading import load, load_model
from tests.lab.analysis.small import randomized
from tests.tiny import bert_config, edit_json, save_tiny, tokenizer

IDS = torch.tensor([[2, 5, 7, 3]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = randomized(transformers.BertModel(bert_config()), torch.float32)
    return save_tiny(model, tmp_path_factory.mktemp("base"))


def adapted(base: Path) -> Any:
    """An adapter of a classifier with random weights."""
    torch.manual_seed(1)
    model = transformers.BertForSequenceClassification.from_pretrained(base, num_labels=3)
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "output.dense"], r=2)
    found = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name or "classifier" in name:
                parameter.normal_(std=0.5)
    return found.eval()


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    adapted(base).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def refusal(folder: Path) -> str:
    with pytest.raises(InvalidInputError) as caught:
        load(str(folder))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) <= 400
    return message


def test_an_adapter_and_its_head_are_loaded_onto_the_base_model(base: Path, tmp_path: Path) -> None:
    whole = adapted(base)
    whole.save_pretrained(tmp_path / "adapter")
    model, words = load(str(tmp_path / "adapter"))
    assert not model.training
    assert torch.equal(model(IDS).logits, whole(IDS).logits)
    assert model.config.num_labels == 3
    assert words.get_vocab() == tokenizer().get_vocab()


def test_the_class_is_that_of_the_adapter(base: Path, tmp_path: Path) -> None:
    plain = peft.get_peft_model(
        transformers.BertModel.from_pretrained(base), peft.LoraConfig(target_modules=["value"], r=1)
    )
    plain.save_pretrained(str(tmp_path))
    model: Any = load_model(str(tmp_path))
    assert type(model.get_base_model()) is transformers.BertModel
    torch.testing.assert_close(model(IDS)[0], plain.eval()(IDS)[0], rtol=0, atol=0)


def test_a_base_model_and_a_tokenizer_beside_the_adapter_are_taken(base: Path, folder: Path) -> None:
    expected = load_model(str(folder))(IDS).logits
    shutil.copytree(base, folder / "base")
    edit_json(folder / "adapter_config.json", base_model_name_or_path="base")
    assert torch.equal(load_model(str(folder))(IDS).logits, expected)
    words = tokenizer()
    words.add_tokens(["wolf"])
    words.save_pretrained(folder)
    assert load(str(folder))[1].tokenize("wolf") == ["wolf"]


def test_an_adapter_that_is_half_there_is_refused(folder: Path) -> None:
    name = "base_model.model.bert.encoder.layer.1.attention.self.query.lora_A.weight"
    weights = load_file(folder / "adapter_model.safetensors")
    assert name in weights

    def without(name: str) -> dict[str, Any]:
        return {key: tensor for key, tensor in weights.items() if key != name}

    short, other = name.replace(".weight", ""), name.replace("layer.1", "layer.7")
    changes: list[tuple[dict[str, Any], str]] = [
        (without(name), f"adapter {folder}: 1 tensors are missing in BertForSequenceClassification, {short}"),
        (weights | {other: weights[name].clone()}, "1 tensors are unknown in BertForSequenceClassification, base"),
        (weights | {name: torch.zeros(3, 8)}, "size mismatch for"),
        ({key: tensor[:0].clone() for key, tensor in weights.items()}, "size mismatch for"),
        (without("base_model.model.classifier.weight"), f"{folder} is an adapter: cannot load the weights of "),
    ]
    for changed, message in changes:
        save_file(changed, folder / "adapter_model.safetensors")
        assert message in refusal(folder)
    (folder / "adapter_model.safetensors").unlink()
    assert refusal(folder).startswith(f"cannot load the adapter {folder}: ")


def test_an_adapter_without_its_base_model_is_refused(folder: Path, tmp_path: Path) -> None:
    edit_json(folder / "adapter_config.json", base_model_name_or_path=str(tmp_path / "gone"))
    assert refusal(folder) == (
        f"{folder} is an adapter: cannot load the model {tmp_path / 'gone'}: there is no such folder"
    )
    edit_json(folder / "adapter_config.json", base_model_name_or_path=None)
    assert refusal(folder) == f"cannot load the adapter {folder}: its adapter_config.json names no base model"
    (folder / "adapter_config.json").write_text("{", encoding="utf-8")
    assert refusal(folder).startswith(f"cannot load the adapter {folder}: ")


def test_peft_is_named_if_it_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    assert refusal(folder).endswith("is an adapter, which needs PEFT: pip install peft")

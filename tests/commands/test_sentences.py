"""``--target`` and ``--against`` of a sentence encoder are texts, whose similarity is explained."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import tensor

from captum_norm import DecompX, Difference, NormAttribution, SentenceSimilarity, compare
from captum_norm.cli import main
from captum_norm.loading import load_poolings, load_sentence_transformer
from tests.commands.calls import refused
from tests.sentences import sentence_transformer
from tests.tiny import bert_config, save_tiny

TEXT = "the dog sees a cat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that pools its first position, and puts a prompt before every text."""
    folder = tmp_path_factory.mktemp("model")
    prompts = {"prompts": {"query": "the cat "}, "default_prompt_name": "query"}
    sentence_transformer(folder / "start", Pooling(8, "cls"), **prompts).float().save(str(folder))
    return folder


def test_a_similarity_is_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = Path("out.json")
    words = ["explain", TEXT, "--model", str(folder), "--method", "decompx", "--out", str(out)]
    assert main([*words, "--target", "a dog", "--against", "the cat"]) == 0
    near = SentenceSimilarity(load_sentence_transformer(str(folder)), "a dog", "the cat")
    expected = DecompX(near).decompose(TEXT, target=Difference(0, 1))
    found = json.loads(out.read_text(encoding="utf-8"))
    assert tensor(found["scores"]).allclose(expected.scores[0], rtol=1e-4, atol=1e-6)
    assert found["tokens"][:3] == ["[CLS]", "the", "cat"]
    assert found["position"] == "first"
    assert "explained: a dog − the cat = " in capsys.readouterr().out


def test_the_default_position_is_the_pooling(folder: Path) -> None:
    words = ["explain", TEXT, "--model", str(folder), "--out", "out.json"]
    assert main(words) == 0
    found = json.loads(Path("out.json").read_text(encoding="utf-8"))
    model = load_sentence_transformer(str(folder))
    expected = NormAttribution(model[0].auto_model).attribute(model.tokenizer(TEXT, return_tensors="pt"), position=0)
    assert found["position"] == "first"
    assert tensor(found["scores"]).allclose(expected[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "poolings"),
    [
        ({"pooling_mode": ["max", "cls"]}, ["max", "cls"]),
        ({"pooling_mode": "max"}, ["max"]),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, ["mean", "max"]),
        ({"pooling_mode_weightedmean_tokens": True, "pooling_mode_cls_token": False}, ["weightedmean"]),
    ],
)
def test_a_pooling_of_no_one_position_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], poolings: list[str]
) -> None:
    copied = shutil.copytree(folder, Path("model"))
    (copied / "1_Pooling" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert load_poolings(str(copied)) == poolings
    told = refused(capsys, "explain", TEXT, "--model", str(copied))
    assert (
        told
        == f"the pooling of {copied} is {' and '.join(poolings)}, not one position; choose a position, such as mean"
    )
    assert main(["explain", TEXT, "--model", str(copied), "--position", "1"]) == 0


def test_methods_are_compared_on_the_similarity_to_a_text(folder: Path) -> None:
    out = Path("out.json")
    words = ["compare", TEXT, "--model", str(folder), "--methods", "decompx,weights", "--out", str(out)]
    assert main([*words, "--target", "a dog"]) == 0
    near = SentenceSimilarity(load_sentence_transformer(str(folder)), "a dog")
    options: dict[str, Any] = {"methods": ["decompx", "weights"], "target": 0, "name": str(folder)}
    assert json.loads(out.read_text(encoding="utf-8"))["outputs"][0]["name"] == "a dog"
    assert compare(near, TEXT, **options).outputs[0].name == "a dog"


def test_other_models_are_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:

    plain = save_tiny(transformers.BertModel(bert_config()), Path("plain"))
    assert load_sentence_transformer(str(plain)) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "sentence_transformers", None)
        words = ["explain", TEXT, "--model", str(folder), "--method", "decompx", "--target", "a dog"]
        told = refused(capsys, *words)
    assert "is a sentence encoder, which needs sentence-transformers: pip install" in told

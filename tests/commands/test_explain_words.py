"""``captum-norm explain`` of texts, words, heads, dtypes, by every method, and of similarities of sentence encoders."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import tensor

from captum_norm import DecompX, Difference, NormAttribution, SentenceSimilarity, compare, explain
from captum_norm.cli import main
from captum_norm.loading import load, load_poolings, load_sentence_transformer
from captum_norm.text.words import words_of
from tests.commands.calls import TEXT, TOKENS, refused, written
from tests.commands.calls import explain as explained
from tests.sentences import sentence_transformer
from tests.tiny import bert_config, save_tiny

pytestmark = pytest.mark.usefixtures("wide_terminal")

SENTENCE = "Don't stop the unbelievably nice guitar."
WORDS = ["[CLS]", "Don't", "stop", "the", "unbelievably", "nice", "guitar", ".", "[SEP]"]


def test_several_texts_and_lines_of_files(bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lines.txt").write_text(f"{TEXT}\n\n the cat runs \n", encoding="utf-8")
    files = [str(tmp_path / name) for name in ("two.json", "lines.json", "whole.json")]
    assert explained("the cat runs", "--model", bert, "--out", files[0]) == 0
    printed = capsys.readouterr().out
    assert f"text 0: {TEXT}" in printed
    assert "text 1: the cat runs" in printed
    lines = str(tmp_path / "lines.txt")
    assert explained("--lines", "--model", bert, "--out", files[1], text=lines) == 0
    assert explained("--model", bert, "--out", files[2], text=lines) == 0
    two, own = (json.loads(Path(name).read_text(encoding="utf-8")) for name in files[:2])
    assert two == own
    assert [one["text"] for one in own] == [TEXT, "the cat runs"]
    for one in own:
        alone = explain(one["text"], bert)
        assert one["tokens"] == alone.tokens[0]
        torch.testing.assert_close(torch.tensor(one["scores"]), alone.scores[0], rtol=1e-5, atol=1e-6)
    assert "\n" in written(Path(files[2]))["text"], "without --lines a file is one text"


def test_words_have_the_sums_of_their_tokens(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("e.json", "e.csv", "e.html", "e.png")]
    out = [word for name in files for word in ("--out", name)]
    assert explained("--words", *out, text=SENTENCE) == 0
    content, tokens = written(Path(files[0])), explain(SENTENCE)
    assert content["tokens"] == WORDS
    model, tokenizer = load()
    words = words_of(tokenizer, tokenizer(SENTENCE)["input_ids"], SENTENCE)
    torch.testing.assert_close(torch.tensor(content["scores"]), words.scores(tokens.scores)[0])
    maps = torch.tensor(content["map"]["values"])
    of_tokens = NormAttribution(model).maps(tokenizer(SENTENCE, return_tensors="pt")).self_attention
    torch.testing.assert_close(maps, words.maps(of_tokens)[0])
    assert len(Path(files[1]).read_text(encoding="utf-8").splitlines()) == 1 + len(WORDS)
    page = Path(files[2]).read_text(encoding="utf-8")
    assert "unbelievably" in page
    assert '"bly"' in page, "a page has the tokens, too"


def test_the_highest_scores_alone_are_printed(bert: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explained("--model", bert, "--top", "2") == 0
    best = explain(TEXT, bert).top(2)
    rows = capsys.readouterr().out.splitlines()[-2:]
    for row, (token, *_) in zip(rows, best, strict=True):
        index, name = row.split()[:2]
        assert (TOKENS[int(index)], name) == (token, token)


def test_dtype(bert: str) -> None:
    path = Path("e.json")
    assert explained("--model", bert, "--dtype", "float64", "--out", str(path)) == 0
    model, tokenizer = load(bert)
    expected = NormAttribution(model.double()).attribute(tokenizer(TEXT, return_tensors="pt"))
    assert written(path)["scores"] == expected[0].tolist()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layer", "0", "--method", "saliency"], "saliency has no layers"),
        (["--top", "0"], "--top"),
        (["--dtype", "int8"], "--dtype"),
        (["--dtype", "float64", "--quantize", "int8"], "which decides the dtype"),
        (["--device", "moon"], "moon"),
        (["--method", "saliency", "--scope", "attn"], "scope"),
        (["--method", "gradients"], "expected one of norm"),
        (["a cat", "--out", "two.png"], "got 2 texts and a .png file"),
        (["--words", "--generate", "3"], "got --words with an answer"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    bert: str,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    out = [] if "--out" in words else ["--out", "e.json"]
    error = refused(capsys, "explain", TEXT, *words, "--model", bert, *out)
    assert message in error
    assert len(error) <= 1000
    assert list(tmp_path.iterdir()) == []


SIMILAR = "the dog sees a cat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that pools its first position, and puts a prompt before every text."""
    folder = tmp_path_factory.mktemp("model")
    prompts = {"prompts": {"query": "the cat "}, "default_prompt_name": "query"}
    sentence_transformer(folder / "start", Pooling(8, "cls"), **prompts).float().save(str(folder))
    return folder


def test_a_similarity_is_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = Path("out.json")
    words = ["explain", SIMILAR, "--model", str(folder), "--method", "decompx", "--out", str(out)]
    assert main([*words, "--target", "a dog", "--against", "the cat"]) == 0
    near = SentenceSimilarity(load_sentence_transformer(str(folder)), "a dog", "the cat")
    expected = DecompX(near).decompose(SIMILAR, target=Difference(0, 1))
    found = json.loads(out.read_text(encoding="utf-8"))
    assert tensor(found["scores"]).allclose(expected.scores[0], rtol=1e-4, atol=1e-6)
    assert found["tokens"][:3] == ["[CLS]", "the", "cat"]
    assert found["position"] == "first"
    assert "explained: a dog − the cat = " in capsys.readouterr().out


def test_the_default_position_is_the_pooling(folder: Path) -> None:
    words = ["explain", SIMILAR, "--model", str(folder), "--out", "out.json"]
    assert main(words) == 0
    found = json.loads(Path("out.json").read_text(encoding="utf-8"))
    model = load_sentence_transformer(str(folder))
    expected = NormAttribution(model[0].auto_model).attribute(model.tokenizer(SIMILAR, return_tensors="pt"), position=0)
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
    told = refused(capsys, "explain", SIMILAR, "--model", str(copied))
    assert (
        told
        == f"the pooling of {copied} is {' and '.join(poolings)}, not one position; choose a position, such as mean"
    )
    assert main(["explain", SIMILAR, "--model", str(copied), "--position", "1"]) == 0


def test_methods_are_compared_on_the_similarity_to_a_text(folder: Path) -> None:
    out = Path("out.json")
    words = ["compare", SIMILAR, "--model", str(folder), "--methods", "decompx,weights", "--out", str(out)]
    assert main([*words, "--target", "a dog"]) == 0
    near = SentenceSimilarity(load_sentence_transformer(str(folder)), "a dog")
    options: dict[str, Any] = {"methods": ["decompx", "weights"], "target": 0, "name": str(folder)}
    assert json.loads(out.read_text(encoding="utf-8"))["outputs"][0]["name"] == "a dog"
    assert compare(near, SIMILAR, **options).outputs[0].name == "a dog"


def test_other_models_are_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:

    plain = save_tiny(transformers.BertModel(bert_config()), Path("plain"))
    assert load_sentence_transformer(str(plain)) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "sentence_transformers", None)
        words = ["explain", SIMILAR, "--model", str(folder), "--method", "decompx", "--target", "a dog"]
        told = refused(capsys, *words)
    assert "is a sentence encoder, which needs sentence-transformers: pip install" in told

"""``captum-norm explain`` of several texts, words, heads, dtypes, by every method that ``compare`` has."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from captum_norm import NormAttribution, explain, words_of
from captum_norm.loading import load
from captum_norm.methods import METHODS
from tests.commands.calls import TEXT, TOKENS, refused, written
from tests.commands.calls import explain as explained

pytestmark = pytest.mark.usefixtures("wide_terminal")

SENTENCE = "Don't stop the unbelievably nice guitar."
WORDS = ["[CLS]", "Don't", "stop", "the", "unbelievably", "nice", "guitar", ".", "[SEP]"]


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.maps])
def test_every_method_of_compare(classifier: str, tmp_path: Path, method: str) -> None:
    path = tmp_path / "e.json"
    assert explained("--model", classifier, "--method", method, "--out", str(path)) == 0
    content = written(path)
    assert (content["method"], content["tokens"]) == (method, TOKENS)
    expected = explain(TEXT, classifier, method=method)
    assert content["scores"] == expected.scores[0].tolist()
    # Lasso finds nothing in what the tiny model does.
    assert any(score != 0 for score in content["scores"]) or method == "lime"


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


@pytest.mark.parametrize(
    ("given", "score"), [([], "sum"), (["--word-score", "mean"], "mean"), (["--word-score", "max"], "max")]
)
def test_words_have_the_scores_of_their_tokens(tmp_path: Path, given: list[str], score: Any) -> None:
    files = [str(tmp_path / name) for name in ("e.json", "e.csv", "e.html", "e.png")]
    out = [word for name in files for word in ("--out", name)]
    assert explained("--words", *given, *out, text=SENTENCE) == 0
    content, tokens = written(Path(files[0])), explain(SENTENCE)
    assert content["tokens"] == WORDS
    model, tokenizer = load()
    words = words_of(tokenizer, tokenizer(SENTENCE)["input_ids"], SENTENCE)
    expected = words.scores(tokens.scores, score)[0]
    torch.testing.assert_close(torch.tensor(content["scores"]), expected)
    maps = torch.tensor(content["map"]["values"])
    of_tokens = NormAttribution(model).maps(tokenizer(SENTENCE, return_tensors="pt")).self_attention
    torch.testing.assert_close(maps, words.maps(of_tokens, score)[0])
    assert len(Path(files[1]).read_text(encoding="utf-8").splitlines()) == 1 + len(WORDS)
    page = Path(files[2]).read_text(encoding="utf-8")
    assert "unbelievably" in page
    assert '"bly"' in page, "a page has the tokens, too"


def test_norms_of_words_are_of_vectors_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e.json"
    given = ["--words", "--word-score", "norm", "--layer", "3", "--position", "first", "--out", str(path)]
    assert explained(*given, text=SENTENCE) == 0
    model, tokenizer = load()
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    words = words_of(tokenizer, inputs["input_ids"][0].tolist(), SENTENCE)
    maps = NormAttribution(model).maps(inputs, layers=[3], segments=words.segments()).encoder
    assert maps is not None
    content = written(path)
    assert content["tokens"] == WORDS
    torch.testing.assert_close(torch.tensor(content["scores"]), maps[0, 0, 0])
    summed = explain(SENTENCE, layer=3, position="first").words()
    assert (torch.tensor(content["scores"]) < summed.scores[0] + 1e-6).all()
    assert torch.tensor(content["map"]["values"]).shape == (1, len(WORDS), len(WORDS))
    # An index is that of a token.
    place = words.numbers.index(WORDS.index("unbelievably")) + 2
    given[given.index("first")] = str(place)
    assert explained(*given, text=SENTENCE) == 0
    content = written(path)
    row = words.rows(maps)[0, 0, WORDS.index("unbelievably")]
    torch.testing.assert_close(torch.tensor(content["scores"]), row)
    assert content["position"] == WORDS.index("unbelievably")
    message = refused(capsys, "explain", SENTENCE, "--words", "--word-score", "norm", "--method", "weights")
    assert "the method weights has no vectors to add" in message


def test_one_head(bert: str, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    model, tokenizer = load(bert)
    maps = NormAttribution(model).maps(tokenizer(TEXT, return_tensors="pt"), per_head=True).encoder
    assert maps is not None
    for head, layer in ((1, 0), (-1, 1)):
        assert (
            explained("--model", bert, f"--layer={layer}", f"--head={head}", "--position", "2", "--out", str(path)) == 0
        )
        content = written(path)
        assert (content["layer"], content["head"]) == (layer, 1)
        assert content["scores"] == maps[0, layer, 1, 2].tolist()
        assert content["map"]["values"] == [maps[0, layer, 1].tolist()]


def test_the_highest_scores_alone_are_printed(bert: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explained("--model", bert, "--top", "2") == 0
    best = explain(TEXT, bert).top(2)
    rows = capsys.readouterr().out.splitlines()[-2:]
    for row, (token, _) in zip(rows, best, strict=True):
        index, name, *_ = row.split()
        assert (TOKENS[int(index)], name) == (token, token)


def test_dtype(bert: str, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    assert explained("--model", bert, "--dtype", "float64", "--out", str(path)) == 0
    model, tokenizer = load(bert)
    expected = NormAttribution(model.double()).attribute(tokenizer(TEXT, return_tensors="pt"))
    assert written(path)["scores"] == expected[0].tolist()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--head", "1"], "got --head 1 without --layer"),
        (["--head", "9", "--layer", "0"], "got head 9; the layer has 2 heads, 0 to 1"),
        (["--head", "0", "--layer", "0", "--method", "saliency"], "saliency has no layers"),
        (["--word-score", "max"], "without --words"),
        (["--words", "--word-score", "median"], "--word-score"),
        (["--words", "--word-score", "norm", "--method", "occlusion"], "no vectors to add"),
        (["--words", "--word-score", "norm", "--layer", "0", "--head", "0"], "head"),
        (["--words", "--word-score", "norm", "--position", "77"], "got position 77"),
        (["--top", "0"], "--top"),
        (["--dtype", "int8"], "--dtype"),
        (["--dtype", "float64", "--quantize", "int8"], "which decides the dtype"),
        (["--device", "moon"], "moon"),
        (["--method", "saliency", "--layer", "0"], "saliency has no layers"),
        (["--method", "saliency", "--scope", "attn"], "scope"),
        (["--method", "gradient"], "expected one of norm"),
        (["a cat", "--out", "two.png"], "got 2 texts and a .png file"),
        (["--words", "--generate", "3"], "generate"),
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

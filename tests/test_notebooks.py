"""What a notebook shows: every result as the living page in a sandboxed frame, and figures as pictures."""

import html
import re

import pytest

from captum_norm.show.page import Column, Example, Page, Scores, Table, Tokens

FIRST = """
import torch, transformers
from alignment import Alignments
from captum_norm import DecompX, GenerationAttribution, NormAttribution, NormMeter, compare, explain
from captum_norm.loading import LANGUAGE_MODEL, load
from tests import tiny
model, known, text = tiny.bert(), tiny.tokenizer(), "a dog sees the cat"
"""
SHOWN = [
    "explain(text, model, known)",
    "NormAttribution(model, tokenizer=known).maps([text, 'the cat runs'], per_head=True)",
    "NormMeter(model, tokenizer=known).measure(text, scopes=['attn'], weights=True)['encoder']",
    "compare(model, text, tokenizer=known, methods=['norm', 'weights'], steps=2)",
    "GenerationAttribution(DecompX(load(LANGUAGE_MODEL)[0]), load(LANGUAGE_MODEL)[1]).attribute('Clara saw', ' a cat')",
    "Alignments([[(0, 0)]], [['la']], [['the']])",
]


@pytest.mark.long
def test_results_are_pages_in_frames_that_reach_nothing_and_figures_pictures() -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    sources = [FIRST, *SHOWN, "explain(text, model, known).plot()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    done = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    cells = [[output for output in cell.outputs if output.output_type != "stream"] for cell in done.cells[1:]]
    for (output,) in cells[:-1]:
        shown = output.data["text/html"]
        assert shown.count("<iframe ") == 1
        assert re.findall(r'sandbox="([^"]*)"', shown) == ["allow-scripts"]
        (page,) = map(html.unescape, re.findall(r'srcdoc="([^"]*)"', shown))
        assert page.startswith("<!doctype html>")
        assert "default-src 'none'" in page
        assert "tensor(" not in output.data["text/plain"]
    assert "image/png" in cells[-1][0].data


def test_text_cannot_leave_the_frame() -> None:
    shown = Page('"></iframe><script>alert(1)</script>\u202e')._repr_html_()
    assert shown.count("<iframe") == shown.count("</iframe>") == 1
    assert "<script" not in shown
    assert "\u202e" not in shown


def test_where_frames_are_taken_away_the_answer_and_a_table_stay() -> None:
    """As in an untrusted notebook, whose HTML a sanitizer cleans."""
    nh3 = pytest.importorskip("nh3", reason="nh3 is not installed")
    scores = Scores("norm", "norm", [0.25, 0.75])
    page = Page(
        "What counts?", examples=[Example("a b", Tokens(["a", "b"]), scores=[scores], answer="It rests on “b”.")]
    )
    seen = nh3.clean(page._repr_html_())
    assert "<iframe" not in seen
    texts = re.sub(r"(\s*<[^>]+>\s*)+", "|", seen)
    assert texts == "|What counts?|It rests on “|b|”.|token|norm|b|0.75|a|0.25|"
    table = Page("Which?", tables=[Table("t", [Column("method"), Column("gain", "number")], [["norm", 1.5]])])
    assert re.findall("<td>(.*?)</td>", nh3.clean(table._repr_html_())) == ["norm", "1.5"]

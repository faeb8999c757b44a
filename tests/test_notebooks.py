"""What a notebook shows: every result as the living page in a sandboxed frame, and figures as pictures."""

import html
import re

import pytest

from captum_norm.show.page import Page

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
        assert shown.startswith("<iframe ")
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

"""What a notebook shows: every result as the living page in a sandboxed frame, and figures as pictures."""

import html
import re
from typing import Any

import pytest

from captum_norm.show.page import Page

pytestmark = pytest.mark.long

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")

FIRST = """
import torch, transformers
from alignment import Alignments
from captum_norm import DecompX, GenerationAttribution, NormAttribution, NormMeter, compare, explain
from captum_norm.loading import LANGUAGE_MODEL, load
from tests.tiny import bert_config, tokenizer
torch.manual_seed(0)
model, known, text = transformers.BertModel(bert_config()).eval(), tokenizer(), "a dog sees the cat"
"""

SHOWN = [
    "explain(text, model, known)",
    "NormAttribution(model, tokenizer=known).maps([text, 'the cat runs'], per_head=True)",
    "NormMeter(model, tokenizer=known).measure(text, scopes=['attn'], weights=True)['encoder']",
    "compare(model, text, tokenizer=known, methods=['norm', 'weights'], steps=2)",
    "GenerationAttribution(DecompX(load(LANGUAGE_MODEL)[0]), load(LANGUAGE_MODEL)[1]).attribute('Clara saw', ' a cat')",
    "Alignments([[(0, 0)]], [['la']], [['the']])",
]


@pytest.fixture(scope="module")
def outputs() -> list[Any]:
    sources = [FIRST, *SHOWN, "explain(text, model, known).plot()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")
    done = client.execute()
    return [[output for output in cell.outputs if output.output_type != "stream"] for cell in done.cells[1:]]


@pytest.mark.parametrize("number", range(len(SHOWN)), ids=SHOWN)
def test_a_result_is_a_page_in_a_frame_that_reaches_nothing(outputs: list[Any], number: int) -> None:
    (output,) = outputs[number]
    shown = output.data["text/html"]
    assert shown.startswith("<iframe ")
    assert re.search(r'sandbox="([^"]*)"', shown).group(1) == "allow-scripts"  # type: ignore[union-attr]
    page = html.unescape(re.search(r'srcdoc="([^"]*)"', shown).group(1))  # type: ignore[union-attr]
    assert page.startswith("<!doctype html>")
    assert "default-src 'none'" in page
    assert "tensor(" not in output.data["text/plain"]


def test_a_figure_is_a_picture(outputs: list[Any]) -> None:
    (output,) = outputs[-1]
    assert "image/png" in output.data


def test_text_cannot_leave_the_frame() -> None:
    shown = Page('"></iframe><script>alert(1)</script>\u202e')._repr_html_()
    assert shown.count("<iframe") == shown.count("</iframe>") == 1
    assert "<script" not in shown
    assert "\u202e" not in shown

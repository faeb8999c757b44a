"""The living page: its data comes back exactly, and nothing in it can leave its place."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from captum_norm.errors import InvalidInputError
from captum_norm.show.page import (
    Column,
    Example,
    Links,
    Maps,
    Page,
    Precision,
    Scores,
    Table,
    Tokens,
    encode,
    render,
)
from tests.pages import Elements, content, decoded

ROOT = Path(__file__).parents[2] / "captum_norm" / "show"
HOSTILE = "</script><script>alert('x')</script>\u202e"


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("precision", "of_entry", "of_map"), [("f4", 0, 0), ("f2", 2**-11, 1e-7), ("i1", 0, 1 / 254)])
def test_arrays_come_back_to_their_precision(
    precision: Precision, of_entry: float, of_map: float, signed: bool
) -> None:
    values = np.random.default_rng(0).lognormal(sigma=3, size=(2, 3, 4, 5)).astype("f4")
    values[0, 1] = 0
    if signed:
        values[1] *= -1
    largest = np.abs(values).max(axis=(-2, -1) if precision == "i1" else None, keepdims=True)
    error = np.abs(decoded(encode(values, precision)) - values)
    assert (error <= 1.001 * np.maximum(of_entry * np.abs(values), of_map * largest)).all()


def test_empty_arrays_and_zeros_come_back() -> None:
    for precision in ("f4", "f2", "i1"):
        for shape in [(1, 0, 0), (1, 2, 2)]:
            assert (decoded(encode(np.zeros(shape, "f4"), precision)) == np.zeros(shape)).all()


def test_data_mirrors_the_dataclasses() -> None:
    tokens = Tokens(["a", "", "b\u200b"], words=[0, -1, 1], word_texts=["a", "b"])
    example = Example("one", tokens, maps=[Maps("norm", "norm", np.ones((1, 3, 3)), [5], signed=True)], row=2)
    page = Page(
        "t", facts={"model": "m"}, examples=[example], tables=[Table("n", [Column("x", "number")], [[float("nan")]])]
    )
    found = content(render(page))
    assert found["facts"] == {"model": "m"}
    assert found["tables"][0]["rows"] == [[None]]
    (shown,) = found["examples"]
    texts = {"texts": ["a", "∅", "b\\u200b"], "words": [0, -1, 1], "word_texts": ["a", "b"], "likely": None}
    assert shown["inputs"] == texts
    assert shown["row"] == 2
    assert shown["maps"][0] | {"values": None} == {
        "method": "norm", "unit": "norm", "values": None, "layers": [5], "stack": "encoder", "signed": True,
        "residual": None, "mean": False,
    }  # fmt: skip
    assert (decoded(shown["maps"][0]["values"]) == 1).all()


def test_nothing_hostile_leaves_its_place() -> None:
    example = Example(HOSTILE, Tokens([HOSTILE]), scores=[Scores(HOSTILE, HOSTILE, [1.0])], facts={HOSTILE: HOSTILE})
    page = render(Page(HOSTILE, facts={HOSTILE: HOSTILE}, examples=[example], notes=[HOSTILE]))
    elements = Elements(page)
    spelled = HOSTILE.replace("\u202e", "\\u202e")
    assert [tag for tag, _, _ in elements.found].count("script") == 2
    assert elements.of("title") == elements.of("h1") == elements.of("dd") == [spelled]
    assert content(page)["examples"][0]["inputs"]["texts"] == [spelled]
    assert "\u202e" not in page


def test_the_policy_allows_the_script_and_style_in_the_file_alone() -> None:
    page = render(Page("t"))
    elements = Elements(page)
    (policy,) = (given["content"] for tag, given, _ in elements.found if tag == "meta" and "http-equiv" in given)
    rules = dict(rule.split(" ", 1) for rule in (policy or "").split("; "))
    script, style = (re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("script", "style"))
    for rule, (text,) in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules.pop(rule) == f"'sha256-{digest}'"
    assert rules == {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}
    assert not re.search(
        r"""\s(on\w+|style|src|href)=["']""", re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    )


def test_a_page_is_saved_under_a_name_in_html(tmp_path: Path) -> None:
    page = Page("t")
    assert page.save(tmp_path / "page.HTML").read_text() == render(page)
    with pytest.raises(InvalidInputError, match=r"page\.png; expected a name that ends in \.html$"):
        page.save(tmp_path / "page.png")


REFUSED: list[Callable[[], object]] = [
    lambda: Scores("m", "u", [float("nan")]),
    lambda: Maps("m", "u", np.zeros((2, 2)), [0]),
    lambda: Maps("m", "u", np.full((1, 1, 1), np.inf), [0]),
    lambda: Example("t", Tokens(["a"]), scores=[Scores("m", "u", [1.0, 2.0])]),
    lambda: Example("t", Tokens(["a"]), outputs=Tokens(["x", "y"]), maps=[Maps("m", "u", np.zeros((1, 1, 1)), [0])]),
    lambda: Example("t", Tokens(["a", "b"]), Tokens(["x"]), links=[Links([(1, 0, None)])]),
    lambda: Example("t", Tokens(["a"]), Tokens(["x", "y"]), links=[Links([], sure=[(0, 1)])]),
    lambda: Example("t", Tokens(["a"]), links=[Links([], possible=[(-1, 0)])]),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_does_not_fit_is_refused(case: int) -> None:
    with pytest.raises(InvalidInputError):
        REFUSED[case]()


def test_script_and_style_are_small_and_stay_inside_their_elements() -> None:
    texts = [(ROOT / "assets" / name).read_text(encoding="utf-8") for name in ("page.js", "page.css")]
    assert sum(len(text.encode()) for text in texts) <= 300_000
    assert not [text for text in texts if "</" in text or "<!--" in text]


TOOLS = f"{ROOT / 'script' / 'node_modules' / '.bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.mark.skipif(
    not all(shutil.which(tool, path=TOOLS) for tool in ("esbuild", "node")), reason="make script installs the bundler"
)
def test_script_and_style_are_built_from_their_sources(tmp_path: Path) -> None:
    build = json.loads((ROOT / "script" / "package.json").read_text())["scripts"]["build"]
    for command in build.replace("../assets", str(tmp_path)).split(" && "):
        subprocess.run(command.split(), cwd=ROOT / "script", env={"PATH": TOOLS}, check=True, capture_output=True)
    for name in ("page.js", "page.css"):
        assert (tmp_path / name).read_text() == (ROOT / "assets" / name).read_text(), "run make script"

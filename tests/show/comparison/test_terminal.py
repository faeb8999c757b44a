"""The terminal: tables in the order of the ranking, nothing obeyed that tokens or names hold."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from captum_norm import Comparison
from captum_norm.methods import METHODS
from captum_norm.show import show_comparison
from captum_norm.show.colors import color_of, hex_of
from captum_norm.show.text import decimal, shown_measures
from tests.lab.comparison.examples import HOSTILE, comparison


def shown(found: Comparison, width: int = 200, **options: object) -> str:
    console = Console(file=io.StringIO(), width=width, **options)  # type: ignore[arg-type]
    show_comparison(found, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_everything_is_said() -> None:
    found, text = comparison("causal"), shown(comparison("causal"), color_system=None)
    assert f"model: {HOSTILE}" in text
    assert f"signature: {found.signature}" in text
    assert f"refused: globenc: {found.refused['globenc']}" in text
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("method  "))
    for name, line in zip(found.ranking, lines[start + 1 :], strict=False):
        assert line.startswith(f"{name} ")
        assert f"{found.means()[name]['relevance_gain']:.3f}".replace("-", "−") in line.split()
    assert "log-" not in text
    assert "log-" in shown(comparison(), color_system=None)
    first = list(found.results).index(found.ranking[0])
    _, row = (line for line in lines if line.startswith(f"1 {found.ranking[0]} "))
    order = [list(found.results).index(name) for name in found.ranking]
    values = [f"{100 * float(found.agreement[first, other]):.0f}".replace("-", "−") for other in order]
    assert row.split()[-len(order) :] == values


def test_words_have_the_sums_of_their_tokens() -> None:
    """Of tokens that count; the others, such as special ones, have no colour."""
    found = comparison()
    tokens = [["[CLS]", "a", "##b", "c", "[SEP]", "[PAD]", "[PAD]"], *found.tokens[1:]]
    scores = torch.tensor([[9.0, 1.0, 1.0, -1.0, 9.0, 0.0, 0.0], [0.0] * 7])
    results = {"norm": replace(found.results["norm"], scores=scores)}
    found = replace(found, tokens=tokens, results=results, agreement=torch.ones(1, 1))
    assert "[CLS]▁ ab█ c▁ [SEP]▁" in shown_words(found)
    assert "[CLS]▁ a█ b█ c▁ [SEP]▁" in shown(found, color_system=None)


def shown_words(found: Comparison) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    show_comparison(found, console, words=True)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def everything() -> Comparison:
    """All methods, with the numbers of a few."""
    found = comparison()
    names = list(METHODS)
    results = dict(zip(names, list(found.results.values()) * len(names), strict=False))
    return replace(found, results=results, agreement=torch.full((len(names), len(names)), -0.99))


@pytest.mark.parametrize("width", [80, 120])
def test_names_and_numbers_are_whole_in_narrow_terminals(width: int) -> None:
    found = everything()
    count = len(found.ranking)
    assert count == len(METHODS)
    text = shown(found, width, color_system=None)
    assert "…" not in text
    lines = text.splitlines()
    methods, _, agreement = (
        lines[start + 1 : start + 1 + count]
        for start, line in enumerate(lines)
        if line.startswith("method ") or line.split()[:2] == ["1", "2"]
    )
    columns = agreement[0].split().count("−99")
    assert columns == (count if width == 120 else 19), "as many as fit"
    means, measures = found.means(), shown_measures(found)
    rows = zip(found.ranking, methods, agreement, strict=True)
    for place, (name, row, values) in enumerate(rows, 1):
        numbers = [decimal(means[name][measure.name]) for measure in measures]
        result = found.results[name]
        assert row.split() == [name, *numbers, f"{result.seconds:.2f}", f"{result.forward_ratio:.1f}"]
        assert values.split() == [str(place), *([name] if width == 120 else []), *["−99"] * columns]
        assert any(line.startswith(f"{place} {name} ") for line in lines)
    assert all(len(line.rstrip()) <= width for line in agreement)


def test_colours_where_there_are_some() -> None:
    text = shown(comparison(), color_system="truecolor", force_terminal=True)
    red, green, blue = (int(hex_of(color_of(1.0))[place : place + 2], 16) for place in (1, 3, 5))
    assert f"48;2;{red};{green};{blue}" in text
    assert "█" not in text

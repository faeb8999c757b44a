"""The terminal: tables in the order of the ranking, nothing obeyed that tokens or names hold."""

import io

from rich.console import Console

from captum_norm.comparison.terminal import show
from captum_norm.visualization.colors import hex_of, signed_color_of
from tests.comparison.examples import HOSTILE, comparison


def shown(kind: str, **options: object) -> str:
    console = Console(file=io.StringIO(), width=200, **options)  # type: ignore[arg-type]
    show(comparison(kind), console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_everything_is_said() -> None:
    found, text = comparison("causal"), shown("causal", color_system=None)
    assert f"model: {HOSTILE}" in text
    assert f"signature: {found.signature}" in text
    assert f"refused: globenc: {found.refused['globenc']}" in text
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("method  "))
    for name, line in zip(found.ranking, lines[start + 1 :], strict=False):
        assert line.startswith(found.results[name].title)
        assert f"{found.means()[name]['relevance_gain']:.3f}".replace("-", "−") in line.split()
    assert "log-odds" not in text
    assert "log-odds" in shown("classifier", color_system=None)
    first = list(found.results).index(found.ranking[0])
    row = next(line for line in lines if line.startswith(f"1 {found.results[found.ranking[0]].title}"))
    order = [list(found.results).index(name) for name in found.ranking]
    values = [f"{100 * float(found.agreement[first, other]):.0f}".replace("-", "−") for other in order]
    assert row.split()[-len(order) :] == values


def test_colours_where_there_are_some() -> None:
    text = shown("classifier", color_system="truecolor", force_terminal=True)
    red, green, blue = (int(hex_of(signed_color_of(1.0))[place : place + 2], 16) for place in (1, 3, 5))
    assert f"48;2;{red};{green};{blue}" in text
    assert "█" not in text

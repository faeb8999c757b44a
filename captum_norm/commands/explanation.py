"""Prints an explanation and formats it as JSON, CSV, a picture or a page."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from captum_norm.characters import spelled_out

if TYPE_CHECKING:
    from rich.table import Table

    from captum_norm.analysis import ContextualizationChange
    from captum_norm.commands.terminal import Terminal
    from captum_norm.explanation import Explanation


def show(explanation: "Explanation", console: "Terminal") -> None:
    """Print the tokens in colour, a legend and the table of scores."""
    from captum_norm.visualization.terminal import score_table, show_tokens

    for name, value in explanation.facts().items():
        console.say(f"{name}: {spelled_out(value)}")
    console.print()
    for one in explanation:
        tokens, scores = one.tokens[0], one.scores[0].tolist()
        show_tokens(console, tokens, scores, unit=explanation.unit)
        console.print()
        console.print(score_table(tokens, scores, unit=explanation.unit))
    if explanation.changes is not None:
        console.print()
        console.print(_change_table(explanation.changes))


def _change_table(changes: "ContextualizationChange") -> "Table":
    from rich.table import Table

    table = Table(title="1 − ρ of the map before and after", box=None, pad_edge=False, header_style="bold")
    table.add_column("layer", justify="right")
    for component, scope in zip(changes.components, changes.scopes[1:], strict=True):
        table.add_column(f"{component}\n{scope}", justify="right")
    for layer, row in enumerate(changes.macro.tolist()):
        table.add_row(str(layer), *(f"{value:.3f}" for value in row))
    return table


def _png(explanation: "Explanation") -> bytes:
    from captum_norm.visualization.figures import figure_bytes

    return figure_bytes(explanation.plot())


def _html(explanation: "Explanation") -> bytes:
    from captum_norm.visualization.static_page import render_page
    from captum_norm.visualization.text import shortened

    text = shortened(" ".join(explanation.texts[0].split()), 60)
    page = render_page(
        explanation.tokens[0],
        explanation.scores[0].tolist(),
        title=f"What each token of “{text}” contributes",
        unit=explanation.unit,
        panels=explanation.panels(),
        facts=explanation.facts(),
    )
    return page.encode()


REPORTS: "Mapping[str, Callable[[Explanation], bytes]]" = MappingProxyType(
    {
        ".png": _png,
        ".html": _html,
        ".json": lambda explanation: explanation.to_json().encode(),
        ".csv": lambda explanation: explanation.to_csv().encode(),
    }
)
"""Formats an explanation, by the suffix of the file."""

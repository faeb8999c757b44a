"""Prints an explanation and formats it as JSON, CSV, a picture or a page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from captum_norm.characters import spelled_out
from captum_norm.errors import InvalidInputError
from captum_norm.tables import csv_text, json_text
from captum_norm.versions import versions

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from captum_norm.analysis import ContextualizationChange
    from captum_norm.commands.terminal import Terminal
    from captum_norm.visualization.heatmap import Panel


@dataclass(frozen=True)
class Explanation:
    """The scores of one text, the maps behind them, and the choices they depend on.

    Attributes:
        text: the text.
        model: the model's name or folder, as given.
        method: the method's name on the command line.
        scope: the method's scope; None if it has none.
        target: the output explained, as given; None for hidden states.
        aggregation: how the layers are combined; None for a single layer.
        layer: the index of the layer explained; None for all together.
        position: the index of the output position explained, or "first", "last" or "mean".
        tokens: the S tokens.
        scores: S scores.
        unit: what the scores are.
        layers: the indices of the L layers whose maps are shown.
        maps: their maps, (L, S, S); rows are queries, columns keys; None if the method has none.
        map_unit: what the entries of the maps are.
        convergence_delta: the largest relative completeness error of the layers; None if the method has none.
        changes: how much each component changes the map of each layer, if requested.
    """

    text: str
    model: str
    method: str
    scope: str | None
    target: str | None
    aggregation: str | None
    layer: int | None
    position: int | str
    tokens: Sequence[str]
    scores: Sequence[float]
    unit: str
    layers: Sequence[int]
    maps: "Tensor | None"
    map_unit: str
    convergence_delta: float | None
    changes: "ContextualizationChange | None" = None

    def facts(self) -> dict[str, str]:
        """Names and values to print beside the scores."""
        scope = "" if self.scope is None else f" ({self.scope})"
        layer = f"all ({self.aggregation})" if self.layer is None else str(self.layer)
        facts = {"model": self.model, "method": f"{self.method}{scope}", "layer": layer, "position": str(self.position)}
        if self.target is not None:
            facts["target"] = self.target
        if self.convergence_delta is not None:
            facts["convergence delta"] = f"{self.convergence_delta:.1e}"
        return facts


def show(explanation: Explanation, console: "Terminal") -> None:
    """Print the tokens in colour, a legend and the table of scores."""
    from captum_norm.visualization.terminal import score_table, show_tokens

    for name, value in explanation.facts().items():
        console.say(f"{name}: {spelled_out(value)}")
    console.print()
    show_tokens(console, explanation.tokens, explanation.scores, unit=explanation.unit)
    console.print()
    console.print(score_table(explanation.tokens, explanation.scores, unit=explanation.unit))
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


def _json(explanation: Explanation) -> bytes:
    content = {
        "text": explanation.text,
        "model": explanation.model,
        "method": explanation.method,
        "scope": explanation.scope,
        "target": explanation.target,
        "aggregation": explanation.aggregation,
        "layer": explanation.layer,
        "position": explanation.position,
        "tokens": list(explanation.tokens),
        "scores": list(explanation.scores),
        "unit": explanation.unit,
        "map": None
        if explanation.maps is None
        else {
            "axes": ["layer", "query", "key"],
            "layers": list(explanation.layers),
            "unit": explanation.map_unit,
            "values": explanation.maps.tolist(),
        },
        "convergence_delta": explanation.convergence_delta,
        "versions": versions(),
    }
    if explanation.changes is not None:
        content["contextualization_change"] = {
            "components": list(explanation.changes.components),
            "scopes": list(explanation.changes.scopes),
            "axes": ["layer", "component"],
            "values": explanation.changes.macro.tolist(),
        }
    return json_text(content).encode()


def _csv(explanation: Explanation) -> bytes:
    rows = enumerate(zip(explanation.tokens, explanation.scores, strict=True))
    return csv_text([("index", "token", "score"), *((index, token, score) for index, (token, score) in rows)]).encode()


def _png(explanation: Explanation) -> bytes:
    from captum_norm.visualization.figures import figure_bytes
    from captum_norm.visualization.heatmap import draw_heatmaps

    if explanation.maps is None:
        raise InvalidInputError(f"the method {explanation.method} has no maps to draw; write .html, .json or .csv")
    scope = "" if explanation.scope is None else f" ({explanation.scope})"
    title = f"{explanation.method}{scope}, {explanation.model}"
    return figure_bytes(draw_heatmaps(_panels(explanation), explanation.tokens, title=title))


def _html(explanation: Explanation) -> bytes:
    from captum_norm.visualization.static_page import render_page

    page = render_page(
        explanation.tokens,
        explanation.scores,
        title=f"What each token of “{_beginning(explanation.text)}” contributes",
        unit=explanation.unit,
        panels=_panels(explanation),
        facts=explanation.facts(),
    )
    return page.encode()


def _panels(explanation: Explanation) -> "list[Panel]":
    from captum_norm.visualization.heatmap import Panel

    maps = zip(explanation.layers, () if explanation.maps is None else explanation.maps, strict=True)
    return [Panel(f"layer {layer}", values, explanation.map_unit) for layer, values in maps]


def _beginning(text: str, length: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


REPORTS: Mapping[str, Callable[[Explanation], bytes]] = MappingProxyType(
    {".png": _png, ".html": _html, ".json": _json, ".csv": _csv}
)
"""Formats an explanation, by the suffix of the file."""

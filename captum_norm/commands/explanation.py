"""Prints an explanation and formats it as JSON, CSV, a picture or a page."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from captum_norm.errors import InvalidInputError
from captum_norm.text.characters import spelled_out

if TYPE_CHECKING:
    from rich.table import Table

    from captum_norm.attr.flow_graph import FlowGraph
    from captum_norm.commands.terminal import Terminal
    from captum_norm.explanation import Explanation
    from captum_norm.lab.analysis import ContextualizationChange


# Maps of single heads are computed for pages whose maps of layers have no more entries than that.
_MOST_ENTRIES = 1_000_000
LEAST_IMPORTANCE = 0.01
"""What the flow on a page can show at most; it begins with the authors' threshold."""


def beside(explanation: "Explanation", again: "Callable[..., Explanation]") -> "list[Explanation]":
    """Explain once more what a page shows next to an explanation: single heads, and weights (or norms next to weights).

    Args:
        explanation: the explanation.
        again: explains the same texts and outputs with ``method`` and ``per_head``.

    Returns:
        The explanations; none if the method has no maps.
    """
    if explanation.squares is None:
        return []
    other = "norm" if explanation.method == "weights" else "weights"
    found = [again(method=other, per_head=False)]
    if explanation.squares.numel() <= _MOST_ENTRIES:
        for name in (explanation.method, other):
            try:
                found.append(again(method=name, per_head=True))
            except InvalidInputError:  # this method, or its scope, does not divide into heads
                continue
    return found


def flows_of(model: Any, explanation: "Explanation", tokenizer: Any) -> "list[FlowGraph]":
    """Follow information flow routes to every position of each text, for a page; none by another method."""
    from captum_norm.attr import InformationFlow
    from captum_norm.models.objects import tokenized

    if explanation.method != InformationFlow.name or explanation.layer is not None:
        return []
    method = InformationFlow(model)
    found: list[FlowGraph] = []
    for text in explanation.texts:
        inputs = tokenized(model, [text], tokenizer)
        # Heads added up, as in the authors' tool: single ones rarely exceed its threshold.
        found += method.graphs(inputs, position="all", threshold=LEAST_IMPORTANCE, per_head=False)
    return found


def show(explanation: "Explanation", console: "Terminal", *, top: int | None = None) -> None:
    """Print the tokens of each text in colour, a legend and the table of scores, or of the highest ones."""
    from captum_norm.show.terminal import score_table, show_tokens

    for name, value in explanation.facts().items():
        console.say(f"{name}: {spelled_out(value)}")
    for number, one in enumerate(explanation):
        console.print()
        if len(explanation) > 1:
            console.say(f"text {number}: {spelled_out(one.texts[0])}")
        tokens, scores = one.tokens[0], one.scores[0].tolist()
        show_tokens(console, tokens, scores, unit=explanation.unit)
        console.print()
        console.print(score_table(tokens, scores, unit=explanation.unit, top=top))
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
    from captum_norm.show.figures import figure_bytes

    return figure_bytes(explanation.plot())


def _html(explanation: "Explanation", beside: "Sequence[Explanation]") -> bytes:
    from captum_norm.show import render_explanation

    return render_explanation(explanation, beside).encode()


REPORTS: "Mapping[str, Callable[[Explanation, Sequence[Explanation]], bytes]]" = MappingProxyType(
    {
        ".png": lambda explanation, _: _png(explanation),
        ".html": _html,
        ".json": lambda explanation, _: explanation.to_json().encode(),
        ".csv": lambda explanation, _: explanation.to_csv().encode(),
    }
)
"""Formats an explanation, by the suffix of the file; a page shows those of :func:`beside` next to it."""

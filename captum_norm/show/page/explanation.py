"""The page of explained texts: their scores and maps, by one method or by several next to each other."""

from collections.abc import Sequence
from itertools import chain

from captum_norm.errors import InvalidInputError
from captum_norm.explanation import Explanation
from captum_norm.results import make_page
from captum_norm.show.page.document import Column, Example, Maps, Scores, Stack, Table
from captum_norm.show.page.flow import flow_graph
from captum_norm.show.page.html import Page, render
from captum_norm.show.page.tokens import tokens_of
from captum_norm.show.text import shortened

_TITLE = 60
# Their maps are combined otherwise, or are rolled out already.
_NO_ROLLOUT = ("attention-gradient", "rollout")


def render_explanation(explanation: Explanation, beside: Sequence[Explanation] = ()) -> str:
    """Render texts as one page: their scores, and the maps of layers and heads, by one or several methods.

    Args:
        explanation: of :func:`captum_norm.explain`.
        beside: explanations of the same texts and model to show next to it: by other methods, or by the same with maps
            of single heads.

    Returns:
        A complete HTML document, for :func:`captum_norm.show.write_page`.

    Raises:
        InvalidInputError: the explanations are of different texts.

    Example:
        >>> from captum_norm import explain
        >>> text = "So it is."
        >>> page = render_explanation(explain(text), [explain(text, method="weights", per_head=True)])
        >>> "What each token of “So it is.” contributes" in page
        True
    """
    return render(explanation_page(explanation, beside))


@make_page.register
def explanation_page(explanation: Explanation, beside: Sequence[Explanation] = ()) -> Page:
    """Collect the scores and maps of texts, each text an example; see :func:`render_explanation`."""
    together = (explanation, *beside)
    if any(list(one.texts) != list(explanation.texts) for one in beside):
        raise InvalidInputError("got explanations of different texts; a page compares methods on the same ones")
    examples = [_example([one[number] for one in together]) for number in range(len(explanation))]
    subject = f" of “{_beginning(explanation)}”" if len(explanation) == 1 else ""
    tables = [] if explanation.changes is None else [_changes(explanation)]
    return Page(f"What each token{subject} contributes", explanation.facts(), examples, tables)


def _example(explanations: Sequence[Explanation]) -> Example:
    """The only text of explanations by different methods, or by one with and without maps of single heads."""
    first = explanations[0]
    names = [_name(one, explanations) for one in explanations]
    if any(one.tokens != first.tokens for one in explanations):
        raise InvalidInputError("got explanations with different tokens; a page compares methods of one model")
    once = dict(zip(reversed(names), reversed(explanations), strict=True))
    return Example(
        title=_beginning(first),
        inputs=tokens_of(first.words_of_tokens[0]),
        scores=[_scores(name, once[name]) for name in dict.fromkeys(names)],
        maps=list(chain.from_iterable(map(_maps, names, explanations))),
        row=_row(first),
        graph=flow_graph(first.graphs[0], first.method) if first.graphs else None,
    )


def _name(explanation: Explanation, explanations: Sequence[Explanation]) -> str:
    """The method's name, with the scope if it is there with several."""
    scopes = {one.scope for one in explanations if one.method == explanation.method}
    return f"{explanation.method} ({explanation.scope})" if len(scopes) > 1 else explanation.method


def _scores(name: str, explanation: Explanation) -> Scores:
    values = explanation.scores[0]
    return Scores(name, explanation.unit, values, signed=bool((values < 0).any()))


def _maps(name: str, explanation: Explanation) -> list[Maps]:
    squares, maps = explanation.squares, explanation.maps
    if squares is None or maps is None:
        return []
    stack: Stack = "encoder" if maps.decoder is None else "decoder"
    signed = bool((squares < 0).any())
    layers = list(explanation.layers)
    return [Maps(name, explanation.map_unit, squares[0], layers, stack, signed, _has_residual(explanation))]


def _has_residual(explanation: Explanation) -> bool | None:
    """Whether maps have the residual connection; None if the layers' maps have no rollout. That of weights is usual."""
    rolled = explanation.aggregation == "rollout" or explanation.method == "weights"
    return explanation.scope != "attn" if rolled and explanation.method not in _NO_ROLLOUT else None


def _row(explanation: Explanation) -> int | None:
    """The row explained, if it is a single one of the text's own tokens."""
    count, position, maps = len(explanation.tokens[0]), explanation.position, explanation.maps
    if maps is None or maps.virtual:
        return None
    if isinstance(position, str):
        return {"first": 0, "last": count - 1}.get(position)
    return position % count if -count <= position < count else None


def _changes(explanation: Explanation) -> Table:
    changes = explanation.changes
    assert changes is not None
    names = [f"{name} ({scope})" for name, scope in zip(changes.components, changes.scopes[1:], strict=True)]
    rows = [(layer, *row) for layer, row in enumerate(changes.macro.tolist())]
    return Table(
        "Change of the map by each component",
        [Column("layer", "number"), *(Column(name, "heat", 3) for name in names)],
        rows,
        note="1 − Spearman's ρ of the map before and after the component.",
    )


def _beginning(explanation: Explanation) -> str:
    return shortened(" ".join(explanation.texts[0].split()), _TITLE)

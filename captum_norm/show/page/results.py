"""Pages of results: explained texts, answers, maps, and the patches of pictures."""

import io
from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

from torch import Tensor

from captum_norm.attr.flow_graph import FlowGraph
from captum_norm.attr.measurements import Measurements
from captum_norm.errors import InvalidInputError
from captum_norm.explanation import Explanation
from captum_norm.generation.result import GenerationResult
from captum_norm.results import make_page
from captum_norm.results.maps import AttributionMaps, Patches
from captum_norm.results.stacks import MapStack
from captum_norm.show.heatmap import pixels_of
from captum_norm.show.page.document import (
    Column,
    Example,
    Graph,
    Maps,
    Picture,
    Scores,
    Stack,
    Table,
    Tokens,
)
from captum_norm.show.page.html import Page, render
from captum_norm.show.text import shortened
from captum_norm.text.words import Words, words_of_text, words_of_tokens

_TITLE = 60
_MOST_PIXELS = 800
"""Of a picture's side: larger pictures are thinned out."""
# Their maps are combined otherwise, or are rolled out already.
_NO_ROLLOUT = ("attention-gradient", "rollout")
_NOWHERE: Mapping[str, int] = MappingProxyType({})


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
    if any(list(other.texts) != list(explanation.texts) for other in beside):
        raise InvalidInputError("got explanations of different texts; a page compares methods on the same ones")
    methods = (explanation, *beside)
    examples = [_text_example([method[number] for method in methods]) for number in range(len(explanation))]
    subject = f" of “{_beginning(explanation)}”" if len(explanation) == 1 else ""
    tables = [] if explanation.changes is None else [_changes(explanation)]
    return Page(f"What each token{subject} contributes", explanation.facts(), examples, tables)


def _text_example(explanations: Sequence[Explanation]) -> Example:
    """The only text of explanations by different methods, or by one with and without maps of single heads."""
    first = explanations[0]
    scores: dict[str, Scores] = {}
    maps = []
    for explanation in explanations:
        if explanation.tokens != first.tokens:
            raise InvalidInputError("got explanations with different tokens; a page compares methods of one model")
        scopes = {other.scope for other in explanations if other.method == explanation.method}
        name = f"{explanation.method} ({explanation.scope})" if len(scopes) > 1 else explanation.method
        values, squares = explanation.scores[0], explanation.squares
        scores.setdefault(name, Scores(name, explanation.unit, values, _is_signed(values)))
        if squares is not None and explanation.maps is not None:
            stack: Stack = "encoder" if explanation.maps.decoder is None else "decoder"
            # The rollout of weights is usual.
            rolled = explanation.aggregation == "rollout" or explanation.method == "weights"
            residual = explanation.scope != "attn" if rolled and explanation.method not in _NO_ROLLOUT else None
            layers, signed = list(explanation.layers), _is_signed(squares)
            maps.append(Maps(name, explanation.map_unit, squares[0], layers, stack, signed, residual))
    return Example(
        title=_beginning(first),
        inputs=tokens_of(first.words_of_tokens[0]),
        scores=list(scores.values()),
        maps=maps,
        row=_row(first),
        graph=flow_graph(first.graphs[0], first.method) if first.graphs else None,
    )


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


def _is_signed(values: Tensor) -> bool:
    return bool((values < 0).any())


def render_answer(result: GenerationResult) -> str:
    """Render what an answer rests on as one page: the input, coloured for each token of the answer, and segments.

    Args:
        result: of :class:`captum_norm.GenerationAttribution`.

    Returns:
        A complete HTML document, for :func:`captum_norm.show.write_page`.

    Example:
        >>> from captum_norm import GenerationAttribution, NormAttribution
        >>> from captum_norm.loading import LANGUAGE_MODEL, load
        >>> model, tokenizer = load(LANGUAGE_MODEL)
        >>> "What “a cat” rests on" in render_answer(
        ...     GenerationAttribution(NormAttribution(model), tokenizer).attribute("Clara saw", " a cat")
        ... )
        True
    """
    return render(answer_page(result))


@make_page.register
def answer_page(result: GenerationResult) -> Page:
    """Collect what an answer rests on; see :func:`render_answer`."""
    method, unit = result.explained.method, result.explained.unit
    scores, rows, segments, graph = result.seq_attr, result.token_attr, result.segment_attr, result.graph
    signed = any(values is not None and _is_signed(values) for values in (scores, rows, segments))
    shown = None
    if graph is not None:
        # The last output is at the last input, whatever comes before its stack.
        first, last = graph.outputs[0], graph.outputs[-1]
        starts = {last.stack: len(result.input_tokens) - 1 - last.position}
        shown = flow_graph(graph, method, starts=starts, first=first.position)
    example = Example(
        title=result.explained.answer,
        inputs=tokens_of_text(result.input_tokens),
        outputs=tokens_of_text(result.output_tokens),
        scores=[Scores(method, unit, scores, signed)],
        maps=[] if rows is None else [Maps(method, unit, rows[None], [0], "answer", signed)],
        graph=shown,
    )
    tables = []
    if result.segments is not None and segments is not None:
        cells = list(zip(range(len(result.segments)), result.segments, segments.tolist(), strict=True))
        tables.append(Table("Segments", [Column("number", "number"), Column("segment"), Column(unit, "signed")], cells))
    title = f"What “{result.explained.answer.strip()}” rests on"
    return Page(title, facts=result.facts(), examples=[example], tables=tables)


@make_page.register
def maps_page(maps: AttributionMaps) -> Page:
    """Make a page of the maps of every example."""
    return Page("Maps of all layers", facts={"maps": repr(maps)}, examples=_stack_examples(maps.stacks()))


@make_page.register
def measurements_page(measured: Measurements) -> Page:
    """Make a page of the maps of everything that was measured."""
    return Page("Measured maps", facts={"measured": repr(measured)}, examples=_stack_examples(measured.stacks()))


def _stack_examples(stacks: Sequence[MapStack]) -> list[Example]:
    """Make the examples of a page: stacks with the same rows and columns are shown side by side."""
    groups = [list(group) for _, group in groupby(stacks, lambda stack: stack.side)]
    examples = []
    for group in groups:
        for example in range(len(group[0].values)):
            columns = tokens_of(words_of_tokens(group[0].columns(example)))
            rows = tokens_of(words_of_tokens(group[0].rows(example)))
            text = shortened(" ".join(columns.word_texts or []), _TITLE)
            title = text if len(groups) == 1 else f"{group[0].name} {example}"
            maps = []
            for stack in group:
                # A page has every layer once, in the model's order.
                place = {layer: index for index, layer in enumerate(stack.layers)}
                values = stack.of(example)[[place[layer] for layer in sorted(place)]]
                maps.append(Maps(stack.name, stack.unit, values, sorted(place), signed=_is_signed(values)))
            examples.append(Example(title, columns, None if columns.texts == rows.texts else rows, maps=maps))
    return examples


def render_patches(
    pictures: Sequence[Any],
    scores: Tensor,
    patches: Sequence[Patches],
    *,
    maps: AttributionMaps | None = None,
    tokens: Sequence[Sequence[str]] | None = None,
    method: str = "method",
    unit: str = "score",
    title: str = "What each patch contributes",
) -> str:
    """Render pictures under the scores of their patches, with the words beside them, as one page.

    Args:
        pictures: each picture as :func:`captum_norm.show.draw_patches` takes it, in the order of the inputs.
        scores: a score for each position of each example, (B, S), as ``attribute`` returns.
        patches: where the patches of each picture stand, such as :attr:`captum_norm.AttributionMaps.patches`.
        maps: the maps of the only self-attention stack, to show the row of each patch and word; None for scores alone.
        tokens: the text of each position of each example; None for that of ``maps``, or its number.
        method: the method's name.
        unit: what the scores are.
        title: the page's heading.

    Returns:
        A complete HTML document, for :func:`captum_norm.show.write_page`.

    Raises:
        InvalidInputError: there are no patches, no picture for some, or scores or tokens of other lengths.

    Example:
        >>> import torch
        >>> where = Patches(example=0, picture=0, positions=torch.tensor([[1, 2], [3, 4]]))
        >>> page = render_patches([torch.rand(3, 8, 8)], torch.rand(1, 5), [where], tokens=[["[CLS]", *"abcd"]])
        >>> "patch 2, 1" in page
        True
    """
    return render(patches_page(pictures, scores, patches, maps, tokens, method, unit, title))


def patches_page(
    pictures: Sequence[Any],
    scores: Tensor,
    patches: Sequence[Patches],
    maps: AttributionMaps | None,
    tokens: Sequence[Sequence[str]] | None,
    method: str,
    unit: str,
    title: str,
) -> Page:
    """Collect the pictures of each example, its scores and maps; see :func:`render_patches`."""
    if not patches or max(patch.picture for patch in patches) >= len(pictures):
        raise InvalidInputError(
            f"got {len(pictures)} pictures and the patches of {len(patches)}; expected a picture for each, in the "
            "order of the inputs"
        )
    texts = maps.tokens if tokens is None and maps is not None else tokens
    examples = []
    for number in sorted({patch.example for patch in patches}):
        of_example = [patch for patch in patches if patch.example == number]
        for patch in of_example:
            patch.scores(scores)  # refuses scores of other inputs
        count, values = scores.shape[1], scores[number]
        names = _patch_names(of_example, count, None if texts is None else texts[number])
        shown = []
        if maps is not None:
            stack = maps.self_attention[number]
            shown = [Maps(method, "entry", stack, range(len(stack)), signed=_is_signed(stack))]
        examples.append(
            Example(
                f"example {number}",
                Tokens(names),
                scores=[Scores(method, unit, values, _is_signed(values))],
                maps=shown,
                pictures=[Picture(_png(pictures[patch.picture]), patch.positions.tolist()) for patch in of_example],
            )
        )
    return Page(title, examples=examples)


def _patch_names(patches: Sequence[Patches], count: int, tokens: Sequence[str] | None) -> list[str]:
    """Name the positions of an example: patches by their place, others by their tokens or numbers."""
    names = [str(position) for position in range(count)] if tokens is None else list(tokens)
    if len(names) != count:
        raise InvalidInputError(f"got {len(names)} tokens and scores of {count} positions; give one for each")
    for number, patch in enumerate(patches, 1):
        which = f"picture {number}, " if len(patches) > 1 else ""
        for row, line in enumerate(patch.positions.tolist(), 1):
            for column, position in enumerate(line, 1):
                names[position] = f"{which}patch {row}, {column}"
    return names


def _png(picture: Any) -> bytes:
    from matplotlib.image import imsave

    pixels = pixels_of(picture)
    step = -(-max(pixels.shape[:2]) // _MOST_PIXELS)
    buffer = io.BytesIO()
    imsave(buffer, pixels[::step, ::step], format="png", metadata={"Software": ""})
    return buffer.getvalue()


def flow_graph(
    graph: FlowGraph, method: str = "information-flow", *, starts: Mapping[str, int] = _NOWHERE, first: int = 0
) -> Graph:
    """Put a graph of information flow on a page, whose stacks start at these inputs and whose first row is this one."""
    index = {node: place for place, node in enumerate(graph.nodes)}
    return Graph(
        [(*node[:3], node.position + starts.get(node.stack, 0)) for node in graph.nodes],
        [
            (index[edge.source], index[edge.target], edge.part, edge.head, float(f"{edge.importance:.6g}"))
            for edge in graph.edges
        ],
        [(node.position - first, index[node]) for node in graph.outputs],
        graph.threshold,
        method,
    )


def tokens_of(words: Words) -> Tokens:
    """Return tokens as people write them, and their words."""
    return Tokens(words.pieces, words.numbers, words.texts)


def tokens_of_text(texts: Sequence[str]) -> Tokens:
    """Return tokens and their words from parts of a text, which follow each other without gaps.

    Example:
        >>> tokens_of_text(["Cl", "ara", " slept", "."]).word_texts
        ('Clara', 'slept', '.')
    """
    return tokens_of(words_of_text(texts))

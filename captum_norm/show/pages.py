"""Pages of results: each type of result has its function, registered with :data:`captum_norm.results.make_page`."""

import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from captum_norm.attr.flow_graph import FlowGraph
from captum_norm.attr.measurements import Measurements
from captum_norm.errors import InvalidInputError
from captum_norm.explanation import Explanation
from captum_norm.generation.result import GenerationResult
from captum_norm.lab.analysis.results import RESULTS, AnalysisResult, Table, number_files
from captum_norm.lab.answers import ANSWER_MEASURES, AnswerComparison
from captum_norm.lab.comparison import MEASURES, Comparison, Measure
from captum_norm.results import make_page
from captum_norm.results.components import NUMBERED, Component, ComponentScores, edge_ends
from captum_norm.results.maps import AttributionMaps, Patches
from captum_norm.results.stacks import MapStack
from captum_norm.show import page, text
from captum_norm.show.figures import pixels_of
from captum_norm.show.plots import draw_curves, draw_plot, plot_bytes, plot_svg
from captum_norm.text.files import is_url, place_of, write_whole
from captum_norm.text.words import Words, words_of_text, words_of_tokens

_TITLE = 60
# Of a picture's side: larger pictures are thinned out.
_MOST_PIXELS = 800
# Longer tables of analyses are folded on the page; of even longer ones it shows the beginning.
_MOST_OPEN = 30
_MOST_SHOWN = 1000
_MOST_EXAMPLES = 20
# Scores of components; of more, a page has those of all positions together.
_MOST_SCORES = 1_000_000
_MOST_EDGES = 2000
# Their maps are combined otherwise, or are rolled out already.
_NO_ROLLOUT = ("attention-gradient", "rollout")


@make_page.register
def explanation_page(explanation: Explanation, *others: Explanation) -> page.Page:
    """Put texts on a page: their scores, and the maps of layers and heads, by one or several methods.

    Args:
        explanation: of :func:`captum_norm.explain`.
        others: explanations of the same texts and model to show next to it and to those in ``beside``.

    Returns:
        The page; ``page.save("page.html")`` writes it.

    Raises:
        InvalidInputError: the explanations are of different texts.

    Example:
        >>> from captum_norm import explain
        >>> text = "So it is."
        >>> page = explanation_page(explain(text), explain(text, method="alti"))
        >>> page.title
        'What does each token of “So it is.” contribute?'
        >>> page.examples[0].answer.partition(" rests")[0]
        'The output'
    """
    methods = (explanation, *explanation.beside, *others)
    if any(list(other.texts) != list(explanation.texts) for other in methods):
        raise InvalidInputError("got explanations of different texts; a page compares methods on the same ones")
    examples = [_text_example([method[number] for method in methods]) for number in range(len(explanation))]
    if len(examples) > 1:
        outputs = [single.outputs[0].facts() if single.outputs else {} for single in explanation]
        examples = [replace(example, facts=facts) for example, facts in zip(examples, outputs, strict=True)]
    subject = f" of “{_beginning(explanation)}”" if len(explanation) == 1 else ""
    title = f"What does each token{subject} contribute?"
    return page.Page(title, explanation.facts(), examples, notes=explanation.notes)


def _text_example(explanations: Sequence[Explanation]) -> page.Example:
    """The only text of explanations by different methods, or by one with and without maps of single heads."""
    first = explanations[0]
    words, output = first.words_of_tokens[0], next(iter(first.outputs), None)
    named = output is not None and output.explained and len(output.top) > 0  # not a projection
    subject = f"“{output}”" if named else "The output"
    scores: dict[str, page.Scores] = {}
    maps = []
    for explanation in explanations:
        if explanation.tokens != first.tokens:
            raise InvalidInputError("got explanations with different tokens; a page compares methods of one model")
        scopes = {other.scope for other in explanations if other.method == explanation.method}
        name = f"{explanation.method} ({explanation.scope})" if len(scopes) > 1 else explanation.method
        squares = explanation.squares
        scores.setdefault(name, page.Scores(name, explanation.unit, explanation.scores[0]))
        if squares is not None and explanation.maps is not None:
            stack: page.Stack = "encoder" if explanation.maps.decoder is None else "decoder"
            # The rollout of weights is usual.
            rolled = explanation.aggregation == "rollout" or explanation.method == "weights"
            residual = explanation.scope != "attn" if rolled and explanation.method not in _NO_ROLLOUT else None
            maps.append(page.Maps(name, explanation.map_unit, squares[0], explanation.layers, stack, residual=residual))
    return page.Example(
        title=_beginning(first),
        inputs=tokens_of(words),
        scores=list(scores.values()),
        maps=maps,
        row=_row(first),
        graph=flow_graph(first.graphs[0], first.method) if first.graphs else None,
        answer=text.answer_of(subject, words.texts, words.scores(first.scores[0], "sum")),
        value=None if output is None else output.value,
        probability=None if output is None else output.probability,
    )


def _row(explanation: Explanation) -> int | None:
    """The row explained, if it is a single one of the text's own tokens."""
    count, position, maps = len(explanation.tokens[0]), explanation.position, explanation.maps
    if maps is None or maps.virtual:
        return None
    if isinstance(position, str):
        return {"first": 0, "last": count - 1}.get(position)
    return position % count if -count <= position < count else None


def _beginning(explanation: Explanation) -> str:
    return text.shortened(" ".join(explanation.texts[0].split()), _TITLE)


@make_page.register
def _answer_page(result: GenerationResult) -> page.Page:
    """Show what an answer rests on: the input, coloured for each token of the answer, and segments."""
    method, unit = result.explained.method, result.explained.unit
    scores, rows, segments, graph = result.seq_attr, result.token_attr, result.segment_attr, result.graph
    signed = any(values is not None and bool((values < 0).any()) for values in (scores, rows, segments))
    shown = None
    if graph is not None:
        # The last output is at the last input, whatever comes before its stack.
        first, last = graph.outputs[0], graph.outputs[-1]
        starts = {last.stack: len(result.input_tokens) - 1 - last.position}
        shown = flow_graph(graph, method, starts=starts, first=first.position)
    words = words_of_text(result.input_tokens)
    likely = [
        ", ".join(f"“{name.strip() or name}” {text.share(p)}" for name, p in output.top) for output in result.outputs
    ]
    if result.pcxmi is not None and result.kl is not None:
        pairs = zip(result.pcxmi.tolist(), result.kl.tolist(), strict=True)
        gains = [f"P-CXMI {text.decimal(gain, 2)}, KL {text.decimal(kl, 2)} nats" for gain, kl in pairs]
        likely = ["; ".join(filter(None, pair)) for pair in zip(likely, gains, strict=True)]
    example = page.Example(
        title=result.explained.answer,
        inputs=tokens_of(words),
        outputs=replace(tokens_of(words_of_text(result.output_tokens)), likely=likely or None),
        scores=[page.Scores(method, unit, scores, signed)],
        maps=[] if rows is None else [page.Maps(method, unit, rows[None], [0], "answer", signed)],
        graph=shown,
        dependent=result.dependent,
    )
    tables = []
    subject = f"“{text.shortened(result.explained.answer.strip(), _TITLE)}”"
    answer = text.answer_of(subject, words.texts, words.scores(scores, "sum"))
    if result.segments is not None and segments is not None:
        answer = text.answer_of(subject, result.segments, segments)
        total = float(segments.abs().sum()) or 1.0
        shares = [text.share(value / total) for value in segments.tolist()]
        names = [text.shortened(name, _TITLE) for name in result.segments]
        cells = list(zip(range(len(shares)), names, shares, segments.tolist(), strict=True))
        columns = [page.Column("number", "number"), page.Column("segment"), page.Column("share", "number")]
        tables.append(page.Table("Segments", [*columns, page.Column(unit, "signed")], cells))
    notes = [result.explained.note] if result.explained.note else []
    grey = "Tokens of the answer that owe nothing to the context are grey: without it the model predicts the same there"
    lead = "" if result.kl is None else f"{grey} (KL below {result.explained.context_threshold:g} nats)."
    title = f"What does {subject} rest on?"
    return page.Page(title, result.facts(), [example], tables, notes=notes, lead=lead, answer=answer)


@make_page.register(AttributionMaps)
@make_page.register(Measurements)
def _maps_page(maps: AttributionMaps | Measurements) -> page.Page:
    title = "Which tokens flow into which, layer by layer?"
    return page.Page(title, facts={"maps": repr(maps)}, examples=_stack_examples(maps.stacks()))


def _stack_examples(stacks: Sequence[MapStack]) -> list[page.Example]:
    """Make the examples of a page: stacks with the same rows and columns are shown side by side."""
    groups = [list(group) for _, group in groupby(stacks, lambda stack: stack.side)]
    examples = []
    for group in groups:
        for example in range(len(group[0].values)):
            words = words_of_tokens(group[0].columns(example))
            row_words = words_of_tokens(group[0].rows(example))
            columns, rows = tokens_of(words), tokens_of(row_words)
            beginning = text.shortened(" ".join(words.texts), _TITLE)
            title = beginning if len(groups) == 1 else f"{group[0].name} {example}"
            maps = []
            for stack in group:
                # A page has every layer once, in the model's order.
                place = {layer: index for index, layer in enumerate(stack.layers)}
                values = stack.of(example)[[place[layer] for layer in sorted(place)]]
                maps.append(page.Maps(stack.name, stack.unit, values, sorted(place)))
            mean = words.scores(group[0].of(example).flatten(0, -3).mean(0), "sum")
            mean = row_words.scores(mean.T, "mean").mean(-1)
            answer = text.answer_of("The mean of all rows and layers", words.texts, mean)
            outputs = None if columns.texts == rows.texts else rows
            examples.append(page.Example(title, columns, outputs, maps=maps, answer=answer))
    return examples


@make_page.register
def _components_page(scores: ComponentScores) -> page.Page:
    """Show what the components of a model contribute to the output of each example."""
    examples = []
    for single in scores:
        shown, edges = [], single.top(sys.maxsize, "edges") if "edges" in single.parts else []
        for kind, stacks in (_written(single) | dict(single.parts)).items():
            for stack, (part, *_) in stacks.items() if kind != "edges" else ():
                values = part if kind in NUMBERED else part[:, None]
                values = values.sum(-1) if values.dim() == len("LUS") and values.numel() > _MOST_SCORES else values
                tokens = page.Tokens(text.component_tokens(single, stack))
                shown.append(page.Components(kind, cast(page.Stack, stack), single.unit, values, tokens))
        title, answer = text.shortened(str(single.outputs[0]), _TITLE), text.components_answer(single)
        facts = single.outputs[0].facts() if len(scores) > 1 else {}
        example = page.Example(title, page.Tokens([]), components=shown, facts=facts, answer=answer)
        promoted, total = next(iter(single.promoted), {}), sum(abs(row.score) for row in edges)
        ends: Any = [(*row.name.split("->"), float(f"{row.score:.4g}")) for row in edges[:_MOST_EDGES]]
        examples.append(replace(example, promoted=promoted, edges=ends, edges_total=total))
    what = text.components_subject(scores) if len(scores) == 1 else "each output"
    return page.Page(f"What inside {scores.model} contributes to {what}?", scores.facts(), examples)


def _written(single: ComponentScores) -> dict[Component, Mapping[str, Tensor]]:
    """Add up the edges out of input, heads and networks, if they were read: these are the scores of the components."""
    written = dict[Component, Mapping[str, Tensor]]()
    for stack, part in single.parts.get("edges", {}).items():
        layers = sum(name.startswith("m") for name in edge_ends(*part.shape[1:])[0])
        rest = part[:, 1:].sum(2).unflatten(1, (layers, -1))
        written = {"heads": {stack: rest[..., :-1]}, "feed_forward": {stack: rest[..., -1]}}
        written["residual"] = {stack: part[:, :1].sum(2)}
    return written


def patches_page(
    pictures: Sequence[Any],
    scores: Tensor,
    patches: Sequence[Patches],
    *,
    maps: AttributionMaps | None = None,
    method: str = "method",
    unit: str = "score",
    title: str = "What does each patch contribute?",
) -> page.Page:
    """Put pictures on a page, under the scores of their patches, with the words beside them.

    Args:
        pictures: each picture as :func:`captum_norm.show.draw_patches` takes it, in the order of the inputs.
        scores: a score for each position of each example, (B, S), as ``attribute`` returns.
        patches: where the patches of each picture stand, such as :attr:`captum_norm.AttributionMaps.patches`.
        maps: the maps of the only self-attention stack, to show the row of each patch and word, whose tokens name the
            words; None for scores alone, and words named by their numbers.
        method: the method's name.
        unit: what the scores are.
        title: the page's heading.

    Raises:
        InvalidInputError: there are no patches, no picture for some, or the scores are of other inputs.

    Example:
        >>> import torch
        >>> where = Patches(example=0, picture=0, positions=torch.tensor([[1, 2], [3, 4]]))
        >>> page = patches_page([torch.rand(3, 8, 8)], torch.rand(1, 5), [where])
        >>> page.examples[0].inputs.texts[-1]
        'patch 2, 2'
    """
    if not patches or max(patch.picture for patch in patches) >= len(pictures):
        raise InvalidInputError(
            f"got {len(pictures)} pictures and the patches of {len(patches)}; expected a picture for each, in the "
            "order of the inputs"
        )
    examples = []
    for number in sorted({patch.example for patch in patches}):
        of_example = [patch for patch in patches if patch.example == number]
        for patch in of_example:
            patch.scores(scores)  # refuses scores of other inputs
        values = scores[number]
        tokens = [f"token {place}" for place in range(len(values))]
        names = tokens if maps is None or maps.tokens is None else list(maps.tokens[number])
        for place, patch in enumerate(of_example, 1):
            which = f"picture {place}, " if len(of_example) > 1 else ""
            for row, line in enumerate(patch.positions.tolist(), 1):
                for column, position in enumerate(line, 1):
                    names[position] = f"{which}patch {row}, {column}"
        stacks = [] if maps is None else [maps.self_attention[number]]
        examples.append(
            page.Example(
                f"example {number}",
                page.Tokens(names),
                scores=[page.Scores(method, unit, values)],
                maps=[page.Maps(method, "entry", stack, range(len(stack))) for stack in stacks],
                pictures=[
                    page.Picture(_png(pictures[patch.picture]), patch.positions.tolist()) for patch in of_example
                ],
                answer=text.answer_of("The output", names, values),
            )
        )
    return page.Page(title, examples=examples)


def _png(picture: Any) -> bytes:
    from matplotlib.image import imsave

    pixels = pixels_of(picture)
    step = -(-max(pixels.shape[:2]) // _MOST_PIXELS)
    buffer = io.BytesIO()
    imsave(buffer, pixels[::step, ::step], format="png", metadata={"Software": ""})
    return buffer.getvalue()


def flow_graph(graph: FlowGraph, method: str, *, starts: Mapping[str, int] | None = None, first: int = 0) -> page.Graph:
    """Put a graph of information flow on a page, whose stacks start at these inputs and whose first row is this one."""
    starts = starts or {}
    index = {node: place for place, node in enumerate(graph.nodes)}
    return page.Graph(
        [(*node[:3], node.position + starts.get(node.stack, 0)) for node in graph.nodes],
        [
            (index[edge.source], index[edge.target], edge.part, edge.head, float(f"{edge.importance:.6g}"))
            for edge in graph.edges
        ],
        [(node.position - first, index[node]) for node in graph.outputs],
        graph.threshold,
        method,
    )


def tokens_of(words: Words) -> page.Tokens:
    """Return tokens as people write them, and their words."""
    return page.Tokens(words.pieces, words.numbers, words.texts)


@make_page.register
def comparison_page(comparison: Comparison) -> page.Page:
    """Put a comparison on a page: measures and cost, the texts with a row for each method, agreement and curves."""
    examples = range(min(len(comparison), _MOST_EXAMPLES))
    left_out = f"Shown are the first {len(examples)} of {len(comparison)} texts. The measures are of all."
    tables = [_measure_table(comparison), _agreement_table(comparison)]
    if comparison.refused:
        tables.append(_word_table("Methods that were refused", "reason", comparison.refused))
    signatures = {name: comparison.results[name].signature for name in comparison.ranking}
    gains = [f"{name} ({text.decimal(comparison.means()[name][MEASURES[0].name])})" for name in comparison.ranking]
    return page.Page(
        f"Which method knows best what {comparison.model} depends on?",
        facts=comparison.facts(),
        answer=f"By gain, {gains[0]} knows it best{f', {gains[-1]} least' if gains[1:] else ''}."
        + ("" if any(comparison.best().values()) else " No difference is more than chance: take more texts."),
        examples=[_compared_example(comparison, example) for example in examples],
        tables=[*tables, _word_table("Signatures", "signature", signatures, folded=True)],
        figures=_curves(comparison),
        notes=[left_out] if len(examples) < len(comparison) else [],
    )


def _compared_example(comparison: Comparison, example: int) -> page.Example:
    tokens, removable, rows = text.example_scores(comparison, example)
    return page.Example(
        text.shortened(" ".join(tokens), _TITLE),
        tokens_of(words_of_tokens(tokens)),
        facts=comparison.outputs[example].facts(),
        scores=[page.Scores(name, "score", row) for name, row in zip(comparison.ranking, rows, strict=True)],
        counted=removable,
    )


def _measure_table(comparison: Comparison) -> page.Table:
    measures, means, best = text.shown_measures(comparison), comparison.means(), comparison.best()
    time = "time ÷ that of the plain forward pass, one run after a warm-up"
    columns = [page.Column("method"), *map(_measure_column, measures), page.Column("seconds", "number", 2)]
    columns.append(page.Column("× forward", "number", 1, time))
    rows: list[list[page.Cell]] = []
    strong = []
    for place, name in enumerate(comparison.ranking):
        result = comparison.results[name]
        rows.append([name, *(means[name][measure.name] for measure in measures), result.seconds, result.forward_ratio])
        strong += [(place, column) for column, measure in enumerate(measures, 1) if name in best[measure.name]]
    count = f"{len(comparison)} {'example' if len(comparison) == 1 else 'examples'}"
    note = f"Means over {count}, by descending gain. {text.BOLD}"
    return page.Table("Faithfulness and cost", columns, rows, note=note, strong=strong)


def _measure_column(measure: Measure) -> page.Column:
    meaning = f"{measure.meaning}; {'higher' if measure.higher else 'lower'} is better"
    return page.Column(f"{measure.title} {measure.arrow}", "number", 3, meaning)


def _agreement_table(comparison: Comparison) -> page.Table:
    order = [list(comparison.results).index(name) for name in comparison.ranking]
    named = list(zip(comparison.ranking, comparison.agreement[order][:, order].tolist(), strict=True))
    columns = [page.Column(str(place), "heat", 2, name) for place, (name, _) in enumerate(named, 1)]
    return page.Table(
        "Agreement",
        [page.Column("method"), *columns],
        [[f"{place} {name}", *values] for place, (name, values) in enumerate(named, 1)],
        note="Spearman's ρ of two methods' scores of the tokens that may be removed, mean over examples.",
    )


def _word_table(title: str, column: str, words: Mapping[str, str], *, folded: bool = False) -> page.Table:
    return page.Table(title, [page.Column("method"), page.Column(column)], list(words.items()), folded=folded)


def _curves(comparison: Comparison) -> list[page.Figure]:
    """Draw each method's curves; all have the same axes."""
    results = {name: comparison.results[name].faithfulness for name in comparison.ranking}
    curves = {name: (result.morf.mean(0).tolist(), result.lerf.mean(0).tolist()) for name, result in results.items()}
    values = [value for pair in curves.values() for curve in pair for value in curve]
    output = "the probability" if comparison.explained == "probability" else "the output"
    return [
        page.Figure(
            f"{name}: gain {text.decimal(float(results[name].relevance_gain.mean()))}",
            plot_svg(draw_curves(most, least, (min(values), max(values)))),
            group="What the output does when tokens go",
            note="Solid: most relevant tokens first; dashed: least relevant first. Across: share of tokens removed; "
            f"up: {output}, mean over examples. The area between is the gain.",
        )
        for name, (most, least) in curves.items()
    ]


@make_page.register
def answers_page(comparison: AnswerComparison) -> page.Page:
    """Put a comparison on answers on a page: measures and cost, and each prompt's sources with their scores."""
    rows, best = comparison.records(), comparison.best()
    p = page.Column("p of LDS", "number", 3, f"paired permutation test against {comparison.baseline}")
    cost = page.Column("× forward", "number", 1, "time ÷ that of plain forward passes")
    columns = [page.Column("method"), *map(_measure_column, ANSWER_MEASURES), p, cost]
    cells: list[list[page.Cell]] = []
    strong = []
    for place, row in enumerate(rows):
        found = [text.with_interval(row, measure.name) for measure in ANSWER_MEASURES]
        cells.append([row["method"], *found, row["lds_p"], row["forward_ratio"]])
        strong += [(place, at) for at, one in enumerate(ANSWER_MEASURES, 1) if row["method"] in best[one.name]]
    shown = min(len(comparison), _MOST_EXAMPLES)
    note = f"Means over {len(comparison)} answers ± half the 95 % bootstrap interval, by descending LDS. {text.BOLD}"
    first = f"{rows[0]['method']} ({text.decimal(rows[0]['lds'])})"
    return page.Page(
        f"Which method knows best what {comparison.model}’s answers rest on?",
        facts=comparison.facts(),
        answer=f"By LDS, {first} knows it best." if len(rows) > 1 else "",
        examples=[_compared_answer(comparison, number, [row["method"] for row in rows]) for number in range(shown)],
        tables=[page.Table("Measures and cost", columns, cells, note=note, strong=strong)],
        notes=[f"Shown are the first {shown} of {len(comparison)} answers."] if shown < len(comparison) else [],
    )


def _compared_answer(comparison: AnswerComparison, number: int, methods: Sequence[str]) -> page.Example:
    sources, evidence = comparison.sources[number], comparison.evidence[number]
    kept = [name for name in methods if not comparison.results[name].refused[number]]
    scores = {name: comparison.results[name].scores[number, : len(sources)] for name in kept}
    answer = comparison.answers[number].strip()
    return page.Example(
        text.shortened(answer, _TITLE),
        page.Tokens(sources),
        facts={"evidence": " ".join(sources[place].strip() for place in evidence)} if evidence else {},
        scores=[page.Scores(name, "score", values) for name, values in scores.items()],
        answer=text.answer_of(f"By {kept[0]}, “{answer}”", sources, scores[kept[0]]) if kept else "",
    )


def write_report(result: AnalysisResult, directory: str | os.PathLike[str]) -> list[Path]:
    """Write a result into a folder, which is created if needed.

    Writes ``TABLE.csv`` for each table, ``PLOT.png`` and ``PLOT.pdf`` for each plot, ``report.html``, a self-contained
    page, and last ``results.json``, the complete result: if it exists, all others do. Each file is written atomically
    and replaces an older one. Equal results give equal bytes.

    Args:
        result: the result of an analysis.
        directory: the folder, or its URL.

    Returns:
        The files, in the order in which they were written.

    Raises:
        InvalidInputError: a plot does not fit its table; nothing is written.
        OSError: the folder cannot be created or written to.
    """
    contents = number_files(result)
    for plot in result.plots:
        figure = draw_plot(result, plot)
        for suffix in ("png", "pdf"):
            contents[f"{plot.name}.{suffix}"] = plot_bytes(figure, suffix)
    contents["report.html"] = page.render(analysis_page(result)).encode()
    contents[RESULTS] = contents.pop(RESULTS)  # last
    if is_url(directory):
        place_of(directory).make()
    else:
        Path(directory).mkdir(parents=True, exist_ok=True)
    return [write_whole(f"{directory}/{name}", content) for name, content in contents.items()]


@make_page.register
def analysis_page(result: AnalysisResult) -> page.Page:
    """Put the result of an analysis on a page."""
    where = f" in {result.metadata['model']}" if "model" in result.metadata else ""
    summary = page.Table(
        "In short",
        [page.Column("measure"), page.Column("value", "number")],
        [[name, _headline(value)] for name, value in result.summary.items()],
    )
    return page.Page(
        f"What does {result.analysis} find{where}?",
        answer="; ".join(f"{name}: {value}" for name, value in summary.rows if value is not None),
        lead=result.description,
        facts=dict(_facts(result.metadata)),
        tables=[*([summary] if result.summary else []), *map(_page_table, result.tables)],
        figures=[page.Figure(plot.title, plot_svg(draw_plot(result, plot))) for plot in result.plots],
    )


def _page_table(table: Table) -> page.Table:
    """Put a table of an analysis on a page: its first rows if it is long."""
    columns = []
    for column in table.columns:
        has_words = any(isinstance(cell, str) for cell in table.column(column.name))
        columns.append(page.Column(column.label, "text" if has_words else "number"))
    return page.Table(
        table.title,
        columns,
        [[text.printable(cell) if isinstance(cell, str) else cell for cell in row] for row in table.rows[:_MOST_SHOWN]],
        folded=len(table.rows) > _MOST_OPEN,
        note=f"The first {_MOST_SHOWN} of {len(table.rows)} rows; {table.name}.csv has all."
        if len(table.rows) > _MOST_SHOWN
        else "",
    )


def _headline(value: float | None) -> str | None:
    if value is None:
        return None
    size = abs(value)
    digits = ",.0f" if size >= 1000 or value == round(value) else ".3f" if 0.001 < size < 1 else ".3g"
    return f"{value:{digits}}".replace("-", "−")


def _facts(metadata: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Flatten the metadata."""
    for name, value in metadata.items():
        if isinstance(value, Mapping):
            yield from _facts(value, f"{prefix}{name} ")
        else:
            values = value if isinstance(value, list | tuple) else [value]
            yield f"{prefix}{name}", ", ".join("–" if item is None else str(item) for item in values)

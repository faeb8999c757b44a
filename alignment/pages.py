"""Puts word alignments on pages: sentence pairs with maps, links and gold links, and what a sweep found."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure as Drawing
from numpy.typing import ArrayLike
from rich.table import Table as TerminalTable

from alignment.aer import alignment_error_rate
from alignment.aligner import Pairs, TextAligner
from alignment.alignments import Alignments
from alignment.lexicon import Lexicon
from alignment.links import Alignment, GoldAlignment, ScoredAlignment
from alignment.selection import SETTINGS, Choice
from alignment.sweep import ATTENTION, AUTO, TITLES, Reading, Sweep, head_figure, layer_figure, tables
from captum_norm import InvalidInputError
from captum_norm.results import make_figure, make_page
from captum_norm.show import Panel, draw_heatmaps, figure_bytes
from captum_norm.show.page import Column, Example, Figure, Links, Maps, Page, Table, Tokens

_NO_FACTS: Mapping[str, str] = MappingProxyType({})
_MOST_EXAMPLES = 8
_MOST_PAIRS = 50
_TITLE = 60
_MOST_NAMED = 3


def alignment_page(
    sources: Sequence[Sequence[str]],
    targets: Sequence[Sequence[str]],
    alignments: Sequence[Alignment | ScoredAlignment],
    *,
    maps: Sequence[ArrayLike | None] | None = None,
    gold: Sequence[GoldAlignment] | None = None,
    title: str = "Which words translate each other?",
    method: str = "alignment",
    facts: Mapping[str, str] = _NO_FACTS,
) -> Page:
    """Put the alignments of sentence pairs on a page, right and wrong links marked if there are gold links.

    Args:
        sources: the words of each source sentence.
        targets: the words of each target sentence.
        alignments: the alignment of each pair, with or without probabilities.
        maps: the word map that each alignment was read from, (T, S) or with the null column (T, S + 1); None without.
        gold: the gold alignment of each pair.
        title: the page's heading.
        method: what to call the maps.
        facts: names and values to show under the heading.

    Example:
        >>> page = alignment_page([["la", "maison"]], [["the", "house"]], [Alignment([(0, 0), (1, 1)])])
        >>> page.examples[0].title, page.examples[0].links[0].links
        ('la maison', [(0, 0, None), (1, 1, None)])
    """
    names = ("source sentences", "target sentences", "alignments", "maps", "gold alignments")
    lists = dict(zip(names, (sources, targets, alignments, maps, gold), strict=True))
    counts = {name: len(entries) for name, entries in lists.items() if entries is not None}
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise InvalidInputError(f"got {numbers}; expected equally many")
    examples = []
    for index, (source, target, links) in enumerate(zip(sources, targets, alignments, strict=True)):
        word_map = None if maps is None else maps[index]
        shown = {} if word_map is None else {method: [np.asarray(word_map)[None, :, : len(source)]]}
        pair_gold = None if gold is None else gold[index]
        examples.append(_example(source, target, shown, {"": links}, pair_gold, stack="links"))
    return Page(title, facts=facts, examples=examples)


@make_page.register
def _page(alignments: Alignments) -> Page:
    return alignment_page(alignments.sources, alignments.targets, alignments)


@make_figure.register
def draw_links(alignments: Alignments) -> Drawing:
    """Draw the links of the only sentence pair, source words across and target words down."""
    if len(alignments) != 1 or not alignments.sources[0] or not alignments.targets[0]:
        raise InvalidInputError(
            f"got alignments of {len(alignments)} sentence pairs; draw those of one that has words: alignments[:1]"
        )
    (links,), (source,), (target,) = alignments, alignments.sources, alignments.targets
    grid = [[float((i, j) in links) for i in range(len(source))] for j in range(len(target))]
    return draw_heatmaps([Panel("links", grid, "link")], target, source)


def aligner_page(
    aligner: TextAligner,
    pairs: Pairs,
    *,
    gold: Sequence[GoldAlignment] | None = None,
    facts: Mapping[str, str] = _NO_FACTS,
    min_score: float = 0.0,
    counts: Lexicon | None = None,
) -> Page:
    """Put the first sentence pairs on a page, as an aligner reads them: maps, links and their probabilities.

    Args:
        aligner: the aligner; what it leaves open is chosen on these pairs.
        pairs: source words and target words; those that cannot be used are left out.
        gold: the gold alignment of each pair.
        facts: names and values to show under the heading.
        min_score: links less probable than this are left out.
        counts: what an aligner that counts a text's word pairs counted of the text that these pairs are of; None for
            the counts of these pairs.
    """
    if gold is not None and len(gold) != len(pairs):
        raise InvalidInputError(f"got {len(pairs)} sentence pairs, {len(gold)} gold alignments; expected equally many")
    shown = pairs if aligner.count_text and counts is None else pairs[:_MOST_PAIRS]
    answers = sorted(aligner.map_each(shown), key=lambda answer: answer[0])
    maps = {index: word_map for index, word_map in answers if not isinstance(word_map, InvalidInputError)}
    lexicon, owns = aligner.count(shown, maps.items())
    lexicon = lexicon if counts is None else counts
    maps = {index: word_map for index, word_map in maps.items() if index < _MOST_PAIRS}
    return alignment_page(
        [shown[index][0] for index in maps],
        [shown[index][1] for index in maps],
        [
            aligner.read(word_map, *shown[index], lexicon, owns.get(index)).at_least(min_score)
            for index, word_map in maps.items()
        ],
        maps=list(maps.values()),
        gold=None if gold is None else [gold[index] for index in maps],
        facts=facts,
    )


def sweep_page(sweep: Sweep, model: str) -> Page:
    """Put a sweep on a page: its tables and figures, and every head's maps of the sentences that are aligned worst."""
    corpus, chosen = sweep.corpus, sweep.chosen[AUTO]
    direction = f"{corpus.source_language}–{corpus.target_language}"
    worst = _worst(sweep, sweep.results[Reading("norm", chosen)].alignments)
    best = sweep.best("norm", per_head=True)
    unsupervised = sweep.results[Reading("norm", chosen)].score.aer
    # The best head first.
    shown = sorted(tables(sweep), key=lambda table: not str(table.title).startswith("AER by head"))
    return Page(
        f"Which head aligns? {corpus.name}, {direction}",
        answer=f"{best.reading.place} aligns best by its norms: {best.score.aer:.1f} % AER. "
        f"Chosen without gold, {chosen} has {unsupervised:.1f} %.",
        facts={
            "model": model,
            "sentence pairs": str(len(corpus)),
            "chosen without gold": str(chosen),
            "numbers": "AER in %; layers and heads from 0",
        },
        examples=[_swept(sweep, index, rate) for index, rate in worst],
        tables=[_table(table) for table in shown],
        figures=[
            Figure(title, figure_bytes(figure, "svg").decode())
            for title, figure in (
                ("AER by setting and layer", layer_figure(sweep)),
                (f"AER by layer and head, {chosen.setting}", head_figure(sweep)),
            )
        ],
        notes=[f"The texts are the {len(worst)} of {len(corpus)} pairs that norms align worst, read at {chosen}."],
    )


def _worst(sweep: Sweep, alignments: Sequence[Alignment]) -> list[tuple[int, float]]:
    """The pairs with the highest error rates, those first; of equal ones the longer first."""
    corpus = sweep.corpus
    rates = [
        alignment_error_rate([links], [gold]).aer if gold.sure or gold.possible or links else 0.0
        for links, gold in zip(alignments, corpus.gold, strict=True)
    ]
    order = sorted(range(len(rates)), key=lambda index: (-rates[index], -len(corpus.sources[index])))
    return [(index, rates[index]) for index in order[:_MOST_EXAMPLES]]


def _swept(sweep: Sweep, index: int, rate: float) -> Example:
    """One sentence pair: the maps of norms and weights in both settings, and their links where ``auto`` reads."""
    corpus, chosen = sweep.corpus, sweep.chosen[AUTO]
    source = corpus.sources[index]
    maps: dict[str, list[Any]] = {}
    links: dict[str, Alignment] = {}
    for setting in (chosen.setting, *(other for other in SETTINGS if other != chosen.setting)):
        for method in ATTENTION:
            # (layers, 1 + heads, T, S), that of all heads together first
            values = np.stack(
                [
                    [
                        sweep.maps[method, Choice(setting, layer, head)][index][:, : len(source)]
                        for head in (None, *range(sweep.heads))
                    ]
                    for layer in range(sweep.layers)
                ]
            )
            name = f"{TITLES[method]}, {setting}"
            maps[name] = [values[:, 1:], values[:, 0]]
            links[name] = sweep.results[Reading(method, Choice(setting, chosen.layer))].alignments[index]
    facts = {"pair": str(index), "AER": f"{rate:.1f}"}
    return _example(source, corpus.targets[index], maps, links, corpus.gold[index], facts)


def _example(
    source: Sequence[str],
    target: Sequence[str],
    maps: Mapping[str, Sequence[Any]],
    links: Mapping[str, Alignment | ScoredAlignment],
    gold: GoldAlignment | None,
    facts: Mapping[str, str] = _NO_FACTS,
    stack: Literal["cross", "links"] = "cross",
) -> Example:
    title = " ".join(source)
    return Example(
        title if len(title) <= _TITLE else f"{title[: _TITLE - 1]}…",
        Tokens(source),
        Tokens(target),
        maps=[
            # Rounded to the three digits that a picture shows: such numbers compress to half.
            Maps(name, "entry", values.astype(np.float16).astype(np.float32), range(len(values)), stack)
            for name, stacks in maps.items()
            for values in stacks
        ],
        links=[
            Links(
                _with_probabilities(alignment),
                sure=None if gold is None else _target_first(gold.sure),
                possible=None if gold is None else _target_first(gold.possible),
                method=name,
            )
            for name, alignment in links.items()
        ],
        facts=facts,
        answer=_answer(source, target, next(iter(links.values())), gold),
    )


def _answer(
    source: Sequence[str], target: Sequence[str], links: Alignment | ScoredAlignment, gold: GoldAlignment | None
) -> str:
    """Say which words are linked, the surest first, which have no link, and how many links are right."""
    scored = sorted(_with_probabilities(links), key=lambda link: -(link[2] or 0.0))
    if not scored:
        return "No words are linked."
    named = [
        f"“{source[i]}” – “{target[j]}”{'' if score is None else f' ({100 * score:.0f} %)'}" for j, i, score in scored
    ]
    known = scored[0][2] is not None
    parts = [
        f"{len(named)} link{'s' * (len(named) > 1)}{', surest' if known else ':'} {', '.join(named[:_MOST_NAMED])}"
    ]
    linked = {i for _, i, _ in scored}
    alone = [f"“{word}”" for place, word in enumerate(source) if place not in linked]
    if alone:
        more = [f"{len(alone) - _MOST_NAMED} more"] * (len(alone) > _MOST_NAMED)
        parts.append(f"without a link: {', '.join([*alone[:_MOST_NAMED], *more])}")
    if gold is not None:
        parts.append(f"{sum((i, j) in gold.possible for j, i, _ in scored)} agree with the gold links")
    return f"{'; '.join(parts)}."


def _target_first(links: Alignment) -> list[tuple[int, int]]:
    return [(target, source) for source, target in links]


def _with_probabilities(alignment: Alignment | ScoredAlignment) -> list[tuple[int, int, float | None]]:
    if isinstance(alignment, ScoredAlignment) and alignment.probabilities is not None:
        return [(target, source, score) for (source, target), score in alignment.scored_links()]
    links = alignment.links if isinstance(alignment, ScoredAlignment) else alignment
    return [(target, source, None) for source, target in links]


def _table(table: TerminalTable) -> Table:
    """A table of the terminal for a page; the smallest rate of each row of places is bold."""
    cells = [list(column.cells) for column in table.columns]
    rows = [[str(cell) or None for cell in row] for row in zip(*cells, strict=True)]
    numbers = [index for index, column in enumerate(table.columns) if column.justify == "right"]
    title = str(table.title)
    strong = []
    if title.startswith(("AER by setting", "AER by head")):
        for row, texts in enumerate(rows):
            rates = {index: float(texts[index] or "inf") for index in numbers if texts[index] not in (None, "–")}
            strong += [(row, index) for index, rate in rates.items() if rate == min(rates.values())]
    return Table(
        title,
        [
            Column(str(column.header), "number" if index in numbers else "text")
            for index, column in enumerate(table.columns)
        ],
        rows,
        strong=strong,
    )

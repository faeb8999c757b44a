"""Prints results in the terminal.

Each type of result has its function, registered with :data:`print_result`. Without colours (a file, a pipe,
``NO_COLOR``, an old terminal), blocks and bars show the scores.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import singledispatch
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from captum_norm.explanation import Explanation
from captum_norm.generation.result import GenerationResult
from captum_norm.lab.analysis.results import AnalysisResult
from captum_norm.lab.answers import ANSWER_MEASURES, AnswerComparison
from captum_norm.lab.comparison import Comparison
from captum_norm.results.components import ComponentScores
from captum_norm.results.outputs import facts_of_outputs
from captum_norm.show import text
from captum_norm.show.colors import Rgb, color_of, hex_of, ink_on, shares_of
from captum_norm.text.characters import spelled_out
from captum_norm.text.words import words_of_text, words_of_tokens

__all__ = ["plain_table", "print_result", "show_tokens"]

_BAR_WIDTH = 20
_BLOCKS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_UNLIMITED = 10_000
_ANSWER_ROWS = 12
_MOST_ROWS = 40


def token_row(tokens: Sequence[str], scores: Sequence[float], *, colored: bool) -> Text:
    """Format tokens on grounds as dark as their scores, negative ones orange; or with blocks, negative ones as 0."""
    text.check_length(tokens, len(scores), "scores")
    if colored:
        pairs = zip(tokens, shares_of(scores), strict=True)
        return Text(" ").join(Text(f" {text.printable(token)} ", _style(color_of(share))) for token, share in pairs)
    pairs = zip(tokens, shares_of([max(score, 0.0) for score in scores]), strict=True)
    return Text(
        " ".join(f"{text.printable(token)}{_BLOCKS[round(share * (len(_BLOCKS) - 1))]}" for token, share in pairs)
    )


def show_tokens(console: Console, tokens: Sequence[str], scores: Sequence[float], *, unit: str) -> None:
    """Print the tokens and a legend, on coloured backgrounds, or with blocks if the console has few colours or none.

    Args:
        console: where to print.
        tokens: the texts of the S tokens.
        scores: S scores; negative ones have colours of their own, and without colours count as 0.
        unit: the unit of the scores.

    Raises:
        ValueError: the numbers of tokens and scores differ.

    Example:
        >>> show_tokens(Console(color_system=None), ["a", "b"], [1.0, 0.5], unit="norm")
        a█ b▅
        0 ▁▂▃▄▅▆▇█ 1 (norm)
    """
    colored = _has_colors(console)
    console.print(token_row(tokens, scores, colored=colored))
    if colored and min(scores, default=0.0) < 0:
        most = f"{max(map(abs, scores)):.3g}"
        console.print(Text.assemble(f"−{most} ", _colors(-1), _colors(1), f" {most} ({unit})"))
    else:
        ramp = _colors(1) if colored else Text(_BLOCKS)
        console.print(Text.assemble("0 ", ramp, f" {max(scores, default=0.0):.3g} ({unit})"))


def score_table(
    tokens: Sequence[str], scores: Sequence[float], *, unit: str, top: int | None = None, named: str = "token"
) -> Table:
    """Create a table of the tokens: index, token, score, and a bar; in the order of the text, or the highest ones."""
    text.check_length(tokens, len(scores), "scores")
    table = plain_table("", ["index", named], [unit])
    table.columns[0].justify = "right"
    table.add_column("", width=_BAR_WIDTH, no_wrap=True)
    texts, shares = text.formatted(scores), shares_of(scores)
    places = range(len(scores)) if top is None else sorted(range(len(scores)), key=lambda place: -scores[place])[:top]
    for place in places:
        bar = Text(_bar(abs(shares[place])), style=hex_of(color_of(0.5 if shares[place] >= 0 else -0.5)))
        table.add_row(str(place), Text(text.printable(tokens[place])), texts[place], bar)
    return table


def _has_colors(console: Console) -> bool:
    """Whether a console can show the scale, for which 16 colours are not enough."""
    return console.color_system in ("256", "truecolor") and not console.no_color


def _style(ground: Rgb) -> str:
    return f"{hex_of(ink_on(ground))} on {hex_of(ground)}"


def _colors(sign: int) -> Text:
    shares = [sign * step / (_BAR_WIDTH - 1) for step in range(_BAR_WIDTH)][::sign]
    return Text.assemble(*((" ", _style(color_of(share))) for share in shares))


def _bar(share: float) -> str:
    full, eighth = divmod(round(share * _BAR_WIDTH * 8), 8)
    return ("█" * full + _EIGHTHS[eighth]).rstrip()


def plain_table(title: str, words: Iterable[str], numbers: Iterable[str] = ()) -> Table:
    """Create a table without lines: left-aligned columns of words, then right-aligned columns of numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in words:
        table.add_column(name, vertical="bottom")
    for name in numbers:
        table.add_column(name, justify="right", vertical="bottom")
    return table


def _say(console: Console, line: str) -> None:
    """Print a line literally, without wrapping it."""
    console.print(Text(line), soft_wrap=True)


def _say_facts(console: Console, facts: Mapping[str, str]) -> None:
    for name, value in facts.items():
        _say(console, f"{name}: {spelled_out(value)}")


@singledispatch
def print_result(result: Any, console: Console, **options: Any) -> None:
    """Print a result to a console; ``print_result.register(kind)`` says how that of a type is printed."""
    raise NotImplementedError(f"{type(result).__name__} is not printed")


@print_result.register
def _print_explanation(explanation: Explanation, console: Console, *, top: int | None = None) -> None:
    """Print the tokens of each text in colour, a legend and the table of scores, or of the highest ones."""
    _say_facts(console, explanation.facts() | ({"note": " ".join(explanation.notes)} if explanation.notes else {}))
    for place, single in enumerate(explanation):
        console.print()
        if len(explanation) > 1:
            _say(console, f"text {place}: {spelled_out(single.texts[0])}")
            _say_facts(console, facts_of_outputs(single.outputs))
        tokens, scores = single.tokens[0], single.scores[0].tolist()
        show_tokens(console, tokens, scores, unit=explanation.unit)
        console.print("", score_table(tokens, scores, unit=explanation.unit, top=top), sep="\n")


@print_result.register
def _print_answer(result: GenerationResult, console: Console, *, top: int | None = None) -> None:
    """Print the prompt in colour, a legend, and a table of the parts of highest score."""
    unit = result.explained.unit
    _say_facts(console, result.facts() | ({"note": result.explained.note} if result.explained.note else {}))
    console.print()
    show_tokens(console, words_of_text(result.input_tokens).pieces, result.seq_attr.tolist(), unit=unit)
    best = result.top(top or _ANSWER_ROWS)
    console.print("", score_table([name for name, _ in best], [score for _, score in best], unit=unit), sep="\n")


@print_result.register
def _print_components(scores: ComponentScores, console: Console, *, top: int | None = None) -> None:
    """Print the answer for each example, and a table of the strongest components of each kind."""
    _say_facts(console, scores.facts())
    for place, single in enumerate(scores):
        console.print()
        if len(scores) > 1:
            _say(console, f"example {place}: {spelled_out(str(single.outputs[0]))}")
        _say(console, text.components_answer(single))
        for kind in single.parts:
            best = single.top(top or _ANSWER_ROWS, kind)
            names = [f"{text.noun_of(kind)} {text.component_place(single, row)}" for row in best]
            table = score_table(names, [row.score for row in best], unit=scores.unit, named="component")
            console.print("", table, sep="\n")


@print_result.register
def _print_analysis(result: AnalysisResult, console: Console) -> None:
    """Print the description of an analysis and its tables, except long ones."""
    corpus = result.metadata["corpus"]
    size = f"{corpus['texts']:,} text{'s' * (corpus['texts'] != 1)} of {corpus['name']}, {corpus['tokens']:,} tokens"
    _say(console, f"{result.analysis}: {result.metadata['model']}, {size}")
    console.print(Text(result.description), "", sep="\n")
    for table in result.tables:
        if len(table.rows) > _MOST_ROWS:
            console.print(Text(f"{table.title}: {len(table.rows)} rows\n"))
            continue
        printed = plain_table(table.title, [column.label for column in table.columns])
        for column, cells in zip(printed.columns, zip(*table.rows, strict=True), strict=False):
            column.justify = "left" if any(isinstance(cell, str) for cell in cells) else "right"
        for row in table.rows:
            printed.add_row(*(Text(_cell_text(cell)) for cell in row))
        console.print(printed, "")


def _cell_text(cell: object) -> str:
    return "–" if cell is None else f"{cell:.3f}" if isinstance(cell, float) else str(cell)


@print_result.register
def _print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the facts of a comparison, the table of methods, and the scores of the first example."""
    _say_facts(console, comparison.facts())
    console.print()
    table = _method_table(comparison)
    # At its full width, since truncated names and numbers are useless.
    table.width = console.measure(table, options=console.options.update(max_width=_UNLIMITED)).maximum
    console.print(table, crop=False)
    _say(
        console,
        "Rows by descending gain; ↑ higher is better, ↓ lower; × forward: ÷ the time of the plain forward pass.",
    )
    _say(console, text.BOLD)
    for name, reason in comparison.refused.items():
        _say(console, f"refused: {name}: {reason}")
    _say(console, f"\n{text.example_title(comparison, 0)}")
    tokens, removable, scores = text.example_scores(comparison, 0)
    rows = plain_table("", ["method", "scores of the tokens"])
    for name, row in zip(comparison.ranking, scores, strict=True):
        shares = shares_of(row, removable)
        rows.add_row(Text(name), token_row(words_of_tokens(tokens).pieces, shares, colored=_has_colors(console)))
    console.print(rows)


def _method_table(comparison: Comparison) -> Table:
    measures, means, best = text.shown_measures(comparison), comparison.means(), comparison.best()
    titles = [f"{measure.title.replace('-', '- ')} {measure.arrow}" for measure in measures]
    table = plain_table("", ["method"], ["\n".join(title.split()) for title in (*titles, "time (s)", "× forward")])
    for name in comparison.ranking:
        result = comparison.results[name]
        cells = [
            Text(text.decimal(means[name][measure.name]), style="bold" if name in best[measure.name] else "")
            for measure in measures
        ]
        table.add_row(Text(name), *cells, f"{result.seconds:.2f}", f"{result.forward_ratio:.1f}")
    return table


@print_result.register
def _print_answer_comparison(comparison: AnswerComparison, console: Console) -> None:
    """Print a table of all methods: means ± half their intervals, bold where none is better by more than chance."""
    _say_facts(console, comparison.facts())
    titles = [f"{measure.title} {measure.arrow}" for measure in ANSWER_MEASURES]
    table, best = plain_table("", ["method"], [*titles, "p of LDS", "time (s)", "× forward"]), comparison.best()
    for row in comparison.records():
        cells = []
        for name in (measure.name for measure in ANSWER_MEASURES):
            style = "bold" if row["method"] in best[name] else ""
            cells.append(Text(text.with_interval(row, name), style=style))
        cost = [text.decimal(row["lds_p"]), f"{row['seconds']:.2f}", text.decimal(row["forward_ratio"], 1)]
        table.add_row(Text(row["method"]), *cells, *cost)
    console.print("", table, sep="\n")

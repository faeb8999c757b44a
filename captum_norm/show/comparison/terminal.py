"""Prints a comparison of methods."""

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from captum_norm.lab.comparison.results import Comparison
from captum_norm.show.colors import signed_shares_of
from captum_norm.show.comparison.tables import (
    BOLD,
    agreement_rows,
    example_scores,
    example_title,
    method_rows,
    number,
    shown_measures,
)
from captum_norm.show.terminal import has_colors, marked_tokens, signed_tokens
from captum_norm.text.words import words_of_tokens

_UNLIMITED = 10_000


def show_comparison(comparison: Comparison, console: Console, *, words: bool = False) -> None:
    """Print the facts of a comparison, the table of methods, the first example's scores, and agreement.

    Args:
        comparison: the comparison.
        console: where to print.
        words: print words instead of tokens, with the sums of their tokens' scores.
    """
    for name, value in comparison.facts().items():
        _say(console, f"{name}: {value}")
    console.print()
    _print_full(console, _methods(comparison))
    _say(
        console,
        "Rows by descending gain; ↑ higher is better, ↓ lower; × forward: ÷ the time of the plain forward pass.",
    )
    _say(console, BOLD)
    for name, reason in comparison.refused.items():
        _say(console, f"refused: {name}: {reason}")
    _say(console, f"\n{example_title(comparison, 0)}")
    console.print(_tokens(comparison, console, words=words))
    count = len(comparison.results)
    tables = [
        _agreement(comparison, count, named=True),
        *(_agreement(comparison, most) for most in range(count, 1, -1)),
    ]
    fitting = next((table for table in tables if _width(console, table) <= console.width), tables[-1])
    left_out = count - len(fitting.columns[1:])
    _say(console, "\nAgreement: Spearman's ρ × 100" + (f", with the first {count - left_out}" if left_out else ""))
    _print_full(console, fitting)


def _say(console: Console, text: str) -> None:
    """Print literally: ``:mask:`` in a signature is no emoji."""
    console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _width(console: Console, table: Table) -> int:
    """The full width of a table."""
    return console.measure(table, options=console.options.update(max_width=_UNLIMITED)).maximum


def _print_full(console: Console, table: Table) -> None:
    """Print a table at its full width, since truncated names and numbers are useless."""
    table.width = _width(console, table)
    console.print(table, crop=False)


def _methods(comparison: Comparison) -> Table:
    table = _table("method")
    table.columns[0].vertical = "bottom"
    titles = [f"{measure.title.replace('-', '- ')} {measure.arrow}" for measure in shown_measures(comparison)]
    for title in (*titles, "time (s)", "× forward"):
        table.add_column("\n".join(title.split()), justify="right", vertical="bottom")
    for row in method_rows(comparison):
        cells = [Text(cell["text"], style="bold" if cell["best"] else "") for cell in row["cells"]]
        table.add_row(Text(row["name"]), *cells, row["seconds"], row["ratio"])
    return table


def _tokens(comparison: Comparison, console: Console, *, words: bool) -> Table:
    tokens, removable, scores = example_scores(comparison, 0)
    own = words_of_tokens(tokens)
    shown, counted = own.pieces, removable
    if words:
        shown = own.texts
        counted = own.scores(Tensor([removable]), "max")[0].bool().tolist()
        scores = own.scores(Tensor(scores) * Tensor(removable)).tolist()
    draw = signed_tokens if has_colors(console) else marked_tokens
    table = _table("method")
    table.add_column("scores of the tokens")
    for place, (name, row) in enumerate(zip(comparison.ranking, scores, strict=True), 1):
        table.add_row(Text(f"{place} {name}"), draw(shown, signed_shares_of(row, counted)))
    return table


def _agreement(comparison: Comparison, most: int, *, named: bool = False) -> Table:
    """The agreement of methods with the first ones, which have their numbers in the table of scores."""
    table = _table("")
    for place in range(1, most + 1):
        table.add_column(str(place), justify="right")
    rows = zip(comparison.ranking, agreement_rows(comparison), strict=True)
    for place, (name, values) in enumerate(rows, 1):
        label = f"{place} {name}" if named else str(place)
        table.add_row(Text(label), *(number(100 * value, 0) for value in values[:most]))
    return table


def _table(first: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    return table

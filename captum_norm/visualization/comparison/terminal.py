"""Prints a comparison of methods."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from captum_norm.comparison.results import Comparison
from captum_norm.visualization.colors import signed_shares_of
from captum_norm.visualization.comparison.tables import (
    agreement_rows,
    example_title,
    method_rows,
    number,
    shown_measures,
)
from captum_norm.visualization.terminal import has_colors, marked_tokens, signed_tokens

_ENDLESS = 10_000


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print what was compared, the table of methods, the first example's scores, and agreement.

    Args:
        comparison: the comparison.
        console: where to print.
    """
    for name, value in comparison.facts().items():
        _say(console, f"{name}: {value}")
    console.print()
    _print_whole(console, _methods(comparison))
    _say(console, "Rows by falling gain; ↑ higher is better, ↓ lower; × forward: ÷ the time of the plain forward pass.")
    for name, reason in comparison.refused.items():
        _say(console, f"refused: {name}: {reason}")
    _say(console, f"\n{example_title(comparison, 0)}")
    console.print(_tokens(comparison, console))
    _say(console, "\nAgreement: Spearman's ρ × 100")
    agreement = _agreement(comparison, named=True)
    _print_whole(console, agreement if _width(console, agreement) <= console.width else _agreement(comparison))


def _say(console: Console, text: str) -> None:
    """Print as it is: a signature's ``:mask:`` is no emoji."""
    console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _width(console: Console, table: Table) -> int:
    """How wide a table is that nothing makes narrower."""
    return console.measure(table, options=console.options.update(max_width=_ENDLESS)).maximum


def _print_whole(console: Console, table: Table) -> None:
    """Print a table that does not shrink: half a name or number is none."""
    table.width = _width(console, table)
    console.print(table, crop=False)


def _methods(comparison: Comparison) -> Table:
    table = _table("method")
    table.columns[0].vertical = "bottom"
    titles = [f"{measure.title.replace('-', '- ')} {measure.arrow}" for measure in shown_measures(comparison)]
    for title in (*titles, "time (s)", "× forward"):
        table.add_column("\n".join(title.split()), justify="right", vertical="bottom")
    for row in method_rows(comparison):
        cells = [Text(cell.text, style="bold" if cell.best else "") for cell in row.cells]
        table.add_row(Text(row.name), *cells, row.seconds, row.ratio)
    return table


def _tokens(comparison: Comparison, console: Console) -> Table:
    real = comparison.real[0]
    tokens = [token for token, one in zip(comparison.tokens[0], real.tolist(), strict=True) if one]
    counted = comparison.removable[0][real].tolist()
    draw = signed_tokens if has_colors(console) else marked_tokens
    table = _table("method")
    table.add_column("scores of the tokens")
    for place, name in enumerate(comparison.ranking, 1):
        scores = comparison.results[name].scores[0][real].tolist()
        table.add_row(Text(f"{place} {name}"), draw(tokens, signed_shares_of(scores, counted)))
    return table


def _agreement(comparison: Comparison, *, named: bool = False) -> Table:
    """Methods by their numbers in the table of scores."""
    table = _table("")
    for place in range(1, len(comparison.results) + 1):
        table.add_column(str(place), justify="right")
    rows = zip(comparison.ranking, agreement_rows(comparison), strict=True)
    for place, (name, values) in enumerate(rows, 1):
        label = f"{place} {name}" if named else str(place)
        table.add_row(Text(label), *(number(100 * value, 0) for value in values))
    return table


def _table(first: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    return table

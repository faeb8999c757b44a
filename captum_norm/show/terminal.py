"""Shows scores as text: tokens on coloured backgrounds, a legend and a table in the terminal; Captum's text viewer.

Without colours (a file, a pipe, ``NO_COLOR``, an old terminal), blocks and bars show the scores.
"""

import html
from collections.abc import Callable, Sequence

import torch
from captum.attr import visualization
from rich.console import Console
from rich.table import Table
from rich.text import Text

from captum_norm.errors import InvalidInputError
from captum_norm.generation.result import GenerationResult
from captum_norm.show.colors import Rgb, color_of, hex_of, ink_on, shares_of, signed_color_of, signed_shares_of
from captum_norm.show.text import Numbers, as_array, formatted, printable, same_length
from captum_norm.text.characters import spelled_out

_BAR_WIDTH = 20
_BLOCKS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def colored_tokens(tokens: Sequence[str], scores: Sequence[float], *, maximum: float | None = None) -> Text:
    """Format tokens in a row, each on a background as dark as its score is high.

    Args:
        tokens: the texts of the S tokens.
        scores: S scores in any unit; negative ones count as 0.
        maximum: the score with the darkest colour; the largest score if None.

    Returns:
        Text for ``rich.print``; markup and control codes in tokens are shown literally.

    Raises:
        ValueError: the numbers of tokens and scores differ.

    Example:
        >>> colored_tokens(["a", "[b]"], [0.1, 0.3]).plain
        ' a   [b] '
    """
    return _on_backgrounds(tokens, shares_of(scores, maximum), color_of)


def signed_tokens(tokens: Sequence[str], shares: Sequence[float]) -> Text:
    """Format tokens in a row on backgrounds in two colours, for shares between −1 and 1."""
    return _on_backgrounds(tokens, shares, signed_color_of)


def marked_tokens(tokens: Sequence[str], scores: Sequence[float], *, maximum: float | None = None) -> Text:
    """Format tokens in a row without colour, each followed by a block as high as its score.

    Args:
        tokens: the texts of the S tokens.
        scores: S scores in any unit; negative ones count as 0.
        maximum: the score with the full block; the largest score if None.

    Returns:
        Text for ``rich.print``.

    Raises:
        ValueError: the numbers of tokens and scores differ.

    Example:
        >>> marked_tokens(["a", "[b]"], [0.1, 0.3]).plain
        'a▃ [b]█'
    """
    same_length(tokens, len(scores), "scores")
    shares = shares_of(scores, maximum)
    return Text(" ".join(f"{printable(token)}{_block(share)}" for token, share in zip(tokens, shares, strict=True)))


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
    colored = has_colors(console)
    if colored and min(scores, default=0.0) < 0:
        same_length(tokens, len(scores), "scores")
        console.print(signed_tokens(tokens, signed_shares_of(scores, [True] * len(scores))))
        most = f"{max(map(abs, scores)):.3g}"
        console.print(Text.assemble(f"−{most} ", _colors(-1), _colors(1), f" {most} ({unit})"))
        return
    console.print((colored_tokens if colored else marked_tokens)(tokens, scores))
    ramp = _colors(1) if colored else Text(_BLOCKS)
    console.print(Text.assemble("0 ", ramp, f" {max(scores, default=0.0):.3g} ({unit})"))


def has_colors(console: Console) -> bool:
    """Whether a console can show the scale, for which 16 colours are not enough."""
    return console.color_system in ("256", "truecolor") and not console.no_color


def score_table(tokens: Sequence[str], scores: Sequence[float], *, unit: str, top: int | None = None) -> Table:
    """Create a table of the tokens: index, token, score, and a bar.

    Args:
        tokens: the texts of the S tokens.
        scores: S scores; negative ones have bars in another colour.
        unit: the unit of the scores; the title of the column.
        top: show so many of highest score, in descending order; None for all, in the order of the text.

    Returns:
        A table for ``rich.print``.

    Raises:
        ValueError: the numbers of tokens and scores differ.

    Example:
        >>> score_table(["a", "b"], [1.0, 0.5], unit="norm").row_count
        2
    """
    same_length(tokens, len(scores), "scores")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("index", justify="right")
    table.add_column("token")
    table.add_column(unit, justify="right")
    table.add_column("", width=_BAR_WIDTH, no_wrap=True)
    rows = list(enumerate(zip(tokens, formatted(scores), signed_shares_of(scores, [True] * len(scores)), strict=True)))
    if top is not None:
        rows = sorted(rows, key=lambda row: -scores[row[0]])[:top]
    for index, (token, score, share) in rows:
        bar = Text(_bar(abs(share)), style=hex_of(signed_color_of(0.5 if share >= 0 else -0.5)))
        table.add_row(str(index), Text(printable(token)), score, bar)
    return table


def text_record(
    tokens: Sequence[str], scores: Numbers, *, label: str, convergence_delta: float | None = None
) -> visualization.VisualizationDataRecord:
    """Create a row for ``captum.attr.visualization.visualize_text``.

    Scores are divided by the largest one, since 1 has the strongest colour in Captum's viewer. Tokens are escaped,
    which Captum's viewer does not do. Norms explain no class: the columns for classes hold the label, the probability
    is 1.

    Args:
        tokens: the texts of the S tokens.
        scores: (S,), a tensor, an array or a list, not negative, in any unit.
        label: the text in the columns for classes, such as the method's name.
        convergence_delta: the method's relative completeness error; 0 if it has none.

    Returns:
        The record; ``attr_score`` is the sum of the original scores.

    Raises:
        InvalidInputError: the scores do not have one number for each token.

    Example:
        >>> import torch
        >>> text_record(["<s>", "hi"], torch.tensor([0.5, 2.0]), label="norm").word_attributions.tolist()
        [0.25, 1.0]
    """
    values = torch.from_numpy(as_array(scores, "scores")).float()
    if values.dim() != 1:
        raise InvalidInputError(f"scores have shape {tuple(values.shape)}; expected (S,), one example at a time")
    same_length(tokens, values.shape[0], "scores")
    top = values.max() if values.numel() else values.new_ones(())
    escaped = html.escape(spelled_out(label))
    return visualization.VisualizationDataRecord(
        word_attributions=values / top if top > 0 else values,
        pred_prob=1.0,
        pred_class=escaped,  # type: ignore[arg-type]  # annotated as int, but only printed
        true_class=escaped,  # type: ignore[arg-type]
        attr_class=escaped,  # type: ignore[arg-type]
        attr_score=float(values.sum()),
        raw_input_ids=[html.escape(printable(token)) for token in tokens],
        convergence_score=0.0 if convergence_delta is None else convergence_delta,
    )


def answer_records(result: GenerationResult) -> list[visualization.VisualizationDataRecord]:
    """Make records for ``captum.attr.visualization.visualize_text``: of the whole, and of each output token.

    Args:
        result: of :class:`captum_norm.GenerationAttribution`.
    """
    rows = [] if result.token_attr is None else list(zip(result.output_tokens, result.token_attr, strict=True))
    delta = result.convergence_delta
    return [
        text_record(result.input_tokens, row.clamp(min=0), label=label, convergence_delta=delta)
        for label, row in [(result.explained.answer, result.seq_attr), *rows]
    ]


def _on_backgrounds(tokens: Sequence[str], shares: Sequence[float], color: Callable[[float], Rgb]) -> Text:
    same_length(tokens, len(shares), "scores")
    text = Text()
    for token, share in zip(tokens, shares, strict=True):
        if text:
            text.append(" ")
        text.append(f" {printable(token)} ", style=_style(color(share)))
    return text


def _style(ground: Rgb) -> str:
    return f"{hex_of(ink_on(ground))} on {hex_of(ground)}"


def _colors(sign: int) -> Text:
    steps = [share / (_BAR_WIDTH - 1) for share in range(_BAR_WIDTH)]
    shares = steps if sign > 0 else [-share for share in reversed(steps)]
    return Text.assemble(*((" ", _style(signed_color_of(share))) for share in shares))


def _block(share: float) -> str:
    return _BLOCKS[round(min(max(share, 0.0), 1.0) * (len(_BLOCKS) - 1))]


def _bar(share: float) -> str:
    whole, eighth = divmod(round(share * _BAR_WIDTH * 8), 8)
    return ("█" * whole + _EIGHTHS[eighth]).rstrip()

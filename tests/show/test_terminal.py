"""What is printed, and in which colours."""

import io
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
from rich.console import Console

from captum_norm.lab.comparison import Comparison
from captum_norm.show import print_result, show_tokens
from captum_norm.show.colors import color_of, hex_of, ink_on
from captum_norm.show.terminal import score_table, token_row
from captum_norm.show.text import formatted, printable, shortened
from tests.lab.comparison.examples import HOSTILE, comparison


def text_of(show: Callable[[Console], None], *, colors: Any = "truecolor", width: int = 80) -> str:
    """What a function writes to a console."""
    console = Console(file=io.StringIO(), width=width, color_system=colors, force_terminal=colors is not None)
    with console.capture() as capture:
        show(console)
    return capture.get()


def printed(item: Any, colors: Any = "truecolor") -> str:
    return text_of(lambda console: console.print(item), colors=colors)


def escape(share: float) -> str:
    """The terminal's code for a share's ground and the ink on it."""
    ground = color_of(share)
    (r, g, b), (br, bg, bb) = ink_on(ground), ground
    return f"\x1b[38;2;{r};{g};{b};48;2;{br};{bg};{bb}m"


def test_each_token_stands_on_the_colour_of_its_score() -> None:
    output = printed(token_row(["low", "half", "top"], [0.0, 2.0, 4.0], colored=True))
    assert f"{escape(0)} low \x1b[0m" in output
    assert f"{escape(0.5)} half \x1b[0m" in output
    assert f"{escape(1)} top \x1b[0m" in output


def test_tokens_are_shown_and_not_obeyed() -> None:
    hostile = ["[red]", "\x1b[2J", "[/]", ":smile:"]
    for colored in (True, False):
        output = printed(token_row(hostile, [1.0] * 4, colored=colored), colors=None)
        assert "\x1b" not in output
        for shown in ("[red]", "\\x1b[2J", "[/]", ":smile:"):
            assert shown in output


@pytest.mark.parametrize("color_system", [None, "standard"])
def test_without_enough_colours_blocks_say_the_score(color_system: Literal["standard"] | None) -> None:
    text = text_of(lambda console: show_tokens(console, "abc", [0.0, 0.5, 1.0], unit="norm"), colors=color_system)
    assert text.splitlines() == ["a▁ b▅ c█", "0 ▁▂▃▄▅▆▇█ 1 (norm)"]


def test_legend_ends_at_the_largest_score() -> None:
    _, legend = text_of(lambda console: show_tokens(console, "ab", [0.1, 0.7251], unit="share of rollout")).splitlines()
    assert legend.startswith(f"0 {escape(0)}")
    assert legend.endswith(f"{escape(1)} \x1b[0m 0.725 (share of rollout)")


def test_table_has_every_token_in_order_with_its_score_and_bar() -> None:
    lines = printed(score_table(["x", "[b]y[/b]"], [0.25, 1.0], unit="norm"), colors=None).splitlines()
    assert lines[0].split() == ["index", "token", "norm"]
    assert lines[1].split() == ["0", "x", "0.250", "█████"]
    assert lines[2].split() == ["1", "[b]y[/b]", "1.000", "█" * 20]


def test_scores_that_are_all_zero_are_all_light() -> None:
    assert printed(token_row("ab", [0.0, 0.0], colored=True)).count(escape(0)) == 2


@pytest.mark.parametrize("show", [partial(token_row, colored=True), partial(score_table, unit="norm")])
def test_numbers_of_tokens_and_scores_must_agree(show: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="1 tokens do not fit scores of 2"):
        show(["a"], [1.0, 2.0])


def test_scores_below_zero_have_colours_and_bars_of_their_own() -> None:
    shown = text_of(lambda console: show_tokens(console, "ab", [-2.0, 1.0], unit="part of the logit"))
    tokens, legend = shown.splitlines()
    assert f"{escape(-1.0)} a " in tokens
    assert f"{escape(0.5)} b " in tokens
    assert legend.startswith("−2 ")
    assert legend.endswith(" 2 (part of the logit)")
    lines = printed(score_table(["a", "b"], [-2.0, 1.0], unit="logit"), colors=None).splitlines()
    assert [line.split()[2:] for line in lines[1:]] == [["-2.000", "█" * 20], ["1.000", "█" * 10]]


def test_the_highest_come_first_with_their_places() -> None:
    lines = printed(score_table(["a", "b", "c"], [0.5, 1.0, 0.75], unit="norm", top=2), colors=None).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["1", "b"], ["2", "c"]]


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("##ing", "##ing"),
        ("語", "語"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb", "a\\x0ab"),
        ("\u202eabc", "\\u202eabc"),
        ("\U000e0041", "\\U000e0041"),
        ("", "∅"),
    ],
)
def test_printable(token: str, shown: str) -> None:
    assert printable(token) == shown


def test_shortened() -> None:
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 6) == "abcde…"


@pytest.mark.parametrize(
    ("scores", "shown"),
    [
        ([0.5, 0.25], ["0.5000", "0.2500"]),
        ([123.456, 1.0], ["123.5", "1.0"]),
        ([54321.0, 2.0], ["54321", "2"]),
        ([0.00123456], ["0.001235"]),
        ([0.0, 0.0], ["0.0000", "0.0000"]),
        ([], []),
    ],
)
def test_formatted(scores: list[float], shown: list[str]) -> None:
    assert formatted(scores) == shown


def compared(found: Comparison, *, colors: Any = None) -> str:
    return text_of(lambda console: print_result(found, console), colors=colors)


def test_a_comparison_says_everything_at_its_full_width() -> None:
    found, text = comparison("causal"), compared(comparison("causal"))
    assert f"model: {HOSTILE}" in text
    assert f"signature: {found.signature}" in text
    assert f"refused: globenc: {found.refused['globenc']}" in text
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("method  "))
    for name, line in zip(found.ranking, lines[start + 1 :], strict=False):
        result = found.results[name]
        assert line.split()[0] == name
        assert line.split()[-2:] == [f"{result.seconds:.2f}", f"{result.forward_ratio:.1f}"]
        assert f"{found.means()[name]['relevance_gain']:.3f}".replace("-", "−") in line.split()
        assert sum(row.startswith(f"{name} ") for row in lines) == 2, "numbers and tokens"
    assert "log-" not in text
    assert "log-" in compared(comparison())


def test_colours_where_there_are_some() -> None:
    text = compared(comparison(), colors="truecolor")
    red, green, blue = (int(hex_of(color_of(1.0))[place : place + 2], 16) for place in (1, 3, 5))
    assert f"48;2;{red};{green};{blue}" in text
    assert "█" not in text

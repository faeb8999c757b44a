"""What is printed, and in which colours."""

import io
from typing import Literal

import pytest
from rich.console import Console

from captum_norm.show import colored_tokens, marked_tokens, score_table, show_tokens
from captum_norm.show.colors import color_of, ink_on


def printed(*items: object, color: bool = True) -> str:
    console = Console(file=io.StringIO(), force_terminal=color, color_system="truecolor" if color else None, width=80)
    console.print(*items)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def escape(share: float) -> str:
    """The terminal's code for a share's ground and the ink on it."""
    ground = color_of(share)
    (r, g, b), (br, bg, bb) = ink_on(ground), ground
    return f"\x1b[38;2;{r};{g};{b};48;2;{br};{bg};{bb}m"


def test_each_token_stands_on_the_colour_of_its_score() -> None:
    output = printed(colored_tokens(["low", "half", "top"], [0.0, 2.0, 4.0]))
    assert f"{escape(0)} low \x1b[0m" in output
    assert f"{escape(0.5)} half \x1b[0m" in output
    assert f"{escape(1)} top \x1b[0m" in output


def test_tokens_are_shown_and_not_obeyed() -> None:
    hostile = ["[red]", "\x1b[2J", "[/]", ":smile:"]
    for text in (colored_tokens(hostile, [1.0] * 4), marked_tokens(hostile, [1.0] * 4)):
        output = printed(text, color=False)
        assert "\x1b" not in output
        for shown in ("[red]", "\\x1b[2J", "[/]", ":smile:"):
            assert shown in output


@pytest.mark.parametrize("color_system", [None, "standard"])
def test_without_enough_colours_blocks_say_the_score(color_system: Literal["standard"] | None) -> None:
    console = Console(file=io.StringIO(), color_system=color_system, force_terminal=True, width=80)
    show_tokens(console, ["a", "b", "c"], [0.0, 0.5, 1.0], unit="norm")
    file = console.file
    assert isinstance(file, io.StringIO)
    assert file.getvalue().splitlines() == ["a▁ b▅ c█", "0 ▁▂▃▄▅▆▇█ 1 (norm)"]


def test_legend_ends_at_the_largest_score() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80)
    show_tokens(console, ["a", "b"], [0.1, 0.7251], unit="share of rollout")
    file = console.file
    assert isinstance(file, io.StringIO)
    legend = file.getvalue().splitlines()[1]
    assert legend.startswith(f"0 {escape(0)}")
    assert legend.endswith(f"{escape(1)} \x1b[0m 0.725 (share of rollout)")


def test_table_has_every_token_in_order_with_its_score_and_bar() -> None:
    lines = printed(score_table(["x", "[b]y[/b]"], [0.25, 1.0], unit="norm"), color=False).splitlines()
    assert lines[0].split() == ["index", "token", "norm"]
    assert lines[1].split() == ["0", "x", "0.250", "█████"]
    assert lines[2].split() == ["1", "[b]y[/b]", "1.000", "█" * 20]


def test_scores_that_are_all_zero_are_all_light() -> None:
    assert printed(colored_tokens(["a", "b"], [0.0, 0.0])).count(escape(0)) == 2


@pytest.mark.parametrize("show", [colored_tokens, marked_tokens, lambda t, s: score_table(t, s, unit="norm")])
def test_numbers_of_tokens_and_scores_must_agree(show: object) -> None:
    assert callable(show)
    with pytest.raises(ValueError, match="1 tokens do not fit scores of 2"):
        show(["a"], [1.0, 2.0])


def test_scores_below_zero_have_colours_and_bars_of_their_own() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80)
    show_tokens(console, ["a", "b"], [-2.0, 1.0], unit="part of the logit")
    file = console.file
    assert isinstance(file, io.StringIO)
    tokens, legend = file.getvalue().splitlines()
    for share, text in ((-1.0, " a "), (0.5, " b ")):
        (r, g, b), ground = ink_on(color_of(share)), color_of(share)
        assert f"\x1b[38;2;{r};{g};{b};48;2;{ground[0]};{ground[1]};{ground[2]}m{text}" in tokens
    assert legend.startswith("−2 ")
    assert legend.endswith(" 2 (part of the logit)")
    lines = printed(score_table(["a", "b"], [-2.0, 1.0], unit="logit"), color=False).splitlines()
    assert [line.split()[2:] for line in lines[1:]] == [["-2.000", "█" * 20], ["1.000", "█" * 10]]


def test_the_highest_come_first_with_their_places() -> None:
    lines = printed(score_table(["a", "b", "c"], [0.5, 1.0, 0.75], unit="norm", top=2), color=False).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["1", "b"], ["2", "c"]]

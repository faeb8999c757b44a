"""What is printed, and in which colours; records for Captum's text viewer."""

import io
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from captum.attr import visualization
from rich.console import Console

from captum_norm import Comparison
from captum_norm.show import print_result, show_tokens, text_record
from captum_norm.show.colors import color_of, hex_of, ink_on
from captum_norm.show.terminal import colored_tokens, marked_tokens, score_table
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
    output = printed(colored_tokens(["low", "half", "top"], [0.0, 2.0, 4.0]))
    assert f"{escape(0)} low \x1b[0m" in output
    assert f"{escape(0.5)} half \x1b[0m" in output
    assert f"{escape(1)} top \x1b[0m" in output


def test_tokens_are_shown_and_not_obeyed() -> None:
    hostile = ["[red]", "\x1b[2J", "[/]", ":smile:"]
    for text in (colored_tokens(hostile, [1.0] * 4), marked_tokens(hostile, [1.0] * 4)):
        output = printed(text, colors=None)
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
    assert printed(colored_tokens("ab", [0.0, 0.0])).count(escape(0)) == 2


@pytest.mark.parametrize("show", [colored_tokens, marked_tokens, lambda t, s: score_table(t, s, unit="norm")])
def test_numbers_of_tokens_and_scores_must_agree(show: object) -> None:
    assert callable(show)
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


def test_record_holds_the_scores_as_shares_and_their_sum() -> None:
    record = text_record(["a", "b"], torch.tensor([0.5, 2.0]), label="norm", convergence_delta=1e-6)
    assert isinstance(record, visualization.VisualizationDataRecord)
    assert record.word_attributions.tolist() == [0.25, 1.0]
    assert record.attr_score == 2.5
    assert record.convergence_score == 1e-6
    assert str(record.attr_class) == "norm"


def test_tokens_and_label_are_escaped_because_captum_does_not() -> None:
    record = text_record(["<script>", "[SEP]"], torch.ones(2), label="<b>")
    assert record.raw_input_ids == ["&lt;script&gt;", "[SEP]"]
    assert str(record.attr_class) == "&lt;b&gt;"


def test_captum_renders_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    viewer = visualization.visualize_text.__globals__
    monkeypatch.setitem(viewer, "HAS_IPYTHON", True)
    monkeypatch.setitem(viewer, "HTML", str)
    monkeypatch.setitem(viewer, "display", lambda _: None)
    page = visualization.visualize_text([text_record(["<i>", "b"], torch.tensor([0.0, 3.0]), label="norm")])
    assert isinstance(page, str)
    assert "&lt;i&gt;" in page
    assert "hsl(120, 75%, 50%)" in page  # Captum's strongest green, for the largest score
    assert "norm (1.00)" in page


def test_zeros_stay_zeros() -> None:
    assert text_record(["a"], torch.zeros(1), label="norm").word_attributions.tolist() == [0.0]


def test_scores_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="shape \\(1, 2\\)"):
        text_record(["a", "b"], torch.ones(1, 2), label="norm")
    with pytest.raises(ValueError, match="1 tokens do not fit scores of 2"):
        text_record(["a"], torch.ones(2), label="norm")

"""Components on pages, in figures and in the terminal: the sentence with the answer, and every score."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from captum_norm import InvalidInputError
from captum_norm.attr.components import CHANGE
from captum_norm.results.components import ComponentScores
from captum_norm.results.outputs import NamedOutput
from captum_norm.show import pages as show_pages
from captum_norm.show import print_result
from captum_norm.show.text import components_answer
from tests.browser.pages import HEAD_SCORES, NETWORKS, NEURONS, STREAMS, components
from tests.pages import content, decoded
from tests.show.test_terminal import text_of

SHARES = "Shares are of the sum of absolute contributions of the same kind."


def halves(*names: str) -> ComponentScores:
    """The same heads in several stacks, doubled in the second."""
    single = components("heads")
    part, real = single.parts["heads"]["decoder"], single.real["decoder"]
    parts = {name: part * (1 + place) for place, name in enumerate(names)}
    return replace(single, parts={"heads": parts}, real=dict.fromkeys(names, real), tokens={})


HEADS_CARRY = "Heads 1.1 and 0.2 carry 65 % of “ Ada” − “ Eve”, head 0.0 speaks against it (30 %)."
ANSWERS = {
    # Of 10 in all, 4, 2.5 and −3; others have less than half of the largest.
    "heads": (components("heads"), HEADS_CARRY),
    "with networks": (
        components("heads", "feed_forward", "residual"),
        f"{HEADS_CARRY} Feed-forward network 0 carries 75 % of it.",
    ),
    # Those that enter the first layer: 2, −1 and 1.
    "streams": (
        components("residual"),
        (
            "Residual streams 0 at “Eve” and 0 at “to” carry 75 % of “ Ada” − “ Eve”, residual stream 0 at “Ada” "
            "speaks against it (25 %)."
        ),
    ),
    "stacks": (
        halves("encoder", "cross"),
        (
            "Heads 1.1 (cross), 0.2 (cross) and 1.1 (encoder) carry 57 % of “ Ada” − “ Eve”, head 0.0 (cross) "
            "speaks against it (20 %)."
        ),
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_names_what_carries_most_and_what_speaks_against_it(name: str) -> None:
    scores, answer = ANSWERS[name]
    assert components_answer(scores) == f"{answer} {SHARES}"


def test_the_answer_of_a_counterfactual_names_what_changes_the_output_most() -> None:
    assert components_answer(components("heads", "feed_forward", unit=CHANGE)) == (
        "Patching heads 1.1, 0.0 and 0.2 changes “ Ada” − “ Eve” most (95 %). Patching feed-forward network 0 changes "
        "it most (75 %). Shares are of the sum of absolute changes of the same kind."
    )


def test_an_output_that_rests_on_nothing_has_no_answer() -> None:
    single = components("heads")
    zero = replace(single, parts={"heads": {"decoder": torch.zeros(1, 2, 3, 4)}})
    assert components_answer(zero) == ""
    assert zero.page().examples[0].answer == ""


def test_a_page_has_every_score_and_its_answer(tmp_path: Path) -> None:
    scores = components("heads", "feed_forward", "residual", "neurons")
    page = content(scores.save(tmp_path / "components.html").read_text(encoding="utf-8"))
    assert page["title"] == "What inside Tiny contributes to “ Ada” − “ Eve”?"
    assert page["facts"] == scores.facts()
    (example,) = page["examples"]
    assert example["answer"] == components_answer(scores)
    expected: dict[str, Any] = {
        "heads": HEAD_SCORES,
        "feed_forward": [[row] for row in NETWORKS],
        "residual": [[row] for row in STREAMS],
        "neurons": NEURONS,
    }
    assert [shown["kind"] for shown in example["components"]] == list(expected)
    for shown in example["components"]:
        np.testing.assert_array_equal(decoded(shown["values"]), np.float32(expected[shown["kind"]]))
        assert (shown["stack"], shown["unit"], shown["signed"]) == ("decoder", "part of the output", True)
        assert shown["tokens"]["texts"] == ["Eve", "gave", "Ada", "to"]


def test_each_example_is_without_padding_and_says_its_output() -> None:
    single = components("heads")
    both = replace(
        single,
        parts={"heads": {"decoder": single.parts["heads"]["decoder"].repeat(2, 1, 1, 1)}},
        real={"decoder": torch.tensor([[True] * 4, [True, True, False, False]])},
        tokens={},
        outputs=[*single.outputs, NamedOutput(3, " Bo", 2.0, 0.5)],
    )
    page = both.page()
    assert page.title == "What inside Tiny contributes to each output?"
    assert [example.components[0].values.shape for example in page.examples] == [(2, 3, 4), (2, 3, 2)]
    assert page.examples[1].components[0].tokens.texts == ["position 0", "position 1"]
    assert page.examples[1].facts == {"explained": "“ Bo”, 0.50"}
    assert page.examples[1].answer.startswith("Head 0.2 carries 33 % of “ Bo”, head 0.0 speaks against it (50 %).")
    with pytest.raises(InvalidInputError, match="got the components of 2 examples; draw those of one"):
        both.plot()


def test_too_many_scores_are_those_of_all_positions_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show_pages, "_MOST_SCORES", 20)
    many, few = components("heads", "feed_forward").page().examples[0].components
    np.testing.assert_array_equal(many.values, np.sum(HEAD_SCORES, -1, dtype=np.float32))
    assert few.values.shape == (2, 1, 4)


def test_a_figure_has_a_panel_of_layers_for_each_kind(tmp_path: Path) -> None:
    scores = components("heads", "feed_forward", "residual", "neurons")
    figure = scores.plot()
    panels = [axes for axes in figure.axes if axes.images]
    expected = [np.sum(HEAD_SCORES, -1), NETWORKS, STREAMS, -np.sort(-np.array(NEURONS))]
    for axes, values in zip(panels, expected, strict=True):
        image: Any = axes.images[0]
        np.testing.assert_allclose(image.get_array(), values, rtol=1e-6)
        assert axes.get_ylim() == (-0.5, len(values) - 0.5)  # layers upwards
        assert (axes.get_ylabel(), image.colorbar.ax.get_ylabel()) == ("layer", "part of the output")
    assert [axes.get_xlabel() for axes in panels] == ["number", "position", "position", "rank"]
    assert [label.get_text() for label in panels[1].get_xticklabels()] == ["Eve", "gave", "Ada", "to"]
    assert imread(scores.save(tmp_path / "components.png")).ndim == 3


def test_edges_have_an_answer_rows_and_a_figure_by_their_ends() -> None:
    part = torch.zeros(1, 9, 21)  # of two layers of three heads
    part[0, 7, 20], part[0, 0, 9], part[0, 4, 15], part[0, 1, 20] = 4.0, 2.5, -3.0, 0.5
    scores = replace(components("heads"), parts={"edges": {"decoder": part}})
    sentence = (
        "Edges head 1.2 → output and input → network 0 carry 65 % of “ Ada” − “ Eve”, "
        "edge network 0 → head 1.2’s keys speaks against it (30 %)."
    )
    assert components_answer(scores) == f"{sentence} {SHARES}"
    assert scores.page().examples[0].answer == components_answer(scores)
    printed = text_of(lambda console: print_result(scores, console, top=2), colors=None, width=100)
    assert "edge head 1.2 → output" in printed
    axes, _ = scores.plot().axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("target", "source")
    assert axes.get_yticklabels()[0].get_text() == "input"
    assert [(row["name"], row["layer"], row["score"]) for row in scores.records()] == [
        ("input->m0", 0, 2.5),
        ("a0.h0->logits", 2, 0.5),
        ("m0->a1.h2<k>", 1, -3.0),
        ("a1.h2->logits", 2, 4.0),
    ]


@pytest.mark.parametrize("suffix", ["svg", "csv", "json", "safetensors"])
def test_components_are_saved_as_every_kind_of_file(tmp_path: Path, suffix: str) -> None:
    scores = components("heads", "neurons")
    path = scores.save(tmp_path / f"components.{suffix}")
    assert path.stat().st_size > 0
    if suffix == "safetensors":
        assert ComponentScores.load(path) == scores
    if suffix == "csv":
        assert len(path.read_text(encoding="utf-8").splitlines()) == 1 + 2 * 3 * 4 + 2 * 200


def test_the_terminal_has_the_answer_and_the_strongest_of_each_kind() -> None:
    scores = components("heads", "residual")
    lines = text_of(lambda console: print_result(scores, console, top=2), colors=None, width=100).splitlines()
    assert lines[0] == "explained: “ Ada −  Eve” = 3.5"
    assert components_answer(scores) in lines
    cells = [line.split("  ") for line in lines]
    rows = [[part.strip() for part in row if part.strip()] for row in cells]
    heads = rows.index(["index", "component", "part of the output"])
    assert [row[:3] for row in rows[heads + 1 : heads + 3]] == [["0", "head 1.1", "4.000"], ["1", "head 0.0", "-3.000"]]
    assert [row[:2] for row in rows[-2:]] == [["0", "residual stream 0 at “Eve”"], ["1", "residual stream 2 at “to”"]]

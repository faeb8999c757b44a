"""The handles of every result give the numbers that the result holds."""

import html
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import captum_norm as cn
from alignment import Alignments
from captum_norm.attr.measurements import Measurements
from captum_norm.explanation import Explanation
from captum_norm.generation import GenerationResult
from captum_norm.lab.answers import AnswerComparison
from captum_norm.lab.comparison import Comparison
from captum_norm.lab.evaluation import agreement
from captum_norm.loading import LANGUAGE_MODEL, load
from captum_norm.results.base import Result
from captum_norm.results.components import ComponentScores
from captum_norm.results.stacks import StackResult
from tests import tiny

TEXTS = ["a dog sees the cat", "the cat runs"]


class Case(NamedTuple):
    """A result, and what its handles give.

    Attributes:
        result: the result.
        numbers: all its numbers.
        drawn: what ``plot()`` draws, and the numbers of its panels.
        part: the numbers of the last part by index.
        framed: the column of the data frame with the numbers.
        field: the field with them, padding included.
        shown: a text on the page.
    """

    result: Any
    numbers: Any
    drawn: tuple[Any, Any]
    part: Any
    framed: str
    field: str
    shown: str


def _maps(bert: Any) -> Case:
    maps: Any = cn.NormAttribution(bert, tokenizer=tiny.tokenizer()).maps(TEXTS, layers=[1])
    alone: Any = cn.NormAttribution(bert, tokenizer=tiny.tokenizer()).maps(TEXTS[1], layers=[1])
    return Case(maps, maps.encoder, (maps[0], maps.encoder[0]), alone.encoder, "value", "encoder", "[CLS]")


def _measurements(bert: Any) -> Case:
    meter = cn.NormMeter(bert, tokenizer=tiny.tokenizer())
    measured, alone = (meter.measure(texts, weights=True)["encoder"] for texts in (TEXTS, TEXTS[1]))
    weights: Any = measured.weights
    return Case(measured, weights, (measured[0], weights[0]), alone.weights, "value", "weights", "sees")


def _explanation(bert: Any) -> Case:
    found, alone = (cn.explain(texts, bert, tiny.tokenizer(), layer=1) for texts in (TEXTS, TEXTS[1]))
    squares: Any = found.squares
    return Case(found, found.scores, (found[0], squares[0]), alone.scores, "score", "scores", "runs")


def _comparison(bert: Any) -> Case:
    options: dict[str, Any] = {"tokenizer": tiny.tokenizer(), "methods": ["norm"], "steps": 2}
    found, alone = (cn.compare(bert, texts, **options) for texts in (TEXTS, TEXTS[1:]))
    scores = found.results["norm"].scores
    part = alone.results["norm"].scores
    return Case(found, scores, (found, None), part, "norm", "", "sees")


def _answer(_: Any) -> Case:
    model, known = load(LANGUAGE_MODEL)
    found: Any = cn.GenerationAttribution(cn.DecompX(model), known).attribute("Clara saw", " a cat", segments=["Clara"])
    rows: Any = found.token_attr
    return Case(found, found.seq_attr, (found, None), rows[-1], "score", "seq_attr", "Clara")


def _components(_: Any) -> Case:
    method: Any = cn.ComponentAttribution(cn.RelP(tiny.gpt2(), tokenizer=tiny.tokenizer()))
    found, alone = (method.attribute(texts, 5, components="residual") for texts in (TEXTS, TEXTS[1]))
    return Case(found, found.scores, (found[0], found.scores[:1]), alone.scores, "score", "scores", "sees")


def _alignments(_: Any) -> Case:
    sources, targets = [["la", "mer"], ["bleue"]], [["the", "sea"], ["blue"]]
    found = Alignments([[(0, 0), (1, 1)], [(0, 0)]], sources, targets)
    grid = np.array([np.eye(2), [[1, 0], [0, 0]]])
    return Case(found, grid, (found[:1], grid[:1]), [(0, 0)], "link", "", "bleue")


CASES: dict[type[Result], Callable[[Any], Case]] = {
    cn.AttributionMaps: _maps,
    Measurements: _measurements,
    Explanation: _explanation,
    Comparison: _comparison,
    GenerationResult: _answer,
    ComponentScores: _components,
    Alignments: _alignments,
}


@pytest.fixture(scope="module")
def cases() -> dict[type[Result], Case]:
    return {kind: make(tiny.bert()) for kind, make in CASES.items()}


def every(kind: type[Result]) -> Iterator[type[Result]]:
    for one in kind.__subclasses__():
        yield one
        yield from every(one)


kinds = pytest.mark.parametrize("kind", CASES)
others = pytest.mark.parametrize("kind", [kind for kind in CASES if kind is not Comparison])
of_words = pytest.mark.parametrize("kind", [kind for kind in CASES if kind not in (Comparison, ComponentScores)])


def test_no_result_is_forgotten() -> None:
    """A comparison on answers is of methods, not of parts: tests/lab/answers has its handles."""
    concrete = {kind for kind in every(Result) if kind not in (StackResult, AnswerComparison)}
    assert {kind for kind in concrete if kind.__module__.startswith(("captum_norm.", "alignment."))} == set(CASES)


@kinds
def test_a_console_shows_a_line_and_a_notebook_a_page(kind: type[Result], cases: dict[type[Result], Case]) -> None:
    case = cases[kind]
    text = repr(case.result)
    assert "\n" not in text
    assert text.startswith("[Alignment(" if kind is Alignments else f"{kind.__name__}(")
    assert len(text) < 500
    assert "tensor(" not in text
    frame = case.result._repr_html_()
    assert "<iframe" in frame
    assert "sandbox" in frame
    assert case.shown in html.unescape(frame)


@kinds
def test_figures_draw_the_numbers(kind: type[Result], cases: dict[type[Result], Case]) -> None:
    drawn, expected = cases[kind].drawn
    figure = drawn.plot()
    assert isinstance(figure, Figure)
    if expected is not None:
        panels = [axes.images[0].get_array() for axes in figure.axes if axes.images]
        np.testing.assert_allclose(np.stack([np.asarray(panel) for panel in panels]), expected, rtol=1e-6)
    elif kind is GenerationResult:
        (panel,) = (np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images)
        np.testing.assert_allclose(panel, drawn.token_attr, rtol=1e-6)
    else:
        titles = [axes.get_title() for axes in figure.axes]
        assert any(title.startswith("relevance gain") for title in titles)
        assert {"norm"} <= {label.get_text() for axes in figure.axes for label in axes.get_yticklabels()}


@others
def test_the_top_is_the_largest(kind: type[Result], cases: dict[type[Result], Case]) -> None:
    case = cases[kind]
    (best,) = case.result.top(1)
    if kind is Alignments:
        assert best == (("la", "the"), 1)  # of pairs that are linked as often, the first
    elif kind is GenerationResult:
        assert best == ("Clara", pytest.approx(float(case.result.segment_attr.max())))
    elif kind is ComponentScores:
        assert abs(best.score) == pytest.approx(float(case.numbers.abs().max()))
    else:
        value = best.value if hasattr(best, "value") else best[1]
        assert value == pytest.approx(float(torch.as_tensor(case.numbers).max()))
    with pytest.raises(cn.InvalidInputError, match="expected at least 1"):
        case.result.top(0)


@of_words
def test_words_keep_the_sum(kind: type[Result], cases: dict[type[Result], Case]) -> None:
    """Every token of these is a word, but of the answer, whose words are fewer."""
    case = cases[kind]
    words: Any = case.result.words()
    assert type(words).__name__ == kind.__name__
    if kind is GenerationResult:
        assert len(words.template) == len(words.input_tokens) < len(case.result.input_tokens)
        assert float(words.seq_attr.sum()) == pytest.approx(float(case.numbers.sum()), rel=1e-4)
        assert torch.allclose(words[0].seq_attr, words.token_attr[0])
    elif not case.field:
        assert words == case.result
    else:
        found, expected = (getattr(result, case.field) for result in (words, case.result))
        torch.testing.assert_close(found, expected)


@kinds
def test_tables_hold_the_numbers(kind: type[Result], cases: dict[type[Result], Case]) -> None:
    case = cases[kind]
    result = case.result
    frame = result.frame("scores") if kind is Comparison else result.to_frame()
    if kind is Alignments:
        places = {tuple(row) for row in frame[["pair", "target", "source"]].to_numpy().tolist()}
        assert places == {tuple(place) for place in np.argwhere(case.numbers).tolist()}
    else:
        frame = frame[frame["explained"].isna()] if kind is GenerationResult else frame  # those of all together
        assert float(frame[case.framed].sum()) == pytest.approx(float(case.numbers.sum()), rel=1e-5)
        assert float(frame[case.framed].max()) == pytest.approx(float(case.numbers.max()), rel=1e-5)


@kinds
def test_parts_are_what_each_alone_gives(kind: type[Result], cases: dict[type[Result], Case]) -> None:
    case = cases[kind]
    result = case.result
    last = result[-1]
    assert len(list(result)) == len(result)
    assert last == result[len(result) - 1] == list(result)[-1]
    found = getattr(last, case.field) if case.field else list(last)
    if kind is Comparison:
        found = last.results["norm"].scores
    np.testing.assert_allclose(np.asarray(found), np.asarray(case.part), rtol=1e-3, atol=1e-6)
    error = IndexError if kind is Alignments else cn.InvalidInputError
    with pytest.raises(error, match=r"expected 0 to 1|range|0 to \d"):
        result[len(result)]


@kinds
def test_files_moves_and_equality(kind: type[Result], cases: dict[type[Result], Case], tmp_path: Path) -> None:
    result = cases[kind].result
    path = result.save(tmp_path / "result.safetensors")
    assert kind.load(path) == result
    assert result.cpu() == result == result.to("cpu")
    others = [case.result for other, case in cases.items() if other is not kind]
    assert all(result != other for other in others)
    assert result != result[0]
    assert result[0] == result[0]


def test_a_part_of_a_comparison_is_a_comparison() -> None:
    bert = tiny.classifier()
    options: dict[str, Any] = {"tokenizer": tiny.tokenizer(), "methods": ["norm", "globenc"], "steps": 2}
    both = cn.compare(bert, TEXTS, **options)
    for example, part in enumerate(both):
        assert len(part) == 1
        assert part.outputs == [both.outputs[example]]
        assert "" not in part.tokens[0]
        assert part.real.all()
        for name, result in part.results.items():
            whole = both.results[name]
            expected = {key: value[example] for key, value in vars(whole.faithfulness).items()}
            for key, value in vars(result.faithfulness).items():
                np.testing.assert_array_equal(value[0], expected[key])
            assert (result.seconds, result.signature) == (whole.seconds, whole.signature)
        pairs = {name: result.scores for name, result in both.results.items()}
        row = slice(example, example + 1)
        expected_agreement = agreement({name: scores[row] for name, scores in pairs.items()}, both.removable[row])
        torch.testing.assert_close(part.agreement, expected_agreement, equal_nan=True)
        assert part.page().examples[0].title == both.page().examples[example].title
    assert both[0][0] == both[0]


def test_a_part_of_an_answer_is_of_its_token(cases: dict[type[Result], Case]) -> None:
    result: Any = cases[GenerationResult].result
    first, end = result.explained.outputs
    assert len(result) == end - first
    for place, part in enumerate(result):
        assert torch.equal(part.seq_attr, result.token_attr[place])
        assert torch.equal(part.token_attr, result.token_attr[place][None])
        assert part.explained.outputs == (first + place, first + place + 1)
        assert part.output_tokens == [result.output_tokens[place]]
        assert part.segments is None
    model, known = load(LANGUAGE_MODEL)
    whole = cn.GenerationAttribution(cn.DecompX(model), known).attribute("Clara saw", " a cat", per_token=False)
    with pytest.raises(cn.InvalidInputError, match=r"^got the scores of an answer as a whole; explain each of its"):
        whole[0]

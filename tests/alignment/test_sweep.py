"""A sweep against its parts, and as tables, records and figures: every number from its result."""

import io
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

import alignment.aligner
import alignment.gradients
import alignment.sweep
from alignment.aer import AER, paired_significance
from alignment.aligner import WordAligner
from alignment.corpora import ParallelGold
from alignment.gradients import gradient_maps
from alignment.recipes import RECIPES
from alignment.selection import Choice, Setting
from alignment.sweep import Reading, Sweep, corpora_tables, head_figure, layer_figure, records, sweep, tables
from alignment.teacher_forcing import word_maps
from captum_norm import AttentionWeights, InvalidInputError, NormAttribution
from tests.alignment.toy import toy_gradients

SETTINGS: tuple[Setting, ...] = ("AWO", "AWI")
LAYERS, HEADS = 2, 2
AUTO_RULES = ("auto", "auto, one head")
KINDS = ("saliency", "gradient_x_input")


@pytest.mark.parametrize("method", ["norm", "weights"])
def test_readings_are_the_aligners(trial: Any, swept: Sweep, method: str) -> None:
    model, tokenizer, corpus = trial
    own: Any = (NormAttribution if method == "norm" else AttentionWeights)(model)
    seen = []
    for reading, result in swept.results.items():
        if reading.method == method:
            place = reading.place
            aligner = WordAligner(
                model,
                tokenizer,
                own,
                place.layer,
                place.setting,
                head="all" if place.head is None else place.head,
                recipe=reading.recipe,
            )
            assert result.reading == reading
            assert result.alignments == aligner.align(corpus.sources, corpus.targets)
            seen.append(reading)
    places = [Choice(s, layer, head) for s in SETTINGS for layer in range(LAYERS) for head in (None, *range(HEADS))]
    expected = {Reading(cast(Any, method), place) for place in places}
    expected |= {Reading(cast(Any, method), swept.chosen[rule], recipe) for rule in AUTO_RULES for recipe in RECIPES}
    assert set(seen) == expected
    assert len({str(result.alignments) for result in swept.results.values()}) > 20


def test_scores_are_the_metrics(trial: Any, swept: Sweep) -> None:
    gold = trial[2].gold
    for result in swept.results.values():
        score = AER().corpus_score(result.alignments, [gold], 40)
        assert (result.score.aer, result.score._ci, result.score.links) == (score.aer, score._ci, score.links)
        assert result.score._ci > 0


def test_choices_are_the_aligners(trial: Any, swept: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, corpus = trial
    pairs = list(zip(corpus.sources, corpus.targets, strict=True))

    def chosen() -> dict[str, Choice]:
        rules: tuple[Any, ...] = ("auto", "highest-norm")
        found = {
            rule: WordAligner(model, tokenizer, layer=rule, setting="auto", head="all").choose(pairs) for rule in rules
        }
        per_head = WordAligner(model, tokenizer, setting="auto")
        return {**found, "auto, one head": per_head.choose(pairs)}

    assert swept.chosen == chosen()
    for module in (alignment.aligner, alignment.sweep):
        monkeypatch.setattr(module, "SAMPLE", 1)
    assert sweep(model, tokenizer, corpus, gradients=False, n_bootstrap=1).chosen == chosen()


def test_gradients_are_read_in_both_settings(trial: Any, swept: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, corpus = trial
    monkeypatch.setattr(alignment.gradients, "source_gradients", toy_gradients)
    pairs = list(zip(corpus.sources, corpus.targets, strict=True))
    for kind in KINDS:
        maps = dict(word_maps(model, tokenizer, pairs, gradient_maps(model, cast(Any, kind)), settings=SETTINGS))
        for setting in SETTINGS:
            found = swept.results[Reading(cast(Any, kind), Choice(setting, 0))].alignments
            assert found == [RECIPES["paper"]({setting: maps[i][setting][0]}, setting) for i in range(len(pairs))]
    assert {reading.method for reading in swept.results} == {"norm", "weights", *KINDS}


def test_the_best_is_the_lowest_rate(swept: Sweep) -> None:
    for method in ("norm", "weights", *KINDS):
        for per_head in (False, True)[: 1 if method in KINDS else 2]:
            rates = [
                result.score.aer
                for reading, result in swept.results.items()
                if (reading.method, reading.recipe) == (method, "paper")
                and (reading.place.head is not None) == per_head
            ]
            assert swept.best(cast(Any, method), per_head=per_head).score.aer == min(rates)


def test_what_cannot_be_swept_is_refused(trial: Any) -> None:
    model, tokenizer, corpus = trial
    with pytest.raises(InvalidInputError, match="got the corpus Trial without a sentence pair"):
        sweep(model, tokenizer, ParallelGold("Trial", "de", "en", [], [], []))
    sources = [corpus.sources[0], [], *corpus.sources[2:]]
    with pytest.raises(InvalidInputError, match=r"^pair 1: got a source side without a word"):
        sweep(model, tokenizer, ParallelGold("Trial", "de", "en", sources, corpus.targets, corpus.gold))


ATTENTION: dict[Any, str] = {"norm": "norms", "weights": "weights"}
"""The titles of the methods that read attention."""


def rows(table: Table) -> list[list[str]]:
    """What is printed, title and header first, cut at spaces."""
    console = Console(file=io.StringIO(), width=400)
    console.print(table.title, soft_wrap=True)  # above a narrow table it has several lines
    table.title = None
    console.print(table)
    return [line.split() for line in cast(io.StringIO, console.file).getvalue().splitlines()]


def rate(swept: Sweep, method: str, setting: Setting, layer: int, head: int | None = None) -> str:
    return f"{swept.results[Reading(cast(Any, method), Choice(setting, layer, head))].score.aer:.1f}"


def test_records(trial: Any, swept: Sweep) -> None:
    found = list(records(swept))
    for record, (reading, result) in zip(found, swept.results.items(), strict=True):
        score, place = result.score, reading.place
        expected: dict[str, Any] = {"corpus": "Trial", "direction": "de-en", "method": reading.method}
        expected |= {"setting": place.setting, "layer": place.layer, "head": place.head, "recipe": reading.recipe}
        expected |= {"aer": score.aer, "aer_interval": score._ci}
        expected |= {name: getattr(score, name) for name in ("precision", "recall", "f1", "links")}
        assert list(record.items()) == list(expected.items())
    model, tokenizer, corpus = trial
    plain = list(records(sweep(model, tokenizer, corpus, gradients=False, n_bootstrap=1)))
    assert {record["aer_interval"] for record in plain} == {None}
    assert len(plain) == len(found) - len(KINDS) * len(SETTINGS)


def test_table_of_layers(swept: Sweep) -> None:
    title, header, *body = rows(tables(swept)[0])
    assert " ".join(title) == "AER by setting and layer, the paper's recipe"
    assert " ".join(header) == "method AWO 0 AWO 1 AWI 0 AWI 1"
    attention = [
        [title, *(rate(swept, method, setting, layer) for setting in SETTINGS for layer in range(LAYERS))]
        for method, title in ATTENTION.items()
    ]
    baselines = [[rate(swept, kind, setting, 0) for setting in SETTINGS] for kind in KINDS]
    titles = (["saliency"], ["gradient", "×", "input"])
    expected = [[*name, awo, "–", awi, "–"] for name, (awo, awi) in zip(titles, baselines, strict=True)]
    assert body == attention + expected


def test_table_of_heads(swept: Sweep) -> None:
    title, header, *body = rows(tables(swept)[1])
    setting = swept.chosen["auto"].setting
    assert " ".join(title) == f"AER by head, {setting}, the paper's recipe"
    assert " ".join(header) == "layer method head 0 head 1"
    assert body == [
        ["layer", str(layer), title, *(rate(swept, method, setting, layer, head) for head in range(HEADS))]
        for layer in range(LAYERS)
        for method, title in ATTENTION.items()
    ]


def test_table_of_rules(swept: Sweep) -> None:
    title, header, *body = rows(tables(swept)[2])
    assert " ".join(title) == "AER of norms chosen without gold"
    assert header == ["rule", "choice", "AER"]
    chosen = {
        **swept.chosen,
        "(by gold)": swept.best("norm").reading.place,
        "(by gold, one head)": swept.best("norm", per_head=True).reading.place,
    }
    assert any(
        rate(swept, "norm", place.setting, place.layer) != rate(swept, "weights", place.setting, place.layer)
        for place in swept.chosen.values()
    )
    assert [" ".join(row) for row in body] == [
        f"{rule} {choice} {rate(swept, 'norm', choice.setting, choice.layer, choice.head)}"
        for rule, choice in chosen.items()
    ]


def with_rates(swept: Sweep, rate: Callable[[], float]) -> Sweep:
    """The sweep of a model whose readings have these rates."""

    def other(score: Any) -> Any:
        changed = copy(score)
        changed.score = rate()
        return changed

    results = {reading: replace(result, score=other(result.score)) for reading, result in swept.results.items()}
    return replace(swept, results=results)


def test_table_of_correlations(swept: Sweep) -> None:
    generator = np.random.default_rng(0)
    swept = with_rates(swept, lambda: 100 * generator.random())
    title, header, *body = rows(tables(swept)[3])
    assert " ".join(title) == "AER of single heads against their mean norm"
    assert " ".join(header) == "setting Spearman Pearson AER of the head with the highest norm"
    expected = []
    for setting in SETTINGS:
        places = [Choice(setting, layer, head) for layer in range(LAYERS) for head in range(HEADS)]
        rates = [swept.results[Reading("norm", place)].score.aer for place in places]
        maps = [np.concatenate([word_map.ravel() for word_map in swept.maps["norm", place]]) for place in places]
        norms = [float(entries.mean()) for entries in maps]
        ranks = [np.argsort(np.argsort(values)) for values in (rates, norms)]
        numbers = [np.corrcoef(pair)[0, 1] for pair in (ranks, [rates, norms])]
        highest = rates[int(np.argmax(norms))]
        expected.append([setting, *(f"{number:.2f}" for number in numbers), f"{highest:.1f}"])
    assert body == expected


def test_heads_of_one_rate_correlate_with_nothing(swept: Sweep) -> None:
    alike = with_rates(swept, lambda: 30.0)
    assert [row[1:3] for row in rows(tables(alike)[3])[2:]] == [["–", "–"]] * len(SETTINGS)


@pytest.mark.parametrize(("table", "rule"), list(enumerate(AUTO_RULES)))
def test_tables_of_several_corpora(swept: Sweep, table: int, rule: str) -> None:
    corpus = replace(swept.corpus, name="Other", gold=swept.corpus.gold[::-1])
    scored = {
        reading: replace(result, score=AER([corpus.gold]).corpus_score(result.alignments, None, 1))
        for reading, result in swept.results.items()
    }
    corpora = [swept, replace(swept, corpus=corpus, results=scored)]
    title, header, *body = rows(corpora_tables(corpora)[table])
    assert " ".join(title) == f"AER by recipe, {rule}; p of the difference from norms"
    assert header == ["recipe", "method", "Trial", "Other", "mean", "p,", "all", "pairs"]
    expected = []
    for recipe in RECIPES:
        found = [[one.results[Reading(method, one.chosen[rule], recipe)] for one in corpora] for method in ATTENTION]
        links = [list(one.alignments) + list(other.alignments) for one, other in found]
        gold = [*swept.corpus.gold, *corpus.gold]
        [p_value] = paired_significance(links[0], [links[1]], gold, trials=1000).p_values
        p = ["", f" {p_value:.3f}{' *' if p_value < 0.05 else ''}"]
        for name, (one, other), ending in zip(ATTENTION.values(), found, p, strict=True):
            rates = one.score.aer, other.score.aer
            expected.append(f"{recipe} {name} {rates[0]:.1f} {rates[1]:.1f} {sum(rates) / 2:.1f}{ending}")
    assert [" ".join(row) for row in body] == expected
    assert any(row[2] != row[3] for row in body)


@pytest.mark.parametrize(("place", "rule"), [(4, "auto"), (5, "auto, one head")])
def test_tables_of_recipes(swept: Sweep, place: int, rule: str) -> None:
    title, header, *body = rows(tables(swept)[place])
    auto = swept.chosen[rule]
    assert " ".join(title) == f"AER by recipe, {auto}; p of the difference from norms"
    assert header == ["recipe", "method", "AER", "95", "%", "precision", "recall", "p"]
    expected = []
    for recipe in RECIPES:
        found = [swept.results[Reading(method, auto, recipe)] for method in ATTENTION]
        names = list(ATTENTION.values())
        if recipe == "paper":
            best = [swept.best(cast(Any, kind)) for kind in KINDS]
            found += best
            titles = ("saliency", "gradient × input")
            names += [f"{title}, {result.reading.place.setting}" for title, result in zip(titles, best, strict=True)]
        others = [result.alignments for result in found[1:]]
        p_values = paired_significance(found[0].alignments, others, swept.corpus.gold, trials=1000).p_values
        for name, result, p_value in zip(names, found, (None, *p_values), strict=True):
            score = result.score
            p = "" if p_value is None else f" {p_value:.3f}" + (" *" if p_value < 0.05 else "")
            numbers = f"{score.aer:.1f} ± {score._ci:.1f} {score.precision:.1f} {score.recall:.1f}"
            expected.append(f"{recipe} {name} {numbers}{p}")
    assert [" ".join(row) for row in body] == expected


def assert_panels(figure: Any, title: str, rates: Callable[[str], list[list[str]]], names: list[list[str]]) -> None:
    assert figure.get_suptitle() == title
    assert [axes.get_title() for axes in figure.axes] == list(ATTENTION.values())
    for axes, method in zip(figure.axes, ATTENTION, strict=True):
        [image], matrix = axes.images, rates(method)
        found = image.get_array()
        assert [[f"{value:.1f}" for value in row] for row in found] == matrix
        texts = {text.get_position(): text.get_text() for text in axes.texts}
        assert texts == {(x, y): number for y, row in enumerate(matrix) for x, number in enumerate(row)}
        labels = axes.get_yticklabels(), axes.get_xticklabels()
        assert [[label.get_text() for label in side] for side in labels] == names
        assert image.get_clim() == (0, 100)


def test_figures(swept: Sweep) -> None:
    layers = ["layer 0", "layer 1"]
    assert_panels(
        layer_figure(swept),
        "AER (%), Trial de–en",
        lambda method: [[rate(swept, method, setting, layer) for layer in range(LAYERS)] for setting in SETTINGS],
        [["AWO", "AWI"], layers],
    )
    setting = swept.chosen["auto"].setting
    assert_panels(
        head_figure(swept),
        f"AER (%), Trial de–en, {setting}",
        lambda method: [
            [rate(swept, method, setting, layer, head) for head in range(HEADS)] for layer in range(LAYERS)
        ],
        [layers, ["head 0", "head 1"]],
    )

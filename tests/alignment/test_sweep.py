"""The experiment on a random model: every reading against the aligner, and the numbers in tables, records, figures."""

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import alignment.aligner
import alignment.extraction
import alignment.sweep
from alignment.aer import AER
from alignment.aligner import WordAligner
from alignment.corpora import ParallelGold
from alignment.extraction import attention_maps, gradient_maps, word_maps
from alignment.huggingface import HuggingFaceTokenizer
from alignment.links import Alignment, GoldAlignment
from alignment.recipes import RECIPES
from alignment.selection import Choice
from alignment.settings import Setting
from alignment.significance import paired_significance
from alignment.sweep import Reading, Sweep, norm_correlation, sweep
from alignment.sweep_report import head_figure, layer_figure, records, tables
from captum_norm import AttentionWeights, InvalidInputError, NormAttribution
from tests.alignment.translation_models import FAMILIES, SOURCES, TARGETS, random_model

SETTINGS: tuple[Setting, ...] = ("AWO", "AWI")
LAYERS, HEADS = 2, 2
AUTO_RULES = ("auto", "auto, one head")
KINDS = ("saliency", "gradient_x_input")


def gradients(_: Any, inputs: dict[str, Tensor], labels: Tensor, *, kind: str) -> Tensor:
    """In place of the real ones: numbers of either sign that are another map for each kind."""
    ids, factor = inputs["input_ids"][:, None, :], 7 if kind == "saliency" else 5
    return ((ids * factor + labels.clamp(min=0)[:, :, None] * 3) % 11 - 4.5) * (inputs["attention_mask"][:, None, :])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random model of Marian, its tokenizer, and sentence pairs with random gold alignments."""
    family = FAMILIES["Marian"]
    tokenizer = family.tokenizer(tmp_path_factory.mktemp("tokenizer"))
    sources, targets = ([text.split() for text in texts] for texts in (SOURCES, TARGETS))
    generator = np.random.default_rng(0)

    def links(share: float, source: list[str], target: list[str]) -> Alignment:
        chosen = generator.random((len(source), len(target))) < share
        return Alignment((int(i), int(j)) for i, j in np.argwhere(chosen))

    gold = [
        GoldAlignment(links(0.2, source, target), links(0.3, source, target))
        for source, target in zip(sources, targets, strict=True)
    ]
    corpus = ParallelGold("Trial", "de", "en", sources, targets, gold)
    torch.manual_seed(0)  # what the model is made with, before it is made more random
    return random_model(family, tokenizer, seed=7), HuggingFaceTokenizer(tokenizer), corpus


@pytest.fixture(scope="module")
def swept(made: Any) -> Any:
    """All readings, gradients included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alignment.extraction, "source_gradients", gradients)
        yield sweep(*made, n_bootstrap=40)


@pytest.mark.parametrize("method", ["norms", "weights"])
def test_every_map_has_its_place(made: Any, swept: Sweep, method: str) -> None:
    model, tokenizer, corpus = made
    pairs = list(zip(corpus.sources, corpus.targets, strict=True))
    made_method: Any = (NormAttribution if method == "norms" else AttentionWeights)(model)
    together, split = (
        dict(word_maps(model, tokenizer, pairs, attention_maps(made_method, per_head=per_head), settings=SETTINGS))
        for per_head in (False, True)
    )
    for index in range(len(pairs)):
        for setting in SETTINGS:
            for layer in range(LAYERS):
                for head in (None, 0, 1):
                    found = swept.maps[cast(Any, method), Choice(setting, layer, head)][index]
                    maps = together[index][setting][layer] if head is None else split[index][setting][layer, head]
                    np.testing.assert_allclose(found, maps, atol=1e-5 * maps.max())
    places = {place for name, place in swept.maps if name == method}
    assert len(places) == len(SETTINGS) * LAYERS * (1 + HEADS)
    assert (swept.layers, swept.heads) == (LAYERS, HEADS)


@pytest.mark.parametrize("method", ["norms", "weights"])
def test_readings_are_the_aligners(made: Any, swept: Sweep, method: str) -> None:
    model, tokenizer, corpus = made
    own: Any = (NormAttribution if method == "norms" else AttentionWeights)(model)
    seen = []
    for reading, result in swept.results.items():
        if reading.method == method:
            place = reading.place
            aligner = WordAligner(
                model, tokenizer, own, place.layer, place.setting, head=place.head, recipe=reading.recipe
            )
            assert result.reading == reading
            assert result.alignments == aligner.align(corpus.sources, corpus.targets)
            seen.append(reading)
    places = [Choice(s, layer, head) for s in SETTINGS for layer in range(LAYERS) for head in (None, *range(HEADS))]
    expected = {Reading(cast(Any, method), place) for place in places}
    expected |= {Reading(cast(Any, method), swept.chosen[rule], recipe) for rule in AUTO_RULES for recipe in RECIPES}
    assert set(seen) == expected
    assert len({str(result.alignments) for result in swept.results.values()}) > 20


def test_scores_are_the_metrics(made: Any, swept: Sweep) -> None:
    gold = made[2].gold
    for result in swept.results.values():
        score = AER().corpus_score(result.alignments, [gold], 40)
        assert (result.score.aer, result.score._ci, result.score.links) == (score.aer, score._ci, score.links)
        assert result.score._ci > 0


def test_choices_are_the_aligners(made: Any, swept: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, corpus = made
    pairs = list(zip(corpus.sources, corpus.targets, strict=True))

    def chosen() -> dict[str, Choice]:
        rules: tuple[Any, ...] = ("auto", "highest-norm")
        found = {rule: WordAligner(model, tokenizer, layer=rule, setting="auto").choose(pairs) for rule in rules}
        per_head = WordAligner(model, tokenizer, setting="auto", head="auto")
        return {**found, "auto, one head": per_head.choose(pairs)}

    assert swept.chosen == chosen()
    for module in (alignment.aligner, alignment.sweep):
        monkeypatch.setattr(module, "SAMPLE", 1)
    assert sweep(model, tokenizer, corpus, gradients=False, n_bootstrap=1).chosen == chosen()


def test_gradients_are_read_in_both_settings(made: Any, swept: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, corpus = made
    monkeypatch.setattr(alignment.extraction, "source_gradients", gradients)
    pairs = list(zip(corpus.sources, corpus.targets, strict=True))
    for kind in KINDS:
        maps = dict(word_maps(model, tokenizer, pairs, gradient_maps(model, cast(Any, kind)), settings=SETTINGS))
        for setting in SETTINGS:
            found = swept.results[Reading(cast(Any, kind), Choice(setting, 0))].alignments
            assert found == [RECIPES["paper"]({setting: maps[i][setting][0]}, setting) for i in range(len(pairs))]
    assert {reading.method for reading in swept.results} == {"norms", "weights", *KINDS}


def test_the_best_is_the_lowest_rate(swept: Sweep) -> None:
    for method in ("norms", "weights", *KINDS):
        for per_head in (False, True)[: 1 if method in KINDS else 2]:
            rates = [
                result.score.aer
                for reading, result in swept.results.items()
                if (reading.method, reading.recipe) == (method, "paper")
                and (reading.place.head is not None) == per_head
            ]
            assert swept.best(cast(Any, method), per_head=per_head).score.aer == min(rates)


def test_what_cannot_be_swept_is_refused(made: Any) -> None:
    model, tokenizer, corpus = made
    with pytest.raises(InvalidInputError, match="got the corpus Trial without a sentence pair"):
        sweep(model, tokenizer, ParallelGold("Trial", "de", "en", [], [], []))
    sources = [corpus.sources[0], [], *corpus.sources[2:]]
    with pytest.raises(InvalidInputError, match=r"^pair 1: got a source side without a word"):
        sweep(model, tokenizer, ParallelGold("Trial", "de", "en", sources, corpus.targets, corpus.gold))


def test_the_model_is_left_as_it_was(made: Any) -> None:
    model, tokenizer, corpus = made
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sweep(model, tokenizer, corpus, gradients=False, n_bootstrap=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


# The report.


def rows(table: Table) -> list[list[str]]:
    """What is printed, title and header first, cut at spaces."""
    console = Console(file=io.StringIO(), width=400)
    console.print(table.title, soft_wrap=True)  # above a narrow table it has several lines
    table.title = None
    console.print(table)
    return [line.split() for line in cast(io.StringIO, console.file).getvalue().splitlines()]


def rate(swept: Sweep, method: str, setting: Setting, layer: int, head: int | None = None) -> str:
    return f"{swept.results[Reading(cast(Any, method), Choice(setting, layer, head))].score.aer:.1f}"


def test_records(made: Any, swept: Sweep) -> None:
    found = list(records(swept))
    for record, (reading, result) in zip(found, swept.results.items(), strict=True):
        score = result.score
        place = reading.place
        assert list(record.items()) == [
            ("corpus", "Trial"),
            ("direction", "de-en"),
            ("method", reading.method),
            ("setting", place.setting),
            ("layer", place.layer),
            ("head", place.head),
            ("recipe", reading.recipe),
            ("aer", score.aer),
            ("aer_interval", score._ci),
            ("precision", score.precision),
            ("recall", score.recall),
            ("f1", score.f1),
            ("links", score.links),
        ]
    model, tokenizer, corpus = made
    plain = list(records(sweep(model, tokenizer, corpus, gradients=False, n_bootstrap=1)))
    assert {record["aer_interval"] for record in plain} == {None}
    assert len(plain) == len(found) - len(KINDS) * len(SETTINGS)


def test_table_of_layers(swept: Sweep) -> None:
    title, header, *body = rows(tables(swept)[0])
    assert " ".join(title) == "AER by setting and layer, the paper's recipe"
    assert " ".join(header) == "AWO 0 AWO 1 AWI 0 AWI 1"
    attention = [
        [method, *(rate(swept, method, setting, layer) for setting in SETTINGS for layer in range(LAYERS))]
        for method in ("norms", "weights")
    ]
    baselines = [[rate(swept, kind, setting, 0) for setting in SETTINGS] for kind in KINDS]
    titles = (["saliency"], ["gradient", "×", "input"])
    expected = [[*name, awo, "–", awi, "–"] for name, (awo, awi) in zip(titles, baselines, strict=True)]
    assert body == attention + expected


def test_table_of_heads(swept: Sweep) -> None:
    title, header, *body = rows(tables(swept)[1])
    setting = swept.chosen["auto"].setting
    assert " ".join(title) == f"AER by head, {setting}, the paper's recipe"
    assert " ".join(header) == "head 0 head 1"
    assert body == [
        ["layer", str(layer), method, *(rate(swept, method, setting, layer, head) for head in range(HEADS))]
        for layer in range(LAYERS)
        for method in ("norms", "weights")
    ]


def test_table_of_rules(swept: Sweep) -> None:
    title, header, *body = rows(tables(swept)[2])
    assert " ".join(title) == "AER of norms chosen without gold"
    assert header == ["rule", "choice", "AER"]
    chosen = {
        **swept.chosen,
        "(by gold)": swept.best("norms").reading.place,
        "(by gold, one head)": swept.best("norms", per_head=True).reading.place,
    }
    assert any(
        rate(swept, "norms", place.setting, place.layer) != rate(swept, "weights", place.setting, place.layer)
        for place in swept.chosen.values()
    )
    assert [" ".join(row) for row in body] == [
        f"{rule} {choice} {rate(swept, 'norms', choice.setting, choice.layer, choice.head)}"
        for rule, choice in chosen.items()
    ]


@pytest.mark.parametrize(("place", "rule"), [(3, "auto"), (4, "auto, one head")])
def test_tables_of_recipes(swept: Sweep, place: int, rule: str) -> None:
    title, header, *body = rows(tables(swept)[place])
    auto = swept.chosen[rule]
    assert " ".join(title) == f"AER by recipe, {auto}; p of the difference from norms"
    assert header == ["recipe", "method", "AER", "95", "%", "precision", "recall", "p"]
    expected = []
    for recipe in RECIPES:
        found = [swept.results[Reading(cast(Any, method), auto, recipe)] for method in ("norms", "weights")]
        names = ["norms", "weights"]
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


def test_correlation_of_rates_with_mean_norms(swept: Sweep) -> None:
    generator = np.random.default_rng(0)
    places = [Choice("AWI", layer, head) for layer in range(3) for head in range(4)]
    maps = {
        ("norms", place): [generator.random((3, 4)) + index, generator.random((2, 5))]
        for index, place in enumerate(places)
    }
    rates = generator.random(12) * 100
    results: Any = {
        Reading("norms", place): SimpleNamespace(score=SimpleNamespace(aer=rate))
        for place, rate in zip(places, rates, strict=True)
    }
    trial: Any = replace(swept, maps=maps, results=results, layers=3, heads=4)
    found = norm_correlation(trial, "AWI")
    norms = [(first.sum() + second.sum()) / 22 for first, second in maps.values()]
    assert found.pearson == pytest.approx(np.corrcoef(rates, norms)[0, 1])
    ranks = [np.argsort(np.argsort(values)) for values in (rates, norms)]
    assert found.spearman == pytest.approx(np.corrcoef(ranks[0], ranks[1])[0, 1])


def test_table_of_correlations(swept: Sweep) -> None:
    table = tables(swept)[-1]
    assert table.title == "Correlation of AER with the mean norm, all heads"
    for row, setting in zip(rows(table)[-2:], SETTINGS, strict=True):
        found = norm_correlation(swept, setting)
        cells = ["–" if np.isnan(value) else f"{value:.3f}" for value in (found.spearman, found.pearson)]
        assert row == [setting, *cells]


def assert_panels(figure: Any, title: str, matrices: dict[str, list[list[str]]], names: list[list[str]]) -> None:
    assert figure.get_suptitle() == title
    assert [axes.get_title() for axes in figure.axes] == list(matrices)
    for axes, matrix in zip(figure.axes, matrices.values(), strict=True):
        [image] = axes.images
        found = image.get_array()
        assert [[f"{value:.1f}" for value in row] for row in found] == matrix
        texts = {text.get_position(): text.get_text() for text in axes.texts}
        assert texts == {(x, y): number for y, row in enumerate(matrix) for x, number in enumerate(row)}
        assert [
            [label.get_text() for label in labels] for labels in (axes.get_yticklabels(), axes.get_xticklabels())
        ] == (names)
        assert image.get_clim() == (0, 100)


def test_figures(swept: Sweep) -> None:
    layers = ["layer 0", "layer 1"]
    assert_panels(
        layer_figure(swept),
        "AER (%), Trial de–en",
        {
            method: [[rate(swept, method, setting, layer) for layer in range(LAYERS)] for setting in SETTINGS]
            for method in ("norms", "weights")
        },
        [["AWO", "AWI"], layers],
    )
    setting = swept.chosen["auto"].setting
    assert_panels(
        head_figure(swept),
        f"AER (%), Trial de–en, {setting}",
        {
            method: [[rate(swept, method, setting, layer, head) for head in range(HEADS)] for layer in range(LAYERS)]
            for method in ("norms", "weights")
        },
        [layers, ["head 0", "head 1"]],
    )

"""The experiment on a random model: every reading against the aligner."""

from typing import Any, cast

import numpy as np
import pytest
import torch

import alignment.aligner
import alignment.gradients
import alignment.sweep
from alignment.aer import AER
from alignment.aligner import WordAligner
from alignment.corpora import ParallelGold
from alignment.gradients import gradient_maps
from alignment.recipes import RECIPES
from alignment.selection import Choice, Setting
from alignment.sweep import Reading, Sweep, sweep
from alignment.teacher_forcing import attention_maps, word_maps
from captum_norm import AttentionWeights, InvalidInputError, NormAttribution
from tests.alignment.toy import toy_gradients

SETTINGS: tuple[Setting, ...] = ("AWO", "AWI")
LAYERS, HEADS = 2, 2
AUTO_RULES = ("auto", "auto, one head")
KINDS = ("saliency", "gradient_x_input")


@pytest.mark.parametrize("method", ["norm", "weights"])
def test_every_map_has_its_place(trial: Any, swept: Sweep, method: str) -> None:
    model, tokenizer, corpus = trial
    pairs = list(zip(corpus.sources, corpus.targets, strict=True))
    made_method: Any = (NormAttribution if method == "norm" else AttentionWeights)(model)
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


@pytest.mark.parametrize("method", ["norm", "weights"])
def test_readings_are_the_aligners(trial: Any, swept: Sweep, method: str) -> None:
    model, tokenizer, corpus = trial
    own: Any = (NormAttribution if method == "norm" else AttentionWeights)(model)
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
        found = {rule: WordAligner(model, tokenizer, layer=rule, setting="auto").choose(pairs) for rule in rules}
        per_head = WordAligner(model, tokenizer, setting="auto", head="auto")
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


def test_the_model_is_left_as_it_was(trial: Any) -> None:
    model, tokenizer, corpus = trial
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sweep(model, tokenizer, corpus, gradients=False, n_bootstrap=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())

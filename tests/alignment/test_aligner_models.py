"""The aligner on real models, a random Marian model and a shipped one; the shipped models are whole."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import captum_norm_models
from alignment.aer import AER
from alignment.aligner import WordAligner, without_head
from alignment.cli import main
from alignment.corpora import load_alibi
from alignment.decoding import argmax
from alignment.fairseq.loading import load_shipped_model, shipped_models
from alignment.normalization import NormalizedWords
from alignment.selection import Choice, Setting
from alignment.teacher_forcing import MapMethod, attention_maps, word_maps
from captum_norm import AttentionWeights, InvalidInputError, NormAttribution
from captum_norm.errors import UnsupportedScopeError
from tests.alignment.toy import ToyModel
from tests.alignment.translation_models import PAIRS, made
from tests.families import state_of

BOTH: tuple[Setting, ...] = ("AWI", "AWO")


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random model of Marian, and sentence pairs."""
    model, tokenizer = made("Marian", tmp_path_factory.mktemp("tokenizer"), seed=3)
    sources, targets = zip(*PAIRS, strict=True)
    return SimpleNamespace(model=model, tokenizer=tokenizer, sources=sources, targets=targets)


@pytest.mark.parametrize("layer", [2, -3, 10**6])
def test_layers_that_the_model_lacks_are_refused(marian: Any, layer: int) -> None:
    with pytest.raises(InvalidInputError, match=f"got layer {layer}; the model has 2: 0 to 1, or -2 to -1"):
        WordAligner(marian.model, marian.tokenizer, layer=layer).align(marian.sources, marian.targets)


def test_what_the_method_cannot_is_refused(marian: Any, tmp_path: Any) -> None:
    method = cast(MapMethod, NormAttribution(marian.model, scope="attn_res_ln"))
    with pytest.raises(InvalidInputError, match='no maps of single heads; only the scope "attn" splits into heads'):
        WordAligner(marian.model, marian.tokenizer, method, 0, head=0).align(marian.sources, marian.targets)
    model, tokenizer = made("T5", tmp_path)
    scope = NormAttribution(model, scope="attn_res_ln")
    aligner = WordAligner(model, tokenizer, cast(MapMethod, scope), 0)
    with pytest.raises(UnsupportedScopeError):
        aligner.align(marian.sources, marian.targets)


def test_the_model_is_left_as_it_was_and_its_head_is_not_run(marian: Any) -> None:
    before = state_of(marian.model)
    for layer in (0, "auto"):
        WordAligner(marian.model, marian.tokenizer, layer=layer).align(marian.sources, marian.targets)
    assert state_of(marian.model) == before
    assert without_head(marian.model) is marian.model.model
    assert without_head(marian.model.model) is marian.model.model
    plain = ToyModel()
    assert without_head(plain) is plain


@pytest.fixture(scope="module")
def story() -> Any:
    """The shipped model on the Alibi story: norms of every layer in both settings."""
    model, tokenizer = load_shipped_model("fr-en")
    corpus = load_alibi()
    pairs = list(zip(corpus.sources, corpus.targets, strict=True))
    made = SimpleNamespace(model=model, tokenizer=NormalizedWords(tokenizer, "fr", "en"), corpus=corpus)
    maps = attention_maps(NormAttribution(model.base_model))
    found = dict(word_maps(model, made.tokenizer, pairs, maps, settings=BOTH))
    made.maps = {
        Choice(setting, layer): [found[index][setting][layer].astype(np.float64) for index in range(len(pairs))]
        for setting in BOTH
        for layer in range(3)
    }
    return made


def test_norms_find_the_words_of_the_story_better_than_weights(story: Any) -> None:
    corpus, metric = story.corpus, AER([story.corpus.gold])
    norms = WordAligner(story.model, story.tokenizer, setting="auto", recipe="paper")
    found = norms.align(corpus.sources, corpus.targets)
    assert norms.choice == Choice("AWI", 0)
    assert found == [argmax(word_map) for word_map in story.maps[Choice("AWI", 0)]]
    by_weight = cast(MapMethod, AttentionWeights(without_head(story.model)))
    weights = WordAligner(story.model, story.tokenizer, by_weight, 0, recipe="paper").align(
        corpus.sources, corpus.targets
    )
    scores = [metric.corpus_score(alignments, None).aer for alignments in (found, weights)]
    assert [round(score, 1) for score in scores] == [32.1, 34.7]


MODELS = Path(captum_norm_models.__file__).parent


@pytest.mark.parametrize("name", shipped_models())
def test_the_weights_are_those_of_the_file(name: str) -> None:
    state = load_shipped_model(name)[0].state_dict()
    weights = load_file(MODELS / name / "model.safetensors")
    for key, tensor in weights.items():
        assert torch.equal(state[f"model.{key}"], tensor.float())
    embedding = weights["encoder.embed_tokens.weight"].float()
    assert torch.equal(state["lm_head.weight"], embedding)
    assert torch.equal(state["model.decoder.embed_tokens.weight"], embedding)


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "captum_norm_models", None)
    assert main(["sweep", "--corpus", "alibi=blue-beard"]) == 2
    told = "the translation model fr-en is not installed: pip install captum-norm-models, or name another model\n"
    assert capsys.readouterr().err.endswith(told)


def test_other_names_are_refused() -> None:
    for name in ("fr-de", "", "..", "../models/fr-en"):
        with pytest.raises(InvalidInputError, match=r"expected one of .*fr-en"):
            load_shipped_model(name)

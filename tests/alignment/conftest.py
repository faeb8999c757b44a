"""A sweep of a random model, made once a session."""

from typing import Any

import numpy as np
import pytest

import alignment.gradients
from alignment.corpora import ParallelGold
from alignment.huggingface import HuggingFaceTokenizer
from alignment.links import Alignment, GoldAlignment
from alignment.sweep import sweep
from tests.alignment.toy import toy_gradients
from tests.alignment.translation_models import FAMILIES, SOURCES, TARGETS, random_model


@pytest.fixture(scope="session")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Any:
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
    return random_model(family, tokenizer, seed=7), HuggingFaceTokenizer(tokenizer), corpus


@pytest.fixture(scope="session")
def swept(trial: Any) -> Any:
    """All readings, gradients included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alignment.gradients, "source_gradients", toy_gradients)
        return sweep(*trial, n_bootstrap=40)

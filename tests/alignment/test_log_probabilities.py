"""Log-probabilities of given targets, against the model run step by step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alignment.huggingface import HuggingFaceTokenizer
from alignment.teacher_forcing import teacher_forced_batches
from alignment.tokenization import EncodedSentence
from alignment.translation import emitted_steps, log_probabilities, target_log_probabilities
from captum_norm import InvalidInputError, UnsupportedModelError
from tests.alignment.translation_models import FAMILIES, SOURCES, TARGETS, random_model

PAIRS = [(source.split(), target.split()) for source, target in zip(SOURCES, TARGETS, strict=True)]


def made(name: str, folder: Path, seed: int = 0) -> tuple[Any, HuggingFaceTokenizer]:
    """A random model of a family, and its tokenizer."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer(folder)
    return random_model(family, tokenizer, seed), HuggingFaceTokenizer(tokenizer, **family.options)


def step_by_step(model: Any, tokenizer: Any, pair: Any) -> list[float]:
    """The log-probability of each piece of the words and of the end of sentence, by a pass for each."""
    (batch,) = teacher_forced_batches(model, tokenizer, [pair])
    words = [step for step, index in enumerate(batch.target[0].word_ids) if index is not None]
    found = []
    for step in range(words[0], min(words[-1] + 2, len(batch.target[0].ids))):
        read = batch.inputs["decoder_input_ids"][:, : step + 1]
        with torch.no_grad():
            logits = model(input_ids=batch.inputs["input_ids"], decoder_input_ids=read, use_cache=False).logits[0, -1]
        exponentials = [float(number) for number in logits.double().exp()]
        found.append(float(np.log(exponentials[batch.target[0].ids[step]] / sum(exponentials))))
    return found


@pytest.mark.parametrize(("name", "seed"), [("Marian", 0), ("NLLB", 1), ("mBART", 2), ("T5", 3), ("BART", 4)])
def test_log_probabilities_are_those_of_each_step(name: str, seed: int, tmp_path: Path) -> None:
    model, tokenizer = made(name, tmp_path, seed)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = dict(target_log_probabilities(model, tokenizer, PAIRS, max_tokens=60))
    assert sorted(found) == list(range(len(PAIRS)))
    for index, pair in enumerate(PAIRS):
        np.testing.assert_allclose(found[index], step_by_step(model, tokenizer, pair), rtol=2e-5, atol=2e-5)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_training_mode_changes_nothing(tmp_path: Path) -> None:
    model, tokenizer = made("Marian", tmp_path)
    usual = [found for _, found in target_log_probabilities(model, tokenizer, PAIRS)]
    model.train()
    in_training = [found for _, found in target_log_probabilities(model, tokenizer, PAIRS)]
    assert model.training
    assert all(np.array_equal(one, other) for one, other in zip(usual, in_training, strict=True))


def test_unusable_pairs_are_reported(tmp_path: Path) -> None:
    model, tokenizer = made("Marian", tmp_path)
    told: dict[int, str] = {}
    pairs = [PAIRS[0], (["das"], ["the"] * 200)]
    found = dict(
        target_log_probabilities(
            model, tokenizer, pairs, on_error=lambda index, error: told.update({index: str(error)})
        )
    )
    assert sorted(found) == [0]
    assert "expected at most 128" in told[1]


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    model, tokenizer = made("Marian", tmp_path)
    with pytest.raises(UnsupportedModelError, match="got a MarianModel, expected a model with a lang"):
        list(target_log_probabilities(model.model, tokenizer, PAIRS))


def test_labels_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="got the label 7, expected -100 or one of the model's 5 pieces"):
        log_probabilities(torch.zeros(1, 2, 5), torch.tensor([[1, 7]]))


@pytest.mark.parametrize(
    ("word_ids", "steps"),
    [
        ([0, 1, None], [0, 1, 2]),
        ([None, 0, 0, None, None], [1, 2, 3]),
        ([0, 1], [0, 1]),  # no end of sentence
    ],
)
def test_emitted_steps(word_ids: list[int | None], steps: list[int]) -> None:
    assert list(range(len(word_ids)))[emitted_steps(EncodedSentence([0] * len(word_ids), word_ids))] == steps

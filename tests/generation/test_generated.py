"""Answers that the model generates: its own, without what ends them, up to its last position."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from captum_norm import GenerationAttribution, InvalidInputError, NormAttribution
from tests.generation.texts import ANSWER, PROMPT, encoded, gpt2, tokenizer, tokens_of_answer


def test_generated_answers_are_the_models_own() -> None:
    model, before = gpt2(), {name: value.clone() for name, value in gpt2().state_dict().items()}
    settings, ids = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}, encoded(PROMPT)
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :]
    result = GenerationAttribution(NormAttribution(model), tokenizer()).attribute(PROMPT, gen_args=settings)
    assert result.explained.answer == tokenizer().decode(generated)
    given = GenerationAttribution(NormAttribution(model), tokenizer()).attribute(PROMPT, generated)
    assert torch.equal(result.seq_attr, given.seq_attr)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_in_training_answers_without_dropout() -> None:
    settings, model = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}, copy.deepcopy(gpt2())
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.9
    expected, found = (
        GenerationAttribution(NormAttribution(model.train(training)), tokenizer()).attribute(PROMPT, gen_args=settings)
        for training in (False, True)
    )
    assert found.explained.answer == expected.explained.answer
    assert torch.equal(found.seq_attr, expected.seq_attr)
    assert all(module.training for module in model.modules())


def test_sampling_stays_the_users() -> None:
    settings = {"max_new_tokens": 5, "do_sample": True, "temperature": 3.0, "eos_token_id": None}
    generation, ids = GenerationAttribution(NormAttribution(gpt2()), tokenizer()), encoded(PROMPT)
    torch.manual_seed(3)
    expected = gpt2().generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :]
    torch.manual_seed(3)
    assert generation.attribute(PROMPT, gen_args=settings).explained.answer == tokenizer().decode(expected)


def test_the_end_of_an_answer_is_no_token_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = GenerationAttribution(NormAttribution(gpt2()), tokenizer())

    def generate(answer: list[int]) -> Callable[..., Tensor]:
        return lambda input_ids, **_: torch.cat([input_ids, torch.tensor([answer])], 1)

    monkeypatch.setattr(gpt2(), "generate", generate([*tokens_of_answer(), 1, 1]))
    assert generation.attribute(PROMPT).explained.answer == ANSWER
    monkeypatch.setattr(gpt2(), "generate", generate([1]))
    with pytest.raises(InvalidInputError, match="nothing but the end"):
        generation.attribute(PROMPT)


def test_prompts_that_the_model_cannot_read_are_refused_before_they_are_generated_from() -> None:
    generation = GenerationAttribution(NormAttribution(gpt2()), tokenizer())
    with pytest.raises(InvalidInputError, match="takes at most 64; shorten the prompt"):
        generation.attribute("Anna owns a red boat. " * 20)
    with pytest.raises(InvalidInputError, match="the model's own tokenizer"):
        generation.attribute(torch.tensor([5, 9999]))


@pytest.mark.parametrize("length", [62, 64])
def test_an_answer_ends_with_the_models_last_position(length: int) -> None:
    generation = GenerationAttribution(NormAttribution(gpt2(), aggregation="mean"), tokenizer())
    result = generation.attribute(torch.full((length,), 7), gen_args={"max_new_tokens": 9, "eos_token_id": None})
    assert len(result.output_tokens) == 65 - length
    assert result.explained.answer == generation.attribute(torch.full((length,), 7)).explained.answer

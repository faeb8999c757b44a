"""Gives a language model an answer token by token: reads or generates the answer, and puts it behind its prompt."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from captum_norm.checks import check_count, quoted
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.generation import prompts
from captum_norm.models.hooks import evaluating
from captum_norm.models.model import encoder_of
from captum_norm.models.offloading import input_device
from captum_norm.models.wrappers import config_of

GENERATION: Mapping[str, Any] = {"max_new_tokens": 25, "do_sample": False}
"""How answers are generated unless ``gen_args`` says otherwise, as in Captum."""

Inputs = Mapping[str, Tensor]
"""The model's arguments for one example, the prompt and all tokens of the answer but its last: the last R positions, of
an encoder–decoder model those of the decoder, predict the answer."""


class TeacherForcing:
    """A language or translation model of Hugging Face that is given answers."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self.model, self.tokenizer = cast(Any, model), tokenizer
        self.continued, config = encoder_of(model) is None, config_of(model)
        self.longest: int | None = getattr(config, "max_position_embeddings", None)
        # The token that a decoder's inputs begin with.
        self.begin: int | None = getattr(config, "decoder_start_token_id", None)

    def prompt(self, prompt: Any) -> prompts.Prompt:
        """Tokenize a prompt: a text, token ids or messages."""
        return prompts.read_prompt(prompt, self.tokenizer, continued=self.continued)

    def answer(self, prompt: prompts.Prompt, target: Any, gen_args: Mapping[str, Any] | None = None) -> list[int]:
        """Read the answer, or generate one if it is None."""
        if target is not None:
            if gen_args is not None:
                raise InvalidInputError("got target= and gen_args=; a given answer is not generated: leave one out")
            return prompts.read_answer(target, prompt, self.tokenizer, continued=self.continued)
        generate = getattr(self.model, "generate", None)
        if generate is None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot generate; take a language model with its head, such as "
                "AutoModelForCausalLM loads, or pass the answer: target="
            )
        self._check(prompt.ids, self.model, self.longest)
        if gen_args is not None and not isinstance(gen_args, Mapping):
            raise InvalidInputError(
                f'got gen_args={quoted(gen_args)}; expected a mapping for generate, such as {{"max_new_tokens": 25}}'
            )
        options = dict(GENERATION if gen_args is None else gen_args)
        if self.longest is not None and options.get("max_new_tokens") is not None:
            room = self.longest - len(prompt.ids) + 1 if self.continued else self.longest
            options["max_new_tokens"] = min(check_count("max_new_tokens", options["max_new_tokens"]), room)
        ids = self.tensor(prompt.ids)
        try:
            with torch.no_grad(), evaluating(self.model):
                generated = generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        except (TypeError, ValueError) as error:
            if not gen_args:
                raise
            reason = " ".join(str(error).split())
            raise InvalidInputError(
                f"generate() of {type(self.model).__name__} refuses gen_args={quoted(gen_args)}: {reason[:300]}"
            ) from error
        generated = getattr(generated, "sequences", generated)[0].tolist()
        answer: list[int] = generated[len(prompt.ids) :] if self.continued else generated[1:]
        stops = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        stops = stops if isinstance(stops, list) else [stops]
        while answer and answer[-1] in (self.tokenizer.eos_token_id, self.tokenizer.pad_token_id, *stops):
            answer.pop()
        if not answer:
            raise InvalidInputError("the model generated nothing but the end of its answer; pass target= or gen_args=")
        return answer

    def inputs(self, prompt: Sequence[int], answer: Sequence[int]) -> Inputs:
        """Put prompt and answer into the model's arguments; the last token is predicted, not read."""
        longest = self.longest
        if self.continued:
            self._check([*prompt, *answer], self.model, None if longest is None else longest + 1)
            ids = self.tensor([*prompt, *answer[:-1]])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        begin = self.begin
        if begin is None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} names no decoder_start_token_id, so its decoder's inputs are not known"
            )
        self._check(prompt, self.model, longest)
        self._check(answer, self.model.get_decoder(), longest)
        ids = self.tensor(prompt)
        decoder_ids = self.tensor([begin, *answer[:-1]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": decoder_ids}

    def tensor(self, ids: Sequence[int]) -> Tensor:
        """Make one row of token ids, (1, S)."""
        return torch.tensor([list(ids)], device=input_device(self.model))

    def _check(self, ids: Sequence[int], embedding: Any, longest: int | None) -> None:
        vocabulary = len(embedding.get_input_embeddings().weight)
        prompts.check_ids(ids, vocabulary, longest, type(self.model).__name__)

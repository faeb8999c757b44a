"""Turns texts into batches: tokenizes, splits into windows, masks, and batches by length."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis.categories import Categories
from captum_norm.models.main_input import longest_sequence
from captum_norm.models.stacks import encoder_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NO_LIMIT = 10**6  # a tokenizer without a limit has an astronomic one
_DEFAULT_LENGTH = 512


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One input of the model.

    Attributes:
        line: the number of the first line of its text.
        window: the index of this part of the text.
        ids: token ids, with special tokens and masks.
        masked: the positions of masked tokens.
        words: for each token the index of its word in the text, None for special tokens; None if the tokenizer does
            not know words.
    """

    line: int
    window: int
    ids: list[int]
    masked: frozenset[int]
    words: list[int | None] | None = None


@dataclass(frozen=True)
class TokenBatch:
    """Sequences of similar length.

    Attributes:
        sequences: the B sequences.
        ids: token ids, (B, S), padded on the right.
        real: True at tokens, False at padding, (B, S).
        categories: the category of each token, (B, S); C at padding.
        masked: True at masked tokens, (B, S).
    """

    sequences: Sequence[TokenSequence]
    ids: Tensor
    real: Tensor
    categories: Tensor
    masked: Tensor

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Return the arguments for the model."""
        return {"input_ids": self.ids.to(device), "attention_mask": self.real.long().to(device)}


@dataclass(frozen=True)
class Encoder:
    """Turns texts into sequences, and sequences into batches.

    Attributes:
        tokenizer: the tokenizer.
        categories: the categories of its vocabulary.
        max_length: the largest number of tokens in a sequence, special tokens included.
        windows: whether a longer text becomes several sequences; otherwise it is truncated.
        mask_rate: the share of each sequence's ordinary tokens to mask, at least one token unless it is 0. The paper
            masks 12 %, as many as pre-training does (80 % of 15 %) [Kobayashi et al. 2021].
        seed: decides, with line and window, which tokens are masked.
    """

    tokenizer: "PreTrainedTokenizerBase"
    categories: Categories
    max_length: int
    windows: bool = False
    mask_rate: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.mask_rate < 1:
            raise InvalidInputError(f"got mask_rate={self.mask_rate}; expected 0 or more, and less than 1")
        if self.mask_rate and self.tokenizer.mask_token_id is None:
            raise InvalidInputError(
                f"got mask_rate={self.mask_rate}, but the tokenizer has no mask token; set it to 0 (--mask-rate 0)"
            )
        if self.windows and not self.tokenizer.is_fast:
            raise InvalidInputError(
                f"{type(self.tokenizer).__name__} cannot split documents into windows; give the text by lines"
            )
        least = self.tokenizer.num_special_tokens_to_add() + 1
        if self.max_length < least:
            raise InvalidInputError(f"got max_length={self.max_length}; expected at least {least}")

    def sequences(self, texts: Sequence[tuple[int, str]]) -> list[TokenSequence]:
        """Tokenize texts, each with the number of its first line, in their order."""
        encoded: Any = self.tokenizer(
            [text for _, text in texts],
            truncation=True,
            max_length=self.max_length,
            return_special_tokens_mask=True,
            **({"return_overflowing_tokens": True} if self.windows else {}),
        )
        owners = encoded["overflow_to_sample_mapping"] if self.windows else range(len(texts))
        found, previous, window = [], None, 0
        parts = zip(owners, encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
        for index, (owner, ids, special) in enumerate(parts):
            window = window + 1 if owner == previous else 0
            previous = owner
            if not all(special):
                words = encoded.word_ids(index) if self.tokenizer.is_fast else None
                found.append(TokenSequence(texts[owner][0], window, ids, frozenset(), words))
        return [self._masked(sequence) for sequence in found] if self.mask_rate else found

    def batches(self, sequences: Sequence[TokenSequence], batch_tokens: int) -> Iterator[TokenBatch]:
        """Batch sequences by length, with at most ``batch_tokens`` tokens in a batch, padding included."""
        ordered = sorted(sequences, key=lambda sequence: len(sequence.ids))  # stable
        start = 0
        while start < len(ordered):
            end = start + 1
            while end < len(ordered) and (end + 1 - start) * len(ordered[end].ids) <= batch_tokens:
                end += 1
            yield self._batch(ordered[start:end])
            start = end

    def _masked(self, sequence: TokenSequence) -> TokenSequence:
        special = set(self.tokenizer.all_special_ids)
        ordinary = [place for place, token in enumerate(sequence.ids) if token not in special]
        number = min(len(ordinary), max(1, int(len(ordinary) * self.mask_rate)))
        dice = random.Random(f"{self.seed} {sequence.line} {sequence.window}")
        masked = frozenset(dice.sample(ordinary, number))
        mask = int(self.tokenizer.mask_token_id)
        ids = [mask if place in masked else token for place, token in enumerate(sequence.ids)]
        return replace(sequence, ids=ids, masked=masked)

    def _batch(self, sequences: Sequence[TokenSequence]) -> TokenBatch:
        shape = len(sequences), len(sequences[-1].ids)
        padding = self.tokenizer.pad_token_id
        ids = torch.full(shape, 0 if padding is None else int(padding))
        real, masked = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence.ids)] = torch.tensor(sequence.ids)
            real[row, : len(sequence.ids)] = True
            masked[row, list(sequence.masked)] = True
        categories = torch.where(real, self.categories.of_token[ids], len(self.categories.names))
        return TokenBatch(sequences, ids, real, categories, masked)


def longest(model: nn.Module, tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the largest number of tokens that both the tokenizer and the model's position embeddings allow.

    If neither has a limit, that of the configuration, but no more than 512.
    """
    table = longest_sequence(encoder_of(model) or model)
    limits = [limit for limit in (tokenizer.model_max_length, table) if limit is not None and limit < _NO_LIMIT]
    configured = getattr(getattr(model, "config", None), "max_position_embeddings", None) or _DEFAULT_LENGTH
    return int(min(limits, default=min(_DEFAULT_LENGTH, configured)))

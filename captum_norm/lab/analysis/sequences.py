"""Turns texts into batches of tokens, with their categories, masks and frequency ranks."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis.statistics import Array, midranks
from captum_norm.models import longest_sequence
from captum_norm.text.lines import read_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PUNCTUATION = "comma, period"
OTHER = "other"

_SPECIAL = ("cls_token", "bos_token", "sep_token", "eos_token", "mask_token")
_MARKS = (",", ".")
_NO_LIMIT = 10**6  # a tokenizer without a limit has an astronomic one
_DEFAULT_LENGTH = 512


@dataclass(frozen=True)
class Categories:
    """The category of each token of a vocabulary.

    Attributes:
        names: the names of the C categories: the special tokens themselves, ``comma, period`` (the punctuation that the
            paper separates [Kobayashi et al. 2020]), ``other``.
        of_token: the index of the category of each token id, (V,).

    Example:
        >>> from captum_norm.loading import DEFAULT_MODEL, load_tokenizer
        >>> categories = Categories.of(load_tokenizer(DEFAULT_MODEL))
        >>> categories.names
        ('[CLS]', '[SEP]', '[MASK]', 'comma, period', 'other')
        >>> [categories.names[number] for number in categories.of_token[[101, 1010, 7592]]]
        ['[CLS]', 'comma, period', 'other']
    """

    names: tuple[str, ...]
    of_token: Tensor

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "Categories":
        """Categorize the vocabulary of a tokenizer."""
        vocabulary: Mapping[str, int] = tokenizer.get_vocab()
        special = [getattr(tokenizer, name) for name in _SPECIAL]
        texts = list(dict.fromkeys(text for text in special if text is not None))
        names = (*texts, PUNCTUATION, OTHER)
        of_token = torch.full((1 + max(vocabulary.values()),), len(names) - 1)
        # Byte-level tokenizers write Ġ for a space before a mark, sentencepiece ▁.
        marks = {prefix + mark for mark in _MARKS for prefix in ("", "▁", "Ġ")}
        of_token[[number for text, number in vocabulary.items() if text in marks]] = len(names) - 2
        for category, text in enumerate(texts):
            of_token[vocabulary[text]] = category
        return cls(names, of_token)


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One input of the model: a window of the text that begins at a line."""

    line: int
    window: int
    ids: list[int]
    masked: frozenset[int]
    words: list[int | None] | None = None  # the index of each token's word, None for special tokens


@dataclass(frozen=True)
class TokenBatch:
    """B sequences of similar length, padded on the right."""

    sequences: Sequence[TokenSequence]
    ids: Tensor  # all (B, S)
    real: Tensor
    categories: Tensor  # C at padding
    masked: Tensor

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Return the arguments for the model."""
        return {"input_ids": self.ids.to(device), "attention_mask": self.real.long().to(device)}


@dataclass(frozen=True)
class Encoder:
    """Turns texts into sequences, and sequences into batches."""

    tokenizer: "PreTrainedTokenizerBase"
    categories: Categories
    max_length: int
    windows: bool = False  # whether a longer text becomes several sequences; otherwise it is truncated
    # The share of ordinary tokens to mask, at least one; the paper masks 12 %, as pre-training does (80 % of 15 %).
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
        sequences, previous, window = [], None, 0
        parts = zip(owners, encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
        for index, (owner, ids, special) in enumerate(parts):
            window = window + 1 if owner == previous else 0
            previous = owner
            if not all(special):
                words = encoded.word_ids(index) if self.tokenizer.is_fast else None
                sequences.append(TokenSequence(texts[owner][0], window, ids, frozenset(), words))
        return [self._masked(sequence) for sequence in sequences] if self.mask_rate else sequences

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
    limits = (tokenizer.model_max_length, longest_sequence(encoder_part(model)))
    known = [limit for limit in limits if limit is not None and limit < _NO_LIMIT]
    configured = getattr(getattr(model, "config", None), "max_position_embeddings", None) or _DEFAULT_LENGTH
    return int(min(known, default=min(_DEFAULT_LENGTH, configured)))


def encoder_part(model: nn.Module) -> nn.Module:
    """Return the part that reads the text: the encoder of an encoder–decoder model, any other model itself."""
    whole: Any = model
    halved = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and hasattr(model, "get_encoder")
    part: nn.Module = whole.get_encoder() if halved else whole
    return part


def count_tokens(sequences: Iterable[TokenSequence], vocabulary: int) -> Array:
    """Count each token id in the sequences, except masked positions, (V,)."""
    counts = np.zeros(vocabulary, np.int64)
    for sequence in sequences:
        visible = [token for place, token in enumerate(sequence.ids) if place not in sequence.masked]
        counts += np.bincount(visible, minlength=vocabulary)
    return counts


def read_ranks(path: str | PathLike[str], vocabulary: Mapping[str, int]) -> dict[int, int]:
    """Read the ranks of tokens, by id, from a list with a token in each line, the most frequent first.

    Anything after a tab, such as a count, is ignored, and so are tokens outside the vocabulary.

    Raises:
        InvalidInputError: there is no such file, or none of its tokens is in the vocabulary.
    """
    ranks: dict[int, int] = {}
    for rank, (_, line) in enumerate(read_lines(path)):
        token = vocabulary.get(line.partition("\t")[0])
        if token is not None:
            ranks.setdefault(token, rank)
    if not ranks:
        raise InvalidInputError(f"{path} has no token of the model's vocabulary; expected one in each line")
    return ranks


def frequency_ranks(counts: Array, listed: Mapping[int, int] | None = None) -> Tensor:
    """Return the frequency rank of each token among all tokens of a corpus, as a share of their number, (V,).

    Frequent tokens have small ranks, by ``counts`` (V,) or, if given, by their rank in a list. Tokens of the same
    frequency share the mean of their ranks. So do all unlisted tokens, which follow the listed ones.

    Example:
        >>> frequency_ranks(np.array([2, 1, 0, 1])).tolist()
        [0.375, 0.875, 1.125, 0.875]
    """
    if listed is None:
        order = -counts
    else:
        order = np.full(len(counts), 1 + max(listed.values()))
        order[list(listed)] = list(listed.values())
    _, groups = np.unique(order, return_inverse=True)
    return torch.from_numpy(midranks(np.bincount(groups, weights=counts)))[groups]

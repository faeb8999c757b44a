"""Reads text of any size, and turns it into batches of tokens with their categories and masks."""

import hashlib
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from captum_norm.errors import InvalidInputError
from captum_norm.models import longest_sequence
from captum_norm.text.lines import is_regular_file, read_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE = Path(__file__).parent / "data" / "europarl-en.txt"
"""The sample in the package: sentences from the proceedings of the European Parliament, one in each line."""

BLOCK_TEXTS = 512
"""The number of texts whose sequences are batched by length."""

_SPECIAL = ("cls_token", "bos_token", "sep_token", "eos_token", "mask_token")
_NO_LIMIT = 10**6  # a tokenizer without a limit has an astronomic one
_DEFAULT_LENGTH = 512


@dataclass(frozen=True)
class Corpus:
    """A file with a text on each line; blank lines are skipped.

    Attributes:
        path: the path or URL of the file, UTF-8; ``.gz``, ``.xz`` and ``.bz2`` are decompressed.
        limit: the number of texts to read; all if None.

    Raises:
        InvalidInputError: there is no such file, it is not a regular file, or an option is invalid.

    Example:
        >>> [number for number, _ in Corpus(SAMPLE, limit=2).texts()]
        [1, 2]
    """

    path: str | PathLike[str]
    limit: int | None = None

    def __post_init__(self) -> None:
        if not is_regular_file(self.path):
            raise InvalidInputError(f"cannot read {self.path} more than once; expected a regular file")
        if self.limit is not None and self.limit < 1:
            raise InvalidInputError(f"got limit={self.limit}; expected at least 1")

    def __str__(self) -> str:
        return Path(self.path).name

    def texts(self) -> Iterator[tuple[int, str]]:
        """Read each text with the number of its line, from 1.

        Raises:
            InvalidInputError: a line is not UTF-8, or a compressed file is damaged.
        """
        return islice(((number, line) for number, line in read_lines(self.path) if line.strip()), self.limit)

    def blocks(self) -> Iterator[list[tuple[int, str]]]:
        """Read the texts with the numbers of their lines, 512 at a time."""
        texts = self.texts()
        return iter(lambda: list(islice(texts, BLOCK_TEXTS)), [])

    def digest(self) -> tuple[str, int]:
        """Compute the SHA-256 hash of the texts, each with a line feed, and count them.

        Raises:
            InvalidInputError: there are none; see :meth:`texts`.
        """
        digest, number = hashlib.sha256(), 0
        for _, text in self.texts():
            digest.update(f"{text}\n".encode())
            number += 1
        if not number:
            raise InvalidInputError(f"{self.path} has no text: all its lines are blank")
        return digest.hexdigest(), number


class Categories(NamedTuple):
    """The names of the C categories of tokens, and the index of each token id's, (V,)."""

    names: tuple[str, ...]
    of_token: Tensor


class TokenSequence(NamedTuple):
    """One input of the model: its token ids, and the positions of the masked ones."""

    ids: list[int]
    masked: Collection[int] = ()


class TokenBatch(NamedTuple):
    """B sequences of similar length, padded on the right: tensors (B, S); the category of padding is C."""

    ids: Tensor
    real: Tensor
    categories: Tensor
    masked: Tensor

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Return the arguments for the model."""
        return {"input_ids": self.ids.to(device), "attention_mask": self.real.long().to(device)}


@dataclass(frozen=True)
class Encoder:
    """Turns texts into sequences, and sequences into batches."""

    tokenizer: "PreTrainedTokenizerBase"
    max_length: int
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
        least = self.tokenizer.num_special_tokens_to_add() + 1
        if self.max_length < least:
            raise InvalidInputError(f"got max_length={self.max_length}; expected at least {least}")

    @cached_property
    def categories(self) -> Categories:
        """Those of special tokens, of the marks that the paper separates [Kobayashi et al. 2020], and of all others."""
        vocabulary: Mapping[str, int] = self.tokenizer.get_vocab()
        special = [getattr(self.tokenizer, name) for name in _SPECIAL]
        texts = list(dict.fromkeys(text for text in special if text is not None))
        names = (*texts, "comma, period", "other")
        of_token = torch.full((1 + max(vocabulary.values()),), len(names) - 1)
        # Byte-level tokenizers write Ġ for a space before a mark, sentencepiece ▁.
        marks = {prefix + mark for mark in ",." for prefix in ("", "▁", "Ġ")}
        of_token[[number for text, number in vocabulary.items() if text in marks]] = len(names) - 2
        for category, text in enumerate(texts):
            of_token[vocabulary[text]] = category
        return Categories(names, of_token)

    def sequences(self, texts: Sequence[tuple[int, str]]) -> list[TokenSequence]:
        """Tokenize texts, each with the number of its line, in their order."""
        lines, contents = zip(*texts, strict=True)
        encoded: Any = self.tokenizer(
            list(contents), truncation=True, max_length=self.max_length, return_special_tokens_mask=True
        )
        parts = zip(lines, encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
        # A line had windows once: the 0 keeps the masks of earlier versions.
        return [self._masked(ids, f"{self.seed} {line} 0") for line, ids, special in parts if not all(special)]

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

    def _masked(self, ids: list[int], seed: str) -> TokenSequence:
        if not self.mask_rate:
            return TokenSequence(ids)
        special = set(self.tokenizer.all_special_ids)
        ordinary = [place for place, token in enumerate(ids) if token not in special]
        number = min(len(ordinary), max(1, int(len(ordinary) * self.mask_rate)))
        masked = frozenset(random.Random(seed).sample(ordinary, number))
        mask = int(self.tokenizer.mask_token_id)
        return TokenSequence([mask if place in masked else token for place, token in enumerate(ids)], masked)

    def _batch(self, sequences: Sequence[TokenSequence]) -> TokenBatch:
        shape = len(sequences), len(sequences[-1].ids)
        ids = torch.full(shape, self.tokenizer.pad_token_id or 0)
        real, masked = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence.ids)] = torch.tensor(sequence.ids)
            real[row, : len(sequence.ids)] = True
            masked[row, list(sequence.masked)] = True
        categories = torch.where(real, self.categories.of_token[ids], len(self.categories.names))
        return TokenBatch(ids, real, categories, masked)


def longest(model: nn.Module, tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the largest number of tokens that tokenizer and model allow; without limits, at most 512."""
    limits = (tokenizer.model_max_length, longest_sequence(encoder_part(model)))
    known = [limit for limit in limits if limit is not None and limit < _NO_LIMIT]
    configured = getattr(getattr(model, "config", None), "max_position_embeddings", None) or _DEFAULT_LENGTH
    return int(min(known, default=min(_DEFAULT_LENGTH, configured)))


def encoder_part(model: nn.Module) -> nn.Module:
    """Return the part that reads the text: the encoder of an encoder–decoder model, any other model itself."""
    part: Any = model
    halved = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and hasattr(model, "get_encoder")
    return part.get_encoder() if halved else part  # type: ignore[no-any-return]

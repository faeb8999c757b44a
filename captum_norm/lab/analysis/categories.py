"""Sorts the tokens of a vocabulary into categories: special tokens, commas and periods, others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PUNCTUATION = "comma, period"
OTHER = "other"

_SPECIAL = ("cls_token", "bos_token", "sep_token", "eos_token", "mask_token")
_MARKS = (",", ".")


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
        special = {name: getattr(tokenizer, name) for name in _SPECIAL}
        texts = list(dict.fromkeys(text for text in special.values() if text is not None))
        names = (*texts, PUNCTUATION, OTHER)
        of_token = torch.full((1 + max(vocabulary.values()),), len(names) - 1)
        # Byte-level tokenizers write Ġ for a space before a mark, sentencepiece ▁.
        marks = {prefix + mark for mark in _MARKS for prefix in ("", "▁", "Ġ")}
        of_token[[number for text, number in vocabulary.items() if text in marks]] = len(names) - 2
        for category, text in enumerate(texts):
            of_token[vocabulary[text]] = category
        return cls(names, of_token)

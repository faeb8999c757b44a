"""Ranks tokens by frequency: as counted in the corpus itself, or by a list from elsewhere."""

from collections.abc import Iterable, Mapping
from os import PathLike

import numpy as np
import torch
from torch import Tensor

from captum_norm.analysis.sequences import TokenSequence
from captum_norm.analysis.statistics import Array, midranks
from captum_norm.errors import InvalidInputError
from captum_norm.texts import read_lines


def count_tokens(sequences: Iterable[TokenSequence], vocabulary: int) -> Array:
    """How often each token id is in the sequences, masked positions left out, (V,)."""
    counts = np.zeros(vocabulary, np.int64)
    for sequence in sequences:
        visible = [token for place, token in enumerate(sequence.ids) if place not in sequence.masked]
        counts += np.bincount(visible, minlength=vocabulary)
    return counts


def read_ranks(path: str | PathLike[str], vocabulary: Mapping[str, int]) -> dict[int, int]:
    """The ranks of tokens, by id, from a list of them: a token in each line, the most frequent first.

    What stands behind a tab, such as a count, is passed over, and so are tokens that are not in the vocabulary.

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
    """The rank of each token's frequency among all tokens of a corpus, in shares of their number, (V,).

    Small for frequent tokens. Tokens that are equally frequent share the mean of their ranks, and so do all tokens that
    are not listed, behind those that are.

    Args:
        counts: how often each token is in the corpus, (V,).
        listed: ranks from elsewhere, by token id; those of the counts if None.

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

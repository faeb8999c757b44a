"""Ranks tokens by their frequency in the corpus, or by a given list."""

from collections.abc import Iterable, Mapping
from os import PathLike

import numpy as np
import torch
from torch import Tensor

from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis.sequences import TokenSequence
from captum_norm.lab.analysis.statistics import Array, midranks
from captum_norm.text.lines import read_lines


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

    Frequent tokens have small ranks. Tokens of the same frequency share the mean of their ranks. So do all unlisted
    tokens, which follow the listed ones.

    Args:
        counts: the number of occurrences of each token in the corpus, (V,).
        listed: ranks by token id; None to rank by the counts.

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

"""Alignments are sets of links that cannot change."""

import pickle
import random
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from alignment import Alignment, GoldAlignment
from captum_norm import InvalidInputError


@pytest.mark.parametrize("seed", range(5))
def test_operations_are_those_of_sets(seed: int) -> None:
    rng = random.Random(seed)
    left, right = ({(rng.randrange(4), rng.randrange(4)) for _ in range(8)} for _ in range(2))
    one, other = Alignment(left), Alignment(list(right))
    assert (one & other).links == left & right
    assert (one | other).links == left | right
    assert (one - other).links == left - right
    assert (one & other) <= one
    assert (one <= other) == (left <= right)
    assert list(one) == sorted(left)
    assert len(one) == len(left)
    assert {(j, i) for i, j in one.transposed()} == left
    assert one.transposed().transposed() == one
    assert hash(one) == hash(Alignment(sorted(left)))


def test_numpy_integers_become_python_integers() -> None:
    alignment = Alignment(zip(np.array([3, 1]), np.array([0, 2]), strict=True))
    assert repr(alignment) == "Alignment([(1, 2), (3, 0)])"


def test_alignments_travel_between_processes() -> None:
    gold = GoldAlignment(Alignment([(0, 1)]), Alignment([(2, 3)]))
    assert pickle.loads(pickle.dumps(gold)) == gold


def test_alignment_cannot_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Alignment().links = frozenset()  # type: ignore[misc] # the point of the test


@pytest.mark.parametrize("links", [[(0, -1)], [(0.5, 1)], [(1, 2, 3)], [7]])
def test_what_is_no_link_is_refused(links: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidInputError, match="index"):
        Alignment(links)


def test_sure_links_are_possible() -> None:
    gold = GoldAlignment(sure=Alignment([(0, 1)]), possible=Alignment([(2, 3)]))
    assert gold.possible == Alignment([(0, 1), (2, 3)])
    assert gold == GoldAlignment(Alignment([(0, 1)]), Alignment([(2, 3), (0, 1)]))
    assert gold.transposed() == GoldAlignment(Alignment([(1, 0)]), Alignment([(3, 2)]))

"""Places and counts, against sorting by hand."""

from fractions import Fraction
from math import ceil

import pytest
import torch

from captum_norm.lab.evaluation.ranking import highest, lowest, ranks, token_counts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("length", [9, 200])  # torch sorts short rows in another way
def test_places_are_those_of_sorting_by_hand(seed: int, length: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 3, (4, length), generator=generator).double()  # many are equal
    removable = torch.rand(4, length, generator=generator) < 0.7
    places = ranks(scores, removable)
    counts = torch.randint(0, 4, (4, 3), generator=generator).clamp(max=removable.sum(1, keepdim=True))
    first, last = highest(places, counts), lowest(places, counts, removable)
    for row in range(4):
        tokens = [token for token in range(length) if removable[row, token]]
        order = sorted(tokens, key=lambda token: (-float(scores[row, token]), token))
        assert [places[row, token] for token in order] == list(range(len(order)))
        assert all(places[row, token] == length for token in range(length) if token not in order)
        for step, count in enumerate(counts[row].tolist()):
            assert set(first[row, step].nonzero().flatten().tolist()) == set(order[:count])
            assert set(last[row, step].nonzero().flatten().tolist()) == set(order[len(order) - count :])


def test_counts_are_rounded_up_exactly() -> None:
    shares = [Fraction(numerator, 100) for numerator in range(101)]
    removable = torch.ones(1, 300, dtype=torch.bool)
    for length in (1, 3, 7, 100, 300):
        counts = token_counts([float(share) for share in shares], removable[:, :length])
        assert counts.tolist() == [[ceil(share * length) for share in shares]]

"""Moses' heuristics: worked by hand, against a slow second version, and what must hold of any two directions."""

import random
from collections.abc import Callable

import pytest

from alignment import Alignment
from alignment.formats import format_pharaoh, parse_pharaoh
from alignment.symmetrization import SYMMETRIZATIONS

SEEDS = range(150)


def random_directions(seed: int) -> tuple[Alignment, Alignment]:
    """Two noisy versions of one alignment; every third pair functional as GIZA++'s are, the others many-to-many."""
    rng = random.Random(seed)
    size = rng.randint(1, 9)
    forward = {(min(size - 1, max(0, j + rng.choice((-2, -1, 0, 0, 0, 1, 2)))), j) for j in range(size)}
    reverse = {(i, min(size - 1, max(0, i + rng.choice((-2, -1, 0, 0, 0, 1, 2))))) for i in range(size)}
    if seed % 3:
        forward |= {(rng.randrange(size), rng.randrange(size)) for _ in range(size)}
        reverse -= {(i, j) for i, j in reverse if rng.random() < 0.2}
    return Alignment(forward), Alignment(reverse)


class Slow:
    """The published pseudo-code on a matrix, scanned from corner to corner, pass after pass."""

    def __init__(self, forward: Alignment, reverse: Alignment) -> None:
        self.forward, self.reverse = forward, reverse
        self.both = [*forward, *reverse]
        rows = 1 + max((j for _, j in self.both), default=0)
        columns = 1 + max((i for i, _ in self.both), default=0)
        self.cells = [(j, i) for j in range(rows) for i in range(columns)]
        self.taken = {(j, i): (i, j) in forward and (i, j) in reverse for j, i in self.cells}

    def uncovered(self, j: int, i: int) -> list[bool]:
        row = [taken for (y, _), taken in self.taken.items() if y == j]
        column = [taken for (_, x), taken in self.taken.items() if x == i]
        return [not any(row), not any(column)]

    def grow(self, steps: list[tuple[int, int]]) -> None:
        before = None
        while before != self.taken:
            before = dict(self.taken)
            for j, i in self.cells:
                for down, right in steps if self.taken[j, i] else ():
                    y, x = j + down, i + right
                    if (x, y) in self.both and any(self.uncovered(y, x)):
                        self.taken[y, x] = True

    def final(self, directed: Alignment, condition: Callable[[list[bool]], bool]) -> None:
        for j, i in self.cells:
            if (i, j) in directed and condition(self.uncovered(j, i)):
                self.taken[j, i] = True

    def result(self, name: str) -> Alignment:
        if name == "union":
            return Alignment(self.both)
        if name != "intersection":
            diagonal = [(-1, -1), (-1, 1), (1, -1), (1, 1)] if name != "grow" else []
            self.grow([(-1, 0), (0, -1), (1, 0), (0, 1), *diagonal])
        if name.startswith("grow-diag-final"):
            for directed in (self.forward, self.reverse):
                self.final(directed, all if name.endswith("and") else any)
        return Alignment([(i, j) for (j, i), taken in self.taken.items() if taken])


@pytest.mark.parametrize("name", SYMMETRIZATIONS)
def test_equals_the_slow_version(name: str) -> None:
    for seed in SEEDS:
        forward, reverse = random_directions(seed)
        assert SYMMETRIZATIONS[name](forward, reverse) == Slow(forward, reverse).result(name), seed


# Intersection 0-0 throughout. Each case is small enough to be followed with a pencil.
HAND_WORKED = [
    # 0-1 is a neighbour of 0-0 and target 1 is uncovered; 1-2 is a diagonal neighbour of 0-1.
    ("grow", "0-0 0-1", "0-0 1-2", "0-0 0-1"),
    ("grow-diag", "0-0 0-1", "0-0 1-2", "0-0 0-1 1-2"),
    # 1-1 touches 0-0 by its corner alone.
    ("grow", "0-0 1-1", "0-0", "0-0"),
    ("grow-diag", "0-0 1-1", "0-0", "0-0 1-1"),
    # Of the two neighbours of 0-0, symal looks at 1-0 (next source word) after 0-1 (next target word); both are added.
    # Then 1-1 has both its words covered.
    ("grow-diag", "0-0 0-1 1-1", "0-0 1-0", "0-0 0-1 1-0"),
    # No neighbours: 2-4 has two uncovered words. After it, 3-4 has one and 2-6 has one.
    ("grow-diag", "0-0 2-4", "0-0 3-4 2-6", "0-0"),
    ("grow-diag-final", "0-0 2-4", "0-0 3-4 2-6", "0-0 2-4 2-6 3-4"),
    ("grow-diag-final-and", "0-0 2-4", "0-0 3-4 2-6", "0-0 2-4"),
    # Forward's leftovers come first: the other way round 3-4 blocks 2-4, as target 4 is covered.
    ("grow-diag-final-and", "0-0 3-4", "0-0 2-4", "0-0 3-4"),
    # Nothing to grow from.
    ("grow-diag", "0-1", "1-0", ""),
    ("grow-diag-final-and", "0-1", "1-0", "0-1 1-0"),
]


@pytest.mark.parametrize(("name", "forward", "reverse", "expected"), HAND_WORKED)
def test_hand_worked(name: str, forward: str, reverse: str, expected: str) -> None:
    assert format_pharaoh(SYMMETRIZATIONS[name](parse_pharaoh(forward), parse_pharaoh(reverse))) == expected

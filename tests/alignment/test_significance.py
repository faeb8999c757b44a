"""Paired significance: against every exchange of sentence pairs, and where sacrebleu alone would mislead."""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest

from alignment import Alignment, GoldAlignment, alignment_error_rate
from alignment.aer import TRIALS, TestName, paired_significance
from captum_norm import InvalidInputError

RIGHT, WRONG = Alignment([(0, 0), (1, 1)]), Alignment([(0, 0), (1, 0)])
GOLD = GoldAlignment(RIGHT)

System = list[Alignment]


def counts(system: System, gold: list[GoldAlignment]) -> np.ndarray:
    """|A|, |S|, |A∩S| and |A∩P| of each sentence pair."""
    pairs = zip(system, gold, strict=True)
    return np.array([[len(a), len(g.sure), len(a & g.sure), len(a & g.possible)] for a, g in pairs])


def exact_error(totals: np.ndarray) -> Fraction:
    """AER of summed counts, without rounding."""
    links, sure, sure_hits, possible_hits = map(int, totals)
    return 1 - Fraction(sure_hits + possible_hits, links + sure)


def all_exchanges(one: System, other: System, gold: list[GoldAlignment]) -> tuple[Fraction, list[Fraction]]:
    """The difference in AER as it is, and with every set of the sentence pairs that differ in counts exchanged."""
    both = np.stack([counts(one, gold), counts(other, gold)])
    rows = np.arange(len(gold))
    choices = [(0, 1) if differs else (0,) for differs in (both[0] != both[1]).any(1)]
    differences = [
        abs(exact_error(both[picks, rows].sum(0)) - exact_error(both[1 - picks, rows].sum(0)))
        for picks in map(np.array, itertools.product(*choices))
    ]
    return differences[0], differences


def random_systems(seed: int, size: int = 9) -> tuple[System, System, list[GoldAlignment]]:
    rng = random.Random(seed)

    def links() -> Alignment:
        return Alignment([(rng.randrange(4), rng.randrange(4)) for _ in range(5)])

    gold = [GoldAlignment(links(), links()) for _ in range(size)]
    better = [(links() & pair.possible) | pair.sure for pair in gold]
    return [links() for _ in gold], better, gold


@pytest.mark.parametrize("seed", range(5))
def test_p_values_are_the_shares_of_exchanges(seed: int) -> None:
    baseline, better, gold = random_systems(seed)
    systems = [better, baseline[1:] + baseline[:1]]
    found = paired_significance(baseline, systems, gold, trials=2000)
    for system, p_value in zip(systems, found.p_values, strict=True):
        observed, differences = all_exchanges(baseline, system, gold)
        larger = sum(difference > observed for difference in differences)
        share = max(larger, 2) / len(differences)
        assert p_value >= 2 / len(differences)
        assert p_value == pytest.approx(share, abs=4 * (share / 2000) ** 0.5)  # four standard errors


@pytest.mark.parametrize("differing", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("test", TRIALS)
def test_few_sentence_pairs_decide_nothing(test: TestName, differing: int) -> None:
    gold = [GOLD] * 9
    baseline = [RIGHT] * 9
    system = [WRONG] * differing + [RIGHT] * (9 - differing)
    observed, differences = all_exchanges(baseline, system, gold)
    exact = sum(difference >= observed for difference in differences) / len(differences)
    found = paired_significance(baseline, [system], gold, test=test, trials=5000)
    if test == "ar":
        assert found.p_values == (exact,)
    assert exact <= found.p_values[0] <= 1
    assert found.identical == (differing == 0,)


@pytest.mark.parametrize("test", TRIALS)
def test_identical_systems_do_not_differ(test: TestName) -> None:
    baseline, better, gold = random_systems(0, size=100)
    same = [Alignment(list(alignment)) for alignment in baseline]
    found = paired_significance(baseline, [same, better], gold, test=test, trials=200)
    assert found.p_values == pytest.approx((1, 1 / 201))
    assert found.identical == (True, False)


def test_other_links_of_the_same_worth_are_not_identical() -> None:
    found = paired_significance([WRONG] * 20, [[Alignment([(0, 0), (0, 1)])] * 20], [GOLD] * 20, trials=50)
    assert found.p_values == (1.0,)
    assert found.identical == (False,)


def test_result_is_reproducible_and_signed() -> None:
    baseline, better, gold = random_systems(1, size=30)
    found = paired_significance(baseline, [better], gold, trials=100)
    assert found == paired_significance(tuple(baseline), [tuple(better)], tuple(gold), trials=100)
    assert found.signature.startswith("nrefs:1|ar:100|seed:12345|version:")
    resampled = paired_significance(baseline, [better], gold, test="bs")
    assert resampled.signature.startswith("nrefs:1|bs:1000|seed:12345|version:")
    assert alignment_error_rate(better, gold).aer < alignment_error_rate(baseline, gold).aer


def test_what_cannot_be_tested_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="got the test 't', expected one of ar, bs"):
        paired_significance([RIGHT], [[WRONG]], [GOLD], test="t")  # type: ignore[arg-type] # the point of the test
    with pytest.raises(InvalidInputError, match="got 0 trials, expected at least 1"):
        paired_significance([RIGHT], [[WRONG]], [GOLD], trials=0)
    with pytest.raises(InvalidInputError, match="got 1 hypotheses for 2 gold alignments"):
        paired_significance([RIGHT] * 2, [[WRONG]], [GOLD] * 2)

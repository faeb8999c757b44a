"""Tests whether a system's alignment error rate differs from the baseline's by more than chance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, cast

from sacrebleu.significance import PairedTest

from alignment.aer import AER
from alignment.links import Alignment, GoldAlignment
from captum_norm import InvalidInputError

TestName = Literal["ar", "bs"]
"""``"ar"``: approximate randomisation [Riezler & Maxwell 2005]; ``"bs"``: bootstrap resampling [Koehn 2004]."""

TRIALS: Mapping[TestName, int] = MappingProxyType({"ar": 10_000, "bs": 1_000})
"""The default number of trials of each paired test, as in sacrebleu."""


@dataclass(frozen=True, slots=True)
class Significance:
    """The result of comparing systems with a baseline.

    Attributes:
        p_values: for each system, the two-sided probability of a difference in AER at least as large as the observed
            one if system and baseline differ by chance only.
        identical: for each system, whether its links are the baseline's.
        signature: sacrebleu's signature of the test.
    """

    p_values: tuple[float, ...]
    identical: tuple[bool, ...]
    signature: str


def paired_significance(
    baseline: Sequence[Alignment],
    systems: Sequence[Sequence[Alignment]],
    gold: Sequence[GoldAlignment],
    *,
    test: TestName = "ar",
    trials: int | None = None,
) -> Significance:
    """Run a paired significance test of sacrebleu on alignment error rates.

    sacrebleu counts the trials with a strictly larger difference than the observed one, so systems that hardly differ
    get the smallest possible p-value: no trial can have a larger difference. Of the 2^k ways to exchange the
    alignments of the k sentence pairs that two systems score differently, at least two give a difference as large as
    the observed one. So p-values here are at least 2^(1 − k), and 1 for identical systems.

    Args:
        baseline: the alignment of each sentence pair.
        systems: the alignments of each system to compare with the baseline.
        gold: the gold alignments.
        test: ``"ar"`` or ``"bs"``.
        trials: number of trials or resamples; None for that in ``TRIALS``. The seed is sacrebleu's: 12345 or
            SACREBLEU_SEED.

    Raises:
        InvalidInputError: the numbers of alignments differ, the test is unknown, or there are no trials.

    >>> gold = [GoldAlignment(Alignment([(0, 0), (1, 1)]))] * 20
    >>> good, bad = [Alignment([(0, 0), (1, 1)])] * 20, [Alignment([(0, 0), (1, 0)])] * 20
    >>> found = paired_significance(bad, [good, bad], gold, trials=999)
    >>> found.p_values, found.identical
    ((0.001, 1.0), (False, True))
    """
    if test not in TRIALS:
        raise InvalidInputError(f"got the test {test!r}, expected one of {', '.join(TRIALS)}")
    trials = TRIALS[test] if trials is None else trials
    if trials < 1:
        raise InvalidInputError(f"got {trials} trials, expected at least 1")
    metric = AER([gold])
    named = [(str(number), system) for number, system in enumerate([baseline, *systems])]
    # sacrebleu's annotations allow strings only.
    paired = PairedTest(cast(Any, named), {"AER": metric}, None, test_type=test, n_samples=trials)
    signatures, results = paired()
    counts = [metric._extract_corpus_statistics(system, None) for _, system in named]
    p_values = []
    for result, system in zip(cast(Any, results["AER"][1:]), counts[1:], strict=True):
        differing = sum(one != other for one, other in zip(counts[0], system, strict=True))
        p_values.append(max(result.p_value, min(1.0, 2.0 ** (1 - differing))))
    identical = [list(system) == list(baseline) for system in systems]
    return Significance(tuple(p_values), tuple(identical), signatures["AER"].format())

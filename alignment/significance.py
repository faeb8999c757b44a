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
"""How many trials a paired test makes unless told otherwise, as in sacrebleu."""


@dataclass(frozen=True, slots=True)
class Significance:
    """What a paired test says of systems and their baseline.

    Attributes:
        p_values: how probable a difference in AER as large as the observed one is if only chance tells the two apart;
            one value a system, two-sided.
        identical: for each system, whether it has the very links of the baseline.
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
    """A paired test of sacrebleu on alignment error rates.

    Sacrebleu counts the trials whose difference is strictly larger than the observed one, so that systems that hardly
    differ, for which no trial can be larger, get the smallest p-value there is. Of the 2^k ways to exchange the
    alignments of the k sentence pairs that two systems score differently, at least two make a difference as large as
    the observed one; so no p-value here is smaller than that share, 2^(1 − k), and that of identical systems is 1.

    Args:
        baseline: the alignment of each sentence pair.
        systems: those of each system to compare with it.
        gold: the gold alignments.
        test: ``"ar"`` or ``"bs"``.
        trials: number of trials or resamples; None: ``TRIALS``. The seed is sacrebleu's, 12345 or SACREBLEU_SEED.

    Raises:
        InvalidInputError: there are not equally many alignments, the test is not known, or there are no trials.

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
    # sacrebleu's annotations know strings alone.
    paired = PairedTest(cast(Any, named), {"AER": metric}, None, test_type=test, n_samples=trials)
    signatures, results = paired()
    counts = [metric._extract_corpus_statistics(system, None) for _, system in named]
    p_values = []
    for result, system in zip(cast(Any, results["AER"][1:]), counts[1:], strict=True):
        differing = sum(one != other for one, other in zip(counts[0], system, strict=True))
        p_values.append(max(result.p_value, min(1.0, 2.0 ** (1 - differing))))
    identical = [list(system) == list(baseline) for system in systems]
    return Significance(tuple(p_values), tuple(identical), signatures["AER"].format())

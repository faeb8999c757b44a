"""Alignment error rate: worked by hand, as a sacrebleu metric, and against published rows."""

import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from sacrebleu.significance import PairedTest

from alignment import AER, AERScore, Alignment, GoldAlignment, alignment_error_rate, read_gold, read_pharaoh
from alignment.formats import format_pharaoh, parse_pharaoh, parse_talp
from captum_norm import InvalidInputError
from tests.alignment.data import DATA, lines, needs


def random_corpus(seed: int, size: int = 60) -> tuple[list[Alignment], list[GoldAlignment]]:
    rng = random.Random(seed)

    def links(most: int) -> Alignment:
        return Alignment([(rng.randrange(6), rng.randrange(6)) for _ in range(rng.randint(0, most))])

    gold = [GoldAlignment(links(6), links(9)) for _ in range(size)]
    return [links(4) | (pair.sure - links(12)) for pair in gold], gold


def slow_rates(hypotheses: list[Alignment], gold: list[GoldAlignment]) -> list[Fraction]:
    """AER, precision and recall, by asking of every link of the corpus what it is; in percent."""
    proposed = [(n, link) for n, alignment in enumerate(hypotheses) for link in alignment]
    sure = [(n, link) for n, pair in enumerate(gold) for link in pair.sure]
    possible = [(n, link) for n, pair in enumerate(gold) for link in pair.possible]
    sure_hits = sum(link in sure for link in proposed)
    possible_hits = sum(link in possible for link in proposed)
    error = 1 - Fraction(sure_hits + possible_hits, len(proposed) + len(sure))
    return [100 * rate for rate in (error, Fraction(possible_hits, len(proposed)), Fraction(sure_hits, len(sure)))]


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_summed_over_the_corpus_first(seed: int) -> None:
    hypotheses, gold = random_corpus(seed)
    score = alignment_error_rate(iter(hypotheses), iter(gold))
    aer, precision, recall = slow_rates(hypotheses, gold)
    assert [score.aer, score.precision, score.recall] == pytest.approx([float(aer), float(precision), float(recall)])
    assert score.f1 == pytest.approx(float(2 / (1 / precision + 1 / recall)))
    assert score.links == sum(map(len, hypotheses))


# Hypothesis, gold -> AER, precision, recall, F1 in percent.
EDGES = [
    ("0-0 1-1", "0-0 1-1", (0, 100, 100, 100)),
    ("0-0 1-1", "0-0 1p1", (0, 100, 100, 100)),
    ("0-1", "0-0", (100, 0, 0, 0)),
    ("", "0-0", (100, 100, 0, 0)),  # nothing proposed where there is a sure link
    ("", "0p0", (0, 100, 100, 100)),  # nothing proposed, nothing asked for
    ("", "", (0, 100, 100, 100)),
    ("0-0 1-1 2-2 3-3", "0p0", (75, 25, 100, 40)),  # no sure link: AER is 1 − precision
    ("0-0", "", (100, 0, 100, 0)),
]


@pytest.mark.parametrize(("hypothesis", "gold", "expected"), EDGES)
def test_defined_for_every_hypothesis_and_gold(hypothesis: str, gold: str, expected: tuple[float, ...]) -> None:
    plain = alignment_error_rate([parse_pharaoh(hypothesis)], [parse_talp(gold)])
    metric = AER().sentence_score(hypothesis, [gold])
    for score in (plain, metric):
        assert (score.aer, score.precision, score.recall, score.f1) == pytest.approx(expected)
        assert score.score == score.aer


def test_metric_takes_lines_and_objects_alike() -> None:
    hypotheses, gold = random_corpus(0)
    texts = [format_pharaoh(alignment) for alignment in hypotheses]
    talp = [
        " ".join([f"{i}-{j}" for i, j in pair.sure] + [f"{i}p{j}" for i, j in pair.possible - pair.sure])
        for pair in gold
    ]
    expected = str(alignment_error_rate(hypotheses, gold))
    assert str(AER().corpus_score(texts, [talp])) == expected
    assert str(AER().corpus_score(hypotheses, [talp])) == expected
    assert str(AER([gold]).corpus_score(texts, None)) == expected
    assert expected.startswith("AER = ")


def test_confidence_interval_is_that_of_the_resampled_corpora() -> None:
    hypotheses, gold = random_corpus(1)
    metric = AER()
    score = metric.corpus_score(hypotheses, [gold], n_bootstrap=200)
    # sacrebleu's resampling, with its default seed, on whole sentence pairs.
    picks = np.random.default_rng(12345).choice(len(gold), size=(200, len(gold)), replace=True)
    rates = sorted(
        float(slow_rates([hypotheses[n] for n in pick], [gold[n] for n in pick])[0]) for pick in picks.tolist()
    )
    assert score._mean == pytest.approx(sum(rates) / 200)
    assert score._ci == pytest.approx((rates[194] - rates[5]) / 2)
    assert metric.get_signature().format().startswith("nrefs:1|bs:200|seed:12345|version:")


@pytest.mark.parametrize("test_type", ["ar", "bs"])
def test_paired_significance_between_systems(test_type: str) -> None:
    hypotheses, gold = random_corpus(2, size=200)
    better = [alignment | pair.sure for alignment, pair in zip(hypotheses, gold, strict=True)]
    shuffled = hypotheses[::2] + hypotheses[1::2]
    # sacrebleu's annotations know lines alone.
    systems: Any = [("baseline", hypotheses), ("better", better), ("same", hypotheses), ("shuffled", shuffled)]
    references: Any = [gold]
    results: Any
    _, results = PairedTest(systems, {"AER": AER()}, references, test_type=test_type, n_samples=300)()
    baseline, better_result, same, shuffled_result = results["AER"]
    assert better_result.score < baseline.score < shuffled_result.score
    assert better_result.score == alignment_error_rate(better, gold).aer
    assert better_result.p_value == shuffled_result.p_value == pytest.approx(1 / 301)
    assert same.score == baseline.score
    # sacrebleu counts the trials with a strictly larger difference, of which there is none here.
    assert same.p_value == pytest.approx(1 / 301)


@pytest.mark.parametrize(
    ("hypotheses", "references", "message"),
    [
        (["0-0"], [["0-0", "0-0"]], "got 1 hypotheses for 2 gold alignments"),
        ([], [[]], "got 0 hypotheses"),
        (["0-0"], ["0-0"], r"a list with one stream of gold alignments: \[gold\]"),
        (["0-0"], [["0-0"], ["0-0"]], "one stream"),
        (["0-0"], "0", "one stream"),
        (["0-0"], None, "got no gold alignments"),
        (["0-0"], [[None]], "got None as a gold alignment"),
        ([[(0, 0)]], [["0-0"]], r"got \[\(0, 0\)\] as a hypothesis"),
        (["0p0"], [["0-0"]], "got '0p0', expected i-j"),
    ],
)
def test_what_cannot_be_scored_is_refused(hypotheses: list[str], references: list[list[str]], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        AER().corpus_score(hypotheses, references)


# AER, precision and recall that lilt/alignment-scripts published with these very files (results/fastalign/
# deen-results.txt of the commit that added them). In the later file that lies beside them in shared/data the forward,
# reverse and grow-diagonal-final rows are of another run: other numbers of links, one recall of 65.5.
PUBLISHED = {
    "": (28.5, 71.3, 71.8),
    "reverse.": (32.0, 69.7, 66.4),
    "intersection.": (28.0, 87.1, 61.3),
    "grow-diagonal-final.": (27.7, 80.6, 65.4),
}


@needs("rwth-de-en")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rows_of_fast_align(name: str) -> None:
    gold = read_gold(DATA / "rwth-de-en/alignment.talp", format="talp", base=1)
    hypotheses = list(read_pharaoh(DATA / f"rwth-de-en/fastalign.test.deen.{name}talp"))
    if name == "reverse.":
        hypotheses = [alignment.transposed() for alignment in hypotheses]
    score = alignment_error_rate(hypotheses, gold)
    rates = (f"{score.aer:.1f}", f"{score.precision:.1f}", f"{score.recall:.1f}")
    assert rates == tuple(str(rate) for rate in PUBLISHED[name])
    row = next(
        row for row in lines("rwth-de-en/fastalign.deen-results.txt") if row.startswith(f"test.deen.{name}talp:")
    )
    assert f"talp: {rates[0]}% ({rates[1]}%/" in row
    if name == "intersection.":
        assert row.endswith(f"({rates[1]}%/{rates[2]}%/{score.links})")


@needs("rwth-de-en")
def test_published_intersection_is_that_of_the_published_directions() -> None:
    forward, reverse, both = (
        list(read_pharaoh(DATA / f"rwth-de-en/fastalign.test.deen.{name}talp"))
        for name in ("", "reverse.", "intersection.")
    )
    assert [one & other.transposed() for one, other in zip(forward, reverse, strict=True)] == both


def test_score_is_printed_with_what_it_is_made_of() -> None:
    score = AERScore(links=4, sure_links=2, sure_hits=1, possible_hits=3)
    assert score.format(width=1) == "AER = 33.3 (precision 75.00, recall 50.00, F1 60.00, 4 links)"
    assert score.format(score_only=True) == "33.33"

"""Alignments against gold: error rate, significance of differences, calibration of scores, signs of a wrong reading."""

import itertools
import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from sacrebleu.significance import PairedTest

from alignment import AER, alignment_error_rate
from alignment.aer import TRIALS, Correction, TestName, find_correction, paired_significance
from alignment.formats import Output, format_pharaoh, parse_pharaoh, parse_talp
from alignment.links import Alignment, GoldAlignment, ScoredAlignment, calibrated
from captum_norm import InvalidInputError


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
        (["0-0"], [1], r"got \[1\]; expected a list with one stream"),
        (["0-0"], None, "got no gold alignments"),
        (["0-0"], [[None]], "got None as a gold alignment"),
        ([[(0, 0)]], [["0-0"]], r"got \[\(0, 0\)\] as a hypothesis"),
        (["0p0"], [["0-0"]], "got '0p0', expected i-j"),
    ],
)
def test_what_cannot_be_scored_is_refused(hypotheses: list[str], references: list[list[str]], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        AER().corpus_score(hypotheses, references)


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
    with pytest.raises(InvalidInputError, match="got test='t'; expected one of ar, bs"):
        paired_significance([RIGHT], [[WRONG]], [GOLD], test="t")  # type: ignore[arg-type] # the point of the test
    with pytest.raises(InvalidInputError, match="got 0 trials, expected at least 1"):
        paired_significance([RIGHT], [[WRONG]], [GOLD], trials=0)
    with pytest.raises(InvalidInputError, match="got 1 hypotheses for 2 gold alignments"):
        paired_significance([RIGHT] * 2, [[WRONG]], [GOLD] * 2)


def test_calibrated_log_odds() -> None:
    given = np.array([[1e-9, 0.05, 0.3], [0.5, 0.9, 1 - 1e-9]])
    for p, found in zip(given.flat, calibrated(given).flat, strict=True):
        odds = math.log(p / (1 - p)) + 1.4
        assert found == pytest.approx(1 / (1 + math.exp(-odds)), rel=1e-9)
    assert calibrated([0, 1]).tolist() == [0, 1]


SOURCE, TARGET = ["a", "é"], ["x", "y", "z"]
FOUND = ScoredAlignment(Alignment([(0, 0), (1, 2)]), np.array([[0.5, 0.1], [0.2, 0.2], [0.0, 0.9]]))
BARE = ScoredAlignment(FOUND.links)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "0-0 1-2\n"),
        ({"scores": True}, "0-0:0.8022 1-2:0.9733\n"),
        ({"min_score": 0.9}, "1-2\n"),
        ({"style": "naacl"}, "7 1 1 S\n7 2 3 S\n"),
        ({"style": "naacl", "scores": True}, "7 1 1 S 0.8022\n7 2 3 S 0.9733\n"),
        ({"style": "tsv"}, "a é\tx y z\t0-0 1-2\n"),
        (
            {"style": "matrix"},
            '{"source": ["a", "é"], "target": ["x", "y", "z"], "links": [[0, 0, 0.8022], [1, 2, 0.9733]], '  # noqa: ISC004
            '"probabilities": [[0.5, 0.1], [0.2, 0.2], [0.0, 0.9]], "corpus_statistics": false}\n',
        ),
    ],
)
def test_formats(options: Any, text: str) -> None:
    output = Output(**options)
    assert output.text(7, SOURCE, TARGET, FOUND.at_least(output.min_score)) == text
    if not output.scored:
        assert output.text(7, SOURCE, TARGET, BARE.at_least(output.min_score)) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "giza"}, "got style='giza'; expected one of pharaoh, naacl, tsv, matrix"),
        ({"min_score": 1.5}, "got min_score 1.5"),
    ],
)
def test_what_is_refused(options: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Output(**options)


def aligned(seed: int, pairs: int = 100) -> list[Alignment]:
    """Sentences of 8 words to 10, a link for each source word at random."""
    draw = random.Random(seed)
    return [Alignment([(source, draw.randrange(10)) for source in range(8)]) for _ in range(pairs)]


def noisy(gold: list[Alignment], seed: int) -> list[Alignment]:
    """Every other link is one of the gold."""
    return [
        Alignment([links if place % 2 else other for place, (links, other) in enumerate(zip(one, two, strict=True))])
        for one, two in zip(gold, aligned(seed), strict=True)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_reading_is_found_and_a_right_one_left_alone(seed: int) -> None:
    gold = [Alignment([(i + 1, j + 1) for i, j in links]) for links in aligned(seed)]
    golden = list(map(GoldAlignment, gold))
    system = noisy(gold, seed + 10)
    right = alignment_error_rate(system, golden).aer
    assert find_correction(system, golden) is None
    assert find_correction(aligned(seed + 20), golden) is None  # as bad in every reading
    exchanged = [links.transposed() for links in system]
    less, more = ([Alignment([(i + d, j + d) for i, j in links]) for links in gold] for d in (-1, 1))
    for read, reading, expected in ((exchanged, "swapped", right), (less, "one more", 0.0), (more, "one less", 0.0)):
        found = find_correction(read, golden)
        assert isinstance(found, Correction)
        assert found == (reading, alignment_error_rate(read, golden).aer, expected)
    assert find_correction(exchanged[:20], golden[:20]) is None  # too few to tell

"""Scores of links: their calibration, curves over thresholds, and the file formats that hold them."""

import io
import json
import math
import random
from typing import Any

import numpy as np
import pytest

from alignment.aer import BINS, THRESHOLDS, Scores, reliability, score_curve
from alignment.formats import Output, parse_pharaoh, parse_scored_pharaoh, read_gold
from alignment.links import Alignment, GoldAlignment, ScoredAlignment, calibrated
from captum_norm import InvalidInputError


def test_calibrated_log_odds() -> None:
    given = np.array([[1e-9, 0.05, 0.3], [0.5, 0.9, 1 - 1e-9]])
    for p, found in zip(given.flat, calibrated(given).flat, strict=True):
        odds = math.log(p / (1 - p)) + 1.4
        assert found == pytest.approx(1 / (1 + math.exp(-odds)), rel=1e-9)
    assert calibrated([0, 1]).tolist() == [0, 1]


def scored_text(seed: int) -> tuple[list[Scores], list[GoldAlignment]]:
    """Links that are right as often as their scores say."""
    generator = random.Random(seed)
    scores, gold = list[Scores](), list[GoldAlignment]()
    for _ in range(400):
        links = {(i, j): generator.random() for i in range(6) for j in range(4) if generator.random() < 0.4}
        right = [link for link, score in links.items() if generator.random() < score]
        missed = [(7, j) for j in range(generator.randint(0, 2))]
        sure = Alignment([link for link in right if generator.random() < 0.7] + missed)
        scores.append(links)
        gold.append(GoldAlignment(sure, Alignment(right)))
    return scores, gold


def test_reliability_by_its_definition() -> None:
    scores, gold = scored_text(0)
    found = reliability(scores, gold)
    assert found.error < 0.03
    pairs = [(p, link in pair.possible) for links, pair in zip(scores, gold, strict=True) for link, p in links.items()]
    error = 0.0
    for number, one in enumerate(found.bins):
        inside = [(p, right) for p, right in pairs if number <= p * BINS < number + 1]
        assert one.links == len(inside)
        assert one.precision == pytest.approx(sum(right for _, right in inside) / len(inside))
        error += abs(math.fsum(p for p, _ in inside) - sum(right for _, right in inside)) / len(pairs)
    assert found.error == pytest.approx(error)
    sure_of_all = [dict.fromkeys(links, 1.0) for links in scores]
    wrong = sum(not right for _, right in pairs) / len(pairs)
    assert reliability(sure_of_all, gold).error == pytest.approx(wrong)
    assert [one.links for one in reliability(sure_of_all, gold).bins] == [0] * 9 + [len(pairs)]


def test_curve_by_its_definition() -> None:
    scores, gold = scored_text(1)
    curve = score_curve(scores, gold)
    assert tuple(curve) == THRESHOLDS
    for least, score in curve.items():
        kept = [{link for link, p in links.items() if p >= least} for links in scores]
        links = sum(map(len, kept))
        sure = sum(len(one & pair.sure.links) for one, pair in zip(kept, gold, strict=True))
        possible = sum(len(one & pair.possible.links) for one, pair in zip(kept, gold, strict=True))
        all_sure = sum(len(pair.sure) for pair in gold)
        assert score.aer == pytest.approx(100 * (1 - (sure + possible) / (links + all_sure)))
        assert (score.precision, score.recall) == pytest.approx((100 * possible / links, 100 * sure / all_sure))


def test_scores_of_nothing_are_refused() -> None:
    gold = [GoldAlignment(Alignment([(0, 0)]))]
    with pytest.raises(InvalidInputError, match="got no link"):
        reliability([{}], gold)
    for measure in (reliability, score_curve):
        with pytest.raises(InvalidInputError, match="of 2 sentence pairs and gold alignments of 1"):
            measure([{}, {}], gold)


SOURCE, TARGET = ["a", "é"], ["x", "y", "z"]
FOUND = ScoredAlignment(Alignment([(0, 0), (1, 2)]), np.array([[0.5, 0.1], [0.2, 0.2], [0.0, 0.9]]))
BARE = ScoredAlignment(FOUND.links)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "0-0 1-2\n"),
        ({"base": 1}, "1-1 2-3\n"),
        ({"scores": True}, "0-0:0.8022 1-2:0.9733\n"),
        ({"scores": True, "base": 1}, "1-1:0.8022 2-3:0.9733\n"),
        ({"min_score": 0.9}, "1-2\n"),
        ({"style": "naacl"}, "7 1 1 S\n7 2 3 S\n"),
        ({"style": "naacl", "scores": True}, "7 1 1 S 0.8022\n7 2 3 S 0.9733\n"),
        ({"style": "tsv"}, "a é\tx y z\t0-0 1-2\n"),
        ({"style": "tsv", "scores": True, "base": 1}, "a é\tx y z\t1-1:0.8022 2-3:0.9733\n"),
    ],
)
def test_formats(options: Any, text: str) -> None:
    output = Output(**options)
    assert output.text(7, SOURCE, TARGET, FOUND.at_least(output.min_score)) == text
    if not output.scored:
        assert output.text(7, SOURCE, TARGET, BARE.at_least(output.min_score)) == text


def test_formats_are_read_back() -> None:
    scored = Output(scores=True).text(1, SOURCE, TARGET, FOUND)
    assert parse_pharaoh(scored) == FOUND.links
    assert parse_scored_pharaoh(scored) == {(0, 0): 0.8022, (1, 2): 0.9733}
    sentences: Any = {"sources": ["a é"], "targets": ["x y z"]}
    for options, read in (
        ({"style": "naacl", "scores": True}, {"format": "naacl", **sentences}),
        ({"style": "tsv", "scores": True}, {"format": "tsv"}),
        ({"scores": True, "base": 1}, {"format": "talp", "base": 1}),
    ):
        text = Output(**options).text(1, SOURCE, TARGET, FOUND)
        assert read_gold(io.StringIO(text), **read) == [GoldAlignment(FOUND.links)]
    record = json.loads(Output("matrix").text(1, SOURCE, TARGET, FOUND))
    assert record == {
        "source": SOURCE,
        "target": TARGET,
        "links": [[0, 0, 0.8022], [1, 2, 0.9733]],
        "probabilities": [[0.5, 0.1], [0.2, 0.2], [0.0, 0.9]],
        "corpus_statistics": False,
    }
    assert [Output(style).nothing() for style in ("pharaoh", "naacl", "tsv", "matrix")] == [
        "\n",
        "",
        "\t\t\n",
        "null\n",
    ]


@pytest.mark.parametrize("line", ["0-0:1.5", "0-0:", "0-0:.5", "0-0:2", "0-0:-0.1", "0p0:0.5"])
def test_scores_that_are_none(line: str) -> None:
    for parse in (parse_pharaoh, parse_scored_pharaoh):
        with pytest.raises(InvalidInputError, match="expected i-j"):
            parse(line)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "giza"}, "got the format 'giza', expected one of pharaoh, naacl, tsv, matrix, npz"),
        ({"style": "naacl", "base": 0}, "got base 0 for naacl, which counts from 1"),
        ({"style": "matrix", "base": 1}, "got base 1 for matrix, which counts from 0"),
        ({"style": "npz", "base": 1}, "got base 1 for npz, which counts from 0"),
        ({"base": 2}, "got base 2, expected 0 or 1"),
        ({"min_score": 1.5}, "got min_score 1.5"),
    ],
)
def test_what_is_refused(options: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Output(**options)

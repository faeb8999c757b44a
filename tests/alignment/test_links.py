"""Alignments are sets of links that cannot change."""

import json
import pickle
import random
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from alignment import Alignment, Alignments, GoldAlignment
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


def test_alignments_are_values() -> None:
    alignment = Alignment(zip(np.array([3, 1]), np.array([0, 2]), strict=True))
    assert repr(alignment) == "Alignment([(1, 2), (3, 0)])"
    gold = GoldAlignment(alignment, Alignment([(2, 3)]))
    assert pickle.loads(pickle.dumps(gold)) == gold
    with pytest.raises(FrozenInstanceError):
        alignment.links = frozenset()  # type: ignore[misc] # the point of the test


@pytest.mark.parametrize("links", [[(0, -1)], [(0.5, 1)], [(1, 2, 3)], [7]])
def test_what_is_no_link_is_refused(links: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidInputError, match="index"):
        Alignment(links)


def test_sure_links_are_possible() -> None:
    gold = GoldAlignment(sure=Alignment([(0, 1)]), possible=Alignment([(2, 3)]))
    assert gold.possible == Alignment([(0, 1), (2, 3)])
    assert gold == GoldAlignment(Alignment([(0, 1)]), Alignment([(2, 3), (0, 1)]))
    assert gold.transposed() == GoldAlignment(Alignment([(1, 0)]), Alignment([(3, 2)]))


SOURCES = [["la", "maison", "bleue"], ["la", "mer"], []]

TARGETS = [["the", "blue", "house"], ["the", "sea"], ["."]]


@pytest.fixture
def alignments() -> Alignments:
    return Alignments([[(0, 0), (1, 2), (2, 1)], [(1, 1), (0, 0)], []], SOURCES, TARGETS)


def test_a_pair_is_its_links_and_equality_is_of_words_too(alignments: Alignments) -> None:
    assert alignments[0] == Alignment([(0, 0), (1, 2), (2, 1)])
    assert alignments[1:] == Alignments([[(0, 0), (1, 1)], []], SOURCES[1:], TARGETS[1:])
    assert alignments[-1:].targets == [["."]]
    assert alignments[::2].sources == [SOURCES[0], []]
    with pytest.raises(IndexError):
        alignments[3]
    assert alignments == Alignments(list(alignments), SOURCES, TARGETS)
    assert alignments != Alignments(list(alignments), SOURCES, [["the", "blue", "home"], *TARGETS[1:]])
    assert alignments != Alignments([[], *alignments[1:]], SOURCES, TARGETS)
    assert alignments == list(alignments)  # which has no words
    assert alignments != [Alignment()] * 3


def test_word_pairs_are_counted(alignments: Alignments) -> None:
    assert alignments.top(2) == [(("la", "the"), 2), (("maison", "house"), 1)]
    counts = {("la", "the"): 2, ("maison", "house"): 1, ("bleue", "blue"): 1, ("mer", "sea"): 1}
    assert dict(alignments.top()) == counts
    assert alignments.words() is alignments
    with pytest.raises(InvalidInputError, match="got count=0; expected at least 1"):
        alignments.top(0)


def test_a_long_list_is_short_in_a_console(alignments: Alignments) -> None:
    assert repr(alignments[1:]) == "[Alignment([(0, 0), (1, 1)]), Alignment([])]"
    many = Alignments([alignments[0]] * 100, SOURCES[:1] * 100, TARGETS[:1] * 100)
    assert repr(many) == "Alignments(100 sentence pairs, 300 links)"


def test_a_figure_shows_the_links_of_one_pair(alignments: Alignments) -> None:
    (axes,) = (axes for axes in alignments[:1].plot().axes if axes.images)
    assert axes.images[0].get_array().tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]  # type: ignore[union-attr]
    assert [label.get_text() for label in axes.get_xticklabels()] == SOURCES[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == TARGETS[0]
    with pytest.raises(InvalidInputError, match=r"draw those of one that has words: alignments\[:1\]$"):
        alignments.plot()


def test_a_file_holds_links_and_words(alignments: Alignments, tmp_path: Path) -> None:
    path = tmp_path / "links.safetensors"
    assert alignments.save(path) == path
    assert alignments.save(path.with_suffix(".csv")).read_text().startswith("pair,source,target,source_word,target")
    found = Alignments.load(path)
    assert found == alignments
    assert (found.sources, found.targets) == (alignments.sources, alignments.targets)
    assert [type(one) for one in found] == [Alignment] * 3
    Alignments([], [], []).save(path)
    assert Alignments.load(path) == Alignments([], [], [])
    hostile = Alignments([[(0, 0)]], [["<script>\u202e\x00"]], [["\U0001f600\n"]])
    hostile.save(path)
    assert Alignments.load(path) == hostile


def test_damaged_files_are_one_sentence(
    alignments: Alignments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # messages shorten long paths
    path = alignments.save(Path("links.safetensors"))
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    content = json.loads(metadata["content"])
    of_one_pair, beyond, negative, no_link = [[[0, 0]]], [[[0, 3]], [], []], [[[-1, 0]], [], []], [[["0", 0]], [], []]
    changes: list[dict[str, Any]] = [{"links": links} for links in (of_one_pair, beyond, negative, no_link, None)]
    for changed in (*changes, {"sources": [["a", 1], [], []]}, {"gold": []}):
        save_file({}, path, metadata | {"content": json.dumps(content | changed)})
        with pytest.raises(InvalidInputError, match=r"^cannot load links\.safetensors: the file is damaged \("):
            Alignments.load(path)
    save_file({}, path, metadata | {"result": "AttributionMaps"})
    with pytest.raises(InvalidInputError, match=r"it holds AttributionMaps; expected Alignments: read it by"):
        Alignments.load(path)

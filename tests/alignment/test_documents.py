"""Long pairs in sections: where they are cut, and what is joined; a pair of one window stays as it is."""

import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from alignment import documents
from alignment.aligner import BidirectionalAligner, WordAligner
from alignment.documents import Section, cut, gathered, in_proportion, joined
from alignment.links import Alignment, ScoredAlignment
from captum_norm import InvalidInputError
from tests.alignment.toy import ToyMethod, ToyModel, ToyTokenizer

FIRST, BETWEEN = 0x4E00, 0x2000  # letters, so that each word is another, and how far their translations are behind


def sentence(number: int) -> tuple[list[str], list[str]]:
    """Twelve words that no other sentence has, neighbours exchanged, and a full stop on both sides."""
    words = [FIRST + 12 * number + i for i in range(12)]
    turned = [words[i ^ 1] for i in range(12)]
    return [*map(chr, words), "."], [*(chr(word + BETWEEN) for word in turned), "."]


def document(sentences: Sequence[tuple[list[str], list[str]]]) -> tuple[list[str], list[str]]:
    return [word for source, _ in sentences for word in source], [word for _, target in sentences for word in target]


def links_of(source: Sequence[str], target: Sequence[str]) -> Alignment:
    """The right links."""
    places = {key: i for i, key in enumerate(keys(source, FIRST))}
    return Alignment((places[key], j) for j, key in enumerate(keys(target, FIRST + BETWEEN)) if key in places)


def keys(side: Sequence[str], first: int) -> list[float]:
    """The number of each word; a full stop's is behind those of its sentence."""
    found = [-0.5]
    for word in side:
        found.append(ord(word) - first if word != "." else found[-1] // 12 * 12 + 11.5)
    return found[1:]


SENTENCES = [sentence(seed) for seed in range(40)]


def test_a_document_is_cut_behind_its_sentences() -> None:
    pair = document(SENTENCES)
    sections = list(cut([(["a"], ["A"]), pair, ([], ["A"] * 200)], links_of))
    assert sections[0] == Section(0, (0, 0), (["a"], ["A"]))
    assert sections[-1] == Section(2, (0, 0), ([], ["A"] * 200))
    inside = [section for section in sections if section.pair == 1]
    assert inside[0].begin == (0, 0)
    for before, section in pairwise(inside):
        assert section.begin == tuple(at + len(side) for at, side in zip(before.begin, before.words, strict=True))
        assert before.words[0][-1] == before.words[1][-1] == "."
    assert [len(section.words[0]) for section in inside[:-1]] == [13] * (len(inside) - 1)
    assert 13 <= len(inside[-1].words[0]) <= documents.WINDOW
    assert document([section.words for section in inside]) == pair  # type: ignore[misc]


def test_a_pair_of_one_window_is_never_cut() -> None:
    pair = document(SENTENCES[:7])
    source, target = pair[0] + ["x"] * (documents.WINDOW - len(pair[0])), pair[1]

    def never(*window: Any) -> Alignment:
        raise AssertionError(window)

    [section] = cut([(source, target)], never)
    assert section.words[0] is source
    assert section.words[1] is target


def test_without_marks_cuts_are_where_no_link_crosses() -> None:
    source, target = ([word for word in side if word != "."] for side in document(SENTENCES))
    sections = list(cut([(source, target)], links_of))
    assert {len(section.words[0]) for section in sections[:-1]} == {50}
    assert all(section.begin[0] == section.begin[1] for section in sections)


def test_if_links_cross_everywhere_the_fewest_do() -> None:
    def crossing(source: Sequence[str], target: Sequence[str]) -> Alignment:
        last = Alignment([(0, len(target) - 1), (len(source) - 1, 0)])
        return links_of(source, target) - Alignment([(0, j) for j in range(12)]) | last

    first, second, *_ = cut([document(SENTENCES)], crossing)
    assert (first.begin, second.begin) == (
        (0, 0),
        (182, 182),
    )  # behind the last sentence in three quarters of 250 words


def test_sides_of_other_lengths_end_together() -> None:
    words = ["w"] * 30, ["W"] * 1000
    sections = list(cut([words, (words[1], words[0])], lambda *_: Alignment()))
    for index in (0, 1):
        ends = [
            np.add(section.begin, [len(side) for side in section.words])
            for section in sections
            if section.pair == index
        ]
        assert all(len(side) > 0 for section in sections for side in section.words)
        assert (np.diff(ends, axis=0) > 0).all()


def test_sentences_that_one_side_lacks_stay_with_their_neighbours() -> None:
    lacking = [(source, [] if number % 9 == 4 else target) for number, (source, target) in enumerate(SENTENCES)]
    for section in cut([document(lacking)], links_of):
        of_source, of_target = (
            {(ord(word) - FIRST - side * BETWEEN) // 12 for word in words if word != "."}
            for side, words in enumerate(section.words)
        )
        assert of_target == {number for number in of_source if number % 9 != 4}


def test_a_window_too_long_for_the_model_is_halved() -> None:
    asked: list[int] = []

    def short(source: Sequence[str], target: Sequence[str]) -> Alignment | None:
        asked.append(len(source))
        return links_of(source, target) if len(source) < 70 else None

    sections = list(cut([document(SENTENCES)], short))
    assert asked[:3] == [250, 125, 62]
    assert max(len(section.words[0]) for section in sections) <= 62
    [whole] = cut([document(SENTENCES)], lambda *_: None)
    assert whole.words == document(SENTENCES)


def test_in_proportion_knows_no_links() -> None:
    pair = list(map(str, range(1000))), list(map(str, range(500)))
    sections = list(in_proportion([pair, (["a"], [])]))
    assert sections.pop() == (["a"], [])
    assert all(max(map(len, section)) <= 125 for section in sections)
    assert document(sections) == pair  # type: ignore[arg-type]
    assert all(abs(int(source[0]) - 2 * int(target[0])) <= 4 for source, target in sections)


def test_answers_are_joined_at_their_places() -> None:
    sections = [Section(0, (0, 0), (["a"], ["A"])), *(Section(1, (i, i), (["a", "b"], ["A"])) for i in (0, 2))]
    first, second = (
        ScoredAlignment(Alignment([(1, 0)]), np.array([[0.25, p]]), corpus_statistics=True) for p in (0.5, 1)
    )
    error = InvalidInputError("no")
    found: Any = list(gathered(sections, [(2, second), (0, error), (1, first)]))
    assert found[0] == (0, error)
    assert [index for index, _ in found] == [0, 1]
    both = joined(list("abab"), list("AxA"), found[1][1])
    assert both.links == Alignment([(1, 0), (3, 2)])
    assert both.corpus_statistics
    np.testing.assert_array_equal(both.all_probabilities(), [[0.25, 0.5, 0, 0], [0] * 4, [0, 0, 0.25, 1]])
    assert joined(["a", "b"], ["A"], found[1][1][:1]) is first
    assert list(gathered(sections[1:], [(0, first), (1, error)])) == [(1, error)]


def entries(layer: int, _: int, read: Any, source: Any) -> Any:
    """Layer 0 is right in AWI, layer 1 in AWO."""
    read = read.roll(-1, 1) if layer else read
    return ((read == source + BETWEEN) | ((read == ord(".")) & (source == ord(".")))) + 0.001


def toy(longest: int = 1024, **options: Any) -> WordAligner:
    model = ToyModel(longest)
    return WordAligner(model, ToyTokenizer(), ToyMethod(entries, layers=2), 0, head=0, **options)


@pytest.mark.parametrize("combine", [None, "add", "grow-diag"])
def test_links_of_sections_are_those_of_pairs(combine: str | None) -> None:
    aligner: Any = toy()
    if combine:
        aligner = BidirectionalAligner(toy(), toy(), combine, count_text=combine == "add")
    pairs = [document(SENTENCES), SENTENCES[0]]
    sections = aligner.cut(pairs)
    assert len(sections) > 30
    apart = aligner.align_scored(*zip(*(section.words for section in sections), strict=True))
    found = aligner.align_scored(*zip(*pairs, strict=True))
    expected = {
        (i + s.begin[0], j + s.begin[1]) for s, a in zip(sections[:-1], apart, strict=False) for i, j in a.links
    }
    assert set(found[0].links) == expected
    assert found[1].links == apart[-1].links
    if combine != "grow-diag":
        assert found[0].all_probabilities().max() <= 1
        np.testing.assert_array_equal(found[1].all_probabilities(), apart[-1].all_probabilities())


def test_the_document_is_longer_than_the_models_positions() -> None:
    source, target = document(SENTENCES)
    assert toy(longest=150).align([source], [target]) == [links_of(source, target)]
    with pytest.raises(InvalidInputError, match="pair 0: got a source side of 2000 letters, expected at most 320"):
        toy(longest=20).align([["a"] * 2000], [["A"] * 2000])


def test_what_is_open_is_chosen_in_sections() -> None:
    aligner = WordAligner(ToyModel(150), ToyTokenizer(), ToyMethod(entries, layers=2))
    aligner.choose([document(SENTENCES)])
    assert aligner.choice is not None


def test_two_thousand_words_take_bounded_memory() -> None:
    source, target = document([sentence(seed) for seed in range(154)])
    aligner = toy()
    aligner.align([source[:130]], [target[:130]])
    tracemalloc.start()
    [scored] = aligner.align_scored([source], [target])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert scored.all_probabilities().shape == (2002, 2002)
    assert peak < 3 * scored.all_probabilities().nbytes

"""Parallel text with gold alignments: words, links and orientation."""

from pathlib import Path
from typing import Any

import pytest

from alignment import Alignment, GoldAlignment
from alignment.corpora import ALIBI_STORIES, ParallelGold, load_alibi, read_rwth, read_wpt03
from captum_norm import InvalidInputError
from tests.alignment.data import DATA, needs


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def counts(corpus: ParallelGold) -> tuple[int, int, int, int, int]:
    """Sentence pairs, source words, target words, sure links, possible links."""
    words = [sum(map(len, side)) for side in (corpus.sources, corpus.targets)]
    sure, possible = (sum(len(getattr(pair, kind)) for pair in corpus.gold) for kind in ("sure", "possible"))
    return len(corpus), words[0], words[1], sure, possible


def linked(corpus: ParallelGold, number: int) -> set[tuple[str, str]]:
    """The words that the sure links of a sentence pair join."""
    return {(corpus.sources[number][i], corpus.targets[number][j]) for i, j in corpus.gold[number].sure}


def test_stories_are_there() -> None:
    found = [load_alibi(story) for story in ALIBI_STORIES]
    assert [story.name for story in found] == ["Blue Beard", "The Master Cat", "The Last Lesson"]
    assert {(story.source_language, story.target_language) for story in found} == {("fr", "en")}
    assert list(map(counts, found)) == [
        (68, 2142, 2234, 1151, 3064),
        (52, 1860, 2036, 1173, 2589),
        (92, 2044, 1935, 1058, 3232),
    ]
    beard, cat, lesson = found
    assert {("homme", "man"), ("laid", "ugly"), ("terrible", "terrible")} <= linked(beard, 2)
    assert {("meunier", "miller"), ("moulin", "mill"), ("chat", "cat")} <= linked(cat, 1)
    assert linked(cat, 0) >= {("maître", "MASTER"), ("Chat", "CAT"), ("ou", "OR")}
    assert list(lesson.sources[91]) == ["allez-vous-en", ".", "»"]
    assert list(lesson.targets[91]) == ["you", "may", "go", ".", '"']
    assert linked(lesson, 91) == {(".", "."), ("»", '"')}
    assert lesson.gold[91].possible - lesson.gold[91].sure == Alignment([(0, 0), (0, 1), (0, 2)])
    assert {("matin-là", "morning"), ("j'", "I"), ("mot", "word")} <= linked(lesson, 1)
    assert load_alibi() == lesson


def test_story_that_is_not_there() -> None:
    story: Any = "cinderella"
    with pytest.raises(InvalidInputError, match="got story='cinderella'; expected one of blue-beard, master-cat, "):
        load_alibi(story)


@needs("alibi-fr-en")
def test_stories_are_unchanged() -> None:
    shipped = Path(__file__).parents[2] / "alignment" / "data" / "alibi-fr-en"
    given = {path.name: path.read_bytes() for path in (DATA / "alibi-fr-en").glob("*.txt")}
    assert {path.name: path.read_bytes() for path in shipped.glob("*.txt")} == given
    assert len(given) == 9


def test_corpora_have_one_direction(tmp_path: Path) -> None:
    files = {"test.src-tgt": "the house ||| la maison bleue  \nyes ||| oui\n", "test.enfr.talp": "1-1 2-2 2p3\n1-1\n"}
    corpus = read_wpt03(write(tmp_path, files))
    gold = [GoldAlignment(Alignment([(0, 0), (1, 1)]), Alignment([(2, 1)])), GoldAlignment(Alignment([(0, 0)]))]
    sentences = [["la", "maison", "bleue"], ["oui"]], [["the", "house"], ["yes"]]
    assert corpus == ParallelGold("WPT03", "fr", "en", *sentences, gold)
    files = {"test.de": "das blaue Haus\n", "test.en": "houses\n", "alignment.talp": "3-1 2p1\n"}
    corpus = read_rwth(write(tmp_path, files))
    gold = [GoldAlignment(Alignment([(2, 0)]), Alignment([(1, 0)]))]
    assert corpus == ParallelGold("RWTH", "de", "en", [["das", "blaue", "Haus"]], [["houses"]], gold)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"alignment.talp": "1-1\n4-1\n"}, r"alignment\.talp, line 2: got source index 4, expected 1 to 1"),
        ({"alignment.talp": "1-1\n"}, r"alignment\.talp: got 1 alignments, expected 2"),
        ({"test.en": "a\n"}, r"test\.en, line 2: got no such line"),
    ],
)
def test_files_that_do_not_fit_each_other(tmp_path: Path, files: dict[str, str], message: str) -> None:
    write(tmp_path, {"test.de": "a\nb\n", "test.en": "a\nb\n", "alignment.talp": "1-1\n1-1\n"} | files)
    with pytest.raises(InvalidInputError, match=message):
        read_rwth(tmp_path)


def test_sides_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="got 2 source sentences, 1 target sentences and 1 gold alignments"):
        ParallelGold("x", "fr", "en", [["a"], ["b"]], [["a"]], [GoldAlignment(Alignment())])


@needs("wpt03-en-fr")
def test_wpt03_fits() -> None:
    corpus = read_wpt03(DATA / "wpt03-en-fr")
    assert counts(corpus) == (447, 7761, 7020, 4038, 17438)


@needs("rwth-de-en")
def test_rwth_fits() -> None:
    corpus = read_rwth(DATA / "rwth-de-en")
    assert counts(corpus) == (508, 9945, 10413, 9613, 10534)
    assert {("glauben", "believe"), ("nicht", "not")} <= linked(corpus, 0)

"""Counts of word pairs: the formula, what is left out, sums of parts, the bound, and files."""

import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest

from alignment.aligner import WordAligner
from alignment.fairseq.loading import load_shipped_model
from alignment.lexicon import Lexicon
from captum_norm import InvalidInputError
from tests.fuzzing import bounded, limited

Sentences = list[tuple[list[str], list[str], np.ndarray[Any, Any]]]


WORDS = ("s1", "sat", "satin", "satire", "Satins", "?"), ("Ton", "tones", "TONE", "tongs", "t1", "...")
"""Words that share three letters, four, or none, and a punctuation mark."""


def text(seed: int, count: int = 12) -> Sentences:
    """Sentence pairs of few words, so that they repeat, in and across sentences, with probabilities of all sizes."""
    generator = np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        sizes = generator.integers(1, 7, 2)
        source, target = (
            [side[n] for n in generator.integers(0, 6, size)] for side, size in zip(WORDS, sizes, strict=True)
        )
        pairs.append((source, target, generator.random((sizes[1], sizes[0])) ** 3))
    return pairs


def lexicon_of(pairs: Sentences, **options: Any) -> Lexicon:
    lexicon = Lexicon(**options)
    for pair in pairs:
        lexicon.count(*pair)
    return lexicon


def balanced(rows: list[list[float]]) -> list[list[float]]:
    """Rows and columns normalised in turn, as often as it takes."""
    height, width = len(rows), len(rows[0])
    for _ in range(3000):
        rows = [[entry / sum(row) for entry in row] for row in rows]
        sums = [math.fsum(row[column] for row in rows) * width / height for column in range(width)]
        rows = [[entry / total for entry, total in zip(row, sums, strict=True)] for row in rows]
    return [[entry / sum(row) for entry in row] for row in rows]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("left_out", [True, False])
def test_the_formula_written_out(seed: int, left_out: bool) -> None:
    pairs = text(seed)
    forms: list[Callable[[str], str]] = [lambda word: word[:3], lambda word: word[:4], lambda word: word]
    together: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    for source, target, probabilities in pairs:
        for row, t in enumerate(target):
            for column, s in enumerate(source):
                if probabilities[row, column] >= 0.05:
                    for number, form in enumerate(forms):
                        key = number, form(s.lower()), form(t.lower())
                        together[key].append(float(probabilities[row, column]))
    lexicon = lexicon_of(pairs)
    word_map = np.random.default_rng(seed + 100).random((len(pairs[0][1]), len(pairs[0][0])))
    source, target, own = pairs[0]

    def coefficient(number: int, s: str, t: str, p: float) -> float:
        others = list(together[number, s, t])
        if left_out and p >= 0.05:
            others.remove(p)
        of_s = math.fsum(q for (n, s2, _), values in together.items() for q in values if (n, s2) == (number, s))
        of_t = math.fsum(q for (n, _, t2), values in together.items() for q in values if (n, t2) == (number, t))
        return 2 * math.fsum(others) / (of_s + of_t + 1)

    dice = [
        [
            fmean(
                coefficient(number, form(s.lower()), form(t.lower()), float(own[row, column]))
                for number, form in enumerate(forms)
            )
            for column, s in enumerate(source)
        ]
        for row, t in enumerate(target)
    ]
    product: list[list[float]] = []
    lexical = balanced([[math.sqrt(x) + 0.02 for x in row] for row in dice])
    for row, entries in enumerate(word_map / word_map.sum(1, keepdims=True)):
        smoothed = zip(entries, lexical[row], strict=True)
        product.append([(1 + len(source) * float(m)) * (1 + len(source) * x) for m, x in smoothed])
    given = own if left_out else None
    assert lexicon.dice(source, target, given) == pytest.approx(np.array(dice), abs=1e-12)
    agreed = [[1.0 if (t == "...") == (s == "?") else 0.1 for s in source] for t in target]
    expected = np.array(balanced(product)) * agreed
    assert lexicon.applied(word_map, source, target, given) == pytest.approx(expected, abs=1e-7)


def test_unknown_words_and_case() -> None:
    lexicon = lexicon_of(text(0))
    known = lexicon.dice(["sat", "satire"], ["tone", "tongs"])
    more = lexicon.dice(["SAT", "Satire", "none"], ["TONE", "Tongs", "sat"])
    assert np.array_equal(more, np.pad(known, ((0, 1), (0, 1))))
    assert Lexicon().dice(["a"], ["b", "c"]).tolist() == [[0], [0]]
    forms = Lexicon()
    forms.count(["Élevait", "élevé"], ["raise"], [[0.5, 0.25]])
    by_letters = 2 * 0.75 / (0.75 + 0.75 + 1)
    whole = 2 * 0.5 / (0.5 + 0.75 + 1)
    found = forms.dice(["élevait", "élevons", "élection", "ÉLE", "él"], ["raise"])[0]
    expected = [(2 * by_letters + whole) / 3, 2 * by_letters / 3, by_letters / 3, by_letters / 3, 0]
    assert found == pytest.approx(expected, abs=1e-12)
    even = Lexicon().applied([[3.0, 1.0], [1.0, 3.0]], ["a", "b"], ["c", "d"])
    assert even[0, 0] == even[1, 1] > even[0, 1]


@pytest.mark.parametrize("mark", [",", "»", "...", "।", "’"])
@pytest.mark.parametrize("word", ["a", "7", "l'", "aujourd'hui", "का", "-5", "字"])
def test_marks_and_words(mark: str, word: str) -> None:
    even = np.full((2, 2), 0.5)
    assert Lexicon().applied(even, [mark, word], [word, mark]) == pytest.approx(np.array([[0.05, 0.5], [0.5, 0.05]]))
    assert Lexicon().applied(even, [mark, mark], [mark, mark]) == pytest.approx(even)
    assert Lexicon().applied(even, [word, word], [mark, mark]) == pytest.approx(even / 10)


def test_a_lexicon_of_the_opposite_direction_is_refused(tmp_path: Path) -> None:
    Lexicon(languages=("en", "fr")).save(tmp_path / "lexicon")
    lexicon = Lexicon.load(tmp_path / "lexicon").copy()
    assert lexicon.languages == ("en", "fr")
    with pytest.raises(InvalidInputError, match="got a lexicon of en–fr text for fr–en"):
        WordAligner(*load_shipped_model("fr-en"), recipe="hmm", lexicon=lexicon)
    for languages in ((None, "fr"), (None, None), ("en", "fr"), ("eng_Latn", "fra_Latn"), ("de", "en")):
        lexicon.check_direction(languages)
    aligner = WordAligner(*load_shipped_model("fr-en"), recipe="hmm", count_text=True)
    assert aligner.begun_lexicon().languages == ("fr", "en")


def test_a_copy_is_independent() -> None:
    pairs = text(2)
    lexicon = lexicon_of(pairs[:6])
    before = lexicon.dice(*pairs[0][:2])
    for pair in pairs:
        lexicon.copy().count(*pair)
    other = lexicon.copy()
    other.count(*pairs[0])
    assert np.array_equal(lexicon.dice(*pairs[0][:2]), before)
    assert other.dice(*pairs[0][:2]).sum() > before.sum()


def test_the_bound_drops_the_lowest_counts_and_never_raises_a_coefficient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignment.lexicon._BUFFERED", 50)
    pairs = text(3, count=60)
    whole, pruned = lexicon_of(pairs), lexicon_of(pairs, max_word_pairs=50)
    assert len(pruned) <= 50 < len(whole)
    lost = 0
    for source, target, _ in pairs:
        full, kept = whole.dice(source, target), pruned.dice(source, target)
        assert (kept <= full + 1e-12).all()
        lost += int((kept < full - 1e-12).sum())
    assert lost
    last = Lexicon(max_word_pairs=12)
    last.count(list("abcde"), ["z"], [[0.5, 0.9, 0.1, 0.7, 0.3]])
    assert len(last) == 9
    assert (last.dice(list("abcde"), ["z"])[0] > 0).tolist() == [True, True, False, True, False]
    assert last.dice(["b"], ["z"])[0, 0] == pytest.approx(1.8 / (0.9 + 2.5 + 1))


def test_files(tmp_path: Path) -> None:
    pairs = text(4)
    lexicon = lexicon_of([*pairs, (["\ud800", "a b"], ['"\n'], np.array([[0.5, 0.5]]))], max_word_pairs=999)
    lexicon.save(tmp_path / "lexicon")
    read = Lexicon.load(tmp_path / "lexicon")
    assert [path.name for path in tmp_path.iterdir()] == ["lexicon"]
    assert (read.max_word_pairs, read.sentence_pairs, len(read)) == (999, lexicon.sentence_pairs, len(lexicon))
    assert read.dice(["\ud800"], ['"\n']) == lexicon.dice(["\ud800"], ['"\n']) > 0
    for source, target, own in pairs:
        assert np.array_equal(read.dice(source, target, own), lexicon.dice(source, target, own))
    read.count(*pairs[0])
    lexicon.count(*pairs[0])
    assert np.array_equal(read.dice(*pairs[0][:2]), lexicon.dice(*pairs[0][:2]))
    words = [[f"{side}{number}" for number in range(200)] for side in "st"]
    alike = lexicon_of([(words[0], words[1], np.full((200, 200), 0.5))])  # its counts take a hundredth of their size
    alike.save(tmp_path / "lexicon")
    assert len(Lexicon.load(tmp_path / "lexicon")) == len(alike) > 40_000
    Lexicon().save(tmp_path / "lexicon")
    assert len(Lexicon.load(tmp_path / "lexicon")) == 0


def test_files_that_are_none(tmp_path: Path) -> None:
    lexicon_of(text(5)).save(tmp_path / "sound.npz")
    with np.load(tmp_path / "sound.npz") as file:
        arrays = {name: file[name] for name in file.files}
    description = json.loads(arrays["description"].tobytes())

    def refused(**changes: Any) -> None:
        np.savez(tmp_path / "changed.npz", **{**arrays, **changes})
        with pytest.raises(InvalidInputError, match="is not a lexicon"):
            Lexicon.load(tmp_path / "changed.npz")

    def described(**changes: Any) -> Any:
        return np.frombuffer(json.dumps({**description, **changes}).encode(), np.uint8)

    refused(keys=arrays["keys"][:-1])
    refused(source_totals=arrays["source_totals"][:-1])
    refused(counts=np.array([{}] * len(arrays["counts"]), object))  # pickled
    refused(description=described(format="other"))
    refused(description=described(sides=[["a"], ["b"]]))
    refused(description=np.frombuffer(b"[]", np.uint8))
    refused(description=np.frombuffer(b"[" * 100_000, np.uint8))
    refused(description=described(sides=[["a"] * len(side) for side in description["sides"]]))
    refused(description=described(sides=[[0] * len(side) for side in description["sides"]]))
    refused(description=described(max_word_pairs=0))
    refused(description=described(languages=[1, 2]))
    refused(keys=arrays["keys"][::-1])
    refused(keys=arrays["keys"] + np.uint64(len(description["sides"][1])))
    refused(keys=arrays["keys"].astype(np.int64))
    refused(counts=arrays["counts"] * np.nan)
    refused(counts=-arrays["counts"])
    refused(counts=arrays["counts"][:, None])
    content = (tmp_path / "sound.npz").read_bytes()
    for damaged in (b"", b"text\n", content[:-30], content[:200] + b"?" * 9 + content[209:]):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(InvalidInputError, match="is not a lexicon"):
            Lexicon.load(tmp_path / "damaged")
    with pytest.raises(InvalidInputError, match=r"cannot read .*none"):
        Lexicon.load(tmp_path / "none")


@pytest.mark.long
def test_files_that_would_take_more_memory_than_they_may(tmp_path: Path) -> None:
    """Declared shapes, sizes beyond what compresses so well, and encryption."""
    lexicon_of(text(5)).save(tmp_path / "sound.npz")
    with np.load(tmp_path / "sound.npz") as file:
        arrays = {name: file[name] for name in file.files}
    zeros = np.zeros(20_000_000, np.uint64)
    changes: list[dict[str, Any]] = [{"keys": zeros}, {"keys": zeros, "counts": zeros.view(np.float64)}]
    changes += [{"counts": zeros.view(np.float64)}, {"description": np.full(100_000_000, 32, np.uint8)}]
    files = []
    for index, changed in enumerate(changes):
        files.append(tmp_path / f"{index}.npz")
        np.savez_compressed(files[-1], **{**arrays, **changed})
        assert files[-1].stat().st_size < 1_000_000
    content = (tmp_path / "sound.npz").read_bytes()
    with ZipFile(tmp_path / "shape.npz", "w") as archive:
        for name, array in arrays.items():
            stream = io.BytesIO()
            header = {"descr": array.dtype.str, "fortran_order": False, "shape": (10**10,)}
            np.lib.format.write_array_header_1_0(stream, header)
            archive.writestr(f"{name}.npy", stream.getvalue() + array.tobytes())
    encrypted = bytearray(content)
    for entry in re.finditer(rb"PK\x01\x02|PK\x03\x04", content):
        encrypted[entry.start() + (8 if entry[0].endswith(b"\x02") else 6)] |= 1
    (tmp_path / "encrypted.npz").write_bytes(encrypted)
    with bounded(mebibytes=40), limited():
        for file in (*files, tmp_path / "shape.npz", tmp_path / "encrypted.npz"):
            with pytest.raises(InvalidInputError, match="is not a lexicon; give a file that --save-lexicon wrote"):
                Lexicon.load(file)


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        ([[0.5, 0.5]], r"got a map of shape \(1, 2\) for 2 target and 2 source words"),
        ([[0.5, 0.5], [np.nan, 0.5]], "NaN"),
        ([[0.5, 0.5], [-0.5, 0.5]], "negative"),
    ],
)
def test_what_is_refused(probabilities: Any, message: str) -> None:
    words = ["a", "b"], ["c", "d"]
    for call in (Lexicon().count, Lexicon().dice):
        with pytest.raises(InvalidInputError, match=message):
            call(*words, probabilities)
    with pytest.raises(InvalidInputError, match=message):
        Lexicon().applied(probabilities, *words)
    with pytest.raises(InvalidInputError, match="got max_word_pairs=0, expected at least 1"):
        Lexicon(max_word_pairs=0)

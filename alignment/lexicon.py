"""Counts which words a text links, and turns the counts into maps that help to align it.

A sentence pair alone does not say that *roi* is *king*; the other pairs of the text do. The link probabilities of a
first pass are summed by pair of words, and the Dice coefficient of two words [Dice 1945] over the *other* occurrences
of the text tells how often they belong together. This is what statistical aligners learn from a corpus, counted in one
pass instead of by training.
"""

import json
import struct
import zipfile
import zlib
from collections.abc import Sequence
from copy import deepcopy
from io import BytesIO
from os import PathLike, fspath
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alignment.tokenization import Languages
from alignment.word_maps import WordMap, checked_map, sinkhorn, smoothed_product
from captum_norm import InvalidInputError
from captum_norm.checks import quoted_name
from captum_norm.text.files import file_to_write
from captum_norm.text.lines import is_regular_file

MAX_WORD_PAIRS = 10_000_000
"""The largest number of word pairs that a :class:`Lexicon` holds unless told otherwise."""

MIN_PROBABILITY = 0.05
"""Links that are less probable than this are not counted."""

LETTERS = (3, 4, None)
"""Words are counted by their first 3 letters, their first 4, and whole: inflected forms of a word count together."""

FLOOR = 0.02
"""What the lexical map gives two words that are never linked elsewhere, before rows and columns are normalised."""

MARK = 0.1
"""The factor of links between a word and a punctuation mark, which has neither letters nor digits."""

_FORMAT = "captum-norm lexicon 3"
_KEPT = 0.75
_BUFFERED = 1 << 19
_SIDE, _TARGET = 32, np.uint64(0xFFFFFFFF)
_ARRAYS = ("keys", "counts", "source_totals", "target_totals")

_MOST_COMPRESSED = 32
_SMALL = 1 << 16
"""What may be compressed to any degree, in bytes; sorted keys and words come down to a tenth at most."""


class Lexicon:
    r"""Word pairs of a text, with the sums of their link probabilities.

    Words are compared in lower case, and counted in three forms: whole, and by as many first letters as
    :data:`alignment.lexicon.LETTERS` says.

    The table is bounded: when it exceeds ``max_word_pairs``, the word pairs with the lowest counts are dropped until
    three quarters are left, those of whole words before those of their first letters, which are more frequent. The
    totals of their words stay as they are, so pruning lowers a coefficient of two words and never raises one; a word
    pair that is dropped and comes again starts from 0. A word pair takes 16 bytes, and about 50 while others are added;
    a word takes about 150.

    Args:
        max_word_pairs: the largest number of word pairs, each form of a word counted apart.
        languages: of source and target, as the model's tokenizer names them; None for one that is unknown.

    Attributes:
        sentence_pairs: the number of sentence pairs counted.

    Raises:
        InvalidInputError: the number is less than 1, or (from the methods) an array is not a finite matrix (target
            words, source words) or has negative entries.

    >>> lexicon = Lexicon()
    >>> lexicon.count(["le", "roi"], ["the", "king"], [[0.9, 0.0], [0.1, 1.0]])
    >>> lexicon.count(["Le", "chat"], ["The", "cat"], [[0.8, 0.2], [0.0, 1.0]])
    >>> lexicon.dice(["le", "roi"], ["the"]).round(2).tolist()
    [[0.72, 0.0]]
    """

    def __init__(self, *, max_word_pairs: int = MAX_WORD_PAIRS, languages: Languages = (None, None)) -> None:
        if max_word_pairs < 1:
            raise InvalidInputError(f"got max_word_pairs={max_word_pairs}, expected at least 1")
        self.max_word_pairs = max_word_pairs
        self.languages = languages
        self.sentence_pairs = 0
        self._sides: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._totals = np.zeros(0), np.zeros(0)
        self._keys, self._counts = np.zeros(0, np.uint64), np.zeros(0)
        self._added: list[tuple[NDArray[np.uint64], NDArray[np.float64]]] = []
        self._waiting = 0

    def count(self, source: Sequence[str], target: Sequence[str], probabilities: ArrayLike) -> None:
        """Add the link probabilities of a sentence pair, from :data:`alignment.lexicon.MIN_PROBABILITY` on.

        They are (T, S), for example of :func:`alignment.decoding.link_probabilities`.
        """
        matrix = _matrix(probabilities, source, target)
        rows, columns = np.nonzero(matrix >= MIN_PROBABILITY)
        of_sources, of_targets = (
            _by_form([side.setdefault(form, len(side)) for word in words for form in _forms(word)])
            for side, words in zip(self._sides, (source, target), strict=True)
        )
        keys = ((of_sources[:, columns] << _SIDE) | of_targets[:, rows]).astype(np.uint64).ravel()
        self._added.append((keys, np.tile(matrix[rows, columns], len(LETTERS))))
        self._waiting += len(keys)
        if self._waiting >= _BUFFERED:
            self._settle()
        self.sentence_pairs += 1

    def check_direction(self, languages: Languages) -> None:
        """Raise InvalidInputError if the lexicon is of the opposite direction; unknown languages agree with any."""
        source, target = languages
        if None not in languages and source != target and self.languages == (target, source):
            raise InvalidInputError(
                f"got a lexicon of {target}–{source} text for {source}–{target}; count one with the sides in this order"
            )

    def copy(self) -> "Lexicon":
        """A lexicon with the same counts."""
        return deepcopy(self)

    def __len__(self) -> int:
        """The number of word pairs, each form of a word counted apart."""
        self._settle()
        return len(self._keys)

    def dice(self, source: Sequence[str], target: Sequence[str], own: ArrayLike | None = None) -> WordMap:
        r"""The Dice coefficient of each source and target word, $2\,(c(s, t) - p) / (c(s) + c(t) + 1)$.

        It is the mean over the forms in which words are counted, (T, S), from 0 to 1; 0 where a word was never counted.

        Args:
            source: the source words.
            target: the target words.
            own: (T, S), the probabilities p that :meth:`count` was called with for this very sentence pair: each link
                is left out of the count that it is judged by. None if this pair was not counted.
        """
        left_out = np.zeros((len(target), len(source)))
        if own is not None:
            matrix = _matrix(own, source, target)
            left_out = np.where(matrix >= MIN_PROBABILITY, matrix, 0.0)
        columns, rows = self._places(source, target)
        counts = np.maximum(self._pair_counts(columns, rows) - left_out, 0.0)
        of_sources, of_targets = (np.append(total, 0.0) for total in self._totals)
        coefficients = 2 * counts / (of_sources[columns][:, None] + of_targets[rows][..., None] + 1)
        mean: WordMap = coefficients.mean(0)
        return mean

    def applied(
        self, word_map: ArrayLike, source: Sequence[str], target: Sequence[str], own: ArrayLike | None = None
    ) -> WordMap:
        """Multiply a map by the lexical map of its words.

        The lexical map is the square root of :meth:`dice` plus :data:`alignment.lexicon.FLOOR`, rows and columns
        normalised by :func:`alignment.word_maps.sinkhorn`. The two are combined by
        :func:`alignment.word_maps.smoothed_product`, so neither can veto a link of which the other is sure, and
        normalised again. Links between a word and a punctuation mark
        are then multiplied by :data:`alignment.lexicon.MARK`.

        Args:
            word_map: (T, S), without a null column; finite and not negative.
            source: the source words.
            target: the target words.
            own: as for :meth:`dice`.
        """
        matrix = _matrix(word_map, source, target)
        lexical = sinkhorn(np.sqrt(self.dice(source, target, own)) + FLOOR, null=False)
        both = sinkhorn(smoothed_product(matrix, lexical, null=False), null=False)
        columns, rows = (np.array(list(map(_is_mark, words)), np.bool_) for words in (source, target))
        return np.where(rows[:, None] == columns, both, MARK * both)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the lexicon to a file (NumPy's npz, without pickled objects), all or nothing."""
        self._settle()
        description = {
            "format": _FORMAT,
            "max_word_pairs": self.max_word_pairs,
            "sentence_pairs": self.sentence_pairs,
            "languages": self.languages,
            "sides": [list(side) for side in self._sides],
        }
        text = np.frombuffer(json.dumps(description, ensure_ascii=False).encode(errors="surrogatepass"), np.uint8)
        arrays = dict(zip(_ARRAYS, (self._keys, self._counts, *self._totals), strict=True))
        with file_to_write(path).replacing() as file:
            np.savez_compressed(cast(IO[bytes], file), description=text, **cast(Any, arrays))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Lexicon":
        """Read a lexicon that :meth:`save` wrote; nothing in the file is executed.

        Raises:
            InvalidInputError: the file cannot be read, or is not a lexicon.
        """
        name = quoted_name(fspath(path))
        if not is_regular_file(path):
            raise InvalidInputError(f"cannot read {name}: it is a pipe or a device")
        try:
            with Path(path).open("rb") as opened, zipfile.ZipFile(opened) as file:
                description = json.loads(_array(file, "description", np.uint8).tobytes().decode(errors="surrogatepass"))
                keys = _array(file, "keys", np.uint64)
                counts, *totals = (_array(file, array, np.float64, 8 * len(keys)) for array in _ARRAYS[1:])
        except OSError as error:
            raise InvalidInputError(f"cannot read {name}: {error.strerror or error}") from error
        except (ValueError, LookupError, EOFError, RuntimeError, struct.error, zipfile.BadZipFile, zlib.error) as error:
            raise InvalidInputError(f"{name} is not a lexicon; give a file that --save-lexicon wrote") from error
        if not _is_sound(description, keys, counts, totals):
            raise InvalidInputError(f"{name} is not a lexicon, or damaged; give a file that --save-lexicon wrote")
        source, target = description["languages"]
        lexicon = cls(max_word_pairs=description["max_word_pairs"], languages=(source, target))
        lexicon.sentence_pairs = description["sentence_pairs"]
        first, second = ({word: place for place, word in enumerate(words)} for words in description["sides"])
        lexicon._sides = first, second
        lexicon._keys, lexicon._counts, lexicon._totals = keys, counts, (totals[0], totals[1])
        return lexicon

    def _pair_counts(self, columns: NDArray[np.intp], rows: NDArray[np.intp]) -> NDArray[np.float64]:
        """(forms, T, S), for the places of source and target words."""
        self._settle()
        known = (rows >= 0)[..., None] & (columns >= 0)[:, None]
        if not len(self._keys):
            return np.zeros(known.shape)
        wanted = (columns.astype(np.uint64) << _SIDE)[:, None] | rows.astype(np.uint64)[..., None]
        places = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        return np.where(known & (self._keys[places] == wanted), self._counts[places], 0.0)

    def _places(self, source: Sequence[str], target: Sequence[str]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """(forms, S) and (forms, T), the places of source and target words; −1 for a form that was never counted."""
        columns, rows = (
            _by_form([side.get(form, -1) for word in words for form in _forms(word)])
            for side, words in zip(self._sides, (source, target), strict=True)
        )
        return columns, rows

    def _settle(self) -> None:
        """Take what was counted since the last time into the table and the totals."""
        if not self._added:
            return
        keys, counts = (np.concatenate(column) for column in zip(*self._added, strict=True))
        self._added, self._waiting = [], 0
        first, second = (
            np.append(total, np.zeros(len(side) - len(total)))
            for total, side in zip(self._totals, self._sides, strict=True)
        )
        self._totals = first, second
        for total, words in zip(self._totals, (keys >> _SIDE, keys & _TARGET), strict=True):
            np.add.at(total, words.astype(np.intp), counts)
        self._merge(*_summed(keys, counts))

    def _merge(self, keys: NDArray[np.uint64], counts: NDArray[np.float64]) -> None:
        """Add sorted keys and their counts to the table, and prune it."""
        places = np.searchsorted(self._keys, keys)
        held = np.zeros(len(keys), np.bool_)
        inside = places < len(self._keys)
        held[inside] = self._keys[places[inside]] == keys[inside]
        # The array may have been read from a file.
        self._counts = self._counts.copy()
        self._counts[places[held]] += counts[held]
        self._keys = np.insert(self._keys, places[~held], keys[~held])
        self._counts = np.insert(self._counts, places[~held], counts[~held])
        if len(self._keys) > self.max_word_pairs:
            kept = max(1, int(_KEPT * self.max_word_pairs))
            dropped = len(self._keys) - kept
            # Stable: of equal counts, those of the words that came first are dropped, whatever the platform.
            chosen = np.sort(np.argsort(self._counts, kind="stable")[dropped:])
            self._keys, self._counts = self._keys[chosen], self._counts[chosen]


def _forms(word: str) -> list[str]:
    """The forms in which a word is counted; no two numbers of letters give the same form."""
    lower = word.lower()
    return [f"{letters or ''}:{lower[:letters]}" for letters in LETTERS]


def _by_form(places: Sequence[int]) -> NDArray[np.intp]:
    """(forms, words), of the places of every form of each word in turn."""
    return np.array(places, np.intp).reshape(-1, len(LETTERS)).T


def _is_mark(word: str) -> bool:
    return not any(map(str.isalnum, word))


def _summed(keys: NDArray[np.uint64], counts: NDArray[np.float64]) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
    """Sorted keys, each once, and the sums of their counts."""
    unique, places = np.unique(keys, return_inverse=True)
    return unique, np.bincount(places, counts, len(unique)).astype(np.float64)


def _matrix(values: ArrayLike, source: Sequence[str], target: Sequence[str]) -> WordMap:
    matrix = checked_map(values, null=False)
    if matrix.shape != (len(target), len(source)):
        message = f"got a map of shape {matrix.shape} for {len(target)} target and {len(source)} source words"
        raise InvalidInputError(f"{message}; expected a row for each target and a column for each source word")
    return matrix


def _array(file: zipfile.ZipFile, name: str, dtype: type[Any], small: int = 0) -> NDArray[Any]:
    """Read an array of one axis, unless it is compressed more than any that :meth:`Lexicon.save` writes."""
    info = file.getinfo(f"{name}.npy")
    if info.flag_bits & 1 or info.file_size > max(_MOST_COMPRESSED * info.compress_size, small) + _SMALL:
        raise ValueError(f"{name} is encrypted, or larger than its compressed size allows")
    content = BytesIO(file.read(info))
    if np.lib.format.read_magic(content) != (1, 0):
        raise ValueError(f"{name} has another version")
    shape, _, kind = np.lib.format.read_array_header_1_0(content)
    array: NDArray[Any] = np.frombuffer(content.getbuffer()[content.tell() :], dtype)
    if kind != dtype or shape != array.shape:
        raise ValueError(f"{name} has another type or shape")
    return array


def _is_sound(
    description: Any, keys: NDArray[np.uint64], counts: NDArray[np.float64], totals: Sequence[NDArray[np.float64]]
) -> bool:
    """Whether the contents of a file fit together; the archive has checksums of its own."""
    match description:
        case {
            "format": name,
            "languages": [str() | None, str() | None],
            "max_word_pairs": int() as most,
            "sentence_pairs": int() as pairs,
            "sides": [list() as first, list() as second],
        } if name == _FORMAT and most >= 1 and pairs >= 0:
            sizes = [len(first), len(second), len(keys)]
            return (
                [*map(len, totals), len(counts)] == sizes
                and all(isinstance(word, str) for side in (first, second) for word in side)
                and [len(set(first)), len(set(second))] == sizes[:2]
                and bool((keys[1:] > keys[:-1]).all())
                and all((ids < size).all() for ids, size in zip((keys >> _SIDE, keys & _TARGET), sizes, strict=False))
                and all(bool((np.isfinite(values) & (values >= 0)).all()) for values in (counts, *totals))
            )
        case _:
            return False

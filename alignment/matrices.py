"""Aligns words by soft alignments that other tools wrote: matrices of attention between pieces."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from alignment.aligner import Pairs, TextAligner, WordAligner, Words
from alignment.decoding import probable_links
from alignment.formats import split_words
from alignment.links import ScoredAlignment
from alignment.pipeline.blocks import read_rows
from alignment.selection import Setting, row_word_ids
from alignment.subwords import sentencepiece_text, word_ids_from_pieces
from alignment.tokenization import EncodedSentence
from alignment.word_maps import WordMap, checked_map
from captum_norm import InvalidInputError
from captum_norm.runs import Block
from captum_norm.text.lines import error_at

_SPECIAL = re.compile(r"</?s>|<pad>|\[CLS\]|\[SEP\]")
_LANGUAGE = re.compile(r">>.+<<|<2.+>|__\w+__|[a-z]{2,3}_[A-Z]\w+")


class _Target(list[str]):
    """Target words with the map of their pair, (T, S + 1); of probabilities, whether a lexicon took part in them."""

    word_map: WordMap
    statistics: bool | None = None


class MatrixAligner(TextAligner):
    """Reads matrices and their words, and links off them; with one map of a pair, its recipe combines no settings."""

    directions: Sequence[tuple[WordAligner, bool]] = ()
    setting: Setting = "AWO"

    def map_each(self, pairs: Pairs) -> Iterator[tuple[int, WordMap | InvalidInputError]]:
        """Yield each pair's index and map."""
        for index, (_, target) in enumerate(pairs):
            yield index, self.recipe.word_map({"AWO": cast(_Target, target).word_map}, "AWO")

    def read(self, word_map: WordMap, source: Words, target: Words, *counts: Any) -> ScoredAlignment:
        """Read the links of a pair; of given probabilities as they are, unless a lexicon is multiplied in."""
        statistics = getattr(target, "statistics", None)
        if statistics is None or not self.scored or self.corpus_statistics:
            return super().read(word_map, source, target, *counts)
        probabilities = cast(_Target, target).word_map[:, :-1]
        links = probable_links(probabilities, self.recipe.options.get("min_probability", 0.0))
        return ScoredAlignment(links, probabilities, statistics)

    def read_block(self, block: Block) -> Iterator[tuple[list[str], list[str]] | InvalidInputError]:
        """Yield the words of both sides of each line, or an error; the first part has the matrices."""
        for number, texts in read_rows(block):
            try:
                yield texts if isinstance(texts, InvalidInputError) else self._pair(*texts)
            except (InvalidInputError, TypeError, ValueError, OverflowError, RecursionError) as error:
                expected = "expected translation ||| rows, or a JSON object with source, target and attention"
                yield error_at(block.parts[0].source, number, f"{error}; {expected}, for the pieces of TEXT")

    def _pair(self, line: str, text: str | None = None) -> tuple[list[str], list[str]]:
        source, target, rows, statistics = _json(line) if line == "null" or line[-1:] in ("", "}") else _marian(line)
        if text is not None:
            source, target, *_ = [*re.split(r" *\|\|\| *|\t", text, maxsplit=1), target]
        if rows is None:
            return split_words(source or ""), []
        if source is None or target is None:
            raise InvalidInputError(f"got no {'source' if source is None else 'target'}")
        sides = [split_words(side) if isinstance(side, str) else list(side) for side in (source, target)]
        "".join(sides[0] + sides[1]).encode()  # an error unless all are strings of Unicode
        if statistics is None:
            (source, columns), (target, owners) = map(_merged, sides)
        else:
            (source, columns), (target, owners) = ((side, range(len(side))) for side in sides)
        if not source or not target:
            return source, target
        matrix = checked_map(rows, null=False)
        if statistics is not None and matrix.max(initial=0.0) > 1:
            raise InvalidInputError(f"got the probability {matrix.max()}, expected at most 1")
        if any(size - len(ids) not in (0, 1) for size, ids in zip(matrix.shape, (owners, columns), strict=True)):
            of, pieces = f"{len(matrix)} × {matrix.shape[1]}", f"{len(owners)} target and {len(columns)} source pieces"
            raise InvalidInputError(f"got a matrix of {of} for {pieces}, and at most one for the end of each")
        steps = EncodedSentence([0] * len(matrix), [*owners, None][: len(matrix)])
        of_rows = _members(row_word_ids(steps, self.setting if statistics is None else "AWO"), len(target))
        of_columns = _members([*columns, None][: matrix.shape[1]], len(source))
        words = _Target(target)
        words.word_map = (of_rows.T @ matrix @ of_columns)[:-1] / np.maximum(of_rows.sum(0)[:-1, None], 1)
        words.statistics = statistics
        return source, words


def _json(line: str) -> tuple[Any, Any, Any, bool | None]:
    """Source, target, rows, and of probabilities whether a lexicon took part; a blank line has no rows."""
    match entry := json.loads(line or "null"):
        case None:
            return None, None, None, None
        case {"probabilities": rows}:
            return entry.get("source"), entry.get("target"), rows, bool(entry.get("corpus_statistics"))
        case {"hypotheses": [target, *_], "attention": [rows, *_]}:
            return entry.get("source"), target, rows, None
        case {"attention": rows}:
            return entry.get("source"), entry.get("target"), rows, None
    raise InvalidInputError("got no attention")


def _marian(line: str) -> tuple[None, str, Any, None]:
    """The target and rows of a line of Marian, perhaps of an n-best list: number, target, rows, features, score."""
    fields = line.split(" ||| ")
    if len(fields) > 4 and fields[-2].lstrip().startswith("F0="):
        fields = fields[1:-2]
    if fields[-1].startswith("WordScores="):
        fields.pop()
    rows = [list(map(float, row.split(","))) for row in fields.pop().split()]
    return None, " ||| ".join(fields), rows, None


def _merged(pieces: list[str]) -> tuple[list[str], Sequence[int | None]]:
    """The words that pieces form by their marks, ▁der, Häus@@ er, house ##s, and each one's word; None if special."""
    marked = any(piece.startswith("\u2581") for piece in pieces)
    special = [bool(_SPECIAL.fullmatch(piece) or (marked and _LANGUAGE.fullmatch(piece))) for piece in pieces]
    kept = [piece for piece, left_out in zip(pieces, special, strict=True) if not left_out]
    text = b"".join(map(sentencepiece_text, kept))
    if not marked:
        text = f"{' '.join(kept)} ".replace("@@ ", "").replace(" ##", "").encode()
    words = [word.decode(errors="replace") for word in text.split()]
    text_of = sentencepiece_text if marked else lambda piece: piece.removesuffix("@@").removeprefix("##").encode()
    ids = iter(word_ids_from_pieces(words, kept, text_of))
    return words, [None if left_out else next(ids) for left_out in special]


def _members(word_ids: Sequence[int | None], words: int) -> WordMap:
    """(pieces, words + 1): 1 where a piece is of a word; those of no word are in the last column."""
    return np.eye(words + 1)[[words if index is None else index for index in word_ids]]

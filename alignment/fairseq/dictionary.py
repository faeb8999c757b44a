"""Reads fairseq's dictionaries, which map pieces to ids."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from captum_norm import InvalidInputError
from captum_norm.text.lines import located, quoted, read_lines

BOS, PAD, EOS, UNK = range(4)
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
"""The symbols that every dictionary starts with; files do not list them."""

_OVERWRITE = "#fairseq:overwrite"


@dataclass(frozen=True, slots=True)
class Dictionary:
    """The pieces of one language.

    Attributes:
        symbols: the pieces in the order of their ids; the first four are ``<s> <pad> </s> <unk>``.
        indices: piece → id, the last one of a piece that is listed twice.
    """

    symbols: tuple[str, ...]
    indices: Mapping[str, int]

    def index(self, piece: str) -> int:
        """The id of a piece of text: ``<unk>``'s if it is not listed, or looks like one of the first three."""
        # Text must not become padding or end the sentence.
        return max(self.indices.get(piece, UNK), UNK)


def find_dictionary(data: Path, language: str) -> Path:
    """``dict.LANGUAGE.txt`` in a folder, or its ``dictionary.txt`` for all languages.

    Raises:
        InvalidInputError: neither exists.
    """
    names = f"dict.{language}.txt", "dictionary.txt"
    for path in (data / name for name in names):
        if path.is_file():
            return path
    raise InvalidInputError(
        f"found no {names[0]} in {data}; give data=FOLDER, the folder that fairseq-preprocess wrote"
    )


def read_dictionary(path: Path, size: int) -> Dictionary:
    """Read a dictionary.

    Args:
        path: a file of lines ``piece count``, as fairseq writes it; a line that ends with ``#fairseq:overwrite``
            replaces an earlier one with the same piece.
        size: number of rows of the embedding. fairseq pads a dictionary to a multiple of 8 with symbols
            ``madeupwordNNNN``; they are added if the file lacks them.

    Raises:
        InvalidInputError: a line is malformed, a piece is listed twice, or the size differs otherwise.
    """
    symbols, indices = list(SPECIAL), {symbol: index for index, symbol in enumerate(SPECIAL)}
    for piece in _pieces(path):
        indices[piece] = len(symbols)
        symbols.append(piece)
    missing = size - len(symbols)
    if size % 8 == 0 and 0 < missing < 8:
        for piece in _made_up(indices, missing):
            indices[piece] = len(symbols)
            symbols.append(piece)
    if len(symbols) != size:
        found = (
            f"{path} and the special symbols make {len(symbols)} pieces, but the checkpoint's embedding has {size} rows"
        )
        raise InvalidInputError(f"{found}; give the dictionaries that the model was trained with")
    return Dictionary(tuple(symbols), indices)


def _pieces(path: Path) -> Iterable[str]:
    seen = set(SPECIAL)
    for number, line in read_lines(path):
        with located(path, number):
            piece, overwrite = _parse(line)
            if piece in seen and not overwrite:
                found = f"got the piece {quoted(piece)} a second time"
                raise InvalidInputError(f"{found}; mark the line with {_OVERWRITE} to replace the first")
        seen.add(piece)
        yield piece


def _parse(line: str) -> tuple[str, bool]:
    text = line.rstrip()
    overwrite = text.endswith(f" {_OVERWRITE}")
    piece, space, count = text.removesuffix(f" {_OVERWRITE}").rpartition(" ")
    if not space or not count.isdecimal():
        raise InvalidInputError(f"got {quoted(text)}, expected a piece, a space and its count")
    return piece, overwrite


def _made_up(taken: Mapping[str, int], number: int) -> list[str]:
    names = (f"madeupword{index:04d}" for index in range(len(taken) + number))
    return [name for name in names if name not in taken][:number]

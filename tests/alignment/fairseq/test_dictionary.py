"""fairseq's dictionaries, read as fairseq reads them."""

from pathlib import Path

import pytest

from alignment.fairseq.tokenizer import find_dictionary, read_dictionary
from captum_norm import InvalidInputError

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def test_ids_follow_the_lines(tmp_path: Path) -> None:
    # A line may hold any white space but a line break before the last space.
    path = write(tmp_path / "dict.fr.txt", "le 10\nl\u2028a 3\r\n\u00a0 2\n▁é 0\n")
    dictionary = read_dictionary(path, 8)
    assert dictionary.symbols == (*SPECIAL, "le", "l\u2028a", "\u00a0", "▁é")
    assert [dictionary.index(piece) for piece in ("le", "l\u2028a", "\u00a0", "▁é", "la")] == [4, 5, 6, 7, 3]


@pytest.mark.parametrize("piece", SPECIAL)
def test_text_never_becomes_a_special_symbol(tmp_path: Path, piece: str) -> None:
    assert read_dictionary(write(tmp_path / "dict.fr.txt", "le 10\n"), 5).index(piece) == 3


def test_a_later_line_overwrites_if_marked(tmp_path: Path) -> None:
    path = write(tmp_path / "dict.fr.txt", "a 3\nb 2\na 9 #fairseq:overwrite\n<unk> 9 #fairseq:overwrite\n")
    dictionary = read_dictionary(path, 8)
    assert dictionary.symbols == (*SPECIAL, "a", "b", "a", "<unk>")
    assert (dictionary.index("a"), dictionary.index("b")) == (6, 5)


def test_missing_padding_is_made_up(tmp_path: Path) -> None:
    path = write(tmp_path / "dict.fr.txt", "a 3\nmadeupword0001 0\nb 2\n")
    assert read_dictionary(path, 7).symbols[4:] == ("a", "madeupword0001", "b")
    assert read_dictionary(path, 8).symbols[7:] == ("madeupword0000",)
    assert read_dictionary(write(path, "a 3\nmadeupword0001 0\n"), 8).symbols[6:] == (
        "madeupword0000",
        "madeupword0002",
    )


@pytest.mark.parametrize("size", [5, 6, 9, 16])
def test_another_size_is_refused(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "dict.fr.txt", "a 3\nb 2\nc 1\n")
    with pytest.raises(InvalidInputError, match=f"make 7 pieces, but the checkpoint's embedding has {size} rows"):
        read_dictionary(path, size)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 3\nb\n", "line 2: got 'b', expected a piece, a space and its count"),
        ("a 3\nb two\n", "line 2: got 'b two'"),
        ("a 3\n\n", "line 2: got ''"),
        ("a 3\nb 2\na 1\n", "line 3: got the piece 'a' a second time"),
        ("</s> 3\n", "line 1: got the piece '</s>' a second time"),
    ],
)
def test_lines_of_another_form_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_dictionary(write(tmp_path / "dict.fr.txt", text), 8)


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "dict.fr.txt"
    path.write_bytes("é 3\n".encode("latin-1"))
    with pytest.raises(InvalidInputError, match="line 1: got byte 0xe9 at byte 1 of the line, expected UTF-8"):
        read_dictionary(path, 5)


def test_the_dictionary_of_the_language_goes_before_the_joint_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"found no dict\.fr\.txt in"):
        find_dictionary(tmp_path, "fr")
    joint = write(tmp_path / "dictionary.txt", "a 1\n")
    assert find_dictionary(tmp_path, "fr") == joint
    own = write(tmp_path / "dict.fr.txt", "a 1\n")
    assert find_dictionary(tmp_path, "fr") == own
    assert find_dictionary(tmp_path, "en") == joint

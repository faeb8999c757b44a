"""The text that a command is given: what is a file, what is text, and what is neither."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import alignment.cli
from captum_norm import InvalidInputError, cli
from captum_norm.commands.shared import given_text, output_folder, output_path
from captum_norm.loading import load

ARGUMENT = b"caf\xe9 noir".decode("utf-8", "surrogateescape")
"""What Python makes of an argument in Latin-1."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "two.txt": b"a dog runs\nthe cat sees\n",
        "bom.txt": "\ufeffa\u2028dog\r\nruns".encode(),
        "latin.txt": "a caf\xe9".encode("latin-1"),
        "utf16.txt": "a dog runs\nthe cat".encode("utf-16"),
        "utf16be.txt": b"\xfe\xff" + "a dog runs".encode("utf-16-be"),
        "utf16le.txt": "a dog runs".encode("utf-16-le"),
        "a word": b"the cat",
    }.items():
        Path(name).write_bytes(content)
    Path("folder").mkdir()


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    for place in ("captum_norm.loading.load", "alignment.commands.models.load"):
        monkeypatch.setattr(place, loaded)


def stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("two.txt", "a dog runs\nthe cat sees\n"),
        ("./two.txt", "a dog runs\nthe cat sees\n"),
        ("bom.txt", "a\u2028dog\nruns"),
        ("a word", "the cat"),
        ("A dog runs.", "A dog runs."),
        ("It is in two.txt", "It is in two.txt"),
        ("e.g.", "e.g."),
        ("3.14", "3.14"),
        ("and/or", "and/or"),
        ("folder", "folder"),
        ("...", "..."),
        ("word " * 100, "word " * 100),
        ("x" * 5000, "x" * 5000),
    ],
)
def test_files_and_texts(argument: str, text: str) -> None:
    assert given_text(argument, is_text=False) == text
    assert given_text(argument, is_text=True) == argument


@pytest.mark.parametrize("name", ["nosuch.txt", "./nosuch", "/no/such", "~/nosuch", "no/such.tsv", "..\\x.csv", "x.en"])
def test_what_looks_like_a_file_is_one_or_an_error(name: str) -> None:
    with pytest.raises(InvalidInputError, match="there is no such file; if it is the text itself, say --text"):
        given_text(name, is_text=False)
    assert given_text(name, is_text=True) == name


def test_a_folder_is_no_file() -> None:
    with pytest.raises(InvalidInputError, match=r"^cannot read \./folder: there is no such file; if it is the text"):
        given_text("./folder", is_text=False)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a caf\xe9", "got byte 0xe9 at byte 6 of the file, expected UTF-8"),
        ("a".encode("utf-16"), "got byte 0xff at byte 1 of the file, expected UTF-8"),
        ("ab".encode("utf-16-be"), "got the character NUL at character 1 of the file, as in UTF-16"),
    ],
)
def test_standard_input_is_utf_8_whatever_the_locale(
    content: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin(monkeypatch, "é好\n".encode())
    assert given_text("-", is_text=False) == "é好\n"
    stdin(monkeypatch, content)
    with pytest.raises(InvalidInputError) as caught:
        given_text("-", is_text=False)
    assert str(caught.value).startswith(f"standard input: {reason}")


def complaint(main: Callable[[list[str]], int], words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    before = sorted(Path().rglob("*"))
    assert main(words) == 2, words
    output, said = capsys.readouterr()
    assert output == ""
    assert said.count("\n") == 1, said
    assert sorted(Path().rglob("*")) == before, words
    return said.partition(": error: ")[2].rstrip("\n")


NO_FILE = "cannot read nosuch.txt: there is no such file"
REFUSED = [
    *([command, ARGUMENT] for command in ("explain", "compare")),
    *(["explain", f"{name}.txt"] for name in ("nosuch", "latin", "utf16", "utf16be", "utf16le")),
    ["compare", "nosuch.txt"],
    ["compare", "two.txt", "--out=nosuch/x.json"],
    ["compare", "two.txt", "--out=folder/x.jpg"],
    ["explain", "a dog", "--out=/proc/x.json"],
    ["models", "--check=MODEL", "--out=nosuch/x.json"],
    ["compare", "two.txt", f"--out={'x' * 300}.csv"],
    ["models", f"--check={'x' * 300}"],
    *(["analyze", "mixing-ratio", f"--corpus={name}.txt"] for name in ("nosuch", "utf16")),
    *(["analyze", "mixing-ratio", f"--out={out}"] for out in ("two.txt", "two.txt/x", "no/such", "/proc/x")),
]  # fmt: skip


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: ascii(" ".join(words)))
def test_bad_input_is_one_sentence(words: list[str], bert: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder.json").mkdir()
    words = [word.replace("MODEL", bert) for word in words]
    words += [] if words[0] == "models" else ["--model", bert]
    said = complaint(cli.main, words, capsys)
    assert any(part in said for part in ("UTF-", "there is no", "cannot ", "must end in"))
    assert ("--text" in said) == ("nosuch.txt" in words)


ALIGN = [
    *(["extract", f"{name}.txt"] for name in ("two", "nosuch", "latin", "utf16")),
    *(["extract", "two.txt", "two.txt", f"--out={out}"] for out in ("no/such", "folder", "x" * 300)),
    ["translate", "two.txt", "--references=utf16.txt"],
    *(["sweep", f"--out={out}"] for out in ("nosuch/folder", "two.txt")),
    ["evaluate", "two.txt", "x" * 300, "--gold-base=0"],
]


@pytest.mark.parametrize("words", ALIGN, ids=" ".join)
@pytest.mark.usefixtures("nothing_loaded")
def test_bad_input_is_one_sentence_before_a_model_is_loaded(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint(alignment.cli.main, words, capsys)


@pytest.mark.parametrize("command", ["extract", "translate"])
def test_standard_input_of_which_nothing_can_be_read(
    command: str, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    for content in (b"caf\xe9\n", "a ||| b\n".encode("utf-16")):
        stdin(monkeypatch, content)
        assert alignment.cli.main([command, "-", "--quiet"]) == 2
        output, said = capsysbinary.readouterr()
        assert output == b""
        assert said.count(b"\n") == 1
        assert b"line 1: got" in said


def test_explain_reads_files(bert: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("dog.txt").write_text("a dog runs\n", encoding="utf-8")
    said = []
    for words in (["a dog runs"], ["dog.txt"]):
        assert cli.main(["explain", *words, "--model", bert]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert cli.main(["explain", "dog.txt", "--text", "--model", bert]) == 0
    assert capsys.readouterr().out != said[0]
    assert load(bert)[1].tokenize("dog.txt") == ["dog", ".", "[UNK]"]


def test_places_to_write() -> None:
    assert output_path(".json")("folder/x.JSON") == Path("folder/x.JSON")
    assert output_folder("folder") == Path("folder")
    assert output_folder("folder/new") == Path("folder/new")
    assert not Path("folder/new").exists()

"""``norm-align symmetrize``: links of any aligner are merged as the API does, or refused before anything is written."""

from pathlib import Path

import pytest

from alignment import cli
from alignment.symmetrization import SYMMETRIZATIONS
from tests.alignment.commands.conftest import Refused
from tests.alignment.commands.texts import set_stdin, write

FORWARD = ["0-0 1-1 2-2", "", "3-1"]
REVERSE = ["0-0 2-1 2-2", "0-0", "3-1 2-0"]
SWAPPED_FROM_1 = ["1-1 2-3 3-3", "1-1", "2-4 1-3"]  # REVERSE with the target first
INTERSECTION, UNION = "0-0 2-2\n\n3-1\n", "0-0 1-1 2-1 2-2\n0-0\n2-0 3-1\n"


@pytest.fixture(autouse=True)
def _files() -> None:
    write("forward", FORWARD)
    write("reverse", REVERSE)
    write("swapped", SWAPPED_FROM_1)


@pytest.mark.parametrize("reverse", ["reverse", "swapped:swapped:base1", "-"])
def test_heuristics_and_files(
    reverse: str, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    found = {}
    for name in SYMMETRIZATIONS:
        set_stdin(monkeypatch, REVERSE)
        assert cli.main(["symmetrize", "forward", reverse, f"--heuristic={name}", "--out=links", "--overwrite"]) == 0
        found[name] = Path("links").read_text(encoding="ascii")
    assert (found["intersection"], found["union"]) == (INTERSECTION, UNION)
    assert found["grow-diag"] == "0-0 1-1 2-2\n\n2-0 3-1\n"
    assert found["grow-diag-final"] == "0-0 1-1 2-2\n0-0\n2-0 3-1\n"
    set_stdin(monkeypatch, REVERSE)
    assert cli.main(["symmetrize", "forward", reverse]) == 0
    assert capfdbinary.readouterr().out.decode() == found["grow-diag"]


def test_files_of_any_name_and_compression_are_read(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write("x=forward", REVERSE)
    assert cli.main(["symmetrize", "x=forward", "reverse", "--heuristic=union"]) == 0
    assert capfdbinary.readouterr().out.decode().split("\n") == [*REVERSE[:2], "2-0 3-1", ""]
    for name in ("links.gz", "links.xz", "links.bz2"):
        assert cli.main(["symmetrize", "forward", "reverse", "--heuristic=union", f"--out={name}"]) == 0
        assert Path(name).read_bytes() != UNION.encode()
        assert cli.main(["symmetrize", name, name, "--heuristic=union"]) == 0
        assert capfdbinary.readouterr().out.decode() == UNION


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["forward", "short"], "short, line 3: got no such line, but forward has one; expected equally many in both"),
        (["short", "reverse"], "short, line 3: got no such line, but reverse has one"),
        (["forward", "bad"], "bad, line 2: got '1p1', expected i-j"),
        (["forward", "reverse:base1"], "reverse, line 1: got the index 0, expected indices from 1; leave out :base1"),
        (["-", "-"], "got - more than once; standard input can be read only once"),
        (["forward", "none"], "cannot read none: there is no such file"),
        (["forward", "reverse", "--out=forward", "--overwrite"], "cannot write forward: it is the input"),
        (["forward", "reverse", "--out=swapped"], "swapped exists already; give another name"),
    ],
)
def test_what_is_refused_leaves_nothing(refused: Refused, words: list[str], message: str) -> None:
    write("short", REVERSE[:2])
    write("bad", ["0-0", "1p1", "0-0"])
    refused(message, "symmetrize", *words)
    if len(words) == 2:
        refused(message, "symmetrize", *words, "--out=links")

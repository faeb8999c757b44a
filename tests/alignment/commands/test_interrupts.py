"""Ctrl-C at any line of a command of files: nothing half-written, nothing left behind, exit code 130."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

import alignment
import captum_norm
from alignment import Alignment, cli
from alignment.commands import aligners
from tests.alignment.commands.conftest import FILES
from tests.fuzzing import FACTOR, at_line
from tests.runs import extractions
from tests.runs.extractions import check_result, run, write_text

# An interrupt may come before a file is closed, which the garbage collector does then.
pytestmark = [pytest.mark.fuzz, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

ROOTS = (
    str(Path(alignment.__file__).parent),
    *(str(Path(captum_norm.__file__).parent / folder) for folder in ("text", "runs")),
)
COMMANDS = {
    "symmetrize": ["symmetrize", "forward", "reverse", "--out=out.gz"],
    "evaluate": ["evaluate", "gold", "--gold-base=1", "forward", "perfect", "--bootstrap=0", "--csv"],
    "transfer-tags": ["transfer-tags", "tagged", "target", "--reverse-model=none", "--out=out"],
}


@pytest.mark.long
@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupted_command_leaves_the_whole_file_or_none(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("tagged").write_text("<p>a</p><p><b>b</b> c</p>\na\n", encoding="utf-8")
    fake = SimpleNamespace(
        directions=[(SimpleNamespace(tokenizer=None, model=None), False)],
        align_pairs=lambda pairs: [Alignment([(0, 0)]) for _ in pairs],
    )
    monkeypatch.setattr(aligners, "load", lambda *_, **__: (fake, {}))
    monkeypatch.setattr(aligners, "choose", lambda *_: None)
    monkeypatch.setattr(aligners, "check_sides", lambda *_: None)
    out = Path(COMMANDS[name][-1].partition("out=")[2] or "none")

    def written() -> str:
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return out.read_bytes().hex() if out.is_file() else printed.out

    assert cli.main(COMMANDS[name]) == 0
    whole = written()
    out.unlink(missing_ok=True)
    code, left = at_line(10**9, lambda: cli.main(COMMANDS[name]), ROOTS)
    assert code == 0
    lines = 10**9 - left
    draw, before = random.Random(0), {*FILES, "tagged"}
    interrupted = 0
    for number in (*draw.sample(range(1, lines + 1), min(lines, 30 * FACTOR)), *range(lines - 20, lines + 1)):
        out.unlink(missing_ok=True)
        written()
        code, _ = at_line(number, lambda: cli.main(COMMANDS[name]), ROOTS)
        interrupted += code == 130
        assert code in (0, 130)
        assert {path.name for path in Path().iterdir()} - before <= {out.name}
        assert written() in ("", whole)
    assert interrupted > 20


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    pairs = extractions.text(9)
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    _, left = at_line(10**9, lambda: run(source, out), ROOTS)
    lines = 10**9 - left
    for number in random.Random(0).sample(range(1, lines + 1), 60 * FACTOR):
        out.unlink(missing_ok=True)
        at_line(number, lambda: run(source, out), ROOTS)
        assert {path.name for path in tmp_path.iterdir()} <= {"text", "out", "out.parts"}
        if not out.exists():
            run(source, out)
        check_result(source, out, pairs)


@pytest.mark.long
def test_an_interrupted_decode_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matrices, out, before = tmp_path / "matrices", tmp_path / "out", {"matrices", "out", "out.parts"}
    matrices.write_text("a b ||| 0.9,0.1 0.2,0.8 0,1\nc ||| 1 1\n" * 5, encoding="utf-8")
    text = tmp_path / "matrices.text"
    text.write_text("A B\nC\n" * 5, encoding="utf-8")
    words = ["decode", str(matrices), str(text), f"--out={out}", "--block-lines=3", "--quiet"]
    _, left = at_line(10**9, lambda: cli.main(words), ROOTS)
    lines, whole = 10**9 - left, out.read_bytes()
    assert len(whole.split(b"\n")) == 11
    codes = []
    for number in random.Random(0).sample(range(1, lines + 1), 30 * FACTOR):
        out.unlink(missing_ok=True)
        codes.append(at_line(number, lambda: cli.main(words), ROOTS)[0])
        assert {path.name for path in tmp_path.iterdir()} <= before | {text.name}
        if not out.exists():
            assert cli.main(words) == 0
        assert out.read_bytes() == whole
    assert {0, 130} >= set(codes)
    assert codes.count(130) > 20
    assert "Traceback" not in capsys.readouterr().err

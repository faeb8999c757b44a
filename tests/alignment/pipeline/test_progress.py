"""The progress bar."""

import gzip
import io
from pathlib import Path

import pytest

from alignment.pipeline.progress import Progress, count_lines, to_stderr


@pytest.mark.parametrize(("content", "lines"), [(b"", 0), (b"a\nb", 2), (b"a\n\n", 2), (b"a b\n" * 600_000, 600_000)])
def test_lines_of_a_plain_file_are_counted(tmp_path: Path, content: bytes, lines: int) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    assert count_lines(path) == lines


def test_lines_that_would_have_to_be_read_twice_are_not(tmp_path: Path) -> None:
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"a\n"))
    assert count_lines(tmp_path / "text.gz") is None
    assert count_lines(io.BytesIO(b"a\n")) is None


def test_bar_shows_bad_lines_and_messages_stay_above_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text"
    path.write_text("a\n" * 10)
    with Progress(path, shown=True) as bar:
        bar.advance(4, bad=1, fresh=False)
        to_stderr("line 3")
        bar.advance(6, bad=2, fresh=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "line 3\n" in err
    assert "10/10" in err
    assert "bad=3" in err


def test_lines_finished_before_are_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(io.BytesIO(), shown=True) as bar:
        bar.advance(1_000_000_000, bad=0, fresh=False)
    assert "?" in capsys.readouterr().err  # no line was aligned, so there is no rate


def test_no_bar_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(io.BytesIO(), shown=False) as bar:
        bar.advance(4, bad=1, fresh=True)
    assert capsys.readouterr() == ("", "")

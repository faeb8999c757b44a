"""The progress bar."""

import gzip
import io
from pathlib import Path

import pytest
from tqdm import tqdm

from alignment.pipeline.progress import count_lines, line_bar, to_stderr
from captum_norm import progress
from captum_norm.bars import is_asked


@pytest.mark.parametrize(("content", "lines"), [(b"", 0), (b"a\nb", 2), (b"a\n\n", 2), (b"a b\n" * 600_000, 600_000)])
def test_lines_of_a_plain_file_are_counted(tmp_path: Path, content: bytes, lines: int) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    assert count_lines(path) == lines


def test_lines_that_would_have_to_be_read_twice_are_not(tmp_path: Path) -> None:
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"a\n"))
    assert count_lines(tmp_path / "text.gz") is None
    assert count_lines(io.BytesIO(b"a\n")) is None


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each bar shows when it is closed."""
    shown: list[str] = []
    close = tqdm.close

    def closing(bar: "tqdm[object]") -> None:
        if not bar.disable:
            shown.append(str(bar))
        close(bar)

    monkeypatch.setattr(tqdm, "close", closing)
    return shown


def test_bar_shows_bad_lines_and_messages_stay_above_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], closed: list[str]
) -> None:
    path = tmp_path / "text"
    path.write_text("a\n" * 10)
    with line_bar("aligning", path, shown=True) as advance:
        advance(4, 1, False)
        to_stderr("line 3")
        advance(6, 2, True)
        assert not is_asked()  # the model's runs show no bars of their own
    out, err = capsys.readouterr()
    assert out == ""
    assert "line 3\n" in err
    [bar] = closed
    assert bar.startswith("aligning: 100%")
    assert "10.0/10.0" in bar
    assert "bad=3" in bar


def test_lines_finished_before_are_no_speed(closed: list[str]) -> None:
    with line_bar("aligning", io.BytesIO(), shown=True) as advance:
        advance(1_000_000_000, 0, False)
    assert "?" in closed[0]  # no line was aligned, so there is no rate


def test_no_bar_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(delay=0), line_bar("aligning", io.BytesIO(), shown=False) as advance:
        advance(4, 1, True)
    assert capsys.readouterr() == ("", "")

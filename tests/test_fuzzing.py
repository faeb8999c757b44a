"""The tests that draw their cases: the same ones each time, and all of them in ``make fuzz``."""

from contextlib import suppress
from pathlib import Path

import pytest

from tests.fuzzing import FACTOR, HangError, bounded, damaged, limited

FILES = [b"0-0 1-2\n3-3\n", b"le 12\nla 7\n"]


def test_cases_are_the_same_each_time_and_differ_by_their_seed() -> None:
    first, again, other = (list(damaged(FILES, 300, seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert len(first) == 300 * FACTOR
    assert sum(content in FILES for content in first) < len(first) / 10
    assert len(set(first)) > 0.7 * len(first)


def wait_for_ever() -> None:
    while True:
        with suppress(Exception):  # as readers of damaged files may have it
            pass


def test_bounds_hold() -> None:
    with pytest.raises(HangError, match=r"not done after 0\.05 s"), limited(0.05):
        wait_for_ever()
    with limited(0.05):
        pass
    if Path("/proc/self/clear_refs").exists():
        with pytest.raises(AssertionError, match="MiB more were taken"), bounded(20):
            bytearray(b"\1") * (64 << 20)
        with bounded(20):
            bytearray(b"\1") * (1 << 20)


def test_every_file_of_tests_that_draws_more_cases_on_request_is_in_make_fuzz() -> None:
    tests = Path(__file__).parent
    drawing = [
        path
        for path in tests.rglob("test_*.py")
        if path != Path(__file__) and any(name in path.read_text(encoding="utf-8") for name in ("_NORM_FUZZ", "FACTOR"))
    ]
    assert len(drawing) >= 2
    assert [path for path in drawing if "pytest.mark.fuzz" not in path.read_text(encoding="utf-8")] == []

"""What is free, and how much of it is taken."""

from pathlib import Path

import pytest
import torch

from captum_norm import memory
from captum_norm.memory import SHARE, UNKNOWN_FREE, MemoryBudget, free_bytes, readable

CPU, META = torch.device("cpu"), torch.device("meta")
MEBIBYTE = 2**20


@pytest.fixture(name="system")
def pretended_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system with 100 MiB."""
    file = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "_MEMINFO", file)
    file.write_text("MemTotal:  999999 kB\nMemAvailable:  102400 kB\n")
    return file


def test_where_nothing_says_what_is_free_the_budget_is_a_stated_one(system: Path) -> None:
    assert free_bytes(CPU) == 100 * MEBIBYTE
    system.write_text("MemTotal:  999999 kB\n")
    assert free_bytes(CPU) is None
    system.unlink()
    assert free_bytes(CPU) is None
    assert free_bytes(META) is None
    assert MemoryBudget()[CPU] == UNKNOWN_FREE // SHARE


def test_a_budget_is_a_share_of_what_was_free_first(system: Path) -> None:
    budget = MemoryBudget()
    assert budget[CPU] == 25 * MEBIBYTE
    system.write_text("MemAvailable:  4 kB\n")
    assert budget[CPU] == 25 * MEBIBYTE
    assert MemoryBudget()[CPU] == 1024
    assert MemoryBudget(17)[META] == 17


def test_sizes_are_readable() -> None:
    assert (readable(2**30), readable(2**30 - 1), readable(0)) == ("1.0 GiB", "1024.0 MiB", "0.0 MiB")

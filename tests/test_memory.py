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
    """A /proc and a /sys/fs/cgroup of 100 MiB, in which nothing else is said."""
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "groups")
    write(tmp_path / "proc" / "meminfo", "MemTotal:  999999 kB\nMemAvailable:  102400 kB\n")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_system_says_what_is_available(system: Path) -> None:
    assert free_bytes(CPU) == 100 * MEBIBYTE
    write(system / "proc" / "self" / "cgroup", "0::/\n")
    assert free_bytes(CPU) == 100 * MEBIBYTE


def test_a_group_around_this_one_leaves_less(system: Path) -> None:
    write(system / "proc" / "self" / "cgroup", "0::/job/step\n")
    write(system / "groups" / "job" / "step" / "memory.max", "max\n")
    write(system / "groups" / "job" / "step" / "memory.current", "7\n")
    write(system / "groups" / "job" / "memory.max", f"{60 * MEBIBYTE}\n")
    write(system / "groups" / "job" / "memory.current", f"{50 * MEBIBYTE}\n")
    write(system / "groups" / "job" / "memory.stat", f"anon 5\ninactive_file {20 * MEBIBYTE}\n")
    assert free_bytes(CPU) == 30 * MEBIBYTE


@pytest.mark.parametrize("name", ["/of/the/host/not/visible/here", "/../../../of/the/host"])
def test_a_container_sees_its_own_group_at_the_root(name: str, system: Path) -> None:
    write(system / "proc" / "self" / "cgroup", f"0::{name}\n")
    write(system / "groups" / "memory.max", f"{8 * MEBIBYTE}\n")
    write(system / "groups" / "memory.current", f"{9 * MEBIBYTE}\n")
    assert free_bytes(CPU) == 0


def test_groups_of_version_1(system: Path) -> None:
    write(system / "proc" / "self" / "cgroup", "5:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/\n")
    folder = system / "groups" / "memory" / "docker" / "abc"
    write(folder / "memory.limit_in_bytes", f"{40 * MEBIBYTE}\n")
    write(folder / "memory.usage_in_bytes", f"{30 * MEBIBYTE}\n")
    write(folder / "memory.stat", f"total_inactive_file {5 * MEBIBYTE}\n")
    assert free_bytes(CPU) == 15 * MEBIBYTE


def test_where_nothing_says_what_is_free_the_budget_is_a_stated_one(system: Path) -> None:
    (system / "proc" / "meminfo").unlink()
    assert free_bytes(CPU) is None
    assert free_bytes(META) is None
    assert MemoryBudget()[CPU] == UNKNOWN_FREE // SHARE


def test_a_budget_is_a_share_of_what_was_free_first(system: Path) -> None:
    budget = MemoryBudget()
    assert budget[CPU] == 25 * MEBIBYTE
    write(system / "proc" / "meminfo", "MemAvailable:  4 kB\n")
    assert budget[CPU] == 25 * MEBIBYTE
    assert MemoryBudget()[CPU] == 1024
    assert MemoryBudget(17)[META] == 17


def test_sizes_are_readable() -> None:
    assert (readable(2**30), readable(2**30 - 1), readable(0)) == ("1.0 GiB", "1024.0 MiB", "0.0 MiB")

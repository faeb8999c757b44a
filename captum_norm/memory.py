"""Finds the free memory, and the budget of computations in pieces.

Pieces are bounded by the budget; on a CPU, small pieces are also faster, since they stay in the cache. See
:func:`captum_norm.functional.chunks`.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

SHARE = 4
"""The default budget is the free memory divided by this."""

SMALL = 2**26
"""The bytes that a CPU always has for a piece, without checking."""

UNKNOWN_FREE = 4 * 2**30
"""The free memory assumed if it is unknown."""

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class _Account(NamedTuple):
    """The files of one version of control groups, and the entry for reclaimable memory."""

    controller: str
    limit: str
    usage: str
    reclaimable: str


_ACCOUNTS = (
    _Account("", "memory.max", "memory.current", "inactive_file"),
    _Account("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device.

    Args:
        device: a CPU or CUDA device.

    Returns:
        bytes: for a CPU, the memory available in the system, or less if the process's control group (a container, a
        batch job) has less; for a GPU, the memory left in the driver and torch's cache. None if unknown: for other
        devices, and on systems without ``/proc/meminfo``.

    Example:
        >>> free = free_bytes(torch.device("cpu"))
        >>> free is None or free > 0
        True
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _free_here(_PROC, _CGROUPS) if device.type == "cpu" else None


class MemoryBudget(dict[torch.device, int]):
    """The memory that a computation in pieces may use at a time, by device.

    Args:
        given: bytes; None for a quarter of the memory that is free when a device is first used.

    Example:
        >>> MemoryBudget(2**20)[torch.device("cpu")]
        1048576
    """

    def __init__(self, given: int | None = None) -> None:
        super().__init__()
        self._given = given

    def __missing__(self, device: torch.device) -> int:
        if self._given is None:
            free = free_bytes(device)
            self[device] = (UNKNOWN_FREE if free is None else free) // SHARE
        else:
            self[device] = self._given
        return self[device]

    def granted(self, device: torch.device, wanted: int) -> int:
        """Limit the bytes that a piece wants to the budget."""
        if self._given is None and device.type == "cpu" and wanted <= SMALL:
            return wanted
        return min(wanted, self[device])


def readable(size: int) -> str:
    """Format a number of bytes.

    >>> readable(3 * 2**29), readable(5 * 2**20)
    ('1.5 GiB', '5.0 MiB')
    """
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _free_here(proc: Path, cgroups: Path) -> int | None:
    lines = _lines(proc / "meminfo")
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    if available is None:
        return None
    return min([int(available) * 1024, *_left_to_groups(proc, cgroups)])


def _left_to_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """The memory left in the control group of this process and in each enclosing group."""
    for folder, account in _groups(proc, cgroups):
        limit, usage = _lines(folder / account.limit), _lines(folder / account.usage)
        if limit and usage and limit[0] != "max":
            counts = dict(line.split() for line in _lines(folder / "memory.stat"))
            yield max(0, int(limit[0]) - int(usage[0]) + int(counts.get(account.reclaimable, 0)))


@cache
def _groups(proc: Path, cgroups: Path) -> list[tuple[Path, _Account]]:
    found = []
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, name = line.split(":", 2)
        for account in _ACCOUNTS:
            if account.controller in controllers.split(","):
                root = (cgroups / account.controller).resolve()
                own = (root / name.strip("/")).resolve()
                inside = [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
                # A container may see its own group at the root, under a name outside of it.
                found += [(folder, account) for folder in inside or [root]]
    return found


def _lines(file: Path) -> list[str]:
    """The lines of a system file; none if it does not exist or cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []

"""Finds the free memory, and the budget of computations in pieces.

Pieces are bounded by the budget; on a CPU, small pieces are also faster, since they stay in the cache. See
:func:`captum_norm.functional.chunks`.
"""

from contextlib import suppress
from pathlib import Path

import torch

SHARE = 4
"""The default budget is the free memory divided by this."""

SMALL = 2**26
"""The bytes that a CPU always has for a piece, without checking."""

UNKNOWN_FREE = 4 * 2**30
"""The free memory assumed if it is unknown."""

_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device.

    Args:
        device: a CPU or CUDA device.

    Returns:
        bytes: for a CPU, the memory available in the system, whatever a container or batch job may use of it; for a
        GPU, the memory left in the driver and torch's cache. None if unknown: for other devices, and on systems without
        ``/proc/meminfo``.

    Example:
        >>> free = free_bytes(torch.device("cpu"))
        >>> free is None or free > 0
        True
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu":
        with suppress(OSError, StopIteration):
            lines = _MEMINFO.read_text(encoding="ascii").splitlines()
            return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    return None


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

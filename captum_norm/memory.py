"""Finds the free memory, and the budget of computations in pieces, see ``captum_norm.functional.vectors.chunks``."""

from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from captum_norm.functional.vectors import CACHED_ELEMENTS

SHARE = 4  # the default budget is the free memory divided by this
SMALL = 2**26  # the bytes that a CPU always has for a piece, without checking
ACCELERATOR_BYTES = 2**28  # the most that a tensor of a piece takes on an accelerator, which more makes no faster
WORKING_TENSORS = 16  # the tensors as large as a piece's hidden states that exist while a layer is finished
UNKNOWN_FREE = 4 * 2**30  # the free memory assumed if it is unknown
_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a CPU or CUDA device, whatever a container may use of them; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu":
        with suppress(OSError, StopIteration):
            lines = _MEMINFO.read_text(encoding="ascii").splitlines()
            return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    return None


class MemoryBudget(dict[torch.device, int]):
    """The bytes that a computation in pieces may use at a time, by device; by default a quarter of the free memory."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.limit = limit

    def __missing__(self, device: torch.device) -> int:
        if self.limit is None:
            free = free_bytes(device)
            self[device] = (UNKNOWN_FREE if free is None else free) // SHARE
        else:
            self[device] = self.limit
        return self[device]

    def granted(self, device: torch.device, size: int) -> int:
        """Limit the size of a piece to the budget."""
        if self.limit is None and device.type == "cpu" and size <= SMALL:
            return size
        return min(size, self[device])

    def piece_elements(self, like: Tensor) -> int:
        """Number of elements that each tensor of a piece may have: what fits the budget and is fast."""
        size = WORKING_TENSORS * like.element_size()
        fast = CACHED_ELEMENTS * size if like.device.type == "cpu" else ACCELERATOR_BYTES * WORKING_TENSORS
        return self.granted(like.device, fast) // size


def readable(size: int) -> str:
    """Format a number of bytes, such as ``1.5 GiB``."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"

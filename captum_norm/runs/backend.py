"""Where a job runs."""

from dataclasses import dataclass
from typing import Literal

from captum_norm.errors import InvalidInputError


@dataclass(frozen=True)
class RayBackend:
    """Workers on Ray.

    Attributes:
        workers: the number of workers; None for as many as the cluster has room for, which may change.
        address: the address of a cluster, such as ``"auto"`` or ``"ray://head:10001"``; None for that in
            ``RAY_ADDRESS``, or else for this machine alone.
        cpus_per_worker: the number of cores for each worker, and of its threads.
        gpus_per_worker: the number, or share, of GPUs for each worker.
        retries: how often a block is begun again whose worker died.
        skip_bad_blocks: whether to set a block aside that was begun as often as that, rather than to end the run.

    Raises:
        InvalidInputError: a number is out of range.
    """

    workers: int | None = None
    address: str | None = None
    cpus_per_worker: float = 1
    gpus_per_worker: float = 0
    retries: int = 2
    skip_bad_blocks: bool = False

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise InvalidInputError(f"got {self.workers} workers; expected at least 1")
        if not 0 < self.cpus_per_worker < float("inf") or not 0 <= self.gpus_per_worker < float("inf"):
            found = f"got cpus_per_worker={self.cpus_per_worker} and gpus_per_worker={self.gpus_per_worker}"
            raise InvalidInputError(f"{found}; expected more than 0 cores, and 0 GPUs or more")
        if self.retries < 0:
            raise InvalidInputError(f"got {self.retries} retries; expected 0 or more")


Backend = Literal["local", "ray"] | RayBackend
"""Where a job runs: in this process, or by workers on Ray; ``"ray"`` is ``RayBackend()``."""

"""Shares the blocks of a job among workers on Ray, which share the memory of models' weights on each machine."""

import logging
import math
import os
import pickle
import re
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Literal

from captum_norm.errors import CaptumNormError, InvalidInputError
from captum_norm.runs.blocks import Block
from captum_norm.runs.job import Job, Monitor, RayBackend, Step, finish_block, finished_step
from captum_norm.runs.journal import Journal
from captum_norm.versions import versions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Arrays = list[NDArray[np.uint8]]

_POLL_SECONDS = 1.0
_SCALE_SECONDS = 5.0
_CONNECT_SECONDS = 10.0
_PATIENCE_SECONDS = 60.0
_MOST_FAILED_STARTS = 3
_LEAST_BYTES = 1 << 16


@dataclass(eq=False)
class _Call:
    """A call of a worker, and how many have died of it."""

    method: Literal["load", "work", "finish"]
    arguments: tuple[Any, ...] = ()
    deaths: int = 0

    def __str__(self) -> str:
        if self.method != "work":
            return f"the step {self.method}"
        (block,) = self.arguments
        return f"{block} ({', '.join(part.source for part in block.parts)})"


class WorkerHandle:
    """The driver's record of a worker: actor, call in progress, and whether it has loaded the job."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.ready = False
        self.start(_Call("load"))

    def start(self, call: _Call) -> None:
        """Let the worker do a call."""
        self.call: _Call | None = call
        self.answer = self.actor.call.remote(call.method, *call.arguments)


def run_on_ray(job: Job, backend: RayBackend, journal: Journal, monitor: Monitor) -> Any:
    """Run a job by workers on Ray; its journal is open."""

    def calls() -> Iterator[_Call]:
        for block in job.blocks():
            monitor.handed(block)
            yield _Call("work", (block,))

    with _connected(backend) as ray:
        driver = _Driver(ray, job, journal, monitor, backend)
        try:
            for call, step in driver.answers(calls()):
                monitor.done(call.arguments[0], step)
            (finished,) = driver.answers([_Call("finish", (monitor.blocks,))])
        finally:
            driver.kill_workers()
    return finished[1]


class _Driver:
    """Gives calls to workers, one at a time, and again to others if a worker dies."""

    def __init__(self, ray: Any, job: Job, journal: Journal, monitor: Monitor, backend: RayBackend) -> None:
        self._ray, self._job, self._journal, self._monitor, self._backend = ray, job, journal, monitor, backend
        content, arrays = dumps(job)
        threads = max(1, int(backend.cpus_per_worker))
        self._arguments = ray.put(content), ray.put(arrays), versions(), str(Path.cwd()), threads
        self._workers: list[WorkerHandle] = []
        self._again = deque[_Call]()
        self._started = self._failed_starts = 0
        self._scaled = -math.inf
        self._waiting_since = time.monotonic()

    def kill_workers(self) -> None:
        """End all workers."""
        for worker in self._workers:
            self._ray.kill(worker.actor)

    def answers(self, calls: Iterable[_Call]) -> Iterator[tuple[_Call, Any]]:
        """Let the workers do the calls, in any order; yield each with what it returned."""
        todo = iter(calls)
        more = True
        while more or self._again or any(worker.call and worker.ready for worker in self._workers):
            self._scale()
            for worker in self._workers:
                if worker.call is None and (more or self._again):
                    call = self._again.popleft() if self._again else next(todo, None)
                    if call is None:
                        more = False
                    else:
                        worker.start(call)
            working = {worker.answer: (worker, worker.call) for worker in self._workers if worker.call}
            answered = self._ray.wait(list(working), timeout=_POLL_SECONDS)[0] if working else []
            for reference in answered:
                yield from self._take(*working[reference])
            self._monitor.workers = sum(worker.ready for worker in self._workers)
            self._monitor.tick()
            self._say_if_waiting()

    def _say_if_waiting(self) -> None:
        """Tell the user once that no worker has begun for long."""
        if self._monitor.workers:
            self._waiting_since = math.inf
        elif time.monotonic() - self._waiting_since > _PATIENCE_SECONDS:
            self._waiting_since = math.inf
            needed = f"{self._backend.cpus_per_worker:g} cores and {self._backend.gpus_per_worker:g} GPUs"
            there = ", ".join(
                f"{number:g} {name}" for name, number in self._ray.cluster_resources().items() if name in ("CPU", "GPU")
            )
            self._monitor.report(f"still waiting for a worker, which needs {needed}; the cluster has {there}")

    def _take(self, worker: WorkerHandle, call: _Call) -> Iterator[tuple[_Call, Any]]:
        """Take what a worker has answered; if it died, it is removed and its call begun again."""
        try:
            answer = self._ray.get(worker.answer)
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError as error:
            self._workers.remove(worker)
            self._ray.kill(worker.actor)
            self._scaled = -math.inf
            yield from self._begin_again(call, _reason(error))
            return
        worker.call = None
        if isinstance(answer, InvalidInputError):
            raise answer
        if call.method == "load":
            worker.ready, self._failed_starts = True, 0
        else:
            yield call, answer

    def _begin_again(self, call: _Call, reason: str) -> Iterator[tuple[_Call, Any]]:
        """Begin the call of a dead worker again, unless it was finished, or has killed as many workers as it may."""
        if call.method == "load":
            self._failed_starts += 1
            self._monitor.retry("loading the job", reason)
            if self._failed_starts >= _MOST_FAILED_STARTS * (len(self._workers) + 1):
                raise InvalidInputError(f"{self._failed_starts} workers died while they loaded the job: {reason}")
            return
        step = finished_step(self._job, self._journal, *call.arguments) if call.method == "work" else None
        if step is not None:  # it died before it could say so
            yield call, step
            return
        self._monitor.retry(str(call), reason)
        call.deaths += 1
        if call.deaths <= self._backend.retries:
            self._again.append(call)
        else:
            raise InvalidInputError(f"{call} killed {call.deaths} workers ({reason})")

    def _scale(self) -> None:
        """Start workers, as many as are missing."""
        if time.monotonic() - self._scaled < _SCALE_SECONDS:
            return
        self._scaled = time.monotonic()
        backend = self._backend
        while len(self._workers) < (backend.workers or self._room()):
            self._started += 1
            actor_class = self._ray.remote(Worker).options(
                name=f"{self._job.title} {self._job.output}, worker {self._started} ({token_hex(4)})",
                num_cpus=backend.cpus_per_worker,
                num_gpus=backend.gpus_per_worker,
            )
            self._workers.append(WorkerHandle(actor_class.remote(*self._arguments)))

    def _room(self) -> int:
        """The number of workers that the cluster has room for, at least 1."""
        needed = {"CPU": self._backend.cpus_per_worker, "GPU": self._backend.gpus_per_worker}
        nodes = (node["Resources"] for node in self._ray.nodes() if node["Alive"])
        rooms = (min(int(node.get(name, 0) / number) for name, number in needed.items() if number) for node in nodes)
        return max(1, sum(rooms))


def _reason(error: Exception) -> str:
    """Find why an actor died in Ray's message, after a general line and indented fields."""
    first, *others = [line for line in str(error).splitlines() if not line.startswith("\t")]
    return others[0] if others else first


@contextmanager
def _connected(backend: RayBackend) -> Iterator[Any]:
    """Connect to Ray; a connection that exists is used and stays."""
    # Deaths of workers are told by the monitor.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed|Raylet is terminated")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise InvalidInputError("several workers need Ray: pip install 'captum-norm[cluster]'") from error
    if ray.is_initialized():
        yield ray
        return
    address = backend.address or os.environ.get("RAY_ADDRESS")
    _check_address(address)
    options: dict[str, Any] = {"address": address}
    if address is None:
        cores = None if backend.workers is None else math.ceil(backend.workers * backend.cpus_per_worker)
        options = {"address": "local", "num_cpus": cores, "include_dashboard": False}
    with nullcontext() if address else _on_loopback():
        try:
            ray.init(**options, namespace="captum-norm", logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = str(error).strip().partition("\n")[0]
            where = "start Ray on this machine" if address is None else f"reach a Ray cluster at {address}"
            raise InvalidInputError(f"cannot {where}: {reason}") from error
        try:
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray's processes listen to this machine alone, as they do on macOS; elsewhere it takes no loopback address."""
    from ray._private import ray_constants as constants

    name = constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before, enabled = os.environ.get(name), constants.ENABLE_RAY_CLUSTER
    try:
        os.environ[name], constants.ENABLE_RAY_CLUSTER = "0", False
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled
        os.environ.pop(name)
        os.environ.update({} if before is None else {name: before})


def _check_address(address: str | None) -> None:
    """Refuse an address that does not answer, for which Ray itself would wait for many minutes."""
    if parts := re.fullmatch(r"(?:ray://)?\[?([^/\]]+)\]?:(\d{1,5})/?", address or ""):
        try:
            socket.create_connection((parts[1], int(parts[2])), timeout=_CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise InvalidInputError(f"cannot reach a Ray cluster at {address}: {error}") from error


class Worker:
    """Loads a job, then works on its blocks."""

    def __init__(
        self, content: bytes, arrays: "Arrays", expected: Mapping[str, str], folder: str, threads: int
    ) -> None:
        # Ray sets it, too, but not if the driver has another number. Torch is not imported yet.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        self._content, self._arrays, self._expected = content, arrays, expected
        with suppress(OSError):  # this node may not have the driver's folder, from which relative paths start
            os.chdir(folder)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method; an error of the user's is returned, since the process survives it."""
        try:
            return getattr(self, f"_{method}")(*arguments)
        except CaptumNormError as error:
            return InvalidInputError(f"{error} (a worker on {socket.gethostname()}, process {os.getpid()})")

    def _load(self) -> None:
        """Load the job and check that the folder of the run is here."""
        here = versions()
        for name, version in self._expected.items():
            if here.get(name) != version:
                message = f"got {name} {here.get(name)}, expected {version} as in the process that started the job"
                raise InvalidInputError(f"{message}; install the same versions on all nodes")
        try:
            self._job: Job = loads(self._content, self._arrays)
        except Exception as error:
            reason = f"cannot load the job ({type(error).__name__}: {error})"
            raise InvalidInputError(f"{reason}; its code must be installed on all nodes") from error
        self._do = self._job.worker()
        self._journal = Journal(self._job.output, self._job.identity)
        self._journal.expect_job()

    def _work(self, block: Block) -> Step:
        """Finish a block."""
        return finish_block(self._job, self._journal, self._do, block)

    def _finish(self, number: int) -> Any:
        """Make the result of the job, of so many blocks."""
        return self._job.finish(self._journal, number)


def dumps(value: object) -> "tuple[bytes, Arrays]":
    """Pickle an object; the memory of large CPU tensors comes apart, as arrays, which Ray stores once on a machine."""
    from ray import cloudpickle

    torch = sys.modules.get("torch")  # if nothing has imported it, there are no tensors
    arrays: Arrays = []
    indices: dict[tuple[int, int], int] = {}

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, item: Any) -> Any:
            if torch is None or not isinstance(item, torch.storage.TypedStorage):
                return None
            storage = item.untyped()
            if storage.device.type != "cpu" or storage.nbytes() < _LEAST_BYTES:
                return None
            index = indices.setdefault((storage.data_ptr(), storage.nbytes()), len(arrays))
            if index == len(arrays):
                arrays.append(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
            return index, item.dtype

    stream = BytesIO()
    with _quiet():
        Pickler(stream, protocol=5).dump(value)  # type: ignore[no-untyped-call]  # Ray's has no types
    return stream.getvalue(), arrays


def loads(content: bytes, arrays: "Arrays") -> Any:
    """Restore an object from :func:`dumps`; its large tensors share memory with the arrays."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            import torch

            index, dtype = pid
            storage = torch.from_numpy(arrays[index]).untyped_storage()
            return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype)

    with _quiet():
        return Unpickler(BytesIO(content)).load()


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch itself pickles storages so, and nothing here writes into weights.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated|The given NumPy array is not writable")
        yield

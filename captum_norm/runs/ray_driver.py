"""Gives the blocks of a job to workers on Ray, on this machine or a cluster."""

import logging
import math
import os
import re
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, Self, TypeVar

from captum_norm.errors import InvalidInputError
from captum_norm.runs.backend import RayBackend
from captum_norm.runs.blocks import Block
from captum_norm.runs.job import Job, Step, finished_step, nodes
from captum_norm.runs.journal import Journal, Record
from captum_norm.runs.monitor import Monitor
from captum_norm.runs.worker import Failure, Worker
from captum_norm.versions import versions

Result = TypeVar("Result")

_CALLS_AHEAD = 2
"""The number of calls that a worker is given at a time: it begins the next before the driver hears of the last."""

_POLL_SECONDS = 1.0
_SCALE_SECONDS = 5.0
_NODE_SECONDS = 20.0
_CONNECT_SECONDS = 10.0
_PATIENCE_SECONDS = 60.0
_MOST_FAILED_STARTS = 3


@dataclass(eq=False)
class _Call:
    """A call of a worker's method.

    Attributes:
        method: the name of the method.
        arguments: its arguments.
        deaths: the nodes of workers that died of it, but for nodes known to be lost.
    """

    method: str
    arguments: tuple[Any, ...] = ()
    deaths: list[str] = field(default_factory=list)


class _Hand:
    """A worker, as the driver knows it.

    Attributes:
        actor: its handle on Ray.
        calls: the calls it was given, each with the reference to its result, in their order.
        node: the ID of its node, once it has loaded the job.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.calls = deque[tuple[Any, _Call]]()
        self.node: str | None = None
        self.give(_Call("prepare"))

    @property
    def ready(self) -> bool:
        """Whether it has loaded the job."""
        return self.node is not None

    def give(self, call: _Call) -> None:
        """Let the worker do a call after those it has."""
        self.calls.append((getattr(self.actor, call.method).remote(*call.arguments), call))


def run_on_ray(job: Job[Result], backend: RayBackend, journal: Journal, monitor: Monitor) -> Result:
    """Run a job by workers on Ray; its journal is open.

    Raises:
        InvalidInputError: Ray is not installed or not reached, a worker cannot load the job, or a block kills its
            workers.
    """
    with _connected(backend) as ray, _Driver(ray, job, journal, monitor, backend) as driver:

        def calls() -> Iterator[_Call]:
            for block in job.blocks():
                monitor.handed(block)
                yield _Call("work", (block,))

        for call, step in driver.answers(calls()):
            monitor.done(call.arguments[0], step)
        number = monitor.blocks
        level = 0
        while type(job).combine is not Job.combine and nodes(number, level + 1) > 1:
            level += 1
            combining = (_Call("combine", (number, level, index)) for index in range(nodes(number, level)))
            deque(driver.answers(combining), maxlen=0)
        results: list[Result] = [answer for _, answer in driver.answers([_Call("finish", (number, level))])]
    return results[0]


class _Driver:
    """Gives calls to workers, and again to others if a worker dies."""

    def __init__(self, ray: Any, job: Job[Any], journal: Journal, monitor: Monitor, backend: RayBackend) -> None:
        self._ray, self._job, self._journal, self._monitor, self._backend = ray, job, journal, monitor, backend
        from captum_norm.runs.shared import dumps

        content, arrays = dumps(job)
        self._arguments = (
            ray.put(content),
            ray.put(arrays),
            versions(),
            str(Path.cwd()),
            max(1, int(backend.cpus_per_worker)),
        )
        self._hands: list[_Hand] = []
        self._again = deque[_Call]()
        self._started = self._failed_starts = 0
        self._scaled = -math.inf
        self._waiting_since = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for hand in self._hands:
            self._ray.kill(hand.actor)

    def answers(self, calls: Iterable[_Call]) -> Iterator[tuple[_Call, Any]]:
        """Let the workers do the calls, in any order; yield each with what it returned.

        Raises:
            InvalidInputError: one failed, or its workers died as often as they may.
        """
        todo = iter(calls)
        more = True
        while more or self._again or any(hand.calls for hand in self._hands if hand.ready):
            self._scale()
            more = self._give(todo) and more
            pending = {reference: hand for hand in self._hands for reference, _ in hand.calls}
            done = self._ray.wait(list(pending), num_returns=1, timeout=_POLL_SECONDS)[0] if pending else []
            for reference in done:
                yield from self._take(pending[reference])
            self._monitor.workers = sum(hand.ready for hand in self._hands)
            self._monitor.tick()
            self._say_if_waiting()

    def _give(self, todo: Iterator[_Call]) -> bool:
        """Give the workers what they have room for, to all of them in turn; return False if nothing is left."""
        for ahead in range(_CALLS_AHEAD):
            for hand in self._hands:
                if hand.ready and len(hand.calls) <= ahead:
                    call = self._again.popleft() if self._again else next(todo, None)
                    if call is None:
                        return False
                    hand.give(call)
        return True

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

    def _take(self, hand: _Hand) -> Iterator[tuple[_Call, Any]]:
        """Take what a worker has finished."""
        errors = self._ray.exceptions
        while hand.calls:
            reference, call = hand.calls[0]
            try:
                answer = self._ray.get(reference, timeout=0)
            except errors.GetTimeoutError:
                return
            except errors.RayTaskError:
                raise
            except errors.RayError as error:
                yield from self._lost(hand, _reason(error))
                return
            hand.calls.popleft()
            if isinstance(answer, Failure):
                raise InvalidInputError(answer.message)
            if call.method == "prepare":
                hand.node, self._failed_starts = answer, 0
            else:
                yield call, answer

    def _lost(self, hand: _Hand, reason: str) -> Iterator[tuple[_Call, Any]]:
        """Take the calls of a dead worker back; only the first that is not finished can have killed it."""
        most_failed_starts = _MOST_FAILED_STARTS * len(self._hands)
        self._hands.remove(hand)
        self._ray.kill(hand.actor)
        self._scaled = -math.inf
        if hand.node is None:
            self._failed_starts += 1
            self._monitor.retry("loading the job", reason)
            if self._failed_starts >= most_failed_starts:
                raise InvalidInputError(f"{self._failed_starts} workers died while they loaded the job: {reason}")
            return
        calls = deque(call for _, call in hand.calls)
        while calls and (step := self._finished(calls[0])) is not None:  # it died before it could say so
            yield calls.popleft(), step
        if not calls:
            return
        first = calls.popleft()
        self._again.extend(calls)
        self._monitor.retry(_described(first), reason)
        first.deaths.append(hand.node)
        if len(first.deaths) > self._backend.retries:
            # A lost node is no fault of the block.
            first.deaths = [node for node in first.deaths if self._lives(node)]
        if len(first.deaths) <= self._backend.retries:
            self._again.appendleft(first)
        elif first.method == "work" and self._backend.skip_bad_blocks:
            yield first, self._set_aside(*first.arguments)
        else:
            message = f"{_described(first)} killed {len(first.deaths)} workers ({reason})"
            advice = "; set such blocks aside with --skip-bad-blocks (skip_bad_blocks=True)" * (first.method == "work")
            raise InvalidInputError(f"{message}{advice}")

    def _finished(self, call: _Call) -> Step | None:
        return finished_step(self._job, self._journal, *call.arguments) if call.method == "work" else None

    def _set_aside(self, block: Block) -> Step:
        record = self._job.set_aside(block)
        notes = {**record.notes, "set_aside": True}
        self._journal.finish(block, Record(notes, record.content))
        self._monitor.set_aside += 1
        return Step(
            notes, fresh=False, messages=[f"{block} killed {self._backend.retries + 1} workers and are set aside"]
        )

    def _scale(self) -> None:
        """Start workers, as many as are missing."""
        if time.monotonic() - self._scaled < _SCALE_SECONDS:
            return
        self._scaled = time.monotonic()
        backend = self._backend
        while len(self._hands) < (backend.workers or self._room()):
            self._started += 1
            actor_class = self._ray.remote(Worker).options(
                name=f"{self._job.title} {self._job.output}, worker {self._started} ({token_hex(4)})",
                num_cpus=backend.cpus_per_worker,
                num_gpus=backend.gpus_per_worker,
            )
            self._hands.append(_Hand(actor_class.remote(*self._arguments)))

    def _lives(self, node: str) -> bool:
        """Whether a node answers: Ray itself notices seconds later that one is lost."""
        here = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        ping = self._ray.remote(lambda: None).options(num_cpus=0, scheduling_strategy=here, max_retries=0)
        try:
            self._ray.get(ping.remote(), timeout=_NODE_SECONDS)
        except self._ray.exceptions.RayError:
            return False
        return True

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


def _described(call: _Call) -> str:
    if call.method != "work":
        return f"the step {call.method}"
    (block,) = call.arguments
    return f"{block} ({', '.join(part.source for part in block.parts)})"


@contextmanager
def _connected(backend: RayBackend) -> Iterator[Any]:
    """Connect to Ray; a connection that exists is used and stays.

    Raises:
        InvalidInputError: Ray is not installed, or the cluster is not reached.
    """
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


def _check_address(address: str | None) -> None:
    """Refuse an address that does not answer, for which Ray itself would wait for many minutes.

    Raises:
        InvalidInputError: it does not answer.
    """
    if found := re.fullmatch(r"(?:ray://)?\[?([^/\]]+)\]?:(\d{1,5})/?", address or ""):
        try:
            socket.create_connection((found[1], int(found[2])), timeout=_CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise InvalidInputError(f"cannot reach a Ray cluster at {address}: {error}") from error

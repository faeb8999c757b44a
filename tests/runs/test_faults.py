"""Workers, nodes and drivers are killed at random; the output is that of an undisturbed run, byte for byte.

``make faults`` kills many more than the usual few.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from captum_norm.runs import RayBackend
from tests.runs import extractions
from tests.runs.aligners import Slow

pytestmark = pytest.mark.long

FAULTS = int(os.environ.get("CAPTUM_NORM_FAULTS", "3"))
"""How often something is killed."""


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A cluster of three nodes with a core each."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    for _ in range(2):
        found.add_node(num_cpus=1)
    yield found
    found.shutdown()


class Run:
    """A run on a cluster, whose driver is a process that can be killed and started again."""

    def __init__(self, cluster: Any, source: Path, out: Path) -> None:
        self.cluster, self.source, self.out = cluster, source, out
        self.start()

    def start(self) -> None:
        backend = RayBackend(address=self.cluster.address, retries=5)
        self.driver = extractions.start(self.source, self.out, align=Slow(0.05), backend=backend)

    def kill_worker(self, rng: random.Random) -> bool:
        workers = [process for process in psutil.process_iter() if called(process).startswith("ray::Worker")]
        if workers:
            rng.choice(workers).kill()
        return bool(workers)

    def kill_node(self, rng: random.Random) -> bool:
        nodes = [node for node in self.cluster.list_all_nodes() if node != self.cluster.head_node]
        self.cluster.remove_node(rng.choice(nodes), allow_graceful=False)
        self.cluster.add_node(num_cpus=1)
        return True

    def kill_driver(self, _: random.Random) -> bool:
        self.driver.kill()
        self.driver.join()
        self.start()
        return True

    def alive(self) -> bool:
        return self.driver.exitcode is None


def called(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def in_time(seconds: float) -> Iterator[Callable[[], None]]:
    """Gives a function that fails when that time is over."""
    end = time.monotonic() + seconds

    def check() -> None:
        assert time.monotonic() < end, "the run hangs"
        time.sleep(0.02)

    yield check


def test_whatever_is_killed_the_output_is_the_same(tmp_path: Path, cluster: Any) -> None:
    rng = random.Random(FAULTS)
    pairs = extractions.text(600)
    source, out = extractions.write_text(tmp_path / "text", pairs), tmp_path / "out"
    run = Run(cluster, source, out)
    left = [kind for _ in range(FAULTS) for kind in (Run.kill_worker, Run.kill_node, Run.kill_driver)][:FAULTS]
    rng.shuffle(left)
    while left:
        with in_time(120) as check:
            goal = extractions.finished(out) + rng.randrange(1, 12)
            while run.alive() and extractions.finished(out) < goal:
                check()
        if not run.alive():
            assert run.driver.exitcode == 0
            extractions.check_result(source, out, pairs)
            out.unlink()
            run.start()
        elif left[-1](run, rng):
            left.pop()
    run.driver.join(300)
    assert run.driver.exitcode == 0
    extractions.check_result(source, out, pairs)

"""Fixtures of the whole test suite."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from captum_norm.runs import RayBackend
from tests.fairseq_environment import UnavailableError, fairseq_python


@pytest.fixture(scope="session", name="fairseq_python")
def ready_fairseq_python() -> Path:
    """An interpreter with real fairseq; tests skip where there can be none."""
    try:
        return fairseq_python()
    except UnavailableError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session", name="ray")
def two_workers() -> Iterator[RayBackend]:
    """Two workers on a Ray that is started once."""
    import ray

    ray.init("local", num_cpus=3, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield RayBackend(workers=2)
    ray.shutdown()

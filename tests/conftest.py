"""Fixtures of the whole test suite."""

import gc
import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from captum_norm.runs import RayBackend
from tests.fairseq_environment import UnavailableError, fairseq_python
from tests.object_store import BUCKET, ObjectStore, environment, free_port
from tests.tiers import later

POSIX = ("runs/*", "test_damaged_files.py", "test_hostile_folders.py", "test_interrupts.py", "commands/test_serve.py")
"""What needs signals, forks or pipes with names."""
collect_ignore_glob = POSIX if os.name == "nt" else ()
SLOWEST = ("test_docs.py", "test_readme.py")
"""Files whose tests begin first, lest one process wait for another's at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long what compiles fairseq, starts Ray or a browser, or speaks to S3, and all but few of some cases."""
    some = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        slow = {"chromium", "fairseq_python", "object_store", "ray"}.intersection(getattr(item, "fixturenames", ()))
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if slow or parameters.get("place") == "s3":
            item.add_marker(pytest.mark.long)
        elif item.get_closest_marker("few") and not item.get_closest_marker("long"):
            some[item.nodeid.partition("[")[0]].append(item)
    for cases in some.values():
        marker = cases[0].get_closest_marker("few")
        kept = marker.kwargs.get("cases", 3) if marker else len(cases)
        short = [cases[place * (len(cases) - 1) // (kept - 1)] for place in range(kept)]
        others = [item for item in cases if item not in short]
        for place, item in enumerate(others):
            for mark in later(place):
                item.add_marker(mark)
    items.sort(key=lambda item: item.path.name not in SLOWEST)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what all packages and tests consist of."""
    gc.freeze()


@pytest.fixture(scope="session", name="fairseq_python")
def ready_fairseq_python() -> Path:
    """An interpreter with real fairseq; tests skip where there can be none."""
    try:
        return fairseq_python()
    except UnavailableError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def object_store_port() -> Iterator[int]:
    """The port for an S3 server, which all processes know that are started from now on."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(port).items():
            patch.setenv(name, value)
        yield port


@pytest.fixture(scope="session")
def object_store_server(object_store_port: int) -> Iterator[ObjectStore]:
    """An S3 server that is started once."""
    server = ObjectStore(object_store_port)
    yield server
    server.close()


@pytest.fixture
def object_store(object_store_server: ObjectStore) -> ObjectStore:
    """The S3 server with an empty bucket."""
    for name in object_store_server.tree():
        object_store_server.files.rm_file(f"{BUCKET}/{name}")
    object_store_server.files.clear_multipart_uploads(BUCKET)  # what killed processes began
    object_store_server.requests.clear()
    return object_store_server


@pytest.fixture(params=["path", "memory", "file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The path or URL of an empty folder."""
    if request.param == "s3":
        request.getfixturevalue("object_store")
        yield f"s3://{BUCKET}/folder"
    elif request.param in ("path", "file"):
        (tmp_path / "folder").mkdir()
        yield f"{'file://' if request.param == 'file' else ''}{tmp_path}/folder"
    else:
        yield "memory://folder"
        MemoryFileSystem.store.clear()


@pytest.fixture(scope="session", name="ray")
def two_workers(object_store_port: int) -> Iterator[RayBackend]:  # noqa: ARG001  # its workers know the port
    """Two workers on a Ray that is started once; by default they yield to all other processes, the tests' own, too."""
    import ray

    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "include_dashboard": False}
    ray.init("local", num_cpus=3, _system_config={"worker_niceness": 0}, **quiet)
    yield RayBackend(workers=2)
    ray.shutdown()

"""A run with workers on this machine listens to this machine alone, and leaves Ray's settings as they were."""

import json
import os
import subprocess
import sys
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import psutil
import pytest

from captum_norm.runs import Journal, RayBackend, run_job
from tests.runs.test_blocks import Sum

SCRIPT = """
import os, sys, json
from tests.runs.test_loopback import Listening, run
print(json.dumps(run(sys.argv[1])))
"""


class Listening(Sum):
    """Finds the addresses that the processes of the run listen on while it runs, in a worker."""

    def finish(self, journal: Journal, blocks: int) -> list[tuple[str, str]]:
        assert super().finish(journal, blocks) == 6
        driver = psutil.Process(int(os.environ["DRIVER"]))
        return [
            (process.name(), socket.laddr.ip)
            for process in [driver, *driver.children(recursive=True)]
            for socket in process.net_connections(kind="inet")
            if socket.status == psutil.CONN_LISTEN
        ]


def run(path: str) -> list[tuple[str, str]]:
    """Run it in this process; afterwards Ray is told nothing of it."""
    from ray._private import ray_constants

    os.environ["DRIVER"] = str(os.getpid())
    before = ray_constants.ENABLE_RAY_CLUSTER
    found: list[tuple[str, str]] = run_job(Listening(path), RayBackend(workers=2))
    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR not in os.environ
    assert before == ray_constants.ENABLE_RAY_CLUSTER
    return found


@pytest.mark.long
def test_workers_of_this_machine_listen_to_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_text("1\n2\n3\n", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, path], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"raylet", "gcs_server"} <= {name for name, _ in found}
    for name, address in found:
        ip = ip_address(address)
        mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
        assert (mapped or ip).is_loopback, (name, address)

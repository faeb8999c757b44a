"""Workers on Ray make the output of one process, whatever happens to them."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from alignment.formats.output import Output
from alignment.pipeline import extract
from alignment.pipeline.blocks import BlockAligner, LinkWriting
from captum_norm.errors import InvalidInputError
from captum_norm.runs import RayBackend, ray_workers, run_job
from tests.object_store import free_port
from tests.runs import extractions
from tests.runs.aligners import Deadly, DeadlyAfterwards, DyingAtTheEnd, Unloadable
from tests.runs.extractions import align, check_result, expected, interrupt, run, write_text


@pytest.mark.parametrize("lines", [0, 1, 150])
def test_workers_make_the_output_of_one_process(tmp_path: Path, ray: RayBackend, lines: int) -> None:
    pairs = extractions.text(lines)
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    told: list[str] = []
    alone: list[str] = []
    counts = extract(source, None, align, out, block_lines=4, max_words=8, report=alone.append)
    options: dict[str, Any] = {"backend": ray, "overwrite": True, "report": told.append}
    assert extract(source, None, align, out, block_lines=4, max_words=8, **options) == counts
    check_result(source, out, pairs)
    assert sorted(told) == sorted(alone)


def test_a_run_goes_on_with_any_number_of_workers(tmp_path: Path, ray: RayBackend) -> None:
    pairs = [(f"a b{line}", "c d") for line in range(90)]
    source, out = write_text(tmp_path / "text", [*pairs[:56], ("", "c")]), tmp_path / "out"
    interrupt(source, out, 3)
    with pytest.raises(InvalidInputError, match="line 57: got no word"):
        run(source, out, backend=ray, bad_lines="stop")
    write_text(source, pairs)
    told: list[str] = []
    run(source, out, backend=replace(ray, workers=1), report=told.append)
    assert re.search(r"out.parts: \d+ blocks are finished already", told[0])
    check_result(source, out, pairs)


def test_relative_paths_are_those_of_the_driver(
    tmp_path: Path, ray: RayBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [(f"a b{line}", "c d") for line in range(9)]
    write_text(tmp_path / "text", pairs)
    monkeypatch.chdir(tmp_path)  # Ray was started elsewhere
    run(Path("text"), Path("out"), backend=ray)
    check_result(tmp_path / "text", tmp_path / "out", pairs)


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_block_whose_worker_died_is_done_elsewhere(tmp_path: Path, ray: RayBackend, deaths: int) -> None:
    source, out = write_text(tmp_path / "text", [*[("a b", "c")] * 30, ("kill", "d")]), tmp_path / "out"
    told: list[str] = []
    run(source, out, align=Deadly("kill", lives(tmp_path, deaths)), backend=ray, report=told.append)
    assert out.read_text() == expected([*[("a b", "c")] * 30, ("kill", "d")])
    retries = [message for message in told if message.startswith("a worker died; lines 29 to 31 of the input ")]
    assert len(retries) == deaths
    assert all("worker process has died" in message for message in retries)


def lives(folder: Path, number: int) -> Path:
    found = folder.with_name(f"{folder.name} lives")
    found.mkdir()
    for life in range(number):
        (found / str(life)).touch()
    return found


def test_a_block_that_kills_every_worker_is_named(tmp_path: Path, ray: RayBackend) -> None:
    pairs = [("a b", "c")] * 30
    pairs[13] = ("kill", "d")
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    deadly = Deadly("kill", lives(tmp_path, 100))
    with pytest.raises(InvalidInputError, match=rf"^lines 13 to 16 of the input \({source}\) killed 3 workers \(.*\)$"):
        run(source, out, align=deadly, backend=ray)


def test_a_worker_that_dies_before_it_says_that_a_block_is_finished_is_not_the_fault_of_that_block(
    tmp_path: Path, ray: RayBackend
) -> None:
    pairs = [(f"a{line}", "b") for line in range(24)]
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    backend = replace(ray, workers=1, retries=0)
    run(source, out, align=DeadlyAfterwards(lives(tmp_path, 1)), backend=backend)
    check_result(source, out, pairs)


def test_a_worker_that_dies_when_it_has_published_the_output_has_published_it(tmp_path: Path, ray: RayBackend) -> None:
    pairs = extractions.text(9)
    source, out = write_text(tmp_path / "text", pairs), tmp_path / "out"
    aligner = BlockAligner(align, LinkWriting(Output()), 8, stop=False)
    job = DyingAtTheEnd(lives(tmp_path, 2), str(out), [str(source)], aligner, {}, 4, overwrite=False)
    told: list[str] = []
    assert run_job(job, ray, report=told.append).lines == 9
    check_result(source, out, pairs)
    assert sum(message.startswith("a worker died; the step finish is begun again") for message in told) == 2


def test_workers_that_cannot_load_the_job_end_it(tmp_path: Path, ray: RayBackend, monkeypatch: Any) -> None:
    source, out = write_text(tmp_path / "text", extractions.text(9)), tmp_path / "out"
    with pytest.raises(
        InvalidInputError,
        match=r"^cannot load the job \(ModuleNotFoundError: No module named 'lab'\); its code must be installed on all",
    ):
        run(source, out, align=Unloadable(), backend=ray)
    with pytest.raises(InvalidInputError, match=r"^3 workers died while they loaded the job: "):
        run(source, out, align=Unloadable(deadly=True), backend=replace(ray, workers=1))
    monkeypatch.setattr(ray_workers, "versions", lambda: {"torch": "2.99"})
    with pytest.raises(
        InvalidInputError, match=r"^got torch [0-9.+cpu]+, expected 2.99 as in the process that started"
    ):
        run(source, out, backend=ray)
    monkeypatch.undo()
    with pytest.raises(InvalidInputError, match=r"memory://.*parts is not there.*; give a folder that all nodes reach"):
        extract(source, None, align, "memory://out", backend=ray)  # memory is not shared


def test_a_worker_that_the_cluster_has_no_room_for_is_waited_for(
    tmp_path: Path, ray: RayBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_workers, "_PATIENCE_SECONDS", 0.5)
    source, out = write_text(tmp_path / "text", extractions.text(9)), tmp_path / "out"

    def told(message: str) -> None:
        assert message == "still waiting for a worker, which needs 1 cores and 7 GPUs; the cluster has 3 CPU"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, out, backend=replace(ray, gpus_per_worker=7), report=told)


def test_bad_input_is_told_by_the_worker(tmp_path: Path, ray: RayBackend) -> None:
    source, out = write_text(tmp_path / "text", [("a", "b")] * 9 + [("a", "")]), tmp_path / "out"
    with pytest.raises(
        InvalidInputError, match=r"text, line 10: got no word on the target side.* \(a worker on .*, process \d+\)$"
    ):
        run(source, out, backend=ray, bad_lines="stop")
    assert not out.exists()
    run(source, out, backend=ray)


def test_ray_is_not_needed_by_one_process_and_named_if_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    source, out = write_text(tmp_path / "text", extractions.text(9)), tmp_path / "out"
    with pytest.raises(InvalidInputError, match=r"several workers need Ray: pip install 'captum-norm\[cluster\]'"):
        run(source, out, backend="ray")
    run(source, out)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:{port}", "ray://localhost:{port}", "auto", "[::1]:{port}", "127.0.0.1:99999"]
)
def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    address = address.format(port=free_port())
    source, out = write_text(tmp_path / "text", extractions.text(9)), tmp_path / "out"
    with pytest.raises(InvalidInputError, match=f"^cannot reach a Ray cluster at {re.escape(address)}: [^\n]+$"):
        run(source, out, backend=RayBackend(address=address))
    run(source, out)


def test_missing_workers_are_started_at_once_and_then_seldom() -> None:
    job: Any = SimpleNamespace(title="work", output="out")
    driver = ray_workers._Driver(MagicMock(), job, MagicMock(), MagicMock(), RayBackend(workers=2))
    for started in (2, 0):
        driver._workers.clear()
        driver._scale()
        assert len(driver._workers) == started


def test_a_connection_of_ours_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = MagicMock(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with ray_workers._connected(RayBackend(address="auto")):
        ray.shutdown.assert_not_called()
    ray.shutdown.assert_called_once()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "got workers=0; expected at least 1"),
        ({"address": 3}, 'got address=3; expected that of a cluster, such as "auto", or None'),
        ({"cpus_per_worker": 0}, "got cpus_per_worker=0 and gpus_per_worker=0; expected more than 0 cores"),
        ({"gpus_per_worker": -1}, "got cpus_per_worker=1 and gpus_per_worker=-1; expected more than 0 cores"),
        ({"gpus_per_worker": float("nan")}, "got gpus_per_worker nan; expected a number"),
        ({"cpus_per_worker": []}, r"got cpus_per_worker \[\]; expected a number"),
        ({"retries": -1}, "got -1 retries"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        RayBackend(**options)

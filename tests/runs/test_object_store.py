"""Runs in an object store: what they ask of it, and what happens if it refuses or the run is killed."""

import multiprocessing
import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from captum_norm import InvalidInputError
from captum_norm.runs import RayBackend
from captum_norm.text.files import Remote
from tests.fuzzing import FACTOR
from tests.object_store import DENIED, ObjectStore, Refusal, Request, environment
from tests.runs import extractions
from tests.runs.extractions import interrupt, run
from tests.runs.test_storage import PAIRS, check_result, names, put_text


def test_a_block_costs_few_requests(object_store: ObjectStore) -> None:
    source, out = put_text("s3://bucket/text", PAIRS), "s3://bucket/out"

    def requests(blocks: int) -> list[Request]:
        object_store.requests.clear()
        run(source, out, overwrite=True, block_lines=16 // blocks)
        return object_store.requests.copy()

    _, before, after = requests(1), requests(2), requests(4)
    # For each: is it finished, its text, its result, and again its result.
    assert len(after) - len(before) == 2 * 4
    assert len(before) <= 2 * 4 + 30


def test_whichever_request_fails_nothing_is_lost(object_store: ObjectStore) -> None:
    place, source, out = "s3://bucket", put_text("s3://bucket/text", PAIRS), "s3://bucket/out"
    number, failed = 0, True
    while failed:
        number += 1 if FACTOR > 1 else 3
        interrupt(source, out, 2)
        before = object_store.tree("out.parts/block")
        failing = _Nth(number, lambda: DENIED)
        told: str | None = None
        with object_store.refusing(failing):
            try:
                run(source, out)
            except InvalidInputError as refusal:
                told = str(refusal)
        failed = failing.left <= 0
        if told is not None:
            assert "Access Denied" in told or "Permission denied" in told
            assert "\n" not in told
            if Remote(out).kind() is None:
                assert before.items() <= object_store.tree("out.parts/block").items()
        if told is not None:
            run(source, out, overwrite=True)
        check_result(place, PAIRS)
        Remote(place).remove("out")
        assert object_store.uploads() == []
    assert number > 20


class _Nth:
    """Does something at the n-th request, and ever after."""

    def __init__(self, number: int, do: Any) -> None:
        self.left, self.do = number, do

    def __call__(self, _: Request) -> Refusal | None:
        self.left -= 1
        return self.do() if self.left == 0 else None


@pytest.mark.fuzz
def test_killed_at_any_request_it_goes_on(object_store: ObjectStore, object_store_port: int) -> None:
    place, source, out = "s3://bucket", put_text("s3://bucket/text", PAIRS), "s3://bucket/out"
    context = multiprocessing.get_context("forkserver")
    step = 1 if FACTOR > 1 else 11
    for number in range(2, 1000, step):
        arguments = (dict(environment(object_store_port)), source, out)
        process = context.Process(target=_run_with, args=arguments)
        killing = _Nth(number, lambda process=process: os.kill(process.pid, signal.SIGKILL))
        with object_store.refusing(killing):
            process.start()
            process.join()
        if not Remote(out).kind() or names(f"{out}.parts"):
            run(source, out, overwrite=True)
        check_result(place, PAIRS)
        Remote(place).remove("out")
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert number > 20


def _run_with(variables: Mapping[str, str], source: str, out: str) -> None:
    os.environ.update(variables)
    run(source, out)


def test_workers_share_a_run_from_and_to_a_bucket(object_store: ObjectStore, ray: RayBackend) -> None:
    pairs = extractions.text(10 * extractions.BLOCK_LINES + 1)
    source, out = put_text("s3://bucket/text", pairs), "s3://bucket/out"
    interrupt(source, out, 2)
    run(source, out, backend=ray)
    check_result("s3://bucket", pairs)
    assert object_store.uploads() == []


def test_workers_that_are_refused_say_so(object_store: ObjectStore, ray: RayBackend) -> None:
    source, out = put_text("s3://bucket/text", PAIRS), "s3://bucket/out"
    begun = False

    def denied(request: Request) -> Refusal | None:
        nonlocal begun
        if begun:
            return DENIED
        begun = request == ("PUT", "/bucket/out.parts/job.json", "")
        return None

    with (
        object_store.refusing(denied),
        pytest.raises(InvalidInputError, match=r"Permission denied|Access Denied") as found,
    ):
        run(source, out, backend=ray)
    assert "\n" not in str(found.value)
    run(source, out, backend=ray)
    check_result("s3://bucket", PAIRS)

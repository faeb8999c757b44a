"""A damaged journal gives the result of an undisturbed run, or one sentence and every file as it was."""

import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from captum_norm.errors import InvalidInputError
from tests.fuzzing import FACTOR
from tests.runs import extractions
from tests.runs.damage import damages, tree

pytestmark = pytest.mark.fuzz

ROUNDS = 4 * FACTOR
"""How often each kind of damage is done."""


@contextmanager
def in_seconds(limit: int) -> Iterator[None]:
    """What hangs is a failure."""

    def hang(*_: object) -> None:
        raise TimeoutError(f"still at work after {limit} seconds")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the disk: no power fails here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def test_extractions(tmp_path: Path) -> None:
    """Does every damage to copies of an interrupted run, and goes on with it, or else restarts it."""
    pairs = extractions.text(40, seed=5)
    template = tmp_path / "template"
    template.mkdir()
    source = extractions.write_text(template / "text", pairs)
    options = {"block_lines": 6, "settings": {"layer": 1, "recipe": "paper", "é": None}}
    extractions.interrupt(source, template / "out", 3, **options)
    kept = [path.name for path in sorted((template / "out.parts").iterdir())]
    assert kept == ["block-000000000", "block-000000001", "block-000000002", "job.json", "lock"]

    def refusal(folder: Path, *, restart: bool) -> str | None:
        with in_seconds(60):
            try:
                extractions.run(folder / "text", folder / "out", restart=restart, **options)
            except InvalidInputError as error:
                return str(error)
        return None

    results = refusals = 0
    for name, damage in damages():
        for number in range(ROUNDS):
            folder, case = tmp_path / "case", f"{name}, {number}"
            shutil.copytree(template, folder)
            damage(folder / "out.parts", random.Random(case))
            before = tree(folder)
            refused = refusal(folder, restart=False)
            if refused is not None:
                refusals += 1
                assert "\n" not in refused, case
                assert tree(folder) == before, case
                refused = refusal(folder, restart=True)
            if refused is None:
                results += 1
                assert (folder / "out").read_text(encoding="ascii") == extractions.expected(pairs), case
                left = folder / "out.parts"
                assert not left.exists() or [path.name for path in left.iterdir()] == ["notes.txt"], case
            after = tree(folder)
            same = [
                path for path in before if refused is not None or not path.startswith("out.parts") or "notes" in path
            ]
            assert [before[path] for path in same] == [after.get(path) for path in same], case
            shutil.rmtree(folder)
    assert min(results, refusals) > 10 * ROUNDS

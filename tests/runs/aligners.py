"""Aligners that kill their workers."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.pipeline import Answer, ExtractionCounts
from alignment.pipeline.extraction import Extraction
from captum_norm.runs import Journal
from tests.runs.extractions import Batch, align


@dataclass(frozen=True)
class Deadly:
    """Kills its process at a pair with a certain source word, as often as there are files left in a folder."""

    word: str
    lives: Path

    def __call__(self, pairs: Batch) -> list[Answer]:
        if any(self.word in source for source, _ in pairs):
            die(self.lives)
        return list(align(pairs))


@dataclass(frozen=True)
class DeadlyAfterwards:
    """Kills its process when a block is finished, before it says so, as often as there are files in a folder."""

    lives: Path

    def __call__(self, pairs: Batch) -> list[Answer]:
        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            # By PEP 578: the folder is opened, to be flushed, when a block is there.
            if event == "open" and str(arguments[0]).endswith(".parts"):
                die(self.lives)

        sys.addaudithook(watch)
        return list(align(pairs))


class DyingAtTheEnd(Extraction):
    """Kills its process when the output is there, before it says so, as often as there are files in a folder."""

    def __init__(self, lives: Path, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.lives = lives

    def finish(self, journal: Journal, blocks: int) -> ExtractionCounts:
        counts = super().finish(journal, blocks)
        die(self.lives)
        return counts


@dataclass(frozen=True)
class Slow:
    """Takes some seconds for each batch."""

    seconds: float

    def __call__(self, pairs: Batch) -> list[Answer]:
        time.sleep(self.seconds)
        return list(align(pairs))


@dataclass(frozen=True)
class Unloadable:
    """Cannot be loaded by a worker: says so, or kills it."""

    deadly: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (_die, ()) if self.deadly else (_fail, ())

    def __call__(self, pairs: Batch) -> list[Answer]:
        return list(align(pairs))


def die(lives: Path) -> None:
    """Kill this process, if a file is left, and take it."""
    for life in sorted(lives.iterdir()):
        life.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def _fail() -> None:
    raise ModuleNotFoundError("No module named 'lab'")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

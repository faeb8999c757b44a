"""Runs of ``extract`` with a cheap aligner, in processes that can be killed."""

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tqdm import tqdm

from alignment import Alignment, Lexicon
from alignment.decoding import argmax
from alignment.documents import Section
from alignment.links import ScoredAlignment
from alignment.pipeline import extract
from alignment.word_maps import WordMap
from captum_norm import InvalidInputError

Batch = Sequence[tuple[list[str], list[str]]]

BLOCK_LINES = 4

# What a file operation is called before it happens, by PEP 578; the others change nothing in a folder.
_FILE_EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}

# Its server imports torch once; the processes are then forked from it in no time.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["__main__", __name__])


def links(source: Sequence[str], target: Sequence[str]) -> list[tuple[int, int]]:
    """For each target word a source word, as its letters have it."""
    return [(zlib.crc32(word.encode()) % len(source), index) for index, word in enumerate(target)]


def align(pairs: Batch, delay: float = 0.0) -> list[Alignment | InvalidInputError]:
    time.sleep(delay)
    return [
        InvalidInputError("got a word that is refused") if "refused" in source else Alignment(links(source, target))
        for source, target in pairs
    ]


class CountingAligner:
    """Links each target word by a map of letters and by what the whole text links."""

    count_text = scored = True

    def cut(self, pairs: Batch) -> list[Section]:
        return [Section(index, (0, 0), pair) for index, pair in enumerate(pairs)]

    def map_each(self, pairs: Batch) -> Iterator[tuple[int, WordMap]]:
        for index, (source, target) in enumerate(pairs):
            yield index, np.array([[1 + zlib.crc32(f"{a} {b}".encode()) % 9 for a in source] for b in target]) / 9

    def counted(self, word_map: WordMap) -> WordMap:
        return word_map

    def begun_lexicon(self) -> Lexicon:
        return Lexicon()

    def read(
        self, word_map: WordMap, source: Sequence[str], target: Sequence[str], lexicon: Lexicon, counted: WordMap
    ) -> ScoredAlignment:
        return ScoredAlignment(argmax(lexicon.applied(word_map, source, target, counted), null=False))


def text(lines: int, seed: int = 0) -> list[tuple[str, str]]:
    """Sentence pairs, some of which are bad: with an empty side, too long for 8 words, or refused."""
    rng = random.Random(seed)
    words = ["das", "Haus", "la", "maison", "été", "refused", *map(str, range(20))]
    sides = [" ".join(rng.choices(words, k=rng.choice([0, 1, 2, 3, 4, 5, 6, 9]))) for _ in range(2 * lines)]
    return list(zip(sides[::2], sides[1::2], strict=True))


def expected(pairs: Sequence[tuple[str, str]]) -> str:
    """The output for a text, by the definition of a bad line."""
    output = []
    for source, target in ((source.split(), target.split()) for source, target in pairs):
        good = 0 < len(source) <= 8 and 0 < len(target) <= 8 and "refused" not in source
        output.append(" ".join(f"{i}-{j}" for i, j in sorted(links(source, target))) if good else "")
    return "".join(f"{line}\n" for line in output)


def write_text(path: Path, pairs: Sequence[tuple[str, str]]) -> Path:
    path.write_text("".join(f"{source} ||| {target}\n" for source, target in pairs), encoding="utf-8")
    return path


def run(source: Path | str, out: Path | str, **options: Any) -> None:
    options = {"block_lines": BLOCK_LINES, "max_words": 8, "report": _ignore, **options}
    extract(source, None, options.pop("align", align), out, **options)


def check_result(source: Path, out: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """Checks that the output is there as if nothing had happened, and nothing else."""
    assert out.read_text() == expected(pairs)
    folder = out.with_name("out.parts")
    if folder.exists():  # killed when the output was complete, but the folder was not removed
        told: list[str] = []
        with nullcontext() if any(folder.iterdir()) else pytest.raises(InvalidInputError, match="exists already"):
            run(source, out, report=told.append)
            assert told == [f"{out} is complete: the run before was killed at its end"]
    assert {path.name for path in out.parent.iterdir()} == {"out", source.name}
    assert out.read_text() == expected(pairs)


def interrupt(source: Path | str, out: Path | str, blocks: int, **options: Any) -> None:
    """Runs until so many more blocks are finished."""
    left = blocks

    def failing(pairs: Batch) -> list[Alignment | InvalidInputError]:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        return align(pairs)

    with pytest.raises(KeyboardInterrupt):
        run(source, out, align=failing, **options)


def start(source: Path, out: Path, **options: Any) -> ForkServerProcess:
    """Starts a run in a process and returns when it has begun."""
    listener, speaker = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_run_and_say, args=(speaker, source, out, options))
    process.start()
    listener.recv()
    listener.close()
    speaker.close()
    return process


def run_until_killed(source: Path, out: Path, operation: int, **options: Any) -> bool:
    """Runs in a process that is killed just before its n-th file operation; False if it has fewer and finishes."""
    process = _CONTEXT.Process(target=_run_until, args=(source, out, operation, options))
    process.start()
    process.join()
    assert process.exitcode in {0, -signal.SIGKILL}
    return process.exitcode != 0


def finished(out: Path) -> int:
    """How many blocks are."""
    folder = out.with_name(f"{out.name}.parts")
    try:
        return sum(path.name.startswith("block-") for path in folder.iterdir())
    except FileNotFoundError:
        return 0


def _run_and_say(speaker: Connection, source: Path, out: Path, options: dict[str, Any]) -> None:
    tqdm.set_lock(threading.RLock())  # its own would outlive a process that is killed
    speaker.send(None)
    run(source, out, **options)


def _run_until(source: Path, out: Path, operation: int, options: dict[str, Any]) -> None:
    left = operation
    tqdm.set_lock(threading.RLock())

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        # What is removed with its folder is named without it.
        if event in _FILE_EVENTS and (str(arguments[0]).startswith(str(out.parent)) or event != "open"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    run(source, out, **options)


def _ignore(_: str) -> None:
    pass

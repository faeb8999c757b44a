"""Runs of ``extract`` with a cheap aligner, in processes that can be killed."""

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from alignment import Alignment
from alignment.pipeline import extract, torchrun_rank
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


def run(source: Path, out: Path, **options: Any) -> None:
    """One process of a run, whichever it is by its environment."""
    rank, world_size = torchrun_rank()
    options = {"block_lines": BLOCK_LINES, "max_words": 8, "report": _ignore, **options}
    extract(source, None, options.pop("align", align), out, rank=rank, world_size=world_size, **options)


def check_result(source: Path, out: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """Checks that the output is there as if nothing had happened, and nothing else."""
    assert out.read_text() == expected(pairs)
    folder = out.with_name("out.parts")
    if folder.exists():  # killed when the output was complete, but the folder was not removed
        with pytest.raises(InvalidInputError, match="exists already"):
            run(source, out)
        if folder.exists():  # nor begun to be: nobody knows which run completed the output
            run(source, out, overwrite=True)
    assert {path.name for path in out.parent.iterdir()} == {"out", source.name}
    assert out.read_text() == expected(pairs)


def interrupt(source: Path, out: Path, blocks: int, **options: Any) -> None:
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


def start(source: Path, out: Path, *, processes: int = 1, delay: float = 0.0) -> list[ForkServerProcess]:
    """Starts the processes of a run and returns when they have begun; each block takes ``delay`` seconds more."""
    listener, speaker = _CONTEXT.Pipe(duplex=False)
    started = []
    for rank in range(processes):
        process = _CONTEXT.Process(target=_run_as, args=(speaker, source, out, delay, rank, processes), daemon=True)
        process.start()
        started.append(process)
    for _ in started:
        listener.recv()
    listener.close()
    speaker.close()
    return started


def kill_at_random(processes: list[ForkServerProcess], out: Path, rng: random.Random) -> None:
    """Ends the processes of a run, as nothing can keep one from, some blocks and some milliseconds later."""
    goal, deadline = _finished(out) + rng.randrange(7), time.monotonic() + 60
    while _finished(out) < goal and not out.exists() and processes[0].exitcode is None:
        assert time.monotonic() < deadline, "the processes wait for each other"
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.01))
    rng.shuffle(processes)  # whichever dies first, torchrun ends the others
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def run_until_killed(source: Path, out: Path, operation: int) -> bool:
    """Runs in a process that is killed just before its n-th file operation; False if it has fewer and finishes."""
    process = _CONTEXT.Process(target=_run_until, args=(source, out, operation))
    process.start()
    process.join()
    assert process.exitcode in {0, -signal.SIGKILL}
    return process.exitcode != 0


def _finished(out: Path) -> int:
    folder = out.with_name(f"{out.name}.parts")
    try:
        return sum(path.name.startswith("block-") for path in folder.iterdir())
    except FileNotFoundError:
        return 0


def _run_as(speaker: Connection, source: Path, out: Path, delay: float, rank: int, world_size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    tqdm.set_lock(threading.RLock())  # its own would outlive a process that is killed
    speaker.send(rank)
    run(source, out, align=partial(align, delay=delay))


def _run_until(source: Path, out: Path, operation: int) -> None:
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
    run(source, out)


def _ignore(_: str) -> None:
    pass

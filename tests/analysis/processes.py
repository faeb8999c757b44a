"""Runs of an analysis in processes that can be killed."""

import multiprocessing
import os
import signal
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from captum_norm.analysis.corpus import Corpus
from captum_norm.analysis.engine import analyze
from captum_norm.runs import torchrun_rank
from captum_norm.visualization import write_report
from tests.analysis.small import bert, tokenizer

# Its server imports torch once; the processes are then forked from it in no time.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["__main__", __name__])


def run(name: str, text: Path, out: Path) -> None:
    """One process of a run, whichever it is by its environment."""
    rank, world_size = torchrun_rank()
    result = analyze(
        name,
        bert(dtype=torch.float32),
        tokenizer(),
        Corpus(text),
        out=out,
        batch_tokens=60,
        block_texts=2,
        tokens=None if name == "contextualization-change" else out / "tokens.parquet",
        rank=rank,
        world_size=world_size,
    )
    if result is not None:
        write_report(result, out)


def start(name: str, text: Path, out: Path, *, processes: int = 1, kill_before_block: int | None = None) -> list[int]:
    """The exit codes of the processes of a run, the first of which may be killed before it finishes some block."""
    started: list[ForkServerProcess] = []
    for rank in range(processes):
        process = _CONTEXT.Process(target=_run_as, args=(name, text, out, rank, processes, kill_before_block))
        process.start()
        started.append(process)
    for process in started:
        process.join(120)
    return [process.exitcode or 0 for process in started]


def _run_as(name: str, text: Path, out: Path, rank: int, world_size: int, kill_before_block: int | None) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        # By PEP 578, told of before it happens: a block becomes a finished one by renaming.
        if event == "os.rename" and str(arguments[1]).endswith(f"block-{kill_before_block:09d}"):
            os.kill(os.getpid(), signal.SIGKILL)

    if kill_before_block is not None:
        sys.addaudithook(watch)
    run(name, text, out)

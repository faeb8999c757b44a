"""Runs of an analysis in processes that can be killed."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path

import torch

from captum_norm.lab.analysis.corpus import Corpus
from captum_norm.lab.analysis.engine import analyze
from captum_norm.runs import Backend
from captum_norm.show import write_report
from tests.lab.analysis.small import bert, tokenizer

# Its server imports torch once; the processes are then forked from it in no time.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["__main__", __name__])


def run(name: str, text: Path, out: Path, backend: Backend = "local") -> None:
    """A run and its report."""
    result = analyze(
        name,
        bert(dtype=torch.float32),
        tokenizer(),
        Corpus(text),
        out=out,
        batch_tokens=60,
        block_texts=2,
        backend=backend,
    )
    write_report(result, out)


def start(name: str, text: Path, out: Path, kill_before_block: int | None = None) -> int:
    """The exit code of the process of a run, which may be killed before it finishes some block."""
    process = _CONTEXT.Process(target=_run_until, args=(name, text, out, kill_before_block))
    process.start()
    process.join(120)
    return process.exitcode or 0


def _run_until(name: str, text: Path, out: Path, kill_before_block: int | None) -> None:
    def watch(event: str, arguments: tuple[object, ...]) -> None:
        # By PEP 578, told of before it happens: a block becomes a finished one by renaming.
        if event == "os.rename" and str(arguments[1]).endswith(f"block-{kill_before_block:09d}"):
            os.kill(os.getpid(), signal.SIGKILL)

    if kill_before_block is not None:
        sys.addaudithook(watch)
    run(name, text, out)

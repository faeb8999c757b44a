"""The cost of workers on Ray: ``python -m benchmarks.cluster``.

Three measurements on this machine, each worker with one thread:

1. Sentences per second by one process, one worker and two workers, with the shipped French–English model on its
   stories, repeated. Starts are excluded: the time runs from the moment when all workers have finished a block, to the
   end of the last one. The targets are 1.8 times the speed with two workers, and 3 % more time per block on Ray.
2. Bookkeeping: a job of many blocks without a model. The targets are 500 blocks per second and a driver of 300 MB.
3. By arithmetic from these and the speed of finding blocks, what 10⁶, 10⁹ and 10¹¹ sentence pairs need.
"""

import argparse
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from alignment.corpora import ALIBI_STORIES, load_alibi
from alignment.formats.output import Output
from alignment.pipeline.blocks import BlockAligner, LinkWriting
from captum_norm.runs import Backend, Block, Job, Journal, Part, RayBackend, Record, cut, run_job

BLOCK_LINES = 2000
POWERS = (6, 9, 11)
CORES = (8, 256, 8192)
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")

Words = Sequence[str]


@dataclass(frozen=True)
class Span:
    """When a worker worked on a block.

    Attributes:
        worker: its process.
        start: when it began, in seconds.
        end: when it ended.
        lines: the number of lines.
        links: the size of the block's output in bytes.
    """

    worker: int
    start: float
    end: float
    lines: int
    links: int


@dataclass(frozen=True)
class Run:
    """A run of the alignments.

    Attributes:
        spans: its blocks, in the order in which they ended.
        stored: the size of its journal in bytes.
    """

    spans: Sequence[Span]
    stored: int

    def window(self) -> tuple[float, float]:
        """From the moment when all workers have finished a block, to the end of the last one."""
        firsts: dict[int, float] = {}
        for span in self.spans:
            firsts.setdefault(span.worker, span.end)
        return max(firsts.values()), self.spans[-1].end

    def speed(self) -> float:
        """Lines per second in the window; a block that began before it counts in part."""
        start, end = self.window()
        shares = (max(0.0, span.end - max(start, span.start)) / (span.end - span.start) for span in self.spans)
        return sum(span.lines * share for span, share in zip(self.spans, shares, strict=True)) / (end - start)

    def gap(self) -> float:
        """The mean time between two blocks of a worker, in seconds."""
        gaps = []
        for worker in {span.worker for span in self.spans}:
            own = [span for span in self.spans if span.worker == worker]
            gaps += [after.start - before.end for before, after in pairwise(own)]
        return sum(gaps) / len(gaps)


class TimedAlignments(Job):
    """Aligns a text and notes when each block began and ended."""

    title = "benchmark"

    def __init__(self, output: str, files: Sequence[Path], align: BlockAligner) -> None:
        super().__init__(output, {})
        self._files, self._align = files, align

    def blocks(self) -> Iterator[Block]:
        """Find the blocks of the text."""
        return cut(self._files, BLOCK_LINES)

    def worker(self) -> Callable[[Block], Record]:
        """Return a function that aligns a block in one thread."""
        import torch

        torch.set_num_threads(1)

        def work(block: Block) -> Record:
            start = time.time()
            content = self._align(block).content
            notes = {"worker": os.getpid(), "start": start, "end": time.time(), "lines": block.lines}
            return Record(notes, content)

        return work

    def finish(self, journal: Journal, blocks: int) -> Run:
        """Return the times of all blocks."""
        names = ("worker", "start", "end", "lines")
        spans = [
            Span(**{name: record.notes[name] for name in names}, links=len(record.content))
            for record in journal.records(blocks)
        ]
        stored = sum(path.stat().st_size for path in Path(journal.folder).iterdir())
        return Run(sorted(spans, key=lambda span: span.end), stored)


class EmptyBlocks(Job):
    """Blocks of no file, which take no work."""

    title = "bookkeeping"

    def __init__(self, output: str, number: int) -> None:
        super().__init__(output, {"blocks": number})
        self._number = number
        self.start = self.end = self.before = math.nan

    def blocks(self) -> Iterator[Block]:
        """Make the blocks; note when."""
        self.start, self.before = time.perf_counter(), peak()
        for index in range(self._number):
            part = Part("corpus.txt", index * 1000, 1000, None)
            yield Block(index, index + 1, index + 1, (part,), f"{index:032x}", (index + 1) / self._number)
        self.end = time.perf_counter()

    def worker(self) -> Callable[[Block], Record]:
        """Return a function that does nothing."""
        return lambda block: Record({"number": block.lines}, b"")

    def finish(self, journal: Journal, blocks: int) -> int:
        """Return the number of blocks."""
        return sum(record.notes["number"] for record in journal.records(blocks))


def peak() -> float:
    """The largest memory of this process so far, in MB."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / (1 << 20 if sys.platform == "darwin" else 1000)


def write_text(folder: Path, pairs: Sequence[tuple[Words, Words]], lines: int) -> list[Path]:
    """Write sentence pairs, repeated, as two files."""
    files = [folder / "text.fr", folder / "text.en"]
    for file, sentences in zip(files, zip(*pairs, strict=True), strict=True):
        repeated = islice(cycle(sentences), lines)
        file.write_text("".join(f"{' '.join(words)}\n" for words in repeated), encoding="utf-8")
    return files


def workers(sentences: int, folder: Path) -> Mapping[str, float]:
    """Print speeds by one process, one worker and two; return what one core did and what was stored."""
    from alignment.aligner import WordAligner
    from alignment.fairseq.loading import load_shipped_model

    stories = [load_alibi(story) for story in ALIBI_STORIES]
    pairs = [pair for story in stories for pair in zip(story.sources, story.targets, strict=True)]
    files = write_text(folder, pairs, sentences)
    aligner = WordAligner(*load_shipped_model("fr-en"), recipe="paper")
    aligner.choose(pairs)
    align = BlockAligner(aligner, LinkWriting(Output()), 256, stop=False)
    backends: dict[str, Backend] = {
        "one process": "local",
        "one worker": RayBackend(workers=1),
        "two workers": RayBackend(workers=2),
    }
    runs = {
        name: run_job(TimedAlignments(str(folder / name), files, align), backend) for name, backend in backends.items()
    }
    table = Table(title=f"{sentences:,} sentence pairs in blocks of {BLOCK_LINES:,}, one thread each")
    for column in ("", "sentences/s", "× one worker", "between two blocks"):
        table.add_column(column, justify="right")
    one = runs["one worker"]
    for name, run in runs.items():
        table.add_row(name, f"{run.speed():.1f}", f"{run.speed() / one.speed():.2f}", f"{run.gap() * 1000:.1f} ms")
    Console(width=100).print(table)
    more = 100 * (runs["one process"].speed() / one.speed() - 1)
    print(f"time per block of one worker, compared with one process: {more:+.1f} %\n")
    start = time.perf_counter()
    blocks = sum(1 for _ in cut(files, BLOCK_LINES))
    finding = time.perf_counter() - start
    return {
        "speed": one.speed(),
        "finding": finding / sentences,
        "text": sum(file.stat().st_size for file in files) / sentences,
        "output": sum(span.links for span in one.spans) / sentences,
        "overhead": (one.stored - sum(span.links for span in one.spans)) / blocks,
    }


def bookkeeping(blocks: int) -> None:
    """Print speed and memory of a job of many blocks."""
    with tempfile.TemporaryDirectory() as folder:
        job = EmptyBlocks(f"{folder}/output", blocks)
        total = run_job(job, RayBackend(workers=2))
    if total != blocks:
        raise AssertionError(f"got {total} blocks, expected {blocks}")
    print_bookkeeping(job)


def print_bookkeeping(job: EmptyBlocks) -> None:
    """Print what the driver took."""
    seconds, number = job.end - job.start, job.identity["blocks"]
    assert isinstance(number, int)
    print(f"{number:,} blocks without work: {number / seconds:,.0f} blocks/s")
    print(f"  reading and removing them: {time.perf_counter() - job.end:.1f} s")
    grown = peak() - job.before
    each = f"{1e6 * grown / number:,.0f} bytes each"
    print(f"  driver: {peak():.0f} MB at most, of which {grown:.0f} MB for blocks, {each}")


def print_costs(found: Mapping[str, float]) -> None:
    """Print what large corpora need, by arithmetic, as a table in Markdown."""
    print(f"by arithmetic, at {found['speed']:.1f} sentences per second and core:\n")
    rows = [
        [
            "sentence pairs",
            "text",
            "output",
            "blocks",
            "journal",
            "finding blocks",
            *(f"{number:,} cores" for number in CORES),
        ],
        ["---"] * (6 + len(CORES)),
    ]
    for power in POWERS:
        pairs = 10**power
        blocks, output = math.ceil(pairs / BLOCK_LINES), pairs * found["output"]
        journal = output + blocks * found["overhead"]
        seconds = [pairs * found["finding"], *(pairs / found["speed"] / number for number in CORES)]
        name = f"10{str(power).translate(SUPERSCRIPTS)}"
        rows.append(
            [name, size(pairs * found["text"]), size(output), f"{blocks:,}", size(journal), *map(duration, seconds)]
        )
    for row in rows:
        print(f"| {' | '.join(row)} |")


def size(number: float) -> str:
    """Format a number of bytes."""
    power = min(4, int(math.log10(max(number, 1))) // 3)
    return f"{number / 1000**power:.3g} {['B', 'kB', 'MB', 'GB', 'TB'][power]}"


def duration(seconds: float) -> str:
    """Format a time."""
    for name, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {name}"
    return f"{seconds:.0f} s"


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=20_000, help="to align (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=20_000, help="without work (default: %(default)s)")
    options = parser.parse_args()
    bookkeeping(options.blocks)  # first, since it measures the largest memory so far
    with tempfile.TemporaryDirectory() as folder:
        print_costs(workers(options.sentences, Path(folder)))


if __name__ == "__main__":
    main()

"""The cost of word alignment relative to a plain teacher-forced forward pass: ``python -m benchmarks.alignment``.

The shipped French–English model on a story of Alibi, repeated, on two CPU threads. Every ratio compares times from one
run, taken alternately, on the same batches. The plain forward pass computes only the logits; extraction includes
segmentation into pieces, merging into words and the links of every layer.
"""

import argparse
import gc
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import torch

from alignment.aligner import BidirectionalAligner, WordAligner, without_head
from alignment.corpora import load_alibi
from alignment.decoding import argmax
from alignment.fairseq.loading import load_shipped_model
from alignment.teacher_forcing import PieceMaps, attention_maps, teacher_forced_batches, word_maps
from benchmarks import alignment_gradients
from benchmarks.eflomal import children_seconds
from captum_norm import AttentionWeights, NormAttribution

Run = Callable[[], object]


def alternate(runs: Sequence[Run], repeats: int) -> list[float]:
    """Return the median time of each run in seconds, taken alternately."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats + 1):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [median(taken[1:]) for taken in times]


def throughput(repeats: int, copies: int) -> None:
    """Print sentences per second: forward pass, maps of all layers, alignments of all layers."""
    model, tokenizer = load_shipped_model("fr-en")
    pairs = _story() * copies
    batches = list(teacher_forced_batches(model, tokenizer, pairs))
    body = without_head(model)
    methods = {
        "norms": attention_maps(NormAttribution(body)),
        "weights": attention_maps(AttentionWeights(body)),
    }

    def forward() -> None:
        for batch in batches:
            model(**batch.inputs)

    def maps(piece_maps: PieceMaps) -> None:
        for batch in batches:
            piece_maps(batch)

    def align(piece_maps: PieceMaps) -> None:
        for _, found in word_maps(model, tokenizer, pairs, piece_maps):
            list(map(argmax, found["AWI"]))

    runs: dict[str, Run] = {"plain forward pass": forward}
    runs |= {f"maps, {name}": partial(maps, method) for name, method in methods.items()}
    runs |= {f"alignments, {name}": partial(align, method) for name, method in methods.items()}
    times = alternate(list(runs.values()), repeats)
    print(f"{len(pairs)} sentence pairs, {model.config.decoder_layers} layers")
    for title, taken in zip(runs, times, strict=True):
        print(f"{title:22}{len(pairs) / taken:8.0f} sentences/s{times[0] / taken:7.2f} × the forward pass's")


def both_directions(repeats: int, copies: int) -> None:
    """Print sentences per second of two models: forward passes, both directions combined, and with a lexicon."""
    loaded = [load_shipped_model(name) for name in ("fr-en", "en-fr")]
    pairs = _story() * copies
    sides = [pairs, [(target, source) for source, target in pairs]]
    batches = [list(teacher_forced_batches(*one, side)) for one, side in zip(loaded, sides, strict=True)]

    def forward() -> None:
        for (model, _), own in zip(loaded, batches, strict=True):
            for batch in own:
                model(**batch.inputs)

    def align(count_text: bool) -> None:
        fr_en, en_fr = (
            WordAligner(*one, layer=0, head=head, recipe="hmm") for one, head in zip(loaded, (2, 0), strict=True)
        )
        BidirectionalAligner(fr_en, en_fr, count_text=count_text).align(*zip(*pairs, strict=True))

    runs: dict[str, Run] = {"two forward passes": forward}
    runs |= {"both directions": partial(align, False), "with a lexicon": partial(align, True)}
    times = alternate(list(runs.values()), repeats)
    for title, taken in zip(runs, times, strict=True):
        print(f"{title:22}{len(pairs) / taken:8.0f} sentences/s{times[0] / taken:7.2f} × the forward passes'")


def _story() -> list[tuple[Sequence[str], Sequence[str]]]:
    story = load_alibi()
    return list(zip(story.sources, story.targets, strict=True))


def memory(copies: int) -> None:
    """Print the peak memory of Python objects while streaming a text, and one ten times as long."""
    aligner = WordAligner(*load_shipped_model("fr-en"), layer=0)
    pairs = _story()
    for times in (copies, 10 * copies):
        gc.collect()
        tracemalloc.start()
        links = 0
        for _ in range(times):
            links += sum(map(len, aligner.align(*zip(*pairs, strict=True))))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        print(f"{times * len(pairs)} sentence pairs in blocks of {len(pairs)}: peak {peak / 2**20:.1f} MiB")


def latency(lines: int) -> None:
    """Print how long a line of standard input waits for its alignment."""
    words = ["--layer=0", "--head=2", "--reverse-head=0", "--block-lines=1", "--quiet"]
    command = [sys.executable, "-m", "alignment.cli", "extract", "-", *words]
    taken = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for source, target in [*_story(), *_story()][: lines + 1]:
            start = time.perf_counter()
            process.stdin.write(f"{' '.join(source)} ||| {' '.join(target)}\n".encode())
            process.stdin.flush()
            process.stdout.readline()
            taken.append(time.perf_counter() - start)
        process.stdin.close()
    waited = sorted(1000 * seconds for seconds in taken[1:])
    print(f"a line of a stream waits {median(waited):.0f} ms, at most {waited[-1]:.0f} ms, of {lines} lines")


def long_text(lines: int) -> None:
    """Print the time and the peak memory of extractions from short lines, and from ten times as many."""
    words = ["--layer=0", "--head=2", "--reverse-head=0", "--quiet", "--keep-sides", "--out=links"]
    for count in (lines // 10, lines):
        for options in ([], ["--lexicon"]):
            with tempfile.TemporaryDirectory() as folder:
                rows = (f"{' '.join(source[:6])} ||| {' '.join(target[:6])}\n" for source, target in cycle(_story()))
                with (Path(folder) / "text").open("w", encoding="utf-8") as file:
                    file.writelines(islice(rows, count))
                program = f"import sys; from alignment import cli; cli.main({['extract', 'text', *words, *options]}); "
                program += "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
                before = children_seconds()
                told = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, check=True)
                seconds, peak = children_seconds() - before, int(told.stdout) / 1024
                title = "with a lexicon" if options else "both directions"
                print(f"{count:7} lines, {title:15} {seconds:6.0f} s of processor time, peak {peak:5.0f} MiB")


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timings of each")
    parser.add_argument("--copies", type=int, default=4, help="of the story, for the throughput")
    parser.add_argument("--long", type=int, metavar="LINES", help="measure only memory and time of a long text")
    arguments = parser.parse_args()
    if arguments.long:
        long_text(arguments.long)
        return
    torch.set_num_threads(2)
    with torch.no_grad():
        throughput(arguments.repeats, arguments.copies)
        both_directions(arguments.repeats, arguments.copies)
        memory(1)
    latency(50)
    alignment_gradients.report(arguments.repeats)


if __name__ == "__main__":
    main()

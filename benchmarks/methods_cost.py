"""What the methods cost beside the plain forward pass: ``python -m benchmarks.methods_cost``.

A BERT-base-shaped classifier with random weights, on two CPU threads. Every ratio is the whole call (its forward pass
included) over the plain SDPA forward pass without gradients timed in the same run, alternately, so that both see the
same machine.
"""

import argparse
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.norms import Run, alternate, peak_bytes
from captum_norm import ALTI, AttentionTimesGradient, DecompX, GlobEnc, ValueZeroing

REACH = {"DecompX to one logit": "4", "ALTI, all layers": "3", "attention × gradient": "4"}


def main() -> None:
    """Time every method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=128, help="positions of the input (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="timings of each method (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--slow", action="store_true", help="also time what costs a forward pass for every position")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig())
    model.train(False)
    ids = torch.randint(0, model.config.vocab_size, (1, arguments.length))

    def plain() -> object:
        with torch.no_grad():
            return model(ids)

    runs: dict[str, Run] = {
        "plain forward pass": plain,
        "GlobEnc": partial(GlobEnc(model).attribute, ids),
        "ALTI, all layers": partial(ALTI(model).attribute, ids),
        "attention × gradient": partial(AttentionTimesGradient(model).attribute, ids, 1),
        "DecompX to one logit": partial(DecompX(model).attribute, ids, 1),
    }
    if arguments.slow:
        runs["value zeroing"] = partial(ValueZeroing(model).attribute, ids)
        runs["DecompX to hidden states"] = partial(DecompX(model).attribute, ids)
    times = alternate(list(runs.values()), arguments.repeats)
    memory = [peak_bytes(run) for run in runs.values()]
    table = Table(title=f"BERT-base shape, 1 × {arguments.length}: whole call ÷ plain forward pass")
    for column in ("method", "time", "ratio", "to reach", "memory above the forward pass"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for (name, _), taken, peak in zip(runs.items(), times, memory, strict=True):
        reach = f"≤ {REACH[name]}" if name in REACH else "–"
        extra = f"{(peak - memory[0]) / 2**20:.0f} MiB"
        table.add_row(name, f"{taken * 1e3:.0f} ms", f"{taken / times[0]:.2f}", reach, extra)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

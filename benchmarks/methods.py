"""What faithfulness scores cost beside the model's own forward passes: ``python -m benchmarks.methods``.

A classifier of the shape of all-MiniLM-L6 with random weights, on one CPU thread; larger models leave less to lose. The
throughput of the perturbation metrics, everything from token scores to faithfulness scores included, is over that of
the bare model on as many inputs of the same lengths in batches of the same size, timed in the same run, in turn,
in processor time.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from statistics import median
from time import process_time
from types import SimpleNamespace
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from captum_norm.evaluation import Faithfulness, Perturbation

SIZES = ((4, 32), (1, 128))
REMOVALS: tuple[Literal["mask", "mean", "delete"], ...] = ("mask", "mean", "delete")
BATCH = 64


def plain(model: Any, lengths: Sequence[int]) -> None:
    """The bare model on inputs of these lengths, like with like, in batches."""
    lengths = sorted(lengths)
    for start in range(0, len(lengths), BATCH):
        chunk = torch.tensor(lengths[start : start + BATCH])
        mask = (torch.arange(int(chunk.max())) < chunk[:, None]).long()
        model(torch.full_like(mask, 7), mask)


def lengths_run(model: Any, faithfulness: Faithfulness, ids: Tensor, scores: Tensor) -> list[int]:
    """The length of every input that the metrics run."""
    seen: list[int] = []

    def look(_module: object, _args: object, arguments: dict[str, Any]) -> None:
        mask = arguments.get("attention_mask")
        rows = torch.ones_like(arguments["input_ids"]) if mask is None else mask
        seen.extend(rows.sum(1).tolist())

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    faithfulness.evaluate(ids, scores)
    handle.remove()
    return seen


def in_turn(runs: Sequence[Any], repeats: int) -> list[float]:
    """The median processor time of each run in seconds, the runs taking turns."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, taken in zip(runs, times, strict=True):
            start = process_time()
            run()
            taken.append(process_time() - start)
    return [median(taken) for taken in times]


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536))
    model.train(False)
    tokenizer = SimpleNamespace(mask_token_id=103, pad_token_id=0, all_special_ids=(0, 101, 102, 103))
    table = Table(title="throughput ÷ the bare model's (to reach: 0.8)")
    for column in ("batch × length", "removal", "inputs run", "bare model", "ratio"):
        table.add_column(column, justify="right")
    with torch.no_grad():
        for batch, length in SIZES:
            ids = torch.randint(1000, model.config.vocab_size, (batch, length))
            ids[:, 0], ids[:, -1] = 101, 102
            scores = torch.rand(batch, length)
            for removal in REMOVALS:
                perturbation = Perturbation(model, removal, tokenizer=tokenizer, batch_size=BATCH)
                faithfulness = Faithfulness(perturbation)
                lengths = lengths_run(model, faithfulness, ids, scores)
                runs = [partial(plain, model, lengths), partial(faithfulness.evaluate, ids, scores)]
                bare, ours = in_turn(runs, arguments.repeats)
                table.add_row(
                    f"{batch} × {length}", removal, str(len(lengths)), f"{bare:.1f} s", f"{bare / ours:.2f} (≥ 0.8)"
                )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

"""The cost of methods and faithfulness scores relative to the plain forward pass: ``python -m benchmarks.methods``.

Methods explain a BERT-base-shaped classifier with random weights. Ratios compare the whole call (forward pass included)
with the plain SDPA forward pass without gradients, timed alternately in one run.

Perturbation metrics run on a classifier of the shape of all-MiniLM-L6; in larger models the overhead weighs less. Their
throughput, from token scores to faithfulness scores, is relative to that of the bare model on as many inputs of the
same lengths in batches of the same size, timed alternately in one run, in processor time.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from time import process_time
from types import SimpleNamespace
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.norms import Run, alternate, peak_bytes
from captum_norm import ALTI, CPLRP, GIM, AttentionTimesGradient, AttnLRP, DecompX, GlobEnc, ValueZeroing
from captum_norm.lab.evaluation import Faithfulness, Perturbation

TO_ONE_LOGIT = {f"{method.__name__} to one logit": method for method in (DecompX, CPLRP, AttnLRP, GIM)}
REACH = {"ALTI, all layers": 3, "attention × gradient": 4} | dict.fromkeys(TO_ONE_LOGIT, 4)
SIZES = ((4, 32), (1, 128))
REMOVALS: tuple[Literal["mask", "mean", "delete"], ...] = ("mask", "mean", "delete")
BATCH = 64


def costs(length: int, repeats: int, *, slow: bool) -> Table:
    """Return a table with the ratio of each method's whole call to the plain forward pass."""
    model = BertForSequenceClassification(BertConfig())
    model.train(False)
    ids = torch.randint(0, model.config.vocab_size, (1, length))

    def forward() -> object:
        with torch.no_grad():
            return model(ids)

    runs: dict[str, Run] = {
        "plain forward pass": forward,
        "GlobEnc": partial(GlobEnc(model).attribute, ids),
        "ALTI, all layers": partial(ALTI(model).attribute, ids),
        "attention × gradient": partial(AttentionTimesGradient(model).attribute, ids, 1),
        **{name: partial(method(model).attribute, ids, 1) for name, method in TO_ONE_LOGIT.items()},
    }
    if slow:
        runs["value zeroing"] = partial(ValueZeroing(model).attribute, ids)
        runs["DecompX to hidden states"] = partial(DecompX(model).attribute, ids)
    times = alternate(list(runs.values()), repeats)
    memory = [peak_bytes(run) for run in runs.values()]
    table = Table(title=f"BERT-base shape, 1 × {length}: whole call ÷ plain forward pass")
    for column in ("method", "time", "ratio", "to reach", "memory above the forward pass"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for (name, _), taken, peak in zip(runs.items(), times, memory, strict=True):
        reach = f"≤ {REACH[name]}" if name in REACH else "–"
        extra = f"{(peak - memory[0]) / 2**20:.0f} MiB"
        table.add_row(name, f"{taken * 1e3:.0f} ms", f"{taken / times[0]:.2f}", reach, extra)
    return table


def plain(model: Any, lengths: Sequence[int]) -> None:
    """Run the bare model on inputs of these lengths, in batches of similar length."""
    lengths = sorted(lengths)
    for start in range(0, len(lengths), BATCH):
        chunk = torch.tensor(lengths[start : start + BATCH])
        mask = (torch.arange(int(chunk.max())) < chunk[:, None]).long()
        model(torch.full_like(mask, 7), mask)


def lengths_run(model: Any, faithfulness: Faithfulness, ids: Tensor, scores: dict[str, Tensor]) -> list[int]:
    """Return the length of every input that the metrics run."""
    seen: list[int] = []

    def look(_module: object, _args: object, arguments: dict[str, Any]) -> None:
        mask = arguments.get("attention_mask")
        rows = torch.ones_like(arguments["input_ids"]) if mask is None else mask
        seen.extend(rows.sum(1).tolist())

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    faithfulness.evaluate(ids, scores)
    handle.remove()
    return seen


def throughput(repeats: int) -> Table:
    """Return a table with the perturbation metrics' inputs per second relative to the bare model's."""
    model = BertForSequenceClassification(BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536))
    model.train(False)
    tokenizer = SimpleNamespace(mask_token_id=103, pad_token_id=0, all_special_ids=(0, 101, 102, 103))
    table = Table(title="throughput of perturbation metrics ÷ the bare model's (to reach: 0.8)")
    for column in ("batch × length", "removal", "inputs run", "bare model", "ratio"):
        table.add_column(column, justify="right")
    with torch.no_grad():
        for batch, length in SIZES:
            ids = torch.randint(1000, model.config.vocab_size, (batch, length))
            ids[:, 0], ids[:, -1] = 101, 102
            scores = {"random": torch.rand(batch, length)}
            for removal in REMOVALS:
                perturbation = Perturbation(model, removal, tokenizer=tokenizer, batch_size=BATCH)
                faithfulness = Faithfulness(perturbation)
                lengths = lengths_run(model, faithfulness, ids, scores)
                runs: list[Run] = [partial(plain, model, lengths), partial(faithfulness.evaluate, ids, scores)]
                bare, ours = alternate(runs, repeats, process_time)
                table.add_row(f"{batch} × {length}", removal, str(len(lengths)), f"{bare:.1f} s", f"{bare / ours:.2f}")
    return table


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=128, help="positions that methods explain (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timings of everything (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--slow", action="store_true", help="also time what costs a forward pass for every position")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    console = Console(width=110)
    console.print(costs(arguments.length, arguments.repeats, slow=arguments.slow))
    console.print(throughput(arguments.repeats))


if __name__ == "__main__":
    main()

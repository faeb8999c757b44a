"""Memory of explaining answers behind long texts: ``python -m benchmarks.generation --long``.

Peak memory (resident set size, of a fresh process each) and seconds of explaining the last 16 positions of a long text,
beside those of the model's own forward pass, for a LLaMA-shaped model of random weights. "Beyond the model" leaves out
what the process takes once the model is loaded and has run on a few tokens.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from captum_norm import ALTI, GIM, AttentionBlockAttribution, AttnLRP, NormAttribution

ROWS = 16
LENGTHS = (8192, 32768)
# Peak memory at 8,192 tokens, relative to the forward pass; and at 32,768 tokens, everything included.
RATIO, BUDGET = 1.3, 2 * 2**30
SHAPE: Mapping[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": max(LENGTHS),
}
Work = Callable[[LlamaForCausalLM, Tensor], object]


def forward(model: LlamaForCausalLM, ids: Tensor) -> object:
    """The model's own forward pass."""
    with torch.no_grad():
        return model(ids, use_cache=False, logits_to_keep=ROWS)


def span(method: Any, ids: Tensor) -> object:
    """Explain the last positions' most probable tokens together, in one backward pass."""
    return method.decompose(ids, position=[list(range(ids.shape[1] - ROWS, ids.shape[1]))], together=True)


WORK: Mapping[str, Work] = {
    "forward pass": forward,
    "norms": lambda model, ids: NormAttribution(model, aggregation="mean").scores_of_last(ids, ROWS),
    "attention block": lambda model, ids: AttentionBlockAttribution(model, aggregation="mean").scores_of_last(
        ids, ROWS
    ),
    "ALTI": lambda model, ids: ALTI(model, "mean").scores_of_last(ids, ROWS),
    "span of norms": lambda model, ids: NormAttribution(model).maps(ids, last=ROWS, together=True),
    "span by AttnLRP": lambda model, ids: span(AttnLRP(model), ids),
    "span by GIM": lambda model, ids: span(GIM(model), ids),
}


def peak() -> int:
    """Peak resident set size of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(name: str, length: int) -> dict[str, float]:
    """Do the work of this name in this process: its seconds, peak memory, and that before the long text."""
    torch.manual_seed(0)
    model, work = LlamaForCausalLM(LlamaConfig(**SHAPE)).train(False), WORK[name]
    ids = torch.randint(0, SHAPE["vocab_size"], (1, length))
    work(model, ids[:, : 2 * ROWS])
    before, start = peak(), time.perf_counter()
    work(model, ids)
    return {"seconds": time.perf_counter() - start, "before": before, "peak": peak()}


def alone(name: str, length: int, threads: int) -> dict[str, float]:
    """:func:`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.long_answers", name, str(length), str(threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def report(lengths: Sequence[int], threads: int) -> None:
    """Print seconds and peak memory."""
    title = f"last {ROWS} positions, 4 layers × 512, 8 heads, 2 of keys, float32, {threads} threads"
    table = Table("tokens", "work", "seconds", "peak", "÷ forward pass", "beyond the model", "÷", title=title)
    for length in lengths:
        own: dict[str, float] = {}
        for name in WORK:
            found = alone(name, length, threads)
            own = own or found
            beyond, of_own = found["peak"] - found["before"], own["peak"] - own["before"]
            budget = f" (≤ {BUDGET / 2**30:.0f} GiB)" if length == max(LENGTHS) and name != "forward pass" else ""
            table.add_row(
                f"{length:,}",
                name,
                f"{found['seconds']:.1f}",
                f"{found['peak'] / 2**20:,.0f} MiB{budget}",
                f"{found['peak'] / own['peak']:.2f}" + (f" (≤ {RATIO})" if length == min(LENGTHS) else ""),
                f"{beyond / 2**20:,.0f} MiB",
                f"{beyond / of_own:.2f}",
            )
    Console(width=140).print(table)


def main() -> None:
    """Measure one work: its name, the number of tokens, and that of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=WORK)
    parser.add_argument("length", type=int)
    parser.add_argument("threads", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(json.dumps(measure(arguments.work, arguments.length)))


if __name__ == "__main__":
    main()

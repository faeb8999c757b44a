"""The cost of norms relative to the plain forward pass: ``python -m benchmarks.norms``.

A BERT-base-shaped model with random weights, on two CPU threads. Ratios compare the whole call (forward pass included)
with the plain SDPA forward pass, timed alternately in one run. Memory is the peak allocation beyond that of the plain
forward pass.
"""

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

from captum_norm import NormMeter
from captum_norm.models import Scope

Run = Callable[[], object]
SIZES = ((1, 128), (8, 128), (1, 512), (8, 512))
SCOPES: tuple[Scope, ...] = ("attn", "attn_res", "attn_res_ln")
TARGETS = {128: (1.3, 1.6), 512: (1.5, 2.0)}


def alternate(runs: Sequence[Run], repeats: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Return the time of each run in seconds by a clock, taken alternately after a warm-up.

    That of the first one is its median; the others' are in the median ratio to the first one of the same round, since a
    machine's slow moments last longer than a round.
    """
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(repeats):
        for run, taken in zip(runs, times, strict=True):
            start = clock()
            run()
            taken.append(clock() - start)
    typical = median(times[0])
    ratios = (median(time / first for time, first in zip(taken, times[0], strict=True)) for taken in times)
    return [ratio * typical for ratio in ratios]


def peak_bytes(run: Run) -> int:
    """Return the peak memory of the tensors allocated during a run."""
    run()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    del kept
    now = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def direct(model: BertModel, ids: Tensor) -> list[Tensor]:
    """Compute AttnResLn-N maps of all layers directly: every vector formed, one layer at a time."""
    output = model(ids, output_attentions=True, output_hidden_states=True)
    maps = []
    layers: Any = model.encoder.layer
    for layer, weights, hidden in zip(layers, output.attentions, output.hidden_states, strict=False):
        attention, self_output = layer.attention.self, layer.attention.output
        heads = weights.shape[1]
        values = attention.value(hidden).unflatten(-1, (heads, -1)).transpose(1, 2)
        transformed = values @ self_output.dense.weight.T.unflatten(0, (heads, -1))
        vectors = torch.einsum("bhqk,bhkd->bqkd", weights, transformed)
        own = torch.arange(vectors.shape[1])
        vectors[:, own, own] += hidden
        norm = self_output.LayerNorm
        scale = (vectors.sum(2) + self_output.dense.bias).var(-1, unbiased=False).add(norm.eps).rsqrt()
        vectors = (vectors - vectors.mean(-1, keepdim=True)) * norm.weight
        maps.append(vectors.norm(dim=-1) * scale[..., None])
    return maps


def bert(attention: str) -> BertModel:
    """Build a BERT-base-shaped model."""
    model = BertModel(BertConfig(), add_pooling_layer=False)
    model.set_attn_implementation(attention)
    model.train(False)
    return model


def bert_table(console: Console, repeats: int) -> None:
    """Print ratios and memory for a BERT-base-shaped model."""
    model, eager = bert("sdpa"), bert("eager")
    meter = NormMeter(model)
    table = Table(title="BERT-base shape: whole call ÷ plain forward pass (to reach); memory above the forward pass")
    for column in (
        "batch × length",
        "forward",
        "AttnResLn-N",
        "norms, ratios, α",
        "… per head too",
        "weights only",
        "direct AttnResLn-N",
        "memory ÷ one layer's α",
    ):
        table.add_column(column, justify="right")
    for batch, length in SIZES:
        ids = torch.randint(0, model.config.vocab_size, (batch, length))
        runs: list[Run] = [
            partial(model, ids),
            partial(meter.measure, ids, scopes=["attn_res_ln"]),
            partial(meter.measure, ids, scopes=SCOPES, weights=True),
            partial(meter.measure, ids, scopes=SCOPES, weights=True, head_norms=True),
            partial(meter.measure, ids, weights=True),
        ]
        plain, norms, everything, heads, weights = alternate(
            runs, repeats if batch * length <= 512 else max(5, repeats // 3)
        )
        direct_ratio = "–"
        if batch == 1 and length == 128:
            (slow,) = alternate([partial(direct, eager, ids)], 1)
            direct_ratio = f"{slow / plain:.1f}"
        one_layer = batch * model.config.num_attention_heads * length**2 * 4
        extra = (peak_bytes(runs[1]) - peak_bytes(runs[0])) / one_layer
        reach = TARGETS[length]
        table.add_row(
            f"{batch} × {length}",
            f"{plain * 1e3:.0f} ms",
            f"{norms / plain:.2f} (≤ {reach[0]})",
            f"{everything / plain:.2f} (≤ {reach[1]})",
            f"{heads / plain:.2f}",
            f"{weights / plain:.2f}",
            direct_ratio,
            f"{extra:.2f} (≤ 3)",
        )
    console.print(table)


def first_use(console: Console) -> None:
    """Print the one-time cost per model of finding its structure and multiplying its weights."""
    model = bert("sdpa")
    ids = torch.randint(0, model.config.vocab_size, (1, 128))
    meter = NormMeter(model)
    (plain,) = alternate([partial(model, ids)], 3)
    start = time.perf_counter()
    meter.measure(ids, scopes=["attn_res_ln"])
    console.print(
        f"first use of a model (structure, weight products), 1 × 128: {(time.perf_counter() - start) / plain:.1f}"
    )


def long_input(console: Console, length: int) -> None:
    """Print the cost of one LLaMA-shaped layer on a long input, whose weights are never held at once."""
    model: Any = LlamaModel(LlamaConfig(vocab_size=64, num_hidden_layers=1, max_position_embeddings=length))
    model.train(False)
    meter = NormMeter(model)
    ids = torch.randint(0, 64, (1, length))
    runs: list[Run] = [partial(model, ids), partial(meter.measure, ids, scopes=["atb"])]
    plain, norms = alternate(runs, 1)
    memory, more = (peak_bytes(run) for run in runs)
    weights = model.config.num_attention_heads * length**2 * 4
    console.print(
        f"one LLaMA-shaped layer (32 heads, D 4096), length {length}: {norms / plain:.2f} × the forward pass of "
        f"{plain:.1f} s; memory above it {(more - memory) / 2**30:.2f} GiB, its map {length**2 * 4 / 2**30:.2f} GiB, "
        f"all attention weights would be {weights / 2**30:.2f} GiB"
    )


def on_an_accelerator(console: Console, device: str, layers: int, length: int) -> None:
    """Print the cost of norms of a LLaMA-8B-shaped model in bfloat16, beside its flash-attention forward pass."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=length,
        dtype="bfloat16",
    )
    with torch.device(device):
        model: Any = LlamaModel(config).bfloat16()
    model.train(False)
    meter, ids = NormMeter(model), torch.randint(0, 64, (1, length), device=device)

    def synchronised(run: Run) -> Run:
        def both() -> None:
            run()
            torch.cuda.synchronize(device)

        return both

    def peak(run: Run) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device)

    plain_run, norms_run = (
        synchronised(run) for run in (partial(model, ids, use_cache=False), partial(meter.measure, ids, scopes=["atb"]))
    )
    plain, norms = alternate([plain_run, norms_run], 3)
    more, maps = (peak(norms_run) - peak(plain_run)) / 2**30, layers * length**2 * 4 / 2**30
    console.print(
        f"LLaMA-8B shape, {layers} layers, bfloat16, 1 × {length} on {torch.cuda.get_device_name(device)}: "
        f"{norms / plain:.2f} × the forward pass of {plain * 1e3:.0f} ms (≤ 2); memory above it {more:.2f} GiB, of "
        f"which the maps are {maps:.2f} GiB"
    )


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeats", type=int, default=11, help="timings of each small size; a third, at least 5, for large ones"
    )
    parser.add_argument("--long", type=int, default=8192, help="length of the long input; 0 leaves it out")
    parser.add_argument("--device", default="cpu", help="cuda: measure a LLaMA-8B-shaped model there, and nothing else")
    parser.add_argument("--layers", type=int, default=32, help="layers of that model")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    console = Console(width=150)
    with torch.no_grad():
        if arguments.device != "cpu":
            on_an_accelerator(console, arguments.device, arguments.layers, min(arguments.long, 4096))
            return
        first_use(console)
        bert_table(console, arguments.repeats)
        if arguments.long:
            long_input(console, arguments.long)


if __name__ == "__main__":
    main()

"""The cost of scopes through the feed-forward network, and of norms by length: ``python -m benchmarks.layers``.

One layer with random weights, on CPU. The rate of a whole call, forward pass included, counts only the matrix products
that every implementation needs: one per map, with one row per vector. It is compared with the rate of such products
alone, timed in the same run. Memory is the peak allocation beyond that of the plain forward pass; the direct
implementation forms all vectors of the layer at once.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, OPTConfig, OPTModel

from benchmarks.norms import Run, alternate, peak_bytes
from captum_norm import NormMeter
from captum_norm.models import Scope

MIB = 2**20
BUDGET = 64 * MIB
GROWTH = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Shape:
    """One layer.

    Attributes:
        name: what it is shaped like.
        build: makes it.
        scope: the end of the layer.
        neurons: F.
        maps: how many maps its feed-forward network has: two, or three if it is gated.
        causal: whether attention only looks back.
    """

    name: str
    build: Callable[[], nn.Module]
    scope: Scope
    neurons: int
    maps: int
    causal: bool

    def operations(self, length: int) -> int:
        """Return the operations in the maps' products with all vectors, for a width of 768."""
        vectors = length * (length + 1) // 2 if self.causal else length**2
        return 2 * self.maps * vectors * 768 * self.neurons


def bert(length: int = 512) -> Any:
    """Build a layer of BERT-base's shape."""
    return BertModel(BertConfig(num_hidden_layers=1, max_position_embeddings=length), add_pooling_layer=False)


def llama() -> Any:
    """Build a LLaMA layer of that width."""
    config = LlamaConfig(
        vocab_size=1000, hidden_size=768, intermediate_size=2048, num_hidden_layers=1, num_attention_heads=12
    )
    return LlamaModel(config)


def opt() -> Any:
    """Build a layer of OPT-125m's shape; with random weights, half of its ReLU neurons are off."""
    return OPTModel(OPTConfig(num_hidden_layers=1))


SHAPES = (
    Shape("BERT-base, GELU", bert, "atb_ff_res_ln", 3072, 2, causal=False),
    Shape("OPT-125m, ReLU", opt, "atb_ff_res", 3072, 2, causal=True),
    Shape("LLaMA, SwiGLU", llama, "atb_ff_res", 2048, 3, causal=True),
)


def product_rate(repeats: int = 5) -> float:
    """Return operations per second of the matrix products of BERT-base's feed-forward network, on many rows."""
    rows, into, out = torch.randn(2048, 768), torch.randn(768, 3072), torch.randn(3072, 768)
    (seconds,) = alternate([lambda: rows @ into @ out], repeats)
    return 2 * 2 * len(rows) * into.numel() / seconds


def direct(model: Any, ids: Tensor) -> Tensor:
    """Compute the ``atb_ff_res_ln`` map of BERT's one layer with all vectors formed at once."""
    output = model(ids, output_attentions=True, output_hidden_states=True)
    (weights,), hidden, layer = output.attentions, output.hidden_states[0], model.encoder.layer[0]
    attention, dense = layer.attention.self, layer.attention.output.dense
    values = attention.value(hidden).unflatten(-1, (weights.shape[1], -1)).transpose(1, 2)
    transformed = values @ dense.weight.T.unflatten(0, (weights.shape[1], -1))
    vectors = torch.einsum("bhqk,bhkd->bqkd", weights, transformed)
    own = torch.arange(vectors.shape[1])
    vectors[:, own, own] += hidden
    vectors, end = _normalized(layer.attention.output.LayerNorm, vectors, vectors.sum(2) + dense.bias)
    points = layer.intermediate.dense(end)
    slopes = nn.functional.gelu(points) / points
    through = (vectors @ layer.intermediate.dense.weight.T * slopes[:, :, None]) @ layer.output.dense.weight.T
    total = end + layer.output.dense(nn.functional.gelu(points))
    vectors, _ = _normalized(layer.output.LayerNorm, vectors + through, total)
    norms: Tensor = vectors.norm(dim=-1)
    return norms


def _normalized(norm: Any, vectors: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Apply a norm frozen at their sum to vectors, and to the sum itself."""
    scale = whole.var(-1, unbiased=False, keepdim=True).add(norm.eps).rsqrt()
    vectors = (vectors - vectors.mean(-1, keepdim=True)) * norm.weight * scale[:, :, None]
    return vectors, norm(whole)


def feed_forward_table(console: Console, lengths: tuple[int, ...]) -> None:
    """Print rates and memory of the last scope of each layer."""
    table = Table(title=f"Scopes through the feed-forward network, {BUDGET // MIB} MiB for vectors")
    for column in (
        "layer",
        "length",
        "seconds",
        "GFLOP/s",
        "products alone",
        "share (≥ 0.60)",
        "memory ÷ budget (≤ 1)",
    ):
        table.add_column(column, justify="right")
    for shape in SHAPES:
        torch.manual_seed(0)
        model = shape.build().train(False)
        meter = NormMeter(model, memory_budget=BUDGET)
        for length in lengths:
            ids = torch.randint(3, 1000, (1, length))
            run = partial(meter.measure, ids, scopes=[shape.scope])
            meter.measure(ids[:, :16], scopes=[shape.scope])
            rates = [product_rate()]
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            rates.append(product_rate())
            rate = sum(rates) / 2
            achieved = shape.operations(length) / seconds
            # The profiler keeps every event, so a long input would take it more memory than there is.
            memory = f"{(peak_bytes(run) - peak_bytes(partial(model, ids))) / BUDGET:.2f}" if length <= 128 else "–"
            numbers = (f"{seconds:.1f}", f"{achieved / 1e9:.0f}", f"{rate / 1e9:.0f}", f"{achieved / rate:.2f}", memory)
            table.add_row(shape.name, str(length), *numbers)
    console.print(table)


def beside_the_direct_way(console: Console, length: int) -> None:
    """Print time and memory of both implementations on BERT's layer."""
    torch.manual_seed(0)
    model = bert()
    model.train(False)
    eager = bert()
    eager.load_state_dict(model.state_dict())
    eager.set_attn_implementation("eager")
    eager.train(False)
    ids = torch.randint(3, 1000, (1, length))
    meter = NormMeter(model, memory_budget=BUDGET)
    ours, theirs = (
        partial(meter.measure, ids, scopes=["atb_ff_res_ln"]),
        partial(direct, eager, ids),
    )
    found: Any = ours()
    difference = (found["encoder"].norms["atb_ff_res_ln"][:, 0] - theirs()).abs().max()
    times = alternate([ours, theirs], 1)
    memory = [peak_bytes(run) / MIB for run in (ours, theirs)]
    neurons = length**2 * 3072 * 4
    console.print(
        f"BERT-base's layer, length {length}: {times[0]:.1f} s and {memory[0]:.0f} MiB, the direct way "
        f"{times[1]:.1f} s and {memory[1]:.0f} MiB; largest difference {difference:.1e}. "
        f"All vectors' neurons at once are {neurons / MIB:.0f} MiB here, "
        f"{512**2 * 3072 * 4 / 2**30:.0f} GiB at length 512."
    )


def growth(console: Console, lengths: tuple[int, ...]) -> None:
    """Print time and memory of ``attn_res_ln`` by length, with the exponents of their power laws."""
    torch.manual_seed(0)
    model = bert(max(lengths))
    model.train(False)
    meter = NormMeter(model)
    table = Table(title="attn_res_ln of one BERT-base layer")
    for column in ("length", "ms", "forward pass, ms", "MiB", "… but for the map"):
        table.add_column(column, justify="right")
    times, memories = [], []
    for length in lengths:
        ids = torch.randint(3, 1000, (1, length))
        runs: list[Run] = [partial(meter.measure, ids, scopes=["attn_res_ln"]), partial(model, ids)]
        measured, plain = alternate(runs, 5 if length <= 512 else 1)
        memory = peak_bytes(runs[0]) - peak_bytes(runs[1])
        times.append(measured)
        memories.append(max(memory, 1))
        row = (measured * 1e3, plain * 1e3, memory / MIB, (memory - length**2 * 4) / MIB)
        table.add_row(str(length), *(f"{number:.1f}" for number in row))
    console.print(table)
    long = [length for length in lengths if length >= 512]
    console.print(
        f"fitted exponents: time {exponent(lengths, times):.2f}, memory {exponent(lengths, memories):.2f}; from length "
        f"512 on: time {exponent(long, times[-len(long) :]):.2f}, memory {exponent(long, memories[-len(long) :]):.2f}"
    )


def exponent(lengths: Any, values: Any) -> float:
    """Return the exponent p of the least-squares fit of c · lengthᵖ."""
    x, y = (torch.tensor([math.log(value) for value in numbers], dtype=torch.float64) for numbers in (lengths, values))
    x = x - x.mean()
    return float(x @ y / (x @ x))


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256], help="lengths of the feed-forward scopes")
    parser.add_argument(
        "--longest", type=int, choices=GROWTH[4:], default=max(GROWTH), help="where the growth with length ends"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console(width=150)
    with torch.no_grad():
        growth(console, tuple(length for length in GROWTH if length <= arguments.longest))
        beside_the_direct_way(console, 96)
        feed_forward_table(console, tuple(arguments.lengths))


if __name__ == "__main__":
    main()

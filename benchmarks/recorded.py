"""Record the results of every method on every family, and compare the records before and after a change.

``python -m benchmarks.recorded BEFORE`` writes a record, ``python -m benchmarks.recorded AFTER --against BEFORE`` also
says how far the two differ. A refusal is recorded as the class of its error.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from captum.attr import IntegratedGradients
from rich.console import Console
from torch import Tensor, nn

from captum_norm import (
    ALTI,
    AttentionBlockAttribution,
    AttentionRollout,
    AttentionTimesGradient,
    AttentionWeights,
    CaptumNormError,
    DecompX,
    GlobEnc,
    NormAttribution,
    NormMeter,
    TokenAttribution,
    ValueZeroing,
)
from tests import classifiers, encoder_decoders, families, torch_models
from tests.encoder_decoders import ENCODER_DECODERS
from tests.families import FAMILIES
from tests.hybrids import HYBRIDS

Record = dict[str, Tensor | str]
Make = Callable[[nn.Module], Any]

METHODS: dict[str, Make] = {
    "norm": NormAttribution,
    "norm attn_res": lambda model: NormAttribution(model, "attn_res"),
    "norm attn_res_ln": lambda model: NormAttribution(model, "attn_res_ln", "mean"),
    "block": AttentionBlockAttribution,
    "block atb_ln": lambda model: AttentionBlockAttribution(model, "atb_ln"),
    "block atb_ff": lambda model: AttentionBlockAttribution(model, "atb_ff"),
    "block atb_ff_res": lambda model: AttentionBlockAttribution(model, "atb_ff_res"),
    "block atb_ff_res_ln": lambda model: AttentionBlockAttribution(model, "atb_ff_res_ln"),
    "block, bias": lambda model: AttentionBlockAttribution(model, "atb_ff_res", baseline="bias"),
    "weights": AttentionWeights,
    "weights attn_res": lambda model: AttentionWeights(model, "attn_res"),
    "rollout": AttentionRollout,
    "alti": ALTI,
    "globenc": GlobEnc,
    "value zeroing": ValueZeroing,
    "decompx": DecompX,
    "decompx, absdot": lambda model: DecompX(model, "absdot"),
}
MEASURED: dict[str, Mapping[str, Any]] = {
    "norms": {"scopes": ("attn", "atb"), "weights": True, "per_head": True, "head_norms": True},
    "ratios": {"scopes": ("attn", "atb"), "head_norms": True, "maps": False},
    "one layer": {"scopes": ("attn",), "weights": True, "layers": [-1]},
}
# Of the same numbers, added up in another order.
TOLERANCE = 1e-6


def tensors(result: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all numbers in nested results, in double precision, with their field names."""
    if isinstance(result, Tensor):
        yield name, result.detach().double()
    elif isinstance(result, Mapping):
        for key, entry in result.items():
            yield from tensors(entry, f"{name}/{key}")
    elif is_dataclass(result):
        for field in fields(result):
            yield from tensors(getattr(result, field.name), f"{name}/{field.name}")
    elif isinstance(result, tuple):
        for index, entry in enumerate(result):
            yield from tensors(entry, f"{name}/{index}")


def note(record: Record, name: str, work: Callable[[], Any]) -> None:
    """Add a result, or the class of the error that refuses it."""
    try:
        record.update(tensors(work(), name))
    except CaptumNormError as error:
        record[name] = type(error).__name__


def note_all(record: Record, name: str, model: nn.Module, inputs: Any, mask: Any = None) -> None:
    """Add the results of every method for some inputs."""
    for kind, options in MEASURED.items():
        note(record, f"{name}: {kind}", partial(NormMeter(model).measure, inputs, mask, **options))
    for kind, make in METHODS.items():
        note(record, f"{name}: {kind}, maps", partial(maps, make, model, inputs, mask))
        note(record, f"{name}: {kind}", partial(attributions, make, model, inputs, mask, position="first"))


def maps(make: Make, model: nn.Module, *inputs: Any) -> Any:
    """Return the maps of a method; constructing it may be refused, too."""
    return make(model).maps(*inputs)


def attributions(make: Make, model: nn.Module, inputs: Any, mask: Any, **options: Any) -> Any:
    """Return the scores of a method; constructing it may be refused, too."""
    return make(model).attribute(inputs, additional_forward_args=mask, **options)


def recorded() -> Record:
    """Return all results."""
    record: Record = {}
    for name in FAMILIES:
        note_all(record, name, families.build(name), families.inputs(name))
        meter = NormMeter(families.build(name, 1, torch.float64))
        inputs = families.inputs(name, 1, dtype=torch.float64)
        note(record, f"{name}: float64", partial(meter.measure, inputs, scopes=("attn", "atb")))
    for name in ENCODER_DECODERS:
        note_all(record, name, encoder_decoders.build(name), encoder_decoders.inputs(name))
    for name, make in HYBRIDS.items():
        note_all(record, name, families.randomized(make, 0, torch.float32), families.inputs("bert"))
    note_all(record, "torch.nn", torch_models.randomized(torch_models.Classifier()), torch_models.ids(9, 3))
    pixels = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    note_all(record, "torch.nn of its own", torch_models.randomized(torch_models.Vision()), pixels)
    classifier = classifiers.classifier()
    ids, mask = classifiers.sentences([7, 11, 5])
    note_all(record, "padded", classifier, ids, mask)
    targeted: dict[str, Make] = {
        "decompx": DecompX,
        "decompx, propagated": lambda model: DecompX(model, propagate=True),
        "decompx, abssim": lambda model: DecompX(model, "abssim"),
        "attention gradient": AttentionTimesGradient,
        "integrated gradients": lambda model: TokenAttribution(
            model, IntegratedGradients, tokenizer=classifiers.TOKENIZER
        ),
    }
    for name, build in targeted.items():
        note(record, f"classes: {name}", partial(attributions, build, classifier, ids, mask, target=1))
    return record


def relative_error(name: str, first: Tensor, second: Tensor) -> float:
    """Return the largest deviation relative to the largest number; for errors, which are relative, the absolute one."""
    if not first.numel():
        return 0.0
    size = torch.ones(()) if name.endswith("convergence_delta") else first.abs().max().clamp(min=1e-300)
    return float((first - second).abs().max() / size)


def compare(before: Record, after: Record, console: Console) -> bool:
    """Print how far two records differ; return whether they agree."""
    verdicts: Counter[str] = Counter()
    for name in sorted(before.keys() | after.keys()):
        first, second = before.get(name), after.get(name)
        if isinstance(first, Tensor) and isinstance(second, Tensor) and first.shape == second.shape:
            error = relative_error(name, first, second)
            verdict = "bit-equal" if torch.equal(first, second) else "near" if error <= TOLERANCE else "different"
        else:
            error, verdict = float("nan"), "bit-equal" if isinstance(first, str) and first == second else "different"
        verdicts[verdict] += 1
        if verdict == "different":
            kinds = (entry if isinstance(entry, str) else getattr(entry, "shape", None) for entry in (first, second))
            console.print(f"{name}: relative error {error:.1e} ({' → '.join(map(str, kinds))})", highlight=False)
    console.print(dict(verdicts))
    return not verdicts["different"]


def main() -> None:
    """Record, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    after = recorded()
    torch.save(after, options.record)
    if options.against is not None and not compare(torch.load(options.against, weights_only=True), after, Console()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""The error of norms in half-precision models: ``python -m benchmarks.precision``.

The model families of the tests, tiny and with random weights, in each dtype. Exact norms use the same (rounded) weights
in float64, with every vector formed. Nearly all of the error is the model's own rounding of hidden states and attention
weights; the last column is what the norms add.
"""

import argparse
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from captum_norm import NormMeter
from captum_norm.attr.layer_maps import TOLERANCE
from captum_norm.attr.measurements import Measurements
from captum_norm.models import Scope
from tests import families, oracle
from tests.families import FAMILIES
from tests.test_matrix import SCOPES

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Where rounding sends a token to another expert the model computes another function, and its maps are not comparable.
COMPARABLE = [name for name, family in FAMILIES.items() if "mixture of experts" not in family.special]


class Errors(NamedTuple):
    """The largest errors of a model's layers and scopes.

    Attributes:
        maps: of a map, ‖map − exact map‖ / ‖exact map‖.
        mixing_ratio: of a query's mixing ratio, absolute.
        completeness: the convergence delta.
        accumulation: of a map computed in float32 from the one computed in float64 of the same attention weights and
            values, relative as ``maps``.
    """

    maps: float
    mixing_ratio: float
    completeness: float
    accumulation: float


def errors(name: str, dtype: torch.dtype, seed: int = 0) -> Errors:
    """Return the errors of a model of the family ``name`` in a dtype."""
    family = FAMILIES[name]
    scopes = SCOPES[family.style]
    model, inputs = families.build(name, seed, dtype), families.inputs(name, seed, dtype=dtype)
    single, double = (
        _measured(NormMeter(model, accumulate=to), inputs, scopes) for to in (torch.float32, torch.float64)
    )
    exact = oracle.layers(family, model.double(), inputs.double() if inputs.is_floating_point() else inputs)
    vectors = {scope: torch.stack([layer.vectors(scope)[0] for layer in exact], 1) for scope in scopes}
    ratios = {scope: torch.stack([oracle.mixing_ratio(v) for v in vectors[scope].unbind(1)], 1) for scope in scopes}
    delta = single.convergence_delta
    return Errors(
        maps=max(_relative(single.norms[scope], vectors[scope].norm(dim=-1)) for scope in scopes),
        mixing_ratio=max(float((single.mixing_ratio[scope] - ratios[scope]).abs().max()) for scope in scopes),
        completeness=0.0 if delta is None else float(delta.max()),
        accumulation=max(_relative(single.norms[scope], double.norms[scope]) for scope in scopes),
    )


def _measured(meter: NormMeter, inputs: Tensor, scopes: Iterable[Scope]) -> Measurements:
    (measured,) = meter.measure(inputs, scopes=list(scopes)).values()
    return measured


def _relative(maps: Tensor, exact: Tensor) -> float:
    """Return the maximum over examples and layers."""
    error = (maps.double() - exact.double()).flatten(2).norm(dim=-1) / exact.double().flatten(2).norm(dim=-1)
    return float(error.max())


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many models of each family (default: %(default)s)")
    parser.add_argument("--each", action="store_true", help="also print the errors of the maps of each family")
    arguments = parser.parse_args()
    print(f"{len(COMPARABLE)} families, {arguments.seeds} models of each; the largest error\n")
    print("| dtype | maps | mixing ratios | completeness (accepted) | accumulation alone |")
    print("|---|---|---|---|---|")
    for dtype in DTYPES:
        found = {name: [errors(name, dtype, seed) for seed in range(arguments.seeds)] for name in COMPARABLE}
        worst = Errors(*(max(column) for column in zip(*(e for each in found.values() for e in each), strict=True)))
        print(
            f"| {str(dtype).removeprefix('torch.')} | {worst.maps:.0e} | {worst.mixing_ratio:.0e} | "
            f"{worst.completeness:.0e} ({TOLERANCE[dtype]:.0e}) | {worst.accumulation:.0e} |"
        )
        if arguments.each:
            for name, each in found.items():
                print(f"| {name} | {max(e.maps for e in each):.0e} | {max(e.mixing_ratio for e in each):.0e} | | |")


if __name__ == "__main__":
    main()

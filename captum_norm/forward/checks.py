"""Checks results: that they are numbers, and that vectors add up to what the model computed."""

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from captum_norm.checks import quoted
from captum_norm.errors import IncompleteDecompositionError, InvalidInputError, NonFiniteError
from captum_norm.models.offloading import loaded
from captum_norm.models.stacks import Place

TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.int8: 1e-1}
)
"""Largest relative completeness error accepted, by the model's precision.

Vectors are added up in float32 or better, so the error of half-precision models is that of the model's own rounding: a
few units in the last place (2⁻¹¹ and 2⁻⁸ of the value) of the attention weights, values and hidden states. Linear maps
that round their inputs to eight bits (``torch.int8``) err by steps of 1/127 of each input's largest entry.
"""


Results = TypeVar("Results")


def finite_results(model: nn.Module, results: Results) -> Results:
    """Return a method's results unchanged if all their numbers are finite."""
    found = [(name, tensor.detach()) for name, tensor in _tensors(results) if tensor.is_floating_point()]
    # A sum takes one pass and no memory, but may overflow although all numbers are finite.
    sums = [tensor.sum().to(found[0][1]) for _, tensor in found]
    if sums and not torch.stack(sums).isfinite().all():
        for name, tensor in found:
            if not tensor.isfinite().all():
                refuse_non_finite_weights(model)
                raise NonFiniteError(
                    f"{name or 'a result'} for {type(model).__name__} contains NaN or infinity: its numbers do, or "
                    f"leave the range of {tensor.dtype}; check the inputs, or convert the model to a wider dtype"
                )
    return results


def _tensors(results: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors in nested results with the names of their fields."""
    fields = _fields(results)
    if isinstance(results, Tensor):
        yield name, results
    elif fields:
        for field, entry in fields.items():
            yield from _tensors(entry, f"{name}.{field}" if name else field)
    elif isinstance(results, tuple):
        for entry in results:
            yield from _tensors(entry, name)


def _fields(results: Any) -> Mapping[str, Any]:
    """The fields of a mapping, dataclass or named tuple; none for anything else."""
    if isinstance(results, Mapping):
        return results
    if is_dataclass(results):
        return vars(results)
    return results._asdict() if isinstance(results, tuple) and hasattr(results, "_asdict") else {}


def expect_finite(model: nn.Module, place: Place, *results: Tensor) -> None:
    """Refuse a layer's results with NaN or infinity."""
    if not all(result.isfinite().all() for result in results):
        raise NonFiniteError(f"what {type(model).__name__} computes in {place} contains NaN or infinity")


def expect_complete(
    model: nn.Module,
    place: Place,
    delta: Tensor,
    precision: torch.dtype,
    discrepancy: tuple[Tensor, torch.dtype] | None = None,
) -> None:
    """Refuse a layer whose vectors do not add up, or whose fast norms differ from directly computed ones."""
    expect_finite(model, place, delta)
    name, largest = type(model).__name__, delta.max().item()
    if largest > TOLERANCE[precision]:
        raise IncompleteDecompositionError(
            f"the vectors of {place} do not add up to what {name} computed: relative error {largest:.1e}, accepted "
            f"{TOLERANCE[precision]:.0e} for {precision}"
        )
    if discrepancy is None:
        return
    error, dtype = discrepancy
    expect_finite(model, place, error)
    largest = error.max().item()
    if largest > TOLERANCE[dtype]:
        raise IncompleteDecompositionError(
            f"the fast norms of {place} of {name} differ from directly computed ones by {largest:.1e}, accepted "
            f"{TOLERANCE[dtype]:.0e} for {dtype}"
        )


def refuse_non_finite_weights(model: nn.Module) -> None:
    """Refuse a model with NaN or infinity in a weight."""
    for path, module in model.named_modules():
        with loaded(module):
            for name, parameter in module.named_parameters(path, recurse=False):
                if not parameter.detach().isfinite().all():
                    raise NonFiniteError(f'the weight "{name}" of {type(model).__name__} contains NaN or infinity')


def expect_number(model: nn.Module, number: Tensor) -> None:
    """Refuse an output that is not finite."""
    if not number.isfinite().all():
        refuse_non_finite_weights(model)
        raise NonFiniteError(f"the output of {type(model).__name__} contains NaN or infinity")


def delta_for(attributions: Tensor | tuple[Tensor, ...], delta: Tensor) -> Tensor:
    """Return the completeness error, (B,), for attributions of as many examples."""
    given: Any = attributions if isinstance(attributions, tuple) else (attributions,)
    if len(given) not in (1, 2) or not all(_is_batched(each) for each in given):
        raise InvalidInputError(f"got attributions {quoted(attributions)}; expected what attribute() returned")
    for each in given:
        if len(each) != len(delta):
            raise InvalidInputError(f"got attributions of {len(each)} examples for {len(delta)} inputs")
    return delta


def _is_batched(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_nested and value.dim() > 0

"""Compares a model's outputs while it is explained with its own."""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import Received, evaluating, first_argument, hooked, tensors_in, with_argument
from captum_norm.models.precision import coarsest, step_of
from captum_norm.models.probes import affinity, may_be_affine
from captum_norm.models.projections import plain_matrix
from captum_norm.models.stacks import Stacks


@contextmanager
def attending_plainly(call: ModelCall) -> Iterator[Stacks]:
    """Run the model's attention as when it is explained; yield the stacks that its calls fill."""
    stacks = call.stacks()
    with call.attention_through(lambda attention: stacks.attend(attention)[0]):
        yield stacks


def expect_same_output(call: ModelCall) -> Stacks:
    """Check that explaining a model does not change its outputs: run it both ways and compare.

    Args:
        call: a call with few and short examples.

    Returns:
        the stacks of layers that the call went through.

    Raises:
        UnsupportedModelError: if outputs differ by more than rounding.
    """
    with torch.no_grad(), evaluating(call.model):
        with attending_plainly(call) as stacks:
            explained = _outputs(call)
        own = _outputs(call)
        # An explained model may return no attention weights; they come after its main output.
        compared = list(zip(own, explained, strict=False))[: None if len(own) == len(explained) else 1]
        precision = coarsest(torch.float32, *(_precision(call.model, first) for first, _ in compared))
        # Half the digits: rounding differs between attention functions and adds up over layers.
        error = max((_error(first, second, call) for first, second in compared), default=0.0)
        if error > step_of(precision) ** 0.5:
            precision = coarsest(precision, *_measured_precisions(call))
        accepted = step_of(precision) ** 0.5
        if error > accepted and precision not in (torch.float32, torch.float64):
            # A router may choose other experts, and a head may cancel everything but rounding.
            error = max(_errors_of_modules(call, stacks.queries), default=error)
    if error > accepted:
        raise UnsupportedModelError(
            f"{type(call.model).__name__} computes something else by itself than with attention weights: relative "
            f"difference {error:.1e}, accepted {accepted:.0e} for {precision}; to explain the weights, run the model "
            f"with them, too{call.library.with_weights}"
        )
    return stacks


def _outputs(call: ModelCall) -> list[Tensor]:
    """The model's floating-point outputs."""
    returned = tensors_in(_run(call))
    return [torch.atleast_2d(tensor.clone()) for tensor in returned if tensor.is_floating_point() and tensor.numel()]


def _run(call: ModelCall) -> Any:
    """Run the model with the same random numbers each time."""
    devices = {parameter.device for parameter in call.model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices):
        return call.run()


def _errors_of_modules(call: ModelCall, modules: Collection[nn.Module]) -> Iterator[float]:
    """Relative error of each attention module's output while the model is explained, given the same input."""
    given: list[Tensor] = []
    results: list[Tensor] = []

    def keep(_: nn.Module, stream: Tensor | None) -> None:
        if stream is not None:
            given.append(stream.clone())

    def record(_: nn.Module, result: Tensor | None) -> None:
        if result is not None:
            results.append(result.clone())

    def replay(_: nn.Module, received: Received) -> Received | None:
        stream = first_argument(*received)
        return with_argument(*received, stream, given.pop(0)) if stream is not None and given else None

    with hooked((module, "output", record) for module in modules):
        with hooked((module, "input", keep) for module in modules):
            _run(call)
        own, results = results, []
        with attending_plainly(call), hooked((module, "arguments", replay) for module in modules):
            _run(call)
    if len(own) != len(results):
        yield math.inf
    for first, second in zip(own, results, strict=False):
        yield _error(first, second, call)


def _precision(model: nn.Module, output: Tensor) -> torch.dtype:
    """Least precise dtype that a model computes in, no finer than float32, in which many take softmax."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if torch.is_autocast_enabled(output.device.type):
        dtypes.add(torch.get_autocast_dtype(output.device.type))
    return coarsest(torch.float32, output.dtype, *dtypes)


def _measured_precisions(call: ModelCall) -> list[torch.dtype]:
    """Return the precisions of the model's quantised maps, which may be coarser than all its dtypes."""
    found: dict[nn.Module, torch.dtype] = {}

    def test(module: nn.Module, inputs: Tensor | None) -> None:
        tested = None if inputs is None or module in found else affinity(module, inputs)
        if tested is not None:
            _, found[module] = tested

    quantised = [module for module in call.model.modules() if plain_matrix(module) is None]
    maps = (module for module in quantised if isinstance(module, nn.Linear) or may_be_affine(module))
    with hooked((module, "input", test) for module in maps):
        _run(call)
    return list(found.values())


def _error(own: Tensor, explained: Tensor, call: ModelCall) -> float:
    """Largest relative error over real positions with finite outputs; other checks find NaN and infinity."""
    if own.shape != explained.shape:
        return math.inf
    own, explained = (_real(output, call).flatten(0, -2).double() for output in (own, explained))
    error = (own - explained).norm(dim=-1) / own.norm(dim=-1).clamp(min=torch.finfo(own.dtype).tiny)
    finite = error[error.isfinite()]
    return float(finite.max()) if len(finite) else 0.0


def _real(output: Tensor, call: ModelCall) -> Tensor:
    """The output at real positions, or all of it if it has no axis of positions."""
    for positions in (call.decoder, call.positions_of("self")[0]):
        if positions.real is not None:
            for real in (positions.real, positions.real.T):
                if output.shape[:2] == real.shape and output.dim() > 2:
                    return output[real.to(output.device)].unsqueeze(0)
    return output

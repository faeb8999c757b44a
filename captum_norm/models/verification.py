"""Sees a model's stacks of layers, and whether they mix positions otherwise, once per model on a few positions."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.models.attention import AttentionCall
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import evaluating, first_tensor
from captum_norm.models.layers import mixing_layer
from captum_norm.models.precision import coarsest, step_of
from captum_norm.models.stacks import Sizes, Stacks

Result = TypeVar("Result")
EXCERPT = 16
"""Number of positions that suffice to find a model's structure."""


def verify(call: ModelCall) -> None:
    """Note the sizes of a model's stacks, their direction, and a layer that mixes positions otherwise.

    Raises:
        UnsupportedModelError: if the model computes something else while it is observed, as by fused operations.
    """
    # A single position attends only to itself.
    if call.positions.several:
        stacks = on_excerpt(call, _expect_same_output)
        layer = on_excerpt(call, lambda excerpt: mixing_layer(excerpt, stacks.queries))
        names = {module: name for name, module in call.model.named_modules()}
        call.known.mixing = None if layer is None else f'"{names[layer]}" ({type(layer).__name__})'
        # Without its inputs, a tower has not been seen.
        call.known.sizes, call.known.causal = stacks.sizes or None, stacks.causal


def _expect_same_output(call: ModelCall) -> Stacks:
    outputs: list[Any] = []
    devices = {parameter.device for parameter in call.model.parameters() if parameter.device.type == "cuda"}
    # A model may draw random numbers, such as which patches it sees.
    with torch.random.fork_rng(devices):
        stacks = seen_stacks(call, outputs)
    with torch.random.fork_rng(devices), torch.no_grad(), evaluating(call.model):
        outputs.append(call.run())
    observed, plain = (_real(first_tensor(output), call) for output in outputs)
    if observed is None or plain is None or observed.shape != plain.shape:
        return stacks
    error, size = ((difference).float().norm() for difference in (observed - plain, plain))
    accepted = step_of(coarsest(torch.float32, plain.dtype)) ** 0.5  # half of the digits
    if error > accepted * size:
        raise UnsupportedModelError(
            f"{type(call.model).__name__} computes something else by itself than while it is observed: relative "
            f"difference {float(error / size):.1e}, accepted {accepted:.0e} for {plain.dtype}; to explain it, run it "
            f"in the same way{call.library.with_weights}"
        )
    return stacks


def _real(output: Tensor | None, call: ModelCall) -> Tensor | None:
    """The output at real positions, or all of it if it has no axis of positions."""
    for positions in (call.decoder, call.positions_of("self")[0]):
        for real in () if positions.real is None or output is None else (positions.real, positions.real.T):
            if output is not None and output.shape[:2] == real.shape and output.dim() > 2:
                return output[real.to(output.device)]
    return output


def stack_sizes(call: ModelCall) -> Sizes:
    """Sizes of a model's stacks of layers on an excerpt of these inputs, or of earlier ones."""
    return on_excerpt(call, seen_stacks).sizes if call.known.sizes is None else call.known.sizes


def on_excerpt(call: ModelCall, work: Callable[[ModelCall], Result]) -> Result:
    """Apply a function to an excerpt of a call, or to the whole call if an argument does not fit the excerpt."""
    try:
        return work(call.excerpt(EXCERPT))
    except InvalidInputError:
        return work(call)


def seen_stacks(call: ModelCall, outputs: list[Any] | None = None) -> Stacks:
    """Run a call, and return the stacks of layers that it went through; add its output to ``outputs``."""
    stacks = call.stacks()

    def attend(attention: AttentionCall) -> Tensor:
        stacks.attend(attention)
        return attention.output()

    with torch.no_grad(), evaluating(call.model), call.attention_through(attend):
        output = call.run()
    if outputs is not None:
        outputs.append(output)
    return stacks

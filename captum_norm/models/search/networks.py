"""Finds feed-forward networks: linear modules with an element-wise function or a gate between them, and experts.

Experts are a module whose stacked maps, routed as seen, reproduce its output.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from typing import cast

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.functional import Elementwise, neuron_outputs, written_by
from captum_norm.models.blocks import (
    Cuts,
    DenseReader,
    ExpertsReader,
    Routing,
    routing_of,
    routing_of_scores,
    stacked_maps,
)
from captum_norm.models.hooks import Received, first_tensor
from captum_norm.models.layouts import FeedForwardLayout
from captum_norm.models.precision import accumulation_dtype
from captum_norm.models.probes import copy_with, drawn, output_of
from captum_norm.models.projections import Projection, equal, reproduces
from captum_norm.models.search.trace import ModuleCall, Trace

KNOWN: tuple[Elementwise, ...] = (
    nn.functional.relu,
    nn.functional.gelu,
    partial(nn.functional.gelu, approximate="tanh"),
    nn.functional.silu,
    nn.functional.sigmoid,
    torch.tanh,
    lambda z: nn.functional.relu(z).square(),
    lambda z: z * torch.sigmoid(1.702 * z),
)
"""Activations that a model may apply without a module."""


Declared = FeedForwardLayout | None
"""The layout declared for a class of layers, or None."""


def permits(declared: Declared, part: str, trace: Trace, module: nn.Module | None) -> bool:
    """Whether a module (None: no module) may be this part; only a declared layout restricts that."""
    if declared is None:
        return True
    name = None if module is None else trace.name(module)
    return bool(getattr(declared, part) == name)


def dense_networks(
    trace: Trace, read: Tensor, inner: Sequence[ModuleCall], declared: Declared
) -> Iterator[tuple[DenseReader, ModuleCall]]:
    """Yield the networks that read a tensor, each with the call of its outer map."""
    for outer in trace.calls:
        if outer.output.numel() != read.numel() or outer in inner:
            continue
        if not permits(declared, "outer", trace, outer.module):
            continue
        for reader in networks_into(trace, outer, inner, declared):
            yield reader, outer


def networks_into(
    trace: Trace, outer: ModuleCall, inner: Sequence[ModuleCall], declared: Declared
) -> Iterator[DenseReader]:
    """Yield the networks of some of the inner maps and of this outer map."""
    for chosen, activation, cuts in _gatings(trace, inner, outer.inputs, declared):
        projections = [call.projection for call in (*chosen, outer)]
        *into, out = [projection for projection in projections if projection is not None]
        if declared is not None and {trace.name(call.module) for call in chosen} != set(declared.inner):
            continue
        if len(into) == len(chosen):
            yield DenseReader(tuple(into), out, activation, cuts)


def _gatings(
    trace: Trace, inner: Sequence[ModuleCall], hidden: Tensor, declared: Declared
) -> Iterator[tuple[tuple[ModuleCall, ...], Elementwise, Cuts]]:
    """Yield the one or two inner maps from whose outputs ``hidden`` follows, with the activation and the cuts."""
    width = hidden.shape[-1]
    for count in (1, 2):
        for chosen in permutations(inner, count):
            outputs = [call.output for call in chosen]
            for cuts in _cuts_of(outputs[0].shape[-1], width) if count == 1 else ((),):
                factors = [outputs[0][..., cut] for cut in cuts] or outputs
                if all(factor.shape[-1] == width and factor.numel() == hidden.numel() for factor in factors):
                    functions = [g for g in _functions(trace, factors[0], declared) if _gives(g, factors, hidden)]
                    if functions:
                        # In half precision several functions round to the same values.
                        yield chosen, min(functions, key=lambda g: _distance(g, factors, hidden)), cuts


def _cuts_of(outputs: int, width: int) -> list[Cuts]:
    """Return the ways to cut the outputs of one map into one factor or two, the gate's first."""
    if outputs == width:
        return [()]
    if outputs != 2 * width:
        return []
    halves = slice(0, width), slice(width, None)
    interleaved = slice(0, None, 2), slice(1, None, 2)
    return [order for pair in (halves, interleaved) for order in (pair, pair[::-1])]


def _functions(trace: Trace, point: Tensor, declared: Declared) -> Iterator[Elementwise]:
    """Yield the modules that were called on a tensor, and the functions that a model may use instead."""
    for call in trace.calls_on(point):
        # A module with children may receive the same numbers (all zero), but also takes other arguments.
        single = not any(True for _ in call.module.children())
        if single and call.output.shape == call.inputs.shape and permits(declared, "activation", trace, call.module):
            yield call.module.forward
    if permits(declared, "activation", trace, None):
        yield from KNOWN


def _gives(activation: Elementwise, factors: Sequence[Tensor], hidden: Tensor) -> bool:
    """Whether the neurons gave g(u), or g(u) ⊙ w, and g acts element by element."""
    with torch.no_grad():
        return reproduces(neuron_outputs(factors, activation), hidden) and _is_elementwise(activation, factors[0])


def _distance(activation: Elementwise, factors: Sequence[Tensor], hidden: Tensor) -> float:
    """Return the distance of g(u), or g(u) ⊙ w, from what the neurons gave."""
    with torch.no_grad():
        return float((neuron_outputs(factors, activation).double() - hidden.double().reshape(factors[0].shape)).norm())


def _is_elementwise(function: Elementwise, point: Tensor) -> bool:
    """Whether each neuron's output depends on its own input alone: change half of them, and the rest must stay."""
    changed = point.clone()
    changed[..., ::2] = 1 - changed[..., ::2]
    before, after = function(point), function(changed)
    return before.shape == point.shape and reproduces(after[..., 1::2], before[..., 1::2])


def with_position_gates(trace: Trace, read: Tensor, output: Tensor) -> Iterator[tuple[Projection | None, Tensor]]:
    """Yield a shared expert's output alone, and times the sigmoid of one number for each position."""
    yield None, output
    for call in trace.calls_on(read):
        if call.output.shape[-1] == 1 and call.projection is not None:
            yield call.projection, output * call.output.reshape(*output.shape[:-1], 1).sigmoid()


def scaled_experts(trace: Trace, read: Tensor) -> Iterator[tuple[ExpertsReader, Tensor]]:
    """Yield experts that each read all positions times their scores, and their summed output, (N, D)."""
    positions = read.flatten(0, -2)
    for call in trace.calls:
        count = call.inputs.numel() // read.numel()
        if not any(parameter.dim() == 3 for parameter in call.module.parameters(recurse=False)):
            continue
        for scored in trace.calls_on(read):
            if scored.output.shape != (len(positions), count):
                continue
            if equal(positions.repeat(count, 1) * scored.output.T.reshape(-1, 1), call.inputs):
                together = partial(_summed, shape=(count, *positions.shape))
                written = together(call.output)
                routing = routing_of_scores(scored.output)
                received: Received = ((call.inputs,), {})
                experts = read_experts(
                    call.module, positions, written, routing, received, together=together, scorer=scored.module
                )
                if experts is not None:
                    yield experts, written


def _summed(output: Tensor, shape: tuple[int, ...]) -> Tensor:
    return output.reshape(shape).sum(0)


def routed_rows(module: nn.Module, received: Received, output: Tensor, copies: int) -> tuple[Routing, Tensor]:
    """Return how a module with stacked maps routed R positions, and the rows of each of their copies, (copies, R)."""
    inputs, routing = first_tensor(received), routing_of(received)
    if inputs is None or inputs.shape != output.shape:
        raise _not_understood(module)
    rows = torch.arange(output[..., 0].numel(), device=output.device)
    if routing is not None and len(routing.experts) == len(rows):
        rows = rows.reshape(copies, -1)
        return Routing(*(table[rows[0]].detach() for table in routing)), rows
    count = len(next(iter(stacked_maps(module).values())))
    if routing is not None or len(rows) % (count * copies):
        raise _not_understood(module)
    rows = rows.reshape(count, copies, -1).transpose(0, 1).flatten(1)
    experts = (rows[0] * count // rows.numel())[:, None]
    return Routing(experts, torch.ones_like(experts, dtype=inputs.dtype)), rows


def read_routed(module: nn.Module, received: Received, output: Tensor, routing: Routing, rows: Tensor) -> ExpertsReader:
    """Return the experts of a module that routed its rows so, see :func:`routed_rows`."""

    def together(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, -2)[rows[0]].detach()

    inputs = together(cast(Tensor, first_tensor(received)))
    reader = read_experts(module, inputs, together(output), routing, received, together=together)
    if reader is None:
        raise _not_understood(module)
    return reader


def _not_understood(module: nn.Module) -> UnsupportedModelError:
    maps = ", ".join(f"{name} {tuple(parameter.shape)}" for name, parameter in stacked_maps(module).items())
    return UnsupportedModelError(
        f"{type(module).__name__} with the stacked maps {maps} does not compute a mixture of experts as expected: for "
        "each position, a sum of its experts' networks times their weights"
    )


def read_experts(
    module: nn.Module,
    inputs: Tensor,
    output: Tensor,
    routing: Routing,
    received: Received,
    *,
    together: Callable[[Tensor], Tensor] = torch.clone,
    scorer: nn.Module | None = None,
) -> ExpertsReader | None:
    """Return the experts that read inputs and wrote output, (N, D); None unless they do so whatever their maps hold.

    ``together`` turns what the module returns into ``output``.
    """
    # Where maps are negligible beside their biases, every reading reproduces the output.
    copy = copy_with(module, _drawn_maps(module, inputs), inputs)
    args, kwargs = received
    returned = output_of(copy, *args, **kwargs)
    if copy is None or returned is None:
        return None
    drawn_output = together(returned)
    for drawn_reader in _expert_readings(copy, inputs.shape[-1], scorer):
        reader = replace(drawn_reader, module=module)
        if _reproduces(drawn_reader, routing, inputs, drawn_output) and _reproduces(reader, routing, inputs, output):
            return reader
    return None


def _drawn_maps(module: nn.Module, like: Tensor) -> dict[str, nn.Parameter]:
    """Return random maps and biases, equal for all experts, that keep neurons away from 0 and from saturation."""
    maps = {name: map_ for name, map_ in module.named_parameters(recurse=False) if map_.dim() in (2, 3)}
    numbers = drawn(like, *(map_.shape[1:] for map_ in maps.values()))
    return {
        name: nn.Parameter(
            (number / max(number.numel(), 1) ** ((number.dim() - 1) / 4)).expand(map_.shape), requires_grad=False
        )
        for (name, map_), number in zip(maps.items(), numbers, strict=True)
    }


def _expert_readings(module: nn.Module, width: int, scorer: nn.Module | None) -> Iterator[ExpertsReader]:
    """Yield the ways to read the module's parameters as experts that read and write vectors of this width."""
    parameters = dict(module.named_parameters(recurse=False))
    stacked = [name for name, parameter in parameters.items() if parameter.dim() == 3]
    biases = {name: parameter.shape[1] for name, parameter in parameters.items() if parameter.dim() == 2}
    for (inner, outer), transposed in product(permutations(stacked, 2), (True, False)):
        into, out = (parameters[name].mT if transposed else parameters[name] for name in (inner, outer))
        if into.shape[1] != width or out.shape[2] != width:
            continue
        inner_bias = next((name for name, size in biases.items() if size == into.shape[2]), None)
        outer_bias = next((name for name, size in biases.items() if size == width and name != inner_bias), None)
        names = (inner, outer, inner_bias, outer_bias)
        for cuts in _cuts_of(into.shape[2], out.shape[1]):
            for activation, factor in _expert_functions(module):
                yield ExpertsReader(module, *names, transposed, activation, factor, cuts, scorer)


def _expert_functions(module: nn.Module) -> Iterator[tuple[Elementwise, Elementwise | None]]:
    """Yield what may stand between experts' maps: child modules, clamped factors as in GPT-OSS, known functions."""
    for child in module.children():
        yield child.forward, None
    limit, sharpness = getattr(module, "limit", None), getattr(module, "alpha", None)
    if isinstance(limit, (int, float)) and isinstance(sharpness, (int, float)):
        yield partial(_clamped_gate, limit=limit, sharpness=sharpness), partial(_clamped_factor, limit=limit)
    for function in KNOWN:
        yield function, None


def _clamped_gate(gate: Tensor, limit: float, sharpness: float) -> Tensor:
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(sharpness * gate)


def _clamped_factor(other: Tensor, limit: float) -> Tensor:
    return other.clamp(-limit, limit) + 1


def _reproduces(reader: ExpertsReader, routing: Routing, inputs: Tensor, output: Tensor) -> bool:
    """Whether experts give the output, and their activations act element by element."""
    inputs = inputs.reshape(-1, inputs.shape[-1]).to(accumulation_dtype(inputs.dtype))
    with torch.no_grad():
        uses = list(reader.uses(routing, inputs.dtype))
        computed = written_by(uses, inputs)
    return reproduces(computed, output, computed) and all(
        _is_elementwise(use.network.activation, use.network.inner[0].whole(inputs)) for use in uses[:1]
    )

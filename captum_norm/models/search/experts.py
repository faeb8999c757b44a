"""Finds the experts of a mixture: a module whose stacked maps, routed as seen, reproduce its output."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from typing import Any, cast

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.functional import Elementwise, written_by
from captum_norm.models.feed_forward import ExpertsReader, Gating, Routing
from captum_norm.models.hooks import Received, first_tensor, tensors_in
from captum_norm.models.precision import accumulation_dtype
from captum_norm.models.projections import equal, reproduces
from captum_norm.models.search.copies import copy_with, drawn, output_of
from captum_norm.models.search.networks import KNOWN, cuts_of, is_elementwise
from captum_norm.models.search.trace import Trace


def stacked_maps(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's own parameters that hold a matrix for each expert, by name; empty unless there are several."""
    own = {name: parameter for name, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3}
    counts = {len(parameter) for parameter in own.values()}
    return own if len(own) > 1 and len(counts) == 1 and counts != {1} else {}


def routers_beside(module: nn.Module) -> list[nn.Module]:
    """Return the children that score the experts of another child: one of their matrices has a row for each expert."""
    children = list(module.children())
    counts = {len(parameter) for child in children for parameter in stacked_maps(child).values()}
    return [
        child
        for child in children
        if any(parameter.dim() == 2 and len(parameter) in counts for parameter in child.parameters(recurse=False))
        and not stacked_maps(child)
    ]


def routing_of(received: Any) -> Routing | None:
    """Return the routing among the (nested) arguments of a module: indices and coefficients, (N, n) each."""
    tables = [tensor for tensor in tensors_in(received) if tensor.dim() == 2]
    indices = [tensor for tensor in tables if not tensor.is_floating_point() and tensor.dtype != torch.bool]
    for index in indices:
        for coefficients in tables:
            if coefficients.is_floating_point() and coefficients.shape == index.shape:
                return Routing(index, coefficients)
    return None


def routing_of_scores(scores: Tensor) -> Routing:
    """Return the routing by scores of all experts, (N, experts); a score of 0 leaves an expert out."""
    experts = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    return Routing(experts.where(scores != 0, scores.shape[1]), scores)


def scaled_experts(trace: Trace, read: Tensor) -> Iterator[tuple[ExpertsReader, Tensor]]:
    """Yield experts that each read all positions times their scores, and their summed output, (N, D)."""
    positions = read.flatten(0, -2)
    for call in trace.calls:
        count = call.inputs.numel() // read.numel()
        if not any(parameter.dim() == 3 for parameter in call.module.parameters(recurse=False)):
            continue
        for scored in trace.calls_on(read):
            scores = scored.output
            if scores.shape != (len(positions), count):
                continue
            spread = positions.repeat(count, 1) * scores.T.reshape(-1, 1)
            if equal(spread, call.inputs):
                together = partial(_summed, shape=(count, *positions.shape))
                written = together(call.output)
                received: Received = ((call.inputs,), {})
                experts = read_experts(
                    call.module,
                    positions,
                    written,
                    routing_of_scores(scores),
                    received,
                    together=together,
                    scorer=scored.module,
                )
                if experts is not None:
                    yield experts, written


def _summed(output: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sum the outputs of experts that each read all positions."""
    return output.reshape(shape).sum(0)


def routed_rows(module: nn.Module, received: Received, output: Tensor, copies: int) -> tuple[Routing, Tensor]:
    """Return how a module with stacked maps routed several copies of the same positions.

    Args:
        module: the module.
        received: its arguments.
        output: its output, of as many rows as its input.
        copies: the number of copies.

    Returns:
        the routing of the first copy's R positions (if experts read rows of their own, the expert of each row), and
        the rows of each copy's positions, (copies, R).

    Raises:
        UnsupportedModelError: if the arguments are not those of experts.
    """
    given, routing = first_tensor(received), routing_of(received)
    if given is None or given.shape != output.shape:
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
    return Routing(experts, torch.ones_like(experts, dtype=given.dtype)), rows


def read_routed(module: nn.Module, received: Received, output: Tensor, routing: Routing, rows: Tensor) -> ExpertsReader:
    """Return the experts of a module that routed its rows so, see :func:`routed_rows`.

    Raises:
        UnsupportedModelError: if they do not reproduce the output.
    """

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
    """Return the experts of a module with stacked maps; None unless they reproduce its output, whatever the maps hold.

    Args:
        module: the module.
        inputs: what it read, (N, D).
        output: what it wrote, (N, D).
        routing: the routing of these positions.
        received: all arguments of the call.
        together: turns what the module returns into ``output``.
        scorer: the module that scored the experts, if they read positions times their scores.
    """
    # Where maps are negligible beside their biases, every reading reproduces the output.
    copy = copy_with(module, _drawn_maps(module, inputs), inputs)
    args, kwargs = received
    returned = output_of(copy, *args, **kwargs)
    if copy is None or returned is None:
        return None
    drawn_output = together(returned)
    for reader in _expert_readings(copy, inputs.shape[-1], scorer):
        found = replace(reader, module=module)
        if _reproduces(reader, routing, inputs, drawn_output) and _reproduces(found, routing, inputs, output):
            return found
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
    own = dict(module.named_parameters(recurse=False))
    stacked = [name for name, parameter in own.items() if parameter.dim() == 3]
    biases = [name for name, parameter in own.items() if parameter.dim() == 2]
    for (inner, outer), transposed in product(permutations(stacked, 2), (True, False)):
        into, out = (own[name].mT if transposed else own[name] for name in (inner, outer))
        if into.shape[1] != width or out.shape[2] != width:
            continue
        inner_bias = next((name for name in biases if own[name].shape[1] == into.shape[2]), None)
        outer_bias = next((name for name in biases if own[name].shape[1] == width and name != inner_bias), None)
        for cuts in cuts_of(into.shape[2], out.shape[1]):
            for activation, factor in _expert_functions(module):
                gating = Gating(activation, factor, cuts)
                yield ExpertsReader(module, inner, outer, inner_bias, outer_bias, transposed, gating, scorer)


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
        is_elementwise(use.network.activation, use.network.inner[0].whole(inputs)) for use in uses[:1]
    )

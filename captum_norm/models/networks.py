"""Reads feed-forward networks: dense ones, and the experts of a mixture, whose maps one module holds stacked."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations, product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.functional.feed_forward import Affine, Elementwise, Network, Use, written_by
from captum_norm.models.hooks import Received, first_tensor, tensors_in
from captum_norm.models.offloading import loaded
from captum_norm.models.precision import accumulation_dtype
from captum_norm.models.probes import copy_with, drawn, output_of
from captum_norm.models.projections import Projection, reproduces

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

Cuts = tuple[slice, ...]
"""The entries of one map's output that belong to the gate, and those of the other factor; empty for separate maps."""


def _cut(fused: Affine, cuts: Cuts) -> Sequence[Affine]:
    """Return the maps of both factors of a gated network that one map holds."""
    return [Affine(fused.weight[:, cut], None if fused.bias is None else fused.bias[cut]) for cut in cuts] or [fused]


@dataclass(frozen=True)
class DenseReader:
    """Reads one network that acts on every position."""

    inner: tuple[Projection, ...]  # into the neurons, the gate's first
    outer: Projection
    activation: Elementwise
    cuts: Cuts = ()
    gate: Projection | None = None  # to one number for each position, whose sigmoid multiplies the output

    def use(self, inputs: Tensor) -> Use:
        """Return the network's use, with present parameters, at positions whose whole inputs are (N, D)."""
        inner: list[Affine] = []
        for projection in self.inner:
            inner += _cut(Affine(*projection.read()), self.cuts)
        network = Network(tuple(inner), Affine(*self.outer.read()), self.activation)
        gate = None if self.gate is None else Affine(*self.gate.read())
        return Use(network, coefficient=None if gate is None else gate.whole(inputs).sigmoid())


class Routing(NamedTuple):
    """What a router chose for N positions: the indices of their experts and the coefficients, (N, n) each."""

    experts: Tensor
    coefficients: Tensor


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


def stacked_maps(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's own parameters that hold a matrix for each expert, by name; empty unless there are several."""
    stacked = {name: parameter for name, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3}
    counts = {len(parameter) for parameter in stacked.values()}
    return stacked if len(stacked) > 1 and len(counts) == 1 and counts != {1} else {}


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


@dataclass(frozen=True)
class ExpertsReader:
    """Reads experts that share a module, with their maps stacked in parameters of three axes."""

    module: nn.Module  # its first input is (N, D)
    inner: str  # names of parameters
    outer: str
    inner_bias: str | None
    outer_bias: str | None
    transposed: bool  # whether the maps are (outputs, inputs)
    activation: Elementwise
    factor: Elementwise | None = None  # on the other factor of a gated network; None for the identity
    cuts: Cuts = ()
    # Gives a score for each expert, (N, experts), which multiplies the expert's input; None if the experts receive a
    # routing, whose coefficients multiply their outputs.
    scorer: nn.Module | None = None

    def _affine(self, weight: str, bias: str | None, expert: int) -> Affine:
        with loaded(self.module):
            matrix = self.module.get_parameter(weight)[expert]
            shift = None if bias is None else self.module.get_parameter(bias)[expert]
        return Affine(matrix.T if self.transposed else matrix, shift)

    def network(self, expert: int) -> Network:
        """Return one expert with its present parameters."""
        inner = _cut(self._affine(self.inner, self.inner_bias, expert), self.cuts)
        return Network(tuple(inner), self._affine(self.outer, self.outer_bias, expert), self.activation, self.factor)

    def uses(self, routing: Routing, dtype: torch.dtype) -> Iterator[Use]:
        """Yield each expert's use at the positions routed to it."""
        for expert in routing.experts.unique().tolist():
            if expert >= len(self.module.get_parameter(self.inner)):
                continue  # the index that a router gives to what it leaves out
            position, place = (routing.experts == expert).nonzero(as_tuple=True)
            coefficient = routing.coefficients[position, place, None].to(dtype)
            if self.scorer is None:
                yield Use(self.network(expert), position, coefficient, expert=expert)
            else:
                yield Use(self.network(expert), position, scale=coefficient, expert=expert)


def cuts_of(outputs: int, width: int) -> list[Cuts]:
    """Return the ways to cut the outputs of one map into one factor or two, the gate's first."""
    if outputs == width:
        return [()]
    if outputs != 2 * width:
        return []
    halves = slice(0, width), slice(width, None)
    interleaved = slice(0, None, 2), slice(1, None, 2)
    return [order for pair in (halves, interleaved) for order in (pair, pair[::-1])]


def is_elementwise(function: Elementwise, point: Tensor) -> bool:
    """Whether each neuron's output depends on its own input alone: change half of them, and the rest must stay."""
    changed = point.clone()
    changed[..., ::2] = 1 - changed[..., ::2]
    before, after = function(point), function(changed)
    return before.shape == point.shape and reproduces(after[..., 1::2], before[..., 1::2])


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
    together: Callable[[Tensor], Tensor] = torch.clone,  # turns what the module returns into the output
    scorer: nn.Module | None = None,
) -> ExpertsReader | None:
    """Return the experts that read inputs and wrote output, (N, D); None unless they do so whatever their maps hold."""
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
        for cuts in cuts_of(into.shape[2], out.shape[1]):
            for activation, factor in _expert_functions(module):
                yield ExpertsReader(module, *names, transposed, activation, factor, cuts, scorer)


def _expert_functions(module: nn.Module) -> Iterator[tuple[Elementwise, Elementwise | None]]:
    """Yield what may stand between experts' maps: child modules, clamped factors as in GPT-OSS, known functions."""
    for child in module.children():
        yield child.forward, None
    limit, sharpness = getattr(module, "limit", None), getattr(module, "alpha", None)
    if isinstance(limit, (int, float)) and isinstance(sharpness, (int, float)):
        yield (
            lambda gate: gate.clamp(max=limit) * torch.sigmoid(sharpness * gate.clamp(max=limit)),
            lambda other: other.clamp(-limit, limit) + 1,
        )
    for function in KNOWN:
        yield function, None


def _reproduces(reader: ExpertsReader, routing: Routing, inputs: Tensor, output: Tensor) -> bool:
    """Whether experts give the output, and their activations act element by element."""
    inputs = inputs.reshape(-1, inputs.shape[-1]).to(accumulation_dtype(inputs.dtype))
    with torch.no_grad():
        uses = list(reader.uses(routing, inputs.dtype))
        computed = written_by(uses, inputs)
    return reproduces(computed, output, computed) and all(
        is_elementwise(use.network.activation, use.network.inner[0].whole(inputs)) for use in uses[:1]
    )

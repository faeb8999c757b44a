"""Holds the parts of a feed-forward block: networks that act on every position, and experts that a router chooses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from captum_norm.functional import Affine, Carry, Elementwise, Network, Use
from captum_norm.models.factors import Factor, scaled_norm
from captum_norm.models.hooks import tensors_in
from captum_norm.models.layouts import Scope, Site
from captum_norm.models.offloading import loaded
from captum_norm.models.projections import NormReader, Projection

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
        inner = [affine for projection in self.inner for affine in _cut(Affine(*projection.read()), self.cuts)]
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
                yield Use(self.network(expert), position, coefficient)
            else:
                yield Use(self.network(expert), position, scale=coefficient)


@dataclass(frozen=True)
class FeedForwardBlock:
    """The feed-forward block behind an attention block: ``total`` is its networks' output plus the residual stream."""

    dense: tuple[DenseReader, ...]
    experts: ExpertsReader | None
    written: Site[nn.Module]  # the networks' output
    total: Site[nn.Module]
    norm: NormReader | None  # before the networks
    branch_norm: NormReader | None  # on their output
    final_norm: NormReader | None  # on the total
    branch_factor: Factor | None  # multiplies the (normalised) output
    residual_factor: Factor | None  # multiplies the residual stream
    parallel: bool  # whether the networks read the stream before attention, not the attention block's output
    width: int
    overwritten: frozenset[Site[nn.Module]]  # whose tensors the model changes afterwards

    @cached_property
    def sites(self) -> frozenset[Site[nn.Module]]:
        """The sites of its tensors."""
        norms = (norm.output for norm in (self.norm, self.final_norm) if norm is not None)
        return frozenset((self.written, self.total, *norms))

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """The scopes of this arrangement.

        ``atb_ln`` exists if a norm precedes the networks, ``atb_ff_res_ln`` if a norm follows the sum. In a parallel
        layer the networks do not read the attention block, so only the sum exists.
        """
        if self.parallel:
            return ("atb_ff_res",)
        before: tuple[Scope, ...] = () if self.norm is None else ("atb_ln",)
        behind: tuple[Scope, ...] = () if self.final_norm is None else ("atb_ff_res_ln",)
        return (*before, "atb_ff", "atb_ff_res", *behind)

    @cached_property
    def neurons(self) -> list[int]:
        """The number of neurons of each network in it (of one expert in a mixture), counting both factors of a gate."""
        neurons = [projection.outputs for reader in self.dense for projection in reader.inner]
        if self.experts is not None:
            neurons.append(self.experts.module.get_parameter(self.experts.inner)[0].numel() // self.width)
        return neurons

    def carry(self, scope: Scope, dtype: torch.dtype) -> Carry:
        """Return the steps after the networks' output that a scope includes."""
        if scope == "atb_ff":
            return Carry()
        branch = scaled_norm(self.branch_norm, self.branch_factor, dtype)
        final = None if self.final_norm is None or scope == "atb_ff_res" else self.final_norm.read(dtype)
        return Carry(branch, residual=True, final=final)

    def uses(self, inputs: Tensor, routing: Routing | None) -> Iterator[Use]:
        """Yield the uses of all networks at positions whose whole inputs are (N, D)."""
        for reader in self.dense:
            yield reader.use(inputs)
        if self.experts is not None and routing is not None:
            yield from self.experts.uses(routing, inputs.dtype)

    @cached_property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes in which its modules compute."""
        norms = [norm.precision for norm in (self.norm, self.branch_norm, self.final_norm) if norm is not None]
        outer = [reader.outer.precision for reader in self.dense]
        experts = [] if self.experts is None else [self.experts.module.get_parameter(self.experts.outer).dtype]
        return [*norms, *outer, *experts]

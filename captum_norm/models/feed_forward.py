"""Describes the feed-forward part of a layer: which modules hold its numbers, and how to read them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from captum_norm.functional import Affine, Carry, Elementwise, Network, Use
from captum_norm.models.factors import Factor, scaled_norm
from captum_norm.models.layouts import Scope, Site
from captum_norm.models.offloading import loaded
from captum_norm.models.projections import NormReader, Projection


@dataclass(frozen=True)
class FeedForwardLayout:
    """The parts of a feed-forward block in one kind of layer.

    All names are relative to the module that holds it and attention. The parts must satisfy these equations, which are
    checked on the layer's own tensors. x is the output of the attention block; in a parallel layer, the residual stream
    before it::

        read    = norm(x)                                  (norm=None: read = x)
        hidden  = g(inner(read))                           (one inner map)
        hidden  = g(gate(read)) * up(read)                 (two inner maps, or one whose output is cut in two)
        written = outer(hidden)
        branch  = branch_factor ⊙ branch_norm(written)     (parts that are None are left out)
        total   = residual_factor ⊙ x + branch
        output  = final_norm(total)                        (final_norm=None: output = total)

    Attributes:
        inner: the map into the neurons; of a gated network, both maps in either order.
        outer: the map out of the neurons.
        total: the sum with the residual stream.
        activation: the module that computes g; None if a function does.
        norm: the norm before the inner maps.
        branch_norm: the norm on the output before the sum.
        final_norm: the norm on the sum.
        branch_factor: the name, inside the layer, of the number or vector (D,) that multiplies the output before the
            sum: a residual multiplier, a layer scale.
        residual_factor: the name of the number or vector that multiplies the residual stream in the sum.

    Example:
        A LLaMA layer (in practice its structure is found automatically):

        >>> FeedForwardLayout(
        ...     inner=("mlp.gate_proj", "mlp.up_proj"), outer="mlp.down_proj", total=Site.parse("output"),
        ...     activation="mlp.act_fn", norm="post_attention_layernorm").outer
        'mlp.down_proj'
    """

    inner: tuple[str, ...]
    outer: str
    total: Site[str]
    activation: str | None = None
    norm: str | None = None
    branch_norm: str | None = None
    final_norm: str | None = None
    branch_factor: str | None = None
    residual_factor: str | None = None


_registered: dict[str, FeedForwardLayout] = {}


def register_feed_forward(layer_class: str, layout: FeedForwardLayout) -> None:
    """Declare where the feed-forward parts of a layer are, for layers in which they are not found automatically.

    Args:
        layer_class: the name of the class of the module that holds attention and feed-forward network, for example
            ``"MyDecoderLayer"``.
        layout: the parts. They are checked against the layer's tensors when a scope that includes them is first used. A
            later declaration for the same class replaces an earlier one.

    Example:
        >>> register_feed_forward("DocumentedLayer", FeedForwardLayout(
        ...     inner=("up",), outer="down", total=Site.parse("norm.input"), final_norm="norm"))
        >>> registered_feed_forwards()["DocumentedLayer"].inner
        ('up',)
    """
    _registered[layer_class] = layout


def registered_feed_forwards() -> Mapping[str, FeedForwardLayout]:
    """Return the feed-forward layouts declared so far, by the name of the layer's class."""
    return MappingProxyType(_registered)


@dataclass(frozen=True)
class Gating:
    """How the neurons' output follows from the outputs of the inner maps.

    Attributes:
        activation: g.
        factor: the function h of the other factor of a gated network; None for the identity.
        cuts: the entries of one map's output that belong to the gate, and those of the other factor; empty if each
            factor has its own map.
    """

    activation: Elementwise
    factor: Elementwise | None = None
    cuts: tuple[slice, ...] = ()

    def network(self, inner: Sequence[Affine], outer: Affine) -> Network:
        """Return the network with these maps."""
        if self.cuts:
            (fused,) = inner
            inner = [Affine(fused.weight[:, cut], None if fused.bias is None else fused.bias[cut]) for cut in self.cuts]
        return Network(tuple(inner), outer, self.activation, self.factor)


def affine(projection: Projection) -> Affine:
    """Return a linear module's weight and bias in its own dtype."""
    dtype = projection.dtype
    return Affine(projection.weight(dtype), projection.bias(dtype))


@dataclass(frozen=True)
class DenseReader:
    """Reads one network that acts on every position.

    Attributes:
        inner: the maps into the neurons, the gate's first.
        outer: the map out of the neurons.
        gating: how the neurons' output follows from the inner maps.
        gate: a map to one number for each position, whose sigmoid multiplies the network's output; or None.
    """

    inner: tuple[Projection, ...]
    outer: Projection
    gating: Gating
    gate: Projection | None = None

    def network(self) -> Network:
        """Return the network with the modules' present parameters."""
        return self.gating.network([affine(projection) for projection in self.inner], affine(self.outer))

    def use(self, inputs: Tensor) -> Use:
        """Return the network's use at positions whose whole inputs are (N, D)."""
        coefficient = None if self.gate is None else affine(self.gate).whole(inputs).sigmoid()
        return Use(self.network(), coefficient=coefficient)


class Routing(NamedTuple):
    """What a router chose for N positions: the indices of their experts and the coefficients, (N, n) each."""

    experts: Tensor
    coefficients: Tensor


@dataclass(frozen=True)
class ExpertsReader:
    """Reads experts that share a module, with their maps stacked in parameters of three axes.

    Attributes:
        module: the module; its first input is (N, D), and it receives a routing.
        inner: the parameter that holds the maps into the neurons.
        outer: the parameter that holds the maps out of the neurons.
        inner_bias: the parameter of their biases, (experts, neurons), or None.
        outer_bias: the parameter of their biases, (experts, D), or None.
        transposed: True if the maps are (outputs, inputs).
        gating: how the neurons' output follows from the inner maps.
        scorer: the module that gives a score for each expert, (N, experts), which multiplies the expert's input;
            None if the experts receive a routing, whose coefficients multiply their outputs.
    """

    module: nn.Module
    inner: str
    outer: str
    inner_bias: str | None
    outer_bias: str | None
    transposed: bool
    gating: Gating
    scorer: nn.Module | None = None

    def _affine(self, weight: str, bias: str | None, expert: int) -> Affine:
        with loaded(self.module):
            matrix = self.module.get_parameter(weight)[expert]
            shift = None if bias is None else self.module.get_parameter(bias)[expert]
        return Affine(matrix.T if self.transposed else matrix, shift)

    def network(self, expert: int) -> Network:
        """Return one expert with its present parameters."""
        inner = self._affine(self.inner, self.inner_bias, expert)
        return self.gating.network([inner], self._affine(self.outer, self.outer_bias, expert))

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
    """The feed-forward block behind an attention block, with its parts found and checked.

    Attributes:
        dense: the networks that act on every position.
        experts: the experts of a mixture, or None.
        written: the site of the networks' output.
        total: the site of its sum with the residual stream.
        norm: the norm before the networks, or None.
        branch_norm: the norm on their output before the sum, or None.
        final_norm: the norm on the sum, or None.
        branch_factor: what multiplies the networks' (normalised) output before the sum, or None.
        residual_factor: what multiplies the residual stream in the sum, or None.
        parallel: whether the networks read the residual stream before attention, not the attention block's output.
        width: D.
        overwritten: the sites whose tensors the model changes afterwards.
    """

    dense: tuple[DenseReader, ...]
    experts: ExpertsReader | None
    written: Site[nn.Module]
    total: Site[nn.Module]
    norm: NormReader | None
    branch_norm: NormReader | None
    final_norm: NormReader | None
    branch_factor: Factor | None
    residual_factor: Factor | None
    parallel: bool
    width: int
    overwritten: frozenset[Site[nn.Module]]

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

"""Holds the parts of a layer: its attention block, the feed-forward block behind it, and factors in their sums.

The search reads them once from a layer's modules; what they return follows the modules' present parameters.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from captum_norm.checks import did_you_mean
from captum_norm.errors import UnsupportedScopeError
from captum_norm.functional import Carry, Normalization
from captum_norm.functional.carry import scaled
from captum_norm.functional.feed_forward import Use
from captum_norm.models.attention import AttentionCall
from captum_norm.models.layouts import FEED_FORWARD_SCOPES, Layout, Scope, Site
from captum_norm.models.networks import DenseReader, ExpertsReader, Routing
from captum_norm.models.offloading import loaded, version_of
from captum_norm.models.precision import accumulation_dtype, least_precise
from captum_norm.models.projections import NormReader, Projection

GATE_ROUNDINGS = 32  # rounding errors, in units in the last place, of a gate's factors


@dataclass(frozen=True, eq=False)
class Factor:
    """A number, or a vector (D,), in a layer; ``tanh(NAME)`` is a gate, ``1/NAME`` a number that divides."""

    name: str
    module: nn.Module
    attribute: str
    form: Literal["plain", "gate", "divisor"]

    @property
    def stored(self) -> Tensor | float:
        """Its present value; on the meta device if it is offloaded."""
        value: Any = getattr(self.module, self.attribute)
        stored: Tensor | float = value.tanh() if self.form == "gate" else 1 / value if self.form == "divisor" else value
        return stored

    @property
    def size(self) -> int:
        """The number of its entries."""
        stored = self.stored
        return stored.numel() if isinstance(stored, Tensor) else 1


def multiplied(factor: Factor | None, tensor: Tensor) -> Tensor:
    """Multiply a tensor, (..., D), by a factor, if there is one."""
    if factor is None:
        return tensor
    if factor.size not in (1, tensor.shape[-1]):
        return torch.full_like(tensor, torch.nan)  # of another shape: no sum holds with it
    with loaded(factor.module):
        stored = factor.stored
        return tensor * (stored.to(tensor.device) if isinstance(stored, Tensor) else stored)


def _scaled_norm(norm: NormReader | None, factor: Factor | None, dtype: torch.dtype) -> Normalization | None:
    """Return what a norm and a factor behind it do together; None if there is neither."""
    read = None if norm is None else norm.read(dtype)
    if factor is None:
        return read
    with loaded(factor.module):
        return scaled(read, torch.as_tensor(factor.stored, dtype=dtype))


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

    @cached_property
    def scopes(self) -> tuple[Scope, ...]:
        """The scopes of this arrangement; in a parallel layer, whose networks read no attention block, only the sum."""
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
        branch = _scaled_norm(self.branch_norm, self.branch_factor, dtype)
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
        maps = [projection.precision for reader in self.dense for projection in (*reader.inner, reader.outer)]
        experts = [] if self.experts is None else [self.experts.module.get_parameter(self.experts.outer).dtype]
        return [*norms, *maps, *experts]


@dataclass(frozen=True, eq=False)
class Block:
    """One attention block of a model, with its parts found and checked."""

    name: str  # of the layer in the model
    layer: nn.Module  # in which the block was found
    layout: Layout
    attention: nn.Module  # which calls the attention function
    projection: Projection  # the output projection
    residual: Site[nn.Module]  # the stream that attention's output is added to
    total: Site[nn.Module]  # their sum
    minus: Site[nn.Module] | None  # a further summand
    branch_norm: NormReader | None  # before the sum
    final_norm: NormReader | None  # after it
    branch_factor: Factor | None  # multiplies the (normalised) output
    residual_factor: Factor | None  # multiplies the residual stream
    queries_first: bool  # whether its tensors have the axes (Q, B, D) or (Q·B, D), not (B, Q, D) or (B·Q, D)
    overwritten: frozenset[Site[nn.Module]]  # whose tensors the model changes afterwards
    cross: bool = False  # whether it reads another sequence
    gated: bool = False  # whether the projection receives attention's output times a gate, or a norm's gain over its σ
    feed_forward: FeedForwardBlock | None = None  # behind it
    without_feed_forward: str | None = None  # why none was found; None if one was, or if none was searched for

    @cached_property
    def searched(self) -> bool:
        """Whether a feed-forward block was searched for."""
        return self.feed_forward is not None or self.without_feed_forward is not None

    @cached_property
    def received(self) -> Site[nn.Module]:
        """Where the projection receives attention's output."""
        return Site(self.projection.module, "input")

    @cached_property
    def sites(self) -> frozenset[Site[nn.Module]]:
        """The sites of its tensors."""
        norm = None if self.final_norm is None else self.final_norm.output
        received = self.received if self.gated else None
        sites = (received, self.projection.output, self.residual, self.total, self.minus, norm)
        return frozenset(site for site in sites if site is not None)

    @cached_property
    def scopes(self) -> tuple[Scope, ...]:
        """The scopes of this block and of the feed-forward block behind it."""
        return (*self.layout.scopes, *(() if self.feed_forward is None else self.feed_forward.scopes))

    @cached_property
    def stages(self) -> dict[Scope, str]:
        """The scopes from attention to the layer's last one, each map once, and the component just before each."""
        stages: dict[Scope, str] = {"attn": "ATTN"}
        if self.branch_norm is not None:
            stages["atb"] = "LN, RES"
        else:
            stages["attn_res"] = "RES"
            stages |= {} if self.final_norm is None else {"attn_res_ln": "LN"}
        behind = self.feed_forward
        if behind is None:
            return stages
        added = "RES" if behind.branch_norm is None else "LN, RES"
        names: dict[Scope, str] = {"atb_ln": "LN", "atb_ff": "FF", "atb_ff_res": added, "atb_ff_res_ln": "LN"}
        if behind.parallel:
            names["atb_ff_res"] = "FF"
        return stages | {scope: names[scope] for scope in behind.scopes}

    @cached_property
    def norm_behind(self) -> NormReader | None:
        """The norm on the residual sum: the block's own, or the one that the feed-forward block begins with."""
        if self.final_norm is not None or self.feed_forward is None or self.feed_forward.parallel:
            return self.final_norm
        return self.feed_forward.norm

    @cached_property
    def vector_scopes(self) -> frozenset[Scope]:
        """The scopes through activations, after which norms do not follow from products of the weights."""
        if self.feed_forward is None or self.feed_forward.parallel:
            return frozenset()
        return FEED_FORWARD_SCOPES - {"atb_ln"}

    def precision(self, scopes: Collection[Scope] = ()) -> torch.dtype:
        """Return the least precise dtype in which its modules compute, those of the feed-forward block if scopes do."""
        return self._precisions[not FEED_FORWARD_SCOPES.isdisjoint(scopes)]

    @cached_property
    def _precisions(self) -> tuple[torch.dtype, torch.dtype]:
        norms = [norm.precision for norm in (self.branch_norm, self.final_norm) if norm is not None]
        attention = least_precise(self.projection.precision, *norms)
        return attention, least_precise(attention, *(self.feed_forward.dtypes if self.feed_forward else ()))

    @cached_property
    def _norm_versions(self) -> list[Callable[[], object]]:
        second = None if self.feed_forward is None else self.feed_forward.final_norm
        return [norm.version for norm in (self.branch_norm, self.norm_behind, second) if norm is not None]

    def version(self) -> object:
        """Return what changes when a weight of the projection, or of what its output passes, is replaced or written."""
        factor = None if self.branch_factor is None else version_of(self.branch_factor.stored)
        return self.projection.version(), list(map(operator.call, self._norm_versions)), factor

    def carry(self, scope: Scope, dtype: torch.dtype) -> Carry:
        """Return the steps of a scope up to the end of the attention block, or to the norm after it."""
        if scope == "attn":
            return Carry()
        branch = _scaled_norm(self.branch_norm, self.branch_factor, dtype)
        final = self.norm_behind if scope == "atb_ln" else self.final_norm
        if scope == "attn_res" or final is None:
            return Carry(branch, residual=True)
        return Carry(branch, residual=True, final=final.read(dtype))


def check_scopes(model: nn.Module, scopes: Sequence[Scope], block: Block) -> None:
    """Refuse scopes that a block of a model does not have, with those that it has."""
    name, have = type(model).__name__, ", ".join(block.scopes)
    for scope in scopes:
        if scope in block.scopes:
            continue
        if scope in FEED_FORWARD_SCOPES and block.without_feed_forward is not None:
            raise UnsupportedScopeError(
                f'got the scope "{scope}", but in {name} {block.without_feed_forward}. The layer has the scopes {have}'
            )
        raise UnsupportedScopeError(
            f'got the scope "{scope}"; the layers of {name} are {block.layout.style}, which have the scopes {have}'
            f"{did_you_mean(scope, block.scopes) if scope not in get_args(Scope) else ''}"
        )


def fold_gate(call: AttentionCall, context: Tensor, received: Tensor) -> tuple[AttentionCall, Tensor]:
    """Fold a gate on attention's output, (B, Q, H·d), into values, and factors of the weights, (B, H, 1 or d, Q)."""
    # A gate computed from the query (Qwen3-Next), or a norm's gain over its σ (BitNet), which is frozen as everywhere:
    # the output is still a sum over keys, Σ_j α_ij c_i ⊙ v_j. If c_i is a number for each head times a vector that all
    # queries share, the weights take the number and the values the vector; else every channel becomes a head.
    values, precision = call.values_by_head, torch.finfo(received.dtype).eps
    dtype = accumulation_dtype(received.dtype)
    context, received = (t.to(dtype).unflatten(-1, (values.shape[1], -1)) for t in (context, received))
    # The model rounded the product once, so the quotient is its factor up to rounding. Where attention gives
    # exactly 0, so does every factor.
    silent = context == 0
    factors = (received / context.masked_fill(silent, 1)).masked_fill(silent, 0)  # (B, Q, H, d)
    shared = factors[0, 0]
    by_head = (factors * shared).sum(-1) / shared.square().sum(-1).clamp(min=torch.finfo(dtype).tiny)
    error = (factors - by_head.unsqueeze(-1) * shared).abs()
    query = call.query[..., :1]
    if bool((error <= GATE_ROUNDINGS * precision * factors.abs()).all()):
        of_weights = by_head.permute(0, 2, 1).unsqueeze(2)
        values = values.to(dtype) * shared.unsqueeze(1)
    else:
        of_weights = factors.permute(0, 2, 3, 1)
        query = query.repeat_interleave(values.shape[-1], dim=1)
        values = values.transpose(2, 3).flatten(1, 2).unsqueeze(-1)
    return replace(call, query=query, key=values, value=values, ungated=call), of_weights  # which cannot run

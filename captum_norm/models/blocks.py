"""Holds the parts of an attention block, read from its modules and checked on the layer's own tensors."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError, UnsupportedScopeError
from captum_norm.functional import Carry
from captum_norm.models.factors import Factor, multiplied, read_factor, scaled_norm
from captum_norm.models.feed_forward import FeedForwardBlock
from captum_norm.models.layouts import FEED_FORWARD_SCOPES, Layout, Scope, Site, Stage
from captum_norm.models.precision import coarsest
from captum_norm.models.projections import NormReader, Projection, equal, reproduces
from captum_norm.models.search.trace import ModuleCall, Trace


@dataclass(frozen=True, eq=False)
class Block:
    """One attention block of a model, with its parts found and checked.

    Attributes:
        name: the layer's name in the model.
        layer: the module in which the block was found.
        layout: where its parts are.
        attention: the module that calls the attention function.
        projection: the output projection.
        residual: the site of the residual stream that the attention output is added to.
        total: the site of their sum.
        minus: the site of a further summand, or None.
        branch_norm: the norm before the residual sum, or None.
        final_norm: the norm after it, or None.
        dtype: the dtype of the projection when the block was read.
        queries_first: whether its tensors have the axes (Q, B, D) or (Q·B, D), not (B, Q, D) or (B·Q, D).
        overwritten: the sites whose tensors the model changes afterwards.
        cross: whether it reads another sequence.
        gated: whether the projection receives attention's output times a gate or a norm's gain over its σ.
        feed_forward: the feed-forward block behind it, or None.
        without_feed_forward: why none was found; None if one was, or if none was searched for.
    """

    name: str
    layer: nn.Module
    layout: Layout
    attention: nn.Module
    projection: Projection
    residual: Site[nn.Module]
    total: Site[nn.Module]
    minus: Site[nn.Module] | None
    branch_norm: NormReader | None
    final_norm: NormReader | None
    dtype: torch.dtype
    queries_first: bool
    overwritten: frozenset[Site[nn.Module]]
    cross: bool = False
    gated: bool = False
    feed_forward: FeedForwardBlock | None = None
    without_feed_forward: str | None = None

    @property
    def searched(self) -> bool:
        """Whether a feed-forward block was searched for."""
        return self.feed_forward is not None or self.without_feed_forward is not None

    @cached_property
    def sites(self) -> frozenset[Site[nn.Module]]:
        """The sites of its tensors."""
        norm = None if self.final_norm is None else self.final_norm.output
        sites = (
            self.received if self.gated else None,
            self.projection.output,
            self.residual,
            self.total,
            self.minus,
            norm,
        )
        return frozenset(site for site in sites if site is not None)

    @property
    def received(self) -> Site[nn.Module]:
        """Where the projection receives attention's output."""
        return Site(self.projection.module, "input")

    @cached_property
    def scopes(self) -> tuple[Scope, ...]:
        """The scopes of this block and of the feed-forward block behind it."""
        return (*self.layout.scopes, *(() if self.feed_forward is None else self.feed_forward.scopes))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The maps from attention to the layer's last scope, each once, in the order of the computation."""
        stages = [Stage("ATTN", "attn"), Stage("RES", "attn_res")]
        if self.branch_norm is not None:
            stages[1] = Stage("LN, RES", "atb")
        elif self.final_norm is not None:
            stages.append(Stage("LN", "attn_res_ln"))
        behind = self.feed_forward
        if behind is None:
            return tuple(stages)
        added = "RES" if behind.branch_norm is None else "LN, RES"
        names: dict[Scope, str] = {"atb_ln": "LN", "atb_ff": "FF", "atb_ff_res": added, "atb_ff_res_ln": "LN"}
        if behind.parallel:
            names["atb_ff_res"] = "FF"
        return (*stages, *(Stage(names[scope], scope) for scope in behind.scopes))

    @cached_property
    def norm_behind(self) -> NormReader | None:
        """The norm on the residual sum: the block's own, or the one that the feed-forward block begins with."""
        if self.final_norm is not None or self.feed_forward is None or self.feed_forward.parallel:
            return self.final_norm
        return self.feed_forward.norm

    def forms_vectors(self, scope: Scope) -> bool:
        """Whether a scope goes through activations, after which norms do not follow from products of the weights."""
        networks = self.feed_forward is not None and not self.feed_forward.parallel
        return networks and scope in ("atb_ff", "atb_ff_res", "atb_ff_res_ln")

    def factor(self, name: str | None) -> Factor | None:
        """Return one of the layout's factors."""
        return None if name is None else read_factor(self.layer, name)

    def precision(self, scopes: Collection[Scope] = ()) -> torch.dtype:
        """Return the least precise dtype in which its modules compute, those of the feed-forward block if scopes do."""
        attention, both = self._precisions
        return attention if FEED_FORWARD_SCOPES.isdisjoint(scopes) else both

    @cached_property
    def _precisions(self) -> tuple[torch.dtype, torch.dtype]:
        norms = [norm.precision for norm in (self.branch_norm, self.final_norm) if norm is not None]
        attention = coarsest(self.projection.precision, *norms)
        return attention, attention if self.feed_forward is None else coarsest(attention, *self.feed_forward.dtypes)

    def carry(self, scope: Scope, dtype: torch.dtype) -> Carry:
        """Return the steps of a scope up to the end of the attention block, or to the norm after it."""
        if scope == "attn":
            return Carry()
        branch = scaled_norm(self.branch_norm, self.factor(self.layout.branch_factor), dtype)
        final = self.norm_behind if scope == "atb_ln" else self.final_norm
        if scope == "attn_res" or final is None:
            return Carry(branch, residual=True)
        return Carry(branch, residual=True, final=final.read(dtype))


def check_scopes(model: nn.Module, scopes: Sequence[Scope], block: Block) -> None:
    """Refuse scopes that a block of a model does not have.

    Raises:
        UnsupportedScopeError: names the scopes of the block, and the reason if its feed-forward network was not found.
    """
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
        )


def check_batch_first(model: nn.Module, blocks: Iterable[Block], method: str) -> None:
    """Refuse layers whose first axis is not the batch.

    Raises:
        UnsupportedModelError: in the name of the method that does not support them.
    """
    if any(block.queries_first for block in blocks):
        raise UnsupportedModelError(
            f"the layers of {type(model).__name__} receive (positions, batch, width); {method} supports only layers "
            "with the batch first"
        )


def bind(trace: Trace, layout: Layout, caller: nn.Module, context: Tensor) -> Block:
    """Read a layout's parts from a layer's modules and check its equations on the layer's own tensors.

    Args:
        trace: the events inside the layer.
        layout: the layout to check.
        caller: the module that called the attention function.
        context: attention's output, (B, Q, H·d).

    Raises:
        UnsupportedModelError: if a part is missing or an equation does not hold.
    """
    try:
        return _read(trace, layout, caller, context)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f'the {layout.style} layout of {type(trace.layer).__name__} ("{trace.layer_name}") does not hold: {error}; '
            'see "Describe a new model" in the documentation'
        ) from None


def _read(trace: Trace, layout: Layout, caller: nn.Module, context: Tensor) -> Block:
    if _module(trace, layout.attention) is not caller:
        raise UnsupportedModelError(f'attention is called by "{trace.name(caller)}", not by "{layout.attention}"')
    projected = _call(trace, layout.projection)
    projection = projected.projection
    if projection is None:
        raise UnsupportedModelError(f'"{layout.projection}" does not compute input @ weight + bias')
    branch_norm = final_norm = None
    branch = projected.output
    if layout.branch_norm is not None:
        branch_norm = _norm(trace, layout.branch_norm, branch)
        branch = _call(trace, layout.branch_norm).output
    residual = _tensor(trace, layout.residual)
    summands = [
        multiplied(_factor(trace, layout.residual_factor, residual), residual),
        multiplied(_factor(trace, layout.branch_factor, branch), branch),
        *([_tensor(trace, layout.minus)] if layout.minus else []),
    ]
    total = _tensor(trace, layout.total)
    if any(part.numel() != total.numel() for part in summands) or not reproduces(sum_of(*summands), total, *summands):
        raise UnsupportedModelError(f'"{layout.total}" is not the sum of "{layout.residual}" and the attention output')
    if layout.final_norm is not None:
        final_norm = _norm(trace, layout.final_norm, total)
    return Block(
        name=trace.layer_name,
        layer=trace.layer,
        layout=layout,
        attention=caller,
        projection=projection,
        residual=layout.residual.inside(trace.layer),
        total=layout.total.inside(trace.layer),
        minus=None if layout.minus is None else layout.minus.inside(trace.layer),
        branch_norm=branch_norm,
        final_norm=final_norm,
        dtype=projection.dtype,
        queries_first=_is_queries_first(projected.inputs, context),
        overwritten=trace.overwritten,
    )


def sum_of(first: Tensor, *others: Tensor) -> Tensor:
    """Add tensors with the same number of elements, in the shape of the first."""
    for other in others:
        first = first + other.reshape(first.shape)
    return first


def _is_queries_first(received: Tensor, context: Tensor) -> bool:
    """Whether the output projection received attention's output, (B, Q, H·d), as (Q, B, H·d).

    All tensors of a block have the same order, since its equations hold element by element.
    """
    straight, swapped = (equal(order, received) for order in (context, context.transpose(0, 1)))
    if straight != swapped:
        return swapped
    batch, queries, _ = context.shape
    return batch != queries and received.shape[:-1] == (queries, batch)


def _module(trace: Trace, part: str) -> nn.Module:
    try:
        return trace.layer.get_submodule(part)
    except AttributeError:
        raise UnsupportedModelError(f'there is no module "{part}"') from None


def _call(trace: Trace, part: str) -> ModuleCall:
    found = trace.call_of(_module(trace, part))
    if found is None:
        raise UnsupportedModelError(f'no tensor passed "{part}"')
    return found


def _tensor(trace: Trace, site: Site[str]) -> Tensor:
    found = trace.at(site)
    if found is None:
        raise UnsupportedModelError(f'no tensor passed "{site}"')
    return found


def _factor(trace: Trace, name: str | None, tensor: Tensor) -> Factor | None:
    if name is None:
        return None
    factor = read_factor(trace.layer, name)
    if factor is None or factor.size not in (1, tensor.shape[-1]):
        raise UnsupportedModelError(f'"{name}" is neither a number nor a vector of {tensor.shape[-1]} numbers')
    return factor


def _norm(trace: Trace, part: str, expected: Tensor) -> NormReader:
    call = _call(trace, part)
    if not equal(call.inputs, expected):
        raise UnsupportedModelError(f'"{part}" does not receive the tensor that it should normalise')
    reader = call.norm
    if reader is None:
        raise UnsupportedModelError(f'"{part}" does not compute LayerNorm or RMSNorm with its parameters')
    return reader

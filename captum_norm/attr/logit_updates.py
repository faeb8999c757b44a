"""Decomposes output values into the updates of attention heads and feed-forward blocks, and traces these to tokens.

With the statistics of norms frozen, the residual connections carry what each block adds to the output, linearly:

    value = ⟨g₀, embedding⟩ + Σ_l Σ_h ⟨g_l, W_h o_h⟩ + Σ_l ⟨g'_l, feed-forward output⟩ + biases

with g the direction in which the value reads the residual stream behind a block. In pre-norm layers it is that in which
the frozen head reads the last layer's output, times residual multipliers; in post-norm layers it is carried back
through the frozen norms in between. Positions are mixed by attention alone, so only those that the head reads count.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from captum_norm.attr.frozen.head import HeadReading
from captum_norm.attr.layer_maps import LayerMap, stacked_maps
from captum_norm.attr.output import Decomposition
from captum_norm.errors import InvalidInputError, UnsupportedScopeError
from captum_norm.forward.record import Layer
from captum_norm.forward.request import Request, layer_indices
from captum_norm.forward.segments import Segments
from captum_norm.functional import Normalization, inverse_scale, own_keys
from captum_norm.functional.carry import apply_transposed
from captum_norm.models.blocks import Block, check_scopes, multiplied
from captum_norm.models.call import ModelCall, Positions
from captum_norm.models.projections import NormReader
from captum_norm.models.stacks import Place, Role
from captum_norm.results.aggregation import normalize_rows
from captum_norm.results.components import Component
from captum_norm.results.maps import AttributionMaps, SourceAndPrefix


class LogitUpdates(NamedTuple):
    """Output values, each split into what every part of the model adds to it directly.

    Every axis P is there only if several positions of each example were given. The sum of all parts is the value:
    ``embedding + heads.sum((-2, -1)) + feed_forward.sum(-1) + bias``, and that of ``cross_heads``.

    Attributes:
        embedding: what enters the first layer, (B[, P]).
        heads: each head of self-attention, (B[, P], L, H); 0 beyond the heads of a layer that has fewer.
        cross_heads: those of cross-attention; None without.
        feed_forward: each feed-forward block, its own biases included, (B[, P], L).
        bias: the biases of attention's output projections, of norms behind a block, and of the head, (B[, P]).
        number: the value, such as a logit, (B[, P]).
        convergence_delta: ``|sum of all parts − number|`` relative to the sum of their sizes, (B[, P]).
    """

    embedding: Tensor
    heads: Tensor
    cross_heads: Tensor | None
    feed_forward: Tensor
    bias: Tensor
    number: Tensor
    convergence_delta: Tensor


PathScales = tuple[Tensor | None, Tensor | None]
"""1/σ of the norms behind attention and behind the feed-forward block, (B, Q, 1) each; None for an absent norm."""


def norm_scales(layer: Layer) -> PathScales:
    """Compute 1/σ of the norms on the residual path of a layer."""

    def scale(norm: NormReader | None, whole: Tensor) -> Tensor | None:
        return None if norm is None else inverse_scale(norm.read(layer.dtype), whole.detach().to(layer.dtype))

    network, behind, second = layer.block.feed_forward, layer.recorded.behind, None
    with torch.no_grad():
        first = scale(layer.block.final_norm, layer.recorded.total)
        if network is not None and behind is not None:
            second = scale(network.final_norm, behind.total)
    return first, second


def residual_path(
    model: nn.Module, path: dict[Place, Block], scales: Mapping[Place, PathScales], reading: HeadReading
) -> tuple[dict[Place, tuple[Tensor, Tensor]], Tensor]:
    """Carry the directions of a head back along the residual connections; also return what norms' biases add, (N,)."""
    # Directions (N, D) at each layer's sums of attention and stream, and of feed-forward output and stream.
    directions: dict[Place, tuple[Tensor, Tensor]] = {}
    g, constant = reading.directions, torch.zeros_like(reading.directions[:, 0])

    def before(norm: NormReader | None, scale: Tensor | None) -> None:
        nonlocal g, constant
        if norm is None or scale is None:
            return
        g, added = _transposed(norm.read(g.dtype), g)
        g, constant = g * scale.to(g)[reading.examples, reading.positions], constant + added

    for place, next_place in zip(reversed(path), [None, *reversed(path)], strict=False):
        block, behind, (scale, second) = path[place], path[place].feed_forward, scales[place]
        if behind is None and (next_place is None or next_place.role != "cross"):
            check_scopes(model, ["atb_ff_res"], block)
            raise UnsupportedScopeError(
                f'no feed-forward block was found behind "{block.name}" of {type(model).__name__}'
            )
        at_network = g
        if behind is not None:
            before(behind.final_norm, second)
            at_network = g
            g = multiplied(behind.residual_factor, g)
        before(block.final_norm, scale)
        directions[place] = g, at_network
        g = multiplied(block.residual_factor, g)
    return directions, constant


def _transposed(norm: Normalization | None, g: Tensor) -> tuple[Tensor, Tensor]:
    """Carry directions back through a norm, but for 1/σ; also return what its bias adds, (N,)."""
    added = torch.zeros_like(g[:, 0])
    if norm is None:
        return g, added
    gain = None if norm.gain is None else norm.gain.to(g.device)
    added = added if norm.bias is None else g @ norm.bias.to(g)
    return apply_transposed(Normalization(norm.centered, gain, None, norm.eps, norm.statistics), g), added


class BlockUpdates(NamedTuple):
    """What one layer's blocks add to N readings of output values."""

    heads: Tensor  # of each head, (N, H)
    keys: Tensor  # of each key's vectors, (N, K)
    feed_forward: Tensor | None  # (N,)
    stream: Tensor  # of the residual stream before attention, (N,); the first layer's is the embedding's
    bias: Tensor  # (N,)
    at_network: Tensor  # the directions in which values read what networks write, (N, D)
    segments: Tensor | None  # of each head from the keys of each segment, (N, H, G)


def block_updates(
    layer: Layer, reading: HeadReading, directions: tuple[Tensor, Tensor], segments: Segments | None
) -> BlockUpdates:
    """Compute what a layer adds to output values that read it in these directions."""
    block, dtype, tensors = layer.block, layer.dtype, layer.recorded
    device = tensors.projected.device
    examples, positions = reading.examples.to(device), reading.positions.to(device)

    def at(tensor: Tensor) -> Tensor:
        return tensor.to(device)[examples, positions].to(dtype)

    def through(norm: Normalization | None, g: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        before, added = _transposed(norm, g)
        return before if norm is None else before * inverse_scale(norm, whole), added

    g, at_network = (direction.to(device, dtype) for direction in directions)
    stream = (g * at(tensors.residual)).sum(-1)
    g, bias = through(block.carry("attn_res", dtype).branch, g, at(tensors.projected))
    shift = block.projection.bias(dtype)
    bias = bias if shift is None else bias + g @ shift
    inner = (g @ block.projection.weight(dtype).T).unflatten(-1, (layer.call.query.shape[1], -1))
    heads = g.new_zeros(len(g), layer.call.query.shape[1])
    keys = g.new_zeros(len(g), layer.call.key.shape[2])
    grouped = None if segments is None else g.new_zeros(*heads.shape, segments.count)
    rows = dict[tuple[int, int], list[int]]()  # of the same position
    for n, place in enumerate(zip(reading.examples.tolist(), reading.positions.tolist(), strict=True)):
        rows.setdefault(place, []).append(n)
    for part, _, weights in layer.parts():
        first, start = part.examples.start, part.rows.start
        for (example, position), some in rows.items():
            if first <= example < first + len(weights) and start <= position < start + weights.shape[2]:
                row = weights[example - first, :, position - start].to(device, dtype)
                vectors = row.unsqueeze(-1) * layer.values[example, :, part.keys].to(device)
                heads[some] = (inner[some] * vectors.sum(1)).sum(-1)
                keys[some, part.keys] = inner[some].flatten(1) @ vectors.transpose(1, 2).flatten(0, 1)
                if grouped is not None and segments is not None:
                    by_key = (inner[some].transpose(0, 1) @ vectors.mT).transpose(0, 1)
                    grouped[some] = grouped[some].index_add(2, segments.numbers[example, part.keys], by_key)
    feed_forward, behind = None, block.feed_forward
    if behind is not None and tensors.behind is not None:
        written = at(tensors.behind.written)
        g, added = through(behind.carry("atb_ff_res", dtype).branch, at_network, written)
        feed_forward, bias = (g * written).sum(-1), bias + added
    by_head, there = heads.unflatten(1, (-1, layer.channels)).sum(-1), reading.number.device
    if grouped is not None:
        grouped = grouped.unflatten(1, (-1, layer.channels)).sum(2)[..., :-1]
    made = (by_head, keys, feed_forward, stream, bias, g, grouped)
    moved: list[Any] = [None if part is None else part.to(there) for part in made]
    return BlockUpdates(*moved)


def stacked_heads(layers: Sequence[Tensor]) -> Tensor:
    """Stack (N, ..., H) of every layer to (N, L, ..., H), with 0 beyond the heads of a layer that has fewer."""
    most = max(layer.shape[-1] for layer in layers)
    return torch.stack([nn.functional.pad(layer, (0, most - layer.shape[-1])) for layer in layers], 1)


@dataclass(eq=False)
class Tracing:
    """The updates of all layers, and the mixtures of tokens that their keys and positions stand for."""

    call: ModelCall
    reading: HeadReading  # of N positions
    path: dict[Place, Block]  # the attention blocks on the residual path
    constant: Tensor  # what the biases of norms on the path add, (N,)
    several: bool  # whether there are P positions of each example
    attention_alone: bool = False  # whether tokens share attention's updates alone, not those of other blocks
    updates: dict[Place, BlockUpdates] = field(default_factory=dict)
    causal: bool = False  # whether the model's only stack is
    # What each stack's positions stand for now, (B, Q, K) or, in a decoder that reads a source, (B, T, K + S).
    _streams: dict[Role, Tensor] = field(default_factory=dict)
    _tokens: dict[Place, Tensor] = field(default_factory=dict)  # a layer's updates traced to tokens, (N, K or K + S)
    _deltas: dict[Place, Tensor] = field(default_factory=dict)  # the completeness errors of its map
    _prefix: int = 0  # number of the decoder's own tokens, if it reads a source

    @property
    def depth(self) -> int:
        """Number of layers."""
        return 1 + max(place.index for place in self.path)

    def advance(self, place: Place, shares: Tensor, delta: Tensor) -> None:
        """Trace a layer's updates to the tokens by what keys stand for, and go on to what its positions stand for."""
        queries, keys = self.call.positions_of(place.role)
        if queries.real is not None:
            shares = shares.where(queries.real.to(shares.device)[:, :, None], 0)
        if keys.real is not None:
            shares = shares.where(keys.real.to(shares.device)[:, None], 0)
        stack = "decoder" if place.role == "cross" else place.role
        if place.role == "cross":
            source, state = self._streams["encoder"].to(shares), self._streams[stack].to(shares)
            before = nn.functional.pad(source, (self._prefix, 0))
            after = shares @ before + (1 - shares.sum(-1, keepdim=True)) * state
        else:
            state = self._streams[stack].to(shares) if stack in self._streams else self._begin(stack, shares)
            before, prefix = state, shares.shape[-1] - shares.shape[-2]
            if prefix:  # the keys of a tuned prefix stand for themselves
                rows = torch.eye(prefix, state.shape[-1], dtype=state.dtype, device=state.device)
                before = torch.cat([rows.expand(len(state), -1, -1), state], 1)
            unmixed = (shares.sum(-1, keepdim=True) == 0).to(shares)
            after = normalize_rows(shares) @ before + unmixed * state
        self._streams[stack] = after
        there = self.reading.number.device
        self._deltas[place] = delta.to(there)
        if place in self.updates:
            self._tokens[place] = self._traced(place, before, state, after).to(there)

    def _begin(self, stack: Role, shares: Tensor) -> Tensor:
        """Return what enters the first layer: each position stands for itself."""
        state = torch.zeros_like(shares)
        own_keys(state).fill_(1)
        if stack != "decoder":
            return state
        if "encoder" not in self._streams:
            raise InvalidInputError(
                f"the encoder of {type(self.call.model).__name__} did not run, so what the source stands for is "
                "unknown; pass the source itself, no encoder_outputs"
            )
        self._prefix = shares.shape[-1]
        return nn.functional.pad(state, (0, self._streams["encoder"].shape[-1]))

    def _traced(self, place: Place, before: Tensor, state: Tensor, after: Tensor) -> Tensor:
        """Spread a layer's updates over the tokens that keys and positions stand for."""
        updates, behind = self.updates[place], self.path[place].feed_forward
        examples, positions = self.reading.examples.to(before.device), self.reading.positions.to(before.device)
        keys = updates.keys.to(before)
        tokens = before.new_zeros(len(examples), before.shape[-1])
        for example in examples.unique().tolist():
            chosen = examples == example
            tokens[chosen] = keys[chosen] @ before[example]
        if self.attention_alone:
            return tokens
        if updates.feed_forward is not None and behind is not None:
            read = state if behind.parallel else after
            tokens = tokens + updates.feed_forward.to(before)[:, None] * read[examples, positions]
        if place == next(iter(self.path)):
            tokens = tokens + updates.stream.to(before)[:, None] * state[examples, positions]
        return tokens

    def _sum(self, parts: Tensor) -> Tensor:
        """Add up what N readings have, (N, ...), to the O values."""
        total = parts.new_zeros(len(self.reading.number), *parts.shape[1:])
        return total.index_add_(0, self.reading.outputs.to(parts.device), parts)

    def _shaped(self, values: Tensor) -> Tensor:
        """Give O values their axes: (B, ...) or (B, P, ...)."""
        return values.unflatten(0, (self.call.batch, -1)) if self.several else values

    @cached_property
    def summed(self) -> LogitUpdates:
        """The updates of O values."""
        first, layers = next(iter(self.path)), self.updates.values()

        def heads(role: Role) -> Tensor:
            return self._sum(
                stacked_heads([updates.heads for place, updates in self.updates.items() if place.role == role])
            )

        stream = self.updates[first].stream
        networks = torch.stack([layer.feed_forward for layer in layers if layer.feed_forward is not None], 1)
        constants = torch.stack([self.constant.to(stream.device), *(layer.bias for layer in layers)]).sum(0)
        bias, number = self.reading.bias + self._sum(constants), self.reading.number
        parts = torch.cat([stream[:, None], *(layer.heads for layer in layers), networks], 1)
        size = torch.maximum(self._sum(parts.abs().sum(1)) + bias.abs(), self.reading.rounded.to(parts))
        error = (self._sum(parts.sum(1)) + bias - number).abs() / size.clamp(min=torch.finfo(size.dtype).tiny)
        delta = torch.maximum(error, self.reading.deviation.to(error))
        crossed = heads("cross") if any(place.role == "cross" for place in self.updates) else None
        return LogitUpdates(
            self._sum(stream), heads(first.role), crossed, self._sum(networks), bias, number, convergence_delta=delta
        )

    def segment_updates(self) -> Tensor:
        """Return what each head adds from the keys of each segment, (B[, P], L, H, G)."""
        layers = [updates.segments.mT for updates in self.updates.values() if updates.segments is not None]
        return self._shaped(self._sum(stacked_heads(layers).mT))

    def logit_updates(self) -> LogitUpdates:
        """Return the updates with the axes of the values."""
        parts = self.summed._asdict().items()
        shaped: dict[str, Any] = {name: None if part is None else self._shaped(part) for name, part in parts}
        return LogitUpdates(**shaped)

    def placed(self, kind: Component) -> dict[Role, Tensor]:
        """Stack the updates of heads or feed-forward networks at the positions read, (B[, P], L, [H,] Q)."""
        if kind not in ("heads", "feed_forward"):
            raise InvalidInputError(
                f'got components="{kind}"; updates are of "heads" and "feed_forward": take another method, such as RelP'
            )
        first = next(iter(self.path)).role
        updates: dict[Role, list[Tensor]] = {}
        for place, update in self.updates.items():
            if kind == "heads":
                updates.setdefault(place.role, []).append(update.heads)
            elif update.feed_forward is not None:
                updates.setdefault(first, []).append(update.feed_forward[:, None])
        queries = self.updates[next(iter(self.path))].keys.shape[1] - self.call.prefix.past
        places = self.reading.outputs, self.reading.positions
        placed: dict[Role, Tensor] = {}
        for role, layers in updates.items():
            parts = stacked_heads(layers) if kind == "heads" else torch.stack(layers, 1).squeeze(-1)
            rows = parts.new_zeros(len(self.reading.number), queries, *parts.shape[1:])
            rows.index_put_(tuple(place.to(rows.device) for place in places), parts, accumulate=True)
            placed[role] = self._shaped(rows.movedim(1, -1))
        return placed

    def scores(self, layers: Collection[int]) -> Any:
        """Add up the tokens' parts in the updates of some layers, at the places of the user's inputs."""
        tokens = torch.stack([tokens for place, tokens in self._tokens.items() if place.index in layers]).sum(0)
        tokens = self._sum(tokens).unflatten(0, (self.call.batch, -1))
        halves = [keys.restore(half, 2) for half, keys in self._halves(tokens)]
        halves = [half if self.several else half[:, 0] for half in halves]
        return halves[0] if len(halves) == 1 else SourceAndPrefix(halves[1], halves[0])

    def _halves(self, tokens: Tensor) -> Iterator[tuple[Tensor, Positions]]:
        """Split tokens' parts by sequence, (..., K) and (..., S); yield them with their positions."""
        if not self._prefix:
            yield tokens, self.call.positions_of("self" if self.call.encoder is None else "encoder")[1]
            return
        yield tokens[..., : self._prefix], self.call.positions_of("decoder")[1]
        yield tokens[..., self._prefix :], self.call.positions_of("encoder")[1]

    def decomposition(self) -> Decomposition:
        """Add up the tokens' parts in all updates."""
        updates, bias = self.logit_updates(), self.summed.bias
        if self.attention_alone:
            bias = bias + self.summed.embedding + self.summed.feed_forward.sum(-1)
        scores = self.scores(range(self.depth))
        return Decomposition(scores, self._shaped(bias), updates.number, updates.convergence_delta)

    def layer_maps(self, request: Request) -> AttributionMaps:
        """Place the tokens' parts of each layer requested in the rows of the positions read."""
        maps: dict[Role, list[tuple[int, LayerMap]]] = {}
        stack = next(iter(self.path)).role
        for index in layer_indices(request.layers, self.depth):
            places = [place for place in self._tokens if place.index == index]
            tokens = torch.stack([self._tokens[place] for place in places]).sum(0)
            rows = tokens.new_zeros(self.call.batch, self._streams[stack].shape[1], tokens.shape[-1])
            rows.index_put_((self.reading.examples.to(rows.device), self.reading.positions.to(rows.device)), tokens)
            delta = torch.stack([self.summed.convergence_delta, *(self._deltas[place] for place in places)])
            for role, (half, _) in zip((stack, "cross"), self._halves(rows), strict=False):
                if request.has_stack(role):
                    maps.setdefault(role, []).append((index, LayerMap(half, delta.amax(0))))
        if not maps:
            raise InvalidInputError(
                f"got stacks={list(request.stacks or ())}; the encoder adds nothing to the output directly; its "
                'source\'s parts are in "cross"'
            )
        return stacked_maps(self.call, maps, causal=self.causal)

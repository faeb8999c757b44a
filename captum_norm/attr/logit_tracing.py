"""Traces what layers add to output values back to the input tokens, by what each position stands for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from captum_norm.attr.frozen.head import HeadReading
from captum_norm.attr.frozen.network import HookedModules
from captum_norm.attr.logit_updates import BlockUpdates, LogitUpdates, Step, stacked_heads
from captum_norm.attr.output import Decomposition
from captum_norm.errors import IncompleteDecompositionError, InvalidInputError
from captum_norm.forward.checks import TOLERANCE, finite_results
from captum_norm.forward.request import Request, layer_indices
from captum_norm.forward.stacking import stacked_maps
from captum_norm.functional import own_keys
from captum_norm.models.call import ModelCall
from captum_norm.models.positions import Positions
from captum_norm.models.precision import coarsest
from captum_norm.models.projections import NormReader, Projection
from captum_norm.models.stacks import Place, Role
from captum_norm.results.aggregation import normalize_rows
from captum_norm.results.maps import AttributionMaps, SourceAndPrefix

Spread = Literal["all", "attention"]


@dataclass(eq=False)
class Tracing:
    """The updates of all layers, and what their keys and positions stand for.

    Attributes:
        call: the call explained.
        spread: which updates are traced to tokens, see :class:`captum_norm.ALTILogit`.
        reading: how the head reads N positions.
        path: the blocks on the residual path.
        constant: what the biases of norms on it add, (N,).
        several: whether there are P positions of each example.
        updates_by_place: each layer's updates.
        causal: whether the model's only stack is causal.
    """

    call: ModelCall
    spread: Spread
    reading: HeadReading
    path: list[Step]
    constant: Tensor
    several: bool
    updates_by_place: dict[Place, BlockUpdates] = field(default_factory=dict)
    causal: bool = False
    _streams: dict[Role, Tensor] = field(default_factory=dict)
    _tokens: dict[Place, Tensor] = field(default_factory=dict)
    _deltas: dict[Place, Tensor] = field(default_factory=dict)
    _prefix: int = 0

    @property
    def depth(self) -> int:
        """Number of layers."""
        return 1 + max(step.place.index for step in self.path)

    def advance(self, place: Place, shares: Tensor, delta: Tensor) -> None:
        """Trace a layer's updates to the tokens by what keys stand for, and go on to what its positions stand for.

        States stand for mixtures of tokens, (B, Q, K) or, of a decoder that reads a source, (B, T, K + S).
        """
        queries, keys = self.call.positions_of(place.role)
        shares = _real(shares, queries.real, keys.real)
        self._deltas[place] = delta
        stack = "decoder" if place.role == "cross" else place.role
        if place.role == "cross":
            source, state = self._streams["encoder"].to(shares), self._streams[stack].to(shares)
            before = functional.pad(source, (self._prefix, 0))
            after = shares @ before + (1 - shares.sum(-1, keepdim=True)) * state
        else:
            known = self._streams.get(stack)
            state = self._begin(stack, shares) if known is None else known.to(shares)
            before = self._with_prefix(state, shares.shape[-1] - shares.shape[-2])
            kept = (shares.sum(-1, keepdim=True) == 0).to(shares)
            after = normalize_rows(shares) @ before + kept * state
        self._streams[stack] = after
        updates = self.updates_by_place.get(place)
        if updates is not None:
            self._tokens[place] = self._traced(place, updates, before, state, after)

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
        return functional.pad(state, (0, self._streams["encoder"].shape[-1]))

    @staticmethod
    def _with_prefix(state: Tensor, prefix: int) -> Tensor:
        """Add the rows of a tuned prefix, whose keys stand for themselves."""
        rows = torch.eye(prefix, state.shape[-1], dtype=state.dtype, device=state.device)
        return torch.cat([rows.expand(len(state), -1, -1), state], 1) if prefix else state

    def _traced(self, place: Place, updates: BlockUpdates, before: Tensor, state: Tensor, after: Tensor) -> Tensor:
        examples, positions = self.reading.examples.to(before.device), self.reading.positions.to(before.device)
        tokens = torch.empty(0)
        for example in examples.unique().tolist():
            chosen = examples == example
            traced = updates.keys.to(before)[chosen] @ before[example]
            tokens = tokens if len(tokens) else traced.new_zeros(len(examples), traced.shape[-1])
            tokens[chosen] = traced
        if self.spread == "attention":
            return tokens
        behind = next(step.block.feed_forward for step in self.path if step.place == place)
        if updates.feed_forward is not None and behind is not None:
            read = state if behind.parallel else after
            tokens = tokens + updates.feed_forward.to(before)[:, None] * read[examples, positions]
        if place == self.path[0].place:
            tokens = tokens + updates.stream.to(before)[:, None] * state[examples, positions]
        return tokens

    def _sum(self, parts: Tensor) -> Tensor:
        """Add up what N readings have, (N, ...), to the O values."""
        total = parts.new_zeros(len(self.reading.number), *parts.shape[1:])
        return total.index_add_(0, self.reading.outputs.to(parts.device), parts)

    def _shaped(self, values: Tensor) -> Tensor:
        """Give O values their axes: (B, ...) or (B, P, ...)."""
        return values.unflatten(0, (self.call.batch, -1)) if self.several else values

    def updates(self) -> LogitUpdates:
        """Sum up the updates by head and block."""
        each = {role: [u for p, u in self.updates_by_place.items() if p.role == role] for role in self._roles}
        crossed = each.get("cross")
        fed = [u.feed_forward for u in self.updates_by_place.values() if u.feed_forward is not None]
        device = self.reading.number.device

        def summed(parts: Tensor) -> Tensor:
            return self._shaped(self._sum(parts.to(device)))

        return LogitUpdates(
            embedding=summed(self._embedding),
            heads=summed(stacked_heads([u.heads for u in each[self._roles[0]]])),
            cross_heads=summed(stacked_heads([u.heads for u in crossed])) if crossed else None,
            feed_forward=summed(torch.stack([part.to(device) for part in fed], 1)),
            bias=self._shaped(self._bias),
            number=self._shaped(self.reading.number),
            convergence_delta=self._shaped(self.delta),
        )

    @property
    def _roles(self) -> list[Role]:
        return list(dict.fromkeys(step.place.role for step in self.path))

    @property
    def _embedding(self) -> Tensor:
        return self.updates_by_place[self.path[0].place].stream

    @property
    def _bias(self) -> Tensor:
        """What the biases add, (O,)."""
        device = self.reading.number.device
        parts = [self.constant, *(u.bias for u in self.updates_by_place.values())]
        return self.reading.bias + self._sum(torch.stack([part.to(device) for part in parts]).sum(0))

    @property
    def delta(self) -> Tensor:
        """The completeness error, (O,)."""
        device, every = self.reading.number.device, list(self.updates_by_place.values())
        parts = [self._embedding.to(device)[:, None], *(u.heads.to(device) for u in every)]
        parts += [u.feed_forward.to(device)[:, None] for u in every if u.feed_forward is not None]
        updates = torch.cat(parts, 1)
        total = self._sum(updates.sum(1)) + self._bias
        size = torch.maximum(self._sum(updates.abs().sum(1)) + self._bias.abs(), self.reading.rounded.to(total))
        error = (total - self.reading.number).abs() / size.clamp(min=torch.finfo(size.dtype).tiny)
        return torch.maximum(error, self.reading.deviation.to(error))

    def accept(self, modules: HookedModules | None) -> None:
        """Refuse updates that do not add up.

        Raises:
            IncompleteDecompositionError: if they do not.
        """
        delta = finite_results(self.call.model, self.delta)
        if (delta <= TOLERANCE[delta.dtype]).all():
            return
        steps = () if modules is None else modules.steps.values()
        read = [step.precision for step in steps if isinstance(step, (NormReader, Projection))]
        blocks = [step.block.precision(["atb_ff_res"]) for step in self.path]
        precision = coarsest(delta.dtype, *read, *blocks)
        if not bool((delta <= TOLERANCE[precision]).all()):
            raise IncompleteDecompositionError(
                f"the updates of all blocks do not add up to the output of {type(self.call.model).__name__}: relative "
                f"error {float(delta.max()):.1e}, accepted {TOLERANCE[precision]:.0e} for {precision}"
            )

    def scores(self, layers: Sequence[int]) -> Any:
        """Add up the tokens' parts in the updates of some layers, at the places of the user's inputs."""
        parts = [tokens for place, tokens in self._tokens.items() if place.index in layers]
        tokens = self._sum(torch.stack([part.to(self.reading.number.device) for part in parts]).sum(0))
        tokens = tokens.unflatten(0, (self.call.batch, -1))
        halves = [keys.restore(half, 2) for half, keys in self._halves(tokens)]
        halves = [half if self.several else half[:, 0] for half in halves]
        return halves[0] if len(halves) == 1 else SourceAndPrefix(halves[1], halves[0])

    def _halves(self, tokens: Tensor) -> Iterator[tuple[Tensor, Positions]]:
        """Split tokens' parts by sequence, (..., K) and (..., S); yield them with their positions."""
        if not self._prefix:
            yield tokens, self.call.positions_of("self" if self.call.encoder is None else "encoder")[1]
            return
        _, own = self.call.positions_of("decoder")
        _, source = self.call.positions_of("encoder")
        yield tokens[..., : self._prefix], own
        yield tokens[..., self._prefix :], source

    def decomposition(self) -> Decomposition:
        """Add up the tokens' parts in all updates."""
        scores, bias = self.scores(range(self.depth)), self._bias
        if self.spread == "attention":
            device = self.reading.number.device
            every = self.updates_by_place.values()
            others = [self._embedding, *(u.feed_forward for u in every if u.feed_forward is not None)]
            bias = bias + self._sum(torch.stack([part.to(device) for part in others]).sum(0))
        bias, number, delta = (self._shaped(part) for part in (bias, self.reading.number, self.delta))
        return Decomposition(scores, bias, number, delta)

    def layer_maps(self, request: Request) -> AttributionMaps:
        """Place the tokens' parts of each layer requested in the rows of the positions read."""
        chosen = layer_indices(request.layers, self.depth)
        stack = self._roles[0]
        queries = self._streams[stack].shape[1]
        maps: dict[Role, list[tuple[int, Tensor]]] = {}
        deltas: dict[Role, list[Tensor]] = {}
        for index in chosen:
            tokens = torch.stack(
                [part.to(self.reading.number.device) for p, part in self._tokens.items() if p.index == index]
            )
            rows = tokens.new_zeros(self.call.batch, queries, tokens.shape[-1])
            rows.index_put_(
                (self.reading.examples.to(rows.device), self.reading.positions.to(rows.device)), tokens.sum(0)
            )
            delta = torch.stack(
                [one.to(rows.device) for p, one in self._deltas.items() if p.index == index and p.role != "encoder"]
            )
            delta = torch.maximum(delta.amax(0), self.delta.to(rows.device))
            for role, (half, _) in zip((stack, "cross"), self._halves(rows), strict=False):
                if request.has_stack(role):
                    maps.setdefault(role, []).append((index, half))
                    deltas.setdefault(role, []).append(delta)
        if not maps:
            raise InvalidInputError(
                f"got stacks={list(request.stacks or ())}; the encoder adds nothing to the output directly; its "
                'source\'s parts are in "cross"'
            )
        return stacked_maps(self.call, maps, deltas, causal=self.causal)


def _real(shares: Tensor, queries: Tensor | None, keys: Tensor | None) -> Tensor:
    """Set a map's rows and columns at padding to 0."""
    if queries is not None:
        shares = shares.where(queries.to(shares.device)[:, :, None], 0)
    return shares if keys is None else shares.where(keys.to(shares.device)[:, None], 0)

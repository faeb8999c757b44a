"""Computes the norms of one layer beyond its feed-forward network, forming the vectors in chunks.

The activations' slopes depend on the query, so norms do not follow from inner products of the model's weights as they
do for attention. Completeness is checked on the sum of the vectors themselves.
"""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from captum_norm.forward.record import BlockTensors, FeedForwardTensors, Layer
from captum_norm.functional import (
    Baseline,
    FrozenFeedForward,
    Normalization,
    apply_linear,
    inverse_scale,
    length,
    normalize,
    ratio,
    relative_error,
)
from captum_norm.models.blocks import Block, FeedForwardBlock, multiplied
from captum_norm.models.layouts import Scope
from captum_norm.models.networks import Routing

# Memory limit for the vectors and their intermediates.
VECTOR_BYTES = 256 * 2**20
# Tensors alive at a time per vector (copies of its value; steps before and after the networks) and per query
# (pre-activations, their origins, slopes and intermediates).
VALUES_PER_VECTOR, STEPS_PER_VECTOR, NEURONS_PER_QUERY = 2, 9, 12


class _FrozenBlock:
    """A feed-forward block's norm and networks, frozen at some queries.

    Args:
        behind: the block.
        stream: the whole stream that it reads, (n, D).
        constant: the part of it that belongs to no key, (n, D).
        routing: of a mixture of experts, at these queries.
        baseline: start of the integrated-gradients paths.
    """

    def __init__(
        self, behind: FeedForwardBlock, stream: Tensor, constant: Tensor, routing: Routing | None, baseline: Baseline
    ) -> None:
        self._norm: Normalization | None = None if behind.norm is None else behind.norm.read(stream.dtype)
        self._scale = stream.new_ones(1, 1) if self._norm is None else inverse_scale(self._norm, stream)
        whole, unowned = stream, constant
        if self._norm is not None:
            whole, unowned = normalize(self._norm, stream), apply_linear(self._norm, constant) * self._scale
            unowned = unowned if self._norm.bias is None else unowned + self._norm.bias
        self.frozen = FrozenFeedForward(behind.uses(whole, routing), whole, unowned, baseline)

    def through(self, parts: Tensor, queries: Tensor, numbers: int) -> Tensor:
        """Carry parts of the stream, (m, D), at their queries, (m,), to the networks' output, (m, D)."""
        if self._norm is not None:
            parts = apply_linear(self._norm, parts) * self._scale[queries]
        return self.frozen.through(parts, queries, numbers)


def parallel_part(block: Block, tensors: BlockTensors, baseline: Baseline, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute what a parallel layer's networks add to the residual stream; their input is at the query alone.

    Returns:
        the query's own part, and what belongs to no key, (B, Q, D) each.
    """
    if block.feed_forward is None or tensors.behind is None:
        raise ValueError("a parallel feed-forward block is needed")
    stream = tensors.residual.to(dtype).flatten(0, 1)
    frozen_block = _FrozenBlock(block.feed_forward, stream, torch.zeros_like(stream), tensors.behind.routing, baseline)
    own = frozen_block.through(stream, torch.arange(len(stream), device=stream.device), 0)
    carry = block.feed_forward.carry("atb_ff_res", dtype)
    scales = carry.scales(own + frozen_block.frozen.constant, stream)
    own, constant = carry.vector(own, None, scales), carry.constant(frozen_block.frozen.constant, None, scales)
    return own.reshape(tensors.residual.shape), constant.reshape(tensors.residual.shape)


def feed_forward_norms(layer: Layer, scopes: Sequence[Scope]) -> tuple[dict[Scope, Tensor], dict[str, Tensor], Tensor]:
    """Compute the norms of what each query receives from each key, at scopes beyond the feed-forward network.

    Args:
        layer: the layer; its feed-forward block must not be parallel.
        scopes: the scopes to measure, all of them the feed-forward block's.

    Returns:
        norms, (B, Q, K), and mixing ratios, (B, Q), by scope, and the largest completeness error, (B,).
    """
    return _Vectors(layer, scopes).measured()


class _Vectors:
    """The vectors of one layer, carried through its feed-forward network."""

    def __init__(self, layer: Layer, scopes: Sequence[Scope]) -> None:
        if layer.block.feed_forward is None or layer.recorded.behind is None:
            raise ValueError("the block has no feed-forward block")
        self._layer = layer
        self._block, self._behind, self._dtype = layer.block, layer.block.feed_forward, layer.dtype
        self._carries = {scope: self._behind.carry(scope, layer.dtype) for scope in scopes}
        batch, self._heads, queries, _ = layer.call.query.shape
        self._values, self._cross = layer.call.value.transpose(1, 2).to(self._dtype), layer.cross
        self._shape = (batch, queries, layer.call.key.shape[2])
        self._numbers = layer.budget.granted(layer.call.value.device, VECTOR_BYTES) // self._dtype.itemsize

    def measured(self) -> tuple[dict[Scope, Tensor], dict[str, Tensor], Tensor]:
        """Return what :func:`feed_forward_norms` does."""
        tensors, behind = self._layer.recorded, cast(FeedForwardTensors, self._layer.recorded.behind)
        advance = self._layer.advance

        def rows(tensor: Tensor) -> Tensor:
            return tensor.to(self._dtype).flatten(0, 1)

        projected, residual, total = rows(tensors.projected), rows(tensors.residual), rows(tensors.total)
        end = total if tensors.normed is None else rows(tensors.normed)
        written, summed = rows(behind.written), rows(behind.total)
        references = {"atb_ff": written, "atb_ff_res": summed}
        if behind.normed is not None:
            references["atb_ff_res_ln"] = rows(behind.normed)
        carry = self._block.carry("atb", self._dtype)
        scales = carry.scales(projected, total)
        weight, bias = self._block.projection.weight(self._dtype), self._block.projection.bias(self._dtype)
        constant = carry.constant(torch.zeros_like(end) if bias is None else bias.expand_as(end), None, scales)
        onward = {scope: steps.scales(written, summed) for scope, steps in self._carries.items()}
        sums = {scope: _Sums(end, self._shape) for scope in self._carries}
        left = len(end)
        for weights, example, position in self._queries():
            flat, done = example * self._shape[1] + position, 0
            routing = None if behind.routing is None else Routing(*(table[flat] for table in behind.routing))
            block = _FrozenBlock(self._behind, end[flat], constant[flat], routing, self._layer.options.baseline)
            chosen = (weights, example, position)
            for formed, local, key, own in self._formed(*chosen, weight, block.frozen.numbers_per_part):
                vectors = carry.vector(formed, residual[flat] if own else None, scales.at(flat[local]))
                through = block.through(vectors, local, self._numbers // 2)
                stream = multiplied(self._behind.residual_factor, vectors)
                for scope, steps in self._carries.items():
                    carried = steps.vector(through, stream, onward[scope].at(flat[local]))
                    sums[scope].add(carried, flat[local], key, own=own)
                # Vectors come query by query, the queries' own last.
                reached = int(local[-1]) + 1
                advance(reached - done)
                done = reached
            stream = multiplied(self._behind.residual_factor, constant[flat])
            for scope, steps in self._carries.items():
                unowned = steps.constant(block.frozen.constant, stream, onward[scope].at(flat))
                sums[scope].constant[flat] = unowned
            left -= len(flat)
        advance(left)  # padding
        deltas = [summed_up.error(references[scope], self._layer.real) for scope, summed_up in sums.items()]
        norms = {scope: summed_up.norms for scope, summed_up in sums.items()}
        return (
            norms,
            {scope: summed_up.mixing_ratio() for scope, summed_up in sums.items()},
            torch.stack(deltas).amax(0),
        )

    def _queries(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the weights of real queries, (n, H, K), their examples and positions, (n,), in chunks."""
        fitting = max(1, self._numbers // 2 // (NEURONS_PER_QUERY * sum(self._behind.neurons)))
        for part, made in self._layer.parts(advancing=False):
            weights = self._layer.gated(made, part)
            asked = weights.new_ones(len(weights), weights.shape[2], dtype=torch.bool)
            if self._layer.real is not None:
                asked = self._layer.real[part.examples, part.rows].to(asked.device)
            found = asked.nonzero()
            for index in found.split(fitting) if len(found) else ():
                example, row = index.unbind(1)
                chosen = weights[example, :, row].to(self._dtype)
                yield chosen, example + part.examples.start, row + part.rows.start

    def _formed(
        self, weights: Tensor, example: Tensor, position: Tensor, projection: Tensor, numbers_per_part: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None, bool]]:
        """Yield Σ_h α_h f_h(x_j), (m, D), their queries among the n, and keys, (m,).

        The last item says whether they are the queries' own; in cross-attention these have no key. Vectors of weight
        zero are skipped.
        """
        everyone = torch.arange(len(weights), device=weights.device)
        live = weights.ne(0).any(1)
        _, queries, keys = self._shape
        own = position + keys - queries
        if not self._cross:
            live[everyone, own] = False
        reduced, width = projection.shape
        held = VALUES_PER_VECTOR * reduced + STEPS_PER_VECTOR * width + numbers_per_part

        def formed(local: Tensor, key: Tensor) -> Tensor:
            values = self._values.flatten(0, 1).index_select(0, example[local] * self._values.shape[1] + key)
            values = values.repeat_interleave(self._heads // values.shape[1], dim=1)
            return (values * weights[local, :, key].unsqueeze(-1)).flatten(1) @ projection

        found = live.nonzero()
        for index in found.split(max(1, self._numbers // 2 // held)) if len(found) else ():
            local, key = index.unbind(1)
            yield formed(local, key), local, key, False
        if self._cross:
            yield projection.new_zeros(len(weights), width), everyone, None, True
        else:
            yield formed(everyone, own), everyone, own, True


class _Sums:
    """Sums and norms of the vectors at one scope, for N = B·Q queries.

    Attributes:
        constant: what belongs to no key, (N, D).
        norms: (B, Q, K).
    """

    def __init__(self, like: Tensor, shape: tuple[int, int, int]) -> None:
        self._others, self._own, self.constant = (torch.zeros_like(like) for _ in range(3))
        self.norms = like.new_zeros(shape)

    def add(self, vectors: Tensor, query: Tensor, key: Tensor | None, *, own: bool) -> None:
        """Add vectors (m, D) of queries and keys; a query has at most one of its own, possibly without a key."""
        if own:
            self._own[query] = vectors
        else:
            self._others.index_add_(0, query, vectors)
        if key is not None:
            self.norms.flatten(0, 1)[query, key] = length(vectors)

    def mixing_ratio(self) -> Tensor:
        return ratio(length(self._others), length(self._own)).reshape(self.norms.shape[:2])

    def error(self, reference: Tensor, real: Tensor | None) -> Tensor:
        """Compute the completeness error against what the model computed, (N, D) -> (B,)."""
        error = self._others + self._own + self.constant - reference
        shape = self.norms.shape[:2]
        return relative_error(length(error).reshape(shape), length(reference).reshape(shape), real)

"""What is kept of a layer at the scopes that go through its feed-forward network: vectors are formed, some at a time.

The slopes of the activations belong to the query, so norms do not follow from inner products of the model's weights as
they do for attention. The sum over keys is that of the vectors themselves.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from captum_norm.functional import (
    Baseline,
    FrozenFeedForward,
    Normalization,
    apply_linear,
    inverse_scale,
    normalize,
    ratio,
    relative_error,
)
from captum_norm.models.blocks import Block
from captum_norm.models.feed_forward import FeedForwardBlock, Routing
from captum_norm.models.layouts import Scope
from captum_norm.recording import BlockTensors, FeedForwardTensors, Part

VECTOR_BYTES = 256 * 2**20
# What is held at a time for each vector (copies of its value, the steps before and behind the networks) and for each
# query (pre-activations, their origins, slopes and what these are made of).
VALUES_PER_VECTOR, STEPS_PER_VECTOR, NEURONS_PER_QUERY = 2, 9, 12


class _Reading:
    """What a feed-forward block's networks read at some queries, and the networks frozen there.

    Args:
        behind: the block.
        stream: the whole stream that they read, (n, D).
        constant: the part of it that belongs to no key, (n, D).
        routing: of a mixture of experts, at these queries.
        baseline: where the paths of the integrated gradients start.
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
        self.frozen = FrozenFeedForward.at(behind.uses(whole, routing), whole, unowned, baseline)

    def through(self, parts: Tensor, queries: Tensor, numbers: int) -> Tensor:
        """Parts of the stream, (m, D), at their queries, (m,), carried to the networks' output, (m, D)."""
        if self._norm is not None:
            parts = apply_linear(self._norm, parts) * self._scale[queries]
        return self.frozen.through(parts, queries, numbers)


def parallel_part(block: Block, tensors: BlockTensors, baseline: Baseline, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the networks of a parallel layer make of the residual stream at some queries, as it enters the sum.

    Nothing in their input comes from another position.

    Returns:
        the query's own part, and what belongs to no key, (B, Q, D) each.
    """
    if block.feed_forward is None or tensors.behind is None:
        raise ValueError("a parallel feed-forward block is needed")
    stream = tensors.residual.to(dtype).flatten(0, 1)
    reading = _Reading(block.feed_forward, stream, torch.zeros_like(stream), tensors.behind.routing, baseline)
    own = reading.through(stream, torch.arange(len(stream), device=stream.device), 0)
    carry = block.feed_forward.carry("atb_ff_res", dtype)
    scales = carry.scales(own + reading.frozen.constant, stream)
    own, constant = carry.vector(own, None, scales), carry.constant(reading.frozen.constant, None, scales)
    return own.reshape(tensors.residual.shape), constant.reshape(tensors.residual.shape)


class FeedForwardReducer:
    """Norms of one layer at one or several scopes behind its feed-forward network.

    Args:
        block: the attention block; the feed-forward block behind it must not be a parallel one.
        scopes: the scopes to measure, each in the feed-forward block's.
        dtype: what to compute in.
        vector_bytes: how much memory the vectors, and what they pass through, may take at a time.
        baseline: where the paths of the integrated gradients start.
        real: True at real positions, (B, Q), or None where all are.

    Attributes:
        maps: (B, Q, K) of each scope.
        mixing_ratio: (B, Q) of each scope.
        delta: completeness error, the largest of the scopes', (B,).
        precision: the least precise dtype of the layer's own computation, which sets the tolerance.
    """

    def __init__(
        self,
        block: Block,
        scopes: Sequence[Scope],
        dtype: torch.dtype,
        vector_bytes: int,
        baseline: Baseline,
        *,
        real: Tensor | None,
    ) -> None:
        if block.feed_forward is None:
            raise ValueError("the block has no feed-forward block behind it")
        self.precision = block.precision
        self._block = block
        self._behind = block.feed_forward
        self._dtype = dtype
        self._numbers = vector_bytes // dtype.itemsize
        self._baseline: Baseline = baseline
        self._real = real
        self._carries = {scope: self._behind.carry(scope, dtype) for scope in scopes}
        self._values: Tensor
        self._heads = 0
        self._shape = (0, 0, 0)
        self._cross = False
        self.maps: dict[Scope, Tensor] = {}
        self.mixing_ratio: dict[Scope, Tensor] = {}
        self.delta: Tensor

    def begin(self, values: Tensor, heads: int, queries: int, *, cross: bool) -> None:
        self._values, self._heads, self._cross = values.transpose(1, 2).to(self._dtype), heads, cross
        self._shape = (values.shape[0], queries, values.shape[2])

    def consume(self, weights: Tensor, part: Part) -> None:
        """Nothing: weights come once more when the slopes are known."""

    def finish(self, tensors: BlockTensors | None) -> None:
        if tensors is None or tensors.behind is None:
            raise ValueError("feed-forward scopes need the tensors of the feed-forward block")
        self._finish(tensors, tensors.behind)
        # Only the results outlive the layer.
        del self._values

    def _finish(self, tensors: BlockTensors, behind: FeedForwardTensors) -> None:
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
        bias = self._block.projection.bias(self._dtype)
        constant = carry.constant(torch.zeros_like(end) if bias is None else bias.expand_as(end), None, scales)
        onward = {scope: steps.scales(written, summed) for scope, steps in self._carries.items()}
        sums = {scope: _Sums(end, self._shape) for scope in self._carries}
        numbers = self._numbers // 2
        for weights, example, position in self._queries(behind):
            flat = example * self._shape[1] + position
            routing = None if behind.routing is None else Routing(*(table[flat] for table in behind.routing))
            reading = _Reading(self._behind, end[flat], constant[flat], routing, self._baseline)

            def take(vectors: Tensor, local: Tensor, key: Tensor | None, *, own: bool) -> None:
                through = reading.through(vectors, local, numbers)  # noqa: B023
                query = flat[local]  # noqa: B023
                for scope, steps in self._carries.items():
                    sums[scope].add(steps.vector(through, vectors, onward[scope].at(query)), query, key, own=own)

            for local, key in self._pairs(weights, position, numbers, reading):
                formed = self._formed(weights[local, :, key], example[local], key)
                take(carry.vector(formed, None, scales.at(flat[local])), local, key, own=False)
            everyone = torch.arange(len(flat), device=flat.device)
            formed = torch.zeros_like(end[flat])
            if not self._cross:
                formed = self._formed(weights[everyone, :, position], example, position)
            own = carry.vector(formed, residual[flat], scales.at(flat))
            take(own, everyone, None if self._cross else position, own=True)
            for scope, steps in self._carries.items():
                unowned = steps.constant(reading.frozen.constant, constant[flat], onward[scope].at(flat))
                sums[scope].constant[flat] = unowned
        for scope, summed_up in sums.items():
            self.maps[scope], self.mixing_ratio[scope] = summed_up.norms, summed_up.mixing_ratio()
        deltas = [summed_up.error(references[scope], self._real) for scope, summed_up in sums.items()]
        self.delta = torch.stack(deltas).amax(0)

    def _queries(self, behind: FeedForwardTensors) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Some real queries at a time: their weights, (n, H, K), examples and positions, (n,)."""
        neurons = sum(self._behind.neurons)
        fitting = max(1, self._numbers // 2 // (NEURONS_PER_QUERY * neurons))
        for part, weights in behind.attend():
            asked = weights.new_ones(len(weights), weights.shape[2], dtype=torch.bool)
            if self._real is not None:
                asked = self._real[part.examples, part.rows].to(asked.device)
            for index in asked.nonzero().split(fitting):
                example, row = index.unbind(1)
                chosen = weights[example, :, row].to(self._dtype)
                yield chosen, example + part.examples.start, row + part.rows.start

    def _pairs(
        self, weights: Tensor, position: Tensor, numbers: int, reading: _Reading
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Queries, by their place among those of the weights, and other keys whose weight is not zero, (m,) each."""
        live = weights.ne(0).any(1)
        if not self._cross:
            live[torch.arange(len(live), device=live.device), position] = False
        width, reduced = reading.frozen.constant.shape[-1], self._heads * self._values.shape[-1]
        held = VALUES_PER_VECTOR * reduced + STEPS_PER_VECTOR * width + reading.frozen.numbers_per_part
        for index in live.nonzero().split(max(1, numbers // held)):
            local, key = index.unbind(1)
            yield local, key

    def _formed(self, weights: Tensor, example: Tensor, key: Tensor) -> Tensor:
        """Σ_h α_h f_h(x_j) of the weights (m, H) of the keys, (m, D)."""
        values = self._values.flatten(0, 1).index_select(0, example * self._values.shape[1] + key)
        values = values.repeat_interleave(self._heads // values.shape[1], dim=1)
        return (values * weights.unsqueeze(-1)).flatten(1) @ self._block.projection.weight(self._dtype)


class _Sums:
    """What is kept of the vectors at one scope, for N = B·Q queries.

    Attributes:
        constant: what belongs to no key, (N, D).
        norms: (B, Q, K).
    """

    def __init__(self, like: Tensor, shape: tuple[int, int, int]) -> None:
        self._others, self._own, self.constant = (torch.zeros_like(like) for _ in range(3))
        self.norms = like.new_zeros(shape)

    def add(self, vectors: Tensor, query: Tensor, key: Tensor | None, *, own: bool) -> None:
        """Vectors (m, D) of queries and keys; no query has more than one of its own, which may be at no key."""
        if own:
            self._own[query] = vectors
        else:
            self._others.index_add_(0, query, vectors)
        if key is not None:
            self.norms.flatten(0, 1)[query, key] = torch.linalg.vector_norm(vectors, dim=-1)

    def mixing_ratio(self) -> Tensor:
        """(B, Q)."""
        others, own = (torch.linalg.vector_norm(part, dim=-1) for part in (self._others, self._own))
        return ratio(others, own).reshape(self.norms.shape[:2])

    def error(self, reference: Tensor, real: Tensor | None) -> Tensor:
        """The completeness error against what the model computed, (N, D) -> (B,)."""
        error = self._others + self._own + self.constant - reference
        squared, size = (part.square().sum(-1).reshape(self.norms.shape[:2]) for part in (error, reference))
        return relative_error(squared, size, real)

"""Reduces a layer beyond its feed-forward network to norms, forming the vectors in chunks.

The activations' slopes depend on the query, so norms do not follow from inner products of the model's weights as they
do for attention. Completeness is checked on the sum of the vectors themselves.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from captum_norm.attr.layer_results import LayerResults
from captum_norm.forward.checks import expect_complete, expect_finite
from captum_norm.forward.recording import BlockTensors, FeedForwardTensors
from captum_norm.forward.session import LayerTask
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
from captum_norm.models.attention import AttentionCall, Part
from captum_norm.models.blocks import Block
from captum_norm.models.factors import multiplied
from captum_norm.models.feed_forward import FeedForwardBlock, Routing
from captum_norm.models.layouts import Scope
from captum_norm.models.stacks import Place

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


class FeedForwardReducer:
    """Norms of one layer at one or more scopes beyond its feed-forward network.

    Args:
        task: the attention block; its feed-forward block must not be parallel.
        call: its attention call.
        scopes: the scopes to measure, all of them the feed-forward block's.
        results: filled in.

    Attributes:
        results: the layer's results.
        delta: largest completeness error over scopes, (B,).
        precision: the least precise dtype of the layer's own computation, which sets the tolerance.
    """

    def __init__(self, task: LayerTask, call: AttentionCall, scopes: Sequence[Scope], results: LayerResults) -> None:
        if task.block.feed_forward is None:
            raise ValueError("the block has no feed-forward block")
        self.precision = task.block.precision(scopes)
        self._task, self.results = task, results
        self._block, self._behind, self._dtype = task.block, task.block.feed_forward, task.dtype
        self._carries = {scope: self._behind.carry(scope, task.dtype) for scope in scopes}
        self.delta: Tensor
        batch, self._heads, queries, _ = call.query.shape
        self._values, self._cross = call.value.transpose(1, 2).to(self._dtype), call.cross
        self._shape = (batch, queries, call.key.shape[2])
        self._numbers = task.budget.granted(call.value.device, VECTOR_BYTES) // self._dtype.itemsize

    def consume(self, weights: Tensor, part: Part) -> None:
        """Do nothing: weights come again when the slopes are known."""

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
        weight, bias = self._block.projection.weight(self._dtype), self._block.projection.bias(self._dtype)
        constant = carry.constant(torch.zeros_like(end) if bias is None else bias.expand_as(end), None, scales)
        onward = {scope: steps.scales(written, summed) for scope, steps in self._carries.items()}
        sums = {scope: _Sums(end, self._shape) for scope in self._carries}
        left = len(end)
        for weights, example, position in self._queries(behind):
            flat, done = example * self._shape[1] + position, 0
            routing = None if behind.routing is None else Routing(*(table[flat] for table in behind.routing))
            block = _FrozenBlock(self._behind, end[flat], constant[flat], routing, self._task.baseline)
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
                behind.advance(reached - done)
                done = reached
            stream = multiplied(self._behind.residual_factor, constant[flat])
            for scope, steps in self._carries.items():
                unowned = steps.constant(block.frozen.constant, stream, onward[scope].at(flat))
                sums[scope].constant[flat] = unowned
            left -= len(flat)
        behind.advance(left)  # padding
        for scope, summed_up in sums.items():
            self.results.norms[scope], self.results.mixing_ratio[scope] = summed_up.norms, summed_up.mixing_ratio()
        deltas = [summed_up.error(references[scope], self._task.real) for scope, summed_up in sums.items()]
        self.delta = torch.stack(deltas).amax(0)
        self.results.deltas.append(self.delta)

    def check(self, model: nn.Module, place: Place) -> None:
        """Raise if results are not finite or do not add up: see :meth:`NormReducer.check`."""
        expect_finite(model, place, self.delta)
        expect_complete(model, place, self.delta, self.precision)

    def _queries(self, behind: FeedForwardTensors) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the weights of real queries, (n, H, K), their examples and positions, (n,), in chunks."""
        fitting = max(1, self._numbers // 2 // (NEURONS_PER_QUERY * sum(self._behind.neurons)))
        for part, weights in behind.attend():
            asked = weights.new_ones(len(weights), weights.shape[2], dtype=torch.bool)
            if self._task.real is not None:
                asked = self._task.real[part.examples, part.rows].to(asked.device)
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

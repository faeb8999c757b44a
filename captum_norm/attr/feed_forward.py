"""Computes the norms of one layer beyond its feed-forward network, forming the vectors in chunks.

The activations' slopes depend on the query, so norms do not follow from inner products of the model's weights as they
do for attention. Completeness is checked on the sum of the vectors themselves.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from captum_norm.forward.record import BlockTensors, FeedForwardTensors, Layer
from captum_norm.functional import apply_linear, inverse_scale, length, ratio, relative_error
from captum_norm.functional.carry import lose_digits
from captum_norm.functional.feed_forward import Baseline, FrozenFeedForward
from captum_norm.models.blocks import Block, FeedForwardBlock, multiplied
from captum_norm.models.layouts import Scope
from captum_norm.models.networks import Routing

# Memory limit for the vectors and their intermediates.
VECTOR_BYTES = 256 * 2**20
# Tensors alive at a time per vector (copies of its value; steps before and after the networks) and per query
# (pre-activations, their origins, slopes and intermediates).
VALUES_PER_VECTOR, STEPS_PER_VECTOR, NEURONS_PER_QUERY = 2, 9, 12


def _frozen(
    behind: FeedForwardBlock,
    stream: Tensor,
    constant: Tensor,  # the streams' parts that belong to no key
    routing: Routing | None,
    baseline: Baseline,
) -> tuple[FrozenFeedForward, Callable[[Tensor, Tensor, int], Tensor]]:
    """Freeze a block's norm and networks at n streams, (n, D); also return what carries parts of these through both."""
    norm, whole, unowned = None if behind.norm is None else behind.norm.read(stream.dtype), stream, constant
    if norm is not None:
        scale = inverse_scale(norm, stream)
        both = apply_linear(norm, torch.stack([stream, constant])) * scale
        whole, unowned = both if norm.bias is None else both + norm.bias
    frozen = FrozenFeedForward(list(behind.uses(whole, routing)), whole, unowned, baseline)

    def through(parts: Tensor, queries: Tensor, numbers: int) -> Tensor:
        # Parts may be in float64: the networks read them in the streams' dtype.
        parts = parts if norm is None else apply_linear(norm, parts) * scale[queries]
        return frozen.through(parts.to(stream.dtype), queries, numbers)

    return frozen, through


def parallel_part(block: Block, tensors: BlockTensors, baseline: Baseline, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute what a parallel layer's networks add to queries: their own parts, and what is no key's, (B, Q, D)."""
    network, behind = cast(FeedForwardBlock, block.feed_forward), cast(FeedForwardTensors, tensors.behind)
    stream = tensors.residual.to(dtype).flatten(0, 1)
    frozen, through = _frozen(network, stream, torch.zeros_like(stream), behind.routing, baseline)
    own = through(stream, torch.arange(len(stream), device=stream.device), 0)
    carry = network.carry("atb_ff_res", dtype)
    scales = carry.scales(own + frozen.constant, stream)
    own, constant = carry.vector(own, None, scales), carry.constant(frozen.constant, None, scales)
    return own.reshape(tensors.residual.shape), constant.reshape(tensors.residual.shape)


def feed_forward_norms(layer: Layer, scopes: Sequence[Scope]) -> tuple[dict[Scope, Tensor], dict[str, Tensor], Tensor]:
    """Compute norms, (B, Q, K), mixing ratios, (B, Q), and error, (B,), beyond a network not parallel to attention."""
    block, tensors, dtype = layer.block, layer.recorded, layer.dtype
    network, behind = cast(FeedForwardBlock, block.feed_forward), cast(FeedForwardTensors, tensors.behind)
    batch, _, queries, _ = layer.call.query.shape
    numbers = layer.options.budget.granted(layer.call.value.device, VECTOR_BYTES) // dtype.itemsize // 2

    def rows(tensor: Tensor) -> Tensor:
        return tensor.to(dtype).flatten(0, 1)  # (N, D), N = B·Q

    projected, residual, total = rows(tensors.projected), rows(tensors.residual), rows(tensors.total)
    end = total if tensors.normed is None else rows(tensors.normed)
    written, summed = rows(behind.written), rows(behind.total)
    references = {"atb_ff": written, "atb_ff_res": summed}
    if behind.normed is not None:
        references["atb_ff_res_ln"] = rows(behind.normed)
    carry = block.carry("atb", dtype)
    scales = carry.scales(projected, total)
    # What the residual connection carries on, and what the network reads.
    ends = [carry] if network.norm is None else [carry, replace(carry, second=network.norm.read(dtype))]
    wide, bias = block.projection.weight(torch.float64), block.projection.bias(dtype)
    weight = wide.to(dtype)
    lossy = partial(lose_digits, ends, weight)
    values = rows(layer.call.value.transpose(1, 2))  # (B·K, H, d)
    constant = carry.constant(torch.zeros_like(end) if bias is None else bias.expand_as(end), None, scales)
    factor = multiplied(network.residual_factor, end.new_ones(end.shape[-1]))
    steps = {scope: network.carry(scope, dtype) for scope in scopes}
    onward = {scope: steps[scope].scales(written, summed) for scope in scopes}
    norms = {scope: end.new_zeros(batch, queries, layer.call.key.shape[2]) for scope in scopes}
    # What each query receives from others and from itself, and what belongs to no key.
    others, own, unowned = ({scope: torch.zeros_like(end) for scope in scopes} for _ in range(3))
    left = len(end)
    for weights, example, position in _queries(layer, max(1, numbers // (NEURONS_PER_QUERY * sum(network.neurons)))):
        flat, done = example * queries + position, 0
        routing = None if behind.routing is None else Routing(*(table[flat] for table in behind.routing))
        frozen, through = _frozen(network, end[flat], constant[flat], routing, layer.options.baseline)
        held = VALUES_PER_VECTOR * len(weight) + STEPS_PER_VECTOR * weight.shape[1] + frozen.numbers_per_part
        pairs = _formed(layer, lossy, values, weights, example, position, (weight, wide), max(1, numbers // held))
        for formed, local, key, is_own in pairs:
            vectors = carry.vector(formed, residual[flat] if is_own else None, scales.at(flat[local]))
            stream = vectors * factor
            vectors = through(vectors, local, numbers)
            for scope in scopes:
                carried = steps[scope].vector(vectors, stream, onward[scope].at(flat[local])).to(dtype)
                if is_own:
                    own[scope][flat[local]] = carried
                else:
                    others[scope].index_add_(0, flat[local], carried)
                if key is not None:
                    norms[scope].flatten(0, 1)[flat[local], key] = length(carried)
            # Vectors come query by query, the queries' own last.
            reached = int(local[-1]) + 1
            layer.advance(reached - done)
            done = reached
        stream = constant[flat] * factor
        for scope in scopes:
            unowned[scope][flat] = steps[scope].constant(frozen.constant, stream, onward[scope].at(flat))
        left -= len(flat)
    layer.advance(left)  # padding
    ratios: dict[str, Tensor] = {}
    deltas = []
    for scope in scopes:
        error = others[scope] + own[scope] + unowned[scope] - references[scope]
        lengths = length(torch.stack([others[scope], own[scope], error, references[scope]]))
        lengths = lengths.unflatten(1, (batch, queries))
        ratios[scope] = ratio(lengths[0], lengths[1])
        deltas.append(relative_error(lengths[2], lengths[3], layer.real))
    return norms, ratios, torch.stack(deltas).amax(0)


def _queries(layer: Layer, fitting: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the weights of real queries, (n, H, K), their examples and positions, (n,), in chunks that fit."""
    for part, _, weights in layer.parts(advancing=False):
        real = weights.new_ones(len(weights), weights.shape[2], dtype=torch.bool)
        if layer.real is not None:
            real = layer.real[part.examples, part.rows].to(real.device)
        queries = real.nonzero()
        for index in queries.split(fitting) if len(queries) else ():
            example, row = index.unbind(1)
            yield weights[example, :, row].to(layer.dtype), example + part.examples.start, row + part.rows.start


def _formed(
    layer: Layer,
    lossy: Callable[[Tensor, Tensor], bool],
    values: Tensor,
    weights: Tensor,
    example: Tensor,
    position: Tensor,
    projections: tuple[Tensor, Tensor],
    fitting: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, bool]]:
    """Yield Σ_h α_h f_h(x_j), (m, D), of the n queries, m of their indices and keys, and whether they are their own."""
    # In cross-attention a query's own vector has no key. Vectors of weight zero are skipped. The queries' own, and
    # those that are lossy by the first projection, are formed by the second one, in float64.
    projection, wide = projections
    everyone, live = torch.arange(len(weights), device=weights.device), weights.ne(0).any(1)
    keys = layer.call.key.shape[2]
    own = position + keys - layer.call.query.shape[2]
    if not layer.cross:
        live[everyone, own] = False

    def contexts(local: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
        of_keys = values.index_select(0, example[local] * keys + key).to(dtype)
        of_keys = of_keys.repeat_interleave(weights.shape[1] // values.shape[1], dim=1)
        return (of_keys * weights[local, :, key].unsqueeze(-1)).flatten(1)

    pairs = live.nonzero()
    for index in pairs.split(fitting) if len(pairs) else ():
        local, key = index.unbind(1)
        context = contexts(local, key, projection.dtype)
        vectors = context @ projection
        if not lossy(context, vectors):
            yield vectors, local, key, False
            continue
        for some in index.split(max(1, fitting // 2)):
            local, key = some.unbind(1)
            yield contexts(local, key, torch.float64) @ wide, local, key, False
    if layer.cross:
        yield wide.new_zeros(len(weights), projection.shape[1]), everyone, None, True
    else:
        yield contexts(everyone, own, torch.float64) @ wide, everyone, own, True

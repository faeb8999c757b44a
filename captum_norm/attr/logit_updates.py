"""Decomposes output values into the updates of attention heads and feed-forward blocks: direct logit attribution.

With the statistics of norms frozen, the residual connections carry what each block adds to the output, linearly:

    value = ⟨g₀, embedding⟩ + Σ_l Σ_h ⟨g_l, W_h o_h⟩ + Σ_l ⟨g'_l, feed-forward output⟩ + biases

with g the direction in which the value reads the residual stream behind a block. In pre-norm layers it is that in which
the frozen head reads the last layer's output, times residual multipliers; in post-norm layers it is carried back
through the frozen norms in between. Positions are mixed by attention alone, so only those that the head reads count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from captum_norm.attr.frozen.head import HeadReading
from captum_norm.errors import UnsupportedScopeError
from captum_norm.forward.record import Layer
from captum_norm.functional import Normalization, apply_transposed, inverse_scale
from captum_norm.models.blocks import Block, check_scopes, multiplied
from captum_norm.models.projections import NormReader
from captum_norm.models.stacks import Place


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


@dataclass(eq=False)
class Step:
    """One attention block on the residual path, and the feed-forward block behind it.

    Attributes:
        place: where it is in the model.
        block: its parts.
        scale: 1/σ of the norm behind attention, (B, Q, 1), in a post-norm layer.
        second: that of the norm behind the feed-forward block.
    """

    place: Place
    block: Block
    scale: Tensor | None = None
    second: Tensor | None = None


def residual_step(layer: Layer) -> Step:
    """Return a layer as a step of the residual path, with 1/σ of the norms on it."""
    step, behind, tensors = Step(layer.place, layer.block), layer.block.feed_forward, layer.recorded
    with torch.no_grad():
        if step.block.final_norm is not None:
            step.scale = _scale(step.block.final_norm, tensors.total, layer.dtype)
        if behind is not None and behind.final_norm is not None and tensors.behind is not None:
            step.second = _scale(behind.final_norm, tensors.behind.total, layer.dtype)
    return step


def _scale(norm: NormReader, whole: Tensor, dtype: torch.dtype) -> Tensor:
    return inverse_scale(norm.read(dtype), whole.detach().to(dtype))


class Directions(NamedTuple):
    """Directions in which the values read a block's sum with the residual stream, before a norm behind it, (N, D).

    Attributes:
        attention: at the sum of attention and the stream.
        feed_forward: at the sum of the feed-forward output and the stream.
    """

    attention: Tensor
    feed_forward: Tensor


def residual_path(
    model: nn.Module, steps: Sequence[Step], reading: HeadReading
) -> tuple[dict[Place, Directions], Tensor]:
    """Carry the directions of a head back along the residual connections.

    Args:
        model: the model, for messages.
        steps: the blocks on the way to the output, in the order of the forward pass.
        reading: how the head reads the last layer's output.

    Returns:
        the directions at each block, and what the norms behind blocks add to each reading by their biases, (N,).

    Raises:
        UnsupportedScopeError: if a layer's feed-forward block is not understood.
    """
    found: dict[Place, Directions] = {}
    g, constant = reading.directions, torch.zeros_like(reading.directions[:, 0])
    rows = reading.examples, reading.positions

    def before(norm: NormReader | None, scale: Tensor | None) -> None:
        nonlocal g, constant
        if norm is None or scale is None:
            return
        read, scale = norm.read(g.dtype), scale.to(g)
        if read.bias is not None:
            constant = constant + g @ read.bias.to(g)
        g = apply_transposed(_on(read, g), g) * scale[rows]

    for step, behind_it in zip(reversed(steps), [None, *reversed(steps)], strict=False):
        block = step.block
        behind = block.feed_forward
        if behind is None and (behind_it is None or behind_it.place.role != "cross"):
            check_scopes(model, ["atb_ff_res"], block)
            raise UnsupportedScopeError(
                f'no feed-forward block was found behind "{block.name}" of {type(model).__name__}'
            )
        feed_forward = g
        if behind is not None:
            before(behind.final_norm, step.second)
            feed_forward = g
            g = multiplied(behind.residual_factor, g)
        before(block.final_norm, step.scale)
        found[step.place] = Directions(g, feed_forward)
        g = multiplied(block.residual_factor, g)
    return found, constant


def _on(norm: Normalization, like: Tensor) -> Normalization:
    """Return a normalisation on the device of a tensor."""
    gain = None if norm.gain is None else norm.gain.to(like.device)
    return Normalization(norm.centered, gain, None, norm.eps, norm.statistics)


@dataclass(eq=False)
class BlockUpdates:
    """What one layer's blocks add to N readings of output values.

    Attributes:
        heads: of each head, (N, H).
        keys: of each key's vectors, (N, K).
        feed_forward: (N,), or None without a feed-forward block.
        stream: what the residual stream before attention adds, (N,); the first layer's is the embedding's.
        bias: (N,).
    """

    heads: Tensor
    keys: Tensor
    feed_forward: Tensor | None
    stream: Tensor
    bias: Tensor


def block_updates(layer: Layer, reading: HeadReading, directions: Directions) -> BlockUpdates:
    """Compute what a layer adds to output values.

    Args:
        layer: the layer.
        reading: the positions that are read.
        directions: those at this layer.
    """
    block, dtype, tensors = layer.block, layer.dtype, layer.recorded
    device = tensors.projected.device
    examples, positions = reading.examples.to(device), reading.positions.to(device)

    def at(tensor: Tensor) -> Tensor:
        return tensor.to(device)[examples, positions].to(dtype)

    g, bias = directions.attention.to(device, dtype), torch.zeros(len(examples), dtype=dtype, device=device)
    stream = (g * at(tensors.residual)).sum(-1)
    carry = block.carry("attn_res", dtype)
    g, added = _through(carry.branch, g, at(tensors.projected))
    shift = block.projection.bias(dtype)
    bias = bias + added if shift is None else bias + added + g @ shift
    inner = (g @ block.projection.weight(dtype).T).unflatten(-1, (layer.call.query.shape[1], -1))
    heads = g.new_zeros(len(g), layer.call.query.shape[1])
    keys = g.new_zeros(len(g), layer.call.key.shape[2])
    places = list(zip(reading.examples.tolist(), reading.positions.tolist(), strict=True))
    for part, made in layer.parts():
        weights = layer.gated(made, part)
        first, start = part.examples.start, part.rows.start
        for n, (example, position) in enumerate(places):
            if first <= example < first + len(weights) and start <= position < start + weights.shape[2]:
                row = weights[example - first, :, position - start].to(device, dtype)
                updates = row * (layer.values[example].to(device) @ inner[n].unsqueeze(-1)).squeeze(-1)
                heads[n], keys[n] = updates.sum(1), updates.sum(0)
    feed_forward, behind = None, block.feed_forward
    if behind is not None and tensors.behind is not None:
        g = directions.feed_forward.to(device, dtype)
        written = at(tensors.behind.written)
        g, added = _through(behind.carry("atb_ff_res", dtype).branch, g, written)
        feed_forward, bias = (g * written).sum(-1), bias + added
    by_head = heads.unflatten(1, (-1, layer.channels)).sum(-1)
    return BlockUpdates(by_head, keys, feed_forward, stream, bias)


def _through(norm: Normalization | None, g: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Carry directions back through a branch's norm; also return what its bias adds, (N,)."""
    if norm is None:
        return g, torch.zeros_like(g[:, 0])
    bias = torch.zeros_like(g[:, 0]) if norm.bias is None else g @ norm.bias.to(g)
    return apply_transposed(_on(norm, g), g) * inverse_scale(norm, whole), bias


def stacked_heads(layers: Sequence[Tensor]) -> Tensor:
    """Stack (N, H) of every layer to (N, L, H), with 0 beyond the heads of a layer that has fewer."""
    most = max(layer.shape[1] for layer in layers)
    padded = [nn.functional.pad(layer.to(layers[0].device), (0, most - layer.shape[1])) for layer in layers]
    return torch.stack(padded, 1)

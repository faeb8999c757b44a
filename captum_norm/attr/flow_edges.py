"""Computes the importance of every part of the residual stream behind a block: a head's vector, a network's output."""

from typing import NamedTuple

import torch
from torch import Tensor

from captum_norm.forward.record import FeedForwardTensors, Layer
from captum_norm.forward.room import piece_elements
from captum_norm.functional import Carry, head_nearness, length, relative_error
from captum_norm.models.blocks import FeedForwardBlock, multiplied


class BlockEdges(NamedTuple):
    """The parts of the residual stream behind an attention block; each query's importances add up to 1.

    They are 0 where no part is nearer to the stream than 0 is.

    Attributes:
        heads: each head's vector of each key, (B, H, Q, K).
        residual: the residual connection, (B, Q).
        feed_forward: in a parallel layer the feed-forward network's output, (B, Q), else None.
    """

    heads: Tensor
    residual: Tensor
    feed_forward: Tensor | None


class FeedForwardEdges(NamedTuple):
    """The parts of the residual stream behind a feed-forward block, (B, Q) each."""

    residual: Tensor
    feed_forward: Tensor


def block_edges(layer: Layer) -> BlockEdges:
    """Compute the edges into the stream behind an attention block, in a parallel layer behind the whole layer."""
    whole, written = layer.output, None
    if layer.block.layout.minus is not None:
        behind, block = network_of(layer)
        carry = block.carry("atb_ff_res", whole.dtype)
        written = carry.vector(behind.written, None, carry.scales(behind.written, behind.total))
        whole = behind.total
    most = piece_elements(layer.budget, whole)
    near = torch.stack(
        [
            head_nearness(y, alphas, values, layer.projection, most, channels=layer.channels)
            for y, alphas, values in zip(whole, layer.scaled_weights, layer.values, strict=True)
        ]
    )
    stream = _near(whole, layer.stream)
    network = None if written is None else _near(whole, written)
    total = near.sum((1, 3)) + stream + (0 if network is None else network)
    share = _reciprocal(total)
    heads = near * share[:, None, :, None]
    return BlockEdges(heads, stream * share, None if network is None else network * share)


def feed_forward_edges(layer: Layer) -> FeedForwardEdges:
    """Compute the edges into the stream behind the feed-forward block that follows an attention block."""
    behind, block = network_of(layer)
    carry, whole, stream = _end(layer, behind, block)
    scales = carry.scales(behind.written, behind.total)
    residual = carry.linear_final(stream)
    residual = residual if scales.final is None else residual * scales.final
    near = _near(whole, residual), _near(whole, carry.vector(behind.written, None, scales))
    share = _reciprocal(near[0] + near[1])
    return FeedForwardEdges(near[0] * share, near[1] * share)


def feed_forward_error(layer: Layer) -> Tensor:
    """Relative error of residual stream and feed-forward output as what the model computed, (B,)."""
    behind, block = network_of(layer)
    carry, whole, stream = _end(layer, behind, block)
    error = carry.constant(behind.written, stream, carry.scales(behind.written, behind.total)) - whole
    return relative_error(length(error), length(whole), layer.real)


def network_of(layer: Layer) -> tuple[FeedForwardTensors, FeedForwardBlock]:
    """Return a layer's feed-forward block and its tensors."""
    behind, block = layer.tensors.behind, layer.block.feed_forward
    if behind is None or block is None:
        raise ValueError("a feed-forward block is needed")
    return behind, block


def _end(layer: Layer, behind: FeedForwardTensors, block: FeedForwardBlock) -> tuple[Carry, Tensor, Tensor]:
    """Return the steps to a layer's end, its output, and the stream that the network's output is added to."""
    carry = block.carry("atb_ff_res_ln", layer.output.dtype)
    whole = behind.total if behind.normed is None else behind.normed
    return carry, whole, multiplied(block.residual_factor, layer.output)


def _near(whole: Tensor, part: Tensor) -> Tensor:
    """Compute max(0, ‖y‖₁ − ‖y − v‖₁), (B, Q, D) -> (B, Q)."""
    return (whole.abs() - (whole - part).abs()).sum(-1).clamp(min=0)


def _reciprocal(total: Tensor) -> Tensor:
    return torch.where(total > 0, 1 / torch.where(total > 0, total, torch.ones_like(total)), torch.zeros_like(total))

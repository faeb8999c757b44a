"""Explains whole encoder layers by norms, including both normalisations and residual connections: GlobEnc."""

from dataclasses import replace
from typing import Unpack, cast

from torch import Tensor

from captum_norm.attr.base import AttentionMapAttribution, LayerMap
from captum_norm.attr.layer_norms import LayerResults, layer_norms
from captum_norm.attr.meter import MeterOptions
from captum_norm.errors import UnsupportedModelError
from captum_norm.forward.record import BlockTensors, FeedForwardTensors, Layer
from captum_norm.forward.request import Request
from captum_norm.functional import Carry, Scales, apply_linear, inverse_scale
from captum_norm.models.call import ModelCall
from captum_norm.models.layouts import Scope
from captum_norm.models.objects import Explainable
from captum_norm.results.maps import AttributionMaps, MapUnits

END: Scope = "atb_ff_res_ln"


class GlobEnc(AttentionMapAttribution):
    """N-Enc: norms at the end of a post-norm layer, multiplied layer by layer [Modarressi et al. 2022].

    The vectors of :class:`NormAttribution` at ``attn_res_ln`` continue through the residual connection around the
    feed-forward network and the layer's second normalisation, its statistics frozen. The feed-forward network's own
    output affects those statistics only.

    Args:
        model: a Hugging Face model with post-norm layers; left unchanged.
        aggregation: how ``attribute`` combines the layers' maps. ``"product"``, as in the authors' code: the product
            of the maps themselves, in which positions with large norms count more; the row explained is divided by its
            sum. ``"rollout"``: each row of each map is divided by its sum first. ``"mean"``.
        options: see :class:`captum_norm.MeterOptions`.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> scores = GlobEnc(BertModel(config)).attribute(torch.tensor([[2, 7, 9, 3]]), position="first")
        >>> scores.shape, round(float(scores.sum()), 4)
        (torch.Size([1, 4]), 1.0)
    """

    name, title, units = "globenc", "GlobEnc", MapUnits("norm")
    one_stack = True
    text_alone = True

    def __init__(self, model: Explainable, aggregation: str = "product", **options: Unpack[MeterOptions]) -> None:
        super().__init__(model, aggregation, **options)

    def maps_of(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Compute the norms at the ends of the layers."""
        if request.per_head:
            return super().maps_of(call, request)  # refuses
        return self.reduced_maps(call, request, globenc, feed_forward=True)


def globenc(layer: Layer) -> LayerMap:
    """Compute the norms at the end of a post-norm layer, of vectors that bypass its feed-forward network.

    Raises:
        UnsupportedModelError: if the layer is of another kind.
    """
    block, behind = layer.block, layer.block.feed_forward
    if behind is not None and (behind.parallel or behind.residual_factor is not None):
        raise UnsupportedModelError(
            f'the feed-forward network after "{block.name}" reads the stream before attention, or a factor '
            "multiplies the stream around it; expected post-norm layers without such a factor"
        )
    if behind is None or behind.final_norm is None:
        reason = block.without_feed_forward or f"its layout is {block.layout.style}"
        raise UnsupportedModelError(
            f'found no normalisation of the feed-forward residual sum after "{block.name}": {reason}; '
            "expected post-norm layers"
        )
    second = behind.final_norm.read(layer.dtype)
    carry = replace(block.carry("atb", layer.dtype), residual=True, second=second)

    def scales_of(steps: Carry, tensors: BlockTensors) -> Scales:
        return steps.scales(tensors.projected, tensors.total, cast(FeedForwardTensors, tensors.behind).total)

    def end_of(_: Scope, tensors: BlockTensors) -> tuple[Tensor, Tensor]:
        """Return the residual stream, and the layer's output without the network's share."""
        end = cast(FeedForwardTensors, tensors.behind)
        written = end.total - (tensors.total if tensors.normed is None else tensors.normed)
        around = apply_linear(second, written) * inverse_scale(second, end.total)
        return tensors.residual, cast(Tensor, end.normed) - around

    results = LayerResults()
    layer_norms(layer, {END: carry}, results, scales_of=scales_of, end_of=end_of)
    return LayerMap(results.norms[END], results.deltas[0][0], block.precision([END]), results.discrepancy)

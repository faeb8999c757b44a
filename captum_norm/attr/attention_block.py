"""Explains whole attention blocks, and encoder layers, by norms of the vectors at their ends."""

from dataclasses import replace
from typing import Any, Literal, Unpack, cast

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.layer_maps import LayerMap
from captum_norm.attr.layer_norms import LayerResults, layer_norms
from captum_norm.attr.norms import NormAttribution
from captum_norm.errors import UnsupportedModelError
from captum_norm.forward.record import Layer
from captum_norm.forward.request import Request
from captum_norm.forward.session import MeterOptions
from captum_norm.models.call import ModelCall
from captum_norm.models.layouts import Scope
from captum_norm.models.objects import Explainable
from captum_norm.results.maps import MapUnits

END: Scope = "atb_ff_res_ln"


class AttentionBlockAttribution(NormAttribution):
    """Norms of the vectors at the end of the attention block (ATB), in any arrangement [Kobayashi et al. 2024].

    The block is attention, residual connection and layer normalisation in a post-norm layer (the ``attn_res_ln`` of
    :class:`NormAttribution`), normalisation, attention and residual connection in a pre-norm or parallel one, and where
    the attention output is normalised before it is added (sandwich, norm-on-output) that normalisation too.

    The other scopes continue through the feed-forward block, with activations frozen at their integrated-gradients
    slopes: to the network's input (``atb_ln``), its output (``atb_ff``), the residual connection (``atb_ff_res``) and,
    in a post-norm layer, the norm after it (``atb_ff_res_ln``).

    Args:
        model: a Hugging Face model or a fairseq translation model; left unchanged.
        scope: ``atb``; if the feed-forward network is understood, also ``atb_ff_res``, except in parallel layers
            ``atb_ff``, with a norm before the network ``atb_ln``, and with one after the sum ``atb_ff_res_ln``.
        aggregation, options: see :class:`captum_norm.AttentionMapAttribution`.

    Raises:
        UnsupportedScopeError: for a scope that this method, or on use the model's layers, do not have.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaModel
        >>> config = LlamaConfig(
        ...     vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
        >>> maps = AttentionBlockAttribution(LlamaModel(config)).maps(torch.tensor([[2, 7, 9, 3]]))
        >>> maps.encoder is None, maps.decoder.shape
        (True, torch.Size([1, 2, 4, 4]))
        >>> layer = AttentionBlockAttribution(LlamaModel(config), "atb_ff_res").maps(torch.tensor([[2, 7, 9, 3]]))
        >>> bool(layer.convergence_delta.max() < 1e-5)
        True
    """

    name, units = "attention-block", MapUnits("norm")
    scopes = ("atb", "atb_ln", "atb_ff", "atb_ff_res", "atb_ff_res_ln")

    def __init__(
        self,
        model: Explainable,
        scope: Literal["atb", "atb_ln", "atb_ff", "atb_ff_res", "atb_ff_res_ln"] = "atb",
        aggregation: str | None = None,
        **options: Unpack[MeterOptions],
    ) -> None:
        super().__init__(model, cast(Any, scope), aggregation, **options)


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
        options: see :class:`captum_norm.forward.session.MeterOptions`.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> scores = GlobEnc(BertModel(config)).attribute(torch.tensor([[2, 7, 9, 3]]), position="first")
        >>> scores.shape, round(float(scores.sum()), 4)
        (torch.Size([1, 4]), 1.0)
    """

    name, units = "globenc", MapUnits("norm")
    text_alone = True

    def __init__(self, model: Explainable, aggregation: str = "product", **options: Unpack[MeterOptions]) -> None:
        super().__init__(model, aggregation, **options)

    def check_model(self, call: ModelCall) -> None:
        """Refuse encoder–decoder models."""
        if call.facts.decoder is not None:
            raise UnsupportedModelError(
                f"got the encoder–decoder model {self.session.name}; {type(self).__name__} explains one stack of "
                "layers: pass the encoder alone, as model.get_encoder()"
            )
        super().check_model(call)

    def request_of(self, call: ModelCall, request: Request) -> Request:
        """Request the feed-forward blocks, too."""
        return replace(super().request_of(call, request), feed_forward=True)

    def reduce(self, layer: Layer, request: Request) -> LayerMap:  # noqa: ARG002 - the same for all requests
        """Compute the norms at the end of a layer."""
        return globenc(layer)


def globenc(layer: Layer) -> LayerMap:
    """Compute the norms at the end of a post-norm layer, of vectors that bypass its feed-forward network."""
    block, behind = layer.block, layer.block.feed_forward
    if behind is not None and (behind.parallel or behind.residual_factor is not None):
        raise UnsupportedModelError(
            f'the feed-forward network after "{block.name}" reads the stream before attention, or a factor '
            "multiplies the stream around it; expected post-norm layers without such a factor, for others take ALTI"
        )
    if behind is None or behind.final_norm is None:
        reason = block.without_feed_forward or f"its layout is {block.layout.style}"
        raise UnsupportedModelError(
            f'found no normalisation of the feed-forward residual sum after "{block.name}": {reason}; '
            "expected post-norm layers, for others take ALTI"
        )
    carry = replace(block.carry("atb", layer.dtype), residual=True, second=behind.final_norm.read(layer.dtype))
    results = LayerResults()
    layer_norms(layer, {END: carry}, results)
    return LayerMap(results.norms[END], results.deltas[0][0], block.precision([END]), results.discrepancy)

"""Explains whole attention blocks by norms, optionally through the feed-forward block."""

from typing import Literal, Unpack

from captum_norm.attr.meter import MeterOptions
from captum_norm.attr.norms import ScopedNorms
from captum_norm.models.objects import Explainable
from captum_norm.results.maps import MapUnits


class AttentionBlockAttribution(ScopedNorms):
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
        aggregation: how ``attribute`` combines the layers' maps, ``"rollout"`` or ``"mean"``.
        options: see :class:`captum_norm.MeterOptions`.

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

    name, title, units = "attention-block", "norms of the attention block", MapUnits("norm")
    scopes = ("atb", "atb_ln", "atb_ff", "atb_ff_res", "atb_ff_res_ln")

    def __init__(
        self,
        model: Explainable,
        scope: Literal["atb", "atb_ln", "atb_ff", "atb_ff_res", "atb_ff_res_ln"] = "atb",
        aggregation: str = "rollout",
        **options: Unpack[MeterOptions],
    ) -> None:
        super().__init__(model, scope, aggregation, **options)

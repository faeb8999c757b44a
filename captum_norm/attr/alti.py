"""Computes ALTI and ALTI+: how close each token's vector is to the attention block's output, rolled out."""

import torch
from torch import Tensor

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.forward.record import Layer
from captum_norm.forward.segments import Segments
from captum_norm.functional import own_keys
from captum_norm.functional.contributions import l1_distances, nearness
from captum_norm.results.aggregation import normalize_rows
from captum_norm.results.maps import MapUnits


class ALTI(AttentionMapAttribution):
    """Aggregation of layer-wise token-to-token interactions: ALTI, and ALTI+ [Ferrando et al. 2022a, 2022b].

    A layer's map is c_ij ∝ max(0, ‖y_i‖₁ − ‖y_i − v_ij‖₁), with y_i the output of the attention block (in a post-norm
    layer after its normalisation, in others the residual sum) and v_ij key j's contribution to it, including the
    residual connection if j = i. Rows sum to 1, or are 0 if no vector is closer to y_i than 0 is. In cross-attention
    the residual connection is a further vector, of no key: rows of ``cross`` sum to 1 minus its share.

    In an encoder–decoder model (ALTI+), ``attribute`` returns the shares of source and target prefix in one decoder
    position, which sum to 1; :func:`captum_norm.results.aggregation.encoder_decoder_rollout` of the maps those in all.

    Args:
        model: a Hugging Face model or a fairseq translation model; left unchanged.
        aggregation: see :class:`captum_norm.AttentionMapAttribution`.
        options: see :class:`captum_norm.forward.session.MeterOptions`; ``memory_budget`` also bounds the vectors. The
            attention weights of one layer are held at a time.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> maps = ALTI(BertModel(config)).maps(torch.tensor([[2, 7, 9, 3]])).encoder
        >>> maps.shape, bool((maps.sum(-1) - 1).abs().max() < 1e-5)
        (torch.Size([1, 2, 4, 4]), True)
    """

    name, units = "alti", MapUnits("contribution")
    segmented = True
    chained = True

    def layer_map(self, layer: Layer) -> Tensor:
        """Compute c_ij of one layer, (B, Q, K)."""
        return alti_map(layer)

    def segment_map(self, layer: Layer, segments: Segments) -> Tensor:
        """Compute c_ig of segments' summed vectors, (B, Q or 1, G); keys in no segment share a row as one more."""
        each, whole = segments.with_rest(), segments.added(layer.output)
        distances = each.measured(layer, lambda rows, vectors: vectors.sub_(whole[:, rows].unsqueeze(2)).abs_().sum(-1))
        if layer.cross:
            beside = (whole - segments.added(layer.stream)).abs().sum(-1, keepdim=True)
            distances = torch.cat([distances, beside], -1)
        return normalize_rows(nearness(distances, whole.abs().sum(-1)))[..., : segments.count]


def alti_map(layer: Layer) -> Tensor:
    """Compute c_ij of one layer, (B, Q, K)."""
    whole, weights = layer.output, layer.scaled_weights
    size, most = whole.abs().sum(-1), layer.options.budget.piece_elements(whole)
    distances = torch.stack(
        [
            l1_distances(y, alphas, values, layer.projection, most)
            for y, alphas, values in zip(whole, weights, layer.values, strict=True)
        ]
    )
    # A key without weight contributes exactly nothing, whatever the rounding.
    distances = distances.where((layer.weights != 0).any(1), size.unsqueeze(-1))
    if layer.cross:
        beside = (whole - layer.stream).abs().sum(-1, keepdim=True)
        return normalize_rows(nearness(torch.cat([distances, beside], -1), size))[..., :-1]
    own_keys(distances).copy_((whole - layer.own_vectors()).abs().sum(-1))
    return normalize_rows(nearness(distances, size))

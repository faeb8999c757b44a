"""ALTI and ALTI+: how near each token's vector is to the attention block's output, rolled out."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from captum_norm.aggregation import encoder_decoder_rollout, normalize_rows
from captum_norm.attr._base import Position, only_layer, position_rows
from captum_norm.attr._layerwise import LayerwiseAttribution
from captum_norm.attr._reducers import piece_elements
from captum_norm.attr.measure import MeterOptions
from captum_norm.errors import InvalidInputError
from captum_norm.functional import Scales, l1_distances, length, nearness, relative_error
from captum_norm.maps import AttributionMaps
from captum_norm.memory import MemoryBudget
from captum_norm.models.attention import Part
from captum_norm.models.blocks import Block
from captum_norm.models.inputs import Inputs
from captum_norm.models.verification import refuse_mixing
from captum_norm.recording import BlockTensors


class SourceAndPrefix(NamedTuple):
    """What each position of the decoder took from the source and from the target prefix.

    Attributes:
        source: (B, T, S), shares of the source positions.
        prefix: (B, T, T), shares of the decoder's own input positions. Both rows of a real position sum to 1 together.
    """

    source: Tensor
    prefix: Tensor


class ALTI(LayerwiseAttribution):
    """Aggregation of layer-wise token-to-token interactions: ALTI, and ALTI+ [Ferrando et al. 2022a, 2022b].

    A layer's map is c_ij ∝ max(0, ‖y_i‖₁ − ‖y_i − v_ij‖₁), with y_i the output of the attention block (behind its
    normalisation in a post-norm layer, the residual sum in others) and v_ij what key j gives to it, the residual
    connection with j = i. Rows sum to 1, or are 0 where no vector is nearer to y_i than 0 is. In cross-attention the
    residual connection is a further vector, which no key has: rows of ``cross`` sum to 1 less its share.

    In an encoder–decoder model (ALTI+) ``attribute`` gives the share of each source position in one position of the
    decoder; what is missing to 1 is the target prefix's. :meth:`source_and_prefix` gives both, at all positions.

    Args:
        model: a model of Hugging Face, or a translation model of fairseq; left exactly as it is.
        aggregation: how ``attribute`` makes one map of all layers, ``"rollout"`` or ``"mean"``.
        options: see :class:`captum_norm.MeterOptions`; the vectors take no more than ``memory_budget``, either.
            The attention weights of one layer are held until its end.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> maps = ALTI(BertModel(config)).maps(torch.tensor([[2, 7, 9, 3]])).encoder
        >>> maps.shape, bool((maps.sum(-1) - 1).abs().max() < 1e-5)
        (torch.Size([1, 2, 4, 4]), True)
    """

    def __init__(self, model: nn.Module, aggregation: str = "rollout", **options: Unpack[MeterOptions]) -> None:
        super().__init__(model, aggregation, **options)

    def source_and_prefix(
        self, inputs: Inputs, additional_forward_args: Any = None, *, layers: Sequence[int] | None = None
    ) -> SourceAndPrefix:
        """ALTI+: shares of the source and of the target prefix in every position of the decoder.

        Args:
            inputs: as for :meth:`maps`, of an encoder–decoder model.
            additional_forward_args: as for :meth:`maps`.
            layers: the layers that are rolled out, of encoder and decoder; all if None.

        Returns:
            the shares, 0 at padding.

        Raises:
            InvalidInputError: if the model is no encoder–decoder.
            CaptumNormError: see :meth:`maps`.
        """
        maps = self.maps(inputs, additional_forward_args, layers=layers)
        if maps.encoder is None or maps.decoder is None or maps.cross is None:
            raise InvalidInputError(
                f"got {type(self.model).__name__}, which is no encoder–decoder model; use attribute or maps"
            )
        refuse_mixing(self.model)
        with torch.set_grad_enabled(self._meter.differentiable):
            return SourceAndPrefix(*encoder_decoder_rollout(maps.encoder, maps.decoder, maps.cross))

    def _reducer(self, block: Block, dtype: torch.dtype, budget: MemoryBudget, real: Tensor | None) -> "_Reducer":
        return _Reducer(block, dtype, budget, real)

    def _scores(self, maps: AttributionMaps, position: Position, *, aggregate: bool) -> Tensor:
        if maps.encoder is None or maps.decoder is None or maps.cross is None or maps.decoder_real is None:
            return super()._scores(maps, position, aggregate=aggregate)
        if not aggregate:
            source = only_layer(maps.cross)
        elif self.aggregation == "mean":
            source = maps.cross.mean(1)
        else:
            source, _ = encoder_decoder_rollout(maps.encoder, maps.decoder, maps.cross)
        rows = position_rows(position, "last", maps.decoder_real, source, self.model).unsqueeze(1)
        return (rows @ source).squeeze(1)


class _Reducer:
    """One layer."""

    def __init__(self, block: Block, dtype: torch.dtype, budget: MemoryBudget, real: Tensor | None) -> None:
        self._block, self._dtype, self._budget, self._real = block, dtype, budget, real
        self._carry = block.carry("atb", dtype)
        self._cross = False
        self._values: Tensor
        self._weights: Tensor
        self.precision = block.precision
        self.map: Tensor
        self.delta: Tensor

    def begin(self, values: Tensor, heads: int, queries: int, *, cross: bool) -> None:
        values = values.to(self._dtype)
        batch, own_heads, keys, _ = values.shape
        self._values = values if own_heads == heads else values.repeat_interleave(heads // own_heads, dim=1)
        self._weights = values.new_empty(batch, heads, queries, keys)
        self._cross = cross

    def consume(self, weights: Tensor, part: Part) -> None:
        self._weights[part.examples, :, part.rows] = weights.to(self._dtype)

    def finish(self, tensors: BlockTensors | None) -> None:
        if tensors is None:
            raise ValueError("vectors need the tensors of the block")
        tensors, carry = tensors.rows(slice(None), self._dtype), self._carry
        weight, bias = self._block.projection.weight(self._dtype), self._block.projection.bias(self._dtype)
        scales = carry.scales(tensors.projected, tensors.total)
        scale = scales.divide(torch.ones_like(tensors.total[..., :1]))
        whole = tensors.total if tensors.normed is None else tensors.normed
        stream = carry.linear_final(tensors.residual)
        stream = stream if scales.final is None else stream * scales.final
        projection = carry.linear(weight.unflatten(0, (self._weights.shape[1], -1)))

        context = (self._weights @ self._values).transpose(1, 2).flatten(2)
        self.delta = self._error(context @ weight if bias is None else context @ weight + bias, tensors, scales)
        scaled = self._weights * scale.squeeze(-1)[:, None, :, None]
        length, most = whole.abs().sum(-1), piece_elements(self._budget, whole)
        distances = torch.stack(
            [
                l1_distances(y, weights, values, projection, most)
                for y, weights, values in zip(whole, scaled, self._values, strict=True)
            ]
        )
        # Nothing is given without weight, which rounding would blur.
        distances = distances.where((self._weights != 0).any(1), length.unsqueeze(-1))
        if self._cross:
            beside = (whole - stream).abs().sum(-1, keepdim=True)
            self.map = normalize_rows(nearness(torch.cat([distances, beside], -1), length))[..., :-1]
        else:
            own_weights = scaled.diagonal(dim1=2, dim2=3).unsqueeze(-1)
            own = carry.linear((self._values * own_weights).transpose(1, 2).flatten(2) @ weight) + stream
            distances.diagonal(dim1=1, dim2=2).copy_((whole - own).abs().sum(-1))
            self.map = normalize_rows(nearness(distances, length))
        # Only the results outlive the layer.
        del self._values, self._weights

    def _error(self, projected: Tensor, tensors: BlockTensors, scales: Scales) -> Tensor:
        """Relative completeness error of the vectors, (B,)."""
        whole = tensors.total if tensors.normed is None else tensors.normed
        carried = self._carry.constant(tensors.projected, tensors.residual, scales)
        pairs = [(projected, tensors.projected), (carried, whole)]
        errors = [relative_error(length(computed - actual), length(actual), self._real) for computed, actual in pairs]
        return torch.stack(errors).amax(0)

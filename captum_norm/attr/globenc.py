"""The whole encoder layer by norms: both normalisations, both residual connections."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from captum_norm.attr._base import MapOptions
from captum_norm.attr._layerwise import LayerwiseAttribution, refuse_encoder_decoder
from captum_norm.attr._products import ProductCache, carried_projection
from captum_norm.attr._reducers import piece_elements
from captum_norm.attr.measure import MeterOptions
from captum_norm.errors import UnsupportedModelError
from captum_norm.functional import (
    Carry,
    Normalization,
    apply_linear,
    estimated_length,
    inverse_scale,
    key_gram,
    length,
    normalize,
    random_directions,
    refined_summed_norms,
    relative_error,
    squared_difference,
    summed_norms,
    transformed_norms,
)
from captum_norm.maps import AttributionMaps
from captum_norm.memory import MemoryBudget
from captum_norm.models.attention import Part
from captum_norm.models.blocks import Block
from captum_norm.models.inputs import Inputs, ModelCall
from captum_norm.models.projections import NormReader
from captum_norm.recording import BlockTensors


class GlobEnc(LayerwiseAttribution):
    """N-Enc: norms at the end of a post-norm layer, multiplied layer by layer [Modarressi et al. 2022].

    The vectors of :class:`NormAttribution` at ``attn_res_ln`` go on through the residual connection around the
    feed-forward network and the layer's second normalisation, its statistics frozen. The feed-forward network's own
    output counts in those statistics alone.

    Args:
        model: a model of Hugging Face with post-norm layers; left exactly as it is.
        aggregation: how ``attribute`` makes one map of all layers. ``"product"``, as in the authors' code: the product
            of the maps themselves, so that a position whose norms are large counts more than others; the row explained
            is divided by its sum. ``"rollout"``: each row of each map is divided by its sum first. ``"mean"``.
        options: see :class:`captum_norm.MeterOptions`.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> scores = GlobEnc(BertModel(config)).attribute(torch.tensor([[2, 7, 9, 3]]), position="first")
        >>> scores.shape, round(float(scores.sum()), 4)
        (torch.Size([1, 4]), 1.0)
    """

    feed_forward = True

    def __init__(self, model: nn.Module, aggregation: str = "product", **options: Unpack[MeterOptions]) -> None:
        super().__init__(model, aggregation, **options)
        self._cache = ProductCache()
        self._cached: Mapping[nn.Module, Block] = {}

    def _maps(self, inputs: Inputs, additional_forward_args: Any, options: MapOptions) -> AttributionMaps:
        refuse_encoder_decoder(self)
        return super()._maps(inputs, additional_forward_args, options)

    def _reduced(self, call: ModelCall, blocks: Mapping[nn.Module, Block], options: MapOptions) -> AttributionMaps:
        if blocks is not self._cached:
            self._cache.clear()
            self._cached = blocks
        return super()._reduced(call, blocks, options)

    def _reducer(self, block: Block, dtype: torch.dtype, budget: MemoryBudget, real: Tensor | None) -> "_Reducer":
        behind = block.feed_forward
        second = None if behind is None else behind.final_norm
        if behind is not None and (behind.parallel or behind.residual_factor is not None):
            raise UnsupportedModelError(
                f'the feed-forward network behind "{block.name}" reads the stream before attention, or a factor '
                "multiplies the stream around it; expected post-norm layers without one"
            )
        if second is None:
            reason = block.without_feed_forward or f"its layout is {block.layout.style}"
            raise UnsupportedModelError(
                f'no normalisation of the feed-forward residual sum was found behind "{block.name}": {reason}; '
                "expected post-norm layers"
            )
        return _Reducer(block, second, self._cache, dtype, budget, real)


@dataclass(frozen=True, kw_only=True)
class _EncoderCarry(Carry):
    """Through the attention block and the second norm."""

    second: Normalization

    def linear_final(self, part: Tensor) -> Tensor:
        return apply_linear(self.second, super().linear_final(part))


class _Reducer:
    """One layer."""

    def __init__(
        self,
        block: Block,
        second: NormReader,
        cache: ProductCache,
        dtype: torch.dtype,
        budget: MemoryBudget,
        real: Tensor | None,
    ) -> None:
        first = block.carry("atb", dtype)
        self._block, self._cache, self._dtype, self._budget, self._real = block, cache, dtype, budget, real
        self._carry = _EncoderCarry(first.branch, residual=True, final=first.final, second=second.read(dtype))
        self._values: Tensor
        self._form: Tensor
        self._projected_keys: Tensor
        self._sketch: Tensor
        self._own_weights: Tensor
        self.precision = max(block.precision, second.precision, key=lambda dtype: torch.finfo(dtype).eps)
        self.map: Tensor
        self.delta: Tensor

    def begin(self, values: Tensor, heads: int, queries: int, *, cross: bool) -> None:  # noqa: ARG002
        values = values.transpose(1, 2).to(self._dtype)
        batch, keys, own_heads, _ = values.shape
        if own_heads < heads:
            values = values.repeat_interleave(heads // own_heads, dim=2)
        products = self._cache.get(self._block, self._carry, heads, self._dtype)
        self._projection = lambda: carried_projection(self._block, self._carry, heads, torch.float64)
        self._values = values
        self._form = key_gram(values, products.gram, piece_elements(self._budget, values))
        self._projected_keys = values.transpose(1, 2) @ products.sketch
        self._sketch = values.new_empty(batch, queries, products.sketch.shape[-1])
        self._own_weights = values.new_empty(batch, heads, queries)
        self.map = values.new_empty(batch, queries, keys)

    def consume(self, weights: Tensor, part: Part) -> None:
        weights = weights.to(self._dtype)
        norms = summed_norms(weights, self._form[part.examples])
        self.map[part] = refined_summed_norms(norms, weights, self._values[part.examples], self._projection)
        self._sketch[part] = (weights @ self._projected_keys[part.examples]).sum(1)
        own = weights.diagonal(part.rows.start, dim1=2, dim2=3)
        self._own_weights[part.examples, :, part.rows] = own

    def finish(self, tensors: BlockTensors | None) -> None:
        if tensors is None or tensors.behind is None or tensors.behind.normed is None:
            raise ValueError("norms need the tensors of the attention block and of the feed-forward block behind it")
        received, returned = (tensor.to(self._dtype) for tensor in (tensors.behind.total, tensors.behind.normed))
        carry, tensors = self._carry, tensors.rows(slice(None), self._dtype)
        weight, bias = self._block.projection.weight(self._dtype), self._block.projection.bias(self._dtype)
        directions = random_directions(received.shape[-1], received)
        own = (self._values * self._own_weights.transpose(1, 2).unsqueeze(-1)).flatten(2) @ weight
        attention = tensors.projected if bias is None else tensors.projected - bias
        own, attention = carry.linear(own), carry.linear(attention)
        fast = self.map.diagonal(dim1=1, dim2=2)
        scales, second = carry.scales(tensors.projected, tensors.total), inverse_scale(carry.second, received)
        stream = carry.linear_final(tensors.residual)
        joined = own + stream if scales.branch is None else own * scales.branch + stream
        scale = second if scales.final is None else second * scales.final

        size = length(own) + length(attention - own) + (0 if bias is None else length(carry.linear(bias)))
        heads = (self._own_weights * transformed_norms(self._form)).sum(1)
        errors = [
            (estimated_length(self._sketch - attention @ directions), size),
            (squared_difference(fast, length(own), heads), torch.ones_like(heads)),
            (length(normalize(carry.second, received) - returned), length(returned)),
        ]
        self.delta = torch.stack([relative_error(*error, self._real) for error in errors]).amax(0)
        self.map = self.map * scales.divide(second)
        self.map.diagonal(dim1=1, dim2=2).copy_(length(joined * scale))
        # Only the results outlive the layer.
        del self._values, self._form, self._projected_keys, self._sketch, self._own_weights

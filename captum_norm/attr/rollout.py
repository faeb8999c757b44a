"""Attention rollout."""

from dataclasses import replace
from typing import Any, Unpack

from torch import Tensor, nn

from captum_norm.aggregation import replaced, rollouts
from captum_norm.attr._base import MapOptions
from captum_norm.attr._wanted import Wanted, as_layers, layer_indices
from captum_norm.attr.measure import MeterOptions
from captum_norm.attr.weights import AttentionWeights
from captum_norm.errors import InvalidInputError
from captum_norm.maps import AttributionMaps
from captum_norm.models.inputs import Inputs


class AttentionRollout(AttentionWeights):
    """Attention rollout: the product of the layers' (A + I)/2 [Abnar & Zuidema 2020].

    The map of layer l is the product of the layers up to l: how much of each input is in the layer's output if weights
    alone decided. ``attribute`` returns a row of the last one, or of layer ``layer``.

    Args:
        model: a model of Hugging Face, or a translation model of fairseq; left exactly as it is.
        options: see :class:`captum_norm.MeterOptions`.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2Model
        >>> model = GPT2Model(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> AttentionRollout(model).attribute(torch.tensor([[7, 9, 3]]), position=0)
        tensor([[1., 0., 0.]])
    """

    def __init__(self, model: nn.Module, **options: Unpack[MeterOptions]) -> None:
        super().__init__(model, "attn_res", "rollout", **options)

    def _maps(self, inputs: Inputs, additional_forward_args: Any, options: MapOptions) -> AttributionMaps:
        if options.per_head:
            raise InvalidInputError("got per_head=True; a rollout goes through the mean of the heads")
        layers = as_layers(options.layers)
        wanted = Wanted(weights=True, stacks=options.stacks, copied=len(layers or ()))
        maps = self._measured(inputs, additional_forward_args, wanted)
        chosen = layer_indices(layers, maps.self_attention.shape[1])

        def roll(stack: Tensor | None) -> Tensor | None:
            if stack is None:
                return None
            rolled = replaced(stack, rollouts(stack))
            return rolled if layers is None else rolled[:, chosen]

        return replace(maps, encoder=roll(maps.encoder), decoder=roll(maps.decoder), mixing_ratio=None)

    def _aggregate(self, stack: Tensor, rows: Tensor) -> Tensor:
        # The last map is the product of all layers already.
        return rows @ stack[:, -1]

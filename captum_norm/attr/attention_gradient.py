"""Attention weights times their gradients, rolled out."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.attr._base import MapOptions, stacked_maps
from captum_norm.attr._gradients import gradients_on
from captum_norm.attr._layerwise import refuse_encoder_decoder
from captum_norm.attr._target import TargetedAttribution, refuse_non_finite
from captum_norm.attr._wanted import Wanted, layer_indices
from captum_norm.errors import UnsupportedModelError
from captum_norm.maps import AttributionMaps
from captum_norm.models.attention import AttentionCall
from captum_norm.models.hooks import evaluating
from captum_norm.models.inputs import Inputs, bind_inputs
from captum_norm.models.libraries.registry import library_of, no_attention
from captum_norm.models.outputs import Readout, chosen_target, explained_number, output_scores
from captum_norm.models.projections import accumulation_dtype
from captum_norm.models.stacks import Stacks


class AttentionTimesGradient(TargetedAttribution):
    """Rollout of gradient-weighted attention [Chefer et al. 2021].

    A layer's map is Ā = mean over heads of max(0, α ⊙ ∂t/∂α), t the number explained; ``attribute`` returns a row of
    (I + Ā_L) ··· (I + Ā_1), whose rows do not sum to 1. ``target`` names t; outputs at each
    position are taken at the position explained. None: what the model predicts.

    Args:
        model: a model of Hugging Face, or an encoder of fairseq; left exactly as it is.
        aggregation: how ``attribute`` makes one map of all layers, ``"rollout"`` or ``"mean"``.
        readout: what to explain instead of logits, see :data:`captum_norm.models.outputs.Readout`.
        differentiable: let gradients flow through the maps.

    The attention weights of all layers are held at once.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> method = AttentionTimesGradient(BertForSequenceClassification(config))
        >>> method.attribute(torch.tensor([[2, 7, 9, 3]]), target=1).shape
        torch.Size([1, 4])
    """

    def __init__(
        self,
        model: nn.Module,
        aggregation: str = "rollout",
        *,
        readout: Readout | None = None,
        differentiable: bool = False,
    ) -> None:
        super().__init__(model, aggregation, differentiable=differentiable)
        self._readout = readout

    def _maps(self, inputs: Inputs, additional_forward_args: Any, options: MapOptions) -> AttributionMaps:
        refuse_encoder_decoder(self)
        layers, differentiable = options.layers, self._meter.differentiable
        with gradients_on():
            call = bind_inputs(self.model, inputs, additional_forward_args).outside_inference()
            self._meter._verify(call)
            self._meter._expect_room(call, Wanted(weights=True, per_head=True))
            attention = _KeptAttention(Stacks(self.model, several=call.positions.several))
            with library_of(self.model).attention_through(self.model, attention), evaluating(self.model):
                output = call.run()
            if not attention.weights:
                raise UnsupportedModelError(no_attention(self.model))
            causal = attention.stacks.causal
            scores = output_scores(call, output, options.position, self._readout)
            number = explained_number(scores, chosen_target(options.target, scores))
            refuse_non_finite(self.model, number)
            weights = [attention.weights[index] for index in layer_indices(layers, len(attention.weights))]
            gradients = torch.autograd.grad(number.sum(), weights, allow_unused=True, create_graph=differentiable)
            maps = [self._map(*pair, per_head=options.per_head) for pair in zip(weights, gradients, strict=True)]
        return stacked_maps(call, {"self": maps if differentiable else [m.detach() for m in maps]}, {}, causal=causal)

    def _map(self, weights: Tensor, gradient: Tensor | None, *, per_head: bool) -> Tensor:
        """(B, [H,] Q, K)."""
        if gradient is None:
            raise UnsupportedModelError(
                f"the output of {type(self.model).__name__} does not depend on the attention weights that its "
                "attention function returns"
            )
        dtype = accumulation_dtype(weights.dtype)
        positive = (weights.to(dtype) * gradient.to(dtype)).clamp(min=0)
        return positive if per_head else positive.mean(1)

    def _aggregate(self, stack: Tensor, rows: Tensor) -> Tensor:
        if self.aggregation != "rollout":
            return super()._aggregate(stack, rows)
        for layer in reversed(stack.unbind(1)):
            rows = rows + rows @ layer
        return rows


class _KeptAttention:
    """An attention function that keeps the weights of every layer, as parts of the graph."""

    def __init__(self, stacks: Stacks) -> None:
        self.stacks = stacks
        self.weights: list[Tensor] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        if not call.query.requires_grad:
            # In a model whose parameters are frozen the graph begins here.
            call = replace(call, query=call.query.detach().requires_grad_())
        output, weights = self.stacks.attend(call)
        self.weights.append(weights)
        return output

"""Rolls out attention weights times their gradients."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.layer_maps import LayerMap, expect_number, of_last_rows, stacked_maps
from captum_norm.errors import UnsupportedModelError
from captum_norm.forward.gradients import WITHOUT, gradients_on, gradients_through
from captum_norm.forward.request import Request, layer_indices
from captum_norm.forward.session import check_seen
from captum_norm.models.attention import AttentionCall
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import evaluating
from captum_norm.models.objects import Explainable
from captum_norm.models.outputs import Readout, chosen_target, explained_number, output_scores
from captum_norm.models.precision import accumulation_dtype
from captum_norm.models.stacks import Role
from captum_norm.results.aggregation import encoder_decoder_relevance
from captum_norm.results.maps import AttributionMaps, MapUnits, SourceAndPrefix


class AttentionTimesGradient(AttentionMapAttribution):
    """Rollout of gradient-weighted attention [Chefer et al. 2021].

    A layer's map is Ā = mean over heads of max(0, α ⊙ ∂t/∂α), with t the output value explained; ``attribute`` returns
    a row of (I + Ā_L) ··· (I + Ā_1), whose rows do not sum to 1. ``target`` selects t, by default the one that the
    model predicts; if there are outputs at each position, at the position explained.

    In an encoder–decoder model, the maps of all three stacks come from one backward pass, and the paper's rules chain
    them: see :func:`captum_norm.results.aggregation.encoder_decoder_relevance`.

    Args:
        model: a Hugging Face model or a fairseq model; left unchanged.
        aggregation: how ``attribute`` combines the layers' maps, ``"rollout"`` or ``"mean"``.
        readout: what to explain instead of logits, see :data:`captum_norm.models.outputs.Readout`.
        differentiable: let gradients flow through the maps.
        tokenizer: see :class:`captum_norm.forward.session.MeterOptions`.

    The attention weights of all layers are held at once.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> method = AttentionTimesGradient(BertForSequenceClassification(config))
        >>> method.attribute(torch.tensor([[2, 7, 9, 3]]), target=1).shape
        torch.Size([1, 4])
    """

    name, target = "attention-gradient", "always"
    units = MapUnits("weight × gradient", "relevance")
    decomposes = False
    single_heads = True
    prefix_own = 0  # the identity is added to each map

    def __init__(
        self,
        model: Explainable,
        aggregation: str = "rollout",
        *,
        readout: Readout | None = None,
        differentiable: bool = False,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(model, aggregation, differentiable=differentiable, tokenizer=tokenizer)
        self.readout = readout

    def maps_of(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Compute the maps of the layers requested in one forward and one backward pass."""
        asked, call = call, replace(call, last=None)
        self.session.expect_room(call, Request(weights=True, per_head=True))
        with gradients_on(), evaluating(call.model):
            call = call.outside_inference()
            stacks, every = call.stacks(), dict[Role, list[Tensor]]()

            def attend(attention: AttentionCall) -> Tensor:
                if not attention.query.requires_grad:
                    # With frozen parameters, the graph begins here.
                    attention = replace(attention, query=attention.query.detach().requires_grad_())
                place, output, weights = stacks.attend(attention)
                every.setdefault(place.role, []).append(weights)
                # The value is the model's own, the gradient that of the weights.
                return attention.output().detach() + (output - output.detach())

            with call.attention_through(attend), gradients_through(self.model):
                output = call.run()
            if not every:
                raise UnsupportedModelError(call.unseen)
            check_seen(call, every, request)
            call.note(output)
            scores = output_scores(call, output, request.position, self.readout)
            number = explained_number(scores, chosen_target(request.target, scores))
            expect_number(self.model, number)
            kept = {
                role: [(index, layers[index]) for index in layer_indices(request.layers, len(layers))]
                for role, layers in every.items()
                if request.has_stack(role)
            }
            weights = [layer for layers in kept.values() for _, layer in layers]
            given = iter(self._gradients(number, weights))
            maps = {
                role: [
                    (index, self._map(layer, next(given), call, per_head=request.per_head)) for index, layer in layers
                ]
                for role, layers in kept.items()
            }
        return of_last_rows(asked, stacked_maps(call, maps, causal=stacks.causal))

    def _gradients(self, number: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        try:
            return torch.autograd.grad(
                number.sum(), weights, allow_unused=True, create_graph=self.session.differentiable
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of a backward function that a layer brings
            reason = str(error).partition("\n")[0][:160]
            raise UnsupportedModelError(
                f"the backward pass of {self.session.name} fails: {reason}; try model.requires_grad_(False), the "
                f"dequantized model, or a method without gradients: {WITHOUT}"
            ) from error

    def _map(self, weights: Tensor, gradient: Tensor | None, call: ModelCall, *, per_head: bool) -> LayerMap:
        """(B, [H,] Q, K)."""
        if gradient is None:
            cached = '; the cache holds what it reads of the encoder: pass stacks=["decoder", "cross"]'
            raise UnsupportedModelError(
                f"the output of {type(self.model).__name__} does not depend on the attention weights that its "
                f"attention function returns{cached * (call.prefix.cached > 0 and call.encoder is not None)}"
            )
        dtype = accumulation_dtype(weights.dtype)
        positive = (weights.to(dtype) * gradient.to(dtype)).clamp(min=0)
        made = positive if per_head else positive.mean(1)
        return LayerMap(made if self.session.differentiable else made.detach())

    def chain(self, maps: AttributionMaps) -> SourceAndPrefix:
        """Combine the maps of three stacks by the paper's rules."""
        if self.aggregation != "rollout":
            return super().chain(maps)
        return SourceAndPrefix(*encoder_decoder_relevance(*maps.of_three_stacks))

    def aggregate(self, stack: Tensor, rows: Tensor) -> Tensor:
        """Select rows of (I + Ā_L) ··· (I + Ā_1)."""
        if self.aggregation != "rollout":
            return super().aggregate(stack, rows)
        for layer in reversed(stack.unbind(1)):
            rows = rows + rows @ layer
        return rows

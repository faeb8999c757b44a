"""Measures how much each component of a layer changes the contextualisation."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Unpack

import torch
from torch import Tensor

from captum_norm.attr.meter import MeterOptions, NormMeter
from captum_norm.functional import spearman
from captum_norm.models.inputs import Inputs
from captum_norm.models.layouts import Scope
from captum_norm.models.objects import Explainable


@dataclass(frozen=True)
class ContextualizationChange:
    """1 − ρ of the maps before and after each component, with ρ Spearman's rank correlation of their entries.

    0 if a component keeps the order of all entries, 2 if it reverses it. Entries are all pairs of real positions; in
    causal models, those with the key at or before the query. NaN for a single position, or if all entries are equal.

    Attributes:
        components: the names of the C components after attention, in the order of the layer.
        scopes: the scopes of the maps, attention first: component c is between scopes c and c + 1.
        per_example: the change in each example, (B, L, C).
        micro: the change over the pooled entries of all examples, (L, C).
    """

    components: tuple[str, ...]
    scopes: tuple[Scope, ...]
    per_example: Tensor
    micro: Tensor

    @property
    def macro(self) -> Tensor:
        """The mean over examples, (L, C), without NaN; NaN if all are."""
        return self.per_example.nanmean(0)


def contextualization_change(
    model: Explainable, inputs: Inputs, additional_forward_args: Any = None, **options: Unpack[MeterOptions]
) -> ContextualizationChange:
    """Measure how much each component of each layer changes the map [Kobayashi et al. 2024].

    Args:
        model: a model with one stack of layers, such as the encoder of an encoder–decoder model.
        inputs: see :meth:`captum_norm.NormMeter.measure`.
        additional_forward_args: see there.
        options: see :class:`captum_norm.MeterOptions`.

    Raises:
        InvalidInputError: for an encoder–decoder model, or layers of different arrangements.
        UnsupportedScopeError: if the feed-forward networks are not understood.
        CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> change = contextualization_change(BertModel(config), torch.tensor([[2, 7, 9, 3]]))
        >>> change.components, change.macro.shape
        (('RES', 'LN', 'FF', 'RES', 'LN'), torch.Size([2, 5]))
    """
    meter = NormMeter(model, **options)
    stages = meter.stages(inputs, additional_forward_args)
    scopes = tuple(stage.scope for stage in stages)
    ((stack, measured),) = meter.measure(inputs, additional_forward_args, scopes=scopes).items()
    pairs = measured.real[:, :, None] & measured.real[:, None, :]
    if stack == "decoder":
        pairs = pairs & torch.ones_like(pairs[0]).tril()
    maps = [measured.norms[scope].detach().cpu() for scope in scopes]
    chosen = [[stage[example][:, pair].unbind() for stage in maps] for example, pair in enumerate(pairs.cpu())]

    def changes(stages: list[Any]) -> Tensor:
        """From the entries by stage and layer, (L, C)."""
        steps = [
            torch.stack([1 - spearman(*layer) for layer in zip(before, after, strict=True)])
            for before, after in pairwise(stages)
        ]
        return torch.stack(steps, dim=-1)

    pooled = [[torch.cat(layer) for layer in zip(*stage, strict=True)] for stage in zip(*chosen, strict=True)]
    components = tuple(stage.component for stage in stages[1:])
    return ContextualizationChange(
        components, scopes, torch.stack([changes(stages) for stages in chosen]), changes(pooled)
    )

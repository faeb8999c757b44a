"""Measures how much each component of a layer changes what its outputs are made of."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from captum_norm.attr.meter import MeterOptions, NormMeter
from captum_norm.functional import spearman
from captum_norm.models.inputs import Inputs
from captum_norm.models.layouts import Scope


@dataclass(frozen=True)
class ContextualizationChange:
    """1 − ρ of the maps before and after each component, ρ Spearman's rank correlation of their entries.

    0 where a component leaves the order of all entries as it was, 2 where it reverses it. Entries are all pairs of real
    positions, of causal models those that look back. NaN where there is nothing to order: one position, or one value.

    Attributes:
        components: the names of the C components behind attention, in the order of the layer.
        scopes: the scopes of the maps, that of attention first: component c is between scope c and c + 1.
        per_example: (B, L, C).
        micro: of the entries of all examples taken together, (L, C).
    """

    components: tuple[str, ...]
    scopes: tuple[Scope, ...]
    per_example: Tensor
    micro: Tensor

    @property
    def macro(self) -> Tensor:
        """The mean over the examples that have something to order, (L, C); NaN where none has."""
        return self.per_example.nanmean(0)


def contextualization_change(
    model: nn.Module, inputs: Inputs, additional_forward_args: Any = None, **options: Unpack[MeterOptions]
) -> ContextualizationChange:
    """How much each component of each layer changes the map [Kobayashi et al. 2024].

    Args:
        model: a model with one stack of layers; of an encoder–decoder model its encoder.
        inputs: as for :meth:`captum_norm.NormMeter.measure`.
        additional_forward_args: as there.
        options: see :class:`captum_norm.MeterOptions`.

    Raises:
        InvalidInputError: for an encoder–decoder model, or layers that are not all arranged alike.
        UnsupportedScopeError: if the layers' feed-forward networks are not understood.
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
        """(L, C) of the maps' entries, by stage and layer."""
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

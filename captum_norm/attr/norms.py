"""Explains attention by the norms of the vectors it adds up."""

from dataclasses import replace
from typing import ClassVar, Literal, Unpack

from torch import Tensor

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.layer_results import maps_of_stacks
from captum_norm.attr.measurements import Measurements
from captum_norm.attr.meter import MeterOptions, measure
from captum_norm.attr.segments import LayerSegments, segment_norms
from captum_norm.errors import InvalidInputError, UnsupportedScopeError
from captum_norm.forward.record import Layer
from captum_norm.forward.request import Request
from captum_norm.models.blocks import check_scopes
from captum_norm.models.call import ModelCall
from captum_norm.models.layouts import FEED_FORWARD_SCOPES, Scope
from captum_norm.models.objects import Explainable
from captum_norm.models.stacks import StackName
from captum_norm.results.aggregation import add_half_identity, normalize_rows
from captum_norm.results.maps import AttributionMaps, MapUnits


class ScopedNorms(AttentionMapAttribution):
    """Base class of methods whose maps are the norms at one scope."""

    scopes: ClassVar[tuple[Scope, ...]]
    single_heads = True
    segmented = True

    def __init__(self, model: Explainable, scope: Scope, aggregation: str, **options: Unpack[MeterOptions]) -> None:
        if str(scope) not in self.scopes:
            raise UnsupportedScopeError(
                f'got the scope "{scope}"; {type(self).__name__} has the scopes {", ".join(self.scopes)}'
            )
        super().__init__(model, aggregation, **options)
        self.scope = scope

    def maps_of(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Compute the norms at the scope."""
        if request.per_head and self.scope != "attn":
            raise InvalidInputError(f'got per_head=True for the scope "{self.scope}"; only "attn" splits into heads')
        request = replace(request, scopes=[self.scope], per_head=False, head_norms=request.per_head)

        def choose(_: StackName, stack: Measurements) -> tuple[Tensor, Tensor]:
            maps = stack.norms[self.scope] if stack.head_norms is None else stack.head_norms
            return maps, stack.mixing_ratio[self.scope]

        return maps_of_stacks(call, measure(self.session, call, request), choose)

    def segment_maps(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Compute the norms of the segments' sums at a scope up to the end of the attention block."""
        if self.scope in FEED_FORWARD_SCOPES:
            raise InvalidInputError(
                f'got segments, or together=True, for the scope "{self.scope}"; the vectors of a group are added up to '
                "the end of the attention block: take the scope atb"
            )
        blocks = self.session.blocks(call)
        for block in blocks.values():
            check_scopes(self.model, [self.scope], block)
        return super().segment_maps(call, request)

    def segment_map(self, layer: Layer, segments: LayerSegments) -> Tensor:
        """Compute the norms of the segments' sums in one layer."""
        return segment_norms(layer.at(self.scope), segments)

    def aggregate(self, stack: Tensor, rows: Tensor) -> Tensor:
        """Aggregate maps over layers; the rollout of ``attn`` adds the residual connection that its vectors lack."""
        if self.scope == "attn" and self.aggregation == "rollout":
            # Layer by layer, to avoid a second copy of all maps.
            for layer in reversed(stack.split(1, dim=1)):
                rows = super().aggregate(add_half_identity(normalize_rows(layer)), rows)
            return rows
        return super().aggregate(stack, rows)


class NormAttribution(ScopedNorms):
    """Norms of the vectors that attention adds up [Kobayashi et al. 2020, 2021].

    Entry (i, j) of a map is the norm of what query i receives from key j, in the units of the model's hidden states:

    - ``attn``: ‖Σ_h α_ij f_h(x_j)‖, with f_h(x_j) key j's value vector through head h's slice of the output projection
      (value bias included, output bias not) [2020, section 3]; with ``per_head`` ‖α_ij f_h(x_j)‖;
    - ``attn_res``: the residual connection's x_i is added to the vector of j = i [2021];
    - ``attn_res_ln``: the result is carried through the layer normalisation, with its statistics frozen [2021].

    Args:
        model: a Hugging Face model or a fairseq translation model; left unchanged.
        scope: ``attn``; ``attn_res`` if the layer adds the attention output itself to the residual stream;
            ``attn_res_ln`` in post-norm layers.
        aggregation: how ``attribute`` combines the layers' maps, ``"rollout"`` or ``"mean"``. The rollout of ``attn``,
            whose vectors omit the residual connection, uses (A + I)/2 of the row-normalised maps A
            [Abnar & Zuidema 2020].
        options: see :class:`captum_norm.MeterOptions`.

    Raises:
        UnsupportedScopeError: for a scope that this method, or on use the model's layers, do not have.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> method = NormAttribution(BertModel(config), scope="attn_res_ln")
        >>> scores, delta = method.attribute(torch.tensor([[2, 7, 9, 3]]), return_convergence_delta=True)
        >>> scores.shape, bool(delta < 1e-5)
        (torch.Size([1, 4]), True)
    """

    name, title, units = "norm", "norms of attention", MapUnits("norm")
    scopes = ("attn", "attn_res", "attn_res_ln")

    def __init__(
        self,
        model: Explainable,
        scope: Literal["attn", "attn_res", "attn_res_ln"] = "attn",
        aggregation: str = "rollout",
        **options: Unpack[MeterOptions],
    ) -> None:
        super().__init__(model, scope, aggregation, **options)

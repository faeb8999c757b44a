"""Explains attention by its weights, the baseline."""

from dataclasses import replace
from typing import Any, Literal, Unpack, cast

from torch import Tensor

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.layer_results import maps_of_stacks
from captum_norm.attr.measurements import Measurements
from captum_norm.attr.meter import MeterOptions, measure
from captum_norm.attr.segments import summed_columns
from captum_norm.errors import InvalidInputError, UnsupportedScopeError
from captum_norm.forward.request import Request, Segments
from captum_norm.models.call import ModelCall
from captum_norm.models.objects import Explainable
from captum_norm.models.stacks import StackName
from captum_norm.results.aggregation import add_half_identity, replaced
from captum_norm.results.maps import AttributionMaps, MapUnits


class AttentionWeights(AttentionMapAttribution):
    """Attention weights averaged over heads: Attn-W, or AttnRes-W with the residual connection as half of each row.

    Args:
        model: a Hugging Face model or a fairseq translation model; left unchanged.
        scope: ``attn`` for Attn-W, the mean A of the heads' weights; ``attn_res`` for AttnRes-W, (A + I)/2
            [Abnar & Zuidema 2020; Kobayashi et al. 2021], A/2 in cross-attention.
        aggregation: how ``attribute`` combines the layers' maps: ``"mean"``, or ``"rollout"``, the product of the
            maps; :class:`AttentionRollout` is the rollout of ``attn_res``.
        options: see :class:`captum_norm.MeterOptions`.

    Raises:
        UnsupportedScopeError: for another scope.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2Model
        >>> model = GPT2Model(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> AttentionWeights(model).maps(torch.tensor([[7, 9, 3]])).decoder[0, 0, 0]
        tensor([1., 0., 0.])
    """

    name, title, units = "weights", "attention weights", MapUnits("attention weight")
    decomposes = False
    single_heads = True
    segmented = True

    def __init__(
        self,
        model: Explainable,
        scope: Literal["attn", "attn_res"] = "attn",
        aggregation: str = "mean",
        **options: Unpack[MeterOptions],
    ) -> None:
        if str(scope) not in ("attn", "attn_res"):
            raise UnsupportedScopeError(f'got the scope "{scope}"; {type(self).__name__} has the scopes attn, attn_res')
        super().__init__(model, aggregation, **options)
        self.scope = scope

    def maps_of(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Compute the maps of the layers requested."""
        if request.per_head and self.scope != "attn":
            raise InvalidInputError(f'got per_head=True for the scope "{self.scope}"; only "attn" splits into heads')
        measured = measure(self.session, call, replace(request, weights=True))

        def choose(name: StackName, stack: Measurements) -> tuple[Tensor, Tensor]:
            if self.scope == "attn":
                return cast(Tensor, stack.weights), stack.mixing_ratio["weights"]
            return with_residual(name, stack), stack.mixing_ratio["weights_res"]

        return maps_of_stacks(call, measured, choose)

    def segment_maps(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Add the maps' columns of each segment, and rows of queries together."""
        segments, maps = cast(Segments, request.segments), self.maps_of(call, replace(request, segments=None))
        stacks: dict[str, Any] = {
            name: None if stack is None else summed_columns(stack, segments)
            for name, stack in (("encoder", maps.encoder), ("decoder", maps.decoder), ("cross", maps.cross))
        }
        towers = {name: summed_columns(stack, segments) for name, stack in maps.towers.items()}
        ratio = None if segments.together else maps.mixing_ratio
        return replace(maps, **stacks, towers=towers, mixing_ratio=ratio, segmented=True)


def with_residual(name: StackName, stack: Measurements) -> Tensor:
    """Compute AttnRes-W from a stack's measured weights, in place if no gradient needs them."""
    weights = cast(Tensor, stack.weights)
    # The residual stream of cross-attention belongs to no key.
    halved = (layer / 2 if name.endswith("cross") else add_half_identity(layer) for layer in weights.unbind(1))
    return replaced(weights, halved)

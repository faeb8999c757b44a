"""Explains attention by its weights, the baseline, and by their rollout over the layers."""

from dataclasses import replace
from typing import Literal, Unpack, cast

import torch
from torch import Tensor

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.layer_maps import LayerMap, maps_of_call, of_last_rows
from captum_norm.attr.norms import layer_results
from captum_norm.checks import did_you_mean
from captum_norm.errors import InvalidInputError, UnsupportedScopeError
from captum_norm.forward.record import Layer
from captum_norm.forward.request import Request, layer_indices
from captum_norm.forward.session import MeterOptions, refuse_unknown
from captum_norm.models.caches import refuse_chains
from captum_norm.models.call import ModelCall
from captum_norm.models.objects import Explainable
from captum_norm.models.stacks import StackName
from captum_norm.results import aggregation
from captum_norm.results.maps import AttributionMaps, MapUnits


class AttentionWeights(AttentionMapAttribution):
    """Attention weights averaged over heads: Attn-W, or AttnRes-W with the residual connection as half of each row.

    Args:
        model: a Hugging Face model or a fairseq translation model; left unchanged.
        scope: ``attn`` for Attn-W, the mean A of the heads' weights; ``attn_res`` for AttnRes-W, (A + I)/2
            [Abnar & Zuidema 2020; Kobayashi et al. 2021], A/2 in cross-attention.
        aggregation: how ``attribute`` combines the layers' maps: ``"mean"``, or ``"rollout"``, the product of the
            maps; :class:`AttentionRollout` is the rollout of ``attn_res``.
        options: see :class:`captum_norm.forward.session.MeterOptions`.

    Raises:
        UnsupportedScopeError: for another scope.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2Model
        >>> model = GPT2Model(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> AttentionWeights(model).maps(torch.tensor([[7, 9, 3]])).decoder[0, 0, 0]
        tensor([1., 0., 0.])
    """

    name, units = "weights", MapUnits("attention weight")
    decomposes = False
    single_heads = True

    def __init__(
        self,
        model: Explainable,
        scope: Literal["attn", "attn_res"] = "attn",
        aggregation: str = "mean",
        **options: Unpack[MeterOptions],
    ) -> None:
        if str(scope) not in (scopes := ("attn", "attn_res")):
            raise UnsupportedScopeError(
                f'got the scope "{scope}"; {type(self).__name__} has attn and attn_res{did_you_mean(scope, scopes)}'
            )
        super().__init__(model, aggregation, **options)
        self.scope, self.single_heads = scope, scope == "attn"

    def request_of(self, call: ModelCall, request: Request) -> Request:  # noqa: ARG002 - the same for all calls
        """Request the attention weights, for which no parts of the layers are needed."""
        return replace(request, weights=True, blocks=False)

    def reduce(self, layer: Layer, request: Request) -> LayerMap:
        """Compute the mean weights of one layer, or those of its heads."""
        results = layer_results(self.model, layer, request)
        weights, ratio = cast(Tensor, results.weights), results.mixing_ratio["weights"]
        if self.scope == "attn_res":
            # The residual stream of cross-attention belongs to no key.
            weights = weights / 2 if layer.cross else aggregation.add_half_identity(weights)
            ratio = results.mixing_ratio["weights_res"]
        return LayerMap(weights, mixing_ratio=ratio)


class AttentionRollout(AttentionWeights):
    """Attention rollout: the product of the layers' (A + I)/2 [Abnar & Zuidema 2020].

    The map of layer l is the product of the layers up to l: the share of each input in the layer's output if weights
    alone decided. ``attribute`` returns a row of the last one, or of layer ``layer``.

    In an encoder–decoder model, decoder layers draw on both sequences: ``cross`` holds the share of each source
    position, through encoder, cross-attention and decoder layers, ``decoder`` that of each position of the decoder's
    own input, chained by :func:`captum_norm.results.aggregation.encoder_decoder_rollout` with half of each row of
    cross-attention. Together, both rows of a real position sum to 1; ``attribute`` returns them.

    Args:
        model: a Hugging Face model or a fairseq translation model; left unchanged.
        options: see :class:`captum_norm.forward.session.MeterOptions`.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2Model
        >>> model = GPT2Model(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> AttentionRollout(model).attribute(torch.tensor([[7, 9, 3]]), position=0)
        tensor([[1., 0., 0.]])
    """

    name, units = "rollout", MapUnits("share of rollout")
    single_heads = False
    _cumulative = True

    def __init__(self, model: Explainable, **options: Unpack[MeterOptions]) -> None:
        refuse_unknown(type(self), options)
        super().__init__(model, "attn_res", "rollout", **options)

    def maps_of(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Compute the rollouts up to the layers requested."""
        refuse_chains(call.prefix.cached)
        asked, call = call, replace(call, last=None)
        layers, requested = request.layers, request.stacks
        # A decoder's rollout goes through all three stacks.
        alone = call.facts.towers or (requested is not None and set(requested) == {"encoder"})
        maps = super().maps_of(call, Request(stacks=requested if alone else None))
        self.session.refuse_mixing(call)
        if call.facts.towers and maps.cross is not None:
            raise InvalidInputError(
                f"the layers of {type(self.model).__name__} attend to its tokens and to a tower's positions in turn, "
                "which are not rolled out together; leave cross-attention out: maps(..., stacks=['text'])"
            )
        rolled, numbers = dict[StackName, Tensor](), dict[StackName, list[int]]()
        for name, stack in _rolled(maps).items():
            if alone or requested is None or name in requested:
                numbers[name] = layer_indices(layers, stack.shape[1])
                rolled[name] = stack if layers is None else stack[:, numbers[name]]
        return of_last_rows(asked, maps_of_call(call, rolled, numbers))


def _rolled(maps: AttributionMaps) -> dict[StackName, Tensor]:
    """Roll out the maps of all stacks in their memory, those of a decoder and its cross-attention together."""
    encoder, decoder, cross = maps.encoder, maps.decoder, maps.cross
    alone: dict[StackName, Tensor | None] = {"encoder": encoder, **maps.towers}
    if cross is None:
        alone["decoder"] = decoder
    rolled = dict[StackName, Tensor]()
    for name, stack in alone.items():
        if stack is not None:
            (rolled[name],) = aggregation.replaced((stack,), ((layer,) for layer in aggregation.rollouts(stack)))
    if cross is not None and decoder is not None:
        through_encoder = torch.eye(cross.shape[-1], dtype=cross.dtype, device=cross.device)
        if encoder is not None:
            through_encoder = rolled["encoder"][:, -1]
        chain = aggregation.encoder_decoder_rollouts(through_encoder, decoder, cross)
        rolled["cross"], rolled["decoder"] = aggregation.replaced((cross, decoder), chain)
    return rolled

"""Attributes the updates of a logit to the input tokens: ALTI-Logit, and direct logit attribution."""

from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from captum_norm.attr import layer_maps
from captum_norm.attr.alti import alti_map
from captum_norm.attr.frozen.components import ComponentRequest
from captum_norm.attr.frozen.head import HeadNetwork, HeadReading, read_head
from captum_norm.attr.frozen.network import HookedModules
from captum_norm.attr.logit_updates import LogitUpdates, PathScales, Tracing, block_updates, norm_scales, residual_path
from captum_norm.attr.output import Decomposition, OutputAttribution, restored
from captum_norm.checks import check_choice
from captum_norm.errors import InvalidInputError
from captum_norm.forward.gradients import gradients_on
from captum_norm.forward.record import Layer
from captum_norm.forward.request import Request, as_segments, layer_indices
from captum_norm.forward.segments import Segments
from captum_norm.models.blocks import Block
from captum_norm.models.caches import refuse_chains
from captum_norm.models.call import ModelCall
from captum_norm.models.inputs import Inputs
from captum_norm.models.objects import Explainable
from captum_norm.models.outputs import OutputValues, Position, Readout
from captum_norm.models.stacks import Place
from captum_norm.results.maps import AttributionMaps, MapUnits, Scores, SourceAndPrefix

Spread = Literal["all", "attention"]
"""Which updates the tokens share."""


class ALTILogit(OutputAttribution):
    """ALTI-Logit [Ferrando et al. 2023]: what each input token adds to an output value through each layer's updates.

    An output value, such as a logit, is the sum of what the blocks add to it along the residual connections: see
    :class:`captum_norm.attr.logit_updates.LogitUpdates`. What attention adds splits over its keys j exactly, as
    Σ_h α_ij ⟨f_h(x_j), g⟩ with g the direction in which the value reads the stream; what key j stands for in layer l is
    a mixture of input tokens, given by ALTI's rollout up to l, R_{l−1}[j]:

        score of token s = Σ_l Σ_j update_l(j) R_{l−1}[j, s] + Σ_l feed-forward update_l R_l[i, s] + embedding_i [s = i]

    A feed-forward block's update is spread as what position i stands for once attention has been added, in a parallel
    layer before it. Biases of output projections, of norms behind a block and of the head belong to no token. Norms
    have the statistics of the whole input; in post-norm layers g is carried back through all of them. Where no vector
    is near the attention block's output in ALTI, the position keeps standing for what it stood for. So the scores and
    the biases' part add up to the value.

    ``maps`` holds what each token adds through each layer's updates, in the first layer with the embedding's part: in
    rows of the positions that the head reads, in general one; all others are 0. In an encoder–decoder model the
    source's parts are in ``cross``, those of the target prefix in ``decoder``.

    Args:
        model: a Hugging Face or fairseq model, or one built with torch.nn's attention; left unchanged.
        spread: ``"all"``, or ``"attention"`` for attention's updates alone, as in the authors' code; the others are
            then part of the biases'.
        readout: the values to explain instead of logits, linear in the hidden states: see
            :data:`captum_norm.models.outputs.Readout`.
        accumulate, memory_budget, tokenizer: see :class:`captum_norm.forward.session.MeterOptions`.

    Runs the model twice: for the head and for the layers. Several positions of an example take no more passes.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> method, ids = ALTILogit(model), torch.tensor([[7, 9, 3, 8]])
        >>> parts = method.decompose(ids, target=[[3, 8]], position=[[1, 2]])
        >>> parts.scores.shape, bool((parts.scores.sum(-1) + parts.bias - parts.number).abs().max() < 1e-5)
        (torch.Size([1, 2, 4]), True)
        >>> method.logit_updates(ids, target=8).heads.shape
        torch.Size([1, 2, 4])
    """

    name = "alti-logit"
    units = MapUnits("part of the output", "part of the output", aggregation="sum")

    def __init__(
        self,
        model: Explainable,
        spread: Spread = "all",
        *,
        readout: Readout | None = None,
        accumulate: torch.dtype = torch.float32,
        memory_budget: int | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.spread: Spread = check_choice("spread", spread, get_args(Spread))
        super().__init__(
            model, readout=readout, accumulate=accumulate, memory_budget=memory_budget, tokenizer=tokenizer
        )

    def logit_updates(
        self, inputs: Inputs, target: Any = None, additional_forward_args: Any = None, *, position: Any = None
    ) -> LogitUpdates:
        """Split output values into what each head and feed-forward block adds directly (direct logit attribution).

        Args:
            inputs: as for :meth:`~captum_norm.NormAttribution.maps`.
            target: as for :meth:`decompose`.
            additional_forward_args: as for :meth:`~captum_norm.NormAttribution.maps`.
            position: as for :meth:`decompose`.
        """
        call, request = self.call_of(inputs, additional_forward_args, Request(target=target, position=position))
        return layer_maps.finite_results(
            self.model, self.traced(call, self.values(call, request, several=True), maps=False).logit_updates()
        )

    def head_updates(self, inputs: Inputs, target: Any = None, *, segments: Tensor, position: Any = None) -> Tensor:
        """Split what each head adds directly to output values over groups of the positions that it reads.

        Args:
            inputs: as for :meth:`~captum_norm.NormAttribution.maps`, without padding.
            target: as for :meth:`decompose`.
            position: as for :meth:`decompose`.
            segments: the group of each key, as for :meth:`~captum_norm.NormAttribution.maps`; in an encoder–decoder
                model, of each position of the source, as cross-attention reads them.

        Returns:
            (B[, P], L, H, G): Σ_j α_ij ⟨f_h(x_j), g⟩ over the keys j of each group; with every key in a group, they add
            up to the heads of :meth:`logit_updates`.
        """
        call, request = self.call_of(inputs, None, Request(target=target, position=position))
        stacks = None if call.encoder is None else ["cross"]
        groups = as_segments(call, Request(stacks=stacks), segments, together=False)
        tracing = self.traced(call, self.values(call, request, several=True), maps=False, segments=groups)
        return layer_maps.finite_results(self.model, tracing.segment_updates())

    def decomposition(
        self, call: ModelCall, values: OutputValues, components: ComponentRequest | None = None
    ) -> Decomposition:
        """Decompose the values by what each block adds to them, traced to the tokens."""
        tracing, kinds = self.traced(call, values, maps=True), () if components is None else components.kinds
        read = {kind: restored(call, kind, tracing.placed(kind), causal=tracing.causal) for kind in kinds}
        parts = layer_maps.finite_results(self.model, tracing.decomposition()._replace(components=read))
        if not values.together or not values.several:
            return parts
        halves = [half.sum(1) for half in (parts.scores if call.encoder else [parts.scores])]
        scores = SourceAndPrefix(*halves) if call.encoder else halves[0]
        summed = {kind: {name: part.sum(1) for name, part in stacks.items()} for kind, stacks in read.items()}
        delta = parts.convergence_delta.amax(1)
        return Decomposition(scores, parts.bias.sum(1), parts.number.sum(1), delta, summed)

    def explain(self, call: ModelCall, request: Request) -> tuple[Scores, Tensor | None]:
        """Decompose the output value requested, or what one layer adds to it."""
        tracing = self.traced(call, self.values(call, request), maps=True)
        scores = tracing.scores(layer_indices(request.layers, tracing.depth))
        return layer_maps.scores_of_inputs(call, scores), tracing.summed.convergence_delta

    def maps_of(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Place the parts of each layer in the rows of the positions that the head reads."""
        return self.traced(call, self.values(call, request), maps=True).layer_maps(request)

    def scores_of(self, maps: AttributionMaps, position: Position, *, aggregate: bool) -> Scores:  # noqa: ARG002 - of one position
        """Add up the rows of all layers in maps, which are of one position each."""
        if maps.cross is not None and maps.decoder is not None:
            return SourceAndPrefix(maps.cross.sum((1, 2)), maps.decoder.sum((1, 2)))
        return maps.self_attention.sum((1, 2))

    def traced(self, call: ModelCall, values: OutputValues, *, maps: bool, segments: Segments | None = None) -> Tracing:
        """Split values into the updates of all blocks, with maps traced to the tokens."""
        self.session.refuse_mixing(call)
        if maps:
            refuse_chains(call.prefix.cached)
        with gradients_on():
            call = call.outside_inference()
        return self.session.explain(lambda: self._run(call, values, maps=maps, segments=segments))

    def _run(self, call: ModelCall, values: OutputValues, *, maps: bool, segments: Segments | None) -> Tracing:
        modules = self._hooked(self.session.blocks(call, feed_forward=True))
        path, scales, reading = self._read(call, values, modules)
        if not len(reading.examples):
            raise InvalidInputError(
                f"the value explained depends on no position of {type(self.model).__name__}, as a difference of equal "
                "outputs does; there is nothing to trace"
            )
        directions, constant = residual_path(self.model, path, scales, reading)
        tracing = Tracing(call, reading, path, constant, values.several, self.spread == "attention")

        def reduce(layer: Layer) -> layer_maps.LayerMap | None:
            if layer.place in directions:
                groups, keys = None, layer.call.key
                if segments is not None and layer.cross == (call.encoder is not None):
                    groups = segments.among(len(keys), keys.shape[2], keys.device).with_rest()
                tracing.updates[layer.place] = block_updates(layer, reading, directions[layer.place], groups)
            if not maps:
                return None
            made = layer_maps.checked_map(alti_map, "ALTI", layer)
            tracing.advance(layer.place, made.map, cast(Tensor, made.delta))
            return made

        layers, tracing.causal = self.session.record(call, Request(weights=maps, feed_forward=True), reduce)
        layer_maps.check_layers(self.model, layers)
        self._accept(
            layer_maps.finite_results(self.model, tracing.summed.convergence_delta),
            f"the updates of all blocks do not add up to the output of {type(self.model).__name__}",
            *(block.precision(["atb_ff_res"]) for block in path.values()),
        )
        return tracing

    def _read(
        self, call: ModelCall, values: OutputValues, modules: HookedModules
    ) -> tuple[dict[Place, Block], dict[Place, PathScales], HeadReading]:
        """Run the model once for its head, and for the blocks and norms on the residual path."""
        path, scales = dict[Place, Block](), dict[Place, PathScales]()

        def note(layer: Layer) -> None:
            scales[layer.place] = norm_scales(layer)
            if layer.place.role != "encoder":
                path[layer.place] = layer.block

        network = HeadNetwork(modules, call)
        with network.watching(self.model) as outputs:
            self.session.record(call, Request(feed_forward=True), note, passes=0)
        for place, both in scales.items():
            layer_maps.expect_finite(self.model, place, *(scale for scale in both if scale is not None))
        reading = read_head(network, call, outputs[-1], values)
        layer_maps.expect_number(self.model, reading.number)
        return path, scales, reading

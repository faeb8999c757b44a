"""What the methods have in common that make each layer's map with a reducer of their own."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from captum_norm.attr._base import AttentionMapAttribution, MapOptions, stacked_maps
from captum_norm.attr._tolerance import expect_complete, expect_finite
from captum_norm.attr._wanted import Wanted, check_seen, layer_indices
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.maps import AttributionMaps
from captum_norm.memory import MemoryBudget
from captum_norm.models.blocks import Block
from captum_norm.models.inputs import Inputs, ModelCall, bind_inputs
from captum_norm.models.libraries.huggingface import HUGGING_FACE
from captum_norm.models.libraries.registry import library_of
from captum_norm.models.stacks import Place, Role, encoder_of
from captum_norm.recording import Reducer


class MapReducer(Reducer, Protocol):
    """Makes the map of one layer.

    Attributes:
        map: (B, Q, K).
        delta: completeness error, (B,).
        precision: the least precise dtype of the block's own computation, which sets the tolerance.
    """

    map: Tensor
    delta: Tensor
    precision: torch.dtype


class LayerwiseAttribution(AttentionMapAttribution):
    """A method with a reducer for each layer.

    Attributes:
        feed_forward: whether the reducers need the tensors of the feed-forward blocks.
    """

    feed_forward: ClassVar[bool] = False

    def has_convergence_delta(self) -> bool:
        """True: the vectors must add up to what the model computed."""
        return True

    @abstractmethod
    def _reducer(self, block: Block, dtype: torch.dtype, budget: MemoryBudget, real: Tensor | None) -> MapReducer:
        """What makes a layer's map.

        Args:
            block: the layer's attention block.
            dtype: what to compute in.
            budget: how much memory pieces of the computation may take.
            real: True at real query positions, (B, Q), or None where all are.
        """

    def _maps(self, inputs: Inputs, additional_forward_args: Any, options: MapOptions) -> AttributionMaps:
        refuse_heads(self, options)
        with torch.set_grad_enabled(self._meter.differentiable):
            call = bind_inputs(self.model, inputs, additional_forward_args)
            return self._meter._with_blocks(
                call, lambda blocks: self._reduced(call, blocks, options), feed_forward=self.feed_forward
            )

    def _reduced(self, call: ModelCall, blocks: Mapping[nn.Module, Block], options: MapOptions) -> AttributionMaps:
        # One map of each layer is kept, as it is of attention weights.
        wanted = Wanted(weights=True, layers=options.layers, stacks=options.stacks)
        self._meter._expect_room(call, wanted)
        budget = MemoryBudget(self._meter._memory_budget)
        reducers: dict[Role, list[MapReducer | None]] = {}

        def make(place: Place, block: Block | None) -> Reducer | None:
            reducer = None
            if block is not None and wanted.has(place):
                queries, _ = call.positions_of(place.role)
                dtype = torch.promote_types(self._meter._accumulate, block.projection.parameter.dtype)
                reducer = self._reducer(block, dtype, budget, queries.real)
            wanted.note(place, reducer, reducers)
            return reducer

        causal = self._meter._record(call, make, blocks, budget, feed_forward=self.feed_forward)
        check_seen(self.model, reducers, wanted)
        chosen = {
            role: [
                self._checked(reducer, Place(role, index))
                for index in layer_indices(wanted.layers, len(found))
                if (reducer := found[index]) is not None
            ]
            for role, found in reducers.items()
            if wanted.has_stack(role)
        }
        maps = {role: [reducer.map for reducer in found] for role, found in chosen.items()}
        deltas = {role: [reducer.delta for reducer in found] for role, found in chosen.items()}
        return stacked_maps(call, maps, deltas, causal=causal)

    def _checked(self, reducer: MapReducer, place: Place) -> MapReducer:
        expect_finite(self.model, place, reducer.map.detach().sum(), reducer.delta)
        expect_complete(self.model, place, reducer.delta, reducer.precision)
        return reducer


def refuse_heads(method: AttentionMapAttribution, options: MapOptions) -> None:
    """For methods without maps of single heads."""
    if options.per_head:
        raise InvalidInputError(f"got per_head=True; {type(method).__name__} has no maps of single heads")


def refuse_encoder_decoder(method: AttentionMapAttribution) -> None:
    """For methods that explain one stack of layers."""
    if encoder_of(method.model) is not None:
        raise UnsupportedModelError(
            f"got the encoder–decoder model {type(method.model).__name__}; {type(method).__name__} explains one stack "
            "of layers: pass the encoder alone, as model.get_encoder()"
        )


def refuse_other_libraries(method: AttentionMapAttribution) -> None:
    """For methods that run a model's layers themselves on copies of an example, which must be along the first axis."""
    if library_of(method.model) is not HUGGING_FACE:
        raise UnsupportedModelError(
            f"got {type(method.model).__name__}, which is no model of Hugging Face; {type(method).__name__} explains "
            "those alone, whose layers have the batch first"
        )

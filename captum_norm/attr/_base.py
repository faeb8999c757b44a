"""The common interface of all methods: ``attribute`` and ``maps``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from captum.attr import Attribution
from captum.log import log_usage
from torch import Tensor, nn

from captum_norm.aggregation import AGGREGATIONS
from captum_norm.arguments import as_truth, one_of, shown
from captum_norm.attr._assembly import Measurements, real_queries, stack_name, stacked
from captum_norm.attr._head import SeenPosition, seen_position
from captum_norm.attr._tolerance import finite_results
from captum_norm.attr._wanted import as_layers, as_stacks
from captum_norm.attr.measure import MeterOptions, NormMeter
from captum_norm.errors import InvalidInputError
from captum_norm.maps import AttributionMaps
from captum_norm.models.heads import HeadPosition, ReadPosition, pooled_rows, positions_of_examples, read_position
from captum_norm.models.inputs import Inputs, ModelCall, bind_inputs
from captum_norm.models.stacks import Role, StackName
from captum_norm.models.verification import refuse_mixing

Position = int | ReadPosition | Sequence[int] | Tensor | None


class MapOptions(NamedTuple):
    """Which maps are wanted, and for the methods that explain a number of the output, which one."""

    layers: Sequence[int] | None
    per_head: bool = False
    stacks: Collection[StackName] | None = None
    target: Any = None
    position: Position = None


class AttentionMapAttribution(Attribution, ABC):
    """Base of the methods that explain a Transformer by one map a layer.

    Args:
        model: a model of Hugging Face, one built with torch.nn's attention, or a translation model of fairseq; left
            exactly as it is.
        aggregation: how ``attribute`` makes one map of all layers: ``"rollout"`` (product of the row-normalised maps),
            ``"product"`` (of the maps themselves, its row normalised) or ``"mean"``.
        options: see :class:`captum_norm.MeterOptions`.

    Raises:
        InvalidInputError: if the model is no module or the aggregation is unknown.
    """

    def __init__(self, model: nn.Module, aggregation: str, **options: Unpack[MeterOptions]) -> None:
        refuse_unknown(type(self), options)
        super().__init__(model)
        self.model = model
        self.aggregation = one_of("aggregation", aggregation, AGGREGATIONS)
        self._meter = NormMeter(model, **options)
        self._head: tuple[list[nn.Module], SeenPosition | None] | None = None

    def maps(
        self,
        inputs: Inputs,
        additional_forward_args: Any = None,
        *,
        layers: Sequence[int] | None = None,
        per_head: bool = False,
        stacks: Collection[StackName] | None = None,
    ) -> AttributionMaps:
        """The map of every layer.

        Args:
            inputs: token ids (B, S), embeddings (B, S, D), pixel values, a tuple of tensors, or a mapping such as a
                tokenizer's output. A left-padded batch is explained as its examples would be alone: each is moved to
                begin at position 0 before the model sees it, which matters where positions are absolute (GPT-2, BERT).
            additional_forward_args: the model's further positional arguments (attention mask first).
            layers: 0-based indices of the layers wanted, negative ones from the last; all if None.
            per_head: one map a head instead of one a layer.
            stacks: which stacks of an encoder–decoder model to explain, of ``encoder``, ``decoder`` and ``cross``; all
                if None.

        Returns:
            the maps, with mixing ratios and completeness errors where the method defines them.

        Raises:
            CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.
        """
        options = MapOptions(layers, per_head, stacks)
        return finite_results(self.model, self._maps_and_head(inputs, additional_forward_args, options))

    @overload
    def attribute(
        self,
        inputs: Tensor | Mapping[str, Any],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        position: Position = None,
        layer: int | None = None,
        return_convergence_delta: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def attribute(
        self,
        inputs: Tensor | Mapping[str, Any],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        position: Position = None,
        layer: int | None = None,
        return_convergence_delta: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def attribute(
        self,
        inputs: tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        position: Position = None,
        layer: int | None = None,
        return_convergence_delta: bool = False,
    ) -> tuple[Any, ...]: ...

    @log_usage()  # type: ignore[untyped-decorator]
    def attribute(
        self,
        inputs: Inputs,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        position: Position = None,
        layer: int | None = None,
        return_convergence_delta: bool = False,
    ) -> Tensor | tuple[Any, ...]:
        """How much each input position contributes to one output position.

        Args:
            inputs: as for :meth:`maps`.
            target: the output to explain, as everywhere in Captum, for methods that explain one. It is not used by
                methods whose maps do not depend on an output class.
            additional_forward_args: the model's further positional arguments (attention mask first).
            position: the output position to explain: an index (negative from the end), one index for each example,
                ``"first"`` or ``"last"`` real position, or ``"mean"`` of the real positions. None: what the model's
                head reads; of a model with an output at every position the last if it is causal, else the mean.
            layer: explain this layer alone, in the units of its map (0-based, negative from the last); None
                aggregates all layers.
            return_convergence_delta: also return the largest completeness error of the layers, (B,).

        Returns:
            (B, S), one non-negative score for each input position, 0 at padding; rows of a rollout or product sum to
            1. A tuple of this one tensor if ``inputs`` is a tuple, as everywhere in Captum.

        Raises:
            InvalidInputError: for a position outside the sequence or in its padding, none where the head reads neither
                one position nor the mean, an unknown layer, or ``return_convergence_delta`` for a method that has none.
            CaptumNormError: see :meth:`maps`.
        """
        if as_truth("return_convergence_delta", return_convergence_delta) and not self.has_convergence_delta():
            raise InvalidInputError(f"{type(self).__name__} decomposes nothing, so it has no convergence delta")
        layers = None if layer is None else [layer]
        options = MapOptions(layers, target=target, position=position)
        scores, delta = finite_results(self.model, self._explain(inputs, additional_forward_args, options))
        # As everywhere in Captum, a tuple in gives a tuple out.
        attributions = (scores,) if isinstance(inputs, tuple) else scores
        if delta is None or not return_convergence_delta:
            return attributions
        return attributions, delta

    def scores(self, maps: AttributionMaps, position: Position = None, *, aggregate: bool = True) -> Tensor:
        """What :meth:`attribute` returns, from maps that are already there: of long inputs, or for several positions.

        (Not of :class:`captum_norm.DecompX` with a target, whose scores come from no map.)

        Args:
            maps: of :meth:`maps`, of all layers or of one.
            position: the output position to explain, as for :meth:`attribute`.
            aggregate: make one map of all layers; False explains the one layer that ``maps`` has.

        Returns:
            (B, S).

        Raises:
            InvalidInputError: for a position outside the sequence or in its padding, none where the head reads neither
                one position nor the mean, or several layers where there must be one.
            UnsupportedModelError: if the layers of a model are aggregated that mixes positions by more than attention.
        """
        if not isinstance(maps, AttributionMaps):
            raise InvalidInputError(f"got maps {shown(maps)}; expected what maps() returns")
        if aggregate:
            refuse_mixing(self.model)
        with torch.set_grad_enabled(self._meter.differentiable):
            return finite_results(self.model, self._scores(maps, position, aggregate=aggregate))

    def count_layers(self, inputs: Inputs, additional_forward_args: Any = None) -> int:
        """How many layers there are to explain; see :meth:`captum_norm.NormMeter.count_layers`."""
        return self._meter.count_layers(inputs, additional_forward_args)

    def compute_convergence_delta(
        self, attributions: Tensor | tuple[Tensor], inputs: Inputs, additional_forward_args: Any = None
    ) -> Tensor:
        """The largest completeness error of the layers for some inputs.

        Args:
            attributions: what :meth:`attribute` returned for these inputs, (B, S).
            inputs: as for :meth:`maps`.
            additional_forward_args: as for :meth:`maps`.

        Returns:
            (B,): max over layers of ‖Σ_j v_ij + bias − what the model computed‖ relative to the latter.

        Raises:
            InvalidInputError: if the method has no convergence delta, or the attributions are of other inputs.
        """
        delta = self.maps(inputs, additional_forward_args).convergence_delta
        if delta is None:
            raise InvalidInputError(f"{type(self).__name__} decomposes nothing, so it has no convergence delta")
        return delta_for(attributions, delta.amax(1))

    @abstractmethod
    def _maps(self, inputs: Inputs, additional_forward_args: Any, options: MapOptions) -> AttributionMaps:
        """What :meth:`maps` returns."""

    def _explain(
        self, inputs: Inputs, additional_forward_args: Any, options: MapOptions
    ) -> tuple[Tensor, Tensor | None]:
        """What :meth:`attribute` returns, (B, S), and the completeness error, (B,)."""
        maps = self._maps_and_head(inputs, additional_forward_args, options)
        scores = self.scores(maps, options.position, aggregate=options.layers is None)
        return scores, None if maps.convergence_delta is None else maps.convergence_delta.amax(1)

    def _maps_and_head(self, inputs: Inputs, additional_forward_args: Any, options: MapOptions) -> AttributionMaps:
        """The maps; of a model whose class does not tell where its head reads, that is seen, too, once."""
        options = options._replace(
            layers=as_layers(options.layers),
            per_head=as_truth("per_head", options.per_head),
            stacks=as_stacks(self.model, options.stacks),
        )
        maps = self._maps(inputs, additional_forward_args, options)
        if maps.cross is None and read_position(self.model, causal=maps.decoder is not None) is None:
            modules = list(self.model.modules())
            if (self._head is None or self._head[0] != modules) and _several(maps):
                self._head = modules, seen_position(bind_inputs(self.model, inputs, additional_forward_args))
        return maps

    def _head_position(self, maps: AttributionMaps) -> HeadPosition:
        """Where the head reads."""
        causal = maps.decoder is not None
        known = read_position(self.model, causal=causal)
        if known is None and self._head is not None:
            _, seen = self._head
            known = ("last" if causal else "mean") if seen == "each" else seen
        if known is None and _several(maps):
            raise InvalidInputError(
                f"got no position, and the head of {type(self.model).__name__} reads neither the first, nor the last, "
                'nor the mean of all, or cannot be seen through; pass position=, an index, "first", "last" or "mean"'
            )
        return known or "mean"

    def _scores(self, maps: AttributionMaps, position: Position, *, aggregate: bool) -> Tensor:
        """What :meth:`scores` returns."""
        stack = maps.self_attention
        head = self._head_position(maps) if position is None else None
        rows = position_rows(position, head, maps.real, stack, self.model).unsqueeze(1)
        return (self._aggregate(stack, rows) if aggregate else rows @ only_layer(stack)).squeeze(1)

    def _aggregate(self, stack: Tensor, rows: Tensor) -> Tensor:
        """Rows of one map made of all layers: (B, L, Q, K), weights of the queries (B, P, Q) -> (B, P, K)."""
        return AGGREGATIONS[self.aggregation](stack, rows)


def refuse_unknown(method: type, options: Mapping[str, Any]) -> None:
    """Refuse options that there are not, in the name of the class that was called.

    Raises:
        TypeError: for the first one, as Python raises it.
    """
    for name in options:
        if name not in MeterOptions.__annotations__:
            raise TypeError(f"{method.__name__}() got an unexpected keyword argument {name!r}")


def delta_for(attributions: Tensor | tuple[Tensor], delta: Tensor) -> Tensor:
    """The completeness error, (B,), of attributions, which must be of as many examples."""
    given: Any = attributions[0] if isinstance(attributions, tuple) and len(attributions) == 1 else attributions
    if not isinstance(given, Tensor) or given.is_nested or given.dim() == 0:
        raise InvalidInputError(f"got attributions {shown(attributions)}; expected what attribute() returned")
    if len(given) != len(delta):
        raise InvalidInputError(f"got attributions of {len(given)} examples for {len(delta)} inputs")
    return delta


def attribution_maps(
    measured: Mapping[StackName, Measurements],
    choose: Callable[[StackName, Measurements], tuple[Tensor, Tensor | None]],
) -> AttributionMaps:
    """Maps of all stacks; ``choose`` takes maps and mixing ratio out of one stack's measurements."""
    chosen = {name: choose(name, stack) for name, stack in measured.items()}
    maps = {name: stack for name, (stack, _) in chosen.items()}
    ratios = [ratio for _, ratio in chosen.values()]
    deltas = [m.convergence_delta for m in measured.values() if m.convergence_delta is not None]
    inputs, *_ = measured.values()
    return AttributionMaps(
        encoder=maps.get("encoder"),
        decoder=maps.get("decoder"),
        cross=maps.get("cross"),
        mixing_ratio=ratios[0] if len(ratios) == 1 else None,
        convergence_delta=torch.cat([delta.to(deltas[0].device) for delta in deltas], 1) if deltas else None,
        real=inputs.real,
        decoder_real=measured["cross"].real if "cross" in measured else None,
        tokens=inputs.tokens,
    )


def stacked_maps(
    call: ModelCall, maps: Mapping[Role, Sequence[Tensor]], deltas: Mapping[Role, Sequence[Tensor]], *, causal: bool
) -> AttributionMaps:
    """Maps of all stacks, at the positions that the user's inputs had.

    Args:
        call: the call that was explained.
        maps: each layer's map, (B, [H,] Q, K).
        deltas: each layer's completeness error, (B,), empty for a method without one.
        causal: whether the one stack of a model that is no encoder–decoder looks back only.
    """
    stacks: dict[StackName, Tensor] = {}
    for role, parts in maps.items():
        queries, keys = call.positions_of(role)
        stacks[stack_name(role, causal=causal)] = stacked(parts, {-2: queries, -1: keys})
    every = [delta for found in deltas.values() for delta in found]
    cross = stacks.get("cross")
    first = next(iter(maps))
    return AttributionMaps(
        encoder=stacks.get("encoder"),
        decoder=stacks.get("decoder"),
        cross=cross,
        mixing_ratio=None,
        convergence_delta=stacked(every, {}) if every else None,
        real=real_queries(call, first, maps[first][0].shape[-2]),
        tokens=call.tokens,
        decoder_real=None if cross is None else real_queries(call, "cross", cross.shape[-2]),
    )


def only_layer(stack: Tensor) -> Tensor:
    """The map of a stack that has one: (B, 1, Q, K) -> (B, Q, K)."""
    if stack.shape[1] != 1:
        raise InvalidInputError(f"got the maps of {stack.shape[1]} layers and aggregate=False; expected one layer")
    return stack[:, 0]


def _several(maps: AttributionMaps) -> bool:
    """Whether some example has several positions to choose from."""
    return bool(maps.real.sum(1).max() > 1)


def position_rows(
    position: Position, head: HeadPosition | None, real: Tensor, like: Tensor, model: nn.Module
) -> Tensor:
    """How much each query's row counts, (B, Q).

    Args:
        position: see :meth:`AttentionMapAttribution.attribute`.
        head: what the head reads, where no position is given.
        real: True at real positions, (B, Q).
        like: a tensor of the dtype and on the device wanted.
        model: the model, whose configuration says how many tokens stand before the patches.

    Raises:
        InvalidInputError: for a position outside the sequence or in its padding.
    """
    chosen = head if position is None else position
    # By name a user asks for the mean alone.
    if isinstance(chosen, str) and (position is None or chosen == "mean"):
        pooled = pooled_rows(chosen, real, model)
        if pooled is not None:
            return pooled.to(like)
    rows = torch.zeros_like(real, dtype=like.dtype, device=like.device)
    rows[torch.arange(len(real), device=like.device), positions_of_examples(chosen, real)] = 1
    return rows

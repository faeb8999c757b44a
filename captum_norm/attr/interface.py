"""The calls that every method answers: ``maps``, ``attribute``, ``scores`` and Captum's."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, overload

import torch
from captum.attr import Attribution
from captum.log import log_usage
from torch import Tensor, nn

from captum_norm.attr.meter import count_layers
from captum_norm.checks import check_bool, check_count, quoted
from captum_norm.errors import InvalidInputError
from captum_norm.forward.checks import delta_for, finite_results
from captum_norm.forward.request import Request
from captum_norm.forward.session import Session
from captum_norm.models.call import ModelCall
from captum_norm.models.inputs import Inputs
from captum_norm.models.model import refuse_mixing
from captum_norm.models.objects import Texts
from captum_norm.models.outputs import Position
from captum_norm.models.stacks import StackName
from captum_norm.results.maps import AttributionMaps, Scores


class MapsInterface(Attribution, ABC):
    """What users call, the same for all methods; :class:`AttentionMapAttribution` is what a method defines.

    Attributes:
        model: the model explained.
        session: runs it.
        decomposes: see :class:`AttentionMapAttribution`.
    """

    model: nn.Module
    session: Session
    decomposes: ClassVar[bool]

    def maps(
        self,
        inputs: Inputs,
        additional_forward_args: Any = None,
        *,
        layers: Sequence[int] | None = None,
        per_head: bool = False,
        stacks: Collection[StackName] | None = None,
        last: int | None = None,
        segments: Tensor | None = None,
        together: bool = False,
    ) -> AttributionMaps:
        """Compute the map of every layer.

        Args:
            inputs: token ids (B, S), embeddings (B, S, D), pixel values, a tuple of tensors, a mapping such as a
                tokenizer's output, or a text or a list of texts if the tokenizer is known. Examples of a
                left-padded batch are shifted to start at position 0, so each is explained as it would be alone; this
                matters if positions are absolute (GPT-2, BERT).
            additional_forward_args: the model's further positional arguments (attention mask first).
            layers: 0-based indices of the layers, negative ones from the last; all if None.
            per_head: compute one map per head instead of one per layer.
            stacks: which stacks to explain: of an encoder–decoder model ``encoder``, ``decoder`` and ``cross``, all if
                None; of a model with towers ``text``, ``cross`` if its layers attend to a tower's positions, and the
                towers by name, such as ``vision``; those that read the tokens if None.
            last: compute the rows of so many last positions alone, such as those that predict a generated answer, in
                memory of this number times the number of keys; in an encoder–decoder model, the decoder's. All if None.
            segments: groups of keys, such as sentences or passages, whose vectors are added before a norm or distance
                is taken: the segment of each key, (B, K) integers from 0 on, or −1 for none. Columns are the segments.
            together: add the vectors of all queries, each divided by its own σ, before a norm or distance is taken:
                one row for a span of positions.

        Returns:
            the maps, with mixing ratios and completeness errors where the method defines them.

        Raises:
            CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.
        """
        request = Request(layers, stacks, per_head, last=last)
        call, request = self.call_of(inputs, additional_forward_args, request, segments, together=together)
        return finite_results(self.model, self.observed_maps(call, request))

    @overload
    def attribute(
        self,
        inputs: Tensor | Texts,
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
        inputs: Tensor | Texts,
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
        inputs: tuple[Tensor, ...] | Mapping[str, Any],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        position: Position = None,
        layer: int | None = None,
        return_convergence_delta: bool = False,
    ) -> Any: ...

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
    ) -> Scores | tuple[Any, ...]:
        """Compute how much each input position contributes to one output position.

        Args:
            inputs: as for :meth:`maps`.
            target: the output to explain, as everywhere in Captum; ignored by methods whose maps do not depend on an
                output.
            additional_forward_args: the model's further positional arguments (attention mask first).
            position: the output position to explain: an index (negative from the end), one index per example,
                ``"first"`` or ``"last"`` real position, or ``"mean"`` of the real positions, all among the inputs'.
                None: what the model's head reads, a virtual token or not; for a model with an output at every position,
                the last if it is causal, else the mean. In an encoder–decoder model a position of the decoder, by
                default the last.
            layer: explain this layer alone, in the units of its map (0-based, negative from the last); None
                aggregates all layers.
            return_convergence_delta: also return the largest completeness error over layers, (B,).

        Returns:
            (B, S), one non-negative score per input position, 0 at padding. Rows of a rollout or product sum to 1,
            with the scores of virtual tokens, which only :meth:`scores` returns. A 1-tuple if ``inputs`` is a tuple, as
            everywhere in Captum. For an encoder–decoder model, which has two inputs, the tuple
            :class:`captum_norm.SourceAndPrefix` of their scores, (B, S) and (B, T).

        Raises:
            InvalidInputError: for a position outside the sequence or in padding, no position if the head reads neither
                one position nor the mean, an unknown layer, or ``return_convergence_delta`` for a method without one.
            CaptumNormError: see :meth:`maps`.
        """
        if check_bool("return_convergence_delta", return_convergence_delta) and not self.decomposes:
            raise InvalidInputError(f"{type(self).__name__} decomposes nothing, so it has no convergence delta")
        layers = None if layer is None else [layer]
        call, request = self.call_of(inputs, additional_forward_args, Request(layers, target=target, position=position))
        scores, delta = finite_results(self.model, self.explain(call, request))
        # As everywhere in Captum, a tuple in gives a tuple out.
        attributions = (scores,) if isinstance(inputs, tuple) and isinstance(scores, Tensor) else scores
        if delta is None or not return_convergence_delta:
            return attributions
        return attributions, delta

    def scores(self, maps: AttributionMaps, position: Position = None, *, aggregate: bool = True) -> Any:
        """Compute the scores of :meth:`attribute` from existing maps: of long inputs, or for several positions.

        (Not those of :class:`captum_norm.DecompX` with a target, which come from no map.)

        Args:
            maps: returned by :meth:`maps`, of all layers or of one.
            position: the output position to explain, as for :meth:`attribute`.
            aggregate: combine all layers; False explains the only layer in ``maps``.

        Returns:
            (B, K): those of :meth:`attribute`, and before them those of virtual tokens or cached positions, if any; a
            :class:`captum_norm.SourceAndPrefix` for maps of an encoder–decoder model.

        Raises:
            InvalidInputError: for a position outside the sequence or in padding, no position if the head reads neither
                one position nor the mean, several layers without ``aggregate``, a product of maps over a cache, or maps
                of an encoder–decoder model that the aggregation cannot combine.
            UnsupportedModelError: if layers are aggregated of a model that mixes positions outside attention, too.
        """
        if not isinstance(maps, AttributionMaps):
            raise InvalidInputError(f"got maps {quoted(maps)}; expected what maps() returns")
        if aggregate:
            refuse_mixing(self.model)
        with torch.set_grad_enabled(self.session.differentiable):
            return finite_results(self.model, self.scores_of(maps, position, aggregate=aggregate))

    def scores_of_last(
        self, inputs: Inputs, last: int, additional_forward_args: Any = None
    ) -> tuple[Scores, Tensor | None]:
        """Compute the scores of each of the last positions in one forward pass, such as those of a generated answer.

        Args:
            inputs: as for :meth:`maps`.
            last: R, the number of positions. With the aggregation ``"mean"`` only their rows are computed; other
                aggregations need the rows of all positions.
            additional_forward_args: as for :meth:`maps`.

        Returns:
            (B, R, S): row r is what :meth:`attribute` returns for position S − R + r; for an encoder–decoder model a
            :class:`captum_norm.SourceAndPrefix` of (B, R, S) and (B, R, T), of decoder positions. And the largest
            completeness error over layers, (B,), or None for a method without one.

        Raises:
            InvalidInputError: if the sequence has fewer positions, or padding.
            CaptumNormError: see :meth:`attribute`.
        """
        call, request = self.call_of(inputs, additional_forward_args, Request())
        refuse_mixing(self.model)
        scores, delta = self.explain_last(call, call.of_last(check_count("last", last)), request)
        return finite_results(self.model, (scores, delta))

    def count_layers(self, inputs: Inputs, additional_forward_args: Any = None) -> int:
        """Return the number of layers to explain; see :meth:`captum_norm.NormMeter.count_layers`."""
        return count_layers(self.session, inputs, additional_forward_args)

    def compute_convergence_delta(
        self, attributions: Tensor | tuple[Tensor, ...], inputs: Inputs, additional_forward_args: Any = None
    ) -> Tensor:
        """Compute the largest completeness error over layers.

        Args:
            attributions: what :meth:`attribute` returned for these inputs, (B, S).
            inputs: as for :meth:`maps`.
            additional_forward_args: as for :meth:`maps`.

        Returns:
            (B,): max over layers of ‖Σ_j v_ij + bias − what the model computed‖ relative to the latter.

        Raises:
            InvalidInputError: if the method has no convergence delta, or the attributions do not fit the inputs.
        """
        delta = self.maps(inputs, additional_forward_args).convergence_delta
        if delta is None:
            raise InvalidInputError(f"{type(self).__name__} decomposes nothing, so it has no convergence delta")
        return delta_for(attributions, delta.amax(1))

    def has_convergence_delta(self) -> bool:
        """Return whether the method's vectors must add up to what the model computed."""
        return self.decomposes

    @abstractmethod
    def call_of(
        self,
        inputs: Inputs,
        additional_forward_args: Any,
        request: Request,
        segments: Tensor | None = None,
        *,
        together: bool = False,
    ) -> tuple[ModelCall, Request]:
        """Bind the inputs to the model and check that the method supports the request."""

    @abstractmethod
    def observed_maps(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Compute the maps, and see where the model's head reads."""

    @abstractmethod
    def explain(self, call: ModelCall, request: Request) -> tuple[Scores, Tensor | None]:
        """Compute the scores of the position explained, (B, S), and the completeness error, (B,)."""

    @abstractmethod
    def explain_last(self, call: ModelCall, of_last: ModelCall, request: Request) -> tuple[Scores, Tensor | None]:
        """Compute what :meth:`scores_of_last` returns, from the whole call or that of the last positions."""

    @abstractmethod
    def scores_of(self, maps: AttributionMaps, position: Position, *, aggregate: bool) -> Scores:
        """Compute what :meth:`scores` returns, without checks."""

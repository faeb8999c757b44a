"""Decomposes output values by backward passes of the frozen network: the base class of its rule sets."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from captum_norm.attr.frozen.graph import GraphNetwork
from captum_norm.attr.frozen.network import HookedModules
from captum_norm.attr.frozen.results import Decomposition
from captum_norm.attr.frozen.rules import RuleSet
from captum_norm.attr.meter import refuse_unknown
from captum_norm.attr.output import OutputAttribution
from captum_norm.errors import IncompleteDecompositionError, InvalidInputError, UnsupportedModelError
from captum_norm.forward.checks import TOLERANCE, expect_number, finite_results
from captum_norm.forward.gradients import gradients_on, gradients_through
from captum_norm.forward.request import Request
from captum_norm.forward.room import expect_room_for_gradients, may_be_large
from captum_norm.forward.stacking import scores_of_inputs
from captum_norm.models.blocks import check_batch_first
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import evaluating
from captum_norm.models.known import refuse_mixing
from captum_norm.models.objects import Explainable
from captum_norm.models.outputs import (
    OutputValues,
    Readout,
)
from captum_norm.models.positions import Positions
from captum_norm.models.precision import accumulation_dtype, coarsest
from captum_norm.models.projections import NormReader, Projection
from captum_norm.results.maps import AttributionMaps, MapUnits, Scores, SourceAndPrefix

Values = Callable[[Any], tuple[Tensor, Tensor]]
"""From a model's output to R values of each example, and the sizes of what was rounded in them, (B, R) each."""
Parts = tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]
"""Scores of R values by sequence, (B, R, S) each, the biases' part, the values and their rounded sizes, (B, R) each,
and the frozen network's deviation."""


class RelevanceAttribution(OutputAttribution):
    """Base class of the rule sets: decomposes output values by gradient × input of the frozen network.

    Args:
        model: a Hugging Face model; left unchanged.
        readout: the values to explain instead of logits: see :data:`captum_norm.models.outputs.Readout`.
        memory_budget: see :class:`captum_norm.MeterOptions`.
        tokenizer: see :class:`captum_norm.MeterOptions`.

    Attributes:
        rules: of the class: what the network's steps pass on.
    """

    rules: ClassVar[RuleSet]
    mapped = False
    units = MapUnits("relevance", "relevance", aggregation="propagated", target="part of the output")
    batch_first = True

    def __init__(
        self,
        model: Explainable,
        *,
        readout: Readout | None = None,
        memory_budget: int | None = None,
        tokenizer: Any = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), unknown, ())
        super().__init__(model, readout=readout, memory_budget=memory_budget, tokenizer=tokenizer)

    def explain(self, call: ModelCall, request: Request) -> tuple[Scores, Tensor | None]:
        """Decompose the output value requested."""
        if request.layers is not None:
            raise InvalidInputError(
                f"got layer={request.layers[0]}; a layer's parts do not add up to the output that is explained"
            )
        parts = self.decomposition(call, self._value(call, request))
        return scores_of_inputs(call, parts.scores), parts.convergence_delta

    def maps_of(self, call: ModelCall, request: Request) -> AttributionMaps:  # noqa: ARG002 - there are none
        """Refuse: relevance has no map of a layer."""
        raise InvalidInputError(
            f"{type(self).__name__} explains values of the output and has no maps of layers; call attribute"
        )

    def _prepared(self, call: ModelCall) -> ModelCall:
        """Take the call out of inference mode; refuse models whose layers cannot be chained, and caches."""
        refuse_mixing(self.model)
        before = call.before
        if before.past:
            kept = "cached positions" if before.cached else "virtual tokens of a tuned prefix"
            way = "pass the whole sequence without a cache, or take" if before.cached else "take"
            raise InvalidInputError(
                f"got {before.past} {kept}, keys and values without the input vectors that {type(self).__name__} "
                f"attributes to; {way} another method, such as norm or alti"
            )
        with gradients_on():
            return call.outside_inference()

    def _hooked_modules(self, call: ModelCall) -> HookedModules:
        blocks = self.session.blocks(call)
        check_batch_first(self.model, blocks.values(), type(self).__name__)
        gated = next((block for block in blocks.values() if block.gated), None)
        if gated is not None:
            raise UnsupportedModelError(
                f'attention\'s output is multiplied before the output projection in "{gated.name}" of '
                f"{type(self.model).__name__}; {type(self).__name__} does not support that"
            )
        return self._hooked(blocks)

    def decomposition(self, call: ModelCall, values: OutputValues, *, together: bool = False) -> Decomposition:
        """Decompose the values by a backward pass for each, or by one for their sum."""
        call = self._prepared(call)
        found = self.session.explain(lambda: self._checked(call, self._parts_of(call, values, together=together)))
        if values.several and not together:
            return found
        first = SourceAndPrefix(*(half[:, 0] for half in found.scores)) if call.encoder else found.scores[:, 0]
        return Decomposition(first, *(value[:, 0] for value in found[1:]))

    def _parts_of(self, call: ModelCall, values: OutputValues, *, together: bool) -> Parts:
        """Compute the parts of the values, or of the sum of each example's."""

        def read(output: Any) -> tuple[Tensor, Tensor]:
            numbers, rounded = values.read(call, output)
            return (numbers.sum(1, keepdim=True), rounded.sum(1, keepdim=True)) if together else (numbers, rounded)

        return self._gradient(call, read)

    def _checked(self, call: ModelCall, parts: Parts) -> Decomposition:
        """Check parts and put them in the user's order of positions."""
        halves, bias, numbers, rounded, deviation = parts
        expect_number(self.model, numbers)
        halves = [_at_real(half, place) for half, place in zip(halves, sequences(call), strict=True)]
        total, sizes = (sum(half.sum(2) for half in by_sign) for by_sign in (halves, [half.abs() for half in halves]))
        size = torch.maximum(sizes + bias.abs(), rounded).clamp(min=torch.finfo(bias.dtype).tiny)
        delta = torch.maximum((total + bias - numbers).abs() / size, deviation)
        finite_results(self.model, (*halves, bias, delta))
        self._accept(delta, f"the parts of the output of {type(self.model).__name__} do not add up to it")
        shown = [place.shift_back(half, 2) for half, place in zip(halves, sequences(call), strict=True)]
        return Decomposition(shown[0] if len(shown) == 1 else SourceAndPrefix(*shown), bias, numbers, delta)

    def _gradient(self, call: ModelCall, values: Values, rules: RuleSet | None = None) -> Parts:
        """Compute the parts of values by one backward pass of the frozen network for each."""
        if may_be_large(call):
            expect_room_for_gradients(call, self.session.sizes(call))
        with gradients_on(), evaluating(call.model):
            modules = self._hooked_modules(call)
            network = GraphNetwork(modules, call, self.rules if rules is None else rules)
            with gradients_through(self.model):
                output = network.run(call)
            numbers, rounded = values(output)
            count = numbers.shape[1]
            each = [network.relevances(numbers[:, i], again=i + 1 < count) for i in range(count)]
        scores, bias = (torch.stack(parts, 1) for parts in zip(*each, strict=True))
        dtype, deviation = accumulation_dtype(numbers.dtype), torch.stack(network.deviations).max().to(scores)
        numbers, rounded = numbers.detach().to(dtype), rounded.to(dtype)
        halves = list(scores.split([stream.shape[1] for stream in network.streams], 2))
        if network.scored_apart:
            self._expect_complete(call, modules, values)
            bias = numbers - scores.sum(2)
        return halves, bias, numbers, rounded, deviation

    def _expect_complete(self, call: ModelCall, modules: HookedModules, values: Values) -> None:
        """Check once, with attention weights as constants, that all other steps are understood.

        What a softmax keeps in the model's own code is not seen.
        """
        if not modules.complete:
            frozen = replace(self.rules, temperature=None)
            self._checked(call, self._gradient(call, lambda output: _first(values(output)), frozen))
            modules.complete = True

    def _accept(self, delta: Tensor, problem: str) -> None:
        if (delta <= TOLERANCE[delta.dtype]).all():
            return
        steps = () if self._modules is None else self._modules.steps.values()
        norms = (step.precision for step in steps if isinstance(step, NormReader))
        weights = (step.precision for step in steps if isinstance(step, Projection))
        precision = coarsest(delta.dtype, *norms, *weights)
        if not bool((delta <= TOLERANCE[precision]).all()):
            raise IncompleteDecompositionError(
                f"{problem}: relative error {float(delta.max()):.1e}, accepted {TOLERANCE[precision]:.0e} for "
                f"{precision}"
            )


def sequences(call: ModelCall) -> tuple[Positions, ...]:
    """Return the positions of the sequences that enter layers."""
    first, _ = call.positions_of("self" if call.encoder is None else "encoder")
    return (first,) if call.encoder is None else (first, call.decoder)


def _first(values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    numbers, rounded = values
    return numbers[:, :1], rounded[:, :1]


def _at_real(scores: Tensor, positions: Positions) -> Tensor:
    """Set scores (B, R, S) to 0 at padding."""
    return scores if positions.real is None else scores.where(positions.real.to(scores.device)[:, None], 0)

"""Attributes output values to the tokens by relevance propagation: gradient × input of the frozen network."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from captum_norm.attr.frozen.network import FrozenNetwork, HookedModules
from captum_norm.attr.frozen.rules import ATTN_LRP, CP_LRP, RuleSet
from captum_norm.attr.frozen.rules import GIM as GIM_RULES
from captum_norm.attr.layer_maps import scores_of_inputs
from captum_norm.attr.output import Decomposition, OutputAttribution
from captum_norm.errors import IncompleteDecompositionError, InvalidInputError, UnsupportedModelError
from captum_norm.forward.checks import TOLERANCE, expect_number, finite_results
from captum_norm.forward.gradients import gradients_on, gradients_through
from captum_norm.forward.request import Request, expect_room_for_gradients
from captum_norm.forward.session import may_be_large, refuse_unknown
from captum_norm.models.blocks import check_batch_first
from captum_norm.models.call import ModelCall, Positions
from captum_norm.models.hooks import evaluating
from captum_norm.models.model import refuse_mixing
from captum_norm.models.objects import Explainable
from captum_norm.models.outputs import OutputValues, Readout
from captum_norm.models.precision import least_precise
from captum_norm.results.maps import AttributionMaps, MapUnits, Scores, SourceAndPrefix

Parts = tuple[list[Tensor], Tensor, Tensor, Tensor, tuple[str, Tensor]]
"""Scores of P values by sequence, (B, P, S) each, the biases' part, the values and their rounded sizes, (B, P) each,
and the step whose line is farthest from what the model computed, with its deviation."""


class RelevanceAttribution(OutputAttribution):
    """Base class of the rule sets: decomposes output values by gradient × input of the frozen network."""

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
        """Decompose the output value requested; DecompX, without one, aggregates its maps."""
        if not self._explains_output(request.target):
            return super().explain(call, request)
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
        before = call.prefix
        if before.past:
            keys = "cached positions" if before.cached else "virtual tokens of a tuned prefix"
            way = "pass the whole sequence without a cache, or take" if before.cached else "take"
            raise InvalidInputError(
                f"got {before.past} {keys}, keys and values without the input vectors that {type(self).__name__} "
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
        made = self.session.explain(lambda: self._checked(call, self._parts_of(call, values, together=together)))
        if values.several and not together:
            return made
        first = SourceAndPrefix(*(half[:, 0] for half in made.scores)) if call.encoder else made.scores[:, 0]
        return Decomposition(first, *(value[:, 0] for value in made[1:]))

    def _parts_of(
        self, call: ModelCall, values: OutputValues, *, together: bool, rules: RuleSet | None = None
    ) -> Parts:
        """Compute the parts of the values, or of the sum of each example's, by one backward pass for each."""
        if may_be_large(call):
            expect_room_for_gradients(call, self.session.sizes(call))
        rules, modules = rules or self.rules, self._hooked_modules(call)
        with gradients_on(), evaluating(call.model):
            network = FrozenNetwork(modules, call, rules)
            with gradients_through(self.model):
                output = network.run()
            numbers, rounded = values.read(call, output)
            if together:
                numbers, rounded = numbers.sum(1, keepdim=True), rounded.sum(1, keepdim=True)
            count = numbers.shape[1]
            each = [network.relevances(numbers[:, i], again=i + 1 < count) for i in range(count)]
        scores, bias = (torch.stack(parts, 1) for parts in zip(*each, strict=True))
        numbers, rounded = numbers.detach().to(bias), rounded.to(bias)
        if network.scored_apart:
            # What a softmax keeps in the model's own code is not seen, so all other steps are checked once.
            if not modules.complete:
                constant = replace(rules, temperature=None)
                self._checked(call, self._parts_of(call, values, together=together, rules=constant))
                modules.complete = True
            bias = numbers - scores.sum(2)
        halves = list(scores.split([stream.shape[1] for stream in network.streams], 2))
        return halves, bias, numbers, rounded, network.largest_deviation()

    def _checked(self, call: ModelCall, parts: Parts) -> Decomposition:
        """Check parts and put them in the user's order of positions."""
        halves, bias, numbers, rounded, largest = parts
        expect_number(self.model, numbers)
        deviation = self._expect_agreement(largest).to(numbers)
        positions = sequences(call)
        halves = [_at_real(half, place) for half, place in zip(halves, positions, strict=True)]
        total, sizes = (sum(half.sum(2) for half in by_sign) for by_sign in (halves, [half.abs() for half in halves]))
        size = torch.maximum(sizes + bias.abs(), rounded).clamp(min=torch.finfo(bias.dtype).tiny)
        delta = torch.maximum((total + bias - numbers).abs() / size, deviation)
        finite_results(self.model, (*halves, bias, delta))
        self._accept(delta, f"the parts of the output of {type(self.model).__name__} do not add up to it")
        shown = [place.shift_back(half, 2) for half, place in zip(halves, positions, strict=True)]
        return Decomposition(shown[0] if len(shown) == 1 else SourceAndPrefix(*shown), bias, numbers, delta)

    def _expect_agreement(self, largest: tuple[str, Tensor]) -> Tensor:
        """Refuse a step whose line is not what the model computed; return its deviation."""
        step, deviation = largest
        self._accept(
            deviation, f'the frozen network does not compute what {type(self.model).__name__} does in "{step}"'
        )
        return deviation

    def _accept(self, delta: Tensor, problem: str) -> None:
        if (delta <= TOLERANCE[delta.dtype]).all():
            return
        precision = least_precise(delta.dtype, *(() if self._modules is None else self._modules.precisions))
        if not bool((delta <= TOLERANCE[precision]).all()):
            raise IncompleteDecompositionError(
                f"{problem}: relative error {float(delta.max()):.1e}, accepted {TOLERANCE[precision]:.0e} for "
                f"{precision}"
            )


def sequences(call: ModelCall) -> tuple[Positions, ...]:
    """Return the positions of the sequences that enter layers."""
    first, _ = call.positions_of("self" if call.encoder is None else "encoder")
    return (first,) if call.encoder is None else (first, call.decoder)


def _at_real(scores: Tensor, positions: Positions) -> Tensor:
    """Set scores (B, R, S) to 0 at padding."""
    return scores if positions.real is None else scores.where(positions.real.to(scores.device)[:, None], 0)


class CPLRP(RelevanceAttribution):
    """CP-LRP [Ali et al. 2022]: signed relevance of each token for one output value, conserved up to the biases.

    Attention weights, norms' statistics and the gates of gated networks are constant; an activation passes all of its
    output's relevance to its input.

    In networks without gates whose activations are 0 at 0 (ReLU, GELU, SiLU, tanh), this is
    :class:`captum_norm.DecompX` with biases apart. They differ where activations are not, such as sigmoids, as DecompX
    gives their value at 0 to the biases; and in gated networks, as DecompX gives the gate its share.

    Args:
        model: a Hugging Face model; left unchanged.
        readout: the values to explain instead of logits: see :data:`captum_norm.models.outputs.Readout`.
        memory_budget: see :class:`captum_norm.MeterOptions`.
        tokenizer: see :class:`captum_norm.MeterOptions`.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> parts = CPLRP(BertForSequenceClassification(config)).decompose(torch.tensor([[2, 7, 9, 3]]), target=1)
        >>> bool((parts.scores.sum(1) + parts.bias - parts.number).abs().max() < 1e-5)
        True
    """

    name, title = "cp-lrp", "CP-LRP"
    rules = CP_LRP


class AttnLRP(RelevanceAttribution):
    """AttnLRP [Achtibat et al. 2024]: signed relevance of each token for one output value, in one backward pass.

    Relevance also flows through attention weights to queries and keys: the softmax passes on gradient × input, and each
    product, of queries and keys, of weights and values, and in gated networks, gives half to either factor.
    Norms' statistics and routing are constant; an activation passes all of its output's relevance to its input.

    Biases, and the softmax where it is not linear, keep a part of the relevance: ``decompose`` returns it as ``bias``,
    and with it the scores add up to the value. The convergence delta is the error of that sum. (In layers whose code
    computes softmax(scores) itself, ``bias`` is what remains; there the delta is the deviation of the forward pass, and
    the sum is checked once with constant weights.)

    The relevance of a token is that of the vector by which it enters the first layer, positions included.

    Args:
        model: a Hugging Face model; left unchanged.
        readout: the values to explain instead of logits: see :data:`captum_norm.models.outputs.Readout`.
        memory_budget: see :class:`captum_norm.MeterOptions`.
        tokenizer: see :class:`captum_norm.MeterOptions`.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> AttnLRP(model).attribute(torch.tensor([[7, 9, 3]]), target=11).shape
        torch.Size([1, 3])
    """

    name, title = "attnlrp", "AttnLRP"
    rules = ATTN_LRP


class GIM(RelevanceAttribution):
    """Gradient interaction modifications [Edin et al. 2025b]: gradient × input with three changes of the backward pass.

    Norms' statistics are constant; each product, of queries and keys, of weights and values, and in gated networks,
    gives half of its gradient to either factor; and the softmax's backward pass is that of temperature 2, in which
    keys that stand in for each other count. Activations have their true gradients.

    The scores do not conserve: activations, too, keep what is not linear. ``decompose`` returns all that is kept as
    ``bias``; the convergence delta is the error of the sum with it, as for :class:`captum_norm.AttnLRP`.

    Args:
        model: a Hugging Face model; left unchanged.
        readout: the values to explain instead of logits: see :data:`captum_norm.models.outputs.Readout`.
        memory_budget: see :class:`captum_norm.MeterOptions`.
        tokenizer: see :class:`captum_norm.MeterOptions`.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> GIM(model).attribute(torch.tensor([[7, 9, 3]]), target=11).shape
        torch.Size([1, 3])
    """

    name, title = "gim", "GIM"
    rules = GIM_RULES

"""Decomposes values of a model's output: the base classes of the methods that do."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Never, TypeVar, Unpack, cast

import torch
from torch import Tensor, nn

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.frozen.components import FEED_FORWARD, ComponentNetwork, ComponentRequest, Tap, component_request
from captum_norm.attr.frozen.edges import EdgeNetwork
from captum_norm.attr.frozen.network import FrozenNetwork, HookedModules
from captum_norm.attr.frozen.rules import RuleSet
from captum_norm.attr.layer_maps import TOLERANCE, expect_number, finite_results, scores_of_inputs, stack_name
from captum_norm.checks import check_bool
from captum_norm.errors import IncompleteDecompositionError, InvalidInputError, UnsupportedModelError
from captum_norm.forward.gradients import gradients_on, gradients_through
from captum_norm.forward.request import Request
from captum_norm.forward.session import MeterOptions, refuse_unknown
from captum_norm.models.blocks import Block
from captum_norm.models.call import WATCH, ModelCall, Positions
from captum_norm.models.hooks import evaluating
from captum_norm.models.inputs import Inputs
from captum_norm.models.objects import Explainable
from captum_norm.models.outputs import OutputValues, Readout
from captum_norm.models.precision import least_precise
from captum_norm.models.stacks import Place, Role, StackName
from captum_norm.results.components import NUMBERED, Component
from captum_norm.results.maps import AttributionMaps, MapUnits, Scores, SourceAndPrefix
from captum_norm.results.stacks import STACKS

Network = TypeVar("Network", bound=ComponentNetwork)


class Decomposition(NamedTuple):
    """Output values, decomposed: one of each example, or P, whose axis is then there.

    Attributes:
        scores: each token's contribution, (B[, P], S), 0 at padding, after those of virtual tokens, if any; for an
            encoder–decoder model a :class:`captum_norm.results.maps.SourceAndPrefix` of those of the source,
            (B[, P], S), and the target prefix, (B[, P], T).
        bias: the biases' contribution, (B[, P]); 0 if they are shared among the tokens.
        number: the value, (B[, P]).
        convergence_delta: ``|Σ scores + bias − number| / (Σ |scores| + |bias|)``, or the frozen network's deviation
            from the model if larger, (B[, P]). For a difference of two outputs, the error is relative to their sizes if
            these are larger, since they were rounded.
        components: what the components of each kind requested contribute, by stack: residual streams (B[, P], L + 1, S)
            at the first layer's input and every layer's output, heads (B[, P], L, H, S) before the output projection,
            feed-forward networks (B[, P], L, S), their neurons (B[, P], L, N[, S]), experts (B[, P], L, E, S), edges
            (B[, P], U, V).
    """

    scores: Any
    bias: Tensor
    number: Tensor
    convergence_delta: Tensor
    components: Mapping[Component, Mapping[StackName, Tensor]] = MappingProxyType({})


class OutputAttribution(AttentionMapAttribution):
    """Base class of methods that decompose values of a model's output: logits, or those of ``readout``."""

    target: ClassVar[Literal["never", "optional", "always"]] = "always"
    text_alone = True
    any_rows = False

    def __init__(self, model: Explainable, *, readout: Readout | None = None, **options: Unpack[MeterOptions]) -> None:
        super().__init__(model, "mean", **options)
        self.readout = readout
        self._modules: HookedModules | None = None

    def __getstate__(self) -> dict[str, Any]:
        # What is known about a model does not leave the process: see Session.
        return vars(self) | {"_modules": None}

    def decompose(
        self,
        inputs: Inputs,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        position: Any = None,
        together: bool = False,
        components: Component | Sequence[Component] = (),
        per_position: bool = False,
    ) -> Decomposition:
        """Decompose an output value of each example, or P values of each, in one forward pass.

        Args:
            inputs: as for :meth:`~captum_norm.NormAttribution.maps`.
            target: which value: a class or token for all, one for each example, (B,), or one for each value, (B, P); or
                a :class:`captum_norm.Difference` of such. None: the one that the model predicts there.
            additional_forward_args: as for :meth:`~captum_norm.NormAttribution.maps`.
            position: where values are read, if there are outputs at each position: as for
                :meth:`~captum_norm.NormAttribution.attribute`, or several positions of each example, (B, P), which may
                repeat.
            together: explain the sum of an example's values, such as the logits of a whole answer.
            components: also read what components inside the model contribute: ``"residual"``, ``"heads"``,
                ``"feed_forward"``, ``"neurons"``, ``"experts"``, ``"edges"``, or several of these; see
                :class:`captum_norm.ComponentAttribution`.
            per_position: read neurons at each position.

        Returns:
            the contributions. If targets or positions have an axis P, so has every tensor, behind that of the examples,
            unless the values are explained together.

        Raises:
            InvalidInputError: for a target or position outside the output.
            IncompleteDecompositionError: if the contributions do not add up to the value, as when the model computes
                something that is neither linear nor a norm, an activation or a gated pair; with components, in any
                layer.
            CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.

        Example:
            >>> import torch
            >>> from captum_norm import AttnLRP
            >>> from transformers import GPT2Config, GPT2LMHeadModel
            >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
            >>> ids = torch.tensor([[7, 9, 3, 8, 5]])  # a prompt and its answer, 3 8 5
            >>> AttnLRP(model).decompose(ids, ids[:, 2:], position=[[1, 2, 3]]).scores.shape
            torch.Size([1, 3, 5])
            >>> AttnLRP(model).decompose(ids, ids[:, 2:], position=[[1, 2, 3]], together=True).scores.shape
            torch.Size([1, 5])
        """
        parts = component_request(components, per_position=per_position)
        call, request = self.call_of(inputs, additional_forward_args, Request(target=target, position=position))
        values = replace(self.values(call, request, several=True), together=check_bool("together", together))
        return self.decomposition(call, values, parts)

    @abstractmethod
    def decomposition(
        self, call: ModelCall, values: OutputValues, components: ComponentRequest | None = None
    ) -> Decomposition:
        """Decompose the values of a call's output, or the sum of each example's."""

    def values(self, call: ModelCall, request: Request, *, several: bool = False) -> OutputValues:
        """Return the values requested, the only one of each example unless there may be several."""
        # Indices made in inference mode cannot be saved for a gradient.
        with gradients_on():
            values = OutputValues.of(call, request.target, request.position, self.readout)
        if values.several and not several:
            raise InvalidInputError(
                f"got {values.count} values of each example; attribute and maps explain one: pass them to decompose"
            )
        return values

    def _hooked(self, blocks: Mapping[nn.Module, Block]) -> HookedModules:
        """Find the modules to hook in a model, once."""
        if self._modules is None or self._modules.blocks is not blocks:
            self._modules = HookedModules(self.model, blocks, self.session.options.budget)
        return self._modules

    def _accept(self, delta: Tensor, problem: str, *precisions: torch.dtype) -> None:
        """Refuse an error above the tolerance of the least precise of some modules and those that were hooked."""
        if (delta <= TOLERANCE[delta.dtype]).all():
            return
        read = () if self._modules is None else self._modules.precisions
        precision = least_precise(delta.dtype, *read, *precisions)
        if not bool((delta <= TOLERANCE[precision]).all()):
            raise IncompleteDecompositionError(
                f"{problem}: relative error {float(delta.max()):.1e}, accepted {TOLERANCE[precision]:.0e} for "
                f"{precision}{'' if self._modules is None else self._modules.where_sums_break()}"
            )


class RelevanceAttribution(OutputAttribution):
    """Base class of the rule sets: decomposes output values by gradient × input of the frozen network."""

    rules: ClassVar[RuleSet | None]  # None: the model's own gradients, from which components alone can be read
    mapped = False
    units = MapUnits("relevance", "relevance", aggregation="propagated", target="part of the output")
    _propagate = False

    def __init__(
        self,
        model: Explainable,
        *,
        readout: Readout | None = None,
        memory_budget: int | None = None,
        tokenizer: Any = None,
        **unknown: Never,  # which Python would refuse in the name of this class
    ) -> None:
        refuse_unknown(type(self), unknown, ())
        super().__init__(model, readout=readout, memory_budget=memory_budget, tokenizer=tokenizer)

    def explain(self, call: ModelCall, request: Request) -> tuple[Scores, Tensor | None]:
        """Decompose the output value requested; DecompX aggregates its maps if hidden states are."""
        if self.explains_states(call, request):
            return super().explain(call, request)
        if request.layers is not None:
            raise InvalidInputError(
                f"got layer={request.layers[0]}; a layer's parts do not add up to the output explained: leave it out"
            )
        parts = self.decomposition(call, self.values(call, request))
        return scores_of_inputs(call, parts.scores), parts.convergence_delta

    def explains_states(self, call: ModelCall, request: Request) -> bool:
        """Whether hidden states are explained: by DecompX a layer's, or those of a model without a head."""
        if self.target == "always" or request.target is not None or self.readout is not None:
            return False
        return request.layers is not None or self.session.seen(call).headless

    def maps_of(self, call: ModelCall, request: Request) -> AttributionMaps:  # noqa: ARG002 - there are none
        """Refuse: relevance has no map of a layer."""
        raise InvalidInputError(
            f"{type(self).__name__} explains values of the output and has no maps of layers; call attribute"
        )

    def decomposition(
        self, call: ModelCall, values: OutputValues, components: ComponentRequest | None = None
    ) -> Decomposition:
        """Decompose the values by a backward pass for each, or by one for their sum."""
        explained = self._propagated if self._propagate else self._relevance
        made = self.session.explain(explained, self._prepared(call), values, components)
        if values.several and not values.together:
            return made
        scores, bias, number, delta, read = made
        first = SourceAndPrefix(*(half[:, 0] for half in scores)) if call.encoder else scores[:, 0]
        read = {kind: {name: part[:, 0] for name, part in parts.items()} for kind, parts in read.items()}
        return Decomposition(first, bias[:, 0], number[:, 0], delta[:, 0], read)

    def _propagated(self, call: ModelCall, values: OutputValues, components: ComponentRequest | None) -> Decomposition:
        """Decompose the values by propagating the tokens' parts, for a method that does."""
        raise NotImplementedError

    def _prepared(self, call: ModelCall) -> ModelCall:
        """Take the call out of inference mode; refuse models whose layers cannot be chained, and caches."""
        self.session.refuse_mixing(call)
        before = call.prefix
        if before.past:
            keys = "cached positions" if before.cached else "virtual tokens of a tuned prefix"
            way = "pass the whole sequence without a cache" if before.cached else "explain the model without them"
            other = "" if self.rules is None else ", or take another method, such as norm or alti"
            raise InvalidInputError(
                f"got {before.past} {keys}, keys and values without the input vectors that {self.called} attributes "
                f"to; {way}{other}"
            )
        with gradients_on():
            return call.outside_inference()

    def _hooked_modules(self, call: ModelCall, *, feed_forward: bool = False) -> HookedModules:
        """Find the modules to hook, once, in a model that the rules understand."""
        blocks = self.session.blocks(call, feed_forward=feed_forward)
        if self._modules is None or self._modules.blocks is not blocks:
            gated = next((block for block in blocks.values() if block.gated), None)
            if gated is not None and self.rules is not None:
                raise UnsupportedModelError(
                    f'attention\'s output is multiplied before the output projection in "{gated.name}" of '
                    f"{type(self.model).__name__}; {type(self).__name__} does not support that"
                )
        return self._hooked(blocks)

    def _relevance(
        self, call: ModelCall, values: OutputValues, components: ComponentRequest | None, rules: RuleSet | None = None
    ) -> Decomposition:
        """Decompose the values, or the sum of each example's, by one backward pass for each."""
        rules, kinds = self.rules if rules is None else rules, () if components is None else components.kinds
        modules = self._hooked_modules(call, feed_forward=not FEED_FORWARD.isdisjoint(kinds))
        with gradients_on(), evaluating(call.model):
            network: FrozenNetwork
            if components is None:
                network = FrozenNetwork(modules, call, cast(RuleSet, rules))
            else:
                network = network_of(components)(modules, call, rules, components)
            with gradients_through(self.model):
                output = network.run()
            if WATCH.get() is not None:
                call.note(output)
            numbers, rounded = values.read(call, output)
            if values.together:
                numbers, rounded = numbers.sum(1, keepdim=True), rounded.sum(1, keepdim=True)
            count = numbers.shape[1]
            each = [network.relevances(numbers[:, i], again=i + 1 < count) for i in range(count)]
        scores, bias = (torch.stack(parts, 1) for parts in zip(*each, strict=True))
        numbers, rounded = numbers.detach().to(bias), rounded.to(bias)
        if rules is None:
            bias = numbers - scores.sum(2)
        elif network.scored_apart:
            # What a softmax keeps in the model's own code is not seen, so all other steps are checked once.
            # Nor is it where as many examples as positions may have been taken for these.
            if not modules.complete or call.batch in network.lengths:
                constant = replace(rules, temperature=None)
                self._relevance(call, values, components, constant)
                modules.complete = True
            bias = numbers - scores.sum(2)
        halves = list(scores.split(network.lengths, 2))
        made = self._checked(call, halves, bias, numbers, rounded, network.largest_deviation())
        if not isinstance(network, ComponentNetwork):
            return made
        if not network.scored_apart:
            self._expect_sums(network, numbers, rounded)
        causal = bool(self.session.seen(call).causal) if rules is None else network.stacks.causal
        read = {kind: restored(call, kind, network.stacked(kind), causal=causal) for kind in kinds}
        return made._replace(components=finite_results(self.model, read))

    def activations(self, call: ModelCall, request: ComponentRequest) -> tuple[dict[Tap, Tensor], list[Tensor]]:
        """Run the model once, as it is; return the activations of components, and what enters the first layers."""
        network, output = self.run_plain(call, request, network_of(request))
        call.note(output)
        return network.activations, network.streams

    def run_plain(
        self, call: ModelCall, request: ComponentRequest, kind: Callable[..., Network]
    ) -> tuple[Network, Any]:
        """Run the model as it is inside a network of this kind; return the network and the model's output."""
        call = self._prepared(call)
        modules = self._hooked_modules(call, feed_forward=not FEED_FORWARD.isdisjoint(request.kinds))
        with torch.no_grad(), evaluating(call.model):
            network = kind(modules, call, rules=None, request=request)
            return network, network.run()

    def _expect_sums(self, network: ComponentNetwork, numbers: Tensor, rounded: Tensor) -> None:
        """Refuse a layer whose residual stream does not add up to the values with the biases behind it."""
        for number, least, reading in zip(numbers.unbind(1), rounded.unbind(1), network.readings, strict=True):
            for tap, (total, size) in reading.sums.items():
                relative = torch.maximum(size, least.to(size)).clamp(min=torch.finfo(size.dtype).tiny)
                self._accept(
                    (total - number.to(total)).abs() / relative,
                    f"the parts of the residual stream that enters {Place(tap.role, tap.layer)} of "
                    f"{type(self.model).__name__}, and those of the biases behind it, do not add up to the output",
                )

    def _checked(
        self,
        call: ModelCall,
        halves: list[Tensor],  # the scores of P values by sequence, (B, P, S) each
        bias: Tensor,  # the biases' part, (B, P)
        numbers: Tensor,  # the values, (B, P)
        rounded: Tensor,  # the sizes of what was rounded in them, (B, P)
        largest: tuple[str, Tensor],  # the step that is farthest from the model's, and its deviation
    ) -> Decomposition:
        """Check parts and put them in the user's order of positions."""
        expect_number(self.model, numbers)
        deviation = self._expect_agreement(largest).to(numbers)
        places, every = sequences(call), torch.cat(halves, 2)
        halves = [
            half if place.real is None else half.where(place.real.to(half.device)[:, None], 0)
            for half, place in zip(halves, places, strict=True)
        ]
        scores = torch.cat(halves, 2)
        size = torch.maximum(scores.abs().sum(2) + bias.abs(), rounded).clamp(min=torch.finfo(bias.dtype).tiny)
        delta = torch.maximum((scores.sum(2) + bias - numbers).abs() / size, deviation)
        finite_results(self.model, (scores, bias, delta))
        problem = f"the parts of the output of {type(self.model).__name__} do not add up to it"
        if bool(((every - scores).sum(2).abs() > TOLERANCE[delta.dtype] * size).any()):
            problem += " without those of padding, which it reads, too: pass examples without padding"
        self._accept(delta, problem)
        shown = [place.shift_back(half, 2) for half, place in zip(halves, places, strict=True)]
        return Decomposition(shown[0] if len(shown) == 1 else SourceAndPrefix(*shown), bias, numbers, delta)

    def _expect_agreement(self, largest: tuple[str, Tensor]) -> Tensor:
        """Refuse a step whose line is not what the model computed; return its deviation."""
        step, deviation = largest
        self._accept(
            deviation, f'the frozen network does not compute what {type(self.model).__name__} does in "{step}"'
        )
        return deviation


def network_of(request: ComponentRequest) -> type[ComponentNetwork]:
    """Return the network that reads these components."""
    return EdgeNetwork if "edges" in request.kinds else ComponentNetwork


def restored(
    call: ModelCall, kind: Component, stacks: Mapping[Role, Tensor], *, causal: bool
) -> dict[StackName, Tensor]:
    """Name what components contribute by stack, in the user's order of positions where these are the last axis."""
    named = {stack_name(role, causal=causal): (part, call.positions_of(role)[0]) for role, part in stacks.items()}
    axes = len("BPLS") + (kind in NUMBERED)
    return {
        name: part if part.dim() < axes else positions.restore(part, axes - 1)
        for name, (part, positions) in sorted(named.items(), key=lambda item: STACKS.index(item[0]))
    }


def sequences(call: ModelCall) -> list[Positions]:
    """Return the positions of the sequences that enter layers."""
    if call.encoder is None:
        return [call.positions_of("self")[0]]
    return [call.positions_of("encoder")[0], call.decoder]

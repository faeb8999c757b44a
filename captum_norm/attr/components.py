"""Attributes one output to components inside a model: residual streams, heads, networks, neurons, experts, edges."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from captum.attr import Attribution
from captum.log import log_usage
from torch import Tensor

from captum_norm.attr.frozen.components import ComponentRequest, component_request
from captum_norm.attr.layer_maps import real_positions_of
from captum_norm.attr.output import Decomposition, OutputAttribution, RelevanceAttribution, sequences
from captum_norm.attr.promoted import promoted_tokens
from captum_norm.checks import check_count
from captum_norm.errors import InvalidInputError
from captum_norm.forward.request import Request
from captum_norm.models.call import ModelCall
from captum_norm.models.inputs import Inputs
from captum_norm.models.objects import Explainable
from captum_norm.models.outputs import (
    OutputValues,
    Position,
    Target,
    chosen_target,
    name_outputs,
    output_scores,
)
from captum_norm.models.stacks import StackName
from captum_norm.models.token_inputs import with_outputs
from captum_norm.models.wrappers import class_of
from captum_norm.results.components import Component, ComponentScores
from captum_norm.results.maps import SourceAndPrefix
from captum_norm.results.outputs import NamedOutput

PART, CHANGE = "part of the output", "estimated change of the output"


class ModelGradient(RelevanceAttribution):
    """Gradient × input of the model itself, in which nothing is frozen."""

    name = "gradient"
    rules = None

    @property
    def called(self) -> str:
        """What messages call it: the user passed the model alone."""
        return f"the gradient of {self.session.name}"


class ComponentAttribution(Attribution):
    """What each component inside a model contributes to one output: its relevance, or an estimate of patching it.

    A component's score is ⟨a, ∂m/∂a⟩: its activation times the gradient of the number explained, m, through the network
    that a method's rules freeze. Under rules that conserve, what is read from a layer's residual stream and what the
    biases behind it keep add up to m, in every layer; an error names a layer where they do not.

    With a counterfactual input the score is ⟨a′ − a, ∂m/∂a⟩, which estimates by how much m changes if the component
    has its counterfactual activation a′: attribution patching with the model's own gradient [Nanda 2023; Syed et al.
    2023], RelP with its rules [Jafari et al. 2025]. :class:`captum_norm.ActivationPatching` measures the change itself.

    Args:
        method: a method that is linear in the network, such as ``RelP(model)``, ``CPLRP(model)``, ``DecompX(model)`` or
            ``ALTILogit(model)``, whose scores of heads and feed-forward networks are their direct updates; or a model,
            for its own gradients.
        tokenizer: tokenizes texts and names tokens, of a model that is passed alone.

    Raises:
        InvalidInputError: the method is none of these.

    Example:
        >>> import torch
        >>> from captum_norm import RelP
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> scores = ComponentAttribution(RelP(model)).attribute(torch.tensor([[7, 9, 3]]), target=11)
        >>> scores.scores.shape  # of each layer's heads, at every position
        torch.Size([1, 2, 4, 3])
    """

    def __init__(self, method: OutputAttribution | Explainable, *, tokenizer: Any = None) -> None:
        if isinstance(method, Attribution) and not isinstance(method, OutputAttribution):
            raise InvalidInputError(
                f"got the method {type(method).__name__}, which is not linear in the network; expected DecompX, CPLRP, "
                "AttnLRP, RelP, GIM or ALTILogit, or the model itself for its own gradients"
            )
        self.method: OutputAttribution = (
            method if isinstance(method, OutputAttribution) else ModelGradient(method, tokenizer=tokenizer)
        )
        super().__init__(self.method.model)
        self.model = self.method.model

    def __repr__(self) -> str:
        return f"ComponentAttribution({self.method!r})"

    @log_usage()  # type: ignore[untyped-decorator]
    def attribute(
        self,
        inputs: Inputs,
        target: Target = None,
        additional_forward_args: Any = None,
        *,
        position: Position = None,
        components: Component | Sequence[Component] = "heads",
        per_position: bool = False,
        counterfactual: Inputs | None = None,
        alignment: Tensor | None = None,
        steps: int | None = None,
        promoted: int = 0,
    ) -> ComponentScores:
        """Attribute one output of each example to components.

        Args:
            inputs: as for :meth:`captum_norm.NormAttribution.maps`.
            target: the output to explain, as for :meth:`captum_norm.DecompX.decompose`.
            additional_forward_args: as for :meth:`captum_norm.NormAttribution.maps`.
            position: where the output is read, as for :meth:`captum_norm.NormAttribution.attribute`.
            components: ``"residual"``, ``"heads"``, ``"feed_forward"``, ``"neurons"``, ``"experts"``, ``"edges"``, or
                several.
            per_position: give neurons a score at each position, too.
            counterfactual: inputs that differ in what is asked about, such as another name; of the same length.
            alignment: the position of the counterfactual that stands for each position, (B, S), if not the same.
            steps: average gradients at so many points on the way to the counterfactual's input vectors, as integrated
                gradients do [Hanna et al. 2024], instead of that at the inputs.
            promoted: how many tokens to name for each of the 100 strongest heads, feed-forward networks and neurons of
                a language model: those whose logits rise most by what it writes directly where the output is read.

        Raises:
            InvalidInputError: the model has no such components, or inputs and counterfactual do not fit.
            UnsupportedModelError: components of this kind cannot be seen in the model.
            IncompleteDecompositionError: the parts do not add up to the output in some layer, which is named.
        """
        request = component_request(components, per_position=per_position)
        if request is None:
            raise InvalidInputError('got no components; expected "heads", for example')
        method, asked = self.method, Request(target=target, position=position)
        call, asked = method.call_of(inputs, additional_forward_args, asked)
        values = method.values(call, asked)
        work = partial(method.decomposition, call, values, components=request)
        if counterfactual is not None:
            if not isinstance(method, RelevanceAttribution):
                raise InvalidInputError(
                    f"got a counterfactual for {type(method).__name__}, which has no gradients of components; expected "
                    "a method such as RelP, or the model itself"
                )
            other, _ = method.call_of(counterfactual, additional_forward_args, asked)
            work = partial(self._patched, call, values, request, other, alignment, steps)
        elif alignment is not None or steps is not None:
            raise InvalidInputError("got alignment or steps without a counterfactual; pass counterfactual=")
        named = partial(named_outputs, method, target, position, method.session.tokenizer)
        parts, outputs = with_outputs(work, named, self.model, inputs)
        halves = parts.scores if isinstance(parts.scores, SourceAndPrefix) else [parts.scores]
        unit, lengths = PART if counterfactual is None else CHANGE, [half.shape[-1] for half in halves]
        delta = None if isinstance(method, ModelGradient) else parts.convergence_delta  # whose parts need not add up
        scores = component_scores(call, method.name, unit, parts.components, lengths, outputs, delta)
        few = check_count("promoted", promoted) if promoted else 0
        return replace(scores, promoted=promoted_tokens(method, call, position, scores, few)) if few else scores

    def _patched(
        self,
        call: ModelCall,
        values: OutputValues,
        request: ComponentRequest,
        counterfactual: ModelCall,
        alignment: Tensor | None,
        steps: int | None,
    ) -> Decomposition:
        """Estimate what the activations of a counterfactual change."""
        method = cast(RelevanceAttribution, self.method)
        (here, starts), (there, ends) = (method.activations(each, request) for each in (call, counterfactual))
        move = partial(moved, call, counterfactual, alignment)
        moves = {tap: move(there[tap], activation) - activation for tap, activation in here.items()}
        request = replace(request, moves=moves)
        if steps is None:
            return method.decomposition(call, values, components=request)
        ends = [move(end, start) for end, start in zip(ends, starts, strict=True)]
        shares = [(step + 0.5) / steps for step in range(check_count("steps", steps))]
        each = [method.decomposition(call, values, components=replace(request, path=(ends, at))) for at in shares]
        read = [parts.components for parts in each]
        mean = {
            kind: {stack: torch.stack([parts[kind][stack] for parts in read]).mean(0) for stack in stacks}
            for kind, stacks in read[0].items()
        }
        return each[-1]._replace(components=mean)


def moved(call: ModelCall, other: ModelCall, alignment: Tensor | None, tensor: Tensor, like: Tensor) -> Tensor:
    """Take a counterfactual's activations at the positions that stand for those of the inputs."""
    if alignment is not None:
        batch, (length, there) = call.batch, (call.positions.length, other.positions.length)
        if call.encoder is not None or tensor.shape[:2] != (batch, there) or alignment.shape != (batch, length):
            raise InvalidInputError(
                f"got an alignment of shape {tuple(alignment.shape)} for inputs of {batch} × {length} positions and a "
                f"counterfactual of {there}; expected its position for each of the inputs', in a model of one sequence "
                "whose layers have examples first"
            )
        if not ((alignment >= 0) & (alignment < cast(int, there))).all():
            raise InvalidInputError(f"got an alignment to positions outside of the counterfactual's {there}")
        shift = 0 if other.positions.shift is None else other.positions.shift.to(tensor.device)[:, None]
        rows = (call.positions.shift_left(alignment.to(tensor.device)) - shift).clamp(min=0)
        tensor = tensor[torch.arange(batch, device=tensor.device)[:, None], rows]
    if tensor.shape != like.shape or (alignment is None and not torch.equal(real_of(call), real_of(other))):
        raise InvalidInputError(
            f"got a counterfactual with activations of shape {tuple(tensor.shape)} for {tuple(like.shape)}, or with "
            "other padding; expected as many positions in each example, or alignment= with the position for each"
        )
    return tensor


def real_of(call: ModelCall) -> Tensor:
    """Return where the sequences that enter layers have no padding, one behind the other, (B, S)."""
    halves = ((each.real, each.length or 0) for each in sequences(call))
    ones = torch.ones(call.batch, 1, dtype=torch.bool, device="cpu")
    return torch.cat([ones.expand(-1, length) if real is None else real.cpu() for real, length in halves], 1)


def named_outputs(
    method: OutputAttribution, target: Any, position: Any, tokenizer: Any, call: ModelCall, output: Any
) -> list[NamedOutput]:
    """Name the output explained of each example."""
    scores = output_scores(call, output, position, method.readout)
    chosen = chosen_target(target, scores)
    return name_outputs(method.model, scores, chosen, tokenizer, readout=method.readout is not None)


def component_scores(
    call: ModelCall,
    method: str,
    unit: str,
    read: Mapping[Component, Mapping[StackName, Tensor]],
    lengths: Sequence[int],  # of the sequences that enter layers
    outputs: Sequence[NamedOutput],
    delta: Tensor | None = None,
) -> ComponentScores:
    """Say of which positions the scores of components are."""
    roles = {name: "self" if call.encoder is None else name for stacks in read.values() for name in stacks}
    real, tokens = dict[str, Tensor](), dict[str, Sequence[Sequence[str]]]()
    for name, role in roles.items():
        half = "decoder" if role == "cross" else role
        texts, length = call.texts_of(half), lengths[0 if half == "encoder" else -1]
        real[name] = real_positions_of(call, call.positions_of(half)[0], length)
        if texts is not None:
            tokens[name] = [row[-length:] for row in texts]
    return ComponentScores(read, real, tokens, outputs, class_of(call.model).__name__, method, unit, delta)

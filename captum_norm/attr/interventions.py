"""Measures how an output changes if components inside a model have other activations: patching and ablation."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any, Literal, get_args

import torch
from captum.attr import Attribution
from captum.log import log_usage
from torch import Tensor

from captum_norm.attr.components import ModelGradient, component_scores, moved, named_outputs, real_of
from captum_norm.attr.frozen.components import (
    ComponentNetwork,
    ComponentReading,
    ComponentRequest,
    Tap,
    component_request,
)
from captum_norm.attr.frozen.decompx import examples_of
from captum_norm.attr.layer_maps import finite_results
from captum_norm.attr.output import restored
from captum_norm.bars import bar
from captum_norm.checks import check_choice, check_count, quoted
from captum_norm.errors import InvalidInputError
from captum_norm.forward.request import Request
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import tensors_in
from captum_norm.models.inputs import Inputs
from captum_norm.models.objects import Explainable
from captum_norm.models.outputs import OutputValues, Position, Readout, Target
from captum_norm.models.precision import accumulation_dtype
from captum_norm.models.stacks import StackName
from captum_norm.models.token_inputs import with_outputs
from captum_norm.results.components import NUMBERED, Component, ComponentScores

Ablation = Literal["zero", "mean", "resample"]
"""What ablated activations become: zeros, their mean in a reference, or those of a random example of it."""
SOURCES = ("counterfactual", "alignment", "ablation", "reference")


class ActivationPatching(Attribution):
    """How much one output changes if a component has another activation: activation patching and ablation.

    A component's score is m(patched) − m, with m the number explained. The model runs as it is, but for one activation
    at a time, which is that of a counterfactual input (activation patching [Vig et al. 2020; Meng et al. 2022]), zero,
    or the mean or a random example of a reference (ablation). :class:`captum_norm.ComponentAttribution` estimates this
    from one backward pass; here it is measured, by a forward pass for each component and position.

    Args:
        model: as for :class:`captum_norm.NormAttribution`; left unchanged.
        tokenizer: tokenizes texts and names tokens.
        readout: what to explain instead of logits, see :data:`captum_norm.models.outputs.Readout`.
        batch_size: how many patched copies of an example run at a time, beside one that is not patched.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> method, ids, other = ActivationPatching(model), torch.tensor([[7, 9, 3]]), torch.tensor([[7, 5, 3]])
        >>> method.attribute(ids, target=11, counterfactual=other).scores.shape  # of heads, at every position
        torch.Size([1, 2, 4, 3])
        >>> method.attribute(ids, target=11, ablation="zero", per_position=False).scores.shape
        torch.Size([1, 2, 4])
    """

    def __init__(
        self, model: Explainable, *, tokenizer: Any = None, readout: Readout | None = None, batch_size: int = 32
    ) -> None:
        self._runs = ModelGradient(model, tokenizer=tokenizer, readout=readout)
        super().__init__(self._runs.model)
        self.model, self.batch_size = self._runs.model, check_count("batch_size", batch_size)

    def __repr__(self) -> str:
        return f"ActivationPatching({self._runs.session.name}, batch_size={self.batch_size})"

    @log_usage()  # type: ignore[untyped-decorator]
    def attribute(
        self,
        inputs: Inputs,
        target: Target = None,
        additional_forward_args: Any = None,
        *,
        position: Position = None,
        components: Component | Sequence[Component] = "heads",
        per_position: bool = True,
        counterfactual: Inputs | None = None,
        alignment: Tensor | None = None,
        ablation: Ablation | None = None,
        reference: Inputs | None = None,
    ) -> ComponentScores:
        """Measure by how much other activations of components change one output of each example.

        Args:
            inputs: the arguments without a description: as for :meth:`captum_norm.ComponentAttribution.attribute`.
            target: None: the output that the model predicts before it is patched.
            additional_forward_args: of the inputs and the counterfactual.
            position: where the output is read.
            components: ``"residual"``, ``"heads"``, ``"feed_forward"``, ``"neurons"``, or several.
            per_position: patch single positions; False patches all together, for scores without an axis of positions.
            counterfactual: inputs whose activations are patched in.
            alignment: the counterfactual's position for each position, (B, S), if it has another length.
            ablation: instead of a counterfactual, ``"zero"``; ``"mean"`` of a reference's real positions; or
                ``"resample"``: another example of a reference, of the same length, drawn by torch's generator.
            reference: a batch of inputs, for ``"mean"`` and ``"resample"``.

        Raises:
            InvalidInputError: the model has no such components, or what is patched in is missing or does not fit.
            UnsupportedModelError: components of this kind cannot be seen in the model.
        """
        request = component_request(components, per_position=per_position)
        if request is None or not {"experts", "edges"}.isdisjoint(request.kinds):
            raise InvalidInputError(
                f"got components={quoted(components)}; expected residual, heads, feed_forward or neurons, or several"
            )
        if ablation is not None:
            check_choice("ablation", ablation, get_args(Ablation))
        sources = zip(SOURCES, (counterfactual, alignment, ablation, reference), strict=True)
        given = [name for name, value in sources if value is not None]
        ablating = ["ablation", "reference"][: 1 + (ablation != "zero")]
        if given not in (["counterfactual"], ["counterfactual", "alignment"], ablating):
            raise InvalidInputError(
                f"got {' and '.join(given) or 'nothing'} to patch in; expected a counterfactual, the ablation "
                '"zero", or the ablation "mean" or "resample" and a reference'
            )
        runs, asked = self._runs, Request(target=target, position=position)
        bound = ((inputs, additional_forward_args), (counterfactual, additional_forward_args), (reference, None))
        calls = [runs.call_of(each, further, asked)[0] for each, further in bound if each is not None]
        values = runs.values(calls[0], asked)
        work = partial(runs.session.explain, self._changes, calls, values, request, ablation, alignment)
        named = partial(named_outputs, runs, target, position, runs.session.tokenizer)
        (read, lengths), outputs = with_outputs(work, named, self.model, inputs)
        name = "activation-patching" if ablation is None else f"{ablation}-ablation"
        return component_scores(calls[0], name, "change of the output", read, lengths, outputs)

    def _changes(
        self,
        calls: Sequence[ModelCall],
        values: OutputValues,
        request: ComponentRequest,
        ablation: Ablation | None,
        alignment: Tensor | None,
    ) -> tuple[dict[Component, dict[StackName, Tensor]], list[int]]:
        """Return the changes by kind and stack, and the numbers of positions that enter layers."""
        runs, each, (call, *others) = self._runs, request.per_position, calls
        others = [_drawn(call, other) if ablation == "resample" else other for other in others]
        ran = [runs.run_plain(one, request, PatchedNetwork) for one in (call, *others)]
        (here, output), (there, _) = ran[0], ran[-1]
        call.note(output)
        patched = {tap: _patched(tap, here, there, ablation, alignment) for tap in here.activations}
        sites = [[(tap, at) for tap in patched for at in here.sites(tap, index)] for index in range(call.batch)]
        changes = dict[Tap, Tensor]()
        for tap, activation in patched.items():
            single = (activation if tap.kind == "neurons" else activation[..., 0])[:, slice(None) if each else 0]
            changes[tap] = torch.zeros_like(single, dtype=accumulation_dtype(single.dtype), device="cpu")
        with bar(f"patches of {runs.session.name}", sum(map(len, sites)), "patches") as shown:
            for index, example in enumerate(examples_of(call)):
                for start in range(0, len(sites[index]), self.batch_size):
                    chosen = sites[index][start : start + self.batch_size]
                    patches = [(tap, at, patched[tap][index][at]) for tap, at in chosen]
                    copies = example.repeated(1 + len(chosen))
                    _, output = runs.run_plain(copies, request, partial(PatchedNetwork, patches=patches))
                    numbers = values.of_example(index).read(copies, output)[0][:, 0].double()
                    for (tap, at), change in zip(chosen, (numbers[1:] - numbers[0]).tolist(), strict=True):
                        changes[tap][index][at if each else at[1:]] = change
                    shown.update(len(chosen))
        parts = {tap: part.transpose(1, 2) if each and tap.kind in NUMBERED else part for tap, part in changes.items()}
        here.readings, causal = [ComponentReading(parts, {})], bool(runs.session.seen(call).causal)
        made = {kind: restored(call, kind, here.stacked(kind), causal=causal) for kind in request.kinds}
        read = {kind: {name: part[:, 0] for name, part in stacks.items()} for kind, stacks in made.items()}
        return finite_results(self.model, read), here.lengths


class PatchedNetwork(ComponentNetwork):
    """The model as it is: notes activations, (B, S, ...), or has others in all but the first of an example's copies."""

    def __init__(self, *args: Any, patches: Sequence[tuple[Tap, Any, Tensor]] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self._patches = patches

    def tap(self, tap: Tap, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        """Note an activation, or return what it is in the copies that are patched there."""
        if tap.kind in self._request.kinds and not self._patches:
            self.activations[tap] = self.by_position(tensor).detach()
        patches = [(copy, at, other) for copy, (place, at, other) in enumerate(self._patches, 1) if place == tap]
        if patches:
            tensor = tensor.clone()
            copies = self.by_position(tensor)
            for copy, at, other in patches:
                copies[copy][at] = other
        return tensor

    def real(self, tap: Tap) -> Tensor:
        """Return where a component's positions are no padding, (B, S)."""
        real = self.call.positions_of(tap.role)[0].real
        every = torch.ones(self.activations[tap].shape[:2], dtype=torch.bool, device="cpu")
        return every if real is None else real.cpu()

    def sites(self, tap: Tap, example: int) -> Iterable[tuple[Any, ...]]:
        """Return which entries of an example's activation, (S, ...), are patched at a time: positions, and a number."""
        places = self.real(tap)[example].nonzero()[:, 0].tolist()
        units = [range(self.activations[tap].shape[2])] if tap.kind in NUMBERED else []
        return product([[place] for place in places] if self._request.per_position else [places], *units)


def _patched(
    tap: Tap, here: PatchedNetwork, there: PatchedNetwork, ablation: Ablation | None, alignment: Tensor | None
) -> Tensor:
    """Return what a component's activation becomes, (B, S, ...), by that of a counterfactual or a reference."""
    activation, other = here.activations[tap], there.activations[tap]
    if ablation == "zero":
        return torch.zeros_like(activation)
    if ablation == "mean":
        return other[there.real(tap)].mean(0).expand_as(activation)
    return moved(here.call, there.call, alignment, other, activation)


def _drawn(call: ModelCall, reference: ModelCall) -> ModelCall:
    """Draw, for each example of a call, another one of a reference, of the same length."""

    def fits(mine: ModelCall, other: ModelCall) -> bool:
        pairs = zip(tensors_in(mine.passed), tensors_in(other.passed), strict=False)
        return torch.equal(real_of(mine), real_of(other)) and not all(torch.equal(*pair) for pair in pairs)

    every = list(examples_of(reference))
    table = torch.tensor([[float(fits(mine, other)) for other in every] for mine in examples_of(call)], device="cpu")
    if not table.any(1).all():
        raise InvalidInputError("got a reference without another example of the length of each of the inputs'")
    rows = table.multinomial(1)[:, 0]
    return reference.map_batched(lambda value: value[rows.to(value.device)], rows.tolist())

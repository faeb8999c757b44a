"""What the methods have in common that explain one number of the model's output."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.attr._base import AttentionMapAttribution, MapOptions, Position, position_rows
from captum_norm.errors import InvalidInputError, NonFiniteError
from captum_norm.maps import AttributionMaps
from captum_norm.models.huggingface import HUGGING_FACE
from captum_norm.models.inputs import Inputs, ModelCall
from captum_norm.models.seams import library_of
from captum_norm.models.stacks import StackName
from captum_norm.models.tracing import first_tensor


@dataclass(frozen=True)
class Difference:
    """A target: one output less another, such as the logit of a word less that of its rival.

    Attributes:
        target: the output that counts positively, as everywhere in Captum.
        other: the one that is subtracted.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from captum_norm import DecompX
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> DecompX(model).attribute(torch.tensor([[7, 9, 3]]), target=Difference(4, 11)).shape
        torch.Size([1, 3])
    """

    target: Any
    other: Any


class TargetedAttribution(AttentionMapAttribution):
    """A method whose maps may depend on a number of the output."""

    def maps(
        self,
        inputs: Inputs,
        additional_forward_args: Any = None,
        *,
        layers: Sequence[int] | None = None,
        per_head: bool = False,
        stacks: Collection[StackName] | None = None,
        target: Any = None,
        position: Position = None,
    ) -> AttributionMaps:
        """The map of every layer.

        Args:
            inputs: as for every method: see :meth:`captum_norm.NormAttribution.maps`.
            additional_forward_args: the model's further positional arguments (attention mask first).
            layers: 0-based indices of the layers wanted, negative ones from the last; all if None.
            per_head: one map a head instead of one a layer.
            stacks: None; there is one stack.
            target: which output to explain: see :meth:`attribute`.
            position: at which position, where the model has outputs at each.

        Returns:
            the maps.

        Raises:
            CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.
        """
        return self._maps(inputs, additional_forward_args, MapOptions(layers, per_head, stacks, target, position))


def explained_number(output: Any, call: ModelCall, options: MapOptions, *, causal: bool) -> Tensor:
    """The number of each example's output that a target names, (B,).

    Args:
        output: what the model returned: its ``logits`` if it has them, else the first tensor, (B,), (B, C) or
            (B, S, C).
        call: the call that returned it.
        options: the target and the position. A number is an index into C; outputs at each position are taken at the
            position explained. A tuple is an index into all of the output but for the batch. A tensor or list has one
            of these for each example; :class:`Difference` has two. None stands for an output of one number.
        causal: whether the model's attention looks back only.

    Raises:
        InvalidInputError: if the target is no such thing or outside the output.
    """
    target = options.target
    if isinstance(target, Difference):
        first, other = (
            explained_number(output, call, options._replace(target=one), causal=causal)
            for one in (target.target, target.other)
        )
        return first - other
    found = _scores(output)
    if found is None:
        raise InvalidInputError(f"{type(call.model).__name__} returns no tensor to explain a number of")
    if len(found) != call.batch or (found.dim() > 2 and _may_have_batch_second(found, call)):
        raise InvalidInputError(
            f"got an output of shape {tuple(found.shape)} for {call.batch} examples; expected the examples along the "
            "first axis, and another number of them than of positions in models that are not of Hugging Face"
        )
    if found.dim() > 2:
        found = call.positions.unshift(found, 1)
    index = target.tolist() if isinstance(target, Tensor) else target
    each = index if isinstance(index, list) else [index] * len(found)
    if len(each) != len(found):
        raise InvalidInputError(f"got {len(each)} targets for {len(found)} examples")
    if found.dim() > 2 and not any(isinstance(one, tuple) for one in each):
        rows = _position_rows(found, call, options.position, causal=causal)
        found = (rows.unsqueeze(1) @ found).squeeze(1)
    return torch.stack([_entry(scores, one) for scores, one in zip(found, each, strict=True)])


def _may_have_batch_second(found: Tensor, call: ModelCall) -> bool:
    return found.shape[1] == call.batch and library_of(call.model) is not HUGGING_FACE


def _scores(output: Any) -> Tensor | None:
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    return output if isinstance(output, Tensor) else first_tensor(output)


def _position_rows(found: Tensor, call: ModelCall, position: Position, *, causal: bool) -> Tensor:
    real = call.positions.real
    if real is None:
        real = torch.ones(found.shape[:2], dtype=torch.bool)
    if real.shape != found.shape[:2]:
        raise InvalidInputError(
            f"got an output of shape {tuple(found.shape)} for {real.shape[1]} positions; name the entry with a tuple "
            "as target"
        )
    return position_rows(position, call.positions.unshift(real, 1), found, call.model, causal=causal)


def _entry(scores: Tensor, index: Any) -> Tensor:
    """A number of one example's output."""
    if index is None and scores.numel() == 1:
        return scores.reshape(())
    place = index if isinstance(index, tuple) else (index,)
    known = all(isinstance(one, int) and not isinstance(one, bool) for one in place) and len(place) == scores.dim()
    if not known or not all(-size <= one < size for one, size in zip(place, scores.shape, strict=True)):
        raise InvalidInputError(
            f"got the target {index!r} for an output of shape {tuple(scores.shape)} an example; expected an index "
            "into it"
        )
    return scores[place]


def one_of_each(options: MapOptions, index: int, batch: int) -> MapOptions:
    """The options for one example of a batch."""

    def one(value: Any, *, common: bool) -> Any:
        """``common``: a list of one entry may stand for all examples."""
        value = value.tolist() if isinstance(value, Tensor) else value
        if isinstance(value, Difference):
            return Difference(one(value.target, common=common), one(value.other, common=common))
        if not isinstance(value, list):
            return value
        if len(value) != batch and not (common and len(value) == 1):
            raise InvalidInputError(f"got {len(value)} {'positions' if common else 'targets'} for {batch} examples")
        return value[index % len(value)]

    position = list(options.position) if isinstance(options.position, tuple) else options.position
    return options._replace(target=one(options.target, common=False), position=one(position, common=True))


@contextmanager
def gradients_on() -> Iterator[None]:
    """Gradients, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def outside_inference(call: ModelCall) -> ModelCall:
    """The call with tensors that may be part of a graph; those made in inference mode may not."""
    arguments: Mapping[str, Any] = {
        name: value.clone() if isinstance(value, Tensor) and value.is_inference() else value
        for name, value in call.arguments.items()
    }
    return replace(call, arguments=dict(arguments))


def refuse_non_finite(model: nn.Module, number: Tensor) -> None:
    """Refuse an output that is no number."""
    if not number.isfinite().all():
        raise NonFiniteError(f"the output of {type(model).__name__} contains NaN or infinity")

"""Chooses the number that is explained, from what a model returned."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.arguments import shown
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.models.heads import TAGGERS, ReadPosition, positions_of_examples
from captum_norm.models.inputs import ModelCall

Readout = Callable[[Any, Tensor], Tensor]
"""What to explain of a model: from what it returned and where its inputs are real (N, S) to (N, C), or one number for
each example, (N,)."""

Choice = int | Sequence[int] | Tensor
"""A class or token for all examples, or one for each."""


@dataclass(frozen=True)
class Difference:
    """A target: one output less another, such as the logit of a word less that of its rival.

    Attributes:
        target: the class or token that counts positively, for all examples or one for each.
        other: the one that is subtracted.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from captum_norm import DecompX
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> DecompX(model).attribute(torch.tensor([[7, 9, 3]]), target=Difference(4, 11)).shape
        torch.Size([1, 3])
    """

    target: Choice
    other: Choice


Target = Choice | Difference | None
"""What to explain: a class or token, a difference of two, or None for the one that the model predicts."""

Place = int | ReadPosition | Sequence[int] | Tensor | None
"""Where to read outputs that there are for every position; None: at the last real one."""


def read_mask(call: ModelCall, position: Place) -> Tensor | None:
    """Where the user wants the model's output read, True at one position of each example, (B, S); None: at the last.

    The positions are those of the user's inputs; the mask is moved as they were.

    Raises:
        InvalidInputError: for a position outside the sequence or in its padding, or the mean of several.
    """
    if position is None:
        return None
    if isinstance(position, str) and position == "mean":
        raise InvalidInputError('got position="mean"; an output is read at one position of each example')
    real = real_positions(call)
    shown = call.positions.unshift(real, 1)
    chosen = torch.zeros_like(shown)
    chosen[torch.arange(call.batch, device=chosen.device), positions_of_examples(position, shown)] = True
    moved: Tensor = call.positions.moved(chosen)
    return moved


def real_positions(call: ModelCall) -> Tensor:
    """True at real positions of a sequence, (B, S), on the inputs' device.

    Raises:
        InvalidInputError: if the input is no sequence.
    """
    if call.positions.real is not None:
        return call.positions.real
    main = next(value for value in call.arguments.values() if isinstance(value, Tensor))
    if call.positions.length is None:
        raise InvalidInputError(f"got inputs of shape {tuple(main.shape)}; expected token ids or their embeddings")
    return torch.ones(call.batch, call.positions.length, dtype=torch.bool, device=main.device)


def read_output(model: nn.Module, output: Any, real: Tensor, read: Tensor | None, readout: Readout | None) -> Tensor:
    """What is explained of one forward pass: (N, C), or (N,).

    Args:
        model: the model, for its name.
        output: what it returned.
        real: True at real positions, (N, S).
        read: True where to read logits that there are for every position, (N, S); None for the last real one.
        readout: the user's own; None for the logits.

    Raises:
        UnsupportedModelError: if the model returns no logits.
        InvalidInputError: if it must be said at which position to read, or the readout returned another shape.
    """
    scores = _scores(model, output, real, readout)
    return scores if scores.dim() < 3 else _at(scores, model, real, read)


def output_scores(call: ModelCall, output: Any, position: Place, readout: Readout | None) -> Tensor:
    """What is explained of one call, (B, C) or (B,): as :func:`read_output`, of inputs that may be images, too.

    The position is looked at only where there are logits for every one.
    """
    sequence = call.positions.real is not None or call.positions.length is not None
    real = real_positions(call) if sequence else torch.ones(call.batch, 1, dtype=torch.bool, device="cpu")
    scores = _scores(call.model, output, real, readout)
    return scores if scores.dim() < 3 else _at(scores, call.model, real, read_mask(call, position))


def _scores(model: nn.Module, output: Any, real: Tensor, readout: Readout | None) -> Tensor:
    """(N, S, C), (N, C) or (N,)."""
    if readout is not None:
        scores: Any = readout(output, real)
        if not isinstance(scores, Tensor) or scores.dim() not in (1, 2) or len(scores) != len(real):
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise InvalidInputError(f"the readout returned {got} for {len(real)} examples; expected (N, C) or (N,)")
        return scores
    logits = output.get("logits") if isinstance(output, Mapping) else output
    if not isinstance(logits, Tensor):
        raise UnsupportedModelError(
            f"{type(model).__name__} returns no logits; take a model with a head, or say by readout= what to explain"
        )
    if logits.dim() not in (1, 2, 3) or logits.shape[: logits.dim() - 1] != real.shape[: logits.dim() - 1]:
        raise InvalidInputError(
            f"{type(model).__name__} returns {tuple(logits.shape)} for {len(real)} examples of {real.shape[1]} "
            "positions; expected (B, C) or (B, S, C), or a readout= that says what to explain"
        )
    return logits


def _at(logits: Tensor, model: nn.Module, real: Tensor, read: Tensor | None) -> Tensor:
    """The logits of one position of each example: (N, S, C) -> (N, C)."""
    if read is None:
        if any(type(module).__name__.endswith(TAGGERS) for module in model.modules()):
            raise InvalidInputError(f"{type(model).__name__} has logits for every position; pass the position to read")
        places = torch.arange(real.shape[1], device=real.device)
        index = torch.where(real, places, -1).amax(1)
    else:
        index = read.long().argmax(1)
    return logits[torch.arange(len(logits), device=logits.device), index.to(logits.device)]


def chosen_target(target: Target, scores: Tensor) -> Tensor | None:
    """The class of each example, (B,), given the scores of all, (B, C); None where the score is one number.

    Of a :class:`Difference` the two, (B, 2).

    Raises:
        InvalidInputError: for a class that there is not, or another number of classes than of examples.
    """
    if scores.dim() == 1:
        if target is not None:
            raise InvalidInputError(f"got target={shown(target)}, but the output is one number for each example")
        return None
    if target is None:
        return scores.detach().argmax(1)
    if isinstance(target, Difference):
        return torch.stack([_classes(one, scores) for one in (target.target, target.other)], 1)
    return _classes(target, scores)


def _classes(target: Choice, scores: Tensor) -> Tensor:
    try:
        given = torch.as_tensor(target, device=scores.device)
    except (TypeError, ValueError, RuntimeError):
        given = torch.empty(0, device="cpu")
    if (
        given.is_floating_point()
        or given.is_complex()
        or given.dtype == torch.bool
        or given.dim() > 1
        or given.numel() not in (1, len(scores))
    ):
        raise InvalidInputError(
            f"got target={shown(target)} for {len(scores)} examples; expected an integer, or one for each example"
        )
    # What inference mode made cannot be kept for a gradient.
    classes = (given.clone() if given.is_inference() else given).long().reshape(-1).expand(len(scores))
    wrong = classes[(classes < 0) | (classes >= scores.shape[1])]
    if len(wrong):
        raise InvalidInputError(f"got the target {int(wrong[0])}; expected 0 to {scores.shape[1] - 1}")
    return classes


def explained_number(scores: Tensor, chosen: Tensor | None) -> Tensor:
    """The number explained of each example: scores (N, C) or (N,), and what :func:`chosen_target` gave for N or one.

    Returns:
        (N,).
    """
    found = _chosen_scores(scores, chosen)
    return found[:, 0] - found[:, 1] if found.shape[1] == 2 else found[:, 0]


def rounded_size(scores: Tensor, chosen: Tensor | None) -> Tensor:
    """The size of what was rounded before :func:`explained_number` took it, or took the difference of two, (N,)."""
    return _chosen_scores(scores, chosen).abs().sum(1)


def _chosen_scores(scores: Tensor, chosen: Tensor | None) -> Tensor:
    """(N, 1), or (N, 2) for a difference."""
    if chosen is None:
        return scores[:, None]
    columns = chosen if chosen.dim() == 2 else chosen[:, None]
    return scores.gather(1, columns.to(scores.device).expand(len(scores), -1))

"""Chooses the number to explain from a model's output."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.checks import shown
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.models.call import ModelCall
from captum_norm.models.heads import TAGGERS, Position, positions_of_examples
from captum_norm.models.sentences import SentenceEncoder
from captum_norm.models.virtual_tokens import virtual_tokens
from captum_norm.models.wrappers import class_of, unwrapped

Readout = Callable[[Any, Tensor], Tensor]
"""What to explain: from a model's output and where its inputs are real, (N, S), to scores (N, C) or (N,)."""

Choice = int | Sequence[int] | Tensor
"""A class or token for all examples, or one for each example."""


_HEAD = "take a model with a head, or choose what to explain by readout="


@dataclass(frozen=True)
class Difference:
    """A target: the difference of two outputs, such as the logits of a word and of its rival.

    Attributes:
        target: the class or token that counts positively, for all examples or one for each example.
        other: the class or token whose output is subtracted.

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
"""What to explain: a class or token, a difference of two, or None for the model's prediction."""


def read_mask(call: ModelCall, position: Position) -> Tensor | None:
    """Return the positions to read as a mask, True at one position of each example, (B, S); None for the last ones.

    ``position`` counts in the user's inputs; the mask is shifted as these were.

    Raises:
        InvalidInputError: for a position outside the sequence or in its padding, or for the mean.
    """
    if position is None:
        return None
    if isinstance(position, str) and position == "mean":
        raise InvalidInputError('got position="mean"; an output is read at one position of each example')
    real = real_positions(call)
    shown = call.output_positions.shift_back(real, 1)
    chosen = torch.zeros_like(shown)
    chosen[torch.arange(call.batch, device=chosen.device), positions_of_examples(position, shown)] = True
    shifted: Tensor = call.output_positions.shift_left(chosen)
    return shifted


def real_positions(call: ModelCall) -> Tensor:
    """Return True at the real positions of the outputs, (B, S) or in an encoder–decoder model (B, T), on their device.

    Raises:
        InvalidInputError: if the input is not a sequence.
    """
    positions = call.output_positions
    if positions.real is not None:
        return positions.real
    main = next(value for value in call.arguments.values() if isinstance(value, Tensor))
    if positions.length is None:
        if call.encoder is not None:
            raise InvalidInputError(f"got no input of the decoder; {call.library.without_decoder}")
        raise InvalidInputError(f"got inputs of shape {tuple(main.shape)}; expected token ids or their embeddings")
    return torch.ones(call.batch, positions.length, dtype=torch.bool, device=main.device)


def read_output(model: nn.Module, output: Any, real: Tensor, read: Tensor | None, readout: Readout | None) -> Tensor:
    """Return the scores to explain of one forward pass: (N, C), or (N,).

    Args:
        model: the model, for its name.
        output: what it returned.
        real: True at real positions, (N, S).
        read: True at the positions to read, (N, S), if there are logits at every one; None for the last real ones.
        readout: the user's own; None for the logits.

    Raises:
        UnsupportedModelError: if the model returns no logits.
        InvalidInputError: if the position to read is required but missing, or the readout returned another shape.
    """
    scores = _scores(model, output, real, readout)
    return scores if scores.dim() < 3 else _at(scores, model, real, read)


def output_scores(call: ModelCall, output: Any, position: Position, readout: Readout | None) -> Tensor:
    """Return the scores to explain of one call, (B, C) or (B,): as :func:`read_output`, also for images.

    ``position`` matters only if there are logits at every position.
    """
    positions = call.output_positions
    logits = _logits(call.model, output)
    # Classifiers may make the decoder's inputs from the source.
    lacks_decoder = call.encoder is not None and isinstance(logits, Tensor) and logits.dim() > 2
    sequence = positions.real is not None or positions.length is not None or lacks_decoder
    real = real_positions(call) if sequence else torch.ones(call.batch, 1, dtype=torch.bool, device="cpu")
    scores = _scores(call.model, output, real, readout)
    return scores if scores.dim() < 3 else _at(scores, call.model, real, read_mask(call, position))


def scores_at(call: ModelCall, output: Any, rows: Tensor, readout: Readout | None) -> Tensor:
    """Return the scores to explain at several positions of each example, (B·P, C).

    Args:
        call: the call.
        output: what the model returned.
        rows: the positions, (B, P), in the order that the model received them in.
        readout: the user's own; None for the logits.

    Raises:
        UnsupportedModelError: if the model returns no logits.
        InvalidInputError: if there is one output for each example, or only those of the last position.
    """
    scores = _scores(call.model, output, real_positions(call), readout)
    batch, length = len(rows), real_positions(call).shape[1]
    if scores.dim() != 3 or scores.shape[1] < length:
        raise InvalidInputError(
            f"got {rows.shape[1]} positions for each example, but {type(call.model).__name__} returns outputs of shape "
            f"{tuple(scores.shape)} for {batch} examples of {length} positions; pass one position for each"
        )
    examples = torch.arange(batch, device=scores.device)[:, None]
    return scores[examples, rows.to(scores.device)].flatten(0, 1)


def _scores(model: nn.Module, output: Any, real: Tensor, readout: Readout | None) -> Tensor:
    """Return scores (N, S, C), (N, C) or (N,)."""
    if readout is not None:
        scores: Any = readout(output, real)
        if not isinstance(scores, Tensor) or scores.dim() not in (1, 2) or len(scores) != len(real):
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise InvalidInputError(f"the readout returned {got} for {len(real)} examples; expected (N, C) or (N,)")
        return scores
    logits, virtual = _logits(model, output), virtual_tokens(model)
    if virtual is not None and isinstance(logits, Tensor) and logits.dim() == 3:
        # Behind a prompt; in an encoder–decoder model the prompt is the encoder's.
        logits = logits[:, virtual.number :] if logits.shape[1] == virtual.number + real.shape[1] else logits
    if not isinstance(logits, Tensor):
        way = "compare it with texts: SentenceSimilarity(model, text)" if isinstance(model, SentenceEncoder) else _HEAD
        raise UnsupportedModelError(f"{type(model).__name__} returns no logits; {way}")
    axes = logits.dim() - 1
    of_last = axes == 2 and logits.shape[:2] == (len(real), 1)
    if axes not in (0, 1, 2) or not (of_last or logits.shape[:axes] == real.shape[:axes]):
        raise InvalidInputError(
            f"{type(model).__name__} returns {tuple(logits.shape)} for {len(real)} examples of {real.shape[1]} "
            "positions; expected (B, C) or (B, S, C), or a readout= that chooses what to explain"
        )
    return logits


def _logits(model: nn.Module, output: Any) -> Any:
    """Return the logits in a model's output: the first tensor of a tuple, as of (logits, loss), of a user's own model.

    The tuples of transformers begin with a loss, logits or hidden states.
    """
    if isinstance(output, Mapping):
        return output.get("logits")
    if not isinstance(output, (tuple, list)) or type(unwrapped(model)).__module__.startswith("transformers."):
        return output
    first = next(iter(output), None)
    return first if isinstance(first, Tensor) and first.is_floating_point() and first.dim() > 1 else output


def _at(logits: Tensor, model: nn.Module, real: Tensor, read: Tensor | None) -> Tensor:
    """Return the logits at one position of each example: (N, S, C) -> (N, C)."""
    if logits.shape[1] < real.shape[1]:
        if not real[:, -1].all() or (read is not None and not read[:, -1].all()):
            raise InvalidInputError(
                f"{type(model).__name__} returns logits of the last position alone; expected that position, and "
                "examples without padding on the right, or the arguments for which it returns all logits"
            )
        return logits[:, 0]
    if read is None:
        if any(class_of(module).__name__.endswith(TAGGERS) for module in model.modules()):
            raise InvalidInputError(f"{type(model).__name__} has logits for every position; pass the position to read")
        places = torch.arange(real.shape[1], device=real.device)
        index = torch.where(real, places, -1).amax(1)
    else:
        index = read.long().argmax(1)
    return logits[torch.arange(len(logits), device=logits.device), index.to(logits.device)]


def chosen_target(target: Target, scores: Tensor) -> Tensor | None:
    """Return the class to explain of each example, (B,), given scores (B, C); None for scores (B,).

    For a :class:`Difference` return both classes, (B, 2).

    Raises:
        InvalidInputError: for a class that does not exist, or if there are more or fewer classes than examples.
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
    # Tensors made in inference mode cannot be saved for a gradient.
    classes = (given.clone() if given.is_inference() else given).long().reshape(-1).expand(len(scores))
    wrong = classes[(classes < 0) | (classes >= scores.shape[1])]
    if len(wrong):
        raise InvalidInputError(f"got the target {int(wrong[0])}; expected 0 to {scores.shape[1] - 1}")
    return classes


def explained_number(scores: Tensor, chosen: Tensor | None) -> Tensor:
    """Return the number to explain of each example, (N,).

    Args:
        scores: (N, C) or (N,).
        chosen: what :func:`chosen_target` returned, for N examples or for one.
    """
    found = _chosen_scores(scores, chosen)
    return found[:, 0] - found[:, 1] if found.shape[1] == 2 else found[:, 0]


def rounded_size(scores: Tensor, chosen: Tensor | None) -> Tensor:
    """Return the magnitude of the rounded scores that :func:`explained_number` takes or subtracts, (N,)."""
    return _chosen_scores(scores, chosen).abs().sum(1)


def _chosen_scores(scores: Tensor, chosen: Tensor | None) -> Tensor:
    """Return the chosen scores, (N, 1), or (N, 2) for a difference."""
    if chosen is None:
        return scores[:, None]
    columns = chosen if chosen.dim() == 2 else chosen[:, None]
    return scores.gather(1, columns.to(scores.device).expand(len(scores), -1))

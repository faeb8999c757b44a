"""Sees where a model's head reads, by the gradient of its output with respect to what the last attention layer gives.

Behind that layer nothing but the head brings positions together.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captum_norm.errors import InvalidInputError
from captum_norm.forward.gradients import gradients_on
from captum_norm.models.attention import AttentionCall
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import evaluating, hooked, tensors_in, unchanged
from captum_norm.models.layers import EXCERPT
from captum_norm.models.outputs import ReadPosition

SeenPosition = ReadPosition | Literal["each"]
"""What a head reads: one real position, the mean of all, or each for an output of its own."""


def seen_position(call: ModelCall) -> SeenPosition | None:
    """Find where the head of a model with one stack of layers reads, by a forward and backward pass over an excerpt."""
    if call.encoder is not None:
        return None
    stacks, streams = call.stacks(), list[Tensor]()
    start = torch.empty(1, 0, device="cpu")  # before any attention

    def attend(attention: AttentionCall) -> Tensor:
        """Begin the graph at the last attention output, (1, S, H, d)."""
        nonlocal start
        stacks.enter(attention)
        start = attention.output().detach().requires_grad_()
        streams.clear()
        return start.clone()  # a model may write into it

    def note(_module: nn.Module, output: Tensor | None) -> None:
        """Keep a module's output, (1, S, ...), (S, 1, ...) or (S, ...)."""
        if output is not None and output.requires_grad and _rows(output, start.shape[1]) is not None:
            streams.append(output)

    try:
        with gradients_on(), evaluating(call.model), unchanged(call.model):
            with call.attention_through(attend), hooked((module, "output", note) for module in call.model.modules()):
                output = _excerpt(call.outside_inference()).run()
            return _position_read(output, start, streams)
    except torch.OutOfMemoryError:
        raise
    except (InvalidInputError, RuntimeError):
        return None  # a head without a gradient


def _excerpt(call: ModelCall) -> ModelCall:
    """The longest example's first positions, without trailing padding, which a head might read, too."""
    length, real = EXCERPT, call.positions.real
    if real is not None:
        longest = 0
        if call.library.sequences is None:  # the batch is the first axis of all arguments
            longest = int(real.sum(1).argmax())
            call = call.example(longest)
        count = int(real[longest].sum())
        length = min(length, count) if real[longest, :count].all() else length
    try:
        return call.excerpt(length)
    except InvalidInputError:  # some argument does not fit an excerpt
        return call.example(0)


def _position_read(output: Any, start: Tensor, streams: Sequence[Tensor]) -> SeenPosition | None:
    """Where the head that returned ``output`` reads what the last attention layer gave, ``start``."""
    main, length = _main(output), start.shape[1]
    if main is None or len(start) != 1:
        return None
    rows, last = _rows(main, length), length - 1
    if rows is not None and _reads(rows[0], start) == [0] and _reads(rows[last], start) == [last]:
        return "each"
    read = _reads(main, start)
    if len(read) == length:
        return "mean" if length == 1 or _pools_evenly(main, start, streams) else None
    return "first" if read == [0] else "last" if read == [last] else None


def _reads(numbers: Tensor, start: Tensor) -> list[int]:
    """Positions that some numbers depend on."""
    (gradient,) = _gradients(numbers, [start])
    return gradient[0].flatten(1).ne(0).any(1).nonzero().flatten().tolist()


def _pools_evenly(main: Tensor, start: Tensor, streams: Sequence[Tensor]) -> bool:
    """Whether the output depends on the sum of some module's output over positions alone."""
    whole, *gradients = _gradients(main, [start, *streams])
    for stream, gradient in zip(streams, gradients, strict=True):
        rows = _rows(gradient, start.shape[1])
        if rows is not None and rows.any() and _near(rows, rows[:1].expand_as(rows)):
            (through,) = torch.autograd.grad(stream, start, gradient, retain_graph=True, materialize_grads=True)
            if _near(through, whole):
                return True
    return False


def _main(output: Any) -> Tensor | None:
    """The logits, or else the first tensor of an output that requires gradients."""
    named = [output["logits"]] if isinstance(output, Mapping) and "logits" in output else []
    return next((tensor for tensor in tensors_in([*named, output]) if tensor.requires_grad), None)


def _rows(tensor: Tensor, length: int) -> Tensor | None:
    """Reshape one example's (1, S, ...), (S, 1, ...) or (S, ...) to (S, ·); None for any other shape."""
    shape = [size for size in tensor.shape[:2] if size != 1] or [1]
    return tensor.reshape(length, -1) if tensor.dim() > 1 and shape[0] == length else None


def _gradients(numbers: Tensor, of: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a sum with random weights, since the plain sum may be constant."""
    weights = torch.arange(1, numbers.numel() + 1, device=numbers.device).cos().to(numbers.dtype)
    total = (numbers.flatten() * weights).sum()
    return torch.autograd.grad(total, of, retain_graph=True, materialize_grads=True)


def _near(computed: Tensor, expected: Tensor) -> bool:
    error, size = (tensor.float().norm() for tensor in (computed - expected, expected))
    return bool(error <= torch.finfo(expected.dtype).eps ** 0.5 * size)

"""Sees where a model's head reads, by the gradient of its output with respect to what the last attention layer gives.

Behind that layer nothing but the head brings positions together.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captum_norm.errors import InvalidInputError
from captum_norm.forward.gradients import gradients_on
from captum_norm.models.attention import AttentionCall
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import Hook, evaluating, hooked, tensors_in, unchanged
from captum_norm.models.layers import EXCERPT
from captum_norm.models.outputs import HeadPosition, ReadPosition, read_position
from captum_norm.models.stacks import Stacks
from captum_norm.results.maps import AttributionMaps

SeenPosition = ReadPosition | Literal["each"]
"""What a head reads: one real position, the mean of all, or each for an output of its own."""


class ObservedHead:
    """Where a model's head reads, as one forward and backward pass shows if its class does not tell.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: tuple[list[nn.Module], SeenPosition | None] | None = None

    def observe(self, call: ModelCall, maps: AttributionMaps) -> None:
        """Run the model once, unless it was seen already, or there is but one position."""
        modules = list(self._model.modules())
        if (self._seen is None or self._seen[0] != modules) and _several(maps):
            self._seen = modules, seen_position(call)

    def position(self, maps: AttributionMaps) -> HeadPosition:
        """Return the position that the head reads."""
        causal = maps.decoder is not None
        known = read_position(self._model, causal=causal)
        if known is None and self._seen is not None:
            _, seen = self._seen
            known = ("last" if causal else "mean") if seen == "each" else seen
        if known is None and _several(maps):
            raise InvalidInputError(
                f"got no position, and the head of {type(self._model).__name__} reads neither the first, nor the last, "
                'nor the mean of all, or cannot be seen through; pass position=, an index, "first", "last" or "mean"'
            )
        return known or "mean"


def _several(maps: AttributionMaps) -> bool:
    """Whether some example has several positions."""
    return bool(maps.real.sum(1).max() > 1)


def seen_position(call: ModelCall) -> SeenPosition | None:
    """Find where the head of a model with one stack of layers reads, by a forward and backward pass over an excerpt."""
    if call.encoder is not None:
        return None
    behind = _BehindAttention(call.stacks())
    try:
        with gradients_on(), evaluating(call.model), unchanged(call.model):
            with call.attention_through(behind), hooked(behind.hooks(call.model)):
                output = _excerpt(call.outside_inference()).run()
            return behind.read_position(output)
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


class _BehindAttention:
    """Attention function that begins the graph at its last output, (1, S, H, d)."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self._start = torch.empty(1, 0, device="cpu")  # before any attention
        self._streams: list[Tensor] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        self._stacks.enter(call)
        output = call.output()
        self._start = output.detach().requires_grad_()
        self._streams.clear()
        return self._start.clone()  # a model may write into it

    def hooks(self, model: nn.Module) -> Iterator[tuple[nn.Module, Literal["output"], Hook]]:
        """Hook the output of every module."""
        for module in model.modules():
            yield module, "output", self._note

    def _note(self, _module: nn.Module, output: Tensor | None) -> None:
        """Keep a module's output, (1, S, ...), (S, 1, ...) or (S, ...)."""
        if output is not None and output.requires_grad and _rows(output, self._length) is not None:
            self._streams.append(output)

    @property
    def _length(self) -> int:
        return self._start.shape[1]

    def read_position(self, output: Any) -> SeenPosition | None:
        """Where the head that returned ``output`` reads."""
        main = _main(output)
        if main is None or len(self._start) != 1:
            return None
        rows = _rows(main, self._length)
        first, last = 0, self._length - 1
        if rows is not None and self._reads(rows[first]) == [first] and self._reads(rows[last]) == [last]:
            return "each"
        read = self._reads(main)
        if len(read) == self._length:
            return "mean" if self._length == 1 or self._pools_evenly(main) else None
        return "first" if read == [first] else "last" if read == [last] else None

    def _reads(self, numbers: Tensor) -> list[int]:
        """Positions that some numbers depend on."""
        (gradient,) = _gradients(numbers, [self._start])
        return gradient[0].flatten(1).ne(0).any(1).nonzero().flatten().tolist()

    def _pools_evenly(self, main: Tensor) -> bool:
        """Whether the output depends on the sum of some module's output over positions alone."""
        whole, *gradients = _gradients(main, [self._start, *self._streams])
        for stream, gradient in zip(self._streams, gradients, strict=True):
            rows = _rows(gradient, self._length)
            if rows is not None and rows.any() and _near(rows, rows[:1].expand_as(rows)):
                (through,) = torch.autograd.grad(
                    stream, self._start, gradient, retain_graph=True, materialize_grads=True
                )
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

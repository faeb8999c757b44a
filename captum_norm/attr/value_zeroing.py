"""Measures how much a layer's output changes direction when one token's value vector is zeroed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.bars import bar
from captum_norm.errors import CaptumNormError, NonFiniteError, UnsupportedModelError
from captum_norm.forward.checks import TOLERANCE
from captum_norm.forward.recording import CHUNK_BYTES, record
from captum_norm.forward.request import Request, layer_indices
from captum_norm.forward.stacking import stacked_maps
from captum_norm.functional import cosine_distance, length
from captum_norm.maps import AttributionMaps, MapUnits
from captum_norm.memory import MemoryBudget
from captum_norm.models.attention import AttentionCall
from captum_norm.models.hooks import End, Hook, Received, first_argument, first_tensor, hooked
from captum_norm.models.inputs import ModelCall
from captum_norm.models.layers import layer_of

# Memory that a running layer takes, in units of its output, wide intermediate tensors included.
LAYER_COPIES = 16

_Path = tuple[int | str, ...]
"""Path to a tensor in nested arguments."""


class ValueZeroing(AttentionMapAttribution):
    """Value zeroing, rolled out [Mohebbi et al. 2023].

    Entry (i, j) of a map is the cosine distance between the layer's output at i and what it would be if key j's value
    vectors were zero in this layer, with its attention weights and everything before it unchanged. The whole layer
    runs for every key, including residual connections, normalisations and feed-forward network.

    Args:
        model: a Hugging Face model; left unchanged.
        aggregation: how ``attribute`` combines the layers' maps, ``"rollout"`` or ``"mean"``.
        options: see :class:`captum_norm.MeterOptions`.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2Model
        >>> model = GPT2Model(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> maps = ValueZeroing(model).maps(torch.tensor([[7, 9, 3]])).decoder
        >>> maps.shape, bool((maps.triu(1) == 0).all())
        (torch.Size([1, 2, 3, 3]), True)
    """

    name, title, units = "value-zeroing", "value zeroing", MapUnits("cosine distance")
    decomposes = False
    one_stack = True
    batch_first = True

    def maps_of(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Compute the distances of the layers requested, running each once per key."""
        session = self.session
        around = set(layer_of(self.model, session.blocks(call)).values())
        session.expect_room(call, replace(request, weights=True))
        calls: list[_LayerCall] = []
        with session.progress(call) as advance, _recorded(around, calls):
            causal = record(call, lambda *_: (), None, advance)
        shared = self._shared(call, around) if call.batch > 1 else [set[_Path]()] * len(calls)
        requested = [(index, calls[index]) for index in layer_indices(request.layers, len(calls))]
        keys = sum(one.output.shape[:2].numel() for _, one in requested)
        maps = []
        with bar(f"values of {session.name}", keys, "keys") as shown:
            for index, one in requested:
                dtype = torch.promote_types(session.accumulate, one.output.dtype)
                examples = (one.example(example, call.batch, shared[index]) for example in range(call.batch))
                columns = [self._distances(call, example, index, dtype, shown.update) for example in examples]
                maps.append(torch.cat(columns))
        return stacked_maps(call, {"self": maps}, {}, causal=causal)

    def _shared(self, call: ModelCall, layers: set[nn.Module]) -> list[set[_Path]]:
        """Find each layer call's arguments whose first axis only happens to be as long as the batch.

        Run alone, one example has them just as long, such as MPT's position biases with as many heads as examples.
        """
        alone: list[_LayerCall] = []
        with torch.no_grad(), _recorded(layers, alone):
            record(call.example(0), lambda *_: (), None)
        return [one.as_long_as(call.batch) for one in alone]

    def _distances(
        self,
        call: ModelCall,
        one: "_LayerCall",
        index: int,
        dtype: torch.dtype,
        advance: Callable[[int], object],
    ) -> Tensor:
        """Compute one example's map of one layer, (1, Q, K)."""
        queries, step = one.output.shape[1], self._copies(one.output, call.budget)
        columns = []
        for start in range(0, queries, step):
            keys = slice(start, min(start + step, queries))
            outputs, live = self._zeroed(call, one, keys, index)
            outputs = outputs.to(dtype)
            self._check(outputs[:1], one.output.to(dtype), index, one.output.dtype)
            # Zeroing a key without weight changes only rounding.
            columns.append(cosine_distance(outputs[1:], outputs[:1]).T.where(live, 0))
            advance(keys.stop - keys.start)
        return torch.cat(columns, 1).unsqueeze(0)

    def _zeroed(self, call: ModelCall, one: "_LayerCall", keys: slice, index: int) -> tuple[Tensor, Tensor]:
        """Run a layer on copies of one example: the first unchanged, each other with one key's values zeroed.

        Returns:
            the outputs, (1 + keys, Q, D), and where a key has weight in some head, (Q, keys).
        """
        live: list[Tensor] = []

        def attend(attention: AttentionCall) -> Tensor:
            first = {name: getattr(attention, name)[:1] for name in ("query", "key", "value")}
            output, weights = replace(attention, **first).run()
            weights = weights[0, :, :, keys]
            heads = attention.value[0, :, keys].repeat_interleave(len(weights) // attention.value.shape[1], dim=0)
            live.append(weights.any(0))
            lost = torch.einsum("hqk,hkd->kqhd", weights, heads)
            return torch.cat([output, output - lost])

        with call.attention_through(attend):
            outputs = one.run(1 + keys.stop - keys.start)
        if len(live) != 1:
            raise UnsupportedModelError(
                f"layer {index} of {type(self.model).__name__}, run alone, called attention {len(live)} times; "
                "expected once"
            )
        return outputs, live[0]

    def _copies(self, output: Tensor, budget: MemoryBudget) -> int:
        """Return how many copies of an example, with output (1, Q, D), to run at a time."""
        size = output.numel() * output.element_size()
        copies = budget[output.device] // (size * LAYER_COPIES)
        if output.device.type == "cpu":
            copies = min(copies, CHUNK_BYTES // size)
        return max(1, copies)

    def _check(self, again: Tensor, before: Tensor, index: int, precision: torch.dtype) -> None:
        difference, size = (length(tensor.detach().flatten()) for tensor in (again - before, before))
        name, error = type(self.model).__name__, float(difference / size.clamp(min=torch.finfo(size.dtype).tiny))
        if error != error:
            raise NonFiniteError(f"the output of layer {index} of {name} contains NaN or infinity")
        # Some models compute norms, softmax or routing in single precision even if their dtype is double.
        precision = torch.float32 if precision == torch.float64 else precision
        if not error <= TOLERANCE[precision]:
            raise UnsupportedModelError(
                f"layer {index} of {name}, run again, gives another output: relative error {error:.1e}, accepted "
                f"{TOLERANCE[precision]:.0e} for {precision}; expected a layer that is a function of its arguments"
            )


@dataclass(frozen=True)
class _LayerCall:
    """A recorded call of a layer, (B, Q, D) in and out."""

    layer: nn.Module
    arguments: Received
    output: Tensor

    def as_long_as(self, batch: int) -> set[_Path]:
        """Find the tensors whose first axis is as long as the batch."""
        places = set[_Path]()

        def note(place: _Path, tensor: Tensor) -> Tensor:
            if tensor.dim() > 1 and tensor.shape[0] == batch:
                places.add(place)
            return tensor

        _mapped(note, self.arguments)
        return places

    def example(self, index: int, batch: int, shared: set[_Path]) -> "_LayerCall":
        """Select one example; keep ``shared`` arguments and those without a batch axis, such as a common mask."""
        batched, only = self.as_long_as(batch) - shared, slice(index, index + 1)
        arguments = _mapped(lambda place, tensor: tensor[only] if place in batched else tensor, self.arguments)
        return _LayerCall(self.layer, arguments, self.output[only])

    def run(self, copies: int) -> Tensor:
        """Run the layer on copies of one example's stream, (copies, Q, D)."""
        stream = first_argument(*self.arguments)

        def repeat(_: _Path, tensor: Tensor) -> Tensor:
            return tensor.expand(copies, *tensor.shape[1:]).contiguous() if tensor is stream else tensor

        args, kwargs = _mapped(repeat, self.arguments)
        try:
            output = first_tensor(self.layer(*args, **kwargs))
        except (CaptumNormError, torch.OutOfMemoryError):
            raise
        except (ValueError, IndexError, RuntimeError, TypeError) as error:
            raise UnsupportedModelError(
                f"{type(self.layer).__name__} does not run alone on copies of an example: {error}"
            ) from error
        if output is None:
            raise UnsupportedModelError(f"{type(self.layer).__name__} returns no hidden states")
        return output


@contextmanager
def _recorded(layers: set[nn.Module], calls: list[_LayerCall]) -> Iterator[None]:
    """While open, record every call of the layers in this thread."""
    opened = dict[nn.Module, Received]()

    def enter(layer: nn.Module, received: Received) -> None:
        opened[layer] = received

    def leave(layer: nn.Module, stream: Tensor | None) -> None:
        if stream is not None:
            calls.append(_LayerCall(layer, opened.pop(layer), stream))

    ends: tuple[tuple[End, Hook], ...] = (("arguments", enter), ("output", leave))
    with hooked((layer, *end) for layer in layers for end in ends):
        yield


def _mapped(function: Callable[[_Path, Tensor], Tensor], value: Any, place: _Path = ()) -> Any:
    """Apply a function to every tensor in nested arguments and its path."""
    if isinstance(value, Tensor):
        return function(place, value)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_mapped(function, item, (*place, index)) for index, item in enumerate(value))
    if isinstance(value, dict):
        return {name: _mapped(function, item, (*place, name)) for name, item in value.items()}
    return value

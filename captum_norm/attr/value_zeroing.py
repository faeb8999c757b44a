"""Measures how much a layer's output changes direction when one token's value vector is zeroed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.bars import bar
from captum_norm.errors import CaptumNormError, NonFiniteError, UnsupportedModelError
from captum_norm.forward.checks import TOLERANCE
from captum_norm.forward.record import CHUNK_BYTES, record
from captum_norm.forward.request import Request, check_seen, layer_indices
from captum_norm.forward.stacking import of_last_rows, stacked_maps
from captum_norm.functional import cosine_distance, length
from captum_norm.memory import MemoryBudget
from captum_norm.models.attention import AttentionCall
from captum_norm.models.blocks import check_batch_first
from captum_norm.models.caches import copied, of_first_copy, selected
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import End, Hook, Received, first_argument, first_tensor, hooked
from captum_norm.models.layers import layer_of, not_run
from captum_norm.models.stacks import EXTENDED, Place, Role
from captum_norm.results.aggregation import encoder_decoder_rollout, normalize_rows
from captum_norm.results.maps import AttributionMaps, MapUnits, SourceAndPrefix

# Memory that a running layer takes, in units of its output, wide intermediate tensors included.
LAYER_COPIES = 16

_Path = tuple[int | str, ...]
"""Path to a tensor in nested arguments."""


class ValueZeroing(AttentionMapAttribution):
    """Value zeroing, rolled out [Mohebbi et al. 2023].

    Entry (i, j) of a map is the cosine distance between the layer's output at i and what it would be if key j's value
    vectors were zero in this layer, with its attention weights and everything before it unchanged. The whole layer
    runs for every key, including residual connections, normalisations and feed-forward network.

    A decoder layer of an encoder–decoder model runs for every key of its self-attention (``decoder``) and again for
    every one of its cross-attention (``cross``). The rollout divides the distances in a row of both together by their
    sum, then chains the stacks as :func:`captum_norm.results.aggregation.encoder_decoder_rollout` does.

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
    text_alone = True
    batch_first = True

    def maps_of(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Compute the distances of the layers requested, running each once per key."""
        session, asked, call = self.session, call, replace(call, last=None)
        blocks = session.blocks(call)
        check_batch_first(self.model, blocks.values(), type(self).__name__)
        around = set(layer_of(self.model, blocks, [module for module in blocks if blocks[module].cross]).values())
        session.expect_room(call, replace(request, weights=True))
        calls: list[_LayerCall] = []
        with _recorded(around, calls):
            causal = record(call, lambda _: None, session.options).causal
        if not calls:
            raise not_run(self.model, around)
        shared = self._shared(call, around) if call.batch > 1 else [set[_Path]()] * len(calls)
        stacks = _stacks(call, list(zip(calls, shared, strict=True)))
        check_seen(call, stacks, request)
        requested = {
            role: [(Place(role, index), *layers[index]) for index in layer_indices(request.layers, len(layers))]
            for role, layers in stacks.items()
            if request.has_stack(role)
        }
        maps: dict[Role, list[tuple[int, Tensor]]] = {}
        counts = {role: layers[0][0].output.shape[1] for role, layers in stacks.items() if role != "cross"}
        # Without its layers, the encoder's output is the input.
        counts["cross"] = counts.get("encoder", call.positions.length or 0)
        counts |= {role: counts[role] + call.before.past for role in counts if role in EXTENDED}
        total = call.batch * sum(counts[role] * len(layers) for role, layers in requested.items())
        with bar(f"values of {session.name}", total, "keys") as shown:
            for role, layers in requested.items():
                for place, one, common in layers:
                    examples = (one.example(example, call.batch, common) for example in range(call.batch))
                    found = [self._distances(call, example, place, counts[role], shown.update) for example in examples]
                    maps.setdefault(role, []).append((place.index, torch.cat(found)))
        return of_last_rows(asked, stacked_maps(call, maps, {}, causal=causal))

    def chain(self, maps: AttributionMaps) -> SourceAndPrefix:
        """Roll out the distances, of which those of both sequences share each row of a decoder layer."""
        if self.aggregation != "rollout":
            return super().chain(maps)
        encoder, decoder, cross = maps.of_three_stacks
        shares = normalize_rows(torch.cat([cross, decoder], -1))[..., : cross.shape[-1]]
        return SourceAndPrefix(*encoder_decoder_rollout(encoder, decoder, shares))

    def _shared(self, call: ModelCall, layers: set[nn.Module]) -> list[set[_Path]]:
        """Find each layer call's arguments whose first axis only happens to be as long as the batch.

        Run alone, one example has them just as long, such as MPT's position biases with as many heads as examples.
        """
        alone: list[_LayerCall] = []
        with torch.no_grad(), _recorded(layers, alone):
            record(call.example(0), lambda _: None, self.session.options)
        return [one.as_long_as(call.batch) for one in alone]

    def _distances(
        self, call: ModelCall, one: "_LayerCall", place: Place, count: int, advance: Callable[[int], object]
    ) -> Tensor:
        """Compute one example's map of one layer, (1, Q, K), with ``count`` keys."""
        step, columns = self._copies(one.output, call.budget), []
        dtype = torch.promote_types(self.session.options.accumulate, one.output.dtype)
        for start in range(0, count, step):
            keys = slice(start, min(start + step, count))
            outputs, live = self._zeroed(call, one, keys, place)
            outputs = outputs.to(dtype)
            self._check(outputs[:1], one.output.to(dtype), place, one.output.dtype)
            # Zeroing a key without weight changes only rounding.
            columns.append(cosine_distance(outputs[1:], outputs[:1]).T.where(live, 0))
            advance(keys.stop - keys.start)
        return torch.cat(columns, 1).unsqueeze(0)

    def _zeroed(self, call: ModelCall, one: "_LayerCall", keys: slice, place: Place) -> tuple[Tensor, Tensor]:
        """Run a layer on copies of one example: the first unchanged, each other with one key's values zeroed.

        Returns:
            the outputs, (1 + keys, Q, D), and where a key has weight in some head, (Q, keys).
        """
        live: list[Tensor] = []

        def attend(attention: AttentionCall) -> Tensor:
            if call.encoder is not None and attention.cross != (place.role == "cross"):
                return attention.run()[0]
            first = {name: getattr(attention, name)[:1] for name in ("query", "key", "value")}
            output, weights = replace(attention, **first).run()
            weights = weights[0, :, :, keys]
            heads = attention.value[0, :, keys].repeat_interleave(len(weights) // attention.value.shape[1], dim=0)
            heads = heads.to(weights.dtype)
            live.append(weights.any(0))
            lost = torch.einsum("hqk,hkd->kqhd", weights, heads)
            return torch.cat([output, (output - lost).to(output.dtype)])

        with call.attention_through(attend):
            outputs = one.run(1 + keys.stop - keys.start)
        if len(live) != 1:
            raise UnsupportedModelError(
                f"{place} of {type(self.model).__name__}, run alone, called attention {len(live)} times; expected once"
            )
        return outputs, live[0]

    def _copies(self, output: Tensor, budget: MemoryBudget) -> int:
        """Return how many copies of an example, with output (1, Q, D), to run at a time."""
        size = output.numel() * output.element_size()
        copies = budget[output.device] // (size * LAYER_COPIES)
        if output.device.type == "cpu":
            copies = min(copies, CHUNK_BYTES // size)
        return max(1, copies)

    def _check(self, again: Tensor, before: Tensor, place: Place, precision: torch.dtype) -> None:
        difference, size = (length(tensor.detach().flatten()) for tensor in (again - before, before))
        name, error = type(self.model).__name__, float(difference / size.clamp(min=torch.finfo(size.dtype).tiny))
        if error != error:
            raise NonFiniteError(f"the output of {place} of {name} contains NaN or infinity")
        # Some models compute norms, softmax or routing in single precision even if their dtype is double.
        precision = torch.float32 if precision == torch.float64 else precision
        if not error <= TOLERANCE[precision]:
            raise UnsupportedModelError(
                f"{place} of {name}, run again, gives another output: relative error {error:.1e}, accepted "
                f"{TOLERANCE[precision]:.0e} for {precision}; expected a layer that is a function of its arguments"
            )


@dataclass(frozen=True)
class _LayerCall:
    """A recorded call of a layer, (B, Q, D) in and out; one that ``crosses`` may read an encoder's output, too."""

    layer: nn.Module
    arguments: Received
    output: Tensor
    crosses: bool = False

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
        chosen, own = torch.tensor([index], device="cpu"), _cached_layers(self.layer)
        arguments = _caches_mapped(lambda cache: selected(cache, chosen, own), arguments)
        return replace(self, arguments=arguments, output=self.output[only])

    def run(self, copies: int) -> Tensor:
        """Run the layer on copies of one example's stream, (copies, Q, D), and of an encoder's output that it reads."""
        stream = first_argument(*self.arguments)

        def repeat(_: _Path, tensor: Tensor) -> Tensor:
            if tensor is stream:
                return tensor.expand(copies, *tensor.shape[1:]).contiguous()
            return tensor.expand(copies, *tensor.shape[1:]) if self.crosses and _is_sequence(tensor) else tensor

        own = _cached_layers(self.layer)
        args, kwargs = _caches_mapped(lambda cache: of_first_copy(cache, own), _mapped(repeat, self.arguments))
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


def _is_sequence(tensor: Tensor) -> bool:
    return tensor.dim() == 3 and len(tensor) == 1 and tensor.is_floating_point()


def _stacks(
    call: ModelCall, layers: Sequence[tuple[_LayerCall, set[_Path]]]
) -> dict[Role, list[tuple[_LayerCall, set[_Path]]]]:
    """Sort recorded calls, with their arguments that are common to all examples, by the stacks whose maps they give."""
    if call.encoder is None:
        return {"self": list(layers)}
    encoder = frozenset(call.encoder.modules())
    encoding = [(one, common) for one, common in layers if one.layer in encoder]
    decoding = [(replace(one, crosses=True), common) for one, common in layers if one.layer not in encoder]
    stacks: dict[Role, list[tuple[_LayerCall, set[_Path]]]] = {
        "encoder": encoding,
        "decoder": decoding,
        "cross": decoding,
    }
    return {role: found for role, found in stacks.items() if found}


@contextmanager
def _recorded(layers: set[nn.Module], calls: list[_LayerCall]) -> Iterator[None]:
    """While open, record every call of the layers in this thread."""
    opened = dict[nn.Module, Received]()

    def enter(layer: nn.Module, received: Received) -> None:
        # The layer extends its cache, in which one run again must not find its own keys.
        own = _cached_layers(layer)
        opened[layer] = _caches_mapped(lambda cache: copied(cache, own), received)

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


def _cached_layers(layer: nn.Module) -> set[int] | None:
    """Return which layers of a cache the modules of a model's layer extend; None if they do not tell."""
    named = (getattr(module, "layer_idx", None) for module in layer.modules())
    return {index for index in named if isinstance(index, int)} or None


def _caches_mapped(function: Callable[[Cache], Cache], value: Any) -> Any:
    """Apply a function to every cache in nested arguments."""
    if isinstance(value, Cache):
        return function(value)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_caches_mapped(function, item) for item in value)
    if isinstance(value, dict):
        return {name: _caches_mapped(function, item) for name, item in value.items()}
    return value

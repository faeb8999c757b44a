"""Measures how much a layer's output changes direction when one token's value vector is zeroed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.layer_maps import TOLERANCE, LayerMap, of_last_rows, stacked_maps
from captum_norm.bars import bar
from captum_norm.errors import CaptumNormError, NonFiniteError, UnsupportedModelError
from captum_norm.forward.record import CHUNK_BYTES, record
from captum_norm.forward.request import Request, layer_indices
from captum_norm.forward.session import check_seen
from captum_norm.functional import cosine_distance, length
from captum_norm.models.attention import AttentionCall
from captum_norm.models.caches import copied, of_first_copy, selected
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import End, Hook, Received, evaluating, first_argument, first_tensor, hooked
from captum_norm.models.layers import layer_of, not_run
from captum_norm.models.libraries.huggingface import HUGGING_FACE
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
        aggregation, options: see :class:`captum_norm.AttentionMapAttribution`.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2Model
        >>> model = GPT2Model(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> maps = ValueZeroing(model).maps(torch.tensor([[7, 9, 3]])).decoder
        >>> maps.shape, bool((maps.triu(1) == 0).all())
        (torch.Size([1, 2, 3, 3]), True)
    """

    name, units = "value-zeroing", MapUnits("cosine distance")
    decomposes = False
    text_alone = True

    def check_model(self, call: ModelCall) -> None:
        """Refuse layers that do not run on copies of an example along their first axis."""
        if call.facts.library is not HUGGING_FACE:
            raise UnsupportedModelError(
                f"got {self.session.name}, which is not a Hugging Face model; {type(self).__name__} supports only "
                "these, whose layers have the batch first"
            )
        super().check_model(call)

    def maps_of(self, call: ModelCall, request: Request) -> AttributionMaps:
        """Compute the distances of the layers requested, running each once per key."""
        session, asked, call = self.session, call, replace(call, last=None)
        blocks = session.blocks(call)
        if any(block.queries_first for block in blocks.values()):
            raise UnsupportedModelError(
                f"the layers of {type(self.model).__name__} receive (positions, batch, width); ValueZeroing supports "
                "only layers with the batch first"
            )
        around = set(layer_of(self.model, blocks, [module for module in blocks if blocks[module].cross]).values())
        session.expect_room(call, replace(request, weights=True))
        calls: list[_LayerCall] = []
        with evaluating(call.model), _recorded(around, calls):
            _, causal = record(call, lambda _: None, session.options)
        if not calls:
            raise not_run(self.model, around)
        if call.batch > 1:
            alone: list[_LayerCall] = []
            with torch.no_grad(), evaluating(call.model), _recorded(around, alone):
                record(call.example(0), lambda _: None, session.options)
            # Some arguments' first axis only happens to be as long as the batch.
            pairs = zip(calls, alone, strict=True)
            calls = [replace(together, shared=single.as_long_as(call.batch)) for together, single in pairs]
        stacks = _stacks(call, calls)
        check_seen(call, stacks, request)
        requested = {
            role: [(Place(role, index), layers[index]) for index in layer_indices(request.layers, len(layers))]
            for role, layers in stacks.items()
            if request.has_stack(role)
        }
        maps: dict[Role, list[tuple[int, LayerMap]]] = {}
        counts = {role: layers[0].output.shape[1] for role, layers in stacks.items() if role != "cross"}
        # Without its layers, the encoder's output is the input.
        counts["cross"] = counts.get("encoder", call.positions.length or 0)
        counts |= {role: counts[role] + call.prefix.past for role in counts if role in EXTENDED}
        total = call.batch * sum(counts[role] * len(layers) for role, layers in requested.items())
        with bar(f"values of {session.name}", total, "keys") as shown:
            for role, layers in requested.items():
                for place, layer in layers:
                    examples = (layer.example(example, call.batch) for example in range(call.batch))
                    rows = [self._distances(call, example, place, counts[role], shown.update) for example in examples]
                    maps.setdefault(role, []).append((place.index, LayerMap(torch.cat(rows))))
        return of_last_rows(asked, stacked_maps(call, maps, causal=causal))

    def chain(self, maps: AttributionMaps) -> SourceAndPrefix:
        """Roll out the distances, of which those of both sequences share each row of a decoder layer."""
        if self.aggregation != "rollout":
            return super().chain(maps)
        encoder, decoder, cross = maps.of_three_stacks
        shares = normalize_rows(torch.cat([cross, decoder], -1))[..., : cross.shape[-1]]
        return SourceAndPrefix(*encoder_decoder_rollout(encoder, decoder, shares))

    def _distances(
        self, call: ModelCall, layer: "_LayerCall", place: Place, count: int, advance: Callable[[int], object]
    ) -> Tensor:
        """Compute one example's map of one layer, (1, Q, K), with ``count`` keys."""
        device, size, columns = layer.output.device, layer.output.numel() * layer.output.element_size(), []
        step = max(1, self.session.options.budget[device] // (size * LAYER_COPIES))
        if device.type == "cpu":
            step = max(1, min(step, CHUNK_BYTES // size))
        dtype = torch.promote_types(self.session.options.accumulate, layer.output.dtype)
        for start in range(0, count, step):
            keys = slice(start, min(start + step, count))
            outputs, live = self._zeroed(call, layer, keys, place)
            outputs = outputs.to(dtype)
            self._check(outputs[:1], layer.output.to(dtype), place, layer.output.dtype)
            # Zeroing a key without weight changes only rounding.
            columns.append(cosine_distance(outputs[1:], outputs[:1]).T.where(live, 0))
            advance(keys.stop - keys.start)
        return torch.cat(columns, 1).unsqueeze(0)

    def _zeroed(self, call: ModelCall, layer: "_LayerCall", keys: slice, place: Place) -> tuple[Tensor, Tensor]:
        """Run a layer on copies of one example: the first unchanged, each other with one key's values zeroed."""
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
            outputs = layer.run(1 + keys.stop - keys.start)
        if len(live) != 1:
            raise UnsupportedModelError(
                f"{place} of {type(self.model).__name__}, run alone, called attention {len(live)} times; expected once"
            )
        return outputs, live[0]

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
    """A recorded call of a layer, (B, Q, D) in and out."""

    layer: nn.Module
    arguments: Received
    output: Tensor
    crosses: bool = False  # whether it may read an encoder's output, too
    shared: frozenset[_Path] = frozenset()  # what all examples share, though its first axis is as long as the batch

    def as_long_as(self, batch: int) -> frozenset[_Path]:
        """Find the tensors whose first axis is as long as the batch."""
        places = set[_Path]()

        def note(place: _Path, leaf: Tensor | Cache) -> Tensor | Cache:
            if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[0] == batch:
                places.add(place)
            return leaf

        _mapped(note, self.arguments)
        return frozenset(places)

    def example(self, index: int, batch: int) -> "_LayerCall":
        """Select one example; keep shared arguments and those without a batch axis, such as a common mask."""
        batched, ran = self.as_long_as(batch) - self.shared, _cached_layers(self.layer)
        row = slice(index, index + 1)

        def select(place: _Path, leaf: Tensor | Cache) -> Tensor | Cache:
            if isinstance(leaf, Cache):
                return selected(leaf, torch.tensor([index], device="cpu"), ran)
            return leaf[row] if place in batched else leaf

        return replace(self, arguments=_mapped(select, self.arguments), output=self.output[row])

    def run(self, copies: int) -> Tensor:
        """Run the layer on copies of one example's stream, (copies, Q, D), and of an encoder's output that it reads."""
        stream, ran = first_argument(*self.arguments), _cached_layers(self.layer)

        def repeat(_: _Path, leaf: Tensor | Cache) -> Tensor | Cache:
            if isinstance(leaf, Cache):
                return of_first_copy(leaf, ran)
            if leaf is stream:
                return leaf.expand(copies, *leaf.shape[1:]).contiguous()
            is_sequence = leaf.dim() == 3 and len(leaf) == 1 and leaf.is_floating_point()
            return leaf.expand(copies, *leaf.shape[1:]) if self.crosses and is_sequence else leaf

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


def _stacks(call: ModelCall, calls: list[_LayerCall]) -> dict[Role, list[_LayerCall]]:
    """Sort recorded calls by the stacks whose maps they give."""
    if call.encoder is None:
        return {"self": calls}
    encoder = frozenset(call.encoder.modules())
    encoding = [layer for layer in calls if layer.layer in encoder]
    decoding = [replace(layer, crosses=True) for layer in calls if layer.layer not in encoder]
    stacks: dict[Role, list[_LayerCall]] = {"encoder": encoding, "decoder": decoding, "cross": decoding}
    return {role: layers for role, layers in stacks.items() if layers}


@contextmanager
def _recorded(layers: set[nn.Module], calls: list[_LayerCall]) -> Iterator[None]:
    """While open, record every call of the layers in this thread."""
    opened = dict[nn.Module, Received]()

    def enter(layer: nn.Module, received: Received) -> None:
        # The layer extends its cache, in which one run again must not find its own keys.
        ran = _cached_layers(layer)
        opened[layer] = _mapped(lambda _, leaf: copied(leaf, ran) if isinstance(leaf, Cache) else leaf, received)

    def leave(layer: nn.Module, stream: Tensor | None) -> None:
        if stream is not None:
            calls.append(_LayerCall(layer, opened.pop(layer), stream))

    ends: tuple[tuple[End, Hook], ...] = (("arguments", enter), ("output", leave))
    with hooked((layer, *end) for layer in layers for end in ends):
        yield


def _mapped(function: Callable[[_Path, Tensor | Cache], Tensor | Cache], value: Any, place: _Path = ()) -> Any:
    """Apply a function to every tensor and cache in nested arguments, and its path."""
    if isinstance(value, (Tensor, Cache)):
        return function(place, value)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_mapped(function, item, (*place, index)) for index, item in enumerate(value))
    if isinstance(value, dict):
        return {name: _mapped(function, item, (*place, name)) for name, item in value.items()}
    return value


def _cached_layers(layer: nn.Module) -> set[int] | None:
    """Return which layers of a cache the modules of a model's layer extend; None if they do not tell."""
    indices = (getattr(module, "layer_idx", None) for module in layer.modules())
    return {index for index in indices if isinstance(index, int)} or None

"""A method's answers for single layers: checked, and put together at the positions that the user's inputs had."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from captum_norm.errors import CaptumNormError, IncompleteDecompositionError, MethodError, NonFiniteError
from captum_norm.forward.record import Layer
from captum_norm.forward.session import refuse_non_finite_weights
from captum_norm.models.call import ModelCall, Positions
from captum_norm.models.stacks import Place, Role, StackName
from captum_norm.results.maps import AttributionMaps, SourceAndPrefix
from captum_norm.results.stacks import STACKS

Results = TypeVar("Results")
TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.int8: 1e-1}
)
"""Largest relative completeness error accepted, by the model's precision.

Vectors are added up in float32 or better, so the error of half-precision models is that of the model's own rounding: a
few units in the last place (2⁻¹¹ and 2⁻⁸ of the value) of the attention weights, values and hidden states. Linear maps
that round their inputs to eight bits (``torch.int8``) err by steps of 1/127 of each input's largest entry.
"""


class LayerMap(NamedTuple):
    """A method's answer for one layer.

    Attributes:
        map: (B, [H,] Q, K).
        delta: completeness error, (B,); None for a method that decomposes nothing.
        precision: the least precise dtype of the layer's own computation, which sets the error's tolerance.
        discrepancy: the difference of fast and directly computed norms, (B,), and the dtype that sets its tolerance;
            or None.
        mixing_ratio: (B, Q), if the method defines one.
    """

    map: Tensor
    delta: Tensor | None = None
    precision: torch.dtype = torch.float32
    discrepancy: tuple[Tensor, torch.dtype] | None = None
    mixing_ratio: Tensor | None = None


Layers = list[tuple[int, LayerMap]]
"""The number of each layer of a stack and its map."""


def checked_map(
    layer_map: Callable[[Layer], Any], name: str, layer: Layer, shape: tuple[int, ...] | None = None
) -> LayerMap:
    """Compute the map of one layer by a method's function, whose mistakes are not the model's."""
    shape = shape or (len(layer.call.query), layer.call.query.shape[2], layer.call.key.shape[2])
    delta, before = layer.error(), _versions(layer)
    try:
        made: Any = layer_map(layer)
    except (CaptumNormError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise MethodError(f"{name} failed in {layer.place}: {type(error).__name__}: {error}") from error
    if _versions(layer) != before:
        raise MethodError(f"{name} wrote into a tensor of {layer.place}; work on a copy: clone()")
    if not isinstance(made, Tensor) or made.shape != shape:
        got = f"a tensor of shape {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        raise MethodError(
            f"{name} returned {got} for {layer.place}; expected a tensor of shape {shape}, a number for each query "
            "and key of each example"
        )
    rows = made if layer.real is None or shape[1] == 1 else made[layer.real.to(made.device)]
    # What the model itself computes may be no number, either; that is refused with the layer's error.
    if not rows.isfinite().all() and delta.isfinite().all():
        raise NonFiniteError(f"the map that {name} returned for {layer.place} contains NaN or infinity")
    return LayerMap(made.to(layer.dtype), delta, layer.block.precision())


def _versions(layer: Layer) -> list[int]:
    """Count the writes into a layer's tensors."""
    tensors = (layer.weights, layer.values, *(value for value in vars(layer.tensors).values()))
    return [value._version for value in tensors if isinstance(value, Tensor) and not value.is_inference()]


def check_layers(model: nn.Module, layers: Mapping[Role, Sequence[tuple[int, LayerMap | None]]]) -> None:
    """Refuse layers whose vectors do not add up to what the model computed; see :func:`expect_complete`."""
    for role, maps in layers.items():
        for number, made in maps:
            if made is not None and made.delta is not None:
                expect_complete(model, Place(role, number), made.delta, made.precision, made.discrepancy)


def stacked(parts: list[Tensor], axes: Mapping[int, Positions]) -> Tensor:
    """Stack each layer's (B, ...) to (B, L, ...) dropping each once it is copied, on the device of the first layer."""
    count = len(parts)
    made: Tensor | None = None
    for place in range(count):
        layer = parts.pop(0).unsqueeze(1)
        for axis, positions in axes.items():
            if positions.real is not None:
                layer = positions.restore(layer, axis)
        if count == 1:
            return layer
        if made is None:
            made = layer.new_empty(len(layer), count, *layer.shape[2:])
        made[:, place] = layer.squeeze(1).to(made.device)
    return cast(Tensor, made)  # no selection of layers is empty


def real_positions_of(call: ModelCall, positions: Positions, count: int) -> Tensor:
    """Mask of the real ones among ``count`` positions, (B, count), in the user's order."""
    if positions.real is None:
        return torch.ones(call.batch, count, dtype=torch.bool, device="cpu")
    return positions.shift_back(positions.real, -1)


def stack_name(role: Role, *, causal: bool) -> StackName:
    """Name of a stack; that of a model with one stack follows from its direction."""
    return role if role != "self" else "decoder" if causal else "encoder"


def stacked_maps(
    call: ModelCall, layers: Mapping[Role, Layers], *, causal: bool, segmented: bool = False
) -> AttributionMaps:
    """Put the maps of all stacks, which are dropped, together in the user's order of positions."""
    names = {role: stack_name(role, causal=causal) for role in layers}
    # A tower has pictures for examples.
    main = [role for role in layers if names[role] in STACKS] or list(layers)
    deltas = [made.delta for role in main for _, made in layers[role] if made.delta is not None]
    ratios = [made.mixing_ratio for _, made in layers[main[0]] if made.mixing_ratio is not None]
    positions = {role: call.positions_of(role) for role in layers}
    numbers: dict[StackName, list[int]] = {}
    stacks: dict[StackName, Tensor] = {}
    for role, made in layers.items():
        # Without padding, which segments exclude, nothing is to be restored.
        axes = {} if segmented else dict(zip((-2, -1), positions[role], strict=True))
        numbers[names[role]] = [number for number, _ in made]
        parts = [layer.map for _, layer in made]
        made.clear()
        stacks[names[role]] = stacked(parts, axes)
    ratio = stacked(ratios, {-1: positions[main[0]][0]}) if ratios and len(main) == 1 else None
    delta = stacked(deltas, {}) if deltas else None
    return maps_of_call(call, stacks, numbers, ratio=ratio, delta=delta, segmented=segmented)


def maps_of_call(
    call: ModelCall,
    stacks: Mapping[StackName, Tensor],
    layers: Mapping[StackName, Sequence[int]],
    *,
    ratio: Tensor | None = None,
    delta: Tensor | None = None,
    segmented: bool = False,
) -> AttributionMaps:
    """Say of which positions and layers maps are."""
    encoder, decoder, cross = (stacks.get(name) for name in STACKS)
    target: Role | None = None
    count: int | None = None
    if call.facts.decoder is None:
        main = next((name for name in STACKS if name in stacks), next(iter(stacks)))
        source, count = "self" if main in ("encoder", "decoder") else main, stacks[main].shape[-2]
        target = None if cross is None else "cross"  # to a tower's positions
    elif decoder is not None and encoder is None and cross is None:
        source, count = "decoder", decoder.shape[-2]
    else:
        source = "encoder"
        if encoder is not None:
            count = encoder.shape[-2]
        target = None if decoder is None and cross is None else "decoder"
    (queries, _), read = call.positions_of(source), None if target is None else call.positions_of(target)[0]
    pictures, decoder_real = call.pictures, None
    if count is None:
        count = queries.length or cast(Tensor, cross).shape[-1]
    if read is not None:
        rows = cast(Tensor, decoder if cross is None else cross)
        decoder_real = real_positions_of(call, read, rows.shape[-2])
    return AttributionMaps(
        encoder=encoder,
        decoder=decoder,
        cross=cross,
        mixing_ratio=ratio,
        convergence_delta=delta,
        tokens=call.texts_of(source if call.facts.decoder is not None else "self"),
        segmented=segmented,
        virtual=call.prefix.virtual_tokens,
        cached=call.without_rows,
        decoder_real=decoder_real,
        decoder_tokens=call.texts_of("decoder") if target == "decoder" else None,
        towers={name: stack for name, stack in stacks.items() if name not in STACKS},
        modality=pictures.modality,
        patches=pictures.patches_among(count) if pictures.patches else (),
        layers=layers,
        real=real_positions_of(call, queries, count),
    )


def of_last_rows(call: ModelCall, maps: AttributionMaps) -> AttributionMaps:
    """Cut maps of all rows to those that a call asks for."""
    count, stacks = call.last, (maps.encoder, maps.decoder, maps.cross)
    if count is None or all(stack is None for stack in stacks):
        return maps

    def cut(rows: Tensor | None, axis: int) -> Tensor | None:
        return None if rows is None else rows.narrow(axis, rows.shape[axis] - count, count).clone()

    # An encoder keeps all its rows, unless it is the model.
    encoding = call.encoder is not None and maps.encoder is not None
    source = call.encoder is not None and (maps.encoder is not None or maps.cross is not None)
    return replace(
        maps,
        encoder=maps.encoder if encoding else cut(maps.encoder, -2),
        decoder=cut(maps.decoder, -2),
        cross=cut(maps.cross, -2),
        mixing_ratio=maps.mixing_ratio if encoding else cut(maps.mixing_ratio, -1),
        real=maps.real if source else cast(Tensor, cut(maps.real, -1)),
        decoder_real=cut(maps.decoder_real, -1),
        cached=call.without_rows,
    )


def scores_of_inputs(call: ModelCall, scores: Any) -> Any:
    """Drop the scores of virtual tokens and cached positions, which come before those of the inputs."""
    if isinstance(scores, SourceAndPrefix):
        return SourceAndPrefix(call.positions.last(scores.source), call.decoder.last(scores.prefix))
    return call.positions.last(scores)


def finite_results(model: nn.Module, results: Results) -> Results:
    """Return a method's results unchanged if all their numbers are finite."""
    found = [(name, tensor.detach()) for name, tensor in _tensors(results) if tensor.is_floating_point()]
    # A sum takes one pass and no memory, but may overflow although all numbers are finite.
    sums = [tensor.sum().to(found[0][1]) for _, tensor in found]
    if sums and not torch.stack(sums).isfinite().all():
        for name, tensor in found:
            if not tensor.isfinite().all():
                refuse_non_finite_weights(model)
                raise NonFiniteError(
                    f"{name or 'a result'} for {type(model).__name__} contains NaN or infinity: its numbers do, or "
                    f"leave the range of {tensor.dtype}; check the inputs, or convert the model to a wider dtype"
                )
    return results


def _tensors(results: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors in nested results with the names of their fields."""
    fields = _fields(results)
    if isinstance(results, Tensor):
        yield name, results
    elif fields:
        for field, entry in fields.items():
            yield from _tensors(entry, f"{name}.{field}" if name else field)
    elif isinstance(results, tuple):
        for entry in results:
            yield from _tensors(entry, name)


def _fields(results: Any) -> Mapping[str, Any]:
    """The fields of a mapping, dataclass or named tuple; none for anything else."""
    if isinstance(results, Mapping):
        return results
    if is_dataclass(results):
        return vars(results)
    return results._asdict() if isinstance(results, tuple) and hasattr(results, "_asdict") else {}


def expect_finite(model: nn.Module, place: Place, *results: Tensor) -> None:
    """Refuse a layer's results with NaN or infinity."""
    if not all(result.isfinite().all() for result in results):
        raise NonFiniteError(f"what {type(model).__name__} computes in {place} contains NaN or infinity")


def expect_complete(
    model: nn.Module,
    place: Place,
    delta: Tensor,
    precision: torch.dtype,
    discrepancy: tuple[Tensor, torch.dtype] | None = None,
) -> None:
    """Refuse a layer whose vectors do not add up, or whose fast norms differ from directly computed ones."""
    errors = [("the vectors of {} do not add up to what {} computed: relative error", delta, precision)]
    if discrepancy is not None:
        errors.append(("the fast norms of {} of {} differ from directly computed ones by", *discrepancy))
    for problem, error, dtype in errors:
        expect_finite(model, place, error)
        largest, accepted = error.max().item(), TOLERANCE[dtype]
        if largest > accepted:
            said = problem.format(place, type(model).__name__)
            raise IncompleteDecompositionError(f"{said} {largest:.1e}, accepted {accepted:.0e} for {dtype}")


def expect_number(model: nn.Module, number: Tensor) -> None:
    """Refuse an output that is not finite."""
    if not number.isfinite().all():
        refuse_non_finite_weights(model)
        raise NonFiniteError(f"the output of {type(model).__name__} contains NaN or infinity")

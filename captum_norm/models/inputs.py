"""Binds what the user gives to the parameters of the model's forward function, and checks it."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.errors import CaptumNormError, InvalidInputError, UnsupportedModelError
from captum_norm.memory import MemoryBudget
from captum_norm.models.attention import AttentionFunction
from captum_norm.models.hooks import evaluating
from captum_norm.models.known import KnownModel, known_model
from captum_norm.models.libraries.library import Library, SequenceNames, SequencesSeen
from captum_norm.models.main_input import SequenceReader, check_shape, check_tensors
from captum_norm.models.stacks import Role, Stacks

Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Any]


@dataclass(frozen=True)
class Positions:
    """The positions of one input sequence, the encoder's or the decoder's.

    Attributes:
        length: number of positions, or None where the input is no sequence (an image) or unknown.
        real: True at real positions, (B, S), or None where nothing is padded.
        shift: how far each example was moved left to begin at position 0, (B,), or None where none was.
    """

    length: int | None = None
    real: Tensor | None = None
    shift: Tensor | None = None

    @property
    def several(self) -> bool:
        """Whether some example has more than one real position."""
        if self.length is None or self.real is None:
            return self.length != 1
        return int(self.real.sum(1).max()) > 1

    def moved(self, value: Any) -> Any:
        """An argument that has one entry a position, moved as the examples were; any other as it is."""
        return value if self.shift is None else _rolled(value, self.shift, self.length)

    def unshift(self, rows: Tensor, axis: int) -> Tensor:
        """Move results back to the positions that the user's inputs had, along an axis of length S."""
        if self.shift is None:
            return rows
        shape = [1] * rows.dim()
        shape[0], shape[axis] = rows.shape[0], rows.shape[axis]
        index = _places(-self.shift.to(rows.device), rows.shape[axis]).reshape(shape)
        return rows.gather(axis, index.expand_as(rows))

    def restored(self, rows: Tensor, axis: int) -> Tensor:
        """Results at the positions that the user's inputs had, 0 at padding, along an axis of length S."""
        if self.real is not None:
            shape = [1] * rows.dim()
            shape[0], shape[axis] = rows.shape[0], rows.shape[axis]
            rows = rows.where(self.real.to(rows.device).reshape(shape), 0)
        return self.unshift(rows, axis)

    def cut(self, value: Any, batch: int, length: int) -> Any:
        """The first example's first positions of an argument; of a mask over queries and keys the first of both."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if self.length != batch and value.shape == (self.length, self.length):
            return value[:length, :length]
        if self.length != batch and value.shape[:2] == (self.length, batch):
            return value[:length, :1]
        if value.shape[0] != batch:
            return value
        sequence = self.length is not None and value.dim() >= 2 and value.shape[1] == self.length
        return value[:1, :length] if sequence else value[:1]


@dataclass(frozen=True)
class ModelCall:
    """One call of a model.

    Attributes:
        model: the model.
        known: what is known about it.
        arguments: the arguments of its forward function, by name.
        batch: number of examples.
        positions: of the inputs; of the encoder's in an encoder–decoder model.
        decoder: positions of the decoder's inputs in an encoder–decoder model.
        tokens: the tokens' texts, if the inputs brought them.
        budget: how much memory pieces of what is computed for this call may take.
    """

    model: nn.Module
    known: KnownModel
    arguments: dict[str, Any]
    batch: int
    positions: Positions
    decoder: Positions
    tokens: Sequence[Sequence[str]] | None
    budget: MemoryBudget

    @property
    def library(self) -> Library:
        """The library that the model is built with."""
        return self.known.library

    def stacks(self) -> Stacks:
        """What checks the attention calls of a forward pass."""
        return Stacks(self.known.encoder, several=self.positions.several)

    @contextmanager
    def attention_through(self, function: AttentionFunction) -> Iterator[None]:
        """While open, the model is in ``eval()`` and attends through ``function``; it is left as it was."""
        with self.library.attention_through(self.model, function), evaluating(self.model):
            yield

    def positions_of(self, role: Role) -> tuple[Positions, Positions]:
        """The positions of a stack's queries and of its keys."""
        queries = self.decoder if role in ("decoder", "cross") else self.positions
        return queries, self.decoder if role == "decoder" else self.positions

    def run(self) -> Any:
        """What the model returns; what its own code refuses becomes an :class:`~captum_norm.InvalidInputError`."""
        try:
            return self.model(**self.arguments)
        except (CaptumNormError, torch.OutOfMemoryError):
            raise
        except (LookupError, ValueError, RuntimeError, TypeError, AttributeError, AssertionError) as error:
            if _raised_here(error):
                raise
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            lacks_decoder = self.known.encoder is not None and not any(map(self.library.is_decoders, self.arguments))
            hint = f" ({self.library.without_decoder})" * lacks_decoder
            if "padding token" in reason:
                hint = " (copies of one example are a batch, too; set model.config.pad_token_id)"
            raise InvalidInputError(
                f"the forward pass of {type(self.model).__name__} does not accept these inputs: {reason}{hint}"
            ) from error

    def excerpt(self, length: int) -> "ModelCall":
        """The first example alone, cut to its first ``length`` positions."""
        arguments = self._changed(lambda name, value: self._positions_for(name).cut(value, self.batch, length))
        positions, decoder = (
            replace(old, length=old.length and min(old.length, length), real=old.cut(old.real, self.batch, length))
            for old in (self.positions, self.decoder)
        )
        return replace(self, arguments=arguments, batch=1, positions=positions, decoder=decoder)

    def example(self, index: int) -> "ModelCall":
        """One example alone."""

        def cut(value: Any) -> Any:
            batched = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == self.batch
            return value[index : index + 1] if batched else value

        return self._with_each(cut, batch=1)

    def repeated(self, copies: int) -> "ModelCall":
        """One example's call with the example ``copies`` times."""

        def repeat(value: Any) -> Any:
            batched = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == self.batch
            return value.expand(copies, *value.shape[1:]) if batched else value

        return self._with_each(repeat, batch=copies)

    def outside_inference(self) -> "ModelCall":
        """The call with tensors that may be part of a graph; those made in inference mode may not."""

        def outside(value: Any) -> Any:
            return value.clone() if isinstance(value, Tensor) and value.is_inference() else value

        return replace(self, arguments=self._changed(lambda _, value: outside(value)))

    def _with_each(self, change: Callable[[Any], Any], batch: int) -> "ModelCall":
        """The call with a change of every argument and of what is known of the positions."""
        arguments = self._changed(lambda _, value: change(value))
        positions, decoder = (
            replace(old, real=change(old.real), shift=change(old.shift)) for old in (self.positions, self.decoder)
        )
        return replace(self, arguments=arguments, batch=batch, positions=positions, decoder=decoder)

    def _changed(self, change: Callable[[str, Any], Any]) -> dict[str, Any]:
        """The arguments, each changed; what was one tensor under two names still is, as queries and keys may be."""
        once: dict[int, Any] = {}
        return {name: once.setdefault(id(value), change(name, value)) for name, value in self.arguments.items()}

    def _positions_for(self, name: str) -> Positions:
        return self.decoder if self.library.is_decoders(name) else self.positions


def _raised_here(error: Exception) -> bool:
    """Whether an error comes from our own hooks rather than from the model's code."""
    # A function mode of ours stands around every function of torch that the model's code calls.
    *_, frame = (frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name != "__torch_function__")
    return str(frame.f_globals.get("__name__")).startswith("captum_norm.")


def bind_inputs(
    model: nn.Module, inputs: Inputs, additional_forward_args: Any = None, budget: MemoryBudget | None = None
) -> ModelCall:
    """Bind inputs to a model.

    Args:
        model: the model.
        inputs: token ids (B, S), embeddings (B, S, D), pixel values (B, C, height, width), a tuple of tensors (the
            model's first positional arguments), or a mapping of argument names to tensors.
        additional_forward_args: the model's further positional arguments: a value, or a tuple of them.
        budget: how much memory pieces of what is computed for the call may take.

    Returns:
        the call. A left-padded batch is moved to the left, so that each example starts at position 0 as it would
        alone; :meth:`ModelCall.unshift` moves results back.

    Raises:
        UnsupportedModelError: for a model whose calls are spread over several devices by threads.
        InvalidInputError: for empty inputs, ids outside the vocabulary, a mask of another shape, too long a sequence.
    """
    known, budget = known_model(model), MemoryBudget() if budget is None else budget
    library, parameters = known.library, known.parameters
    further = additional_forward_args if isinstance(additional_forward_args, tuple) else (additional_forward_args,)
    positional = list(further) if additional_forward_args is not None else []
    if isinstance(inputs, Mapping):
        if positional:
            raise InvalidInputError(
                "got additional_forward_args beside a mapping of inputs; put all arguments into the mapping"
            )
        main, arguments = _main_argument(library.inputs, inputs, parameters), dict(inputs)
    else:
        tensors: tuple[Any, ...] = inputs if isinstance(inputs, tuple) and inputs else (inputs,)
        main, *rest = tensors
        if not isinstance(main, Tensor):
            got = (
                "an empty tuple"
                if isinstance(inputs, tuple) and not inputs
                else f"inputs of type {type(main).__name__}"
            )
            raise InvalidInputError(f"got {got}; expected a tensor, a tuple of tensors or a mapping")
        arguments = _named(model, parameters, main, [*rest, *positional])
    if "use_cache" in parameters and arguments.get("use_cache") is None:
        arguments["use_cache"] = False
    check_tensors(arguments)
    _leave_caches_alone(arguments)
    if library.sequences is not None:
        check_shape(main)
        call = ModelCall(model, known, arguments, len(main), Positions(), Positions(), _tokens(inputs), budget)
        return _as_seen(call, main, library.sequences)
    positions = _positions(known.readers[0], library.inputs, main, arguments)
    decoder = Positions()
    if known.encoder is not None:
        given = (arguments.get(name) for name in library.decoder.main)
        start = next((value for value in given if isinstance(value, Tensor)), None)
        if start is not None:
            decoder = _positions(known.readers[1], library.decoder, start, arguments)
            if len(start) != len(main):
                raise InvalidInputError(f"got {len(main)} examples for the encoder and {len(start)} for the decoder")
    if positions.shift is not None or decoder.shift is not None:
        moved = ((name, decoder if library.is_decoders(name) else positions) for name in arguments)
        arguments = {name: read.moved(arguments[name]) for name, read in moved}
    return ModelCall(model, known, arguments, len(main), positions, decoder, _tokens(inputs), budget)


def _leave_caches_alone(arguments: dict[str, Any]) -> None:
    """Run without a cache of the user's, which every forward pass would write into.

    Raises:
        InvalidInputError: if it holds positions.
    """
    for name in ("past_key_values", "cache_params"):
        cache = arguments.get(name)
        if cache is None:
            continue
        count = getattr(cache, "get_seq_length", None)
        if count is None or count():
            raise InvalidInputError(
                f"got {name} of type {type(cache).__name__} with positions in it; expected the whole sequence among "
                f"the inputs, and no {name}"
            )
        arguments[name] = None


def _as_seen(call: ModelCall, main: Tensor, sequences: SequencesSeen) -> ModelCall:
    """The call with the batch and the positions that attention is given; nothing is moved."""
    with torch.no_grad(), evaluating(call.model):
        found = sequences(call.model, call.run)
    for real in found:
        if real is None:
            continue
        if len(real) not in main.shape[:2]:
            raise UnsupportedModelError(
                f"attention in {type(call.model).__name__} is given {len(real)} examples for inputs of shape "
                f"{tuple(main.shape)}; expected as many as the inputs have"
            )
        _check_some_real(real, "the padding mask")
        call = replace(call, batch=len(real))
    positions, decoder = (
        Positions() if real is None else Positions(real.shape[1], None if real.all() else real) for real in found
    )
    return replace(call, positions=positions, decoder=decoder)


def _positions(reader: SequenceReader, names: SequenceNames, main: Tensor, arguments: Mapping[str, Any]) -> Positions:
    """The positions of one input after its examples were moved to begin at position 0."""
    signal = next((name for name in names.signals if arguments.get(name) is main), None)
    if signal is not None and main.numel() > 0:
        _refuse_padding(signal, None if names.mask is None else arguments.get(names.mask))
        return Positions()
    length = reader.check(main)
    if names.mask is None:
        real = _unpadded(reader.embeddings, main)
    else:
        real = _real_positions(arguments.get(names.mask), main, length)
    if real is None:
        return Positions(length)
    _check_some_real(real, "the padding id" if names.mask is None else "the attention mask")
    shift = real.to(torch.int8).argmax(1)
    if not shift.any():
        return Positions(length, None if real.all() else real)
    real = _rolled(real, shift, length)
    return Positions(length, None if real.all() else real, shift)


def _check_some_real(real: Tensor, cause: str) -> None:
    empty = (~real.any(1)).nonzero()
    if len(empty):
        raise InvalidInputError(f"{cause} leaves no position of example {int(empty[0])}")


def _refuse_padding(signal: str, mask: Any) -> None:
    """Which of the positions that a model makes of a signal are padding cannot be told."""
    if isinstance(mask, Tensor) and not mask.all():
        raise InvalidInputError(
            f"got {signal} with an attention mask that has padding; expected examples of one length, without a mask"
        )


def _named(
    model: nn.Module, parameters: Mapping[str, inspect.Parameter], main: Tensor, further: Sequence[Any]
) -> dict[str, Any]:
    """Positional arguments by the names of the forward function's parameters."""
    first, *names = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ] or [""]
    # The mask comes first in nearly all models; in those where a cache does (GPT-2) nobody means the cache.
    names.sort(key=lambda name: name != "attention_mask")
    if not first or len(names) < len(further):
        raise InvalidInputError(
            f"got {1 + len(further)} positional arguments, but the forward function of {type(model).__name__} names "
            f"{len(names) + bool(first)}; pass a mapping of names to tensors, such as the tokenizer's output"
        )
    embeddings = main.is_floating_point() and main.dim() == 3 and "inputs_embeds" in parameters
    return {"inputs_embeds" if embeddings else first: main, **dict(zip(names, further, strict=False))}


def _main_argument(
    names: SequenceNames, inputs: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> Tensor:
    for name in (*names.main, *parameters):
        if isinstance(inputs.get(name), Tensor):
            return inputs[name]  # type: ignore[no-any-return]
    raise InvalidInputError(
        f"got inputs with the keys {sorted(inputs)}; expected {' or '.join(names.main)} as a tensor"
    )


def _real_positions(mask: Any, main: Tensor, length: int | None) -> Tensor | None:
    if mask is None or length is None:
        return None
    if not isinstance(mask, Tensor):
        raise InvalidInputError(f"got an attention mask of type {type(mask).__name__}; expected a tensor")
    if mask.shape != main.shape[:2]:
        raise InvalidInputError(
            f"got an attention mask of shape {tuple(mask.shape)} for inputs of shape {tuple(main.shape)}; expected "
            f"{tuple(main.shape[:2])}"
        )
    if not ((mask == 0) | (mask == 1)).all():
        raise InvalidInputError("the attention mask has other values than 1 (real position) and 0 (padding)")
    return mask.bool()


def _unpadded(embeddings: nn.Module | None, ids: Tensor) -> Tensor | None:
    """Where token ids are not the padding id."""
    if ids.is_floating_point():
        raise InvalidInputError(f"got inputs of dtype {ids.dtype}; expected token ids")
    padding = getattr(embeddings, "padding_idx", None)
    return None if padding is None else ids != padding


def _places(shift: Tensor, length: int) -> Tensor:
    return (torch.arange(length, device=shift.device) + shift[:, None]) % length


def _rolled(value: Any, shift: Tensor, length: int | None) -> Any:
    if not isinstance(value, Tensor) or value.dim() < 2 or tuple(value.shape[:2]) != (len(shift), length):
        return value
    places = _places(shift.to(value.device), value.shape[1])
    index = places.reshape(*places.shape, *[1] * (value.dim() - 2))
    return value.gather(1, index.expand_as(value))


def _tokens(inputs: Inputs) -> Sequence[Sequence[str]] | None:
    """The tokens' texts that a fast tokenizer's output carries."""
    encodings = getattr(inputs, "encodings", None)
    return [list(encoding.tokens) for encoding in encodings] if encodings else None

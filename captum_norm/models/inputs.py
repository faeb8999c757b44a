"""Binds the user's inputs to the parameters of a model's forward function, and checks them."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.models.caches import CACHE, STATES, past_length, taken_cache
from captum_norm.models.call import ModelCall, Positions, Prefix, TokenTexts, rolled
from captum_norm.models.hooks import evaluating
from captum_norm.models.libraries.library import SequencesSeen
from captum_norm.models.model import Model, Reader, longest_sequence, understand
from captum_norm.models.objects import Texts, are_texts, tokenized
from captum_norm.models.offloading import expect_same_inputs
from captum_norm.models.wrappers import tokens_of_adapter

Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Any] | Texts
# torch neither compares them nor uses them as indices.
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def bind_inputs(
    model: nn.Module | Model, inputs: Inputs, additional_forward_args: Any = None, tokenizer: Any = None
) -> ModelCall:
    """Bind inputs to a model; left-padded examples are shifted to begin at position 0, as they would alone."""
    facts = understand(model) if isinstance(model, nn.Module) else model
    library = facts.library
    if facts.processes is not None:
        expect_same_inputs(facts.processes, inputs, additional_forward_args)
    encodings = getattr(inputs, "encodings", None)  # of a fast tokenizer's output
    texts: TokenTexts = [list(encoding.tokens) for encoding in encodings] if encodings else None
    if not isinstance(inputs, Tensor) and are_texts(inputs):
        inputs = tokenized(facts.module, inputs, tokenizer)
        texts = [tokenizer.convert_ids_to_tokens(ids) for ids in inputs["input_ids"].tolist()]
    main, arguments = _named(facts, inputs, additional_forward_args)
    if "pixel_values" in facts.parameters and "input_ids" not in facts.parameters and main.dim() == 2:
        kind = type(facts.module).__name__
        raise InvalidInputError(
            f"got inputs of shape {tuple(main.shape)} for {kind}, which reads pictures; expected pixel_values (batch, "
            "channels, height, width), such as an image processor returns"
        )
    given = (arguments.get(name) for name in library.decoder) if facts.decoder is not None else ()
    start = next((value for value in given if isinstance(value, Tensor)), None)
    prefix = _read_prefix(facts, arguments, main, main if start is None else start)
    if library.sequences is not None:
        check_shape(main)
        call = ModelCall(facts, arguments, len(main), Positions(texts=texts), Positions())
        return _with_positions_seen(call, main, library.sequences)
    before = prefix.virtual + (prefix.past if facts.decoder is None else 0)
    positions = _read_positions(facts, facts.reader, main, arguments, before, fixed=prefix.cache is not None)
    decoder = Positions()
    if facts.decoder is not None and start is not None:
        past, fixed = prefix.past, prefix.cache is not None
        decoder = _read_positions(facts, facts.decoder, start, arguments, past, fixed=fixed)
        if len(start) != len(main):
            raise InvalidInputError(
                f"got {len(main)} examples for the encoder and {len(start)} for the decoder; expected equally many"
            )
    if positions.shift is not None or decoder.shift is not None:
        read = ((name, decoder if library.is_decoders(name) else positions) for name in arguments)
        arguments = {name: own.shift_left(arguments[name]) for name, own in read}
    if facts.decoder is not None:  # the two sequences of an encoder–decoder model come as ids
        texts = _texts_of_ids(main, tokenizer) if texts is None else texts
        decoder = replace(decoder, texts=_texts_of_ids(start, tokenizer))
    return ModelCall(facts, arguments, len(main), replace(positions, texts=texts), decoder, prefix)


def _named(facts: Model, inputs: Inputs, additional_forward_args: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the main input, and all arguments of the model's forward function by name."""
    parameters, names = facts.parameters, facts.library.inputs
    further = additional_forward_args if isinstance(additional_forward_args, tuple) else (additional_forward_args,)
    positional = [] if additional_forward_args is None else list(further)
    if isinstance(inputs, Mapping):
        if positional:
            raise InvalidInputError(
                "got additional_forward_args beside a mapping of inputs; put all arguments in the mapping"
            )
        return _main_argument(names, inputs, parameters), dict(inputs)
    tensors: tuple[Any, ...] = inputs if isinstance(inputs, tuple) and inputs else (inputs,)
    main, *rest = tensors
    if not isinstance(main, Tensor):
        kind = type(main).__name__
        got = f"an empty {kind}" if isinstance(main, tuple | list) and not main else f"inputs of type {kind}"
        raise InvalidInputError(
            f"got {got}; expected a tensor, such as torch.tensor(ids), a tuple of tensors, a mapping, or texts"
        )
    return main, _arguments_by_name(facts.module, parameters, main, [*rest, *positional])


def _arguments_by_name(
    model: nn.Module, parameters: Mapping[str, inspect.Parameter], main: Tensor, further: Sequence[Any]
) -> dict[str, Any]:
    """Name positional arguments after the parameters of the forward function."""
    first, *names = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ] or [""]
    # Almost always the mask comes next; where a cache does (GPT-2), nobody means the cache.
    names.sort(key=lambda name: name != "attention_mask")
    if not first or len(names) < len(further):
        raise InvalidInputError(
            f"got {1 + len(further)} positional arguments, but the forward function of {type(model).__name__} takes "
            f"{len(names) + bool(first)}; pass a mapping of names to tensors, such as the tokenizer's output"
        )
    embeddings = main.is_floating_point() and main.dim() == 3 and "inputs_embeds" in parameters
    return {"inputs_embeds" if embeddings else first: main, **dict(zip(names, further, strict=False))}


def _main_argument(
    names: Sequence[str], inputs: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> Tensor:
    states = inputs.get("encoder_outputs")
    if states is not None and not any(isinstance(inputs.get(name), Tensor) for name in names):
        return states[0]  # type: ignore[no-any-return]
    for name in (*names, *parameters):
        if isinstance(inputs.get(name), Tensor):
            return inputs[name]  # type: ignore[no-any-return]
    tensors = ': tokenizer(texts, return_tensors="pt") returns tensors' * ("input_ids" in inputs)
    raise InvalidInputError(
        f"got inputs with the keys {sorted(inputs)}; expected {' or '.join(names)} as a tensor{tensors}"
    )


def _texts_of_ids(ids: Tensor | None, tokenizer: Any) -> Sequence[Sequence[str]] | None:
    """Return the tokens' texts by the tokenizer, if it is known."""
    read = getattr(tokenizer, "convert_ids_to_tokens", None)
    if read is None or ids is None or ids.dim() != 2 or ids.is_floating_point():
        return None
    return [[str(token) for token in read(row)] for row in ids.tolist()]


def _with_positions_seen(call: ModelCall, main: Tensor, sequences: SequencesSeen) -> ModelCall:
    """Take batch size and positions from the sequences that attention receives; shift nothing."""
    with torch.no_grad(), evaluating(call.model):
        seen = sequences(call.model, call.run)
    for real in seen:
        if real is None:
            continue
        if len(real) not in main.shape[:2]:
            raise UnsupportedModelError(
                f"attention in {type(call.model).__name__} receives {len(real)} examples for inputs of shape "
                f"{tuple(main.shape)}; expected one for each example of the inputs"
            )
        _check_some_real(real, "the padding mask")
        call = replace(call, batch=len(real))
    positions, decoder = (
        Positions() if real is None else Positions(real.shape[1], None if real.all() else real) for real in seen
    )
    return replace(call, positions=replace(positions, texts=call.positions.texts), decoder=decoder)


def check_sequence(part: nn.Module, embeddings: nn.Module | None, main: Tensor) -> int | None:
    """Check shape, token ids and length of an input.

    Args:
        part: what reads it: a model, its encoder or its decoder.
        embeddings: the token embeddings of ``part``, if any.
        main: the input.

    Returns:
        the length of a sequence; None for an image.

    Raises:
        InvalidInputError: if shape, dtype or length is wrong, it is empty, or ids are outside the vocabulary.
    """
    return _check_sequence(Reader(part, embeddings, longest_sequence(part)), main, 0)


def _check_sequence(reader: Reader, main: Tensor, before: int) -> int | None:
    check_shape(main)
    if main.dim() > 3:
        return None
    name, embeddings = type(reader.module).__name__, reader.embeddings
    if not main.is_floating_point() and isinstance(embeddings, nn.Embedding):
        smallest, largest = int(main.min()), int(main.max())
        if smallest < 0 or largest >= embeddings.num_embeddings:
            wrong = smallest if smallest < 0 else largest
            raise InvalidInputError(
                f"got the token id {wrong}; {name} knows the ids 0 to {embeddings.num_embeddings - 1}"
            )
    if reader.longest is not None and before + main.shape[1] > reader.longest:
        behind = f" after {before} others" if before else ""
        raise InvalidInputError(
            f"got a sequence of {main.shape[1]} positions{behind}; {name} allows at most {reader.longest}: shorten it"
        )
    return main.shape[1]


def check_shape(main: Tensor) -> None:
    """Check that an input is token ids, embeddings or an image, and not empty."""
    if main.dtype in _UNSIGNED or main.is_complex():
        raise InvalidInputError(
            f"got inputs of dtype {main.dtype}; expected token ids (torch.int64) or floating-point numbers"
        )
    shape = tuple(main.shape)
    if not main.is_floating_point() and main.dim() != 2:
        alone = ", such as ids[None] for one example" if main.dim() == 1 else ""
        raise InvalidInputError(f"got token ids of shape {shape}; expected (batch, sequence){alone}")
    if main.is_floating_point() and main.dim() < 3:
        raise InvalidInputError(
            f"got inputs of shape {shape} and dtype {main.dtype}; expected token ids (integers) of shape "
            "(batch, sequence), embeddings (batch, sequence, width) or pixel values"
        )
    if main.numel() == 0:
        raise InvalidInputError(f"got empty inputs of shape {shape}; expected at least one example and one position")


def _read_prefix(facts: Model, arguments: dict[str, Any], main: Tensor, continued: Tensor) -> Prefix:
    """Take the cache, which belongs to the input ``continued``, out of the arguments; count the virtual tokens."""
    module, library = facts.module, facts.library
    virtual = None if facts.adapted is None else tokens_of_adapter(facts.adapted)
    given = arguments.get(CACHE) is not None or arguments.get(STATES) is not None
    cache = taken_cache(arguments, len(main) if main.dim() else 0) if given else None
    if cache is None:
        number, attend = virtual or (0, True)
        if not attend:
            return Prefix(past=number)
        # A cache is of use to nobody here, but where positions restart its absence tells transformers to see several
        # sequences in one: then the model's own default decides.
        unset = arguments.get("use_cache") is None and arguments.get("position_ids") is None
        if facts.takes_cache and unset:
            arguments["use_cache"] = False
        return Prefix(virtual=number)
    if virtual is not None:
        raise InvalidInputError(
            f"got past_key_values for {type(module).__name__}, which puts its virtual tokens before the inputs of "
            "every call; expected the whole sequence, and no past_key_values"
        )
    mask = library.mask if continued is main else library.decoder_mask
    if mask is None or library.sequences is not None:
        raise InvalidInputError(
            f"got past_key_values for {type(module).__name__}; caches are supported for Hugging Face models: expected "
            "the whole sequence, and no past_key_values"
        )
    past = past_length(cache)
    return Prefix(cache, past, _split_mask(arguments, mask, past, continued))


def _split_mask(arguments: dict[str, Any], name: str, past: int, new: Tensor) -> Tensor | None:
    """Cut a mask over cached and new positions to the new ones; return where the cached ones are real, (B, past)."""
    mask = arguments.get(name)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    expected = (len(new), past + new.shape[1])
    if tuple(mask.shape) != expected:
        raise InvalidInputError(
            f"got {name} of shape {tuple(mask.shape)} for {past} cached and {new.shape[1]} new positions; expected "
            f"{expected}"
        )
    arguments[name] = mask[:, past:]
    return None if mask[:, :past].all() else mask[:, :past].bool()


def _read_positions(
    facts: Model, reader: Reader, main: Tensor, arguments: Mapping[str, Any], before: int, *, fixed: bool
) -> Positions:
    """Read the positions of one input; each example is shifted to begin at position 0, unless a cache fixes it."""
    library = facts.library
    mask = library.decoder_mask if reader is facts.decoder else library.mask
    given = None if mask is None else arguments.get(mask)
    signal = next((name for name in library.signals if arguments.get(name) is main), None)
    if signal is not None and main.numel() > 0:
        if isinstance(given, Tensor) and not given.all():  # which of the positions made of them are padding is unknown
            raise InvalidInputError(
                f"got {signal} with an attention mask that has padding; expected examples of one length, without a mask"
            )
        return Positions()
    length = _check_sequence(reader, main, before)
    real = _non_padding(reader.embeddings, main) if mask is None else _real_positions(given, main, length)
    if real is None:
        return Positions(length)
    _check_some_real(real, "the padding id" if mask is None else "the attention mask")
    shift = real.to(torch.int8).argmax(1)
    if fixed or not shift.any():
        return Positions(length, None if real.all() else real)
    real = rolled(real, shift, 1)
    return Positions(length, None if real.all() else real, shift)


def _check_some_real(real: Tensor, cause: str) -> None:
    """Refuse examples without a real position."""
    empty = (~real.any(1)).nonzero()
    if len(empty):
        raise InvalidInputError(f"{cause} leaves no position of example {int(empty[0])}")


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


def _non_padding(embeddings: nn.Module | None, ids: Tensor) -> Tensor | None:
    if ids.is_floating_point():
        raise InvalidInputError(f"got inputs of dtype {ids.dtype}; expected token ids")
    padding = getattr(embeddings, "padding_idx", None)
    return None if padding is None else ids != padding

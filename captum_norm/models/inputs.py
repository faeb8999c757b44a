"""Binds the user's inputs to the parameters of a model's forward function, and checks them."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.memory import MemoryBudget
from captum_norm.models.before import read_before
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import evaluating
from captum_norm.models.known import known_model
from captum_norm.models.libraries.library import SequencesSeen, forward_parameters
from captum_norm.models.libraries.registry import library_of
from captum_norm.models.main_input import check_shape, check_tensors
from captum_norm.models.objects import Texts, are_texts, tokenized
from captum_norm.models.offloading import expect_same_inputs
from captum_norm.models.positions import Positions, check_some_real, read_positions
from captum_norm.models.stacks import TEXT_STACKS, Role
from captum_norm.models.wrappers import unwrapped

Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Any] | Texts


def bind_inputs(
    model: nn.Module,
    inputs: Inputs,
    additional_forward_args: Any = None,
    budget: MemoryBudget | None = None,
    tokenizer: Any = None,
    stacks: Collection[Role] | None = None,
) -> ModelCall:
    """Bind inputs to a model.

    Args:
        model: the model.
        inputs: token ids (B, S), embeddings (B, S, D), pixel values (B, C, height, width), a tuple of tensors (the
            model's first positional arguments), a mapping of argument names to tensors, or texts.
        additional_forward_args: the model's further positional arguments: a value, or a tuple of values.
        budget: memory that each piece of a computation may take.
        tokenizer: the tokenizer for texts.
        stacks: the stacks to explain of a model with towers; if None, those that read the tokens.

    Returns:
        the call. Left-padded examples are shifted to begin at position 0, as they would alone;
        ``call.positions.shift_back`` shifts results back.

    Raises:
        UnsupportedModelError: if threads run the model on several devices.
        InvalidInputError: if inputs are empty or too long, ids are outside the vocabulary, or a mask has another shape;
            or other processes that have shards of the model got other inputs.
    """
    budget = MemoryBudget() if budget is None else budget
    towers = library_of(model).towers(model)
    watched = frozenset(TEXT_STACKS if stacks is None else stacks) if towers else frozenset[Role]()
    known = known_model(model, watched)
    library = known.library
    if known.processes is not None:
        expect_same_inputs(known.processes, inputs, additional_forward_args)
    texts = _token_texts(inputs)
    if are_texts(inputs):
        inputs = tokenized(model, inputs, tokenizer)
        texts = [tokenizer.convert_ids_to_tokens(ids) for ids in inputs["input_ids"].tolist()]
    main, arguments = _named(model, library.inputs, inputs, additional_forward_args)
    if towers is not None and "use_cache" not in arguments and _hands_on(model, towers.text, "use_cache"):
        arguments["use_cache"] = False
    check_tensors(arguments)
    halves = library.halves(model)
    encoder = None if halves is None else halves[0]
    given = (arguments.get(name) for name in library.decoder) if halves is not None else ()
    start = next((value for value in given if isinstance(value, Tensor)), None)
    before = read_before(model, library, arguments, main, main if start is None else start, _parameters(model))
    if library.sequences is not None:
        check_shape(main)
        call = ModelCall(
            model, known, encoder, {}, watched, arguments, len(main), Positions(), Positions(), texts, budget
        )
        return _with_positions_seen(call, main, library.sequences)

    def positions_in(part: nn.Module, mask: str | None, own: Tensor, count: int) -> Positions:
        return read_positions(library, part, mask, own, arguments, count, fixed=before.cache is not None)

    part = encoder if encoder is not None else model if towers is None else towers.text
    first = before.virtual + (before.past if halves is None else 0)
    positions, decoder = positions_in(part, library.mask, main, first), Positions()
    if halves is not None and start is not None:
        decoder = positions_in(halves[1], library.decoder_mask, start, before.past)
        if len(start) != len(main):
            raise InvalidInputError(f"got {len(main)} examples for the encoder and {len(start)} for the decoder")
    if positions.shift is not None or decoder.shift is not None:
        read = ((name, decoder if library.is_decoders(name) else positions) for name in arguments)
        arguments = {name: own.shift_left(arguments[name]) for name, own in read}
    others = {} if towers is None else towers.others
    places = (positions, decoder)
    call = ModelCall(model, known, encoder, others, watched, arguments, len(main), *places, texts, budget, before)
    if halves is None:
        return call
    # The two sequences of an encoder–decoder model come as ids.
    own = texts if texts is not None else _texts_of_ids(main, tokenizer)
    return replace(call, tokens=own, decoder_tokens=_texts_of_ids(start, tokenizer))


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(unwrapped(model).forward).parameters


def _named(
    model: nn.Module, names: Sequence[str], inputs: Inputs, additional_forward_args: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Return the main input, and all arguments of the model's forward function by name."""
    parameters = _parameters(model)
    further = additional_forward_args if isinstance(additional_forward_args, tuple) else (additional_forward_args,)
    positional = [] if additional_forward_args is None else list(further)
    if isinstance(inputs, Mapping):
        if positional:
            raise InvalidInputError(
                "got additional_forward_args beside a mapping of inputs; put all arguments in the mapping"
            )
        main, arguments = _main_argument(names, inputs, parameters), dict(inputs)
    else:
        tensors: tuple[Any, ...] = inputs if isinstance(inputs, tuple) and inputs else (inputs,)
        main, *rest = tensors
        if not isinstance(main, Tensor):
            got = "an empty tuple" if isinstance(main, tuple) and not main else f"inputs of type {type(main).__name__}"
            raise InvalidInputError(f"got {got}; expected a tensor, a tuple of tensors, a mapping or texts")
        arguments = _arguments_by_name(model, parameters, main, [*rest, *positional])
    return main, arguments


def _hands_on(model: nn.Module, part: nn.Module, name: str) -> bool:
    """Whether a model's forward function takes any argument, and that of a part of it one of this name."""
    parameters = _parameters(model).values()
    return any(own.kind == own.VAR_KEYWORD for own in parameters) and name in forward_parameters(part)


def _with_positions_seen(call: ModelCall, main: Tensor, sequences: SequencesSeen) -> ModelCall:
    """Take batch size and positions from the sequences that attention receives; shift nothing."""
    with torch.no_grad(), evaluating(call.model):
        found = sequences(call.model, call.run)
    for real in found:
        if real is None:
            continue
        if len(real) not in main.shape[:2]:
            raise UnsupportedModelError(
                f"attention in {type(call.model).__name__} receives {len(real)} examples for inputs of shape "
                f"{tuple(main.shape)}; expected one for each example of the inputs"
            )
        check_some_real(real, "the padding mask")
        call = replace(call, batch=len(real))
    positions, decoder = (
        Positions() if real is None else Positions(real.shape[1], None if real.all() else real) for real in found
    )
    return replace(call, positions=positions, decoder=decoder)


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
    raise InvalidInputError(f"got inputs with the keys {sorted(inputs)}; expected {' or '.join(names)} as a tensor")


def _token_texts(inputs: Inputs) -> Sequence[Sequence[str]] | None:
    """The tokens' texts in a fast tokenizer's output."""
    encodings = getattr(inputs, "encodings", None)
    return [list(encoding.tokens) for encoding in encodings] if encodings else None


def _texts_of_ids(ids: Tensor | None, tokenizer: Any) -> Sequence[Sequence[str]] | None:
    """The tokens' texts by the tokenizer, if it is known."""
    read = getattr(tokenizer, "convert_ids_to_tokens", None)
    if read is None or ids is None or ids.dim() != 2 or ids.is_floating_point():
        return None
    return [[str(token) for token in read(row)] for row in ids.tolist()]

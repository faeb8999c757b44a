"""Checks the input that a model reads: what it may be, and how long."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.errors import InvalidInputError

# Neither looked up by nor compared in torch.
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
POSITION_TABLES = ("position_embeddings", "embed_positions", "wpe")


def check_main(part: nn.Module, embeddings: nn.Module | None, main: Tensor) -> int | None:
    """Check shape, ids and length.

    Args:
        part: what reads the input: the model, or its encoder or decoder.
        embeddings: the module that looks its tokens up, if there is one.
        main: the input.

    Returns:
        the length of a sequence, None for an image.

    Raises:
        InvalidInputError: it is nothing that a model reads, empty, too long, or has ids outside the vocabulary.
    """
    check_shape(main)
    if main.dim() > 3:
        return None
    if not main.is_floating_point() and isinstance(embeddings, nn.Embedding):
        smallest, largest = int(main.min()), int(main.max())
        if smallest < 0 or largest >= embeddings.num_embeddings:
            wrong = smallest if smallest < 0 else largest
            raise InvalidInputError(
                f"got the token id {wrong}; {type(part).__name__} knows the ids 0 to {embeddings.num_embeddings - 1}"
            )
    longest = longest_sequence(part)
    if longest is not None and main.shape[1] > longest:
        raise InvalidInputError(
            f"got a sequence of {main.shape[1]} positions; {type(part).__name__} allows at most {longest}"
        )
    return main.shape[1]


def check_shape(main: Tensor) -> None:
    """Check that an input is token ids, embeddings or an image, and not empty.

    Raises:
        InvalidInputError: it is not.
    """
    if main.dtype in _UNSIGNED:
        raise InvalidInputError(f"got inputs of dtype {main.dtype}; expected token ids of dtype torch.int64")
    shape = tuple(main.shape)
    if not main.is_floating_point() and main.dim() != 2:
        raise InvalidInputError(f"got token ids of shape {shape}; expected (batch, sequence)")
    if main.is_floating_point() and main.dim() < 3:
        raise InvalidInputError(
            f"got inputs of shape {shape} and dtype {main.dtype}; expected token ids (integers) of shape "
            "(batch, sequence), embeddings (batch, sequence, width) or pixel values"
        )
    if main.is_complex():
        raise InvalidInputError(f"got inputs of dtype {main.dtype}; expected integers or floating-point numbers")
    if main.numel() == 0:
        raise InvalidInputError(f"got empty inputs of shape {shape}; expected at least one example and one position")


def check_tensors(arguments: Mapping[str, Any]) -> None:
    """Check that the tensors among a model's arguments hold their numbers in the usual way.

    Raises:
        InvalidInputError: one is on no device, nested, quantized or sparse.
    """
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            continue
        kinds = {"on no device (meta)": value.is_meta, "nested": value.is_nested, "quantized": value.is_quantized}
        kind = next((kind for kind, found in kinds.items() if found), "")
        if kind or value.layout is not torch.strided:
            raise InvalidInputError(
                f"got {name} in a tensor that is {kind or 'sparse'}; expected a dense tensor with its numbers"
            )


def longest_sequence(part: nn.Module) -> int | None:
    """How many positions a model with a table of position embeddings allows; None for models without one."""
    tables = [
        module
        for name, module in part.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITION_TABLES
    ]
    if not tables:
        return None
    # RoBERTa counts from the padding index on, OPT from an offset.
    return min(
        table.num_embeddings
        - int(getattr(table, "offset", 0))
        - (0 if table.padding_idx is None else table.padding_idx + 1)
        for table in tables
    )

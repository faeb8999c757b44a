"""Checks shape, dtype, token ids and length of a model's inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from captum_norm.errors import InvalidInputError

# torch neither compares them nor uses them as indices.
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
POSITION_TABLES = ("position_embeddings", "embed_positions", "wpe")


AnyModule = TypeVar("AnyModule", bound=nn.Module)


def alive(reference: "ref[AnyModule]") -> AnyModule:
    """Dereference a module of a model that exists."""
    module = reference()
    if module is None:
        raise ReferenceError("the model does not exist any more")
    return module


@dataclass(frozen=True)
class SequenceReader:
    """The part of a model that reads an input sequence: the model itself, its encoder or its decoder.

    It refers to modules weakly.
    """

    _part: "ref[nn.Module]"
    _embeddings: "ref[nn.Module] | None"
    _tables: tuple["ref[nn.Embedding]", ...]

    @classmethod
    def of(cls, part: nn.Module, embeddings: nn.Module | None) -> "SequenceReader":
        """Describe a part of a model and its token embeddings, if any; position embeddings are found by name."""
        named = [(name.rpartition(".")[2], module) for name, module in part.named_modules()]
        tables = (ref(table) for name, table in named if name in POSITION_TABLES and isinstance(table, nn.Embedding))
        return cls(ref(part), None if embeddings is None else ref(embeddings), tuple(tables))

    @property
    def part(self) -> nn.Module:
        """The part of the model."""
        return alive(self._part)

    @property
    def embeddings(self) -> nn.Module | None:
        """Its token embeddings, if any."""
        return None if self._embeddings is None else self._embeddings()

    @property
    def longest(self) -> int | None:
        """Largest number of positions with an embedding; None without position embeddings."""
        # RoBERTa's positions start after the padding index, OPT's at an offset.
        counts = [
            table.num_embeddings
            - int(getattr(table, "offset", 0))
            - (0 if table.padding_idx is None else table.padding_idx + 1)
            for table in map(alive, self._tables)
        ]
        return min(counts, default=None)

    def check(self, main: Tensor) -> int | None:
        """Check shape, token ids and length of an input.

        Returns:
            the length of a sequence; None for an image.

        Raises:
            InvalidInputError: if shape, dtype or length is wrong, it is empty, or ids are outside the vocabulary.
        """
        check_shape(main)
        if main.dim() > 3:
            return None
        if not main.is_floating_point() and isinstance(self.embeddings, nn.Embedding):
            smallest, largest = int(main.min()), int(main.max())
            if smallest < 0 or largest >= self.embeddings.num_embeddings:
                wrong = smallest if smallest < 0 else largest
                raise InvalidInputError(
                    f"got the token id {wrong}; {type(self.part).__name__} knows the ids 0 to "
                    f"{self.embeddings.num_embeddings - 1}"
                )
        longest = self.longest
        if longest is not None and main.shape[1] > longest:
            raise InvalidInputError(
                f"got a sequence of {main.shape[1]} positions; {type(self.part).__name__} allows at most {longest}"
            )
        return main.shape[1]


def check_shape(main: Tensor) -> None:
    """Check that an input is token ids, embeddings or an image, and not empty.

    Raises:
        InvalidInputError: if not.
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
    """Check that all tensors among a model's arguments are dense.

    Raises:
        InvalidInputError: if one is sparse, nested, quantized or on the meta device.
    """
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            continue
        kinds = {"on no device (meta)": value.is_meta, "nested": value.is_nested, "quantized": value.is_quantized}
        kind = next((kind for kind, found in kinds.items() if found), "")
        if kind or value.layout is not torch.strided:
            raise InvalidInputError(
                f"got {name} in a tensor that is {kind or 'sparse'}; expected a dense tensor with data"
            )

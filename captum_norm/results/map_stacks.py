"""The maps of a stack with the tokens of their rows and columns: as tables, labelled arrays and largest entries."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from captum_norm.checks import as_count
from captum_norm.results.map_layers import STACKS, named_layers
from captum_norm.results.map_parts import padded
from captum_norm.results.map_words import first_row
from captum_norm.results.tables import data_frame, data_set

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


class Entry(NamedTuple):
    """An entry of a map.

    Attributes:
        value: the entry.
        query: the token of its row, which receives.
        key: the token of its column, which gives.
        layer: the number of the layer.
        head: the index of the head; None without heads.
        row: the query's position.
        column: the key's position.
        stack: the stack or measure.
        example: the index of the example.
    """

    value: float
    query: str
    key: str
    layer: int
    head: int | None
    row: int
    column: int
    stack: str
    example: int


@dataclass(frozen=True, eq=False)
class MapStack:
    """Maps of all layers of one stack, and what their rows and columns are.

    Attributes:
        name: the name of the stack, or of what is measured.
        unit: what the entries are.
        values: the maps, (B, L, [H,] Q, K).
        layers: the numbers of the L layers.
        queries: the texts of the Q rows of each example; None for their numbers.
        keys: the texts of the K columns; None for their numbers.
        real_queries: True at rows that are no padding, (B, Q).
        real_keys: True at columns that are no padding, (B, K).
        side: the beginning of the names of its axes, which tells stacks of different sizes apart.
    """

    name: str
    unit: str
    values: Tensor
    layers: Sequence[int]
    queries: Sequence[Sequence[str]] | None
    keys: Sequence[Sequence[str]] | None
    real_queries: Tensor
    real_keys: Tensor
    side: str = ""

    def rows(self, example: int) -> list[str]:
        """Name the rows of an example, without padding."""
        return _real_names(self.queries, self.real_queries, example)

    def columns(self, example: int) -> list[str]:
        """Name the columns of an example, without padding."""
        return _real_names(self.keys, self.real_keys, example)

    def of(self, example: int) -> Tensor:
        """Return the maps of an example without padding, (L, [H,] Q, K)."""
        found = self.values[example].detach().cpu()
        return found[..., self.real_queries[example].cpu(), :][..., self.real_keys[example].cpu()]

    @property
    def summary(self) -> str:
        """Its name, shape and layers."""
        return f"{self.name} {tuple(self.values.shape)} of {named_layers(self.layers)}"

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the axes."""
        head = ["head"] * (self.values.dim() - 4)
        return ("example", *(f"{self.side}{name}" for name in ("layer", *head, "query", "key")))


def stacks_of(maps: Any) -> list[MapStack]:
    """Return the maps of each stack and tower of :class:`captum_norm.AttributionMaps`."""
    found = {name: stack for name in STACKS if (stack := getattr(maps, name)) is not None}
    several = len(found) + len(maps.towers) > 1
    two = maps.decoder_real is not None
    stacks = []
    for name, values in found.items():
        queries, keys = values.shape[-2:]
        own = maps.decoder_real if two and name != "encoder" else maps.real
        texts = maps.decoder_tokens if two and name == "decoder" else maps.tokens
        stacks.append(
            MapStack(
                name,
                "entry",
                values,
                maps.layers[name],
                _row_texts(maps, maps.decoder_tokens if two and name != "encoder" else maps.tokens, queries),
                None if texts is None or maps.segmented or any(len(row) != keys for row in texts) else texts,
                padded(own, queries),
                torch.ones(len(own), keys, dtype=torch.bool)
                if maps.segmented
                else padded(maps.real if name == "cross" else own, keys),
                f"{name}_" if several else "",
            )
        )
    for name, values in maps.towers.items():
        rows, columns = (torch.ones(len(values), size, dtype=torch.bool) for size in values.shape[-2:])
        stacks.append(MapStack(name, "entry", values, maps.layers[name], None, None, rows, columns, f"{name}_"))
    return stacks


def _row_texts(maps: Any, texts: Sequence[Sequence[str]] | None, queries: int) -> Sequence[Sequence[str]] | None:
    """The texts of rows, which are those of the last keys."""
    first = None if not texts else first_row(maps, len(texts[0]), queries)
    return None if first is None or first < 0 else [row[first:] for row in texts or ()]


def top_entries(stacks: Sequence[MapStack], count: int) -> list[Entry]:
    """Return the largest entries of all maps, largest first."""
    count = as_count("count", count)
    found = []
    for stack in stacks:
        for example in range(len(stack.values)):
            values, rows, columns = stack.of(example), stack.rows(example), stack.columns(example)
            best = values.flatten().topk(min(count, values.numel()))
            for value, place in zip(best.values.tolist(), best.indices, strict=True):
                index, *head, row, column = (int(index) for index in torch.unravel_index(place, values.shape))
                layer, number = stack.layers[index], head[0] if head else None
                found.append(Entry(value, rows[row], columns[column], layer, number, row, column, stack.name, example))
    return sorted(found, key=lambda entry: -entry.value)[:count]


def frame_of(stacks: Sequence[MapStack]) -> "pd.DataFrame":
    """Make a data frame with a row for each entry of the maps.

    Raises:
        InvalidInputError: pandas is not installed.
    """
    columns = ["example", "stack", "layer", "head", "query", "key", "query_token", "key_token", "value"]
    if all(stack.values.dim() == 4 for stack in stacks):
        columns.remove("head")
    return data_frame([[row[name] for name in columns] for row in _records(stacks)], columns)


def _records(stacks: Sequence[MapStack]) -> Iterator[dict[str, Any]]:
    for stack in stacks:
        for example in range(len(stack.values)):
            values, rows, columns = stack.of(example), stack.rows(example), stack.columns(example)
            places = torch.cartesian_prod(*(torch.arange(size) for size in values.shape)).tolist()
            for (index, *head, row, column), value in zip(places, values.flatten().tolist(), strict=True):
                yield {
                    "example": example,
                    "stack": stack.name,
                    "layer": stack.layers[index],
                    "head": head[0] if head else None,
                    "query": row,
                    "key": column,
                    "query_token": rows[row],
                    "key_token": columns[column],
                    "value": value,
                }


def dataset_of(stacks: Sequence[MapStack], others: Mapping[str, tuple[Sequence[str], Tensor]]) -> "xr.Dataset":
    """Make a dataset of xarray: maps by name with named axes, and layers and tokens as coordinates.

    Args:
        stacks: the maps, padding included.
        others: further variables by name: their axes and values.

    Raises:
        InvalidInputError: xarray is not installed.
    """
    coordinates: dict[str, Any] = {}
    for stack in stacks:
        coordinates[f"{stack.side}layer"] = list(stack.layers)
        for side, names in (("query", stack.queries), ("key", stack.keys)):
            if names is not None:
                coordinates[f"{stack.side}{side}_token"] = (
                    ("example", f"{stack.side}{side}"),
                    [list(n) for n in names],
                )
    variables = {stack.name: (stack.dims, _array(stack.values), {"unit": stack.unit}) for stack in stacks}
    measured = {name: (axes, _array(values)) for name, (axes, values) in others.items()}
    return data_set({**variables, **measured}, coordinates)


def _array(values: Tensor) -> Any:
    found = values.detach().cpu()
    return (found.float() if found.dtype == torch.bfloat16 else found).numpy()


def _real_names(names: Sequence[Sequence[str]] | None, real: Tensor, example: int) -> list[str]:
    kept = real[example].tolist()
    texts = map(str, range(len(kept))) if names is None else names[example]
    return [text for text, is_real in zip(texts, kept, strict=True) if is_real]

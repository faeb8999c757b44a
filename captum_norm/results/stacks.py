"""Results with maps of stacks of layers: by example, layer and word, and as tables, arrays and largest entries."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from captum_norm.checks import check_count, check_entries, check_index, check_layer, quoted
from captum_norm.errors import InvalidInputError
from captum_norm.results.base import Result
from captum_norm.text.characters import spelled_out
from captum_norm.text.words import Words, WordScore, words_of_tokens

STACKS = ("encoder", "decoder", "cross")
"""The stacks of an encoder–decoder model; any other has one of the first two."""

T = TypeVar("T")


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
        return _real_names(None if self.queries is None else self.queries[example], self.real_queries[example])

    def columns(self, example: int) -> list[str]:
        """Name the columns of an example, without padding."""
        return _real_names(None if self.keys is None else self.keys[example], self.real_keys[example])

    def of(self, example: int) -> Tensor:
        """Return the maps of an example without padding, (L, [H,] Q, K)."""
        maps = self.values[example].detach().cpu()
        return maps[..., self.real_queries[example].cpu(), :][..., self.real_keys[example].cpu()]

    def entries(self, example: int) -> Iterator[Entry]:
        """Yield the entries of an example without padding, in the order of the axes."""
        values, rows, columns = self.of(example), self.rows(example), self.columns(example)
        places = torch.cartesian_prod(*(torch.arange(size) for size in values.shape)).tolist()
        for place, value in zip(places, values.flatten().tolist(), strict=True):
            yield self._entry(example, place, value, rows, columns)

    def top(self, example: int, count: int) -> Iterator[Entry]:
        """Yield the largest entries of an example."""
        values, rows, columns = self.of(example), self.rows(example), self.columns(example)
        best = values.flatten().topk(min(count, values.numel()))
        for value, index in zip(best.values.tolist(), best.indices, strict=True):
            place = [int(part) for part in torch.unravel_index(index, values.shape)]
            yield self._entry(example, place, value, rows, columns)

    def _entry(self, example: int, place: Sequence[int], value: float, rows: list[str], columns: list[str]) -> Entry:
        layer, *head, row, column = place
        number, of_head = self.layers[layer], head[0] if head else None
        return Entry(value, rows[row], columns[column], number, of_head, row, column, self.name, example)


class Side(NamedTuple):
    """Positions that maps are of: which are real, (B, N), the last ones of an axis; and the texts of all."""

    real: Tensor | None = None
    texts: Sequence[Sequence[str]] | None = None


class StackResult(Result):
    """Base class of results with maps of stacks of layers."""

    _texts: ClassVar[Mapping[str, str]]  # the fields with an entry for each position, and the letter of their positions
    segmented = False

    # Fields of all of them.
    real: Tensor
    tokens: Sequence[Sequence[str]] | None
    mixing_ratio: Any
    convergence_delta: Tensor | None
    virtual: int
    cached: int
    patches: Sequence[Any]

    @abstractmethod
    def _changed(self, change: Callable[[Tensor, str], Tensor]) -> dict[str, Any]:
        """Return the fields of tensors, changed by a function that also gets the letters of their axes."""
        # B, L and H are examples, layers and heads; a capital letter of sides() is the columns of these positions, a
        # small one the rows; any other letter stays as it is.

    @abstractmethod
    def _sides(self) -> dict[str, Side]:
        """Return the positions that axes are of, by letter."""

    @abstractmethod
    def stacks(self) -> list[MapStack]:
        """Return the maps of each stack with the tokens of their rows and columns."""

    @abstractmethod
    def _of_words(self, words: Mapping[str, Words]) -> dict[str, Any]:
        """Return the fields of one example that change if positions are words, but for the tensors of its maps."""

    def __repr__(self) -> str:
        stacks = self.stacks()
        parts = [f"{stack.name} {tuple(stack.values.shape)} of {named_layers(stack.layers)}" for stack in stacks]
        if isinstance(self.mixing_ratio, Tensor):
            parts.append(f"mixing ratio {tuple(self.mixing_ratio.shape)}")
        elif self.mixing_ratio:
            parts.append(f"mixing ratios of {', '.join(self.mixing_ratio)}")
        if self.convergence_delta is not None and self.convergence_delta.numel():
            parts.append(f"convergence delta {float(self.convergence_delta.max()):.1e}")
        return spelled_out(f"{type(self).__name__}({', '.join(parts)})")

    def __len__(self) -> int:
        return len(self.real)

    def __getitem__(self, example: int) -> Self:
        """Return the results of one example, as a batch of one without padding, with its pictures if they are known."""
        place = place_of("example", example, len(self))
        real = {letter: side.real[place] for letter, side in self._sides().items() if side.real is not None}

        def part(values: Tensor, axes: str) -> Tensor:
            values = values[place : place + 1]
            for axis, letter in enumerate(axes, -len(axes)):
                if letter.upper() in real:
                    values = _without_padding(values, axis, real[letter.upper()])
            return values

        fields: dict[str, Any] = {}
        for name, letter in self._texts.items():
            rows = getattr(self, name)
            if rows is not None:
                fields[name] = [kept_entries(rows[place], real[letter]) if letter in real else rows[place]]
        return self._with(**self._changed(part), **fields, **self._pictures_of(place))

    def _with(self, **fields: Any) -> Self:
        whole: Any = self
        changed: Self = replace(whole, **fields)
        return changed

    def _pictures_of(self, example: int) -> dict[str, Any]:
        """Return the fields of an example's pictures, in its sequence without padding."""
        places = (self.real[example].cumsum(0) - 1).cpu()
        patches = [patch for patch in self.patches if patch.example == example]
        return {
            "patches": [
                replace(patch, example=0, picture=number, positions=places[patch.positions.cpu()])
                for number, patch in enumerate(patches)
            ]
        }

    def __iter__(self) -> Iterator[Self]:
        return (self[example] for example in range(len(self)))

    def top(self, count: int = 10) -> list[Entry]:
        """Return the largest entries of the maps, largest first."""
        count = check_count("count", count)
        best = [
            entry
            for stack in self.stacks()
            for example in range(len(stack.values))
            for entry in stack.top(example, count)
        ]
        return sorted(best, key=lambda entry: -entry.value)[:count]

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each entry: example, stack, layer, head, query, key, their tokens and the value."""
        stacks = self.stacks()
        names = ["example", "stack", "layer", "head", "query", "key", "query_token", "key_token", "value"]
        fields = ["example", "stack", "layer", "head", "row", "column", "query", "key", "value"]
        if not any(stack.values.dim() > 4 for stack in stacks):
            names.remove("head")
            fields.remove("head")
        return [
            {name: getattr(entry, field) for name, field in zip(names, fields, strict=True)}
            for stack in stacks
            for example in range(len(stack.values))
            for entry in stack.entries(example)
        ]

    def _stack(
        self, name: str, values: Tensor, letters: str, layers: Sequence[int], unit: str = "entry", side: str = ""
    ) -> MapStack:
        """Return maps whose rows and columns are of the positions with two letters."""
        sides = self._sides()
        queries, keys = (sides.get(letter.upper(), Side()) for letter in letters)
        rows, columns = values.shape[-2:]
        first = self._first_row(len(queries.texts[0]), rows) if queries.texts else None
        return MapStack(
            name,
            unit,
            values,
            layers,
            None if first is None or first < 0 else [texts[first:] for texts in queries.texts or ()],
            None if keys.texts is None or any(len(texts) != columns for texts in keys.texts) else keys.texts,
            _padded(queries.real, len(values), rows),
            _padded(keys.real, len(values), columns),
            side,
        )

    def _first_row(self, tokens: int, rows: int) -> int | None:
        """Return the first of so many tokens that has a row; None if the only row is of all together."""
        first = tokens - rows
        return None if self.segmented and first not in (self.cached, self.cached + self.virtual) else first

    def _words(self, words: Mapping[str, Sequence[Words]], score: WordScore) -> Self:
        """Return the results of words, which are given for the positions of each letter in each example."""
        parts = [
            self[number]._words_of_example({letter: each[number] for letter, each in words.items()}, score)
            for number in range(len(self))
        ]
        if len(parts) == 1:
            return parts[0]
        starts = {part.cached + part.virtual for part in parts}
        if len(starts) > 1 and not self.segmented:
            raise InvalidInputError(
                f"got examples with {' and '.join(map(str, sorted(starts)))} words before the first row; take one at a "
                "time: maps[0].words()"
            )
        tensors = zip(*(part._tensors() for part in parts), strict=True)
        joined = parts[0]._changed(lambda _, axes: _stacked(next(tensors), sum(axis not in "BLHC" for axis in axes)))
        texts = {name: _padded_texts([getattr(part, name) for part in parts]) for name in self._texts}
        return parts[0]._with(**joined, **texts)

    def _words_of_example(self, words: Mapping[str, Words], score: WordScore) -> Self:
        """Return the results of the only example's words: columns are scored, rows averaged."""
        cached = 0

        def change(values: Tensor, axes: str) -> Tensor:
            nonlocal cached
            # Columns before rows: the largest of a word's tokens is sought in each row.
            for axis, letter in reversed(list(enumerate(axes, -len(axes)))):
                of_axis, how, size = words.get(letter.upper()), score, values.shape[axis]
                if of_axis is None:
                    continue
                numbers = of_axis.numbers
                if len(numbers) < size or (letter.isupper() and len(numbers) != size):
                    raise InvalidInputError(
                        f"got the words of {len(numbers)} tokens for maps of {size} keys; expected as many"
                    )
                if letter.islower():
                    first = self._first_row(len(numbers), size)
                    # A word across the border has a row.
                    before = () if first is None else numbers[first - self.cached : first]
                    cached = len({*before} - {numbers[first or 0]})
                    if first is None:
                        continue
                    own, how = numbers[first:], "mean"
                    places = tuple(number - own[0] for number in own)
                    of_axis = Words(of_axis.texts[own[0] :], places, of_axis.pieces[first:])
                if values.dtype == torch.bool:
                    values = values.new_ones(1, len(of_axis.texts))
                else:
                    values = of_axis.scores(values.movedim(axis, -1), how).movedim(-1, axis)
            return values

        tensors = self._changed(change)
        fields = self._of_words(words) | {"cached": cached, "modality": None, "patches": ()}
        return self._with(**tensors | fields)

    def _tensors(self) -> list[Tensor]:
        """Return the tensors in the order in which ``_changed`` meets them."""
        tensors: list[Tensor] = []

        def note(values: Tensor, _: str) -> Tensor:
            tensors.append(values)
            return values

        self._changed(note)
        return tensors

    def _words_by_marks(self, what: str, name: str, words: Sequence[Words] | None) -> Sequence[Words]:
        """Return the words of each example, by the marks of the tokens in a field unless they are given."""
        if words is None:
            if getattr(self, name) is None:
                raise InvalidInputError(
                    f"got {what} without tokens; give them by with_tokens(...), or create the method with tokenizer="
                )
            words = [words_of_tokens(getattr(part, name)[0]) for part in self]
        words = check_entries("words", words, "Words")
        if not all(isinstance(part, Words) for part in words):
            raise InvalidInputError(f"got words {quoted(words)}; expected a sequence of Words, as words_of returns")
        if len(words) != len(self):
            raise InvalidInputError(f"got words of {len(words)} examples for {what} of {len(self)}; expected as many")
        return words


def place_of_layer(name: str, layer: int, layers: Sequence[int]) -> int:
    """Return the place of a layer among those that there are, from −1 backwards in their order."""
    number = check_layer(layer)
    if number in layers:
        return layers.index(number)
    if -len(layers) <= number < 0:
        return number % len(layers)
    raise InvalidInputError(f"got layer {number}; {name} are of {named_layers(layers)}")


def named_layers(layers: Sequence[int]) -> str:
    """Name layers, runs of them by their ends."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(parts)}"


def place_of(what: str, index: int, count: int) -> int:
    """Return the index from 0 of one of ``count`` examples."""
    number = check_index(what, index)
    if not -count <= number < count:
        raise InvalidInputError(f"got {what} {number}; expected 0 to {count - 1}")
    return number % count


def kept_entries(entries: Sequence[T], real: Tensor) -> list[T]:
    """Drop padding of what has an entry for each position, the last ones those of the inputs."""
    before, flags = len(entries) - len(real), real.tolist()
    return [entry for at, entry in enumerate(entries) if at < before or flags[at - before]]


def _without_padding(values: Tensor, axis: int, real: Tensor) -> Tensor:
    """Drop padding on an axis, whose last entries are those of the inputs; all queries together have one row."""
    before = values.shape[axis] - len(real)
    if before < 0:
        return values
    real = real.to(values.device)
    return values.index_select(axis, torch.cat([real.new_ones(before), real]).nonzero().flatten())


def _padded(real: Tensor | None, examples: int, size: int) -> Tensor:
    """Return what is real of ``size`` positions, the last of which are these; all queries together have one row."""
    if real is None or real.shape[1] > size:
        return torch.ones(examples, size, dtype=torch.bool)
    return pad(real, (size - real.shape[1], 0), value=True)


def _stacked(parts: Sequence[Tensor], axes: int) -> Tensor:
    """Concatenate examples, (1, ...) each, padded with zeros at the end of the last axes."""
    sizes = [max(part.shape[-axis] for part in parts) for axis in range(1, axes + 1)]
    return torch.cat(
        [
            pad(part, [edge for axis, size in enumerate(sizes, 1) for edge in (0, size - part.shape[-axis])])
            for part in parts
        ]
    )


def _padded_texts(parts: Sequence[Sequence[Sequence[str]] | None]) -> list[list[str]] | None:
    """Join the texts of single examples, padded with empty ones."""
    rows = [row for part in parts for row in part or ()]
    width = max(map(len, rows), default=0)
    return [[*row, *[""] * (width - len(row))] for row in rows] if rows else None


def _real_names(names: Sequence[str] | None, real: Tensor) -> list[str]:
    texts = map(str, range(len(real))) if names is None else names
    return [text for text, is_real in zip(texts, real.tolist(), strict=True) if is_real]

"""Results of a method: a map for each layer, further measurements, and their units."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from captum_norm.arguments import as_index
from captum_norm.errors import InvalidInputError


@dataclass(frozen=True)
class MapUnits:
    """Units of the maps and scores of a method.

    Attributes:
        entry: the unit of an entry of its maps.
        together: the unit of a score of all layers; None if it follows from the aggregation.
        aggregation: how it combines the layers, if that cannot be chosen.
        target: the unit of a score if a target is given.
    """

    entry: str
    together: str | None = None
    aggregation: str | None = None
    target: str | None = None


class SourceAndPrefix(NamedTuple):
    """Scores of an encoder–decoder model's two inputs: the source and the target prefix that the decoder reads.

    Attributes:
        source: scores of the source positions, (B, S), or (B, T, S) in every decoder position.
        prefix: scores of the decoder's own input positions, (B, T), or (B, T, T).
    """

    source: Tensor
    prefix: Tensor


Scores = Tensor | SourceAndPrefix
"""Scores of a model's input positions, (B, S); of an encoder–decoder model, those of both inputs."""


Modality = Literal["text", "image", "video", "audio"]


@dataclass(frozen=True, eq=False)
class Patches:
    """Where the patches of one picture stand in a sequence.

    Attributes:
        example: the index of the example.
        picture: the index among all pictures of the batch, in the order of the inputs: an image, a tile of one that the
            inputs have as a picture of its own, or a frame of a video.
        positions: the position of each patch in the sequence, (rows, columns).

    Example:
        >>> import torch
        >>> patches = Patches(example=0, picture=0, positions=torch.tensor([[1, 2], [3, 4]]))
        >>> patches.scores(torch.tensor([[0.5, 0.1, 0.0, 0.2, 0.0, 0.2]]))
        tensor([[0.1000, 0.0000],
                [0.2000, 0.0000]])
    """

    example: int
    picture: int
    positions: Tensor

    def scores(self, scores: Tensor) -> Tensor:
        """Select the scores of the patches: scores of all positions, (B, S), to (rows, columns)."""
        if scores.dim() != 2 or scores.shape[0] <= self.example or scores.shape[1] <= int(self.positions.max()):
            raise InvalidInputError(
                f"got scores of shape {tuple(scores.shape)}; expected (batch, sequence), as attribute() returns for "
                "the inputs that the patches belong to"
            )
        return scores[self.example, self.positions.to(scores.device)]


@dataclass(frozen=True)
class AttributionMaps:
    """Maps of all layers of a model for one batch.

    Rows are queries (receiving positions), columns are keys (contributing positions). Entries at padded queries and
    keys are exactly 0. Keys of virtual tokens and of a cache come first, those of the inputs last: a query's own key is
    the one K − Q further, also if only the last positions have rows.

    Attributes:
        encoder: (B, L, Q, K), or (B, L, H, Q, K) per head; None if the model has no bidirectional stack.
        decoder: the same for a causal stack; None if the model has none.
        cross: the same for attention from the decoder's positions (Q) to the encoder's (K); None if the model has none.
        mixing_ratio: (B, L, Q), ‖Σ_{j≠i} v_ij‖ / (‖Σ_{j≠i} v_ij‖ + ‖v_ii‖); None if the method defines none, and for
            encoder–decoder models, whose stacks have one each: see :meth:`captum_norm.NormMeter.measure`.
        convergence_delta: (B, L), relative completeness error of each layer, for encoder–decoder models those of all
            stacks, encoder first, for models with towers those of the stack that reads the tokens, or of the towers if
            only these were requested; None for methods without one.
        real: (B, Q), True at real (unpadded) input positions.
        tokens: the texts of the keys of each example, if the inputs have their tokens; with ``[virtual 1]``, … or
            ``[cached 1]``, … before these.
        decoder_real: ``real`` for the decoder's positions of an encoder–decoder model, else None.
        towers: the maps of a model's towers that were requested, by name: ``"vision"``, (N, L, [H,] Q, K), with the N
            pictures (images, tiles) that the tower reads instead of the examples. Pictures packed into one sequence
            (Qwen2-VL) are one, in which no picture attends to another.
        modality: of each position of each example, ``"text"``, ``"image"``, ``"video"`` or ``"audio"``; None unless the
            model reads several in one sequence, and its inputs are token ids.
        patches: where the patches of each picture stand, for pictures whose patches the model keeps in rows.
        virtual: the number of virtual tokens of a prompt-learning adapter (PEFT). Those of prompt tuning have rows and
            columns, before the encoder's in an encoder–decoder model; those of prefix tuning columns alone, before the
            decoder's.
        cached: the number of positions without rows, columns of the decoder alone: those in the cache passed, and those
            before the last ones if only these were requested.
        segmented: whether columns are segments of keys, (B, L, Q, G), and rows may be one for all queries together.
    """

    encoder: Tensor | None
    decoder: Tensor | None
    cross: Tensor | None
    mixing_ratio: Tensor | None
    convergence_delta: Tensor | None
    real: Tensor
    tokens: Sequence[Sequence[str]] | None = None
    decoder_real: Tensor | None = None
    towers: Mapping[str, Tensor] = field(default_factory=dict)
    modality: Sequence[Sequence[Modality]] | None = None
    patches: Sequence[Patches] = ()
    virtual: int = 0
    cached: int = 0
    segmented: bool = False

    @property
    def before(self) -> int:
        """Number of keys before those of the inputs in a model with one stack."""
        return self.virtual + self.cached

    @property
    def self_attention(self) -> Tensor:
        """The maps of the only self-attention stack of an encoder or decoder, (B, L, [H,] Q, K).

        Raises:
            InvalidInputError: for an encoder–decoder model, or if only a tower's maps were requested.
        """
        stack = self.encoder if self.decoder is None else self.decoder
        if self.towers and stack is None:
            raise InvalidInputError(
                f"got maps of {', '.join(self.towers)} alone; read .towers, or request the text's maps, too: "
                "stacks=['text', ...]"
            )
        if stack is None or (self.encoder is not None and self.decoder is not None):
            raise InvalidInputError(
                "got an encoder–decoder model, whose stacks cannot be aggregated; read .encoder, .decoder "
                "and .cross of maps(), or explain the encoder alone (in transformers: model.get_encoder())"
            )
        return stack

    @property
    def of_three_stacks(self) -> tuple[Tensor, Tensor, Tensor]:
        """The maps of an encoder–decoder model's encoder, decoder and cross-attention.

        Raises:
            InvalidInputError: if a stack is missing, or the decoder's layers do not have one cross-attention each.
        """
        if self.encoder is None or self.decoder is None or self.cross is None:
            found = [name for name in ("encoder", "decoder", "cross") if getattr(self, name) is not None]
            raise InvalidInputError(
                f"got maps of the stacks {', '.join(found)}; expected encoder, decoder and cross, which are aggregated "
                "together, or one of them: scores(maps(..., stacks=['decoder']))"
            )
        if self.decoder.shape[1] != self.cross.shape[1]:
            raise InvalidInputError(
                f"got maps of {self.decoder.shape[1]} decoder layers and {self.cross.shape[1]} of cross-attention; "
                "expected one of both in each layer: explain single layers by maps()"
            )
        return self.encoder, self.decoder, self.cross

    def __len__(self) -> int:
        return len(self.real)

    def __getitem__(self, example: int) -> "AttributionMaps":
        """Return the maps of one example, as a batch of one without padding.

        Of a model with towers, those of the example's pictures, if it is known which these are.

        Raises:
            InvalidInputError: there is no such example.
        """
        place = _place("example", example, len(self))
        real = self.real[place]
        decoder_real = None if self.decoder_real is None else self.decoder_real[place]
        rows = real if decoder_real is None else decoder_real

        def own(stack: Tensor | None, queries: Tensor, keys: Tensor | None = None) -> Tensor | None:
            if stack is None:
                return None
            kept = _kept(stack[place : place + 1], -2, queries)
            return kept if self.segmented else _kept(kept, -1, queries if keys is None else keys)

        tokens = None
        if self.tokens is not None:
            # Tokens before those of the inputs are virtual or cached.
            before = len(self.tokens[place]) - len(real)
            tokens = [[text for at, text in enumerate(self.tokens[place]) if at < before or real[at - before]]]
        pictures = [one for one in self.patches if one.example == place]
        return replace(
            self,
            encoder=own(self.encoder, real),
            decoder=own(self.decoder, rows),
            cross=own(self.cross, rows, real),
            mixing_ratio=None if self.mixing_ratio is None else _kept(self.mixing_ratio[place : place + 1], -1, real),
            convergence_delta=None if self.convergence_delta is None else self.convergence_delta[place : place + 1],
            real=real[real][None],
            tokens=tokens,
            decoder_real=None if decoder_real is None else decoder_real[decoder_real][None],
            towers=self._own_towers(place, [one.picture for one in pictures]),
            modality=None if self.modality is None else [_own_modality(self.modality[place], real)],
            patches=[_moved(one, number, real) for number, one in enumerate(pictures)],
        )

    def __iter__(self) -> Iterator["AttributionMaps"]:
        return (self[example] for example in range(len(self)))

    def layer(self, index: int) -> "AttributionMaps":
        """Return the maps of one layer in each stack, (B, 1, [H,] Q, K).

        Args:
            index: its place among the layers in these maps, from 0, or from −1 backwards.

        Raises:
            InvalidInputError: a stack has no such layer.
        """
        stacks = {name: stack for name in ("encoder", "decoder", "cross") if (stack := getattr(self, name)) is not None}
        stacks = stacks or dict(self.towers)
        counts = {name: stack.shape[1] for name, stack in stacks.items()}
        places = {name: _place("layer", index, count) for name, count in counts.items()}
        starts = accumulate(counts.values(), initial=0)
        rows = [start + place for start, place in zip(starts, places.values(), strict=False)]
        ratios = next(iter(places.values()))
        delta, ratio = self.convergence_delta, self.mixing_ratio
        chosen = {name: stack[:, places[name], None] for name, stack in stacks.items()}
        return replace(
            self,
            **{name: stack for name, stack in chosen.items() if name not in self.towers},
            towers={name: stack for name, stack in chosen.items() if name in self.towers},
            convergence_delta=None if delta is None else delta[:, rows],
            mixing_ratio=None if ratio is None else ratio[:, ratios, None],
        )

    def _own_towers(self, example: int, pictures: list[int]) -> dict[str, Tensor]:
        found = {}
        for name, stack in self.towers.items():
            if pictures and max(pictures) < len(stack):
                found[name] = stack[pictures]
            elif len(stack) == len(self):
                found[name] = stack[example : example + 1]
        return found

    def with_tokens(self, tokens: Sequence[Sequence[str]]) -> "AttributionMaps":
        """Return the same maps with the texts of the tokens, a sequence for each example."""
        return replace(self, tokens=tokens)


def _place(what: str, index: int, count: int) -> int:
    """The index from 0 of one of ``count`` examples or layers."""
    number = as_index(what, index)
    if not -count <= number < count:
        raise InvalidInputError(f"got {what} {number}; expected 0 to {count - 1}")
    return number % count


def _kept(values: Tensor, axis: int, real: Tensor) -> Tensor:
    """Drop padding on an axis, whose last entries are those of the inputs; all queries together have one row."""
    before = values.shape[axis] - len(real)
    if before < 0:
        return values
    real = real.to(values.device)
    return values.index_select(axis, torch.cat([real.new_ones(before), real]).nonzero().flatten())


def _own_modality(modality: Sequence[Modality], real: Tensor) -> list[Modality]:
    before = len(modality) - len(real)
    return [kind for at, kind in enumerate(modality) if at < before or real[at - before]]


def _moved(patches: Patches, number: int, real: Tensor) -> Patches:
    """The patches of a picture in a sequence without padding."""
    places = (real.cumsum(0) - 1).to(patches.positions.device)
    return replace(patches, example=0, picture=number, positions=places[patches.positions])


def only_layer(stack: Tensor) -> Tensor:
    """Return the only map of a stack: (B, 1, Q, K) -> (B, Q, K)."""
    if stack.shape[1] != 1:
        raise InvalidInputError(f"got the maps of {stack.shape[1]} layers and aggregate=False; expected one layer")
    return stack[:, 0]

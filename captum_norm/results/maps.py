"""Results of a method: a map for each layer, further measurements, and their units."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch import Tensor

from captum_norm.errors import InvalidInputError
from captum_norm.results.stacks import STACKS, MapStack, Side, StackResult, named_layers, place_of_layer
from captum_norm.text.words import Words, WordScore


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


@dataclass(frozen=True, eq=False, repr=False)
class AttributionMaps(StackResult):
    """Maps of all layers of a model for one batch.

    ``maps[0]`` are those of the first example without padding, ``maps.layer(4)`` those of layer 4, the model's fifth.
    A notebook shows the maps as a page.

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
            ``[cached 1]``, … before these. Of an encoder–decoder model those of the source, if the tokenizer is known,
            unless the decoder alone is explained.
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
        decoder_tokens: the texts of the keys of the decoder's self-attention in an encoder–decoder model.
        layers: the numbers of the L layers of each stack and tower, from 0; 0 to L − 1 if they are not given.
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
    decoder_tokens: Sequence[Sequence[str]] | None = None
    layers: Mapping[str, Sequence[int]] = field(default_factory=dict)

    _axes = MappingProxyType(
        {
            **dict.fromkeys(STACKS, ("B...", "B....")),
            "mixing_ratio": ("B..",),
            "real": ("BQ",),
            **dict.fromkeys(("convergence_delta", "decoder_real"), ("B.",)),
            **dict.fromkeys(("tokens", "decoder_tokens", "modality"), ("B",)),
        }
    )
    _texts = MappingProxyType({"tokens": "S", "modality": "S", "decoder_tokens": "T"})
    _added = MappingProxyType({"decoder_tokens": None, "layers": {}})

    def __post_init__(self) -> None:
        stacks = self._main | dict(self.towers)
        layers = {name: numbered(name, self.layers.get(name), stack.shape[1]) for name, stack in stacks.items()}
        object.__setattr__(self, "layers", layers)

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
            raise InvalidInputError(
                f"got maps of the stacks {', '.join(self._main)}; expected encoder, decoder and cross, which are "
                "aggregated together, or one of them: scores(maps(..., stacks=['decoder']))"
            )
        if self.decoder.shape[1] != self.cross.shape[1]:
            raise InvalidInputError(
                f"got maps of {self.decoder.shape[1]} decoder layers and {self.cross.shape[1]} of cross-attention; "
                "expected one of both in each layer: explain single layers by maps()"
            )
        return self.encoder, self.decoder, self.cross

    def _sides(self) -> dict[str, Side]:
        """Return the positions of the inputs, and those of an encoder–decoder model's decoder."""
        inputs = Side(self.real, self.tokens)
        return {
            "S": inputs,
            "T": inputs if self.decoder_real is None else Side(self.decoder_real, self.decoder_tokens),
        }

    def _changed(self, change: Callable[[Tensor, str], Tensor]) -> dict[str, Any]:
        """Return the fields of tensors but towers, changed by a function that also gets the letters of their axes."""
        stacks = self._main
        letters = {name: self._letters(name) for name in stacks}
        rows = next(iter(letters.values()), "s")[:1]
        axes = {"real": "Bs", "decoder_real": "Bt", "convergence_delta": "BC", "mixing_ratio": f"BL{rows}"}
        axes |= {name: f"BL{'H' * (stack.dim() - 4)}{letters[name]}" for name, stack in stacks.items()}
        return {
            name: change(values, of_axes)
            for name, of_axes in axes.items()
            if (values := getattr(self, name)) is not None
        }

    @property
    def _main(self) -> dict[str, Tensor]:
        """The maps of the stacks that there are, without towers."""
        return {name: stack for name in STACKS if (stack := getattr(self, name)) is not None}

    def _letters(self, stack: str) -> str:
        """Return the letters of a stack's rows and columns."""
        letters = {"encoder": "sS", "decoder": "tT", "cross": "tS"}[stack]
        return f"{letters[0]}G" if self.segmented else letters

    def _pictures_of(self, example: int) -> dict[str, Any]:
        pictures = [patch.picture for patch in self.patches if patch.example == example]
        towers = {}
        for name, stack in self.towers.items():
            if pictures and max(pictures) < len(stack):
                towers[name] = stack[pictures]
            elif len(stack) == len(self):
                towers[name] = stack[example : example + 1]
        return super()._pictures_of(example) | {"towers": towers}

    def layer(self, layer: int) -> "AttributionMaps":
        """Return the maps of one layer in each stack, (B, 1, [H,] Q, K), without those of towers beside them.

        Args:
            layer: its number, from 0, as in :attr:`layers`; or from −1 backwards among these.

        Raises:
            InvalidInputError: a stack has no maps of this layer.
        """
        stacks = self._main or dict(self.towers)
        places = {name: place_of_layer(f"the {name} maps", layer, self.layers[name]) for name in stacks}
        starts = accumulate((len(self.layers[name]) for name in stacks), initial=0)
        rows = [start + place for start, place in zip(starts, places.values(), strict=False)]
        delta, ratio = self.convergence_delta, self.mixing_ratio
        chosen: dict[str, Any] = {name: stack[:, places[name], None] for name, stack in stacks.items()}
        towers = {name: chosen.pop(name) for name in self.towers if name in chosen}
        return replace(
            self,
            **chosen,
            towers=towers,
            convergence_delta=None if delta is None else delta[:, rows],
            mixing_ratio=None if ratio is None else ratio[:, next(iter(places.values())), None],
            layers={name: [self.layers[name][place]] for name, place in places.items()},
        )

    def stacks(self) -> list[MapStack]:
        """Return the maps of each stack with the tokens of their rows and columns."""
        stacks = self._main
        several = len(stacks) + len(self.towers) > 1
        letters = {name: self._letters(name) for name in stacks} | dict.fromkeys(self.towers, "--")
        return [
            self._stack(name, values, letters[name], self.layers[name], side=f"{name}_" if several else "")
            for name, values in (stacks | dict(self.towers)).items()
        ]

    def _of_words(self, words: Mapping[str, Words]) -> dict[str, Any]:
        """Return the texts of words, without towers."""
        fields: dict[str, Any] = {"tokens": [list(words["S"].texts)], "towers": {}}
        return fields if self.decoder_real is None else fields | {"decoder_tokens": [list(words["T"].texts)]}

    def words(
        self,
        score: WordScore = "sum",
        words: Sequence[Words] | None = None,
        decoder_words: Sequence[Words] | None = None,
    ) -> "AttributionMaps":
        """Return the maps of words: a column is that of its tokens together, a row the mean of theirs.

        In an encoder–decoder model, the words of the source and those of the decoder's input, each where its tokens
        are. Columns of segments stay. Norms of vectors that are added first are another thing: pass ``segments=`` to a
        method's ``maps``.

        Args:
            score: how a column comes from its tokens': ``"sum"``, ``"mean"`` or ``"max"``.
            words: the words of each example's tokens without padding, see :func:`captum_norm.text.words.words_of`; None
                to find them by the marks of :attr:`tokens`.
            decoder_words: the same for :attr:`decoder_tokens`.

        Raises:
            InvalidInputError: the tokens are not known, or the words do not fit.
        """
        if not self._main:
            raise InvalidInputError(f"got maps of {', '.join(self.towers)} alone, whose positions have no words")
        sources = self._words_by_marks("maps", "tokens", words)
        targets = sources
        if self.decoder_real is not None:
            targets = self._words_by_marks("maps of a decoder", "decoder_tokens", decoder_words)
        return self._words({"S": sources, "T": targets}, score)

    def with_tokens(
        self, tokens: Sequence[Sequence[str]], decoder_tokens: Sequence[Sequence[str]] | None = None
    ) -> "AttributionMaps":
        """Return the same maps with the texts of the tokens, a sequence for each example.

        Args:
            tokens: those of the inputs.
            decoder_tokens: those of the decoder's inputs in an encoder–decoder model; None for those known.
        """
        decoder_tokens = self.decoder_tokens if decoder_tokens is None else decoder_tokens
        return replace(self, tokens=tokens, decoder_tokens=decoder_tokens)


def only_layer(stack: Tensor) -> Tensor:
    """Return the only map of a stack: (B, 1, Q, K) -> (B, Q, K)."""
    if stack.shape[1] != 1:
        raise InvalidInputError(
            f"got the maps of {stack.shape[1]} layers and aggregate=False; expected one layer, such as maps.layer(0)"
        )
    return stack[:, 0]


def numbered(name: str, layers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Check the numbers of ``count`` layers; without any they are 0 to ``count`` − 1."""
    if not layers:
        return tuple(range(count))
    numbers = tuple(int(layer) for layer in layers)
    if len(numbers) != count or min(numbers) < 0:
        raise InvalidInputError(
            f"got {named_layers(numbers)} for {name} of {count} layers; expected a number from 0 for each"
        )
    return numbers

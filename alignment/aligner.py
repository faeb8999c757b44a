"""Aligns the words of sentence pairs with a translation model, in one call."""

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from alignment.extraction import MapMethod, WordMaps, attention_maps, word_maps
from alignment.lexicon import Lexicon
from alignment.recipes import RECIPES, Recipe
from alignment.selection import Choice, highest_norm, most_consistent
from alignment.settings import SETTINGS, Setting
from alignment.teacher_forcing import OnError
from alignment.text_aligner import Pairs, TextAligner
from alignment.tokenization import TranslationTokenizer, languages_of
from alignment.word_maps import WordMap
from captum_norm import InvalidInputError, NormAttribution
from captum_norm.models import explained_module

Layer = int | Literal["auto", "highest-norm"]

SAMPLE = 500
"""How many sentence pairs, the first ones, decide on layer, setting and head."""


class WordAligner(TextAligner):
    """Word alignments from a translation model's cross-attention.

    Args:
        model: a Hugging Face sequence-to-sequence model, or one from :func:`alignment.load_fairseq_checkpoint`; left
            unchanged.
        tokenizer: its tokenizer, such as ``HuggingFaceTokenizer(tokenizer)`` or the one that
            ``load_fairseq_checkpoint`` returned.
        method: a method of ``captum_norm`` for the model, with or without its head; None for ``NormAttribution`` with
            the scope ``attn``, the norms of Kobayashi et al. 2020.
        layer: 0-based index, negative from the last; ``"auto"`` for the most consistent layer
            (:func:`alignment.consistency`); or ``"highest-norm"`` for the one with the highest mean norm [Kobayashi et
            al. 2020]. The last two are decided on the first :data:`SAMPLE` pairs to be aligned; there should be at
            least a dozen.
        setting: ``"AWI"``, ``"AWO"``, or ``"auto"`` to choose it together with the layer.
        head: 0-based index, ``"auto"`` to choose it together with the layer, or None for all heads together.
        recipe: how maps become links: a :class:`Recipe` or a name in :data:`RECIPES`. A recipe that combines both
            settings takes the other setting's map from the last layer, which in trained models attends to the emitted
            word; with one head, it takes the mean over that layer's heads.
        max_tokens: the largest batch, in pieces of both sides, padding included.
        lexicon: word pairs counted before (:class:`Lexicon`), whose map is multiplied into each sentence pair's; the
            recipe must have no null column, as ``hmm`` and ``product``. Links then hold statistics of other sentences.
        count_text: whether the pairs given to :meth:`align` are their own lexicon: a first pass counts their word
            pairs, beside those of ``lexicon``.

    Raises:
        InvalidInputError: an unknown recipe, layer, setting or head; or a lexicon and a recipe with a null column.

    Example:
        >>> from alignment import load_shipped_model
        >>> aligner = WordAligner(*load_shipped_model("fr-en"), layer=0, recipe="balanced")
        >>> aligner.align([["la", "maison", "est", "petite", "."]], [["the", "house", "is", "small", "."]])
        [Alignment([(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)])]
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TranslationTokenizer,
        method: MapMethod | None = None,
        layer: Layer = "auto",
        setting: Setting | Literal["auto"] = "AWI",
        *,
        head: int | Literal["auto"] | None = None,
        recipe: Recipe | str = "paper",
        max_tokens: int = 4096,
        lexicon: Lexicon | None = None,
        count_text: bool = False,
    ) -> None:
        if isinstance(recipe, str) and recipe not in RECIPES:
            raise InvalidInputError(f"got the recipe {recipe!r}, expected one of {', '.join(RECIPES)} or a Recipe")
        if isinstance(layer, str) and layer not in ("auto", "highest-norm"):
            raise InvalidInputError(f'got the layer {layer!r}, expected an index, "auto" or "highest-norm"')
        if setting not in (*SETTINGS, "auto"):
            raise InvalidInputError(f'got the setting {setting!r}, expected "AWI", "AWO" or "auto"')
        if isinstance(head, str) and head != "auto":
            raise InvalidInputError(f'got the head {head!r}, expected an index, "auto" or None')
        recipe = RECIPES[recipe] if isinstance(recipe, str) else recipe
        super().__init__(recipe, lexicon, count_text=count_text, languages=languages_of(tokenizer))
        self.model = model
        self.tokenizer = tokenizer
        self.method = cast(MapMethod, NormAttribution(without_head(model))) if method is None else method
        self.choice: Choice | None = None
        if setting != "auto" and not isinstance(layer, str) and head != "auto":
            self.choice = Choice(setting, layer, head)
        self._layer, self._setting, self._head = layer, setting, head
        self._max_tokens = max_tokens

    def map_each(self, pairs: Pairs, known: Container[int] = ()) -> Iterator[tuple[int, WordMap | InvalidInputError]]:
        """Yield each pair's index and its map, or an error that says why it cannot be used, such as an empty side.

        The map is the one that the recipe's decoder reads: (T, S + 1), or (T, S) if the recipe has no null column.

        Args:
            pairs: sentence pairs.
            known: indices of pairs that may be left out; batches of known pairs alone are skipped.

        Raises:
            InvalidInputError: see :meth:`choose`.
            CaptumNormError: the method fails on the model.
        """
        if not pairs:
            return
        choice = self.choose(pairs)
        refused: dict[int, InvalidInputError] = {}
        needed = self.recipe.settings(choice.setting)
        layers = [choice.layer] if len(needed) == 1 else [choice.layer, -1]
        per_head = choice.head is not None
        for index, maps in self._maps(pairs, layers, needed, refused.__setitem__, known, per_head=per_head):
            read = {
                setting: _of_head(stack[0], choice.head) if setting == choice.setting else _of_head(stack[-1], None)
                for setting, stack in maps.items()
            }
            yield index, self.recipe.word_map(read, choice.setting)
        yield from refused.items()

    def choose(self, pairs: Pairs) -> Choice:
        """Return the layer, setting and head to read; the first call decides those that were left open.

        Args:
            pairs: sentence pairs; unusable ones are skipped.

        Raises:
            InvalidInputError: none of the pairs can be used, or the model has no such layer or head.
        """
        if self.choice is None:
            self.choice = self._decide(pairs[:SAMPLE])
        return self.choice

    def _decide(self, pairs: Pairs) -> Choice:
        layers = None if isinstance(self._layer, str) else [self._layer]
        settings = SETTINGS if self._setting == "auto" else (self._setting,)
        candidates = defaultdict[Choice, list[WordMap]](list)
        used, refused = list[int](), dict[int, InvalidInputError]()
        for index, maps in self._maps(pairs, layers, settings, refused.__setitem__, per_head=self._head is not None):
            used.append(index)
            for setting, stack in maps.items():
                for place, layer_map in enumerate(stack):
                    layer = place if layers is None else layers[place]
                    heads = range(len(layer_map)) if self._head == "auto" else [self._head]
                    for head in heads:
                        candidates[Choice(setting, layer, head)].append(_of_head(layer_map, head))
        if not used:
            reason = f"; pair {min(refused)}: {refused[min(refused)]}" if refused else ""
            raise InvalidInputError(f"got {len(pairs)} sentence pairs, none of them usable to choose a layer{reason}")
        if self._layer == "highest-norm":
            return highest_norm(candidates)
        return most_consistent(candidates, [pairs[index][0] for index in used], [pairs[index][1] for index in used])

    def _maps(
        self,
        pairs: Pairs,
        layers: Sequence[int] | None,
        settings: Sequence[Setting],
        on_error: OnError,
        known: Container[int] = (),
        *,
        per_head: bool,
    ) -> Iterator[tuple[int, WordMaps]]:
        return word_maps(
            self.model,
            self.tokenizer,
            pairs,
            attention_maps(self.method, layers=layers, per_head=per_head),
            settings=settings,
            max_tokens=self._max_tokens,
            on_error=on_error,
            known=known,
        )


def without_head(model: nn.Module) -> nn.Module:
    """A Hugging Face model without its head, which attention maps do not need; any other model itself.

    A :class:`PeftModel` that puts virtual tokens before the inputs is kept: its ``base_model`` knows nothing of them.
    """
    inside = explained_module(model)
    base = getattr(inside, "base_model", inside) if hasattr(type(inside), "base_model") else inside
    return base if isinstance(base, nn.Module) else inside


def _of_head(layer_map: NDArray[np.float32], head: int | None) -> WordMap:
    """One head's map of a layer (H, T, S + 1), or the mean over heads; a layer (T, S + 1) as it is."""
    if layer_map.ndim == 2:
        return np.asarray(layer_map, np.float64)
    if head is None:
        return np.asarray(layer_map.mean(0), np.float64)
    if not -len(layer_map) <= head < len(layer_map):
        raise InvalidInputError(f"got head {head}; the model has {len(layer_map)}: 0 to {len(layer_map) - 1}")
    return np.asarray(layer_map[head], np.float64)

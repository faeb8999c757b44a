"""Turns the word maps of a sentence pair into links, as in the paper and with improvements on it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from alignment.decoding import argmax, itermax, link_probabilities, mutual_argmax, probable_links
from alignment.links import Alignment, ScoredAlignment
from alignment.selection import Setting
from alignment.word_maps import (
    WordMap,
    check_factor,
    checked_map,
    normalize_rows,
    sinkhorn,
    smoothed_product,
    split_null,
)
from captum_norm import InvalidInputError
from captum_norm.checks import check_choice, did_you_mean
from captum_norm.text.lines import read_text

_COMBINATIONS = (None, "sum", "product", "minimum")
_PLAIN = {"argmax": argmax, "mutual-argmax": mutual_argmax, "itermax": itermax}
_SCORED, _THRESHOLD = "mutual-posterior", "threshold"
_OPTIONS = {_SCORED: {"jump_penalty", "min_probability"}, _THRESHOLD: {"min_probability"}}
DECODERS = (*_PLAIN, *_OPTIONS)
"""The names of the decoders: :func:`alignment.decoding.argmax`, :func:`alignment.decoding.mutual_argmax`,
:func:`alignment.decoding.itermax`, and :func:`alignment.decoding.probable_links` of
:func:`alignment.decoding.link_probabilities` or, not mutual, of the map."""


@dataclass(frozen=True)
class Recipe:
    """The steps from the word maps of a sentence pair to links, in this order.

    Attributes:
        null: whether the null column takes part; if not, rows are normalised over the source words.
        combination: how both settings' maps become one: the ``"sum"`` of the row-normalised maps, their ``"product"``
            (:func:`alignment.word_maps.smoothed_product`) or the ``"minimum"`` of the maps as they are; None for the
            setting's own map alone.
        sinkhorn: whether to normalise rows and columns in turn.
        decoder: a name in :data:`alignment.recipes.DECODERS`.
        options: ``jump_penalty`` and ``min_probability`` of ``mutual-posterior``, ``min_probability`` of ``threshold``.
        combined_options: those that replace them for maps of both directions, or with a lexicon multiplied in.
        pieces: whether pieces are linked, and words of which any pieces are (:class:`alignment.EncoderAligner`).

    Raises:
        InvalidInputError: the decoder, the combination or an option is unknown.

    >>> import numpy as np
    >>> maps = {"AWI": np.array([[0.5, 0.3, 0.2], [0.45, 0.4, 0.15]]), "AWO": np.array([[0.5, 0.5, 0], [0.0, 1.0, 0]])}
    >>> Recipe()(maps, "AWI")
    Alignment([(0, 0), (0, 1)])
    >>> Recipe(combination="sum", decoder="mutual-argmax")(maps, "AWI")
    Alignment([(0, 0), (1, 1)])
    """

    null: bool = True
    combination: str | None = None
    sinkhorn: bool = False
    decoder: str = "argmax"
    options: Mapping[str, float] = field(default_factory=dict)
    combined_options: Mapping[str, float] = field(default_factory=dict)
    pieces: bool = False

    def __post_init__(self) -> None:
        check_choice("decoder", self.decoder, DECODERS)
        known = _OPTIONS.get(self.decoder, set())
        if not known >= {*self.options, *self.combined_options} or (self.scored and "jump_penalty" not in self.options):
            options = {**self.options, **self.combined_options}
            raise InvalidInputError(f"got the options {options} of {self.decoder}; expected {sorted(known) or 'none'}")
        check_choice("combination", self.combination, _COMBINATIONS)
        for numbers in (self.options, self.combined_options):
            for name, number in numbers.items():
                check_factor(name, number)

    def settings(self, setting: Setting) -> tuple[Setting, ...]:
        """The settings whose maps the recipe needs to read links in ``setting``."""
        return ("AWI", "AWO") if self.combination else (setting,)

    def __call__(self, maps: Mapping[Setting, ArrayLike], setting: Setting) -> Alignment:
        """The links of a sentence pair."""
        return self.decode(self.word_map(maps, setting)).links

    @property
    def scored(self) -> bool:
        """Whether the decoder computes probabilities of links."""
        return self.decoder == _SCORED

    def decode(self, word_map: ArrayLike, *, combined: bool = False) -> ScoredAlignment:
        """The links of a map that :meth:`word_map` returned.

        Args:
            word_map: (T, S + 1), or (T, S) without null.
            combined: whether the map is of both directions, or a lexicon was multiplied in.
        """
        if self.decoder in _PLAIN:
            return ScoredAlignment(_PLAIN[self.decoder](word_map, null=self.null))
        options = {**self.options, **(self.combined_options if combined else {})}
        least = options.get("min_probability", 0.0)
        if self.decoder == _THRESHOLD:
            words, _ = split_null(checked_map(word_map, null=self.null), null=self.null)
            return ScoredAlignment(probable_links(words, least, mutual=False))
        probabilities = link_probabilities(word_map, null=self.null, jump_penalty=options["jump_penalty"])
        return ScoredAlignment(probable_links(probabilities, least), probabilities)

    def word_map(self, maps: Mapping[Setting, ArrayLike], setting: Setting) -> WordMap:
        """The map that goes to the decoder, (T, S + 1), or (T, S) without null."""
        word_map = self._checked(maps[setting])
        if self.combination:
            other = self._checked(maps["AWO" if setting == "AWI" else "AWI"])
            if self.combination == "product":
                word_map = smoothed_product(word_map, other, null=self.null)
            elif self.combination == "minimum":
                word_map = np.minimum(word_map, other)
            else:
                word_map = normalize_rows(word_map, null=self.null) + normalize_rows(other, null=self.null)
        if self.sinkhorn:
            word_map = sinkhorn(word_map, null=self.null)
        return word_map

    def _checked(self, word_map: ArrayLike) -> WordMap:
        matrix = checked_map(word_map, null=True, signed=True)
        return matrix if self.null else split_null(matrix, null=True)[0]


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "paper": Recipe(),
        "mutual": Recipe(decoder="mutual-argmax"),
        "sinkhorn": Recipe(sinkhorn=True),
        "balanced": Recipe(combination="sum", sinkhorn=True, decoder="mutual-argmax"),
        "product": Recipe(null=False, combination="product", sinkhorn=True, decoder="mutual-argmax"),
        "hmm": Recipe(
            null=False,
            combination="product",
            sinkhorn=True,
            decoder="mutual-posterior",
            # Tuned for the lowest error rate on The Last Lesson: norms and weights, both shipped models.
            options={"jump_penalty": 0.35, "min_probability": 0.3},
            combined_options={"jump_penalty": 0.3, "min_probability": 0.35},  # on all three stories, norms
        ),
    }
)
"""Recipes by name.

``paper``
    each target word's highest entry, null column included [Kobayashi et al. 2020];
``mutual``
    only those of these links that are also the highest of their column;
``sinkhorn``
    as ``paper``, after normalising rows and columns in turn;
``balanced``
    the sum of both settings' maps, rows and columns normalised in turn, then as ``mutual``;
``product``
    the product of both settings' maps without null columns, each mixed half and half with a uniform map, rows and
    columns normalised in turn, then as ``mutual``;
``hmm``
    as ``product``, but decoded with a jump penalty in both directions: the only recipe that uses word positions.
"""

PIECE_RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "softmax": Recipe(
            null=False, combination="minimum", decoder=_THRESHOLD, options={"min_probability": 0.001}, pieces=True
        ),
        "argmax": Recipe(null=False, decoder="mutual-argmax", pieces=True),
        "itermax": Recipe(null=False, decoder="itermax", pieces=True),
    }
)
"""Recipes of pieces by name, for :class:`alignment.EncoderAligner`.

``softmax``
    pieces whose softmax over source and whose softmax over target pieces are both above 0.001, by default
    awesome-align's [Dou & Neubig 2021];
``argmax``
    pieces each of which is the other's most similar one, SimAlign's ``inter`` [Jalili Sabet et al. 2020];
``itermax``
    these, and those of a second round, SimAlign's ``itermax``.
"""

MEAN_ERROR: Mapping[str, float] = MappingProxyType(
    {"hmm": 12.3, "product": 17.9, "balanced": 20.6, "mutual": 27.0, "sinkhorn": 29.8, "paper": 36.9}
)
"""AER in % by norms of one head (``head="auto"``), the mean over three stories and both shipped models, best first."""

DEFAULT_RECIPE = "hmm"
"""The recipe of the aligners and commands unless another is given: the one with the lowest error rates."""


def read_recipe(text: str) -> Recipe:
    """The recipe that a text says: a name in :data:`RECIPES`, ``NAME,KEY=VALUE,…``, or a ``.json`` file.

    Names in :data:`alignment.recipes.PIECE_RECIPES` are known, too. Keys are attributes of :class:`Recipe` and options
    of its decoder, which then hold for maps of one direction and of both. The file is an object of the same keys, and
    of ``recipe`` for the name. Without a name, the rest is that of ``hmm``.

    Raises:
        InvalidInputError: the file cannot be read, or a name, key or value is unknown.

    >>> read_recipe("product") == RECIPES["product"]
    True
    >>> read_recipe("hmm,jump_penalty=0.2").options
    {'jump_penalty': 0.2, 'min_probability': 0.3}
    """
    values = _file_values(text) if text.endswith(".json") else dict(_text_values(text))
    name = values.pop("recipe", DEFAULT_RECIPE)
    recipes = {**RECIPES, **PIECE_RECIPES}
    if name not in recipes:
        known = f"expected one of {', '.join(recipes)}, NAME,KEY=VALUE or FILE.json"
        raise InvalidInputError(f"got the recipe {name!r}; {known}{did_you_mean(name, recipes)}")
    for key, value in values.items():
        if key not in _KINDS:
            known = f"expected one of {', '.join(_KINDS)}"
            raise InvalidInputError(f"got {key!r} in the recipe {text}; {known}{did_you_mean(key, _KINDS)}")
        if not isinstance(value, _KINDS[key]) or (isinstance(value, bool) and _KINDS[key] is not bool):
            expected = {bool: "true or false", str: "a name"}.get(_KINDS[key], "a number")
            raise InvalidInputError(f"got {key}={value} in the recipe {text}; expected {expected}")
    recipe = recipes[name]
    numbers = {key: float(values.pop(key)) for key in _NUMBERS if key in values}
    same = values.get("decoder", recipe.decoder) == recipe.decoder
    options, combined = ({**(given if same else {}), **numbers} for given in (recipe.options, recipe.combined_options))
    if values.get("combination") == "none":
        values["combination"] = None
    return replace(recipe, **values, options=options, combined_options=combined)


_NUMBERS = ("jump_penalty", "min_probability")
_KINDS: Mapping[str, Any] = MappingProxyType(
    {"null": bool, "combination": str, "sinkhorn": bool, "decoder": str, "pieces": bool}
    | dict.fromkeys(_NUMBERS, int | float)
)


def _text_values(text: str) -> Iterator[tuple[str, Any]]:
    parts = text.split(",")
    if "=" not in parts[0]:
        yield "recipe", parts.pop(0)
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals:
            raise InvalidInputError(f"got {part!r} in the recipe {text}; expected KEY=VALUE")
        try:
            yield key, json.loads(value)
        except (ValueError, RecursionError):
            yield key, value


def _file_values(path: str) -> dict[str, Any]:
    content = read_text(path)
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not JSON ({error}); expected an object of the keys of a recipe") from error
    if not isinstance(values, dict):
        raise InvalidInputError(f"{path} holds {type(values).__name__}; expected an object of the keys of a recipe")
    return values

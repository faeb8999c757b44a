"""Turns the word maps of a sentence pair into links, as in the paper and with improvements on it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from types import MappingProxyType

from numpy.typing import ArrayLike

from alignment.decoding import DECODERS, link_probabilities, probable_links
from alignment.links import Alignment, ScoredAlignment
from alignment.selection import Setting
from alignment.word_maps import (
    WordMap,
    check_factor,
    checked_map,
    diagonal_prior,
    normalize_rows,
    sinkhorn,
    smoothed_product,
    split_null,
    weighted_sum,
)
from captum_norm import InvalidInputError

COMBINATIONS = ("sum", "product")
"""How both settings' maps are combined."""


_SCORED = "mutual-posterior"


@dataclass(frozen=True)
class Recipe:
    """The steps from the word maps of a sentence pair to links, in this order.

    Attributes:
        null: whether the null column takes part; if not, rows are normalised over the source words.
        other: the weight of the other setting's map, relative to 1 for the setting's own; 0 for no combination.
        combination: ``"sum"`` of the row-normalised maps or ``"product"`` (:func:`alignment.smoothed_product`).
        prior: the strength of a diagonal prior on the map [Dyer et al. 2013]; 0 for none.
        sinkhorn: whether to normalise rows and columns in turn.
        decoder: a name in :data:`DECODERS`.
        options: the decoder's own parameters.
        combined_options: those that replace them for maps of both directions, or with a lexicon multiplied in.

    Raises:
        InvalidInputError: the decoder is unknown, an option is not one of its parameters, or a number is negative.

    >>> import numpy as np
    >>> maps = {"AWI": np.array([[0.5, 0.3, 0.2], [0.45, 0.4, 0.15]]), "AWO": np.array([[0.5, 0.5, 0], [0.0, 1.0, 0]])}
    >>> Recipe()(maps, "AWI")
    Alignment([(0, 0), (0, 1)])
    >>> Recipe(other=0.25, decoder="mutual-argmax")(maps, "AWI")
    Alignment([(0, 0), (1, 1)])
    """

    null: bool = True
    other: float = 0.0
    combination: str = "sum"
    prior: float = 0.0
    sinkhorn: bool = False
    decoder: str = "argmax"
    options: Mapping[str, float] = field(default_factory=dict)
    combined_options: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.decoder not in DECODERS:
            raise InvalidInputError(f"got the decoder {self.decoder!r}; expected one of {', '.join(DECODERS)}")
        try:
            signature(DECODERS[self.decoder]).bind(None, **{**self.options, **self.combined_options})
        except TypeError as error:
            raise InvalidInputError(f"the options do not match the decoder {self.decoder}: {error}") from error
        if self.combination not in COMBINATIONS:
            raise InvalidInputError(f"got the combination {self.combination!r}; expected {' or '.join(COMBINATIONS)}")
        check_factor("other", self.other)
        check_factor("prior", self.prior)

    def settings(self, setting: Setting) -> tuple[Setting, ...]:
        """The settings whose maps the recipe needs to read links in ``setting``."""
        return ("AWI", "AWO") if self.other else (setting,)

    def __call__(self, maps: Mapping[Setting, ArrayLike], setting: Setting) -> Alignment:
        """The links of a sentence pair."""
        return self.decode(self.word_map(maps, setting)).links

    @property
    def scored(self) -> bool:
        """Whether the decoder computes probabilities of links."""
        return self.decoder == _SCORED

    def decode(
        self, word_map: ArrayLike, reverse: ArrayLike | None = None, *, combined: bool = False
    ) -> ScoredAlignment:
        """The links of a map that :meth:`word_map` returned.

        Args:
            word_map: (T, S + 1), or (T, S) without null.
            reverse: (S, T), the map of the opposite model, which a :attr:`scored` recipe reads in its own direction.
            combined: whether the map is of both directions, or a lexicon was multiplied in.
        """
        options = {**self.options, **(self.combined_options if combined else {})}
        if not self.scored:
            if reverse is not None:
                raise InvalidInputError(f"got two maps for the decoder {self.decoder}; expected {_SCORED}")
            return ScoredAlignment(DECODERS[self.decoder](word_map, null=self.null, **options))
        least = options.pop("min_probability", 0.0)
        probabilities = link_probabilities(word_map, reverse, null=self.null, **options)
        return ScoredAlignment(probable_links(probabilities, least), probabilities)

    def word_map(self, maps: Mapping[Setting, ArrayLike], setting: Setting) -> WordMap:
        """The map that goes to the decoder, (T, S + 1), or (T, S) without null."""
        word_map = self._checked(maps[setting])
        if self.other:
            both = [word_map, self._checked(maps["AWO" if setting == "AWI" else "AWI"])]
            if self.combination == "product":
                word_map = smoothed_product(both, [1.0, self.other], null=self.null)
            else:
                word_map = weighted_sum([normalize_rows(matrix, null=self.null) for matrix in both], [1.0, self.other])
        if self.prior:
            word_map = diagonal_prior(word_map, strength=self.prior, null=self.null)
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
        "balanced": Recipe(other=1.0, sinkhorn=True, decoder="mutual-argmax"),
        "product": Recipe(null=False, other=1.0, combination="product", sinkhorn=True, decoder="mutual-argmax"),
        "hmm": Recipe(
            null=False,
            other=1.0,
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

MEAN_ERROR: Mapping[str, float] = MappingProxyType(
    {"hmm": 12.3, "product": 17.9, "balanced": 20.6, "mutual": 27.0, "sinkhorn": 29.8, "paper": 36.9}
)
"""AER in % by norms of one head (``head="auto"``), the mean over three stories and both shipped models, best first."""

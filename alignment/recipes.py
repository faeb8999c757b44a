"""How links are read off the word maps of a sentence pair: the paper's way, and ways that go beyond it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from types import MappingProxyType

from numpy.typing import ArrayLike

from alignment.decoding import DECODERS
from alignment.links import Alignment
from alignment.settings import Setting
from alignment.word_maps import check_factor, diagonal_prior, normalize_rows, sinkhorn, weighted_sum
from captum_norm import InvalidInputError


@dataclass(frozen=True)
class Recipe:
    """What is done to the word maps of one sentence pair, in this order, until there are links.

    Attributes:
        other: how much of the other setting's map is added, rows normalised; 0 for none of it.
        prior: strength of the diagonal prior [Dyer et al. 2013] that the map is multiplied by; 0 for none.
        sinkhorn: whether rows and columns are normalised in turn.
        decoder: a name in :data:`DECODERS`.
        options: the decoder's own parameters.

    Raises:
        InvalidInputError: the decoder is unknown or its options are not its own, or a number is negative.

    >>> import numpy as np
    >>> maps = {"AWI": np.array([[0.5, 0.3, 0.2], [0.45, 0.4, 0.15]]), "AWO": np.array([[0.5, 0.5, 0], [0.0, 1.0, 0]])}
    >>> Recipe()(maps, "AWI")
    Alignment([(0, 0), (0, 1)])
    >>> Recipe(other=0.25, decoder="mutual-argmax")(maps, "AWI")
    Alignment([(0, 0), (1, 1)])
    """

    other: float = 0.0
    prior: float = 0.0
    sinkhorn: bool = False
    decoder: str = "argmax"
    options: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.decoder not in DECODERS:
            raise InvalidInputError(f"got the decoder {self.decoder!r}; expected one of {', '.join(DECODERS)}")
        try:
            signature(DECODERS[self.decoder]).bind(None, **self.options)
        except TypeError as error:
            raise InvalidInputError(f"the options do not fit the decoder {self.decoder}: {error}") from error
        check_factor("other", self.other)
        check_factor("prior", self.prior)

    def settings(self, setting: Setting) -> tuple[Setting, ...]:
        """The settings whose maps are needed to read links in ``setting``."""
        return ("AWI", "AWO") if self.other else (setting,)

    def __call__(self, maps: Mapping[Setting, ArrayLike], setting: Setting) -> Alignment:
        """The links of one sentence pair.

        Args:
            maps: word maps (T, S + 1) by setting, at least those of :meth:`settings`.
            setting: the setting to read.
        """
        word_map: ArrayLike = maps[setting]
        if self.other:
            other = maps["AWO" if setting == "AWI" else "AWI"]
            word_map = weighted_sum([normalize_rows(word_map), normalize_rows(other)], [1.0, self.other])
        if self.prior:
            word_map = diagonal_prior(word_map, strength=self.prior)
        if self.sinkhorn:
            word_map = sinkhorn(word_map)
        return DECODERS[self.decoder](word_map, **self.options)


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "paper": Recipe(),
        "mutual": Recipe(decoder="mutual-argmax"),
        "sinkhorn": Recipe(sinkhorn=True),
        "balanced": Recipe(other=1.0, sinkhorn=True, decoder="mutual-argmax"),
        "hmm": Recipe(other=1.0, sinkhorn=True, decoder="mutual-hmm", options={"jump_penalty": 0.05}),
    }
)
"""Recipes by name.

``paper``
    each target word's highest entry, null column included [Kobayashi et al. 2020];
``mutual``
    those of its links that are the highest of their column, too;
``sinkhorn``
    the paper's after rows and columns were normalised in turn;
``balanced``
    the other setting's map added, rows and columns normalised in turn, then mutual;
``hmm``
    ``balanced``, decoded with a penalty for jumps both ways: the only one that uses the words' positions.
"""

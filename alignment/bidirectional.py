"""Aligns words with two translation models of opposite directions."""

from collections.abc import Container, Iterator

from alignment.aligner import WordAligner
from alignment.lexicon import Lexicon
from alignment.scored import ScoredAlignment
from alignment.symmetrization import COMBINATIONS, MAP_COMBINATIONS, SYMMETRIZATIONS
from alignment.text_aligner import Pairs, TextAligner
from alignment.word_maps import WordMap, normalize_rows, sinkhorn, smoothed_product
from captum_norm import InvalidInputError


class BidirectionalAligner(TextAligner):
    """Word alignments from two models of opposite directions, or from one multilingual model by its language codes.

    The reverse model reads each target sentence and is given the source sentence as its translation. Its map is
    transposed, so links are (source index, target index) as everywhere.

    Args:
        forward: aligns with the model that translates source into target.
        reverse: aligns with the model that translates target into source; with the same recipe. A multilingual model
            may serve both, with a tokenizer for each direction.
        combine: ``"add"`` or ``"multiply"`` the two maps, and read links off the result; ``"mutual"``, the links that
            are the most probable ones for their target word by the forward model and for their source word by the
            reverse one [Liang et al. 2006]; or a name in :data:`alignment.symmetrization.SYMMETRIZATIONS`, which merges
            the links of each. ``"add"`` and ``"multiply"`` need a recipe without a null column, ``hmm`` or ``product``;
            ``"mutual"`` needs ``hmm``.
        lexicon: as for :class:`WordAligner`; for ``"add"`` and ``"multiply"``.
        count_text: likewise.

    Raises:
        InvalidInputError: the combination is unknown; the two models translate other pairs of languages; the recipes
            differ or do not fit the combination; or one of the aligners has a lexicon of its own.

    Example:
        >>> from alignment import WordAligner, load_shipped_model
        >>> forward, reverse = (
        ...     WordAligner(*load_shipped_model(name), layer=0, recipe="hmm") for name in ("fr-en", "en-fr")
        ... )
        >>> aligner = BidirectionalAligner(forward, reverse)
        >>> aligner.align([["la", "maison", "est", "petite", "."]], [["the", "house", "is", "small", "."]])
        [Alignment([(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)])]
    """

    def __init__(
        self,
        forward: WordAligner,
        reverse: WordAligner,
        combine: str = "add",
        *,
        lexicon: Lexicon | None = None,
        count_text: bool = False,
    ) -> None:
        if combine not in COMBINATIONS:
            raise InvalidInputError(f"got combine={combine!r}, expected one of {', '.join(COMBINATIONS)}")
        _check_languages(forward, reverse)
        if forward.recipe != reverse.recipe:
            raise InvalidInputError("got two aligners with different recipes; give both the same recipe")
        if forward.corpus_statistics or reverse.corpus_statistics:
            raise InvalidInputError("got a lexicon for one direction; give lexicon= to BidirectionalAligner instead")
        if combine not in SYMMETRIZATIONS and forward.recipe.null:
            raise InvalidInputError(
                f"got combine={combine!r} and a recipe with a null column, which only one of the maps has; expected "
                "the recipe hmm or product, or a heuristic such as grow-diag"
            )
        if combine == "mutual" and not forward.recipe.scored:
            raise InvalidInputError(
                f"got combine='mutual' and the decoder {forward.recipe.decoder}, which has no probabilities; expected "
                "the recipe hmm"
            )
        if combine not in MAP_COMBINATIONS and (lexicon is not None or count_text):
            raise InvalidInputError(
                f"got a lexicon and combine={combine!r}, which makes no map of both; expected add or multiply"
            )
        super().__init__(forward.recipe, lexicon, count_text=count_text, languages=forward.languages)
        self.forward, self.reverse, self.combine = forward, reverse, combine

    @property
    def both_directions(self) -> bool:
        """Whether maps are of both directions."""
        return True

    @property
    def scored(self) -> bool:
        """Whether links have probabilities."""
        return self.recipe.scored and self.combine not in SYMMETRIZATIONS

    def map_each(self, pairs: Pairs, known: Container[int] = ()) -> Iterator[tuple[int, WordMap | InvalidInputError]]:
        """Yield each pair's index and the map made of both directions', or an error that says why there is none.

        Args:
            pairs: sentence pairs.
            known: indices of pairs that may be left out.

        Raises:
            InvalidInputError: the combination makes no map; or see :meth:`WordAligner.choose`.
            CaptumNormError: the method fails on a model.
        """
        if self.combine not in MAP_COMBINATIONS:
            raise InvalidInputError(f"{self.combine} makes no map of both directions; expected add or multiply")
        for index, both in self._both(pairs, known):
            if isinstance(both, InvalidInputError):
                yield index, both
            elif self.combine == "add":
                yield index, sinkhorn(both[0] + both[1].T, null=False)
            else:
                rows = [both[0], normalize_rows(both[1].T, null=False)]
                yield index, sinkhorn(smoothed_product(rows, [1.0, 1.0], null=False), null=False)

    def read_each(
        self, pairs: Pairs, known: Container[int] = ()
    ) -> Iterator[tuple[int, ScoredAlignment | InvalidInputError]]:
        """Yield each pair's index and its scored alignment, or an error that says why there is none."""
        if self.combine in MAP_COMBINATIONS:
            yield from super().read_each(pairs, known)
            return
        for index, both in self._both(pairs, known):
            if isinstance(both, InvalidInputError):
                yield index, both
            elif self.combine == "mutual":
                yield index, self.recipe.decode(*both, combined=True)
            else:
                forward, reverse = (self.recipe.decode(word_map).links for word_map in both)
                yield index, ScoredAlignment(SYMMETRIZATIONS[self.combine](forward, reverse.transposed()))

    def _both(
        self, pairs: Pairs, known: Container[int]
    ) -> Iterator[tuple[int, tuple[WordMap, WordMap] | InvalidInputError]]:
        """Yield the forward map, (T, S), and the reverse one, (S, T), of each pair."""
        forward = dict(self.forward.map_each(pairs, known))
        for index, word_map in self.reverse.map_each([(target, source) for source, target in pairs], known):
            other = forward.pop(index, None)
            if isinstance(other, InvalidInputError):
                yield index, other
            elif isinstance(word_map, InvalidInputError):
                yield index, word_map
            elif other is not None:
                yield index, (other, word_map)
        # A pair that only the forward model was asked about is known, unless it is refused.
        yield from ((index, error) for index, error in forward.items() if isinstance(error, InvalidInputError))


def _check_languages(forward: WordAligner, reverse: WordAligner) -> None:
    there, back = forward.languages, reverse.languages
    for one, other in zip(there, back[::-1], strict=True):
        if one is not None and other is not None and one != other:
            ways = ["–".join(str(code) for code in way) for way in (there, back, there[::-1])]
            raise InvalidInputError(
                f"got a reverse model that translates {ways[1]} beside a forward model that translates {ways[0]}; "
                f"expected one that translates {ways[2]}"
            )

"""Aligns lists of sentence pairs: what aligners of one and of two directions share."""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Sequence

from alignment.alignments import Alignments
from alignment.decoding import link_probabilities
from alignment.lexicon import Languages, Lexicon
from alignment.links import Alignment
from alignment.recipes import Recipe
from alignment.scored import ScoredAlignment
from alignment.word_maps import WordMap
from captum_norm import InvalidInputError

Words = Sequence[str]
Pairs = Sequence[tuple[Words, Words]]

COUNTING_JUMP_PENALTY = 0.2
"""The jump penalty of the link probabilities that a lexicon counts."""


def sentence_pairs(sources: Sequence[Words], targets: Sequence[Words]) -> list[tuple[Words, Words]]:
    """Pair source and target sentences.

    Raises:
        InvalidInputError: their numbers differ, or one is a string instead of words.
    """
    if len(sources) != len(targets):
        raise InvalidInputError(f"got {len(sources)} source and {len(targets)} target sentences; expected equally many")
    pairs = list(zip(sources, targets, strict=True))
    for index, pair in enumerate(pairs):
        for words in pair:
            if isinstance(words, str):
                raise InvalidInputError(f"pair {index}: got the string {words!r}, expected a sequence of words")
    return pairs


class TextAligner(ABC):
    """An aligner of sentence pairs: a map for each, perhaps a lexicon, and a recipe that reads links off the map.

    Args:
        recipe: how maps become links.
        lexicon: word pairs counted before, whose lexical map is multiplied in; None for none.
        count_text: whether the text that is aligned counts its own word pairs in a first pass, beside those of
            ``lexicon``, which is left unchanged.
        languages: source and target language of the text, None for one that is unknown.

    Raises:
        InvalidInputError: there is a lexicon, and the recipe's maps have a null column or it is of the opposite
            direction.
    """

    def __init__(self, recipe: Recipe, lexicon: Lexicon | None, *, count_text: bool, languages: Languages) -> None:
        if (lexicon is not None or count_text) and recipe.null:
            raise InvalidInputError(
                "got a lexicon and a recipe with a null column, which no word pair is counted for; expected a recipe "
                "without one, such as hmm or product"
            )
        if lexicon is not None:
            lexicon.check_direction(languages)
        self.recipe = recipe
        self.languages = languages
        self.lexicon = lexicon
        self.count_text = count_text

    @property
    def both_directions(self) -> bool:
        """Whether maps are of both directions."""
        return False

    @property
    def corpus_statistics(self) -> bool:
        """Whether counts of other sentences take part in the links."""
        return self.lexicon is not None or self.count_text

    @property
    def scored(self) -> bool:
        """Whether links have probabilities."""
        return self.recipe.scored

    @abstractmethod
    def map_each(self, pairs: Pairs, known: Container[int] = ()) -> Iterator[tuple[int, WordMap | InvalidInputError]]:
        """Yield each pair's index and the map that links are read off, or an error that says why there is none.

        Raises:
            InvalidInputError: none of the pairs can be used to choose what was left open.
            CaptumNormError: the method fails on the model.
        """

    def align(self, sources: Sequence[Words], targets: Sequence[Words]) -> Alignments:
        """Align sentence pairs; a pair with an empty side has no links.

        Args:
            sources: the words of each source sentence.
            targets: the words of each target sentence.

        Returns:
            a list of alignments, which a notebook shows as a page.

        Raises:
            InvalidInputError: the numbers of sentences differ, or a pair cannot be used: a side is a string instead of
                words or too long for the model, or its pieces cannot be attributed to its words.
            CaptumNormError: the method fails on the model.
        """
        return Alignments([found.links for found in self.align_scored(sources, targets)], sources, targets)

    def align_scored(self, sources: Sequence[Words], targets: Sequence[Words]) -> list[ScoredAlignment]:
        """Like :meth:`align`, with the probability of each link, and whether corpus statistics took part."""
        pairs = sentence_pairs(sources, targets)
        full = [index for index, pair in enumerate(pairs) if all(pair)]
        results = dict(self.read_each([pairs[index] for index in full]))
        found = [ScoredAlignment(Alignment())] * len(pairs)
        for place, index in enumerate(full):
            result = results[place]
            if isinstance(result, InvalidInputError):
                raise InvalidInputError(f"pair {index}: {result}")
            found[index] = result
        return found

    def align_pairs(self, pairs: Pairs) -> list[Alignment | InvalidInputError]:
        """The alignment of each pair, or an error that says why it cannot be used, such as an empty side.

        Raises:
            InvalidInputError: see :meth:`map_each`.
            CaptumNormError: the method fails on the model.
        """
        answers = dict(self.read_each(pairs))
        return [
            answer if isinstance(answer := answers[index], InvalidInputError) else answer.links
            for index in range(len(pairs))
        ]

    def read_each(
        self, pairs: Pairs, known: Container[int] = ()
    ) -> Iterator[tuple[int, ScoredAlignment | InvalidInputError]]:
        """Yield each pair's index and alignment, or an error that says why there is none, as soon as its batch is done.

        If the text counts its own word pairs, all of ``pairs`` are counted first.

        Args:
            pairs: sentence pairs.
            known: indices of pairs whose alignments are known; batches of known pairs alone are skipped.

        Raises:
            InvalidInputError: see :meth:`map_each`.
            CaptumNormError: the method fails on the model.
        """
        if not self.count_text:
            for index, word_map in self.map_each(pairs, known):
                if isinstance(word_map, InvalidInputError):
                    yield index, word_map
                else:
                    yield index, self.read(word_map, *pairs[index], self.lexicon)
            return
        maps = dict(self.map_each(pairs))
        lexicon = self.begun_lexicon()
        owns = {}
        for index in sorted(maps):
            word_map = maps[index]
            if not isinstance(word_map, InvalidInputError):
                owns[index] = self.counted(word_map)
                lexicon.count(*pairs[index], owns[index])
        for index, word_map in maps.items():
            if isinstance(word_map, InvalidInputError):
                yield index, word_map
            else:
                yield index, self.read(word_map, *pairs[index], lexicon, owns[index])

    def begun_lexicon(self) -> Lexicon:
        """The lexicon that a text's own word pairs are added to: a copy of the given one, or an empty one."""
        return Lexicon(languages=self.languages) if self.lexicon is None else self.lexicon.copy()

    def counted(self, word_map: WordMap) -> WordMap:
        """The link probabilities of a map that a lexicon counts, (T, S)."""
        return link_probabilities(word_map, jump_penalty=COUNTING_JUMP_PENALTY, null=False)

    def read(
        self,
        word_map: WordMap,
        source: Words,
        target: Words,
        lexicon: Lexicon | None = None,
        own: WordMap | None = None,
    ) -> ScoredAlignment:
        """Read the links of a pair off its map.

        Args:
            word_map: what :meth:`map_each` yielded.
            source: the source words.
            target: the target words.
            lexicon: the lexicon to multiply in, if any.
            own: what :meth:`counted` returned for this pair, if it is counted in the lexicon.
        """
        if lexicon is None:
            return self.recipe.decode(word_map, combined=self.both_directions)
        found = self.recipe.decode(lexicon.applied(word_map, source, target, own), combined=True)
        return ScoredAlignment(found.links, found.probabilities, corpus_statistics=True)

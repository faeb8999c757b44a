"""Aligns the words of sentence pairs with one translation model, or with two of opposite directions."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from alignment import documents
from alignment.alignments import Alignments
from alignment.decoding import link_probabilities, mutual_argmax
from alignment.documents import Section
from alignment.lexicon import Lexicon
from alignment.links import Alignment, ScoredAlignment
from alignment.recipes import DEFAULT_RECIPE, RECIPES, Recipe, read_recipe
from alignment.selection import SETTINGS, Choice, Setting, consistency, highest_norm, most_consistent
from alignment.symmetrization import COMBINATIONS, MAP_COMBINATIONS, SYMMETRIZATIONS
from alignment.teacher_forcing import MapMethod, OnError, WordMaps, attention_maps, word_maps
from alignment.tokenization import Languages, TranslationTokenizer, check_words, languages_of
from alignment.word_maps import WordMap, normalize_rows, sinkhorn, smoothed_product
from captum_norm import InvalidInputError, NormAttribution
from captum_norm.checks import check_choice, quoted
from captum_norm.models import explained_module

Words = Sequence[str]
Pairs = Sequence[tuple[Words, Words]]

COUNTING_JUMP_PENALTY = 0.2
"""The jump penalty of the link probabilities that a lexicon counts."""


def sentence_pairs(sources: Sequence[Words], targets: Sequence[Words]) -> list[tuple[Words, Words]]:
    """Pair source and target sentences."""
    if len(sources) != len(targets):
        raise InvalidInputError(f"got {len(sources)} source and {len(targets)} target sentences; expected equally many")
    check_words(sources)
    check_words(targets)
    return list(zip(sources, targets, strict=True))


class TextAligner(ABC):
    """An aligner of sentence pairs: a map for each, perhaps a lexicon, and a recipe that reads links off the map.

    :class:`alignment.WordAligner` and :class:`alignment.BidirectionalAligner` say how maps come about.
    """

    def __init__(self, recipe: Recipe, lexicon: Lexicon | None, *, count_text: bool, languages: Languages) -> None:
        if (lexicon is not None or count_text) and (recipe.null or recipe.pieces):
            raise InvalidInputError(
                "got a lexicon and a recipe with a null column or of pieces, which no word pair is counted for; "
                "expected one of words without it, such as hmm or product"
            )
        if lexicon is not None:
            lexicon.check_direction(languages)
        self.recipe = recipe
        self.languages = languages
        self.lexicon = lexicon
        self.count_text = count_text

    @property
    @abstractmethod
    def directions(self) -> Sequence[tuple["WordAligner", bool]]:
        """The aligners of one direction, and whether each reads the sides exchanged."""

    @property
    def both_directions(self) -> bool:
        """Whether there are two."""
        return len(self.directions) > 1

    @property
    def corpus_statistics(self) -> bool:
        """Whether counts of other sentences take part in the links."""
        return self.lexicon is not None or self.count_text

    @property
    def scored(self) -> bool:
        """Whether links have probabilities."""
        return self.recipe.scored

    @abstractmethod
    def map_each(self, pairs: Pairs) -> Iterator[tuple[int, WordMap | InvalidInputError]]:
        """Yield each pair's index and map, or an error that says why there is none."""

    def align(self, sources: Sequence[Words], targets: Sequence[Words]) -> Alignments:
        """Align sentence pairs, given as words; a pair with an empty side has no links.

        Raises:
            InvalidInputError: the numbers of sentences differ, or a pair cannot be used: a side is a string instead of
                words or too long for the model, or its pieces cannot be attributed to its words.
            CaptumNormError: the method fails on the model.
        """
        return Alignments([scored.links for scored in self.align_scored(sources, targets)], sources, targets)

    def align_scored(self, sources: Sequence[Words], targets: Sequence[Words]) -> list[ScoredAlignment]:
        """Like :meth:`align`, with the probability of each link, and whether corpus statistics took part."""
        pairs = sentence_pairs(sources, targets)
        full = [index for index, pair in enumerate(pairs) if all(pair)]
        alignments = [ScoredAlignment(Alignment())] * len(pairs)
        for place, result in self.read_each([pairs[index] for index in full]):
            if isinstance(result, InvalidInputError):
                raise InvalidInputError(f"pair {full[place]}: {result}")
            alignments[full[place]] = result
        return alignments

    def align_pairs(self, pairs: Pairs) -> list[Alignment | InvalidInputError]:
        """The alignment of each pair, or an error that says why it cannot be used, such as an empty side."""
        answers = [answer for _, answer in self.read_each(pairs)]
        return [answer if isinstance(answer, InvalidInputError) else answer.links for answer in answers]

    def read_each(self, pairs: Pairs) -> Iterator[tuple[int, ScoredAlignment | InvalidInputError]]:
        """Yield each pair's index and alignment, or an error that says why there is none, in order.

        If the text counts its own word pairs, all of ``pairs`` are counted first.
        """
        sections = self.cut(pairs)
        for index, answers in documents.gathered(sections, self._read_each([section.words for section in sections])):
            if isinstance(answers, InvalidInputError):
                yield index, answers
            else:
                yield index, documents.joined(*pairs[index], answers)

    def cut(self, pairs: Pairs) -> list[Section]:
        """The pairs; sections of those with more than :data:`alignment.documents.WINDOW` words on a side."""

        def links_of(source: Words, target: Words) -> Alignment | None:
            if not self.directions:
                return None
            forward, _ = self.directions[0]
            forward.choose(pairs)
            [(_, word_map)] = forward.map_each([(source, target)])
            return None if isinstance(word_map, InvalidInputError) else forward.read(word_map, source, target).links

        return list(documents.cut(pairs, links_of))

    def _read_each(self, pairs: Pairs) -> Iterator[tuple[int, ScoredAlignment | InvalidInputError]]:
        maps: Iterable[tuple[int, WordMap | InvalidInputError]] = self.map_each(pairs)
        if self.count_text:
            maps = list(maps)
        lexicon, counted = self.count(pairs, maps)
        for index, word_map in maps:
            if isinstance(word_map, InvalidInputError):
                yield index, word_map
            else:
                yield index, self.read(word_map, *pairs[index], lexicon, counted.get(index))

    def count(
        self, pairs: Pairs, maps: Iterable[tuple[int, WordMap | InvalidInputError]]
    ) -> tuple[Lexicon | None, dict[int, WordMap]]:
        """The lexicon to read maps with, and what it counted of each; nothing unless the text is its own lexicon."""
        lexicon, counted = self.lexicon, dict[int, WordMap]()
        if self.count_text:
            lexicon = self.begun_lexicon()
            for index, word_map in sorted(maps):
                if not isinstance(word_map, InvalidInputError):
                    counted[index] = self.counted(word_map)
                    lexicon.count(*pairs[index], counted[index])
        return lexicon, counted

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
        counted: WordMap | None = None,
    ) -> ScoredAlignment:
        """Read the links of a pair off its map; ``counted`` is what the lexicon has of this very pair."""
        if lexicon is None:
            return self.recipe.decode(word_map, combined=self.both_directions)
        decoded = self.recipe.decode(lexicon.applied(word_map, source, target, counted), combined=True)
        return ScoredAlignment(decoded.links, decoded.probabilities, corpus_statistics=True)


Layer = int | Literal["auto", "highest-norm"]

SAMPLE = 500
"""How many sentence pairs, the first ones, decide on layer, setting, head and the similarity's weight."""

WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""The weights of a similarity that are tried; the norms have the rest to 1."""


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
            (:func:`alignment.selection.consistency`); or ``"highest-norm"`` for the one with the highest mean norm
            [Kobayashi et al. 2020]. The last two are decided on the first :data:`SAMPLE` pairs to be aligned; there
            should be at least a dozen.
        setting: ``"AWI"``, ``"AWO"``, or ``"auto"`` to choose it together with the layer.
        head: 0-based index, ``"auto"`` to choose it together with the layer, or ``"all"`` for all heads together; None
            for ``"auto"``, but ``"all"`` with the recipe ``paper`` and for a method without maps of single heads.
        recipe: how maps become links: a :class:`Recipe`, or what :func:`alignment.recipes.read_recipe` reads, such as a
            name in :data:`RECIPES`. A recipe that combines both settings takes the other setting's map from the last
            layer, which in trained models attends to the emitted word; with one head, it takes the mean over that
            layer's heads.
        max_tokens: the largest batch, in pieces of both sides, padding included.
        lexicon: word pairs counted before (:class:`Lexicon`), whose map is multiplied into each sentence pair's; the
            recipe must have no null column, as ``hmm`` and ``product``. Links then hold statistics of other sentences.
        count_text: whether the pairs given to :meth:`align` are their own lexicon: a first pass counts their word
            pairs, beside those of ``lexicon``.
        similarity: an aligner with the same recipe, such as an :class:`alignment.EncoderAligner` of this model, whose
            map is added with the weight of :data:`~alignment.aligner.WEIGHTS` that makes the mutual links of the first
            :data:`SAMPLE` pairs most consistent (:func:`alignment.selection.consistency`).

    Attributes:
        choice: setting, layer, head and the similarity's weight; None until they are chosen.

    Raises:
        InvalidInputError: an unknown recipe, layer, setting or head; a lexicon and a recipe with a null column; or a
            similarity with another recipe.

    Example:
        >>> from alignment import load_shipped_model
        >>> aligner = WordAligner(*load_shipped_model("fr-en"), layer=0)
        >>> aligner.align([["la", "maison", "est", "petite", "."]], [["the", "house", "is", "small", "."]])
        [Alignment([(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)])]
    """

    _of_encoder = False  # whose pieces are known to recipes, and whose sides both have rows

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TranslationTokenizer,
        method: MapMethod | None = None,
        layer: Layer = "auto",
        setting: Setting | Literal["auto"] = "AWI",
        *,
        head: int | Literal["auto", "all"] | None = None,
        recipe: Recipe | str = DEFAULT_RECIPE,
        max_tokens: int = 4096,
        lexicon: Lexicon | None = None,
        count_text: bool = False,
        similarity: TextAligner | None = None,
    ) -> None:
        if isinstance(layer, str) and layer not in ("auto", "highest-norm"):
            raise InvalidInputError(f'got the layer {layer!r}, expected an index, "auto" or "highest-norm"')
        check_choice("setting", setting, (*SETTINGS, "auto"))
        if isinstance(head, str) and head not in ("auto", "all"):
            raise InvalidInputError(f'got the head {head!r}, expected an index, "auto" or "all"')
        if not hasattr(tokenizer, "encode_source"):
            raise InvalidInputError(f"got a {type(tokenizer).__name__}; wrap it: HuggingFaceTokenizer(tokenizer)")
        if isinstance(method, str | type):
            raise InvalidInputError(f"got the method {quoted(method)}; make one, such as AttentionWeights(model)")
        recipe = read_recipe(recipe) if isinstance(recipe, str) else recipe
        if recipe.pieces and not self._of_encoder:
            raise InvalidInputError("got a recipe of pieces; expected one of words, such as hmm, or an EncoderAligner")
        super().__init__(recipe, lexicon, count_text=count_text, languages=languages_of(tokenizer))
        self.model = model
        self.tokenizer = tokenizer
        self.method: Any = method
        if method is None and not self._of_encoder:
            self.method = NormAttribution(without_head(model))
        self.choice: Choice | None = None
        if head is None and recipe != RECIPES["paper"] and getattr(self.method, "scope", None) == "attn":
            head = "auto"
        head = None if head == "all" else head
        if setting != "auto" and not isinstance(layer, str) and head != "auto" and similarity is None:
            self.choice = Choice(setting, layer, head)
        self._layer, self._setting, self._head = layer, setting, head
        self._max_tokens = max_tokens
        if similarity is not None and similarity.recipe != self.recipe:
            raise InvalidInputError("got a similarity with another recipe; give both aligners the same recipe")
        self.similarity = similarity

    @property
    def directions(self) -> Sequence[tuple["WordAligner", bool]]:
        """The aligner itself, which reads the sides as they are."""
        return [(self, False)]

    def map_each(self, pairs: Pairs) -> Iterator[tuple[int, WordMap | InvalidInputError]]:
        """Yield each pair's index and the map that the recipe's decoder reads, or why the pair cannot be used."""
        if not pairs:
            return
        choice = self.choose(pairs)
        others = dict(self.similarity.map_each(pairs)) if self.similarity and choice.weight else {}
        for index, word_map in self._own_maps(pairs, choice):
            other = others.get(index)
            if other is None or isinstance(word_map, InvalidInputError):
                yield index, word_map
            elif isinstance(other, InvalidInputError):
                yield index, other
            else:
                yield index, self._added(word_map, other, choice.weight)

    def _added(self, word_map: WordMap, similarity: WordMap, weight: float) -> WordMap:
        first, second = (normalize_rows(one, null=self.recipe.null) for one in (word_map, similarity))
        added: WordMap = (1 - weight) * first + weight * second
        return added

    def _own_maps(self, pairs: Pairs, choice: Choice) -> Iterator[tuple[int, WordMap | InvalidInputError]]:
        refused: dict[int, InvalidInputError] = {}
        needed = self.recipe.settings(choice.setting)
        other_layer, other_head = (choice.layer, choice.head) if self._of_encoder else (-1, None)
        layers = [choice.layer] if len(needed) == 1 else list(dict.fromkeys([choice.layer, other_layer]))
        for index, maps in self._maps(pairs, layers, needed, refused.__setitem__):
            read = {
                setting: head_map(*((stack[0], choice.head) if setting == choice.setting else (stack[-1], other_head)))
                for setting, stack in maps.items()
            }
            yield index, self.recipe.word_map(read, choice.setting)
        yield from refused.items()

    def choose(self, pairs: Pairs) -> Choice:
        """Return layer, setting, head and weight to read; the first call decides those that were left open.

        Raises:
            InvalidInputError: none of the pairs can be used, or the model has no such layer or head.
        """
        if self.choice is None:
            sample = list(islice(documents.in_proportion(pairs), SAMPLE))
            choice = self._decide(sample)
            if self.similarity:
                choice = replace(choice, weight=self._weigh(sample, choice, dict(self.similarity.map_each(sample))))
            self.choice = choice
        return self.choice

    def _weigh(self, pairs: Pairs, choice: Choice, others: Mapping[int, WordMap | InvalidInputError]) -> float:
        """The weight that makes mutual links most consistent, the lowest of equals."""
        maps, refused = dict[int, tuple[WordMap, WordMap]](), dict[int, InvalidInputError]()
        for index, word_map in self._own_maps(pairs, choice):
            other = others[index]
            if isinstance(word_map, InvalidInputError):
                refused[index] = word_map
            elif isinstance(other, InvalidInputError):
                refused[index] = other
            else:
                maps[index] = word_map, other
        if not maps:
            raise _unusable(pairs, "weigh the similarity", refused)
        sources, targets = ([pairs[index][side] for index in maps] for side in (0, 1))

        def rate(weight: float) -> float:
            added = (self._added(*both, weight) for both in maps.values())
            return consistency([mutual_argmax(one, null=self.recipe.null) for one in added], sources, targets)

        return max(WEIGHTS, key=rate)

    def _decide(self, pairs: Pairs) -> Choice:
        layers = None if isinstance(self._layer, str) else [self._layer]
        settings = SETTINGS if self._setting == "auto" else (self._setting,)
        candidates = defaultdict[Choice, list[WordMap]](list)
        used, refused = list[int](), dict[int, InvalidInputError]()
        for index, maps in self._maps(pairs, layers, settings, refused.__setitem__):
            used.append(index)
            for setting, stack in maps.items():
                for place, layer_map in enumerate(stack):
                    layer = place if layers is None else layers[place]
                    heads = range(len(layer_map)) if self._head == "auto" else [self._head]
                    for head in heads:
                        candidates[Choice(setting, layer, head)].append(head_map(layer_map, head))
        if not used:
            raise _unusable(pairs, "choose a layer", refused)
        if self._layer == "highest-norm":
            return highest_norm(candidates)
        return most_consistent(candidates, [pairs[index][0] for index in used], [pairs[index][1] for index in used])

    def _maps(
        self, pairs: Pairs, layers: Sequence[int] | None, settings: Sequence[Setting], on_error: OnError
    ) -> Iterator[tuple[int, WordMaps]]:
        piece_maps = attention_maps(self.method, layers=layers, per_head=self._head is not None)
        options: Any = {"max_tokens": self._max_tokens, "on_error": on_error}
        return word_maps(self.model, self.tokenizer, pairs, piece_maps, settings=settings, **options)


def _unusable(pairs: Pairs, purpose: str, refused: Mapping[int, InvalidInputError]) -> InvalidInputError:
    reason = f"; pair {min(refused)}: {refused[min(refused)]}" if refused else ""
    return InvalidInputError(f"got {len(pairs)} sentence pairs, none of them usable to {purpose}{reason}")


def without_head(model: nn.Module) -> nn.Module:
    """A Hugging Face model without its head, which attention maps do not need; any other model itself."""
    inside = explained_module(model)
    # A PeftModel, which may put virtual tokens before the inputs, has base_model as an attribute of the instance alone.
    base = getattr(inside, "base_model", inside) if hasattr(type(inside), "base_model") else inside
    return base if isinstance(base, nn.Module) else inside


def head_map(layer_map: NDArray[np.float32], head: int | None) -> WordMap:
    """One head's map of a layer (H, T, S + 1), or the mean over heads; a layer (T, S + 1) as it is."""
    if layer_map.ndim == 2:
        return np.asarray(layer_map, np.float64)
    if head is None:
        return np.asarray(layer_map.mean(0), np.float64)
    if not -len(layer_map) <= head < len(layer_map):
        raise InvalidInputError(f"got head {head}; the model has {len(layer_map)}: 0 to {len(layer_map) - 1}")
    return np.asarray(layer_map[head], np.float64)


class BidirectionalAligner(TextAligner):
    """Word alignments from two models of opposite directions, or from one multilingual model by its language codes.

    The reverse model reads each target sentence and is given the source sentence as its translation. Its map is
    transposed, so links are (source index, target index) as everywhere.

    Args:
        forward: aligns with the model that translates source into target.
        reverse: aligns with the model that translates target into source; with the same recipe. A multilingual model
            may serve both, with a tokenizer for each direction.
        combine: ``"add"`` or ``"multiply"`` the two maps, and read links off the result, for a recipe without a null
            column, ``hmm`` or ``product``; or a name in :data:`alignment.symmetrization.SYMMETRIZATIONS`, which merges
            the links of each. None for ``"add"``, or ``"grow-diag"`` with a null column.
        lexicon: as for :class:`WordAligner`; for ``"add"`` and ``"multiply"``.
        count_text: likewise; None for True where it can be, as ``norm-align extract`` aligns files. False shows what
            the models know of each sentence pair alone.

    Raises:
        InvalidInputError: the combination is unknown; the two models translate other pairs of languages; the recipes
            differ or do not fit the combination; or one of the aligners has a lexicon of its own.

    Example:
        >>> from alignment import WordAligner, load_shipped_model
        >>> forward, reverse = (WordAligner(*load_shipped_model(name), layer=0) for name in ("fr-en", "en-fr"))
        >>> aligner = BidirectionalAligner(forward, reverse)
        >>> aligner.align([["la", "maison", "est", "petite", "."]], [["the", "house", "is", "small", "."]])
        [Alignment([(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)])]
    """

    def __init__(
        self,
        forward: WordAligner,
        reverse: WordAligner,
        combine: str | None = None,
        *,
        lexicon: Lexicon | None = None,
        count_text: bool | None = None,
    ) -> None:
        for one in (forward, reverse):
            if not isinstance(one, WordAligner):
                raise InvalidInputError(f"got {quoted(one)}; expected WordAligner(model, tokenizer) for each direction")
        if combine is None:
            combine = "grow-diag" if forward.recipe.null else "add"
        check_choice("combine", combine, COMBINATIONS)
        if count_text is None:
            count_text = combine in MAP_COMBINATIONS and not forward.recipe.null
        _check_languages(forward, reverse)
        if forward.recipe != reverse.recipe:
            raise InvalidInputError("got two aligners with different recipes; give both the same recipe")
        if forward.corpus_statistics or reverse.corpus_statistics:
            raise InvalidInputError("got a lexicon for one direction; give lexicon= to BidirectionalAligner instead")
        if combine in MAP_COMBINATIONS and forward.recipe.null:
            raise InvalidInputError(
                f"got combine={combine!r} and a recipe with a null column, which only one of the maps has; expected "
                "the recipe hmm or product, or a heuristic such as grow-diag"
            )
        if combine not in MAP_COMBINATIONS and (lexicon is not None or count_text):
            raise InvalidInputError(
                f"got a lexicon and combine={combine!r}, which makes no map of both; expected add or multiply"
            )
        super().__init__(forward.recipe, lexicon, count_text=count_text, languages=forward.languages)
        self.forward, self.reverse, self.combine = forward, reverse, combine

    @property
    def directions(self) -> Sequence[tuple[WordAligner, bool]]:
        """The aligners of both directions, and whether each reads the sides exchanged."""
        return [(self.forward, False), (self.reverse, True)]

    @property
    def scored(self) -> bool:
        """Whether links have probabilities."""
        return self.recipe.scored and self.combine in MAP_COMBINATIONS

    def map_each(self, pairs: Pairs) -> Iterator[tuple[int, WordMap | InvalidInputError]]:
        """Yield each pair's index and the map made of both directions'; only for ``"add"`` and ``"multiply"``."""
        if self.combine not in MAP_COMBINATIONS:
            raise InvalidInputError(f"{self.combine} makes no map of both directions; expected add or multiply")
        for index, both in self._both(pairs):
            if isinstance(both, InvalidInputError):
                yield index, both
            elif self.combine == "add":
                yield index, sinkhorn(both[0] + both[1].T, null=False)
            else:
                rows = [both[0], normalize_rows(both[1].T, null=False)]
                yield index, sinkhorn(smoothed_product(*rows, null=False), null=False)

    def _read_each(self, pairs: Pairs) -> Iterator[tuple[int, ScoredAlignment | InvalidInputError]]:
        if self.combine in MAP_COMBINATIONS:
            yield from super()._read_each(pairs)
            return
        for index, both in self._both(pairs):
            if isinstance(both, InvalidInputError):
                yield index, both
            else:
                forward, reverse = (self.recipe.decode(word_map).links for word_map in both)
                yield index, ScoredAlignment(SYMMETRIZATIONS[self.combine](forward, reverse.transposed()))

    def _both(self, pairs: Pairs) -> Iterator[tuple[int, tuple[WordMap, WordMap] | InvalidInputError]]:
        """Yield the forward map, (T, S), and the reverse one, (S, T), of each pair."""
        forward = dict(self.forward.map_each(pairs))
        for index, word_map in self.reverse.map_each([(target, source) for source, target in pairs]):
            other = forward.pop(index)
            if isinstance(other, InvalidInputError):
                yield index, other
            elif isinstance(word_map, InvalidInputError):
                yield index, word_map
            else:
                yield index, (other, word_map)


def _check_languages(forward: WordAligner, reverse: WordAligner) -> None:
    there, back = forward.languages, reverse.languages
    for expected, actual in zip(there, back[::-1], strict=True):
        if expected is not None and actual is not None and expected != actual:
            ways = ["–".join(str(code) for code in way) for way in (there, back, there[::-1])]
            raise InvalidInputError(
                f"got a reverse model that translates {ways[1]} beside a forward model that translates {ways[0]}; "
                f"expected one that translates {ways[2]}"
            )

"""Two directions: what is read of each and how it is combined, with a lexicon and without, and what is refused."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from alignment.aligner import BidirectionalAligner, WordAligner
from alignment.decoding import hmm_posteriors, link_probabilities, mutual_argmax
from alignment.fairseq.loading import load_shipped_model
from alignment.huggingface import HuggingFaceTokenizer
from alignment.lexicon import Lexicon
from alignment.links import Alignment, ScoredAlignment
from alignment.recipes import RECIPES
from alignment.symmetrization import COMBINATIONS, SYMMETRIZATIONS
from alignment.word_maps import WordMap, sinkhorn, smoothed_product
from captum_norm import InvalidInputError
from tests.alignment.test_aligner import translations
from tests.alignment.toy import ToyMethod, ToyModel, ToyTokenizer
from tests.alignment.translation_models import FAMILIES, random_model


def noisy(seed: int) -> ToyMethod:
    """Maps that are right by three parts in four, and a function of the two ids for the rest."""

    def entries(layer: int, head: int, read: Tensor, source: Tensor) -> Tensor:
        right = ((read - source).abs() == 32).double()
        return right + ((read * 7 + source * (3 + seed) + layer + head) % 11) / 11 + 0.01

    return ToyMethod(entries, layers=1, heads=1)


def one(seed: int, recipe: Any = "hmm", **options: Any) -> WordAligner:
    return WordAligner(ToyModel(), ToyTokenizer(), noisy(seed), 0, recipe=recipe, **options)


SOURCES, TARGETS, GOLD = translations(0, 12)
PAIRS = list(zip(SOURCES, TARGETS, strict=True))


@cache
def maps(recipe: str) -> Any:
    """Forward and reverse maps, each as its own aligner sees them."""
    forward = dict(one(1, recipe).map_each(PAIRS))
    reverse = dict(one(2, recipe).map_each([(target, source) for source, target in PAIRS]))
    return [(forward[index], reverse[index]) for index in range(len(PAIRS))]


def expected(combine: str, forward: WordMap, reverse: WordMap) -> Alignment:
    """The combination by its definition, without the aligner."""
    merged = combine in SYMMETRIZATIONS
    jump, least = (0.35, 0.3) if merged else (0.3, 0.35)

    def read(there: WordMap, back: WordMap) -> Alignment:
        by_target, by_source = (hmm_posteriors(way, jump_penalty=jump, null=False) for way in (there, back))
        agreed = np.sqrt(by_target * by_source.T)
        return mutual_argmax(np.where(agreed > least, agreed, 0), null=False)

    if combine == "mutual":
        return read(forward, reverse)
    if combine == "add":
        both = sinkhorn(forward + reverse.T, null=False)
        return read(both, both.T)
    if combine == "multiply":
        rows = reverse.T / reverse.T.sum(1, keepdims=True)
        both = sinkhorn(smoothed_product([forward, rows], [1, 1], null=False), null=False)
        return read(both, both.T)
    links, others = read(forward, forward.T), read(reverse, reverse.T)
    return SYMMETRIZATIONS[combine](links, Alignment((j, i) for i, j in others))


@pytest.mark.parametrize("combine", COMBINATIONS)
def test_combinations_by_their_definitions(combine: str) -> None:
    aligner = BidirectionalAligner(one(1), one(2), combine)
    found = aligner.align(SOURCES, TARGETS)
    assert found == [expected(combine, *both) for both in maps("hmm")]
    assert aligner.scored == (combine not in SYMMETRIZATIONS)
    assert not aligner.corpus_statistics
    assert len({tuple(links) for links in found}) > 1


@pytest.mark.parametrize("recipe", ["paper", "balanced"])
def test_links_of_recipes_with_a_null_column_are_merged(recipe: str) -> None:
    forward, reverse = one(1, recipe), one(2, recipe)
    links = forward.align(SOURCES, TARGETS)
    others = [found.transposed() for found in reverse.align(TARGETS, SOURCES)]
    aligner = BidirectionalAligner(forward, reverse, "grow-diag")
    assert aligner.align(SOURCES, TARGETS) == list(map(SYMMETRIZATIONS["grow-diag"], links, others))


def test_probabilities_are_those_of_the_combined_map() -> None:
    found = BidirectionalAligner(one(1), one(2)).align_scored(SOURCES, TARGETS)
    for scored, (forward, reverse) in zip(found, maps("hmm"), strict=True):
        both = sinkhorn(forward + reverse.T, null=False)
        probabilities = link_probabilities(both, jump_penalty=0.3, null=False)
        assert scored.probabilities is not None
        assert np.array_equal(scored.probabilities, probabilities)
        assert all(probabilities[target, source] > 0.35 for source, target in scored.links)
    merged = BidirectionalAligner(one(1), one(2), "union").align_scored(SOURCES, TARGETS)
    assert {scored.probabilities for scored in merged} == {None}


@pytest.mark.parametrize("combine", ["add", "mutual", "union"])
def test_pairs_that_one_side_refuses(combine: str) -> None:
    pairs = [PAIRS[0], (["bad"], ["A"]), (["a"], ["B", "bad"]), ([], ["A"]), PAIRS[1]]
    found = BidirectionalAligner(one(1), one(2), combine).align_pairs(pairs)
    assert [isinstance(answer, InvalidInputError) for answer in found] == [False, True, True, True, False]
    alone = BidirectionalAligner(one(1), one(2), combine).align([PAIRS[0][0], PAIRS[1][0]], [PAIRS[0][1], PAIRS[1][1]])
    assert [found[0], found[4]] == alone


def links_of(answer: ScoredAlignment | InvalidInputError) -> Alignment:
    assert isinstance(answer, ScoredAlignment)
    return answer.links


def test_known_pairs_may_be_left_out() -> None:
    options: Any = {"max_tokens": 30}
    aligner = BidirectionalAligner(one(1, **options), one(2, **options))
    whole = dict(aligner.read_each(PAIRS))
    known = set(range(0, 12, 2)) | {1, 3}
    some = dict(aligner.read_each(PAIRS, known))
    assert set(range(12)) - known <= set(some) < set(range(12))
    assert all(links_of(whole[index]) == links_of(answer) for index, answer in some.items())


def lexical(pairs: Any, both: Any, lexicon: Lexicon, counted: bool) -> list[Alignment]:
    """Two passes written out: count the first map's probabilities, multiply the rest of the counts in, read links."""
    before = [sinkhorn(forward + reverse.T, null=False) for forward, reverse in both]
    owns = [link_probabilities(word_map, jump_penalty=0.2, null=False) for word_map in before]
    if counted:
        for (source, target), own in zip(pairs, owns, strict=True):
            lexicon.count(source, target, own)
    after = [
        lexicon.applied(word_map, source, target, own if counted else None)
        for word_map, (source, target), own in zip(before, pairs, owns, strict=True)
    ]
    return [RECIPES["hmm"].decode(word_map, combined=True).links for word_map in after]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_two_passes(given: bool, counted: bool) -> None:
    used = Lexicon() if given else None
    if used is not None:
        for source, target, links in zip(*translations(3), strict=True):
            right = np.zeros((len(target), len(source)))
            for i, j in links:
                right[j, i] = 0.9
            used.count(source, target, right)
    before = None if used is None else len(used)
    aligner = BidirectionalAligner(one(1), one(2), lexicon=used, count_text=counted)
    found = aligner.align_scored(SOURCES, TARGETS)
    assert {scored.corpus_statistics for scored in found} == {aligner.corpus_statistics} == {given or counted}
    written = [scored.links for scored in found]
    if given or counted:
        begun = Lexicon() if used is None else used.copy()
        assert written == lexical(PAIRS, maps("hmm"), begun, counted)
    without = BidirectionalAligner(one(1), one(2)).align(SOURCES, TARGETS)

    def right_links(alignments: list[Alignment]) -> int:
        return sum(len(links & gold) for links, gold in zip(alignments, GOLD, strict=True))

    if given:
        assert right_links(written) > right_links(without)
        assert used is not None
        assert len(used) == before


def test_one_direction_with_a_lexicon() -> None:
    alone = one(1, count_text=True)
    before = [word_map for word_map, _ in maps("hmm")]
    lexicon = Lexicon()
    owns = [link_probabilities(word_map, jump_penalty=0.2, null=False) for word_map in before]
    for pair, own in zip(PAIRS, owns, strict=True):
        lexicon.count(*pair, own)
    rows = zip(before, SOURCES, TARGETS, owns, strict=True)
    after = [lexicon.applied(word_map, source, target, own) for word_map, source, target, own in rows]
    assert alone.align(SOURCES, TARGETS) == [RECIPES["hmm"].decode(word_map, combined=True).links for word_map in after]
    assert alone.align([[], *SOURCES[:1]], [["A"], *TARGETS[:1]])[0] == Alignment()


def test_a_multilingual_model_serves_both(tmp_path: Any) -> None:
    family = FAMILIES["M2M100"]
    tokenizer = family.tokenizer(tmp_path)
    model = random_model(family, tokenizer, seed=3)
    there = HuggingFaceTokenizer(tokenizer, source_language="de", target_language="en")
    back = HuggingFaceTokenizer(tokenizer, source_language="en", target_language="de")
    turned = there.reversed()
    assert (turned.languages, turned.digest()) == (("en", "de"), back.digest())
    forward, reverse = (WordAligner(model, way, layer=0, recipe="hmm") for way in (there, back))
    pairs = [["a", "b"]], [["b", "a"]]
    found = BidirectionalAligner(forward, reverse).align_scored(*pairs)
    separate = BidirectionalAligner(forward, WordAligner(model, turned, layer=0, recipe="hmm")).align_scored(*pairs)
    assert found[0].probabilities is not None
    assert separate[0].probabilities is not None
    assert np.array_equal(found[0].probabilities, separate[0].probabilities)
    with pytest.raises(InvalidInputError, match=r"got a reverse model that translates de–en beside .* de–en; .* en–de"):
        BidirectionalAligner(forward, forward)


def test_other_languages_are_refused() -> None:
    forward = WordAligner(*load_shipped_model("fr-en"), layer=0, recipe="hmm")
    with pytest.raises(InvalidInputError, match=r"translates fr–en beside .* fr–en; .* en–fr"):
        BidirectionalAligner(forward, forward)


@pytest.mark.parametrize(
    ("recipes", "options", "message"),
    [
        (("hmm", "hmm"), {"combine": "best"}, "got combine='best', expected one of add, multiply, mutual, "),
        (("hmm", "product"), {}, "two aligners with different recipes"),
        (("paper", "paper"), {}, "combine='add' and a recipe with a null column"),
        (("product", "product"), {"combine": "mutual"}, "the decoder mutual-argmax, which has no probabilities"),
        (("hmm", "hmm"), {"combine": "grow-diag", "count_text": True}, "a lexicon and combine='grow-diag'"),
        (("hmm", "hmm"), {"combine": "mutual", "lexicon": Lexicon()}, "a lexicon and combine='mutual'"),
        (("paper", "paper"), {"combine": "union", "count_text": True}, "a lexicon and combine='union'"),
    ],
)
def test_what_does_not_fit(recipes: tuple[str, str], options: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        BidirectionalAligner(one(1, recipes[0]), one(2, recipes[1]), **options)


def test_a_lexicon_of_one_direction() -> None:
    with pytest.raises(InvalidInputError, match="got a lexicon for one direction"):
        BidirectionalAligner(one(1, count_text=True), one(2))
    with pytest.raises(InvalidInputError, match="a lexicon and a recipe with a null column"):
        one(1, "paper", lexicon=Lexicon())
    with pytest.raises(InvalidInputError, match="grow-diag makes no map of both"):
        next(BidirectionalAligner(one(1), one(2), "grow-diag").map_each(PAIRS))

"""Sentence pairs to alignments, by one model or two opposite ones: what is read, chosen, combined and refused."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

import numpy as np
import pytest
from torch import Tensor

import alignment.aligner
from alignment.aligner import BidirectionalAligner, Layer, WordAligner
from alignment.decoding import hmm_posteriors, link_probabilities, mutual_argmax
from alignment.huggingface import HuggingFaceTokenizer
from alignment.lexicon import Lexicon
from alignment.links import Alignment
from alignment.recipes import RECIPES, Recipe
from alignment.selection import Choice, Setting
from alignment.symmetrization import COMBINATIONS, SYMMETRIZATIONS
from alignment.teacher_forcing import attention_maps, word_maps
from alignment.word_maps import WordMap, sinkhorn, smoothed_product
from captum_norm import InvalidInputError
from tests.alignment.toy import ToyMethod, ToyModel, ToyTokenizer
from tests.alignment.translation_models import FAMILIES, random_model

BOTH: tuple[Setting, ...] = ("AWI", "AWO")


def translations(seed: int, count: int = 30) -> tuple[list[list[str]], list[list[str]], list[Alignment]]:
    """Sentences of small letters, their translations of capital ones in another order, and the right links."""
    generator = random.Random(seed)
    sources, targets, links = [], [], []
    for _ in range(count):
        source = generator.sample("abcdefghij", generator.randint(3, 8))
        order = generator.sample(range(len(source)), len(source))
        sources.append(source)
        targets.append([source[place].upper() for place in order])
        links.append(Alignment((place, index) for index, place in enumerate(order)))
    return sources, targets, links


def entries(layer: int, head: int, read: Tensor, source: Tensor) -> Tensor:
    """Layer 0 is loud and on the letter behind; layer 1 right in AWI; layer 2, but for its e, in AWO.

    Head 1 is the better one of each layer: head 0 speaks less, and of the next column.
    """
    emitted = read.roll(-1, 1)
    right = (
        5 * (source == read + 33),
        1.0 * (source == read + 32),
        1.0 * (source == emitted + 32) * (source != ord("e")),
    )
    return right[layer] + 0.01 if head else 0.4 * right[layer].roll(1, 2) + 0.01


def toy(layer: Layer = "auto", setting: Any = "AWI", **options: Any) -> WordAligner:
    return WordAligner(ToyModel(), ToyTokenizer(), ToyMethod(entries), layer, setting, **{"recipe": "paper", **options})


@pytest.mark.parametrize(
    ("setting", "layer", "head", "right"),
    [
        ("AWI", 1, None, True),
        ("AWI", -2, None, True),
        ("AWI", 1, 1, True),
        ("AWI", -2, -1, True),
        ("AWI", 1, 0, False),
        ("AWI", 0, None, False),
        ("AWI", 2, None, False),
        ("AWO", 1, None, False),
        ("AWO", -3, 1, False),
    ],
)
def test_layer_setting_and_head_by_hand(setting: Setting, layer: int, head: int | None, right: bool) -> None:
    sources, targets, links = translations(0)
    aligner = toy(layer, setting, head=head)
    assert aligner.choice == Choice(setting, layer, head)
    assert (aligner.align(sources, targets) == links) == right
    assert cast(ToyMethod, aligner.method).asked == [([layer], head is not None)]


@pytest.mark.parametrize(
    ("options", "choice"),
    [
        ({}, Choice("AWI", 1)),
        ({"setting": "auto"}, Choice("AWI", 1)),
        ({"setting": "AWO"}, Choice("AWO", 2)),
        ({"head": "auto"}, Choice("AWI", 1, 1)),
        ({"head": 0, "setting": "AWO"}, Choice("AWO", 2, 0)),
        ({"head": "auto", "setting": "auto"}, Choice("AWI", 1, 1)),
        ({"layer": 2, "setting": "auto", "head": "auto"}, Choice("AWO", 2, 1)),
        ({"layer": -1, "setting": "auto"}, Choice("AWO", -1)),
        ({"layer": 0, "head": "auto"}, Choice("AWI", 0, 1)),
        ({"layer": "highest-norm"}, Choice("AWI", 0)),
        ({"layer": "highest-norm", "head": "auto"}, Choice("AWI", 0, 1)),
    ],
)
def test_what_is_left_open_is_decided(options: Any, choice: Choice) -> None:
    sources, targets, _ = translations(1)
    aligner = toy(**options)
    found = aligner.align(sources, targets)
    assert aligner.choice == choice
    explicit = toy(choice.layer, choice.setting, head=choice.head)
    assert found == explicit.align(sources, targets)


def test_a_choice_is_made_once_on_the_first_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment.aligner, "SAMPLE", 3)
    first = [(["a", "bad"], ["A"]), (["a", "b"], ["A", "B"]), (["c"], ["C"])]
    rest = list(zip(*translations(0)[:2], strict=True))
    seen: list[int] = []

    def counted(layer: int, head: int, read: Tensor, source: Tensor) -> Tensor:
        seen.append(len(source))
        return entries(layer, head, read, source)

    aligner = WordAligner(ToyModel(), ToyTokenizer(), ToyMethod(counted), recipe="paper")
    chosen = aligner.choose([*first, *rest])
    assert set(seen) == {2}  # three pairs, one of which cannot be used
    seen.clear()
    assert aligner.choose(rest) is chosen
    assert not seen
    aligner.align_pairs(rest)
    assert aligner.choice is chosen


def test_the_other_setting_is_read_in_the_last_layer() -> None:
    sources, targets, _ = translations(2)
    pairs = list(zip(sources, targets, strict=True))
    method = ToyMethod(entries)
    maps = dict(word_maps(ToyModel(), ToyTokenizer(), pairs, attention_maps(method), settings=BOTH))
    split = dict(word_maps(ToyModel(), ToyTokenizer(), pairs, attention_maps(method, per_head=True), settings=BOTH))
    recipe = Recipe(combination="sum")
    for layer in (0, 1, 2, -1):
        expected = [recipe({"AWI": maps[i]["AWI"][layer], "AWO": maps[i]["AWO"][2]}, "AWI") for i in range(len(pairs))]
        assert toy(layer, recipe=recipe).align(sources, targets) == expected
        # Of one head's map the other is the mean over heads.
        expected = [
            recipe({"AWI": split[i]["AWI"][layer][0], "AWO": split[i]["AWO"][2].mean(0)}, "AWI")
            for i in range(len(pairs))
        ]
        assert toy(layer, head=0, recipe=recipe).align(sources, targets) == expected
    assert toy(0, recipe=recipe).align(sources, targets) != toy(0).align(sources, targets)
    expected = [recipe({"AWO": maps[i]["AWO"][1], "AWI": maps[i]["AWI"][2]}, "AWO") for i in range(len(pairs))]
    assert toy(1, "AWO", recipe=recipe).align(sources, targets) == expected


def test_empty_sides_have_no_links() -> None:
    sources, targets, links = translations(3, 4)
    found = toy().align([[], *sources, ["a"], []], [["A"], *targets, [], []])
    assert found == [Alignment(), *links, Alignment(), Alignment()]
    aligner = toy()
    assert aligner.align([], []) == []
    assert aligner.align([[], ["a"]], [[], []]) == [Alignment()] * 2
    assert aligner.align_pairs([]) == []
    with pytest.raises(InvalidInputError, match=r"got 0 sentence pairs, none of them usable to choose a layer$"):
        aligner.choose([])
    assert aligner.choice is None


def test_pairs_that_cannot_be_used_are_told() -> None:
    sources, targets, links = translations(3, 3)
    bad: Any = [(["a", "bad"], ["A"]), (["a"] * 29, ["A"]), (["~"], ["A"]), (["a"], []), (sources[2], targets[2])]
    found = toy(1).align_pairs([*bad[:2], (sources[0], targets[0]), *bad[2:]])
    assert [type(result) for result in found] == [InvalidInputError] * 2 + [Alignment] + [InvalidInputError] * 2 + [
        Alignment
    ]
    assert str(found[0]) == "got a bad word"
    assert "got a source side of 31 pieces, expected at most 30" in str(found[1])
    assert [found[2], found[5]] == [links[0], links[2]]
    with pytest.raises(InvalidInputError, match=r"^pair 2: got a bad word$"):
        toy(1).align([sources[0], [], ["bad"]], [targets[0], ["A"], ["A"]])
    for layer in (1, "highest-norm"):
        aligner = toy(layer, "auto")
        with pytest.raises(InvalidInputError, match=r"got 2 sentence pairs, none of them usable to .*; pair 0: got"):
            aligner.align_pairs(bad[:2])
        assert aligner.choice is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recipe": "best"},
            "got the recipe 'best'; expected one of paper, mutual, sinkhorn, balanced, product, hmm, ",
        ),
        ({"layer": "first"}, 'got the layer \'first\', expected an index, "auto" or "highest-norm"'),
        ({"setting": "awi"}, "got setting='awi'; expected one of AWO, AWI, auto"),
        ({"head": "best"}, 'got the head \'best\', expected an index, "auto" or "all"'),
        ({"recipe": "produkt"}, "did you mean product?"),
    ],
)
def test_what_is_no_option_is_refused(options: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        toy(**options)


@pytest.mark.parametrize("head", [2, -3])
@pytest.mark.parametrize("setting", ["AWI", "auto"])
def test_heads_that_the_model_lacks_are_refused(head: int, setting: str) -> None:
    with pytest.raises(InvalidInputError, match=f"got head {head}; the model has 2: 0 to 1"):
        toy(1, setting, head=head).align([["a"]], [["A"]])


def test_texts_and_unequal_numbers_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="got 2 source and 1 target sentences; expected equally many"):
        toy(1).align([["a"], ["b"]], [["A"]])
    for sources, targets in (([["a"], "a b"], [["A"], ["A"]]), ([["a"], ["a"]], [["A"], "a b"])):
        with pytest.raises(InvalidInputError, match="got the string 'a b'; expected a list of sentences"):
            toy(1).align(sources, targets)
    aligner, made = toy(1), partial(cast(Any, WordAligner), toy(1).model)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: made("fr-en"), r"got a str; wrap it: HuggingFaceTokenizer\(tokenizer\)"),
        (lambda: made(aligner.tokenizer, "norms"), r"got the method 'norms'; make one, such as AttentionWeights\("),
        (lambda: BidirectionalAligner(aligner, "en-fr"), r"got 'en-fr'; expected WordAligner\(model, tokenizer\) for"),  # type: ignore[arg-type]
    ]
    for make, message in wrong:
        with pytest.raises(InvalidInputError, match=message):
            make()


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

    if combine == "add":
        both = sinkhorn(forward + reverse.T, null=False)
        return read(both, both.T)
    if combine == "multiply":
        rows = reverse.T / reverse.T.sum(1, keepdims=True)
        both = sinkhorn(smoothed_product(forward, rows, null=False), null=False)
        return read(both, both.T)
    links, others = read(forward, forward.T), read(reverse, reverse.T)
    return SYMMETRIZATIONS[combine](links, Alignment((j, i) for i, j in others))


@pytest.mark.parametrize("combine", COMBINATIONS)
def test_combinations_by_their_definitions(combine: str) -> None:
    aligner = BidirectionalAligner(one(1), one(2), combine, count_text=False)
    found = aligner.align(SOURCES, TARGETS)
    assert found == [expected(combine, *both) for both in maps("hmm")]
    assert aligner.scored == (combine not in SYMMETRIZATIONS)
    assert not aligner.corpus_statistics
    assert len({tuple(links) for links in found}) > 1


def most_consistent_by_hand(maps: Mapping[float, Sequence[WordMap]]) -> float:
    """The weight whose mutual links have the highest sum of 1 and Dice over the other links, link by link."""

    def rate(weight: float) -> float:
        links = [
            (source[j].lower(), target[i].lower())
            for matrix, (source, target) in zip(maps[weight], PAIRS, strict=True)
            for i, j in np.ndindex(*matrix.shape)
            if matrix[i, j] == matrix[i].max() == matrix[:, j].max()
        ]
        return sum(
            1
            + 2
            * (links.count((source, target)) - 1)
            / (sum(source == one for one, _ in links) + sum(target == one for _, one in links) - 1)
            for source, target in links
        )

    return max(maps, key=rate)


def test_a_similarity_is_added_with_the_most_consistent_weight() -> None:
    chosen = set()
    for seed in range(6):
        norms, similarities = (cast(Any, dict(one(number).map_each(PAIRS))) for number in (seed, seed + 7))
        by_weight = {
            weight: [
                (1 - weight) * first / first.sum(1)[:, None] + weight * second / second.sum(1)[:, None]
                for first, second in ((norms[index], similarities[index]) for index in range(len(PAIRS)))
            ]
            for weight in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
        }
        added = one(seed, similarity=one(seed + 7))
        found, choice = cast(Any, dict(added.map_each(PAIRS))), added.choose([])
        assert choice == Choice("AWI", 0, None, most_consistent_by_hand(by_weight))
        for index, expected_map in enumerate(by_weight[choice.weight]):
            np.testing.assert_allclose(found[index], expected_map, rtol=0, atol=1e-11)
        chosen.add(str(choice))
    assert {"AWI layer 0", "AWI layer 0 + 0.3 similarity"} < chosen


def test_a_similarity_refuses_pairs_and_other_recipes() -> None:
    similarity = WordAligner(ToyModel(longest=20), ToyTokenizer(), noisy(7), 0)
    *others, last = one(0, similarity=similarity).align_pairs([*PAIRS, (["a"] * 19, ["a"] * 19)])
    assert all(isinstance(answer, Alignment) for answer in others)
    assert str(last).startswith("got a source side of 21 pieces, expected at most 20")
    with pytest.raises(
        InvalidInputError, match="none of them usable to weigh the similarity; pair 0: got a source side"
    ):
        one(0, similarity=similarity).align([["a"] * 19], [["a"] * 19])
    with pytest.raises(InvalidInputError, match="got a similarity with another recipe"):
        one(1, similarity=one(2, "product"))


@pytest.mark.parametrize("recipe", ["paper", "balanced"])
def test_links_of_recipes_with_a_null_column_are_merged(recipe: str) -> None:
    forward, reverse = one(1, recipe), one(2, recipe)
    links = forward.align(SOURCES, TARGETS)
    others = [found.transposed() for found in reverse.align(TARGETS, SOURCES)]
    aligner = BidirectionalAligner(forward, reverse)
    assert aligner.combine == "grow-diag"
    assert aligner.align(SOURCES, TARGETS) == list(map(SYMMETRIZATIONS["grow-diag"], links, others))


def test_probabilities_are_those_of_the_combined_map() -> None:
    found = BidirectionalAligner(one(1), one(2), count_text=False).align_scored(SOURCES, TARGETS)
    for scored, (forward, reverse) in zip(found, maps("hmm"), strict=True):
        both = sinkhorn(forward + reverse.T, null=False)
        probabilities = link_probabilities(both, jump_penalty=0.3, null=False)
        assert scored.probabilities is not None
        assert np.array_equal(scored.probabilities, probabilities)
        assert all(probabilities[target, source] > 0.35 for source, target in scored.links)
    merged = BidirectionalAligner(one(1), one(2), "union").align_scored(SOURCES, TARGETS)
    assert {scored.probabilities for scored in merged} == {None}


@pytest.mark.parametrize("combine", ["add", "union"])
def test_pairs_that_one_side_refuses(combine: str) -> None:
    pairs = [PAIRS[0], (["bad"], ["A"]), (["a"], ["B", "bad"]), ([], ["A"]), PAIRS[1]]
    aligner = BidirectionalAligner(one(1), one(2), combine, count_text=False)
    found = aligner.align_pairs(pairs)
    assert [isinstance(answer, InvalidInputError) for answer in found] == [False, True, True, True, False]
    alone = aligner.align([PAIRS[0][0], PAIRS[1][0]], [PAIRS[0][1], PAIRS[1][1]])
    assert [found[0], found[4]] == alone


def lexical(before: Any, lexicon: Lexicon, counted: bool) -> list[Alignment]:
    """Two passes written out: count the first map's probabilities, multiply the rest of the counts in, read links."""
    owns = [link_probabilities(word_map, jump_penalty=0.2, null=False) for word_map in before]
    if counted:
        for pair, own in zip(PAIRS, owns, strict=True):
            lexicon.count(*pair, own)
    after = [
        lexicon.applied(word_map, *pair, own if counted else None)
        for word_map, pair, own in zip(before, PAIRS, owns, strict=True)
    ]
    return [RECIPES["hmm"].decode(word_map, combined=True).links for word_map in after]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_two_passes(given: bool, counted: bool) -> None:
    used: Any = Lexicon() if given else None
    if given:
        for source, target, links in zip(*translations(3), strict=True):
            right = np.zeros((len(target), len(source)))
            for i, j in links:
                right[j, i] = 0.9
            used.count(source, target, right)
    before = len(used) if given else None
    aligner = BidirectionalAligner(one(1), one(2), lexicon=used, count_text=counted)
    found = aligner.align_scored(SOURCES, TARGETS)
    assert {scored.corpus_statistics for scored in found} == {aligner.corpus_statistics} == {given or counted}
    written = [scored.links for scored in found]
    if given or counted:
        merged = [sinkhorn(forward + reverse.T, null=False) for forward, reverse in maps("hmm")]
        assert written == lexical(merged, used.copy() if given else Lexicon(), counted)
    without = BidirectionalAligner(one(1), one(2), count_text=False).align(SOURCES, TARGETS)

    def right_links(alignments: list[Alignment]) -> int:
        return sum(len(links & gold) for links, gold in zip(alignments, GOLD, strict=True))

    if given:
        assert right_links(written) > right_links(without)
        assert len(used) == before


def test_one_direction_with_a_lexicon() -> None:
    alone = one(1, count_text=True)
    assert alone.align(SOURCES, TARGETS) == lexical([word_map for word_map, _ in maps("hmm")], Lexicon(), True)
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
    found: Any = BidirectionalAligner(forward, reverse).align_scored(*pairs)
    other = WordAligner(model, turned, layer=0, recipe="hmm")
    separate: Any = BidirectionalAligner(forward, other).align_scored(*pairs)
    assert np.array_equal(found[0].probabilities, separate[0].probabilities)
    with pytest.raises(InvalidInputError, match=r"got a reverse model that translates de–en beside .* de–en; .* en–de"):
        BidirectionalAligner(forward, forward)


@pytest.mark.parametrize(
    ("recipes", "options", "message"),
    [
        (("hmm", "hmm"), {"combine": "best"}, "got combine='best'; expected one of add, multiply, intersection, "),
        (("hmm", "hmm"), {"combine": "grow_diag"}, "did you mean grow-diag?"),
        (("hmm", "product"), {}, "two aligners with different recipes"),
        (("paper", "paper"), {"combine": "add"}, "combine='add' and a recipe with a null column"),
        (("hmm", "hmm"), {"combine": "grow-diag", "count_text": True}, "a lexicon and combine='grow-diag'"),
        (("hmm", "hmm"), {"combine": "union", "lexicon": Lexicon()}, "a lexicon and combine='union'"),
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

"""One call from sentence pairs to alignments: what is read where, how it is chosen, and what is refused."""

import random
from collections.abc import Container
from itertools import accumulate
from typing import Any, cast

import pytest
from torch import Tensor

import alignment.aligner
from alignment.aligner import Layer, WordAligner
from alignment.links import Alignment
from alignment.recipes import Recipe
from alignment.selection import Choice, Setting
from alignment.teacher_forcing import attention_maps, word_maps
from captum_norm import InvalidInputError
from tests.alignment.toy import ToyMethod, ToyModel, ToyTokenizer

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
    return WordAligner(ToyModel(), ToyTokenizer(), ToyMethod(entries), layer, setting, **options)


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

    aligner = WordAligner(ToyModel(), ToyTokenizer(), ToyMethod(counted))
    chosen = aligner.choose([*first, *rest])
    assert set(seen) == {2}  # three pairs, one of which cannot be used
    seen.clear()
    assert aligner.choose(rest) is chosen
    assert not seen
    aligner.align_pairs(rest)
    assert aligner.choice is chosen


def test_the_other_setting_is_read_in_the_last_layer() -> None:
    sources, targets, links = translations(2)
    pairs = list(zip(sources, targets, strict=True))
    method = ToyMethod(entries)
    maps = dict(word_maps(ToyModel(), ToyTokenizer(), pairs, attention_maps(method), settings=BOTH))
    split = dict(word_maps(ToyModel(), ToyTokenizer(), pairs, attention_maps(method, per_head=True), settings=BOTH))
    recipe = Recipe(other=0.8)
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
    assert toy(recipe=Recipe(other=0.1)).align(sources, targets) == links


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


def test_what_is_known_is_left_out_and_the_rest_is_what_it_was() -> None:
    sources, targets, _ = translations(0, 12)
    pairs = list(zip([*sources, ["bad"]], [*targets, ["A"]], strict=True))
    seen: list[int] = []

    def counted(layer: int, head: int, read: Tensor, source: Tensor) -> Tensor:
        seen.append(len(source))
        return entries(layer, head, read, source)

    def aligner() -> WordAligner:
        return WordAligner(ToyModel(), ToyTokenizer(), ToyMethod(counted), 1, max_tokens=60)

    def answers(known: Container[int] = ()) -> dict[int, Alignment | str]:
        found = aligner().read_each(pairs, known)
        return {
            index: str(answer) if isinstance(answer, InvalidInputError) else answer.links for index, answer in found
        }

    whole = answers()
    batches = seen[::2]  # of two heads
    assert sorted(whole) == list(range(len(pairs)))
    order = [index for index, answer in whole.items() if isinstance(answer, Alignment)]
    assert len(batches) > 3
    for count in range(len(order) + 1):
        seen.clear()
        known = set(order[:count])
        assert {index: whole[index] for index in known} | answers(known) == whole
        assert seen[::2] == [size for size, end in zip(batches, accumulate(batches), strict=True) if end > count]


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
        with pytest.raises(
            InvalidInputError, match="got 2 sentence pairs, none of them usable to choose a layer; pair 0: got a ba"
        ):
            aligner.align_pairs(bad[:2])
        assert aligner.choice is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recipe": "best"},
            "got the recipe 'best', expected one of paper, mutual, sinkhorn, balanced, product, hmm or a Recip",
        ),
        ({"layer": "first"}, 'got the layer \'first\', expected an index, "auto" or "highest-norm"'),
        ({"setting": "awi"}, 'got the setting \'awi\', expected "AWI", "AWO" or "auto"'),
        ({"head": "best"}, "got the head 'best', expected an index, \"auto\" or None"),
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
        with pytest.raises(InvalidInputError, match="pair 1: got the string 'a b', expected a sequence of words"):
            toy(1).align(sources, targets)

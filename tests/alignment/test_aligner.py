"""One call from sentence pairs to alignments: what is read where, how it is chosen, and what is refused."""

import random
from collections.abc import Container
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import alignment.aligner
from alignment.aer import AER
from alignment.aligner import Layer, WordAligner, without_head
from alignment.corpora import load_alibi
from alignment.decoding import argmax, mutual_argmax
from alignment.extraction import MapMethod, attention_maps, word_maps
from alignment.huggingface import HuggingFaceTokenizer
from alignment.links import Alignment
from alignment.normalization import NormalizedWords
from alignment.recipes import RECIPES, Recipe
from alignment.selection import Choice, consistency, highest_norm
from alignment.settings import Setting
from alignment.shipped import load_shipped_model
from captum_norm import AttentionWeights, InvalidInputError, NormAttribution, UnsupportedScopeError
from tests.alignment.toy import ToyMethod, ToyModel, ToyTokenizer
from tests.alignment.translation_models import FAMILIES, SOURCES, TARGETS, random_model

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


@pytest.mark.parametrize("setting", ["AWO", "AWI"])
def test_rows_are_those_of_the_step_that_emits_or_reads(setting: Setting) -> None:
    # Only the step that reads X looks at d, and only the one that emits it at a.
    def one_step(_: int, __: int, read: Tensor, source: Tensor) -> Tensor:
        return 1.0 * (read == ord("X")) * (source == ord("d")) + (read.roll(-1, 1) == ord("X")) * (source == ord("a"))

    pair = [["a", "b", "c", "d"]], [["W", "X", "Y"]]
    found = WordAligner(ToyModel(), ToyTokenizer(), ToyMethod(one_step), 0, setting).align(*pair)
    # W is read where X is emitted, and X is emitted where W is read.
    assert found == [Alignment({"AWO": [(0, 1), (3, 2)], "AWI": [(0, 0), (3, 1)]}[setting])]


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
    with pytest.raises(InvalidInputError, match=r"got 0 sentence pairs, none to choose a layer by$"):
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
        found = aligner().align_each(pairs, known)
        return {index: answer if isinstance(answer, Alignment) else str(answer) for index, answer in found}

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
            InvalidInputError, match="got 2 sentence pairs, none to choose a layer by; pair 0: got a ba"
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
    with pytest.raises(InvalidInputError, match="got 2 source and 1 target sentences; expected as many"):
        toy(1).align([["a"], ["b"]], [["A"]])
    for sources, targets in (([["a"], "a b"], [["A"], ["A"]]), ([["a"], ["a"]], [["A"], "a b"])):
        with pytest.raises(InvalidInputError, match="pair 1: got the text 'a b', expected a sequence of words"):
            toy(1).align(sources, targets)


# With real models.


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random model of Marian, and sentence pairs."""
    family = FAMILIES["Marian"]
    tokenizer = family.tokenizer(tmp_path_factory.mktemp("tokenizer"))
    torch.manual_seed(0)  # what the model is made with, before it is made more random
    return SimpleNamespace(
        model=random_model(family, tokenizer, seed=3),
        tokenizer=HuggingFaceTokenizer(tokenizer),
        sources=[text.split() for text in SOURCES],
        targets=[text.split() for text in TARGETS],
    )


def maps_by_hand(made: Any, method: MapMethod, **options: Any) -> list[Any]:
    """Word maps of pairs that are read alone, (L, [H,] T, S + 1) by setting."""
    return [
        maps
        for pair in zip(made.sources, made.targets, strict=True)
        for _, maps in word_maps(
            made.model, made.tokenizer, [pair], attention_maps(method, **options), settings=BOTH, max_tokens=1
        )
    ]


METHODS: dict[str, Any] = {
    "default": lambda _: None,
    "norms": NormAttribution,
    "weights": AttentionWeights,
    "res-ln": lambda model: NormAttribution(model, scope="attn_res_ln"),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("setting", BOTH)
def test_methods(marian: Any, name: str, setting: Setting) -> None:
    method = METHODS[name](marian.model)
    maps = maps_by_hand(marian, method or NormAttribution(marian.model))
    for layer in (0, -1):
        aligner = WordAligner(marian.model, marian.tokenizer, method, layer, setting, max_tokens=70)
        expected = [argmax(pair[setting][layer]) for pair in maps]
        assert aligner.align(marian.sources, marian.targets) == expected
        assert aligner.align(marian.sources[1:2], marian.targets[1:2]) == expected[1:2]
        assert sum(map(len, expected)) > 5


@pytest.mark.parametrize("name", ["norms", "weights"])
def test_heads(marian: Any, name: str) -> None:
    method = METHODS[name](marian.model)
    maps = maps_by_hand(marian, method, per_head=True)
    found = {}
    for layer, head in ((0, 0), (0, 1), (1, 0), (-1, -1)):
        aligner = WordAligner(marian.model, marian.tokenizer, method, layer, head=head, recipe="mutual")
        found[layer, head] = aligner.align(marian.sources, marian.targets)
        assert found[layer, head] == [mutual_argmax(pair["AWI"][layer, head]) for pair in maps]
    assert found[0, 0] != found[0, 1] != found[1, 0] != found[-1, -1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(marian: Any, recipe: str) -> None:
    maps = maps_by_hand(marian, NormAttribution(marian.model))
    for setting, other in (BOTH, BOTH[::-1]):
        expected = [RECIPES[recipe]({setting: m[setting][0], other: m[other][1]}, setting) for m in maps]
        aligner = WordAligner(marian.model, marian.tokenizer, None, 0, setting, recipe=recipe)
        assert aligner.align(marian.sources, marian.targets) == expected


@pytest.mark.parametrize("layer", [2, -3, 10**6])
def test_layers_that_the_model_lacks_are_refused(marian: Any, layer: int) -> None:
    with pytest.raises(InvalidInputError, match=f"got layer {layer}; the model has 2: 0 to 1, or -2 to -1"):
        WordAligner(marian.model, marian.tokenizer, layer=layer).align(marian.sources, marian.targets)


def test_what_the_method_cannot_is_refused(marian: Any, tmp_path: Any) -> None:
    method = METHODS["res-ln"](marian.model)
    with pytest.raises(InvalidInputError, match='got per_head=True for the scope "attn_res_ln"'):
        WordAligner(marian.model, marian.tokenizer, method, 0, head=0).align(marian.sources, marian.targets)
    family = FAMILIES["T5"]
    tokenizer = family.tokenizer(tmp_path)
    model = random_model(family, tokenizer)
    scope = NormAttribution(model, scope="attn_res_ln")
    aligner = WordAligner(model, HuggingFaceTokenizer(tokenizer), cast(MapMethod, scope), 0)
    with pytest.raises(UnsupportedScopeError):
        aligner.align(marian.sources, marian.targets)


def test_the_model_is_left_as_it_was(marian: Any) -> None:
    model = marian.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules, implementation = dict(model.named_modules()), model.config._attn_implementation
    for layer in (0, "auto"):
        WordAligner(model, marian.tokenizer, layer=layer).align(marian.sources, marian.targets)
    assert all(torch.equal(tensor, before.pop(name)) for name, tensor in model.state_dict().items())
    assert not before
    assert dict(model.named_modules()) == modules
    assert model.config._attn_implementation == implementation
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules.values())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_head_of_a_model_is_not_run(marian: Any) -> None:
    assert without_head(marian.model) is marian.model.model
    assert without_head(marian.model.model) is marian.model.model
    plain = ToyModel()
    assert without_head(plain) is plain


@pytest.fixture(scope="module")
def story() -> Any:
    """The shipped model on the Alibi story: norms of every layer in both settings."""
    model, tokenizer = load_shipped_model("fr-en")
    corpus = load_alibi()
    pairs = list(zip(corpus.sources, corpus.targets, strict=True))
    made = SimpleNamespace(model=model, tokenizer=NormalizedWords(tokenizer, "fr", "en"), corpus=corpus)
    maps = attention_maps(NormAttribution(model.base_model))
    found = dict(word_maps(model, made.tokenizer, pairs, maps, settings=BOTH))
    made.maps = {
        Choice(setting, layer): [found[index][setting][layer].astype(np.float64) for index in range(len(pairs))]
        for setting in BOTH
        for layer in range(3)
    }
    return made


def test_norms_find_the_words_of_the_story_better_than_weights(story: Any) -> None:
    corpus, metric = story.corpus, AER([story.corpus.gold])
    norms = WordAligner(story.model, story.tokenizer, setting="auto")
    found = norms.align(corpus.sources, corpus.targets)
    assert norms.choice == Choice("AWI", 0)
    assert found == [argmax(word_map) for word_map in story.maps[Choice("AWI", 0)]]
    weights = WordAligner(
        story.model, story.tokenizer, cast(MapMethod, AttentionWeights(without_head(story.model))), 0
    ).align(corpus.sources, corpus.targets)
    scores = [metric.corpus_score(alignments, None).aer for alignments in (found, weights)]
    assert [round(score, 1) for score in scores] == [32.1, 34.7]


def test_the_rules_choose_as_by_hand(story: Any) -> None:
    corpus = story.corpus
    by_hand = {
        choice: consistency([mutual_argmax(word_map) for word_map in maps], corpus.sources, corpus.targets)
        for choice, maps in story.maps.items()
    }
    means = {
        choice: np.concatenate([word_map.ravel() for word_map in maps]).mean() for choice, maps in story.maps.items()
    }
    assert max(by_hand, key=lambda choice: by_hand[choice]) == Choice("AWI", 0)
    assert max(means, key=lambda choice: means[choice]) == highest_norm(story.maps) == Choice("AWO", 2)
    aligner = WordAligner(story.model, story.tokenizer, layer="highest-norm", setting="auto")
    pairs = list(zip(corpus.sources[:20], corpus.targets[:20], strict=True))
    sample = {choice: np.concatenate([m.ravel() for m in maps[:20]]).mean() for choice, maps in story.maps.items()}
    assert aligner.choose(pairs) == max(sample, key=lambda choice: sample[choice])

"""Recipes against their steps one after the other, and what they refuse."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from alignment import word_maps as steps
from alignment.decoding import argmax, link_probabilities, mutual_argmax, probable_links
from alignment.links import Alignment
from alignment.recipes import MEAN_ERROR, PIECE_RECIPES, RECIPES, Recipe, read_recipe
from alignment.selection import Choice, Setting, consistency, highest_norm, most_consistent, row_word_ids
from alignment.tokenization import EncodedSentence
from alignment.word_maps import WordMap
from captum_norm import InvalidInputError

ROOT = Path(__file__).parents[2]

Maps = dict[Setting, WordMap]


def random_maps(seed: int, targets: int = 9, sources: int = 7) -> Maps:
    generator = np.random.default_rng(seed)
    maps: list[WordMap] = [generator.gamma(0.7, size=(targets, sources + 1)) for _ in range(2)]
    return {"AWI": maps[0], "AWO": 3 * maps[1]}


def rows(word_map: WordMap) -> WordMap:
    divided: WordMap = word_map / word_map.sum(1, keepdims=True)
    return divided


def product(this: WordMap, other: WordMap) -> WordMap:
    """Of maps with uniform ones mixed in."""
    uniform = 1 / this.shape[1]
    multiplied: WordMap = (rows(this) + uniform) * (rows(other) + uniform)
    return multiplied


def balanced(this: WordMap, other: WordMap) -> WordMap:
    """What the recipes product and hmm decode."""
    return steps.sinkhorn(product(this[:, :-1], other[:, :-1]), null=False)


EXPECTED: dict[str, Callable[[WordMap, WordMap], Alignment]] = {
    "paper": lambda this, _: argmax(this),
    "mutual": lambda this, _: mutual_argmax(this),
    "sinkhorn": lambda this, _: argmax(steps.sinkhorn(this)),
    "balanced": lambda this, other: mutual_argmax(steps.sinkhorn(rows(this) + rows(other))),
    "product": lambda this, other: mutual_argmax(balanced(this, other), null=False),
    "hmm": lambda this, other: probable_links(
        link_probabilities(balanced(this, other), jump_penalty=0.35, null=False), 0.3
    ),
    "sum": lambda this, other: argmax(rows(this) + rows(other)),
    "no null": lambda this, _: argmax(this[:, :-1], null=False),
    "threshold": lambda this, other: Alignment(
        (int(j), int(i)) for i, j in np.argwhere((this[:, :-1] > 0.5) & (other[:, :-1] > 0.5))
    ),
}

"""What a recipe is said to do, step by step."""

OWN = {
    "sum": Recipe(combination="sum"),
    "no null": Recipe(null=False),
    "threshold": Recipe(combination="minimum", decoder="threshold", options={"min_probability": 0.5}),
}

ALL = {**RECIPES, **OWN}


@pytest.mark.parametrize("name", ALL)
def test_recipes_step_by_step(name: str) -> None:
    found = []
    for seed in range(5):
        maps = random_maps(seed)
        for setting, other in (("AWI", "AWO"), ("AWO", "AWI")):
            links = ALL[name](maps, setting)  # type: ignore[arg-type]
            assert links == EXPECTED[name](maps[setting], maps[other])  # type: ignore[index]
            assert len(links) > 0
            found.append(links)
    assert len(set(found)) >= 5


def test_the_maps_needed_are_enough() -> None:
    maps = random_maps(0)
    both = ("balanced", "product", "hmm", "sum", "threshold")
    for name, recipe in ALL.items():
        needed = recipe.settings("AWO")
        assert set(needed) == ({"AWO", "AWI"} if name in both else {"AWO"})
        assert recipe({setting: maps[setting] for setting in needed}, "AWO") == recipe(maps, "AWO")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder": "viterbi"}, "got decoder='viterbi'; expected one of argmax, mutual-argmax, itermax, mutual-p"),
        ({"combination": "mean"}, "got combination='mean'; expected one of None, sum, product"),
        ({"decoder": "mutual-posterior"}, r"got the options {} of mutual-posterior; expected \['jump_penalty', 'min_p"),
        ({"options": {"share": 0.1}}, "got the options {'share': 0.1} of argmax; expected none"),
        (
            {"decoder": "threshold", "options": {"jump_penalty": 1}},
            r"got the options {'jump_penalty': 1} of threshold; expected \['min_probability'\]",
        ),
    ],
)
def test_what_is_no_recipe_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Recipe(**options)


FOR_BOTH = {"jump_penalty": 0.2, "min_probability": 0.0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hmm", RECIPES["hmm"]),
        ("product,decoder=argmax", Recipe(False, "product", True, "argmax")),
        ("hmm,decoder=argmax,combination=none,null=true", Recipe(True, None, True)),
        (
            "softmax,min_probability=0.1",
            Recipe(
                False, "minimum", False, "threshold", {"min_probability": 0.1}, {"min_probability": 0.1}, pieces=True
            ),
        ),
        ("mutual,pieces=true,null=false", PIECE_RECIPES["argmax"]),
        ("jump_penalty=0.2,min_probability=0", Recipe(False, "product", True, "mutual-posterior", FOR_BOTH, FOR_BOTH)),
        ('{"recipe": "balanced", "null": false, "decoder": "argmax"}', Recipe(False, "sum", True, "argmax")),
    ],
)
def test_a_recipe_is_a_name_with_changes_or_a_file(text: str, expected: Recipe, tmp_path: Path) -> None:
    if text.startswith("{"):
        (tmp_path / "recipe.json").write_text(text, encoding="utf-8")
        text = str(tmp_path / "recipe.json")
    assert read_recipe(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hmn", "got the recipe 'hmn'; expected one of paper, .*, NAME,KEY=VALUE or FILE.json; did you mean hmm?"),
        ("", "got the recipe ''; expected one of paper, "),
        ("hmm,product", "got 'product' in the recipe hmm,product; expected KEY=VALUE"),
        ("hmm,jump_penaltie=1", "got 'jump_penaltie' in the recipe .*; did you mean jump_penalty?"),
        ("hmm,jump_penalty=high", "got jump_penalty=high in the recipe .*; expected a number"),
        ("hmm,jump_penalty=true", "got jump_penalty=True in the recipe .*; expected a number"),
        ("hmm,jump_penalty=NaN", "got jump_penalty nan, expected a finite number"),
        ("hmm,min_probability=-1", "got min_probability -1.0, expected a finite number"),
        ("hmm,null=1", "got null=1 in the recipe hmm,null=1; expected true or false"),
        ("hmm,decoder=[1]", r"got decoder=\[1\] in the recipe .*; expected a name"),
        ("hmm,decoder=argmaks", "got decoder='argmaks'; expected one of argmax, .*; did you mean argmax?"),
        ("product,jump_penalty=1", "got the options {'jump_penalty': 1.0} of mutual-argmax; expected none"),
        ("none.json", "cannot read none.json: there is no such file"),
        ("list.json", "list.json holds list; expected an object of the keys of a recipe"),
        ("broken.json", "broken.json is not JSON"),
    ],
)
def test_recipes_that_cannot_be_read(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[1]", encoding="utf-8")
    Path("broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(InvalidInputError, match=message):
        read_recipe(text)


def test_measured_errors_are_those_of_the_documentation() -> None:
    # What --help ranks recipes by: by norms of one head, the mean over the stories, of both shipped models.
    page = (ROOT / "docs" / "alignment-error-tables.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:en-fr|fr-en) \| one \| (\w+) \|.*\| ([\d.]+) / [\d.]+ \|$", page, re.MULTILINE)
    means = {recipe: fmean(float(rate) for name, rate in rows if name == recipe) for recipe, _ in rows}
    assert {recipe: pytest.approx(rate, abs=0.06) for recipe, rate in MEAN_ERROR.items()} == means
    assert list(MEAN_ERROR.values()) == sorted(MEAN_ERROR.values())
    assert set(MEAN_ERROR) == set(RECIPES)


Corpus = tuple[list[Alignment], list[list[str]], list[list[str]]]


def link_by_link(alignments: list[Alignment], sources: list[list[str]], targets: list[list[str]]) -> float:
    """The definition: each link is compared with every other one."""
    links = [
        (source[i].lower(), target[j].lower())
        for alignment, source, target in zip(alignments, sources, targets, strict=True)
        for i, j in alignment
    ]
    total = 0.0
    for place, (source, target) in enumerate(links):
        others = [link for other, link in enumerate(links) if other != place]
        both = others.count((source, target))
        total += 1 + 2 * both / (1 + sum(s == source for s, _ in others) + sum(t == target for _, t in others))
    return total / sum(map(len, targets))


def random_corpus(seed: int) -> Corpus:
    """One-to-one links between words of which some are likelier, in sentences of 0 to 6 words."""
    generator = random.Random(seed)
    alignments, sources, targets = [], [], []
    for _ in range(20):
        source, target = ([generator.choice("aAbcDd") for _ in range(generator.randint(0, 6))] for _ in range(2))
        count = generator.randint(0, min(len(source), len(target)))
        links = zip(
            generator.sample(range(len(source)), count), generator.sample(range(len(target)), count), strict=True
        )
        alignments.append(Alignment(links))
        sources.append(source)
        targets.append(target)
    return alignments, sources, targets


@pytest.mark.parametrize("seed", range(5))
def test_consistency_link_by_link(seed: int) -> None:
    corpus = random_corpus(seed)
    assert consistency(*corpus) == pytest.approx(link_by_link(*corpus), rel=1e-12)
    assert 0 < consistency(*corpus) < 2


@pytest.mark.parametrize(
    ("links", "sources", "targets", "expected"),
    [
        ([], [], [], 0),
        ([Alignment()], [["a"]], [[]], 0),
        ([Alignment()], [["a"]], [["x", "y"]], 0),
        ([Alignment([(0, 0)])], [["a"]], [["x", "y"]], 1 / 2),
        ([Alignment([(0, 0)])] * 1000, [["a"]] * 1000, [["x"]] * 1000, 1 + 2 * 999 / 1999),
    ],
)
def test_consistency_at_its_bounds(
    links: list[Alignment], sources: list[list[str]], targets: list[list[str]], expected: float
) -> None:
    assert consistency(links, sources, targets) == pytest.approx(expected)
    assert 0 <= consistency(links, sources, targets) < 2


@pytest.mark.parametrize("seed", range(5))
def test_right_links_beat_shifted_fewer_and_random_ones(seed: int) -> None:
    """A lexicon of 30 words, translated word by word: as a trained model's layers and settings show it."""
    generator = random.Random(seed)
    sources = [[f"s{generator.randrange(30)}" for _ in range(generator.randint(3, 12))] for _ in range(60)]
    targets = [[word.replace("s", "t") for word in words] for words in sources]
    right = [Alignment((i, i) for i in range(len(words))) for words in sources]
    shifted = [Alignment((i, (i + 1) % len(words)) for i in range(len(words))) for words in sources]
    fewer = [Alignment((i, i) for i in range(0, len(words), 2)) for words in sources]
    mixed = [
        Alignment(zip(range(len(words)), generator.sample(range(len(words)), len(words)), strict=True))
        for words in sources
    ]
    scores = [consistency(links, sources, targets) for links in (right, fewer, shifted, mixed)]
    assert scores[0] > 1.7
    assert all(scores[0] > score + 0.3 for score in scores[1:])
    maps = [np.eye(len(words), len(words) + 1) + 0.1 for words in sources]
    candidates = {
        Choice("AWO", 0): [np.roll(word_map, 1, axis=0) for word_map in maps],
        Choice("AWI", 0): [np.ones_like(word_map) for word_map in maps],
        Choice("AWO", 1): maps,
        Choice("AWI", 2): maps,
        Choice("AWI", 1): maps,
    }
    assert most_consistent(candidates, sources, targets) == Choice("AWI", 1)


def test_only_mutual_links_count() -> None:
    """Where every target word is linked to one source word there are many links, but one of them is mutual."""
    one_word = np.pad(np.array([[1.0], [0.9], [0.8], [0.7]]), ((0, 0), (0, 4)))
    half = np.diag([1.0, 1, 0, 0, 0])[:4]
    candidates = {Choice("AWI", 0): [one_word] * 2, Choice("AWI", 1): [half] * 2}
    assert most_consistent(candidates, [list("abcd")] * 2, [list("wxyz")] * 2) == Choice("AWI", 1)


def test_highest_norm_is_the_mean_over_all_entries() -> None:
    small, large = np.full((1, 2), 4.0), np.full((3, 4), 1.0)
    candidates = {
        Choice("AWI", 0): [small, large],  # mean (8 + 12) / 14; of the pairs' means 2.5
        Choice("AWI", 1): [np.zeros((1, 2)), np.full((3, 4), 1.75)],  # 21 / 14
        Choice("AWO", 2): [np.full((1, 2), 1.5), np.tile([0, 0, 0, 5.9], (3, 1))],  # 20.7 / 14, by the null column
    }
    assert highest_norm(candidates) == Choice("AWI", 1)
    candidates[Choice("AWO", 2)][1][0, 3] += 1
    assert highest_norm(candidates) == Choice("AWO", 2)
    del candidates[Choice("AWI", 1)], candidates[Choice("AWO", 2)]
    assert highest_norm(candidates) == Choice("AWI", 0)


def test_choices_have_an_order_and_a_text() -> None:
    assert min(Choice("AWO", 0), Choice("AWI", 2), Choice("AWI", 0)) == Choice("AWI", 0)
    assert [str(Choice("AWI", 2)), str(Choice("AWO", 0, 3))] == ["AWI layer 2", "AWO layer 0 head 3"]


def test_other_settings_are_refused() -> None:
    setting: Any = "awi"
    with pytest.raises(InvalidInputError, match="got the setting 'awi', expected AWO or AWI"):
        row_word_ids(EncodedSentence([2], [None]), setting)

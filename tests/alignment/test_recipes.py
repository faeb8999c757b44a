"""Recipes against their steps one after the other, and what they refuse."""

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
from alignment.recipes import MEAN_ERROR, RECIPES, Recipe
from alignment.selection import Setting
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
}
"""What a recipe is said to do, step by step."""

OWN = {"sum": Recipe(combination="sum"), "no null": Recipe(null=False)}
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
    both = ("balanced", "product", "hmm", "sum")
    for name, recipe in ALL.items():
        needed = recipe.settings("AWO")
        assert set(needed) == ({"AWO", "AWI"} if name in both else {"AWO"})
        assert recipe({setting: maps[setting] for setting in needed}, "AWO") == recipe(maps, "AWO")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder": "viterbi"}, "got the decoder 'viterbi'; expected one of argmax, mutual-argmax, mutual-posterior"),
        ({"combination": "mean"}, "got the combination 'mean'; expected None, sum or product"),
        ({"decoder": "mutual-posterior"}, r"got the options {} of mutual-posterior; expected \['jump_penalty', 'min_p"),
        ({"options": {"share": 0.1}}, "got the options {'share': 0.1} of argmax; expected none"),
    ],
)
def test_what_is_no_recipe_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Recipe(**options)


def test_measured_errors_are_those_of_the_documentation() -> None:
    # What --help ranks recipes by: by norms of one head, the mean over the stories, of both shipped models.
    page = (ROOT / "docs" / "alignment-error.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:en-fr|fr-en) \| one \| (\w+) \|.*\| ([\d.]+) / [\d.]+ \|$", page, re.MULTILINE)
    means = {recipe: fmean(float(rate) for name, rate in rows if name == recipe) for recipe, _ in rows}
    assert {recipe: pytest.approx(rate, abs=0.06) for recipe, rate in MEAN_ERROR.items()} == means
    assert list(MEAN_ERROR.values()) == sorted(MEAN_ERROR.values())
    assert set(MEAN_ERROR) == set(RECIPES)

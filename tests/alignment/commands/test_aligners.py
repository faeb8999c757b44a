"""What the options on maps and links become, and what is said of those that make no sense."""

import argparse
from typing import Any

import pytest

from alignment.commands import aligners
from alignment.fairseq.loading import load_shipped_model
from alignment.recipes import RECIPES
from alignment.selection import Choice
from captum_norm.errors import CaptumNormError
from tests.alignment.commands.texts import ENGLISH, FRENCH
from tests.commands import calls


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Any]:
    return load_shipped_model("fr-en")


def parsed(*words: str) -> aligners.AlignerOptions:
    return calls.parsed(aligners.AlignerOptions, "--max-tokens=123", *words)


@pytest.mark.parametrize("words", [["--recipe=paper"], ["--method=attention-block"], ["--scope=attn_res"]])
def test_heads_together_where_the_paper_or_the_maps_have_them_so(shipped: tuple[Any, Any], words: list[str]) -> None:
    assert aligners.word_aligner(*shipped, parsed(*words, "--layer=0")).choice == Choice("AWI", 0)


def test_what_is_left_to_decide_is_decided_once(shipped: tuple[Any, Any]) -> None:
    aligner = aligners.word_aligner(*shipped, parsed("--setting=auto"))
    pairs = [(FRENCH[1].split(), ENGLISH[1].split())]
    told: list[str] = []
    aligners.choose(aligner, [], told.append)
    assert (aligner.choice, told) == (None, [])
    aligners.choose(aligner, pairs, told.append)
    assert told == [f"chose {aligner.choice}"]
    aligners.choose(aligner, pairs, told.append)
    assert len(told) == 1
    silent = aligners.word_aligner(*shipped, parsed("--setting=auto"))
    aligners.choose(silent, pairs, None)
    assert silent.choice == aligner.choice


def test_identity_says_what_decides_the_links(shipped: tuple[Any, Any]) -> None:
    options = parsed("--layer=1", "--head=2", "--recipe=mutual", "--method=weights")
    assert aligners.identity(options, aligners.word_aligner(*shipped, options)) == {
        "method": "weights",
        "scope": "attn",
        "maps": "AWI layer 1 head 2",
        "recipe": str(RECIPES["mutual"]),
        "max_tokens": 123,
    }
    options = parsed("--recipe=mutual")
    identity = aligners.identity(options, aligners.word_aligner(*shipped, options))
    assert identity["recipe"] == str(RECIPES["mutual"])
    assert identity["maps"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--layer=3 --head=all", "got layer 3; the model has 3: 0 to 2"),
        ("--layer=-4 --head=all", "got layer -4; the model has 3"),
        ("--layer=0 --head=4", "got head 4; the model has 4: 0 to 3"),
        ("--method=attention-block --head=auto", "the method attention-block has no maps of single heads at the scope"),
        ("--scope=atb", 'got the scope "atb"; NormAttribution has the scopes attn, attn_res, attn_res_ln'),
        ("--layer=first", "argument --layer: got first; expected a number, auto or highest-norm"),
        ("--layer=1.5", "argument --layer: got 1.5; expected"),
        ("--head=every", "argument --head: got every; expected a number, auto or all"),
        ("--method=saliency", "argument --method: invalid choice: 'saliency'"),
        ("--recipe=best", "argument --recipe: got the recipe 'best'; expected one of paper, "),
    ],
)
def test_options_that_are_refused(shipped: tuple[Any, Any], words: str, message: str) -> None:
    with pytest.raises((CaptumNormError, argparse.ArgumentError)) as refused:
        aligners.word_aligner(*shipped, parsed(*words.split()))
    assert str(refused.value).startswith(message)

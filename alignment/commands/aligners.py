"""Declares the options for extracting alignments from a translation model, and builds the aligner."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from alignment.decoding import DECODERS
from alignment.recipes import COMBINATIONS, MEAN_ERROR, RECIPES, Recipe
from alignment.tokenization import TranslationTokenizer
from captum_norm import InvalidInputError
from captum_norm.methods import METHODS

if TYPE_CHECKING:
    from torch import nn

    from alignment.aligner import Pairs, TextAligner, WordAligner, Words
    from alignment.links import GoldAlignment


CHOICES = ("norm", "attention-block", "weights")
DEFAULT_RECIPE = "hmm"


def _index_or(*words: str) -> Callable[[str], int | str]:
    def parse(text: str) -> int | str:
        if text in words:
            return text
        if not re.fullmatch(r"-?[0-9]{1,6}", text):
            message = f"got {text}; expected {', '.join(words)} or a number from 0, or from -1 for the last"
            raise argparse.ArgumentTypeError(message)
        return int(text)

    return parse


LAYER = _index_or("auto", "highest-norm")
HEAD = _index_or("auto", "all")
ONE_HEAD = _index_or("auto")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that :func:`word_aligner` reads."""
    maps = parser.add_argument_group("the maps")
    maps.add_argument(
        "--method",
        choices=CHOICES,
        default="norm",
        help="norms of the vectors that cross-attention sums, norms of the whole attention block, or attention weights "
        "(default: %(default)s)",
    )
    maps.add_argument(
        "--scope",
        help="how far through the layer to go: attn, attn_res or attn_res_ln for norm; attn or attn_res for weights "
        "(default: attn)",
    )
    maps.add_argument(
        "--layer",
        type=LAYER,
        default="auto",
        metavar="N|auto|highest-norm",
        help="the decoder layer, numbered from 0, or from -1 for the last; auto: the one with the most consistent "
        "alignments of the first sentence pairs; highest-norm: the one with the highest mean "
        "(default: %(default)s)",
    )
    maps.add_argument(
        "--setting",
        choices=("AWI", "AWO", "auto"),
        default="AWI",
        help="AWI: alignment with input, from the step that reads a word; AWO: with output, from the step that emits "
        "it; auto: chosen with the layer (default: %(default)s)",
    )
    maps.add_argument(
        "--head",
        type=HEAD,
        metavar="N|auto|all",
        help="one head, numbered like layers; auto: chosen with the layer; all: all heads together (default: auto, but "
        "all for the recipe paper and for maps without heads)",
    )
    links = parser.add_argument_group("the links")
    ranking = ", ".join(f"{name} {error:.0f}" for name, error in MEAN_ERROR.items())
    links.add_argument(
        "--recipe",
        choices=list(MEAN_ERROR),
        default=DEFAULT_RECIPE,
        help=f"how maps become links; with their error rates in %% on three stories, one direction: {ranking}; paper "
        "is that of Kobayashi et al. 2020 (default: %(default)s)",
    )
    links.add_argument("--null", action=argparse.BooleanOptionalAction, help="include the null column, or not")
    links.add_argument("--other", type=float, metavar="WEIGHT", help="weight of the other setting's map")
    links.add_argument("--combination", choices=COMBINATIONS, help="add or multiply the two settings' maps")
    links.add_argument("--prior", type=float, metavar="STRENGTH", help="strength of the diagonal prior")
    links.add_argument(
        "--sinkhorn", action=argparse.BooleanOptionalAction, help="normalise rows and columns in turn, or not"
    )
    links.add_argument(
        "--decoder",
        type=_decoder,
        metavar="NAME[:PARAMETER=NUMBER]",
        help=f"one of {', '.join(DECODERS)}, with its parameters. These six options change the recipe; the reference "
        "describes them",
    )


def word_aligner(
    model: "nn.Module", tokenizer: TranslationTokenizer, options: argparse.Namespace, **further: Any
) -> "WordAligner":
    """Build the aligner, and check its options as far as possible without text.

    Args:
        model: the translation model.
        tokenizer: its tokenizer.
        options: the options.
        further: further arguments of the aligner.

    Raises:
        CaptumNormError: the model has no such layer, head or maps, or a number is out of range.
    """
    from alignment.aligner import WordAligner, without_head

    recipe = recipe_of(options)
    recipe({"AWI": [[1.0, 0.0]], "AWO": [[1.0, 0.0]]}, "AWI")
    scope = {} if options.scope is None else {"scope": options.scope}
    method = METHODS[options.method].load()(without_head(model), **scope)
    head = options.head
    if head is None:
        head = "auto" if method.scope == "attn" and options.recipe != "paper" else "all"
    if head != "all" and method.scope != "attn":
        raise InvalidInputError(
            f'the method {options.method} has no maps of single heads at the scope "{method.scope}"; omit --head'
        )
    aligner = WordAligner(
        model,
        tokenizer,
        method,
        options.layer,
        options.setting,
        head=None if head == "all" else head,
        recipe=recipe,
        max_tokens=options.max_tokens,
        **further,
    )
    if aligner.choice is not None:
        dict(aligner.map_each([(["a"], ["a"])]))
    return aligner


def choose(
    aligner: "WordAligner",
    pairs: "Sequence[tuple[Words, Words]]",
    report: Callable[[str], None] | None,
    name: str = "",
) -> None:
    """Let the aligner choose what was left open, if anything, from sentence pairs; report the choice.

    Args:
        aligner: the aligner.
        pairs: the sentence pairs, in its direction.
        report: is told the choice.
        name: the aligner's name in the report, if there are two.
    """
    if aligner.choice is None and pairs:
        choice = aligner.choose(pairs)
        if report is not None:
            report(f"{name}: chose {choice}" if name else f"chose {choice}")


def page(
    aligner: "TextAligner",
    pairs: "Pairs",
    facts: Mapping[str, str],
    gold: "Sequence[GoldAlignment] | None" = None,
    min_score: float = 0.0,
) -> bytes:
    """Render the page of the first sentence pairs; see :func:`alignment.pages.aligner_page`."""
    from alignment.pages import aligner_page
    from captum_norm.show import render_page

    return render_page(aligner_page(aligner, pairs, gold=gold, facts=facts, min_score=min_score)).encode()


def identity(options: argparse.Namespace, parts: "Sequence[tuple[WordAligner, bool]]") -> dict[str, str | int | None]:
    """What must not change when a run is resumed: the method, the choices of maps and the recipe.

    Args:
        options: the options.
        parts: the aligner of each direction.
    """
    chosen = [aligner.choice for aligner, _ in parts]
    return {
        "method": options.method,
        "scope": getattr(parts[0][0].method, "scope", None),
        "maps": None if None in chosen else ", ".join(map(str, chosen)),
        "recipe": str(parts[0][0].recipe),
        "max_tokens": options.max_tokens,
    }


def recipe_of(options: argparse.Namespace) -> Recipe:
    """The recipe that the options describe."""
    changes = {name: getattr(options, name) for name in ("null", "other", "combination", "prior", "sinkhorn")}
    if options.decoder is not None:
        changes["decoder"], changes["options"] = options.decoder
        changes["combined_options"] = {}
    return replace(RECIPES[options.recipe], **{name: value for name, value in changes.items() if value is not None})


def _decoder(text: str) -> tuple[str, dict[str, float]]:
    """A decoder and its parameters, which the recipe checks."""
    name, *settings = text.split(":")
    parameters = {}
    for parameter, _, number in (setting.partition("=") for setting in settings):
        try:
            parameters[parameter] = float(number)
        except ValueError:
            message = f"got {parameter}={number}; expected a number, as in threshold:share=0.2"
            raise argparse.ArgumentTypeError(message) from None
    return name, parameters

"""Runs ``captum-norm explain``, which shows how much each token of a text contributes."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from captum_norm.bars import progress
from captum_norm.commands.command import Command
from captum_norm.commands.explanation import REPORTS, beside, flows_of, show
from captum_norm.commands.generation import add_generation, explain_generation, is_generation
from captum_norm.commands.numbers import positive
from captum_norm.commands.options import (
    add_model,
    add_position,
    add_target,
    add_words,
    load_model,
    method_name,
    named_target,
)
from captum_norm.commands.outputs import add_reports, write_outputs
from captum_norm.commands.text_argument import add_text_option, given_text
from captum_norm.errors import InvalidInputError
from captum_norm.methods import METHODS
from captum_norm.text.words import WORD_MEASURES

if TYPE_CHECKING:
    from captum_norm.explanation import Explanation


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "texts",
        nargs="*",
        metavar="TEXT|FILE",
        help="the text to explain, or several, each as it is, in a file, or - for standard input; a prompt if an "
        "answer is explained",
    )
    add_text_option(parser)
    parser.add_argument("--lines", action="store_true", help="each line is a text, instead of a whole file")
    add_model(parser)
    parser.add_argument(
        "--method",
        type=method_name(METHODS),
        choices=METHODS,
        default="norm",
        metavar="NAME",
        help=f"the method: {', '.join(METHODS)}, or package.module:Class for one of your own (default: %(default)s)",
    )
    add_target(
        parser,
        "the output to explain, for attention-gradient, alti-logit, decompx, cp-lrp, attnlrp, gim and the methods of "
        "Captum: its number, a label of a classifier or tagger, or a token of a language model; for a sentence encoder "
        "a text, whose similarity is explained (default: what the model predicts; decompx then explains hidden states)",
    )
    parser.add_argument(
        "--scope",
        help="how far to follow the vectors through the layer: attn, attn_res or attn_res_ln for norm; atb, atb_ln, "
        "atb_ff, atb_ff_res or atb_ff_res_ln for attention-block; attn or attn_res for weights (default: the first); "
        "other methods have none",
    )
    parser.add_argument(
        "--layer",
        type=int,
        metavar="N",
        help="explain one layer, counted from 0, or from -1 backwards (default: all layers together)",
    )
    parser.add_argument(
        "--head",
        type=int,
        metavar="N",
        help="explain one head of the layer, counted from 0, or from -1 backwards (default: all heads together)",
    )
    add_position(
        parser,
        ("first", "last", "mean"),
        "the output position to explain, counted from 0, or from -1 backwards (default: the one that the model's head "
        "reads)",
    )
    parser.add_argument(
        "--aggregation",
        choices=("rollout", "product", "mean"),
        help="how to combine the layers (default: mean for weights, product for globenc, else rollout; rollout, "
        "alti-logit, decompx, cp-lrp, attnlrp and gim have no choice)",
    )
    add_words(parser)
    parser.add_argument(
        "--word-score",
        choices=WORD_MEASURES,
        help="with --words, a word's score: the sum, the mean, or the one farthest from zero of its tokens' scores, or "
        "the norm of their vectors added, with norm, attention-block and alti (default: sum)",
    )
    parser.add_argument("--top", type=positive, metavar="N", help="print the N tokens of highest score only")
    parser.add_argument(
        "--changes",
        action="store_true",
        help="also show how much each component of each layer changes the map (1 − Spearman's ρ)",
    )
    add_generation(parser)
    add_reports(parser, REPORTS)


def _run(options: argparse.Namespace) -> None:
    from captum_norm.commands.terminal import Terminal
    from captum_norm.explanation import explain
    from captum_norm.explanation.targets import default_position
    from captum_norm.lab.analysis import contextualization_change
    from captum_norm.models.objects import tokenized

    if is_generation(options):
        explain_generation(options)
        return
    if options.head is not None and options.layer is None:
        raise InvalidInputError(f"got --head {options.head} without --layer; name the layer that has it")
    if options.word_score is not None and not options.words:
        raise InvalidInputError(f"got --word-score {options.word_score} without --words; add --words, or leave it out")
    texts = _texts(options)
    model, tokenizer = load_model(options)
    position = options.position
    if position is None and METHODS[options.method].maps:
        position = default_position(model, options.model)
    given = {name: getattr(options, name) for name in ("scope", "aggregation") if getattr(options, name) is not None}

    def explained(method: str = options.method, *, per_head: bool = False, **further: Any) -> "Explanation":
        own = {"target": named_target(options), **given} if method == options.method else {}
        place = {"position": position, "layer": options.layer, "name": options.model}
        return explain(texts, model, tokenizer, method=method, per_head=per_head, **place, **own, **further)

    with progress(terminal_only=True):
        norms = options.word_score == "norm"
        explanation = explained(head=options.head, words="norm" if norms else None)
        pages = any(path.suffix.lower() == ".html" for path in options.out)
        others = beside(explanation, explained) if pages and options.head is None and not norms else []
    if options.changes:
        changes = contextualization_change(model, tokenized(model, texts, tokenizer))
        explanation = replace(explanation, changes=changes)
    if pages and not norms:
        explanation = replace(explanation, graphs=flows_of(model, explanation, tokenizer))
    by_word = explanation.words(options.word_score or "sum") if options.words and not norms else explanation
    # A page has both, tokens and words.
    contents = {
        path: REPORTS[path.suffix.lower()](explanation if path.suffix.lower() == ".html" else by_word, others)
        for path in options.out
    }
    write_outputs(contents)
    console = Terminal()
    show(by_word, console, top=options.top)
    for path in contents:
        console.say(f"wrote {path}")


def _texts(options: argparse.Namespace) -> list[str]:
    """Read the texts; with ``--lines`` each line that is not blank is one."""
    if not options.texts:
        raise InvalidInputError("got no text; give a text, a file with it, or - for standard input")
    given = [given_text(argument, is_text=options.is_text).strip() for argument in options.texts]
    if options.lines:
        given = [line.strip() for text in given for line in text.split("\n") if line.strip()] or [""]
    if len(given) > 1 and any(path.suffix.lower() == ".png" for path in options.out):
        raise InvalidInputError(f"got {len(given)} texts and a .png file, which shows one; write .html, .json or .csv")
    return given


COMMAND = Command("explain", "show how much each token of a text contributes", _add_arguments, _run)

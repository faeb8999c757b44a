"""Runs ``captum-norm explain``, which shows how much each token of a text contributes."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from captum_norm.bars import progress
from captum_norm.commands.command import Command
from captum_norm.commands.explanation import REPORTS, beside, flow_of, show
from captum_norm.commands.generation import add_generation, explain_generation, is_generation
from captum_norm.commands.options import (
    add_model,
    add_position,
    add_target,
    load_model,
    method_name,
    named_target,
)
from captum_norm.commands.outputs import add_reports, write_outputs
from captum_norm.commands.text_argument import add_text_option, given_text
from captum_norm.errors import InvalidInputError
from captum_norm.methods import METHODS

if TYPE_CHECKING:
    from captum_norm.explanation import Explanation


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "text",
        nargs="?",
        metavar="TEXT|FILE",
        help="the text to explain, a file with it, or - to read it from standard input; a prompt if an answer is "
        "explained",
    )
    add_text_option(parser)
    add_model(parser)
    names = [name for name, method in METHODS.items() if method.maps]
    parser.add_argument(
        "--method",
        type=method_name(names),
        choices=METHODS,
        default="norm",
        metavar="NAME",
        help=f"the method: {', '.join(names)}, or package.module:Class for one of your own (default: %(default)s)",
    )
    add_target(
        parser,
        "the output to explain, for attention-gradient, alti-logit, decompx, cp-lrp, attnlrp and gim: its number, a "
        "label of a classifier or tagger, or a token of a language model; for a sentence encoder a text, whose "
        "similarity is explained (default: what the model predicts; decompx then explains hidden states)",
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
    parser.add_argument(
        "--changes",
        action="store_true",
        help="also show how much each component of each layer changes the map (1 − Spearman's ρ)",
    )
    add_generation(parser)
    add_reports(parser, REPORTS)


def _run(options: argparse.Namespace) -> None:
    from captum_norm.analysis import contextualization_change
    from captum_norm.commands.terminal import Terminal
    from captum_norm.explanation import explain
    from captum_norm.explanation.targets import default_position
    from captum_norm.models.objects import tokenized

    if is_generation(options):
        explain_generation(options)
        return
    if options.text is None:
        raise InvalidInputError("got no text; give a text, a file with it, or - for standard input")
    text = given_text(options.text, is_text=options.is_text).strip()
    model, tokenizer = load_model(options)
    position = default_position(model, options.model) if options.position is None else options.position
    given = {name: getattr(options, name) for name in ("scope", "aggregation") if getattr(options, name) is not None}

    def explained(method: str = options.method, *, per_head: bool = False) -> "Explanation":
        own = {"target": named_target(options), **given} if method == options.method else {}
        place = {"position": position, "layer": options.layer, "name": options.model}
        return explain(text, model, tokenizer, method=method, per_head=per_head, **place, **own)

    with progress(terminal_only=True):
        explanation = explained()
        pages = any(path.suffix.lower() == ".html" for path in options.out)
        others = beside(explanation, explained) if pages else []
    if options.changes:
        changes = contextualization_change(model, tokenized(model, text, tokenizer))
        explanation = replace(explanation, changes=changes)
    if pages:
        explanation = replace(explanation, graph=flow_of(model, explanation, tokenizer))
    contents = {path: REPORTS[path.suffix.lower()](explanation, others) for path in options.out}
    write_outputs(contents)
    console = Terminal()
    show(explanation, console)
    for path in contents:
        console.say(f"wrote {path}")


COMMAND = Command("explain", "show how much each token of a text contributes", _add_arguments, _run)

"""Runs ``captum-norm explain``, which shows how much each token of a text contributes."""

import argparse
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from captum_norm.bars import progress
from captum_norm.commands.command import Command
from captum_norm.commands.explanation import REPORTS, Explanation, show
from captum_norm.commands.generation import add_generation, explain_generation, is_generation
from captum_norm.commands.options import (
    add_model,
    add_position,
    add_target,
    default_position,
    load_model,
    method_name,
    target_name,
    target_of,
)
from captum_norm.commands.outputs import add_reports, write_outputs
from captum_norm.commands.text_argument import add_text_option, given_text
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.methods import METHODS

if TYPE_CHECKING:
    from captum_norm.attr.base import AttentionMapAttribution


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
    from captum_norm.models.objects import tokenized

    if is_generation(options):
        explain_generation(options)
        return
    if options.text is None:
        raise InvalidInputError("got no text; give a text, a file with it, or - for standard input")
    text = given_text(options.text, is_text=options.is_text).strip()
    if not text:
        raise InvalidInputError("the text is empty; give some words")
    model, tokenizer = load_model(options)
    method = _method(model, options)
    target = _target(model, tokenizer, options)
    # The tokenizer must neither truncate a text that is too long nor warn about it: the method refuses it.
    if not tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]:
        raise InvalidInputError("the text has no tokens that the model knows; give some words")
    inputs = tokenized(model, text, tokenizer)
    if METHODS[options.method].target == "always" or target is not None:
        _refuse_without_logits(model, inputs, options.method)
    explanation = _explain(method, inputs, tokenizer, options, text, target)
    if options.changes:
        explanation = replace(explanation, changes=contextualization_change(model, inputs))
    contents = {path: REPORTS[path.suffix.lower()](explanation) for path in options.out}
    write_outputs(contents)
    console = Terminal()
    show(explanation, console)
    for path in contents:
        console.say(f"wrote {path}")


def _method(model: Any, options: argparse.Namespace) -> "AttentionMapAttribution":
    kind = METHODS[options.method].load()
    given = {name: getattr(options, name) for name in ("scope", "aggregation") if getattr(options, name) is not None}
    for name in given.keys() - inspect.signature(kind).parameters.keys():
        raise InvalidInputError(f"the method {options.method} has no --{name}")
    method: AttentionMapAttribution = kind(model, **given)
    return method


def _target(model: Any, tokenizer: Any, options: argparse.Namespace) -> Any:
    target = target_of(model, tokenizer, options)
    if target is not None and METHODS[options.method].target == "never":
        raise InvalidInputError(f"the method {options.method} has no --target")
    return target


def _refuse_without_logits(model: Any, inputs: Any, method: str) -> None:
    import torch

    from captum_norm.models.inputs import bind_inputs

    with torch.no_grad():
        output = bind_inputs(model, inputs).run()
    if "logits" not in output:
        raise UnsupportedModelError(
            f"{type(model).__name__} returns no logits, and {method} explains one of them; name a classifier, a tagger "
            "or a language model, or another method"
        )


def _explain(
    method: Any, inputs: Any, tokenizer: Any, options: argparse.Namespace, text: str, target: Any
) -> Explanation:
    from captum_norm.aggregation import with_prefix_rows
    from captum_norm.forward.request import layer_indices
    from captum_norm.models.heads import read_position

    position = default_position(options) if options.position is None else options.position
    units, count = method.units, method.count_layers(inputs)
    layers = layer_indices(None if options.layer is None else [options.layer], count)
    layer = None if options.layer is None else layers[0]
    output = {"target": target, "position": position}
    with progress(terminal_only=True):
        maps = None
        if method.mapped:
            maps = method.maps(inputs, layers=layers, **(output if method.target == "always" else {}))
        if maps is None or (method.target == "optional" and target is not None):
            scores, deltas = method.attribute(inputs, **output, layer=layer, return_convergence_delta=True)
        else:
            scores, deltas = method.scores(maps, position, aggregate=layer is None), maps.convergence_delta
    aggregated = f"mean {units.entry}" if method.aggregation == "mean" else f"share of {method.aggregation}"
    together = units.together or aggregated
    if (target is not None or maps is None) and units.target is not None:
        together = units.target
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    square, default = None, "what the head reads"
    if maps is not None:
        # Virtual tokens are shown if they have scores; those of a tuned prefix receive nothing.
        tokens = [*(f"[virtual {place}]" for place in range(1, maps.virtual + 1)), *tokens][-scores.shape[1] :]
        square = with_prefix_rows(maps.self_attention[0], 0)[:, -len(tokens) :, -len(tokens) :]
        default = read_position(method.forward_func, causal=maps.decoder is not None) or default
    return Explanation(
        text=text,
        model=options.model,
        method=options.method,
        scope=method.scope if "scope" in inspect.signature(type(method)).parameters else None,
        target=target_name(options),
        aggregation=None if layer is not None else units.aggregation or method.aggregation,
        layer=layer,
        position=default if position is None else position,
        tokens=tokens,
        scores=scores[0].tolist(),
        unit=together if layer is None else units.entry,
        layers=layers if maps is not None else (),
        maps=square,
        map_unit=units.entry,
        convergence_delta=None if deltas is None else float(deltas.max()),
    )


COMMAND = Command("explain", "show how much each token of a text contributes", _add_arguments, _run)

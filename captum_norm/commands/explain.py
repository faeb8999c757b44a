"""``captum-norm explain``: how much each token of a text contributes."""

import argparse
import inspect
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from captum_norm.bars import progress
from captum_norm.commands.command import Command
from captum_norm.commands.outputs import output_path, write_outputs
from captum_norm.commands.reports import REPORTS, Explanation, show
from captum_norm.errors import InvalidInputError
from captum_norm.loading import DEFAULT_MODEL

if TYPE_CHECKING:
    from captum_norm.attr._base import AttentionMapAttribution

_POSITIONS = ("first", "last", "mean")


@dataclass(frozen=True)
class Method:
    """A method of the command line.

    Attributes:
        class_name: the class in :mod:`captum_norm`.
        unit: what an entry of its maps is.
        together: what a score of all layers together is; None for what the aggregation makes of the unit.
        aggregation: how it makes one score of all layers, where that is no choice.
        target: whether it explains a number of the output: never, if one is named, or only then.
        target_unit: what a score is if one is.
    """

    class_name: str
    unit: str
    together: str | None = None
    aggregation: str | None = None
    target: Literal["never", "optional", "needed"] = "never"
    target_unit: str | None = None


METHODS = {
    "norm": Method("NormAttribution", "norm"),
    "attention-block": Method("AttentionBlockAttribution", "norm"),
    "globenc": Method("GlobEnc", "norm"),
    "alti": Method("ALTI", "contribution"),
    "value-zeroing": Method("ValueZeroing", "cosine distance"),
    "decompx": Method(
        "DecompX", "norm", "norm", aggregation="propagated", target="optional", target_unit="part of the output"
    ),
    "attention-gradient": Method("AttentionTimesGradient", "weight × gradient", "relevance", target="needed"),
    "weights": Method("AttentionWeights", "attention weight"),
    "rollout": Method("AttentionRollout", "share of rollout"),
}


def _position(text: str) -> int | str:
    if text in _POSITIONS:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text}; expected a number, first, last or mean") from None


def _layer(text: str) -> int:
    try:
        layer = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text}; expected a number") from None
    if layer == 0:
        raise argparse.ArgumentTypeError("got 0; layers are numbered from 1, or from -1 for the last")
    return layer


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", help="the text to explain, or - to read it from standard input")
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="NAME_OR_PATH",
        help="a model folder or a name on the Hugging Face hub (default: %(default)s)",
    )
    parser.add_argument("--method", default="norm", choices=METHODS, help="the method (default: %(default)s)")
    parser.add_argument(
        "--target",
        metavar="N|LABEL|TOKEN",
        help="the output to explain, for attention-gradient and decompx: its number, a classifier's label or a token "
        "of the vocabulary (default: none; decompx then explains hidden states)",
    )
    parser.add_argument(
        "--against", metavar="N|LABEL|TOKEN", help="explain the target less this output, such as a rival word"
    )
    parser.add_argument(
        "--scope",
        help="how far through the layer to go: attn, attn_res or attn_res_ln for norm; atb, atb_ln, atb_ff, atb_ff_res "
        "or atb_ff_res_ln for attention-block; attn or attn_res for weights (default: the first); other methods have "
        "none",
    )
    parser.add_argument(
        "--layer",
        type=_layer,
        metavar="N",
        help="explain one layer, numbered from 1 as in the papers, from -1 for the last one backwards "
        "(default: all layers together)",
    )
    parser.add_argument(
        "--position",
        type=_position,
        metavar="N|first|last|mean",
        help="the output position to explain, numbered from 0 as in the printed table, from -1 for the "
        "last one backwards (default: what the model's head reads)",
    )
    parser.add_argument(
        "--aggregation",
        choices=("rollout", "mean"),
        help="how all layers become one (default: mean for weights, else rollout; decompx and rollout have no choice)",
    )
    parser.add_argument(
        "--changes",
        action="store_true",
        help="also show how much each component of each layer changes the map (1 − Spearman's ρ)",
    )
    parser.add_argument(
        "--layouts",
        metavar="FILE.toml",
        help="declare parts of layers that are not found; see “Describe a new model” in the documentation",
    )
    parser.add_argument(
        "--out",
        action="append",
        default=[],
        type=output_path(REPORTS),
        metavar="FILE",
        help="also write a .png, .html, .json or .csv file; may be given several times",
    )


def _run(options: argparse.Namespace) -> None:
    from rich.console import Console

    from captum_norm.analysis import contextualization_change
    from captum_norm.loading import load
    from captum_norm.models import register_layouts

    if options.layouts is not None:
        register_layouts(options.layouts)
    text = _text(options.text)
    model, tokenizer = load(options.model)
    if model.config.is_encoder_decoder:
        raise InvalidInputError(
            f"got the encoder–decoder model {type(model).__name__}; this command explains models with one stack of "
            "layers. In Python maps() explains all three stacks of it"
        )
    method = _method(model, options)
    target = _target(model, tokenizer, options)
    if not tokenizer(text, add_special_tokens=False)["input_ids"]:
        raise InvalidInputError("the text has no tokens that the model knows; give some words")
    # A text that is too long is refused below, by name; the tokenizer must neither cut it nor warn about it.
    inputs = tokenizer(text, return_tensors="pt", truncation=False, padding=False, verbose=False)
    explanation = _explain(method, inputs, tokenizer, options, text, target)
    if options.changes:
        explanation = replace(explanation, changes=contextualization_change(model, inputs))
    contents = {path: REPORTS[path.suffix.lower()](explanation) for path in options.out}
    write_outputs(contents)
    console = Console()
    show(explanation, console)
    for path in contents:
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def _text(argument: str) -> str:
    text = argument
    if argument == "-":
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"standard input is no {error.encoding} text") from error
    if not text.strip():
        raise InvalidInputError("the text is empty; give some words")
    return text.strip()


def _method(model: Any, options: argparse.Namespace) -> "AttentionMapAttribution":
    import captum_norm

    kind = getattr(captum_norm, METHODS[options.method].class_name)
    given = {name: getattr(options, name) for name in ("scope", "aggregation") if getattr(options, name) is not None}
    for name in given.keys() - inspect.signature(kind).parameters.keys():
        raise InvalidInputError(f"the method {options.method} has no --{name}")
    method: AttentionMapAttribution = kind(model, **given)
    return method


def _target(model: Any, tokenizer: Any, options: argparse.Namespace) -> Any:
    """What ``target`` means to :mod:`captum_norm`."""
    from captum_norm.attr import Difference

    wanted = METHODS[options.method].target
    if options.target is None:
        if options.against is not None:
            raise InvalidInputError("got --against without --target; name the output that it is subtracted from")
        if wanted == "needed":
            raise InvalidInputError(f"the method {options.method} explains an output; name it with --target")
        return None
    if wanted == "never":
        raise InvalidInputError(f"the method {options.method} has no --target")
    target = _output(model, tokenizer, options.target)
    return target if options.against is None else Difference(target, _output(model, tokenizer, options.against))


def _output(model: Any, tokenizer: Any, name: str) -> int:
    """The number of an output from the command line's name for it."""
    labels = getattr(model.config, "label2id", None) or {}
    if name in labels:
        return int(labels[name])
    try:
        return int(name)
    except ValueError:
        pieces = [name] if name in tokenizer.get_vocab() else tokenizer.tokenize(name)
    if len(pieces) != 1 or tokenizer.unk_token in pieces:
        known = f"; the labels are {', '.join(labels)}" if labels else ""
        raise InvalidInputError(f"got the target {name}, which is no number, no label and no single token{known}")
    return int(tokenizer.convert_tokens_to_ids(pieces[0]))


def _explain(
    method: Any, inputs: Any, tokenizer: Any, options: argparse.Namespace, text: str, target: Any
) -> Explanation:
    from captum_norm.models.heads import read_position

    kind = METHODS[options.method]
    count = method.count_layers(inputs)
    index = None if options.layer is None else _index(options.layer, count)
    layers = None if index is None else [index]
    about = {"target": target, "position": options.position}
    with progress(terminal_only=True):
        maps = method.maps(inputs, layers=layers, **(about if kind.target == "needed" else {}))
        if kind.target == "optional" and target is not None:
            scores, deltas = method.attribute(inputs, **about, layer=index, return_convergence_delta=True)
        else:
            scores, deltas = method.scores(maps, options.position, aggregate=index is None), maps.convergence_delta
    together = kind.together or ("share of rollout" if method.aggregation == "rollout" else f"mean {kind.unit}")
    if target is not None and kind.target_unit is not None:
        together = kind.target_unit
    against = "" if options.against is None else f" − {options.against}"
    default = read_position(method.forward_func, causal=maps.decoder is not None)
    return Explanation(
        text=text,
        model=options.model,
        method=options.method,
        scope=method.scope if "scope" in inspect.signature(type(method)).parameters else None,
        target=None if options.target is None else f"{options.target}{against}",
        aggregation=None if index is not None else kind.aggregation or method.aggregation,
        layer=None if index is None else index + 1,
        position=default if options.position is None else options.position,
        tokens=tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist()),
        scores=scores[0].tolist(),
        unit=together if index is None else kind.unit,
        layers=[layer + 1 for layer in layers or range(count)],
        maps=maps.self_attention[0],
        map_unit=kind.unit,
        convergence_delta=None if deltas is None else float(deltas.max()),
    )


def _index(layer: int, count: int) -> int:
    """0-based from the command line's numbering."""
    if not 1 <= abs(layer) <= count:
        raise InvalidInputError(f"got layer {layer}; the model has the layers 1 to {count}")
    return layer - 1 if layer > 0 else count + layer


COMMAND = Command("explain", "show how much each token of a text contributes", _add_arguments, _run)

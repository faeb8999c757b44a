"""Options for the model, the method and the output to explain."""

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, get_args

from captum_norm.errors import InvalidInputError
from captum_norm.loading import DEFAULT_MODEL, Precision, Quantization
from captum_norm.methods import import_method
from captum_norm.text.lines import named as quoted_name


def add_model(parser: argparse.ArgumentParser) -> None:
    """Declare ``--model``, ``--quantize``, ``--device``, ``--dtype`` and ``--layouts``."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="NAME_OR_PATH",
        help="a folder or a name on the Hugging Face hub, of a model or a PEFT adapter (default: %(default)s)",
    )
    add_quantization(parser)
    parser.add_argument(
        "--device", default="cpu", help="the device of the model: cpu, cuda, cuda:1 (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(Precision),
        help="the dtype of the model's weights and of what it computes (default: that of its files)",
    )
    add_layouts(parser)


def add_quantization(parser: argparse._ActionsContainer) -> None:
    """Declare ``--quantize``."""
    parser.add_argument(
        "--quantize",
        choices=get_args(Quantization),
        help="quantise the weights of a Hugging Face model with bitsandbytes as it is loaded, but not its head "
        "(default: the weights as they are)",
    )


def add_layouts(parser: argparse.ArgumentParser) -> None:
    """Declare ``--layouts``."""
    parser.add_argument(
        "--layouts",
        metavar="FILE.toml",
        help="declare the parts of layers that are not found; see “Describe a new model” in the documentation",
    )


def declare_layouts(options: argparse.Namespace) -> None:
    """Register the layouts in the file of ``--layouts``."""
    from captum_norm.models import register_layouts

    if options.layouts is not None:
        register_layouts(options.layouts)


def add_target(parser: argparse.ArgumentParser, explanation: str) -> None:
    """Declare ``--target`` and ``--against``."""
    parser.add_argument("--target", metavar="N|LABEL|TOKEN|TEXT", help=explanation)
    parser.add_argument(
        "--against", metavar="N|LABEL|TOKEN|TEXT", help="explain the target minus this output, such as a rival word"
    )


def add_position(parser: argparse.ArgumentParser, names: Sequence[str], explanation: str) -> None:
    """Declare ``--position``: a number, or one of the names."""

    def parse(text: str) -> int | str:
        if text in names:
            return text
        try:
            return int(text)
        except ValueError:
            expected = f"{', '.join(['a number', *names[:-1]])} or {names[-1]}"
            raise argparse.ArgumentTypeError(f"got {text}; expected {expected}") from None

    parser.add_argument("--position", type=parse, metavar="|".join(["N", *names]), help=explanation)


def add_words(parser: argparse.ArgumentParser) -> None:
    """Declare ``--words``."""
    parser.add_argument("--words", action="store_true", help="print words instead of tokens")


def method_name(names: Collection[str]) -> Callable[[str], str]:
    """Return an ``argparse`` type for one of the names, or ``package.module:Class``, whose name it returns.

    The module may be a file in the current folder.
    """

    def parse(text: str) -> str:
        if text in names:
            return text
        if ":" not in text:
            raise argparse.ArgumentTypeError(
                f"got {quoted_name(text)}; expected one of {', '.join(names)}, or package.module:Class"
            )
        folder = str(Path.cwd())
        if folder not in sys.path:  # the folder of the command's script is there instead
            sys.path.append(folder)
        try:
            return import_method(text)
        except InvalidInputError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def load_model(options: argparse.Namespace) -> tuple[Any, Any]:
    """Register ``--layouts``, and load the model, which must not be an encoder–decoder, and its tokenizer.

    With a target, a sentence encoder becomes a model of its similarity to that text.
    """
    from captum_norm.explanation.targets import load_subject

    declare_layouts(options)
    check_dtype(options)
    model, tokenizer = load_subject(options.model, named_target(options), options.quantize)
    return placed(model, options), tokenizer


def placed(model: Any, options: argparse.Namespace) -> Any:
    """Move a model to ``--device`` and convert it to ``--dtype``; a quantised one stays as it is on the CPU."""
    from captum_norm.loading import on_device

    if options.device == "cpu" and options.dtype is None:
        return model
    return on_device(model, options.device, options.dtype)


def check_dtype(options: argparse.Namespace) -> None:
    """Refuse ``--dtype`` with ``--quantize``."""
    if options.dtype is not None and options.quantize is not None:
        raise InvalidInputError(
            f"got --dtype {options.dtype} and --quantize {options.quantize}, which decides the dtype; leave one out"
        )


def named_target(options: argparse.Namespace) -> Any:
    """Return the target with the names as given; None if none is given."""
    from captum_norm.models import Difference

    if options.target is None:
        if options.against is not None:
            raise InvalidInputError("got --against without --target; name the output to subtract it from")
        return None
    return options.target if options.against is None else Difference(options.target, options.against)

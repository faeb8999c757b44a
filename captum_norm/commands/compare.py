"""Runs ``captum-norm compare``, which shows which method is faithful to a model."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from captum_norm.bars import progress
from captum_norm.commands.command import Command
from captum_norm.commands.numbers import natural, positive
from captum_norm.commands.options import (
    add_model,
    add_position,
    add_target,
    add_words,
    load_model,
    method_name,
    named_target,
)
from captum_norm.commands.outputs import add_reports, output_path, write_outputs
from captum_norm.commands.text_argument import add_text_option, given_text
from captum_norm.errors import InvalidInputError
from captum_norm.methods import METHODS

if TYPE_CHECKING:
    from captum_norm.lab.comparison import Comparison

_REMOVALS = ("mask", "pad", "delete", "mean", "zero")


def _html(comparison: "Comparison") -> bytes:
    from captum_norm.show import render_comparison

    return render_comparison(comparison).encode()


def _png(comparison: "Comparison") -> bytes:
    from captum_norm.show import draw_comparison, figure_bytes

    return figure_bytes(draw_comparison(comparison))


REPORTS: "Mapping[str, Callable[[Comparison], bytes]]" = MappingProxyType(
    {
        ".html": _html,
        ".png": _png,
        ".json": lambda comparison: comparison.to_json().encode(),
        ".csv": lambda comparison: comparison.to_csv().encode(),
    }
)
"""Formats a comparison, by the suffix of the file."""


@dataclass(frozen=True)
class _Texts:
    """The examples, and their labels by line number, if any."""

    texts: Sequence[str]
    labels: Mapping[int, str] | None


_SLOW = ("shapley", "lime")
_CAPTIONS = 6


def _methods(text: str) -> list[str]:
    if text == "all":
        return list(METHODS)
    parse = method_name(METHODS)
    return [parse(name.strip()) for name in text.split(",")]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "text",
        nargs="?",
        metavar="TEXT|FILE",
        help="a text, a file with one on each line, alone or followed by a tab and its label, or - to read such lines "
        "from standard input (default: six captions)",
    )
    add_text_option(parser)
    add_model(parser)
    parser.add_argument(
        "--methods",
        type=_methods,
        default=[name for name in METHODS if name not in _SLOW],
        metavar="NAME,…",
        help=f"all, or some of {', '.join(METHODS)}, or package.module:Class for one of your own (default: all but "
        f"{' and '.join(_SLOW)}, which take as long as the others together)",
    )
    add_target(
        parser,
        "the output to explain: its number, a label of a classifier or tagger, or a token of a language model; for a "
        "sentence encoder a text, whose similarity is explained (default: what the model predicts)",
    )
    add_position(
        parser,
        ("first", "last"),
        "where to read the output if every position has one, as in taggers and masked language models: counted from 0, "
        "or from -1 backwards, special tokens included (default: the position that the model's head reads)",
    )
    parser.add_argument(
        "--removal",
        choices=_REMOVALS,
        help="what replaces a removed token, also the baseline of Captum's methods; delete deletes it from the text "
        "(default: the first of mask, pad and mean that the model has)",
    )
    parser.add_argument(
        "--special",
        choices=("keep", "remove"),
        default="keep",
        help="whether to rank and remove special tokens such as [CLS] (default: %(default)s)",
    )
    parser.add_argument(
        "--watch",
        choices=("probability", "logit"),
        help="the output to observe (default: probability for mutually exclusive classes, else logit)",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="take the first N lines")
    parser.add_argument(
        "--seed", type=natural, default=0, help="the seed of methods that draw random numbers (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=32,
        metavar="N",
        help="the number of inputs in one forward pass (default: %(default)s)",
    )
    add_words(parser)
    add_reports(parser, REPORTS)
    parser.add_argument(
        "--scores", type=output_path([".csv"]), metavar="FILE.csv", help="also write the scores of every token"
    )


def _run(options: argparse.Namespace) -> None:
    from captum_norm.commands.terminal import Terminal
    from captum_norm.explanation.targets import numbered
    from captum_norm.lab.comparison import compare
    from captum_norm.models.objects import SentenceEncoder
    from captum_norm.show import show_comparison

    examples = _examples(options)
    model, tokenizer = load_model(options)
    encoded = _encoded(examples.texts, tokenizer)
    with progress(terminal_only=True):
        comparison = compare(
            model,
            list(examples.texts) if isinstance(model, SentenceEncoder) else _batch(encoded, model),
            methods=options.methods,
            target=numbered(model, tokenizer, named_target(options)),
            position=_positions(options.position, encoded),
            tokenizer=tokenizer,
            labels=None if examples.labels is None else _numbers(examples.labels, model, tokenizer),
            removal=options.removal,
            keep_special=options.special == "keep",
            output=options.watch,
            seed=options.seed,
            batch_size=options.batch_size,
            name=options.model,
        )
    contents = {path: REPORTS[path.suffix.lower()](comparison) for path in options.out}
    if options.scores is not None:
        contents[options.scores] = comparison.to_csv("scores").encode()
    write_outputs(contents)
    console = Terminal()
    show_comparison(comparison, console, words=options.words)
    for path in contents:
        console.say(f"wrote {path}")


def _examples(options: argparse.Namespace) -> _Texts:
    if options.text is None:
        from captum_norm.demo import CAPTIONS

        return _Texts(CAPTIONS[: options.limit or _CAPTIONS], None)
    # Not splitlines(), which also splits at characters such as U+2028.
    lines = given_text(options.text, is_text=options.is_text).split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][: options.limit]
    if not numbered:
        raise InvalidInputError("there is no text to explain; give some words")
    parts = {number: line.rpartition("\t") for number, line in numbered}
    labelled = sum(bool(tab) for _, tab, _ in parts.values())
    if labelled not in (0, len(parts)):
        raise InvalidInputError(
            f"{labelled} of {len(parts)} lines have a tab and a label; expected all of them, or none"
        )
    if not labelled:
        return _Texts([line.strip() for _, line in numbered], None)
    labels = {number: label.strip() for number, (_, _, label) in parts.items()}
    return _Texts([text.strip() for text, _, _ in parts.values()], labels)


def _numbers(labels: Mapping[int, str], model: Any, tokenizer: Any) -> list[int]:
    """The indices of labels, which are numbers or names."""
    from captum_norm.explanation.targets import output_number
    from captum_norm.models.outputs import has_labels

    numbers, classes = [], model.config.num_labels
    for line, label in labels.items():
        named = f"the label {label!r} in line {line}"
        number = output_number(model, tokenizer, label, named)
        if has_labels(model) and not 0 <= number < classes:
            raise InvalidInputError(f"got {named}; expected 0 to {classes - 1}")
        numbers.append(number)
    return numbers


def _encoded(texts: Sequence[str], tokenizer: Any) -> list[Mapping[str, list[int]]]:
    # The tokenizer must neither truncate a text that is too long nor warn about it: the methods refuse it.
    encoded = [tokenizer(text, truncation=False, padding=False, verbose=False) for text in texts]
    for line, one in enumerate(encoded, 1):
        if set(one["input_ids"]) <= set(tokenizer.all_special_ids):
            raise InvalidInputError(f"example {line} has no tokens that the model knows; give some words")
    return encoded


def _batch(encoded: Sequence[Mapping[str, list[int]]], model: Any) -> dict[str, Any]:
    """Pad to one batch, which the tokenizers of many causal models cannot do."""
    from torch import tensor
    from torch.nn.utils.rnn import pad_sequence

    from captum_norm.models.offloading import input_device

    padding = {"input_ids": model.config.pad_token_id or 0}
    columns = {name: [tensor(one[name]) for one in encoded] for name in encoded[0]}
    device = input_device(model)
    return {
        name: pad_sequence(rows, batch_first=True, padding_value=padding.get(name, 0)).to(device)
        for name, rows in columns.items()
    }


def _positions(position: int | str | None, encoded: Sequence[Mapping[str, list[int]]]) -> Any:
    """The position in each example, which is not that in the batch if it counts from the end."""
    if not isinstance(position, int):
        return position
    lengths = [len(one["input_ids"]) for one in encoded]
    for example, length in enumerate(lengths, 1):
        if not -length <= position < length:
            raise InvalidInputError(
                f"got position {position}; example {example} has {length} positions, 0 to {length - 1}"
            )
    return [position % length for length in lengths]


COMMAND = Command("compare", "see which method is faithful to a model", _add_arguments, _run)

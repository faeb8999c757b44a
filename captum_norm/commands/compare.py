"""Runs ``captum-norm compare``, which shows which method is faithful to a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from captum_norm.bars import progress
from captum_norm.commands.program import Command, argument, option
from captum_norm.commands.shared import (
    Subject,
    file_content,
    given_text,
    index_or,
    method_name,
    natural,
    out_option,
    positive,
    text_option,
    write_outputs,
)
from captum_norm.errors import InvalidInputError
from captum_norm.methods import METHODS

_SLOW = ("shapley", "lime")
_CAPTIONS = 6


def _methods(text: str) -> list[str]:
    if text == "all":
        return list(METHODS)
    return [method_name(name.strip()) for name in text.split(",")]


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Subject):
    """The options of ``captum-norm compare``."""

    examples: str | None = argument(
        "a text, a file with one on each line, alone or followed by a tab and its label, or - to read such lines from "
        "standard input (default: six captions)",
        metavar="TEXT|FILE",
        nargs="?",
    )
    text: bool = text_option()
    methods: list[str] = option(
        f"all, or some of {', '.join(METHODS)}, or package.module:Class for one of your own (default: all but "
        f"{' and '.join(_SLOW)}, which take as long as the others together)",
        [name for name in METHODS if name not in _SLOW],
        parse=_methods,
        action="store",
        metavar="NAME,…",
    )
    position: Any = option(
        "where to read the output if every position has one, as in taggers and masked language models: counted from 0, "
        "special tokens included (default: the position that the model's head reads)",
        parse=index_or("first", "last"),
        metavar="N|first|last",
    )
    removal: Literal["mask", "pad", "delete", "mean", "zero"] | None = option(
        "what replaces a removed token, also the baseline of Captum's methods; delete deletes it from the text "
        "(default: the first of mask, pad and mean that the model has)"
    )
    limit: int | None = option("take the first N lines", parse=positive, metavar="N")
    seed: int = option("the seed of methods that draw random numbers", 0, parse=natural)
    out: list[Path] = out_option(".html", ".png", ".json", ".csv")


def _run(options: CompareOptions) -> None:
    from captum_norm.commands.terminal import Terminal
    from captum_norm.explanation.run import numbered
    from captum_norm.lab.comparison import compare
    from captum_norm.show import print_result

    texts, labels = _examples(options)
    model, tokenizer = options.load()
    with progress(terminal_only=True):
        comparison = compare(
            model,
            texts,
            methods=options.methods,
            target=numbered(model, tokenizer, options.named_target()),
            position=options.position,
            tokenizer=tokenizer,
            labels=None if labels is None else _numbers(labels, model, tokenizer),
            removal=options.removal,
            seed=options.seed,
            name=options.model,
        )
    contents = {path: file_content(comparison, path) for path in options.out}
    write_outputs(contents)
    console = Terminal()
    print_result(comparison, console)
    for path in contents:
        console.say(f"wrote {path}")


def _examples(options: CompareOptions) -> tuple[list[str], dict[int, str] | None]:
    """The texts, and their labels by the number of the line, if they have any."""
    if options.examples is None:
        from captum_norm.demo import CAPTIONS

        return list(CAPTIONS[: options.limit or _CAPTIONS]), None
    # Not splitlines(), which also splits at characters such as U+2028.
    lines = given_text(options.examples, is_text=options.text).split("\n")
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
        return [line.strip() for _, line in numbered], None
    labels = {number: label.strip() for number, (_, _, label) in parts.items()}
    return [text.strip() for text, _, _ in parts.values()], labels


def _numbers(labels: Mapping[int, str], model: Any, tokenizer: Any) -> list[int]:
    """The indices of labels, which are numbers or names."""
    from captum_norm.explanation.run import output_number
    from captum_norm.models.outputs import has_labels

    numbers, classes = [], model.config.num_labels
    for line, label in labels.items():
        place = f"the label {label!r} in line {line}"
        number = output_number(model, tokenizer, label, place)
        if has_labels(model) and not 0 <= number < classes:
            raise InvalidInputError(f"got {place}; expected 0 to {classes - 1}")
        numbers.append(number)
    return numbers


COMMAND = Command("compare", "see which method is faithful to a model", CompareOptions, _run)

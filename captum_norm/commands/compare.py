"""Runs ``captum-norm compare``, which shows which method is faithful to a model."""

from collections.abc import Mapping, Sequence
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
    output_path,
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
    parse = method_name(METHODS)
    return [parse(name.strip()) for name in text.split(",")]


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Subject):
    """The options of ``captum-norm compare``."""

    text: str | None = argument(
        "a text, a file with one on each line, alone or followed by a tab and its label, or - to read such lines from "
        "standard input (default: six captions)",
        metavar="TEXT|FILE",
        nargs="?",
    )
    is_text: bool = text_option()
    methods: list[str] = option(
        f"all, or some of {', '.join(METHODS)}, or package.module:Class for one of your own (default: all but "
        f"{' and '.join(_SLOW)}, which take as long as the others together)",
        [name for name in METHODS if name not in _SLOW],
        parse=_methods,
        action="store",
        metavar="NAME,…",
    )
    position: int | str | None = option(
        "where to read the output if every position has one, as in taggers and masked language models: counted from 0, "
        "or from -1 backwards, special tokens included (default: the position that the model's head reads)",
        parse=index_or("first", "last"),
        metavar="N|first|last",
    )
    removal: Literal["mask", "pad", "delete", "mean", "zero"] | None = option(
        "what replaces a removed token, also the baseline of Captum's methods; delete deletes it from the text "
        "(default: the first of mask, pad and mean that the model has)"
    )
    special: Literal["keep", "remove"] = option("whether to rank and remove special tokens such as [CLS]", "keep")
    watch: Literal["probability", "logit"] | None = option(
        "the output to observe (default: probability for mutually exclusive classes, else logit)"
    )
    limit: int | None = option("take the first N lines", parse=positive, metavar="N")
    seed: int = option("the seed of methods that draw random numbers", 0, parse=natural)
    batch_size: int = option("the number of inputs in one forward pass", 32, parse=positive, metavar="N")
    out: list[Path] = out_option(".html", ".png", ".json", ".csv")
    scores: Path | None = option("also write the scores of every token", parse=output_path(".csv"), metavar="FILE.csv")


def _run(options: CompareOptions) -> None:
    from captum_norm.commands.terminal import Terminal
    from captum_norm.explanation.run import numbered
    from captum_norm.lab.comparison import compare
    from captum_norm.models.objects import SentenceEncoder
    from captum_norm.show import show_comparison

    texts, labels = _examples(options)
    model, tokenizer = options.load()
    encoded = _encoded(texts, tokenizer)
    with progress(terminal_only=True):
        comparison = compare(
            model,
            texts if isinstance(model, SentenceEncoder) else _batch(encoded, model),
            methods=options.methods,
            target=numbered(model, tokenizer, options.named_target()),
            position=_positions(options.position, encoded),
            tokenizer=tokenizer,
            labels=None if labels is None else _numbers(labels, model, tokenizer),
            removal=options.removal,
            keep_special=options.special == "keep",
            output=options.watch,
            seed=options.seed,
            batch_size=options.batch_size,
            name=options.model,
        )
    contents = {path: file_content(comparison, path) for path in options.out}
    if options.scores is not None:
        contents[options.scores] = comparison.to_csv("scores").encode()
    write_outputs(contents)
    console = Terminal()
    show_comparison(comparison, console, words=options.words)
    for path in contents:
        console.say(f"wrote {path}")


def _examples(options: CompareOptions) -> tuple[list[str], dict[int, str] | None]:
    """The texts, and their labels by the number of the line, if they have any."""
    if options.text is None:
        from captum_norm.demo import CAPTIONS

        return list(CAPTIONS[: options.limit or _CAPTIONS]), None
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


def _encoded(texts: Sequence[str], tokenizer: Any) -> list[Mapping[str, list[int]]]:
    # The tokenizer must neither truncate a text that is too long nor warn about it: the methods refuse it.
    encoded = [tokenizer(text, truncation=False, padding=False, verbose=False) for text in texts]
    for number, inputs in enumerate(encoded, 1):
        if set(inputs["input_ids"]) <= set(tokenizer.all_special_ids):
            raise InvalidInputError(f"example {number} has no tokens that the model knows; give some words")
    return encoded


def _batch(encoded: Sequence[Mapping[str, list[int]]], model: Any) -> dict[str, Any]:
    """Pad to one batch, which the tokenizers of many causal models cannot do."""
    from torch import tensor
    from torch.nn.utils.rnn import pad_sequence

    from captum_norm.models.offloading import input_device

    padding = {"input_ids": model.config.pad_token_id or 0}
    columns = {name: [tensor(inputs[name]) for inputs in encoded] for name in encoded[0]}
    device = input_device(model)
    return {
        name: pad_sequence(rows, batch_first=True, padding_value=padding.get(name, 0)).to(device)
        for name, rows in columns.items()
    }


def _positions(position: int | str | None, encoded: Sequence[Mapping[str, list[int]]]) -> Any:
    """The position in each example, which is not that in the batch if it counts from the end."""
    if not isinstance(position, int):
        return position
    lengths = [len(inputs["input_ids"]) for inputs in encoded]
    for example, length in enumerate(lengths, 1):
        if not -length <= position < length:
            raise InvalidInputError(
                f"got position {position}; example {example} has {length} positions, 0 to {length - 1}"
            )
    return [position % length for length in lengths]


COMMAND = Command("compare", "see which method is faithful to a model", CompareOptions, _run)

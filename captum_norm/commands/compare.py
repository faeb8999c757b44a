"""Runs ``captum-norm compare``, which shows which method is faithful to a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from captum_norm.bars import progress
from captum_norm.commands import shared
from captum_norm.commands.program import Command, argument, option
from captum_norm.errors import InvalidInputError
from captum_norm.methods import METHODS

_SLOW = ("shapley", "lime")
_CAPTIONS = 6


def _methods(text: str) -> list[str]:
    if text == "all":
        return list(METHODS)
    return [shared.method_name(name.strip()) for name in text.split(",")]


@dataclass(frozen=True, kw_only=True)
class CompareOptions(shared.Subject):
    """The options of ``captum-norm compare``."""

    examples: str | None = argument(
        "a text, a file with one text per line, or - to read such lines from standard input; a text ends at a tab "
        "(default: six captions)",
        metavar="TEXT|FILE",
        nargs="?",
    )
    text: bool = shared.text_option()
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
        parse=shared.index_or("first", "last"),
        metavar="N|first|last",
    )
    removal: Literal["mask", "pad", "delete", "mean", "zero"] | None = option(
        "what replaces a removed token, and the baseline of Captum's methods; delete removes it from the text "
        "(default: the first of mask, pad and mean that the model has)"
    )
    limit: int | None = option("read only the first N lines", parse=shared.positive, metavar="N")
    seed: int = option("the seed of methods that draw random numbers", 0, parse=shared.natural)
    out: list[Path] = shared.out_option(".html", ".png", ".json", ".csv")


def _run(options: CompareOptions) -> None:
    from captum_norm.explanation.run import numbered
    from captum_norm.lab.comparison import compare

    texts = _examples(options)
    model, tokenizer = options.load()
    with progress(terminal_only=True):
        comparison = compare(
            model,
            texts,
            methods=options.methods,
            target=numbered(model, tokenizer, options.named_target()),
            position=options.position,
            tokenizer=tokenizer,
            removal=options.removal,
            seed=options.seed,
            name=options.model,
        )
    shared.show(comparison, options.out)


def _examples(options: CompareOptions) -> list[str]:
    """The texts: what is before the first tab of each line."""
    if options.examples is None:
        from captum_norm.demo import CAPTIONS

        return list(CAPTIONS[: options.limit or _CAPTIONS])
    # Not splitlines(), which also splits at characters such as U+2028.
    lines = shared.given_text(options.examples, is_text=options.text).split("\n")
    texts = [text.strip() for text, *_ in (line.split("\t") for line in lines) if text.strip()][: options.limit]
    if not texts:
        raise InvalidInputError("there is no text to explain; give some words")
    return texts


COMMAND = Command(
    "compare",
    "see which method is faithful to a model",
    CompareOptions,
    _run,
    example='captum-norm compare "A man is playing a guitar on stage." --methods alti,decompx --out c.html',
    common=("methods", "target", "model", "device", "removal", "limit", "seed", "out"),
)

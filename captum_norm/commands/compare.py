"""Runs ``captum-norm compare``, which shows which method is faithful to a model."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from captum_norm.bars import progress
from captum_norm.commands import shared
from captum_norm.commands.program import Command, Options, argument, option
from captum_norm.errors import InvalidInputError
from captum_norm.loading import DEFAULT_MODEL, LANGUAGE_MODEL
from captum_norm.methods import METHODS
from captum_norm.text.lines import read_text

_SLOW = ("shapley", "lime")
QUICK = [name for name in METHODS if name not in _SLOW]
_CAPTIONS = 6


def _methods(text: str) -> list[str]:
    if text == "all":
        return list(METHODS)
    return [shared.method_name(name.strip()) for name in text.split(",")]


@dataclass(frozen=True, kw_only=True)
class Answers(Options, title="answers: methods are compared by which parts of its prompt an answer rests on"):
    """The answers that are explained."""

    prompts: Path | None = option(
        'compare on answers to these prompts, a line of JSON each: {"prompt": text or messages} or {"passages": [text, '
        '…], "question": text}, and perhaps "answer", else generated, and "evidence": [index of a passage, …]',
        metavar="FILE.jsonl",
    )
    segments: Literal["word", "sentence", "line", "paragraph", "message"] = option(
        "the sources of prompts without passages", "line"
    )
    ablations: int = option("random ablations of each prompt for the LDS", 64, parse=shared.positive, metavar="N")
    baseline: str = option("the row that p-values compare with", "random", metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(shared.Subject, Answers):
    """The options of ``captum-norm compare``."""

    examples: str | None = argument(
        "a text, a file with one text per line, or - to read such lines from standard input; a text ends at a tab "
        "(default: six captions)",
        metavar="TEXT|FILE",
        nargs="?",
    )
    text: bool = shared.text_option()
    methods: list[str] | None = option(
        f"all, or some of {', '.join(METHODS)}, or package.module:Class for one of your own (default: all but "
        f"{' and '.join(_SLOW)}, which take as long as the others together; for answers those of a few forward passes)",
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

    if options.prompts is not None:
        _compare_answers(options, options.prompts)
        return
    texts = _examples(options)
    model, tokenizer = options.load()
    with progress(terminal_only=True):
        comparison = compare(
            model,
            texts,
            methods=options.methods or QUICK,
            target=numbered(model, tokenizer, options.named_target()),
            position=options.position,
            tokenizer=tokenizer,
            removal=options.removal,
            seed=options.seed,
            name=options.model,
        )
    shared.show(comparison, options.out)


def _compare_answers(options: CompareOptions, prompts: Path) -> None:
    from captum_norm.lab.answers import compare_answers, read_prompts

    for name in ("examples", "target", "against", "position", "removal"):
        if getattr(options, name) is not None:
            raise InvalidInputError(f"got --prompts and {name}, which is of texts without an answer; leave it out")
    read = read_prompts(read_text(prompts).split("\n"))[: options.limit]
    if options.model == DEFAULT_MODEL:  # it has no output
        options = replace(options, model=LANGUAGE_MODEL)
    model, tokenizer = options.load(answers=True)
    with progress(terminal_only=True):
        comparison = compare_answers(
            model,
            read,
            methods=options.methods,
            tokenizer=tokenizer,
            segments=options.segments,
            ablations=options.ablations,
            baseline=options.baseline,
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
    common=("methods", "target", "model", "prompts", "device", "removal", "limit", "seed", "out"),
)

"""Explains generated text for ``captum-norm explain``: an answer to a prompt or a conversation."""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from captum_norm.bars import progress
from captum_norm.commands.explanation import LEAST_IMPORTANCE
from captum_norm.commands.options import check_dtype, declare_layouts, placed
from captum_norm.commands.outputs import write_outputs
from captum_norm.commands.text_argument import given_text
from captum_norm.errors import InvalidInputError
from captum_norm.text.lines import named, read_text

if TYPE_CHECKING:
    from captum_norm.commands.terminal import Terminal
    from captum_norm.generation import GenerationResult

_OPTIONS = ("generate", "answer", "chat", "segments", "contrast")
_ROWS = 12


def add_generation(parser: argparse.ArgumentParser) -> None:
    """Declare the options on generated text."""
    group = parser.add_argument_group(
        "generated text", "the text is a prompt, and what a language model answers is explained"
    )
    group.add_argument("--generate", type=int, metavar="N", help="generate an answer of at most N tokens, greedily")
    group.add_argument("--answer", metavar="TEXT", help="explain this answer; a space before it is part of it")
    group.add_argument(
        "--chat",
        type=Path,
        metavar="FILE.json",
        help='a conversation for the prompt, [{"role": "user", "content": "…"}, …], instead of the text',
    )
    group.add_argument(
        "--segments",
        metavar="word|sentence|line|paragraph|message|FILE",
        help="also score parts of the prompt; a file has the text of one part a line",
    )
    group.add_argument(
        "--contrast",
        metavar="TEXT",
        help="explain why the answer begins to differ from this one, with a method that explains outputs",
    )


def is_generation(options: argparse.Namespace) -> bool:
    """Whether the options ask for generated text."""
    return any(getattr(options, name) is not None for name in _OPTIONS)


def explain_generation(options: argparse.Namespace) -> None:
    """Explain an answer, print what it rests on and write the files asked for."""
    from captum_norm.commands.terminal import Terminal
    from captum_norm.generation import GenerationAttribution
    from captum_norm.lab.comparison.methods import make_method
    from captum_norm.loading import DEFAULT_MODEL, LANGUAGE_MODEL, load

    _check(options)
    prompt = _conversation(options.chat) if options.chat is not None else _prompt(options)
    segments = "word" if options.words else _segments(options.segments)
    declare_layouts(options)
    check_dtype(options)
    # The default of other explanations does not generate.
    name = LANGUAGE_MODEL if options.model == DEFAULT_MODEL else options.model
    model, tokenizer = load(name, options.quantize)
    model = placed(model, options)
    method = make_method(
        options.method, model, removal=None, tokenizer=tokenizer, keep_special=False, readout=None, batch_size=16
    )
    gen_args = None if options.generate is None else {"max_new_tokens": options.generate, "do_sample": False}
    followed = options.method == "information-flow" and any(path.suffix.lower() == ".html" for path in options.out)
    with progress(terminal_only=True):
        result = GenerationAttribution(method, tokenizer).attribute(
            prompt,
            options.answer,
            gen_args=gen_args,
            segments=segments,
            contrast=options.contrast,
            graph_threshold=LEAST_IMPORTANCE if followed else None,
        )
    result.explained = replace(result.explained, method=options.method)
    contents = {path: _REPORTS[path.suffix.lower()](result) for path in options.out}
    write_outputs(contents)
    console = Terminal()
    _show(result, console, options)
    for path in contents:
        console.say(f"wrote {path}")


def _check(options: argparse.Namespace) -> None:
    if (options.generate is None) == (options.answer is None):
        raise InvalidInputError("give either --generate N or --answer TEXT, to say which answer is explained")
    if options.generate is not None and options.generate < 1:
        raise InvalidInputError(f"got --generate {options.generate}; expected at least 1")
    if options.chat is not None and options.texts:
        raise InvalidInputError("got a text and --chat; the conversation is the prompt: leave the text out")
    for name in ("target", "against", "layer", "head", "position", "scope", "aggregation", "word_score"):
        if getattr(options, name) is not None:
            option = name.replace("_", "-")
            raise InvalidInputError(f"got --{option} with an answer, whose tokens are what is explained; leave it out")
    if options.words and options.segments is not None:
        raise InvalidInputError("got --words and --segments; words are segments, too: leave one of them out")
    if options.lines or len(options.texts) > 1:
        raise InvalidInputError("got several texts with an answer; give one prompt")
    if options.changes:
        raise InvalidInputError("got --changes with an answer; leave it out")


def _prompt(options: argparse.Namespace) -> str:
    if not options.texts:
        raise InvalidInputError("got no prompt; give a text, a file with it, or --chat FILE.json")
    text = given_text(options.texts[0], is_text=options.is_text)
    # The last line of a file ends, the prompt does not.
    return text.removesuffix("\n")


def _conversation(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"{named(str(path))} is not JSON: {error}") from error


def _segments(given: str | None) -> Any:
    from captum_norm.generation import SegmentKind

    if given is None or given in get_args(SegmentKind):
        return given
    if not Path(given).is_file():
        kinds = ", ".join(get_args(SegmentKind))
        raise InvalidInputError(f"got --segments {named(given)}; expected {kinds}, or a file with a part in each line")
    return [line.strip() for line in read_text(given).splitlines() if line.strip()]


def _show(result: "GenerationResult", console: "Terminal", options: argparse.Namespace) -> None:
    """Print the prompt in colour, a legend, and a table of the parts of highest score."""
    from captum_norm.show.terminal import score_table, show_tokens
    from captum_norm.text.characters import spelled_out
    from captum_norm.text.words import words_of_text

    for name, value in result.facts().items():
        console.say(f"{name}: {spelled_out(value)}")
    console.print()
    words = words_of_text(result.input_tokens)
    tokens = words.texts if options.words else words.pieces
    scores = words.scores(result.seq_attr) if options.words else result.seq_attr
    show_tokens(console, tokens, scores.tolist(), unit=result.explained.unit)
    console.print()
    best = result.top(options.top or _ROWS)
    console.print(score_table([name for name, _ in best], [score for _, score in best], unit=result.explained.unit))


def _html(result: "GenerationResult") -> bytes:
    from captum_norm.show import render_answer

    return render_answer(result).encode()


def _png(result: "GenerationResult") -> bytes:
    from captum_norm.show import draw_answer
    from captum_norm.show.figures import figure_bytes

    return figure_bytes(draw_answer(result))


_REPORTS: Mapping[str, Callable[["GenerationResult"], bytes]] = MappingProxyType(
    {
        ".png": _png,
        ".html": _html,
        ".json": lambda result: result.to_json().encode(),
        ".csv": lambda result: result.to_csv().encode(),
    }
)
"""Formats a result, by the suffix of the file."""

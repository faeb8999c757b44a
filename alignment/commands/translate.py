"""Runs ``norm-align translate``: translates sentences, and optionally aligns and scores the translations."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from alignment.commands import aligners, models
from alignment.commands.aligners import OneModelOptions
from alignment.formats import TextSource, format_pharaoh
from alignment.pipeline.extraction import line_bar
from alignment.tokenization import TranslationTokenizer
from captum_norm import InvalidInputError
from captum_norm.commands.program import Command, argument, option
from captum_norm.commands.shared import positive, write_outputs
from captum_norm.text.characters import spelled_lines
from captum_norm.text.lines import error_at, scan_lines

if TYPE_CHECKING:
    from torch import nn

    from alignment.aligner import Pairs, WordAligner

_BLOCK_LINES = 256

_Line = tuple[int, str | InvalidInputError]


@dataclass(frozen=True, kw_only=True)
class TranslateOptions(OneModelOptions):
    """The options of ``norm-align translate``."""

    source: str = argument(
        "the sentences, one per line, tokenised as in the model's training; .gz, .xz and .bz2 are decompressed "
        "(default: -, standard input)",
        "-",
        metavar="FILE",
        nargs="?",
    )
    tokenize: bool = models.tokenize_option()
    beam: int = option("the beam size", 5, parse=positive, metavar="N")
    max_length: int = option("the maximum number of pieces in a translation", 200, parse=positive, metavar="N")
    alignments: bool = option("also print the word alignment: translation ||| i-j ..., source first, from 0", False)
    page: Path | None = models.page_option()


def _run(options: TranslateOptions) -> None:
    words, _ = models.splits(options, tokenize=options.tokenize)
    with models.set_up(options) as report:
        source = models.text_source(options.source)
        blocks = _blocks(source)
        first = next(blocks, [])
        model, tokenizer = models.load(options)
        aligned = options.alignments or options.page is not None
        aligner = aligners.word_aligner(model, tokenizer, options) if aligned else None
        translator = _Translator(source, words, model, tokenizer, aligner, options, report)
        shown: Pairs = []
        lines = bad = 0
        with line_bar("translating", source, shown=sys.stderr.isatty() and not options.quiet) as advance:
            for block in chain([first] if first else [], blocks):
                pairs, rows, bad_here = translator(block)
                text = "".join(f"{row}\n" for row in rows)
                sys.stdout.buffer.write((spelled_lines(text) if sys.stdout.isatty() else text).encode())
                sys.stdout.buffer.flush()
                lines, bad = lines + len(block), bad + bad_here
                shown = shown or [pair for pair in pairs if all(pair)]
                advance(len(block), bad_here)
        if options.page is not None and aligner is not None:
            aligners.choose(aligner, shown, report)
            write_outputs({options.page: aligners.page(aligner, shown, {"model": options.model})})
        report(f"{lines:,} lines; {bad:,} bad lines")


@dataclass(frozen=True)
class _Translator:
    """Translates a block of lines: the words of sentences and translations, lines to print, the number of bad ones."""

    source: TextSource
    words: Callable[[str], list[str]]
    model: "nn.Module"
    tokenizer: TranslationTokenizer
    aligner: "WordAligner | None"
    options: TranslateOptions
    report: Callable[[str], None]

    def __call__(self, block: Sequence[_Line]) -> "tuple[Pairs, list[str], int]":
        from alignment.translation import translate

        bad: dict[int, InvalidInputError] = {}

        def refuse(index: int, error: InvalidInputError) -> None:
            bad[index] = error_at(self.source, block[index][0], str(error))

        sentences: list[list[str]] = []
        for index, (_, line) in enumerate(block):
            sentences.append([] if isinstance(line, InvalidInputError) else self.words(line))
            if isinstance(line, InvalidInputError):
                bad[index] = line
            elif len(sentences[index]) > self.options.max_words:
                message = f"got {len(sentences[index])} words, expected at most {self.options.max_words}"
                refuse(index, InvalidInputError(f"{message}; raise --max-words or split the line"))
                sentences[index] = []
        translations = translate(
            self.model,
            self.tokenizer,
            sentences,
            beam=self.options.beam,
            max_length=self.options.max_length,
            max_tokens=self.options.max_tokens,
            on_error=refuse,
        )
        pairs = list(zip(sentences, translations, strict=True))
        rows = list(map(" ".join, translations))
        if self.aligner is not None and self.options.alignments:
            translated = [index for index, words in enumerate(translations) if words]
            shown = [pairs[index] for index in translated]
            aligners.choose(self.aligner, shown, self.report)
            for index, answer in zip(translated, self.aligner.align_pairs(shown), strict=True):
                if isinstance(answer, InvalidInputError):
                    refuse(index, answer)
                links = "" if isinstance(answer, InvalidInputError) else format_pharaoh(answer)
                rows[index] += f" ||| {links}"
        for _, error in sorted(bad.items()):
            if self.options.bad_lines == "stop":
                raise error
            self.report(str(error))
        return pairs, rows, len(bad)


def _blocks(source: TextSource) -> Iterator[list[_Line]]:
    lines = scan_lines(source)
    first = True
    while block := list(islice(lines, _BLOCK_LINES)):
        errors = [line for _, line in block if isinstance(line, InvalidInputError)]
        if first and len(errors) == len(block):  # another encoding
            raise errors[0]
        first = False
        yield block


COMMAND = Command(
    "translate",
    "translate sentences, and align the words of the result",
    TranslateOptions,
    _run,
    "norm-align translate sentences.fr --tokenize --alignments",
    ("tokenize", "alignments", "page", "beam", "model", "source_language", "target_language", "device"),
)

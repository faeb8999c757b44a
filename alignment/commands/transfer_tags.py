"""Runs ``norm-align transfer-tags``: inserts the tags of source sentences into their translations."""

import html
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

from alignment.commands import aligners, models
from alignment.commands.aligners import AlignerOptions
from alignment.documents import Section
from alignment.formats import TextSource, split_words
from alignment.formats.text import write_text
from alignment.links import Alignment, Link
from alignment.markup import Markup, Syntax, TextWord, check_plain, parse_markup, split_text
from alignment.normalization import NormalizedWords
from alignment.pipeline.blocks import read_rows
from alignment.pipeline.extraction import BadLines, line_bar
from alignment.tags import transfer_tags
from alignment.tokenization import languages_of
from captum_norm import InvalidInputError
from captum_norm.commands.program import Command, argument, option
from captum_norm.runs import Block, cut
from captum_norm.text.characters import spelled_lines
from captum_norm.text.lines import error_at, located

if TYPE_CHECKING:
    from alignment.aligner import Pairs, TextAligner

_BLOCK_LINES = 1024


@dataclass(frozen=True)
class _Line:
    """A sentence, and its translation unless the model makes it."""

    source: Markup
    target: str | None = None


_Answers = dict[int, str | InvalidInputError]
"""By the numbers of lines, their translations with tags, or errors that say why there are none."""


@dataclass(frozen=True, kw_only=True)
class TransferOptions(AlignerOptions):
    """The options of ``norm-align transfer-tags``."""

    source: str = argument(
        "the source sentences with tags of XML or HTML or markers of USFM, raw text, one per line; .gz, .xz and .bz2 "
        "are decompressed, - is standard input",
        metavar="SOURCE",
    )
    target: str | None = argument(
        "their translations without tags; those of several blocks on one line; if left out, the model translates",
        metavar="TARGET",
        nargs="?",
    )
    syntax: Syntax = option("tags of XML, HTML, TMX and XLIFF, or markers of USFM", "xml")
    split: bool = option(
        "write a pair of tags around each run of words that belong to it, rather than once around all; not a pair with "
        "others inside, nor one with an id, except XLIFF 2's <pc>, whose copies get new ids",
        False,
    )
    out: str | None = option("the translations with tags (default: standard output)", metavar="FILE")
    overwrite: bool = option("replace FILE if it exists", False)
    bad_lines: BadLines = models.bad_lines_option("stop")


def _run(options: TransferOptions) -> None:
    names = [name for name in (options.source, options.target) if name is not None]
    models.refuse_two_streams(*names)
    inputs = [models.text_source(name) for name in names]
    file = None
    if options.out is not None:
        file = models.regular_output(options.out, inputs, overwrite=options.overwrite)
    if options.bad_lines == "stop" and not any(map(models.is_stream, inputs)):  # before a model is loaded
        for block in cut(inputs, _BLOCK_LINES):
            _stop_at_first(_read(block, options.syntax))
    with models.set_up(options) as report:
        aligner, _ = aligners.load(options, options.device)
        _transfer(inputs, file, _Transfer(aligner, options, report))


def _transfer(inputs: Sequence[TextSource], file: str | None, work: "_Transfer") -> None:
    """Transfer the tags of all lines to a file or standard output."""
    lines = bad_lines = 0

    def parts() -> Iterator[bytes]:
        nonlocal lines, bad_lines
        for block in cut(inputs, _BLOCK_LINES):
            answers = _answers(block, work)
            errors = [answer for answer in answers.values() if isinstance(answer, InvalidInputError)]
            for error in errors:
                work.report(str(error))
            lines, bad_lines = lines + len(answers), bad_lines + len(errors)
            yield "".join(
                "\n" if isinstance(answer, InvalidInputError) else f"{answer}\n" for answer in answers.values()
            ).encode()
            advance(len(answers), len(errors))

    with line_bar("transferring tags", inputs[0], shown=sys.stderr.isatty() and not work.options.quiet) as advance:
        if file is not None:
            write_text(file, parts())
        else:
            shown = (spelled_lines(part.decode()).encode() for part in parts()) if sys.stdout.isatty() else parts()
            if any(map(models.is_stream, inputs)):
                for part in shown:
                    sys.stdout.buffer.write(part)
                    sys.stdout.buffer.flush()
            else:
                models.print_whole(shown)
    work.report(f"{lines:,} lines; {bad_lines:,} bad lines")


def _answers(block: Block, work: "_Transfer") -> _Answers:
    """The translation of each line of a block, or the error that says why there is none, in order."""
    read, stop = _read(block, work.options.syntax), work.options.bad_lines == "stop"
    if stop:
        _stop_at_first(read)
    answers: _Answers = {number: line for number, line in read.items() if isinstance(line, InvalidInputError)}
    for number, answer in work({number: line for number, line in read.items() if isinstance(line, _Line)}).items():
        refused = isinstance(answer, InvalidInputError)
        answers[number] = error_at(block.parts[0].source, number, str(answer)) if refused else answer
    answers = {number: answers[number] for number in read}
    if stop:
        _stop_at_first(answers)
    return answers


def _stop_at_first(lines: Mapping[int, object]) -> None:
    """Raise the error of the first bad line, if there is one."""
    for line in lines.values():
        if isinstance(line, InvalidInputError):
            raise line


def _read(block: Block, syntax: Syntax) -> dict[int, _Line | InvalidInputError]:
    """Read the lines of a block, by their numbers."""
    return {
        number: texts if isinstance(texts, InvalidInputError) else _parsed(texts, number, block, syntax)
        for number, texts in read_rows(block)
    }


def _parsed(texts: Sequence[str], number: int, block: Block, syntax: Syntax) -> _Line | InvalidInputError:
    """Parse the source of a line, and check its translation if it is given."""
    source, *target = texts
    try:
        with located(block.parts[0].source, number):
            line = _Line(parse_markup(source, syntax), *target)
        if line.target is not None:
            with located(block.parts[1].source, number):
                check_plain(line.target, syntax)
    except InvalidInputError as error:
        return error
    return line


@dataclass
class _Transfer:
    """Transfers the tags of each line by the links that a model finds; translates it first if need be."""

    aligner: "TextAligner"
    options: TransferOptions
    report: Callable[[str], None]
    checked: bool = False

    def __call__(self, lines: Mapping[int, _Line]) -> _Answers:
        """Return each line's translation with tags, or an error that says why there is none."""
        forward, _ = self.aligner.directions[0]
        languages = languages_of(forward.tokenizer)
        answers: _Answers = {}
        sources = {
            number: split_text(line.source.text, languages[0], breaks=line.source.breaks)
            for number, line in lines.items()
        }
        self._leave_out_long({number: len(words) for number, words in sources.items()}, sources, answers, "source")
        texts = {number: line.target for number, line in lines.items() if line.target is not None}
        targets = {number: [split_text(text, languages[1])] for number, text in texts.items() if number in sources}
        if self.options.target is None:
            texts, targets = self._translations(lines, sources, languages[1], answers)
        counts = {number: sum(map(len, parts)) for number, parts in targets.items()}
        self._leave_out_long(counts, targets, answers, "target")
        parts: list[Section] = []
        for number, translations in targets.items():
            begin, words = 0, sources[number]
            # The blocks of a given translation are not known before its links.
            blocks = lines[number].source.blocks(words) if self.options.target is None else [(0, len(words))]
            for (start, end), translation in zip(blocks, translations, strict=True):
                parts.append(Section(number, (start, begin), (words[start:end], translation)))
                begin += len(translation)
        parts = [part for part in parts if all(part.words)]
        self._start([part.words for part in parts])
        parts = [part for part in parts if lines[part.pair].source.elements]
        alignments = self.aligner.align_pairs([part.words for part in parts])
        links: dict[int, list[Link]] = {number: [] for number in targets}
        for part, alignment in zip(parts, alignments, strict=True):
            if isinstance(alignment, InvalidInputError):
                answers.setdefault(part.pair, alignment)
            else:
                links[part.pair] += [(part.begin[0] + left, part.begin[1] + right) for left, right in alignment]
        for number in targets.keys() - answers.keys():
            cuts = list(accumulate(map(len, targets[number][:-1]))) if self.options.target is None else None
            pair = sources[number], list(chain.from_iterable(targets[number]))
            line = lines[number].source
            answers[number] = transfer_tags(
                line, texts[number], Alignment(links[number]), *pair, cuts=cuts, split=self.options.split
            )
        return answers

    def _leave_out_long(
        self, counts: Mapping[int, int], sentences: dict[int, Any], answers: _Answers, side: str
    ) -> None:
        """Answer the sentences that have too many words by an error, and remove them."""
        for number, count in counts.items():
            if count > self.options.max_words:
                del sentences[number]
                message = f"got {count} words on the {side} side, expected at most {self.options.max_words}"
                answers[number] = InvalidInputError(f"{message}; raise --max-words or split the line")

    def _translations(
        self, lines: Mapping[int, _Line], sources: Mapping[int, list[TextWord]], language: str | None, answers: _Answers
    ) -> tuple[dict[int, str], dict[int, list[list[TextWord]]]]:
        """Translate each block of each line, and return the lines' translations and the words of their blocks.

        A block whose content stays as it is is its own translation; < and & in translations become references,
        and what would begin a marker of USFM is left out.
        """
        from alignment.translation import translate

        forward, _ = self.aligner.directions[0]
        # The shipped models read words apart from punctuation marks, others plain text.
        normalized = isinstance(forward.tokenizer, NormalizedWords)
        blocks = [
            (number, words[start:end])
            for number, words in sources.items()
            for start, end in lines[number].source.blocks(words)
        ]
        kept = [_is_kept(lines[number].source, words) for number, words in blocks]
        sentences = [
            [] if copied else list(words) if normalized else _plain_words(lines[number].source, words)
            for (number, words), copied in zip(blocks, kept, strict=True)
        ]
        translations = translate(
            forward.model,
            forward.tokenizer,
            sentences,
            max_tokens=self.options.max_tokens,
            on_error=lambda index, error: answers.update({blocks[index][0]: error}),
        )
        texts = dict.fromkeys(sources, "")
        targets: dict[int, list[list[TextWord]]] = {number: [] for number in sources}
        last: dict[int, int] = {}  # where the block before ends in the source
        for (number, words), copied, translation in zip(blocks, kept, translations, strict=True):
            source = lines[number].source.text
            between = source[last[number] : words[0].start] if number in last else ""
            start = len(texts[number]) + len(between)
            if copied:
                text = source[words[0].start : words[-1].end]
            elif lines[number].source.syntax == "xml":
                text = html.escape(" ".join(translation), quote=False)
            else:
                text = " ".join(translation).replace("\\", "")
            texts[number] += between + text
            targets[number].append(
                [TextWord(word, start + word.start, start + word.end) for word in split_text(text, language)]
            )
            last[number] = words[-1].end
        for number in answers.keys() & sources.keys():
            del texts[number], targets[number]
        return texts, targets

    def _start(self, pairs: "Pairs") -> None:
        """Choose what was left open, and check the sides, on the first pairs."""
        if pairs:
            aligners.choose(self.aligner, pairs, self.report)
            if self.options.target is not None and not self.options.keep_sides and not self.checked:
                aligners.check_sides(self.aligner, pairs)
                self.checked = True


def _is_kept(source: Markup, words: Sequence[TextWord]) -> bool:
    """Whether the content of a block stays as it is."""
    return any(
        element.content is not None and element.start <= words[0].start and words[-1].end <= element.end
        for element in source.elements
    )


def _plain_words(source: Markup, words: Sequence[TextWord]) -> list[str]:
    """The words of a block between white space, and between tags that end a word."""
    inside = sorted(place for place in source.breaks if words[0].start < place < words[-1].end)
    edges = (words[0].start, *inside, words[-1].end)
    return split_words(html.unescape(" ".join(source.text[start:end] for start, end in pairwise(edges))))


COMMAND = Command(
    "transfer-tags",
    "insert the tags of sentences into their translations",
    TransferOptions,
    _run,
    "norm-align transfer-tags tagged.fr plain.en --out tagged.en",
    (
        "syntax", "split", "out", "overwrite", "bad_lines", "model", "reverse_model", "source_language",
        "target_language", "device"
    ),
)  # fmt: skip

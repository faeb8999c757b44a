"""Groups the tokens of a prompt: words, sentences, paragraphs, passages, the turns of a conversation."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from captum_norm.checks import shown
from captum_norm.errors import InvalidInputError
from captum_norm.generation.prompts import Prompt
from captum_norm.text.lines import quoted
from captum_norm.text.words import Span, joined_spans, word_spans

SegmentKind = Literal["word", "sentence", "line", "paragraph", "message"]
Segmentation = SegmentKind | re.Pattern[str] | Sequence[str | Span]
"""How to group a prompt's tokens: by kind, by a pattern between them, or one by one, each by its text or characters."""

# A sentence ends at a full stop, question or exclamation mark, with closing quotes, before a space; or at a line's end.
_BETWEEN: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "sentence": re.compile(r"(?<=[.!?…])[\"'”’»)\]]*\s+|(?<=[。！？])|\n+"),
        "line": re.compile(r"\n+"),
        "paragraph": re.compile(r"\n\s*\n"),
    }
)


@dataclass(frozen=True)
class Segments:
    """Groups of a prompt's tokens.

    Attributes:
        names: the text of each group, or the role of a turn.
        numbers: the group of each token, −1 for none.
    """

    names: Sequence[str]
    numbers: Sequence[int]


def segments_of(prompt: Prompt, segmentation: Segmentation) -> Segments:
    """Group the tokens of a prompt; a token at a border belongs to the group that has its first character.

    Args:
        prompt: the prompt.
        segmentation: how.

    Raises:
        InvalidInputError: the tokenizer does not tell which characters a token stands for, a text is not in the prompt,
            or groups are empty or overlap.

    Example:
        >>> prompt = Prompt([5, 6, 7], "A man. He", offsets=[(0, 1), (1, 6), (6, 9)])
        >>> segments_of(prompt, "sentence")
        Segments(names=['A man.', 'He'], numbers=[0, 0, 1])
    """
    if prompt.text is None or prompt.offsets is None:
        raise InvalidInputError(
            "got segments=, but the tokens' characters are not known: pass the prompt as a text, with a fast tokenizer"
        )
    if segmentation == "message":
        names, spans = list(prompt.roles), list(prompt.messages)
        if not spans:
            raise InvalidInputError('got segments="message" and no conversation; pass messages or chat=True')
    else:
        spans = list(_spans(prompt, segmentation))
        if segmentation == "word":
            spans = joined_spans(spans, prompt.offsets)
        names = [prompt.text[start:end] for start, end in spans]
    numbers = [_number(prompt.text, token, spans) for token in prompt.offsets]
    missing = [name for index, name in enumerate(names) if index not in numbers]
    if missing:
        raise InvalidInputError(f"the segment {quoted(missing[0])} has no token of its own; join it with a neighbour")
    return Segments(names, numbers)


def _spans(prompt: Prompt, segmentation: Segmentation) -> Iterator[Span]:
    text = prompt.text or ""
    if segmentation == "word":
        yield from (span for start, end in prompt.messages or [(0, len(text))] for span in word_spans(text, start, end))
        return
    if isinstance(segmentation, str):
        if segmentation not in _BETWEEN:
            raise InvalidInputError(
                f"got segments={quoted(segmentation)}; expected word, {', '.join(_BETWEEN)}, message, a compiled "
                "pattern between them, or a list of their texts or (start, end) in characters"
            )
        segmentation = _BETWEEN[segmentation]
    if isinstance(segmentation, re.Pattern):
        for start, end in prompt.messages or [(0, len(text))]:
            yield from _between(segmentation, text, start, end)
        return
    end = 0
    for piece in segmentation:
        start, end = _found(piece, text, end) if isinstance(piece, str) else _checked(piece, text, end)
        yield start, end


def _between(pattern: re.Pattern[str], text: str, start: int, end: int) -> Iterator[Span]:
    """Yield the pieces between the matches of a pattern, without white space around them."""
    borders = [(match.start(), match.end()) for match in pattern.finditer(text, start, end)]
    for first, last in zip([start, *(after for _, after in borders)], [*(b for b, _ in borders), end], strict=True):
        piece = text[first:last]
        if piece.strip():
            begin = first + len(piece) - len(piece.lstrip())
            yield begin, begin + len(piece.strip())


def _found(piece: str, text: str, start: int) -> Span:
    first = text.find(piece, start) if piece.strip() else -1
    if first < 0:
        raise InvalidInputError(
            f"the segment {quoted(piece)} is not in the prompt, or not behind the one before it; give the segments in "
            "the prompt's order and its words"
        )
    return first, first + len(piece)


def _checked(piece: object, text: str, start: int) -> Span:
    if isinstance(piece, Sequence) and len(piece) == 2 and all(isinstance(place, int) for place in piece):
        first, last = piece
        if start <= first < last <= len(text):
            return first, last
    raise InvalidInputError(
        f"got the segment {shown(piece)} of a prompt of {len(text)} characters; expected texts, or (start, end) in "
        "characters, in order and without overlap"
    )


def _number(text: str, token: Span, spans: Sequence[Span]) -> int:
    """Find the segment of a token's first character that is no white space, if it has one; −1 without one."""
    start, end = token
    piece = text[start:end]
    first = start + len(piece) - len(piece.lstrip()) if piece.strip() else start
    return next((index for index, (begin, last) in enumerate(spans) if begin <= first < last and start < end), -1)

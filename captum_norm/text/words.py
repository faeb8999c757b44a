"""From tokens to words: the words of a text, the tokens of each, and scores by word.

A word is what stands between white space, without the punctuation marks before and behind it: *don't*,
*mother-in-law*, *3.14* and *www.example.org* are words, and so is each run of one punctuation mark, each symbol, each
emoji. In scripts that are written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese), a word is what the
tokenizer takes together. A token is never divided: words that share one are one word. A special token, such as
``[CLS]``, and a line break that is a token stand for themselves; other white space belongs to the word behind it.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import regex

from captum_norm.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BYTE_CHARACTERS",
    "Span",
    "WordScore",
    "Words",
    "joined_spans",
    "token_texts",
    "word_spans",
    "words_of",
    "words_of_text",
    "words_of_tokens",
]

Span = tuple[int, int]
"""The first character of a piece of text, and the one behind its last."""

_Scheme = Literal["sentencepiece", "byte-level", "wordpiece", "plain"]

# A token that looks like a special one, such as <s>, [SEP] or <|im_end|>, unless it is a byte.
_MARKUP = re.compile(r"<[^<>\s]+>|\[[^\[\]]+\]")
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")

WordScore = Literal["sum", "mean", "max"]
"""How a word's score comes from those of its tokens; ``max`` takes the one farthest from zero."""

_UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
_LETTER = rf"[[\p{{L}}\p{{N}}_]--{_UNSPACED}]"
_REST = rf"[[\p{{L}}\p{{N}}\p{{M}}_\u00ad\u200c\u200d]--{_UNSPACED}]*"
_WORD = regex.compile(
    rf"{_LETTER}{_REST}(?:(?:['’.·\-\u2010\u2011]|(?<=\p{{N}})[,:](?=\p{{N}})){_LETTER}{_REST})*"
    rf"|(\p{{P}})\1*|(?!\s)\X",
    regex.VERSION1,
)


def _byte_characters() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


BYTE_CHARACTERS: Mapping[str, int] = MappingProxyType(_byte_characters())
"""GPT-2's characters for the 256 bytes: printable ones are themselves, the others are numbered from U+0100."""


@dataclass(frozen=True)
class Words:
    """The words of one sequence of tokens.

    Attributes:
        texts: the W words, special tokens and line breaks, in order.
        numbers: the word of each of the S tokens, 0 to W − 1.
        pieces: the S tokens as people write them: ``keys`` for ``Ġkeys``, ``bly`` for ``##bly``.

    Example:
        >>> words = words_of_tokens(["[CLS]", "prob", "##ably", "not", ".", "[SEP]"])
        >>> words.texts
        ('[CLS]', 'probably', 'not', '.', '[SEP]')
        >>> words.numbers, words.pieces
        ((0, 1, 1, 2, 3, 4), ('[CLS]', 'prob', 'ably', 'not', '.', '[SEP]'))
    """

    texts: tuple[str, ...]
    numbers: tuple[int, ...]
    pieces: tuple[str, ...]

    def behind(self, names: Sequence[str]) -> "Words":
        """Return the same words behind further positions, such as virtual tokens, each a word of its own."""
        count = len(names)
        numbers = (*range(count), *(number + count for number in self.numbers))
        return Words((*names, *self.texts), numbers, (*names, *self.pieces))

    def scores(self, scores: "Tensor", score: WordScore = "sum") -> "Tensor":
        """Compute scores of words from those of tokens: (..., S) -> (..., W).

        Args:
            scores: scores of the tokens.
            score: how.

        Raises:
            InvalidInputError: if there are not as many scores as tokens.

        Example:
            >>> import torch
            >>> words = words_of_tokens(["prob", "##ably", "not"])
            >>> words.scores(torch.tensor([0.5, 0.25, 0.25]))
            tensor([0.7500, 0.2500])
        """
        import torch

        if score not in ("sum", "mean", "max"):
            raise InvalidInputError(f"got the score of words {score!r}; expected sum, mean or max")
        if scores.shape[-1:] != (len(self.numbers),):
            raise InvalidInputError(
                f"got scores of shape {tuple(scores.shape)} for {len(self.numbers)} tokens; expected one for each in "
                "the last dimension"
            )
        member = torch.nn.functional.one_hot(torch.tensor(self.numbers), len(self.texts)).to(scores)
        if score != "max":
            return scores @ (member if score == "sum" else member / member.sum(0))
        # The place of the extreme, so that its sign is kept.
        sizes = scores.abs().unsqueeze(-1).masked_fill(member == 0, -1)
        return scores.gather(-1, sizes.argmax(-2))

    def maps(self, maps: "Tensor", score: WordScore = "sum") -> "Tensor":
        """Compute maps of words from maps of tokens: (..., S, S) -> (..., W, W).

        Columns are scored as by :meth:`scores`; a word's row is the mean of its tokens' rows [Kobayashi et al. 2020].
        For norms of vectors, which are added before the norm is taken, pass :meth:`segments` to a method's ``maps``
        and use :meth:`rows`.
        """
        return self.rows(self.scores(maps, score))

    def rows(self, maps: "Tensor") -> "Tensor":
        """Average the rows of each word's tokens: (..., S, K) -> (..., W, K)."""
        return self.scores(maps.transpose(-1, -2), "mean").transpose(-1, -2)

    def segments(self) -> "Tensor":
        """Return the word of each token, (1, S), for ``maps(..., segments=)`` of methods that add vectors."""
        import torch

        return torch.tensor([self.numbers])


def words_of(tokenizer: Any, ids: Any, text: str | tuple[str, str] | None = None) -> Words:
    """Find the words of one sequence of token ids.

    Args:
        tokenizer: the tokenizer, of transformers or like one.
        ids: the S ids, with special tokens.
        text: the text, or pair of texts, that they come from. Without it, or if the tokenizer does not tell which
            characters a token stands for, words are those of the tokens' own texts: ``don't``, which BERT cuts into
            three tokens, is then three words.

    Returns:
        the words.

    Example:
        >>> from captum_norm.loading import LANGUAGE_MODEL, load
        >>> _, tokenizer = load(LANGUAGE_MODEL)
        >>> words = words_of(tokenizer, tokenizer("Clara's keys")["input_ids"], "Clara's keys")
        >>> words.texts
        ('<s>', "Clara's", 'keys')
    """
    ids = [int(index) for index in ids]
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens(ids)]
    special = _special(tokenizer, ids)
    pieces = _Pieces.of(tokens, special, byte_level=_is_byte_level(tokenizer))
    located = None if text is None else _offsets(tokenizer, ids, text)
    if located is None and pieces.scheme == "plain":
        located = _decoded(token_texts(ids, tokenizer))
    return _grouped(pieces, *(pieces.located() if located is None else located))


def words_of_tokens(
    tokens: Sequence[str], special: Sequence[int | bool] | None = None, offsets: Sequence[Span] | None = None
) -> Words:
    """Find the words of tokens by their marks: ``Ġ`` and bytes, ``▁``, ``##``, ``@@`` or ``</w>``.

    Where text and tokenizer are known, :func:`words_of` is more exact.

    Args:
        tokens: the S tokens as the tokenizer writes them.
        special: whether each is special; those like ``[SEP]``, ``<s>`` and ``<|end|>`` if None.
        offsets: the characters of each token in the text: tokens without marks that follow each other closely may be
            of one word.

    Example:
        >>> words_of_tokens(["ĠdÃ©j", "Ãł", "Ġvu", "!"]).texts
        ('déjà', 'vu', '!')
    """
    if special is None:
        special = [_MARKUP.fullmatch(token) is not None and _FALLBACK.fullmatch(token) is None for token in tokens]
    pieces = _Pieces.of(tokens, list(map(bool, special)))
    return _grouped(pieces, *pieces.located(offsets))


def words_of_text(parts: Sequence[str]) -> Words:
    """Find the words of a text in parts that follow each other, such as what each token adds to a decoded text."""
    ends = list(accumulate((len(part) for part in parts), initial=0))
    return words_of_tokens(parts, offsets=list(pairwise(ends)))


def word_spans(text: str, start: int = 0, end: int | None = None) -> list[Span]:
    """Find the characters of each word of a text; see the top of this file for what a word is."""
    return [match.span() for match in _WORD.finditer(text, start, len(text) if end is None else end)]


def joined_spans(spans: Sequence[Span], tokens: Sequence[Span]) -> list[Span]:
    """Join spans that share a token; ``tokens`` are the characters of each."""
    continued = {place for token in tokens for place in _touched(spans, token)[:-1]}
    joined: list[Span] = []
    for place, (start, end) in enumerate(spans):
        if place - 1 in continued:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text that each token adds to those before it; together they are the decoded text."""
    texts, begin, done = [], 0, 0
    for end in range(1, len(ids) + 1):
        # Some tokenizers decode a token by what comes before it.
        before, text = (tokenizer.decode(ids[begin:to], clean_up_tokenization_spaces=False) for to in (done, end))
        # A character of several tokens appears with its last one; ByT5's decoder leaves the others out.
        if end < len(ids) and (text.endswith("�") or text == before):
            texts.append("")
        else:
            texts.append(text[len(before) :])
            begin, done = done, end
    return texts


@dataclass(frozen=True)
class _Pieces:
    """Tokens, and the UTF-8 text of each, with a space before what begins a word if the scheme tells."""

    tokens: Sequence[str]
    special: Sequence[bool]
    scheme: _Scheme
    surfaces: Sequence[bytes]

    @classmethod
    def of(cls, tokens: Sequence[str], special: Sequence[bool], *, byte_level: bool | None = None) -> "_Pieces":
        """Tell how tokens are written, by their marks; ``byte_level`` if the tokenizer says so itself."""
        ordinary = [token for token, flag in zip(tokens, special, strict=True) if not flag]
        scheme: _Scheme
        if byte_level or (byte_level is None and _are_bytes(ordinary)):
            scheme = "byte-level"
        elif any("▁" in token for token in ordinary):
            scheme = "sentencepiece"
        elif any(token.startswith("##") and len(token) > 2 for token in ordinary):
            scheme = "wordpiece"
        else:
            scheme = "plain"
        surfaces = [
            token.encode() if flag else _SURFACES[scheme](token) for token, flag in zip(tokens, special, strict=True)
        ]
        if scheme == "plain" and any(token.endswith(("@@", "</w>")) for token in ordinary):
            scheme, surfaces = "wordpiece", list(_by_ends(tokens))
        return cls(tokens, special, scheme, surfaces)

    def located(self, offsets: Sequence[Span] | None = None) -> tuple[str, list[Span]]:
        """Put the pieces together to a text, and return the characters of each."""
        data, places = b"", []
        for index, surface in enumerate(self.surfaces):
            follows = offsets is not None and index > 0 and offsets[index][0] == offsets[index - 1][1] > 0
            if self.special[index] or (self.scheme == "plain" and not follows):
                data += b" "
            piece = surface.lstrip() if self.scheme == "wordpiece" and follows else surface
            places.append((len(data), len(data) + len(piece)))
            data += piece
        text = data.decode(errors="surrogateescape")
        owners = _character_of_bytes(text)
        return text, [(owners[start], owners[end - 1] + 1 if end > start else owners[start]) for start, end in places]

    def shown(self, index: int) -> str:
        """The token as people write it; bytes that are no whole characters are spelled out."""
        if self.special[index]:
            return self.tokens[index]
        text = self.surfaces[index].decode(errors="backslashreplace")
        return text.strip() or "↵" * text.count("\n") or "␣"


def _grouped(pieces: _Pieces, text: str, offsets: Sequence[Span]) -> Words:
    """Group tokens by the words of a text."""
    characters = list(text)
    for (start, end), flag in zip(offsets, pieces.special, strict=True):
        if flag:
            characters[start:end] = " " * (end - start)
    ordinary = [(0, 0) if flag else span for span, flag in zip(offsets, pieces.special, strict=True)]
    spans = joined_spans(word_spans("".join(characters)), ordinary)
    shown = [pieces.shown(index) for index in range(len(pieces.tokens))]
    # Of each token: the number of its span, −1 − its index if it stands for itself, or None if it is white space.
    keys: list[int | None] = []
    for index, token in enumerate(ordinary):
        touched = _touched(spans, token)
        alone = pieces.special[index] or shown[index].startswith("↵")
        keys.append(touched[0] if touched else -1 - index if alone else None)
    # White space belongs to the word behind it, or else to the one before.
    for order, step in ((range(len(keys) - 2, -1, -1), 1), (range(1, len(keys)), -1)):
        for index in order:
            neighbour = keys[index + step]
            if keys[index] is None and neighbour is not None and neighbour >= 0:
                keys[index] = neighbour
    every = [-1 - index if key is None else key for index, key in enumerate(keys)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(every))}
    texts = tuple(shown[-1 - key] if key < 0 else text[slice(*spans[key])] for key in numbers)
    return Words(texts, tuple(numbers[key] for key in every), tuple(shown))


def _touched(spans: Sequence[Span], token: Span) -> list[int]:
    """Return the numbers of the spans that share characters with a token, in order."""
    first = bisect_right(spans, token[0], key=lambda span: span[1])
    return list(takewhile(lambda place: spans[place][0] < token[1], range(first, len(spans))))


def _offsets(tokenizer: Any, ids: list[int], text: str | tuple[str, str]) -> tuple[str, list[Span]] | None:
    """Return the text and the characters of each token in it; None unless the tokenizer tells for these ids."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    texts = (text,) if isinstance(text, str) else text
    for special in (True, False):
        encoded = tokenizer(
            *texts, add_special_tokens=special, return_offsets_mapping=True, truncation=False, verbose=False
        )
        if list(encoded["input_ids"]) == ids:
            starts = [0, len(texts[0]) + 1]
            shifts = [starts[number or 0] for number in encoded.sequence_ids(0)]
            moved = [(start + by, end + by) for (start, end), by in zip(encoded["offset_mapping"], shifts, strict=True)]
            joined = " ".join(texts)
            return joined, list(_by_bytes(joined, moved))
    return None


def _by_bytes(text: str, offsets: Sequence[Span]) -> Iterator[Span]:
    """Yield offsets, those of a run of bytes one by one: some tokenizers give each byte of a run the whole run."""
    index = 0
    while index < len(offsets):
        start, end = offsets[index]
        count = next((n for n, span in enumerate(offsets[index:]) if span != (start, end)), len(offsets) - index)
        characters = _character_of_bytes(text[start:end])[:-1]
        if end - start > 1 and count == len(characters):
            yield from ((start + place, start + place + 1) for place in characters)
        else:
            yield from offsets[index : index + count]
        index += count


def _decoded(texts: Sequence[str]) -> tuple[str, list[Span]]:
    """Put decoded tokens together; one without text belongs to the character that the next ones make."""
    offsets, end = [], 0
    for text in texts:
        offsets.append((end, end + max(len(text), 1)))
        end += len(text)
    return "".join(texts), offsets


def _special(tokenizer: Any, ids: Sequence[int]) -> list[bool]:
    """Whether each token is special; the unknown token stands for text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    known = {index for index, token in added.items() if getattr(token, "special", False)}
    known |= set(getattr(tokenizer, "all_special_ids", ()))
    known.discard(getattr(tokenizer, "unk_token_id", None))
    return [index in known for index in ids]


def _is_byte_level(tokenizer: Any) -> bool | None:
    """Whether a tokenizer writes bytes as GPT-2 does; None if it cannot be asked."""
    try:
        return bool(tokenizer.convert_tokens_to_string(["aĠ", "a"]) == "a a")
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None


def _character_of_bytes(text: str) -> list[int]:
    """Return the character of each byte of a text's UTF-8, and one more for its end."""
    sizes = (len(character.encode(errors="surrogateescape")) for character in text)
    return [place for place, size in enumerate(sizes) for _ in range(size)] + [len(text)]


def _are_bytes(tokens: Sequence[str]) -> bool:
    """Whether tokens are written in GPT-2's characters for bytes."""
    text = "".join(tokens)
    if text.isascii() or any(character not in BYTE_CHARACTERS for character in text):
        return False
    if any(token.startswith(("Ġ", "Ċ")) for token in tokens):
        return True
    try:
        _byte_level(text).decode()
    except UnicodeDecodeError:
        return False
    return True


def _byte_level(token: str) -> bytes:
    known = all(character in BYTE_CHARACTERS for character in token)
    return bytes(BYTE_CHARACTERS[character] for character in token) if known else token.encode()


def _sentencepiece(token: str) -> bytes:
    fallback = _FALLBACK.fullmatch(token)
    return bytes.fromhex(fallback[1]) if fallback else token.replace("▁", " ").encode()


def _wordpiece(token: str) -> bytes:
    return token[2:].encode() if token.startswith("##") and len(token) > 2 else b" " + token.encode()


def _by_ends(tokens: Sequence[str]) -> Iterator[bytes]:
    """Yield pieces of BPE that marks the end of a word, ``</w>``, or of a piece inside one, ``@@``."""
    marks_words = any(token.endswith("</w>") for token in tokens)
    begins = True
    for token in tokens:
        ends = token.endswith("</w>") if marks_words else not token.endswith("@@")
        yield b" " * begins + token.removesuffix("</w>" if marks_words else "@@").encode()
        begins = ends


_SURFACES: Mapping[str, Callable[[str], bytes]] = {
    "byte-level": _byte_level,
    "sentencepiece": _sentencepiece,
    "wordpiece": _wordpiece,
    "plain": str.encode,
}

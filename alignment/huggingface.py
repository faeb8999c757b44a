"""Adapts tokenizers of Hugging Face translation models to word alignment."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from alignment.formats import split_words
from alignment.subwords import sentencepiece_text, word_ids_from_offsets, word_ids_from_pieces
from alignment.tokenization import EncodedSentence, digest_of
from captum_norm import InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer as a :class:`~alignment.tokenization.TranslationTokenizer`.

    Sentences are tokenised as a whole, their words joined by spaces, as in the model's training. Special tokens in the
    text are treated as ordinary text, and nothing is truncated. The tokenizer is left unchanged.

    Supports every fast tokenizer (NLLB, mBART, BART, T5, ...) and the slow ones of Marian, M2M100 and FSMT and those
    based on ``SentencePieceBackend``.

    Args:
        tokenizer: the tokenizer, such as ``AutoTokenizer.from_pretrained`` returns.
        source_language: the code of the source language, for tokenizers with ``src_lang`` (M2M100, NLLB, mBART); None
            for the one that the tokenizer was loaded with.
        target_language: the code of the target language, for tokenizers with ``tgt_lang``.
        source_prefix: text in front of every source sentence, such as T5's ``"translate English to French:"`` or
            Marian's ``">>fr<<"``; its pieces belong to no word.

    Raises:
        InvalidInputError: the tokenizer is slow and of another kind; a language is missing, unknown, or given to a
            tokenizer without languages.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> core = Tokenizer(models.WordPiece({"[UNK]": 0, "Häus": 1, "##er": 2, "am": 3}, unk_token="[UNK]"))
    >>> core.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> tokenizer = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=core))
    >>> tokenizer.encode_source([["Häuser", "am", "See"]])
    [EncodedSentence(ids=[1, 2, 3, 0], word_ids=[0, 0, 1, 2])]
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        source_language: str | None = None,
        target_language: str | None = None,
        source_prefix: str = "",
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._slow_text = None if tokenizer.is_fast else _slow_text(tokenizer)
        self._languages = _chosen_languages(tokenizer, source_language, target_language)
        self._target_code = None if self._languages is None else _language_id(tokenizer, self._languages[1])
        self._prefix = split_words(source_prefix)
        _check_code_in_prefix(tokenizer, self._prefix)

    @property
    def languages(self) -> tuple[str, str] | None:
        """The codes of the source and the target language; None if the tokenizer has none."""
        return self._languages

    def reversed(self, source_prefix: str = "") -> "HuggingFaceTokenizer":
        """The same tokenizer with its languages exchanged, for the opposite direction of a multilingual model."""
        if self._languages is None:
            name = type(self._tokenizer).__name__
            raise InvalidInputError(f"got a {name} without languages; give the model of the opposite direction")
        target, source = self._languages
        return HuggingFaceTokenizer(
            self._tokenizer, source_language=source, target_language=target, source_prefix=source_prefix
        )

    def encode_source(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        """Encode source sentences: the pieces, special tokens and language code that the encoder reads."""
        before = len(self._prefix)
        encoded = self._encode([[*self._prefix, *words] for words in sentences], target=False)
        for sentence in encoded:
            sentence.word_ids[:] = [
                None if index is None or index < before else index - before for index in sentence.word_ids
            ]
        return encoded

    def encode_target(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        """Encode target sentences: the labels, with special tokens and the language code if the decoder emits it."""
        return self._encode(sentences, target=True)

    def joined(self, sides: Sequence[tuple[EncodedSentence, EncodedSentence]]) -> list[EncodedSentence]:
        """Encoded sides as one text, with the tokenizer's special tokens: ``[CLS] source [SEP] target [SEP]``."""
        if self._slow_text is not None:
            raise InvalidInputError(f"got the slow {type(self._tokenizer).__name__}, expected a fast one to join sides")
        with _restored(self._tokenizer):
            frame = self._tokenizer("a", "a", padding=False, truncation=False)
        types, of_sides = frame.get("token_type_ids"), frame.sequence_ids()
        texts = [EncodedSentence([], []) for _ in sides]
        for place, (special, side) in enumerate(zip(frame["input_ids"], of_sides, strict=True)):
            if side is not None and side in of_sides[:place]:  # a further piece of the example
                continue
            for text, both in zip(texts, sides, strict=True):
                added = [(special, None)] if side is None else zip(both[side].ids, both[side].word_ids, strict=True)
                pieces = [(piece, index) for piece, index in added if side is None or index is not None]
                text.ids.extend(piece for piece, _ in pieces)
                text.word_ids.extend(index for _, index in pieces)
                text.types.extend([types[place]] * len(pieces) if types else [])
        return texts

    def decode_target(self, ids: Sequence[int]) -> list[str]:
        """Decode emitted ids into words, without special and unknown tokens; FSMT's are joined as in plain text."""
        # M2M100's language codes are not among its special tokens.
        emitted = [index for index in ids if index != self._target_code]
        with _restored(self._tokenizer):
            text = self._tokenizer.decode(emitted, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return split_words(text)

    def digest(self) -> str:
        """A hash of everything that determines the pieces: the tokenizer's saved form, languages and prefix."""
        from alignment.identity import tokenizer_digest

        with _restored(self._tokenizer):
            if self._languages is not None:
                self._tokenizer.src_lang, self._tokenizer.tgt_lang = self._languages
            return digest_of(tokenizer_digest(self._tokenizer), repr(self._languages), *self._prefix)

    def _encode(self, sentences: Sequence[Sequence[str]], *, target: bool) -> list[EncodedSentence]:
        if not sentences:
            return []
        with _restored(self._tokenizer):
            if self._languages is not None:
                self._tokenizer.src_lang, self._tokenizer.tgt_lang = self._languages
            encode = _encode_fast if self._slow_text is None else partial(_encode_slow, self._slow_text)
            encoded = list(encode(self._tokenizer, sentences, target))
            padding = self._tokenizer.pad_token_id
        for words, sentence in zip(sentences, encoded, strict=True):
            inside = (index for index, word in zip(sentence.ids, sentence.word_ids, strict=True) if word is not None)
            if padding in inside:  # models differ in whether they mask it and count its position
                name = type(self._tokenizer).__name__
                raise InvalidInputError(
                    f"got {' '.join(words)!r}, which contains the padding token of this {name}; change the word"
                )
        return encoded


def _encode_fast(tokenizer: Any, sentences: Sequence[Sequence[str]], target: bool) -> Iterator[EncodedSentence]:
    encodings = tokenizer(
        **{"text_target" if target else "text": [" ".join(words) for words in sentences]},
        padding=False,
        truncation=False,
        split_special_tokens=True,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        verbose=False,
    )
    columns = (encodings[name] for name in ("input_ids", "offset_mapping", "special_tokens_mask"))
    for words, ids, offsets, mask in zip(sentences, *columns, strict=True):
        yield EncodedSentence(ids, word_ids_from_offsets(words, offsets, mask))


_TEXT = -1  # no piece's id: a placeholder for the text, to see which special tokens surround it


def _fsmt_text(piece: str) -> bytes:
    return piece.removesuffix("</w>").encode()


_SLOW_TEXTS = {
    "MarianTokenizer": sentencepiece_text,
    "M2M100Tokenizer": sentencepiece_text,
    "SentencePieceBackend": sentencepiece_text,
    "FSMTTokenizer": _fsmt_text,
}


def _encode_slow(
    text_of: Callable[[str], bytes], tokenizer: Any, sentences: Sequence[Sequence[str]], target: bool
) -> Iterator[EncodedSentence]:
    if text_of is _fsmt_text and target:  # it would encode targets with the source's vocabulary and language
        tokenizer.encoder = {piece: index for index, piece in tokenizer.decoder.items()}
        tokenizer.src_lang = tokenizer.tgt_lang
    elif text_of is not _fsmt_text:  # as the tokenizer's __call__ does
        getattr(tokenizer, "_switch_to_target_mode" if target else "_switch_to_input_mode", lambda: None)()
    wrapped = tokenizer.build_inputs_with_special_tokens([_TEXT])
    before, after = wrapped[: wrapped.index(_TEXT)], wrapped[wrapped.index(_TEXT) + 1 :]

    def tokenize(text: str) -> list[str]:
        # Pieces outside the vocabulary still have their text here; only their ids are the unknown token's.
        return tokenizer.tokenize(text, split_special_tokens=True)  # type: ignore[no-any-return]

    @cache
    def normalize(word: str) -> str:
        return b"".join(map(text_of, tokenize(word))).decode()

    for words in sentences:
        pieces = tokenize(" ".join(words))
        word_ids = word_ids_from_pieces(words, pieces, text_of, normalize=normalize)
        yield EncodedSentence(
            [*before, *tokenizer.convert_tokens_to_ids(pieces), *after],
            [*[None] * len(before), *word_ids, *[None] * len(after)],
        )


def _slow_text(tokenizer: Any) -> Callable[[str], bytes]:
    """What strips the marks from a slow tokenizer's pieces."""
    for ancestor in type(tokenizer).__mro__:
        if ancestor.__name__ in _SLOW_TEXTS:
            return _SLOW_TEXTS[ancestor.__name__]
    known = ", ".join(_SLOW_TEXTS)
    raise InvalidInputError(f"got the slow {type(tokenizer).__name__}, expected a fast tokenizer or one of {known}")


def _chosen_languages(tokenizer: Any, source: str | None, target: str | None) -> tuple[str, str] | None:
    """The codes of the source and the target language; None for a tokenizer without languages."""
    name = type(tokenizer).__name__
    # FSMT's src_lang is a fixed attribute; tokenizers with a choice of languages have a property.
    if not isinstance(getattr(type(tokenizer), "src_lang", None), property):
        if source is None and target is None:
            return None
        codes = " and ".join(repr(code) for code in (source, target) if code is not None)
        hint = "if the model reads the language in the text, give it as source_prefix"
        raise InvalidInputError(f"got the language {codes} for a {name}, which has no choice of languages; {hint}")
    # Without an explicit language, src_lang defaults to English.
    loaded = tokenizer.src_lang if tokenizer.init_kwargs.get("src_lang") is not None else None
    example = f"expected a code such as {tokenizer.src_lang!r}"
    chosen = []
    for side, code in (("source", source or loaded), ("target", target or tokenizer.tgt_lang)):
        if code is None:
            raise InvalidInputError(f"got no {side} language for a {name}, {example}; give {side}_language")
        if _language_id(tokenizer, code) is None:
            raise InvalidInputError(f"got the {side} language {code!r}, which this {name} does not know; {example}")
        chosen.append(code)
    return chosen[0], chosen[1]


def _language_id(tokenizer: Any, code: str) -> int | None:
    """The id of a language's token; None for an unknown language."""
    ids = getattr(tokenizer, "lang_code_to_id", None)
    if ids is None:
        ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    index: int | None = ids.get(code)
    return index


def _check_code_in_prefix(tokenizer: Any, prefix: Sequence[str]) -> None:
    """Refuse a prefix without a language code where a Marian model has several target languages."""
    codes = getattr(tokenizer, "supported_language_codes", ())
    if len(codes) > 1 and (not prefix or prefix[0] not in codes):
        message = f"got the source_prefix {' '.join(prefix)!r} for a tokenizer of {len(codes)} target languages"
        raise InvalidInputError(f"{message}, expected one of {', '.join(sorted(codes))}")


@contextmanager
def _restored(tokenizer: Any) -> Iterator[None]:
    """Restore the tokenizer's attributes and backend settings on exit."""
    attributes = dict(vars(tokenizer))
    backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    settings = {name: getattr(backend, name) for name in _BACKEND_SETTINGS if backend is not None}
    try:
        yield
    finally:
        vars(tokenizer).clear()
        vars(tokenizer).update(attributes)
        for name, restore in _BACKEND_SETTINGS.items():
            if settings.get(name) is not None:
                restore(backend, settings[name])


_BACKEND_SETTINGS: Mapping[str, Callable[[Any, Any], None]] = MappingProxyType(
    {
        "post_processor": lambda backend, value: setattr(backend, "post_processor", value),
        "encode_special_tokens": lambda backend, value: setattr(backend, "encode_special_tokens", value),
        "truncation": lambda backend, value: backend.enable_truncation(**value),
        "padding": lambda backend, value: backend.enable_padding(**value),
    }
)

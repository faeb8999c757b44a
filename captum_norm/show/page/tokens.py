"""The tokens of a page, with the words they belong to."""

from collections.abc import Sequence

from captum_norm.show.page.document import Tokens
from captum_norm.text.words import Words, words_of_text


def tokens_of(words: Words) -> Tokens:
    """Return tokens as people write them, and their words.

    Example:
        >>> from captum_norm.text.words import words_of_tokens
        >>> tokens_of(words_of_tokens(["prob", "##ably"])).word_texts
        ('probably',)
    """
    return Tokens(words.pieces, words.numbers, words.texts)


def tokens_of_text(texts: Sequence[str], special: Sequence[bool] | None = None) -> Tokens:
    """Return tokens and their words from parts of a text, which follow each other without gaps.

    Args:
        texts: the parts, such as what each token adds to a decoded text.
        special: whether each is a special token; see :func:`captum_norm.text.words.words_of_tokens`.

    Example:
        >>> tokens_of_text(["Cl", "ara", " slept", "."]).word_texts
        ('Clara', 'slept', '.')
    """
    return tokens_of(words_of_text(texts, special))

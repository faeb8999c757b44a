"""Defines the two ways to read an alignment off a decoder's steps [Kobayashi et al. 2020]."""

from typing import Literal, get_args

from alignment.tokenization import EncodedSentence
from captum_norm import InvalidInputError

Setting = Literal["AWO", "AWI"]
"""AWO, alignment with output: a target piece's row is that of the step that emits it; AWI, alignment with input: that
of the step that reads it, the next one."""


def row_word_ids(target: EncodedSentence, setting: Setting) -> list[int | None]:
    """The word that each decoder step's row counts for.

    Step t emits piece t of the target and reads piece t - 1; step 0 reads no piece but the start token, or the
    language code that takes its place.

    Args:
        target: what the decoder emits, T pieces.
        setting: "AWO" or "AWI".

    Returns:
        T word ids, None for rows that count for no word.

    Raises:
        InvalidInputError: the setting is neither.

    >>> target = EncodedSentence([5, 6, 7, 2], [0, 0, 1, None])
    >>> row_word_ids(target, "AWO"), row_word_ids(target, "AWI")
    ([0, 0, 1, None], [None, 0, 0, 1])
    """
    if setting not in get_args(Setting):
        raise InvalidInputError(f"got the setting {setting!r}, expected one of {', '.join(get_args(Setting))}")
    if setting == "AWO":
        return list(target.word_ids)
    return [None, *target.word_ids][: len(target.ids)]

"""Defines the two settings, which say which decoder step's row belongs to a target piece [Kobayashi et al. 2020]."""

from typing import Literal, get_args

from alignment.tokenization import EncodedSentence
from captum_norm import InvalidInputError

Setting = Literal["AWO", "AWI"]
"""``"AWO"``, alignment with output: a target piece's row is that of the step that emits it. ``"AWI"``, alignment with
input: that of the next step, which reads it."""

SETTINGS: tuple[Setting, ...] = get_args(Setting)


def row_word_ids(target: EncodedSentence, setting: Setting) -> list[int | None]:
    """The target word that each decoder step's row belongs to.

    Step t emits piece t of the target and reads piece t - 1; step 0 reads the start token, or the language code that
    replaces it.

    Args:
        target: the T pieces that the decoder emits.
        setting: ``"AWO"`` or ``"AWI"``.

    Returns:
        T word ids, None for rows of no word.

    Raises:
        InvalidInputError: the setting is unknown.

    >>> target = EncodedSentence([5, 6, 7, 2], [0, 0, 1, None])
    >>> row_word_ids(target, "AWO"), row_word_ids(target, "AWI")
    ([0, 0, 1, None], [None, 0, 0, 1])
    """
    if setting not in SETTINGS:
        raise InvalidInputError(f"got the setting {setting!r}, expected {' or '.join(SETTINGS)}")
    if setting == "AWO":
        return list(target.word_ids)
    return [None, *target.word_ids][: len(target.ids)]

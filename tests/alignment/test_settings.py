"""Which word each decoder step's row counts for."""

from typing import Any

import pytest

from alignment.selection import row_word_ids
from alignment.tokenization import EncodedSentence
from captum_norm import InvalidInputError


def test_rows_by_hand() -> None:
    # Step:      0     1    2    3     4
    # emits:     lang  Hä   user .     </s>
    # reads:     </s>  lang Hä   user  .
    target = EncodedSentence([9, 5, 6, 7, 2], [None, 0, 0, 1, None])
    assert row_word_ids(target, "AWO") == [None, 0, 0, 1, None]
    assert row_word_ids(target, "AWI") == [None, None, 0, 0, 1]


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_alignment_with_input_is_that_with_output_rolled_by_one_row(pieces: int) -> None:
    # Kobayashi et al. 2020: the decoder reads [</s>] + target, and AWI takes the row of the next step.
    words = [*range(pieces - 1), None]
    target = EncodedSentence(list(range(pieces)), words)
    awo, awi = row_word_ids(target, "AWO"), row_word_ids(target, "AWI")
    assert awi[1:] == awo[:-1]
    assert awi[0] is None
    assert len(awi) == len(awo) == pieces


def test_the_target_is_left_as_it_was() -> None:
    target = EncodedSentence([5, 2], [0, None])
    row_word_ids(target, "AWO").append(7)
    assert target.word_ids == [0, None]


def test_other_settings_are_refused() -> None:
    setting: Any = "awi"
    with pytest.raises(InvalidInputError, match="got the setting 'awi', expected AWO or AWI"):
        row_word_ids(EncodedSentence([2], [None]), setting)

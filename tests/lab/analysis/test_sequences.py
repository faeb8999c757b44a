"""Tokens, masks and batches."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis.corpus import Categories, Encoder, longest
from tests import families
from tests.lab.analysis.small import TEXTS, tokenizer

NUMBERED = list(enumerate(TEXTS, 1))


def encoder(**options: float) -> Encoder:
    return Encoder(tokenizer(), Categories.of(tokenizer()), **{"max_length": 64, **options})  # type: ignore[arg-type]


def test_masks_depend_on_seed_and_line_alone() -> None:
    plain = encoder().sequences(NUMBERED)
    masked = encoder(mask_rate=0.12).sequences(NUMBERED)
    assert encoder(mask_rate=0.12).sequences(NUMBERED[4:]) == masked[4:]
    assert encoder(mask_rate=0.12, seed=1).sequences(NUMBERED) != masked
    for before, after in zip(plain, masked, strict=True):
        ordinary = range(1, len(before.ids) - 1)
        assert len(after.masked) == max(1, int(len(ordinary) * 0.12))
        assert after.masked <= set(ordinary)
        for place, (was, now) in enumerate(zip(before.ids, after.ids, strict=True)):
            assert now == (tokenizer().mask_token_id if place in after.masked else was)


def test_batches_hold_every_sequence_once_within_the_budget() -> None:
    sequences = encoder().sequences(NUMBERED)
    batches = list(encoder().batches(sequences, 40))
    assert sorted(found.line for batch in batches for found in batch.sequences) == list(range(1, len(TEXTS) + 1))
    for batch in batches:
        assert batch.ids.numel() <= 40 or len(batch.ids) == 1
        for row, sequence in enumerate(batch.sequences):
            assert batch.ids[row][batch.real[row]].tolist() == sequence.ids


def test_documents_become_windows_and_lines_are_cut_off() -> None:
    text = [(7, " ".join(TEXTS))]
    (cut,) = encoder(max_length=12).sequences(text)
    windows = encoder(max_length=12, windows=True).sequences(text)
    assert cut.ids == windows[0].ids
    assert [(found.line, found.window) for found in windows] == [(7, place) for place in range(len(windows))]
    joined = [token for found in windows for token in found.ids[1:-1]]
    assert joined == tokenizer()(text[0][1], add_special_tokens=False)["input_ids"]


def test_categories_of_a_batch() -> None:
    sequences = encoder().sequences([(1, "Yes, no."), (2, "Yes")])
    (batch,) = encoder().batches(sequences, 100)
    names = (*Categories.of(tokenizer()).names, "padding")
    found = [[names[place] for place in row] for row in batch.categories.tolist()]
    assert found[1] == ["[CLS]", "other", "comma, period", "other", "comma, period", "[SEP]"]
    assert found[0] == ["[CLS]", "other", "[SEP]", "padding", "padding", "padding"]
    assert batch.inputs(torch.device("cpu"))["attention_mask"].sum() == 9


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("bert", 10**30, 64),  # its table of positions
        ("bert", 30, 30),
        ("bert", 512, 64),
        ("roberta", 512, 63),  # counts from its padding id on
        ("llama", 10**30, 64),  # no table: the configuration's
        ("llama", 100, 100),
        ("t5-encoder", 10**30, 512),
    ],
)
def test_the_longest_input_is_what_tokenizer_and_model_allow(name: str, known: int, expected: int) -> None:
    said: Any = SimpleNamespace(model_max_length=known)
    assert longest(families.build(name), said) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [({"mask_rate": 1.0}, "mask_rate=1.0"), ({"mask_rate": -0.1}, "mask_rate"), ({"max_length": 2}, "at least 3")],
)
def test_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        encoder(**options)

"""Checkpoints of real fairseq, loaded without it: the same logits, attention and encoder output."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from alignment.fairseq import load_fairseq_checkpoint
from captum_norm import InvalidInputError
from tests.alignment.fairseq.make_reference import CASES, PAD, Case, batch
from tests.alignment.fairseq.small import SOURCE, TARGET, settings, weights, write_dictionary


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.form}")
def test_model_computes_what_fairseq_computes(case: Case, reference: Path) -> None:
    expected = {name: torch.from_numpy(array) for name, array in np.load(reference / f"{case.name}.npz").items()}
    model: Any = load_fairseq_checkpoint(reference / f"{case.name}.pt", reference / case.name)[0]
    model.set_attn_implementation("eager")
    source, target = batch()
    left = source.ne(PAD)
    right = left.flip(1)
    moved = torch.full_like(source, PAD).masked_scatter(right, source[left])
    with torch.no_grad():
        found = model(input_ids=moved, attention_mask=right.long(), decoder_input_ids=target, output_attentions=True)
    encoded, logits, cross = expected["encoder"], expected["logits"], expected["cross"]
    steps = target.ne(PAD)
    # Rounding in float32, of sums in another order, through three layers; relative to the largest logit.
    close(found.logits[steps], logits[steps], 1e-5 * float(logits[steps].abs().max()))
    close(found.encoder_last_hidden_state[right], encoded[left], 1e-5)
    attention = torch.stack(found.cross_attentions, 1)
    for example in range(len(source)):
        real = attention[example, :, :, steps[example]][..., right[example]]
        close(real, cross[example, :, :, steps[example]][..., left[example]], 1e-6)


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_the_tokenizer_has_the_ids_of_fairseq(reference: Path) -> None:
    _, tokenizer = load_fairseq_checkpoint(reference / "post-learned-tied.pt", reference / "post-learned-tied")
    assert (tokenizer.source_language, tokenizer.target_language) == ("fr", "en")
    [source] = tokenizer.encode_source([["word4", "word11", "word12", "word19"]])
    [target] = tokenizer.encode_target([["word4", "word11", "word12", "word19"]])
    assert (source.ids, target.ids) == ([4, 11, 3, 3, 2], [4, 11, 12, 19, 2])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A checkpoint and its dictionaries."""
    torch.save({"model": weights(), "args": argparse.Namespace(**settings())}, tmp_path / "model.pt")
    write_dictionary(tmp_path / "dict.fr.txt", SOURCE)
    write_dictionary(tmp_path / "dict.en.txt", TARGET)
    return tmp_path


def test_codes_for_each_side(data: Path) -> None:
    codes = data / "merges"
    codes.write_text("#version: 0.2\na b</w>\n", encoding="utf-8")
    _, tokenizer = load_fairseq_checkpoint(str(data / "model.pt"), str(data), codes=(codes, codes))
    assert len(tokenizer.encode_source([["ab", "ba"]])[0].ids) == 4
    _, tokenizer = load_fairseq_checkpoint(data / "model.pt", data, codes=codes)
    assert len(tokenizer.encode_target([["ab", "ba"]])[0].ids) == 4
    assert tokenizer.decode_target([7, 8, 2]) == ["word7", "word8"]
    _, tokenizer = load_fairseq_checkpoint(data / "model.pt", data, codes=False)
    assert len(tokenizer.encode_target([["ab", "ba"]])[0].ids) == 3


def test_what_is_wrong_is_said(data: Path) -> None:
    with pytest.raises(InvalidInputError, match=f"there is no folder {data / 'none'}"):
        load_fairseq_checkpoint(data / "model.pt", data / "none")
    with pytest.raises(InvalidInputError, match=f"there is no file {data / 'none.pt'}"):
        load_fairseq_checkpoint(data / "none.pt", data)
    (data / "dict.en.txt").rename(data / "dict.de.txt")
    with pytest.raises(InvalidInputError, match=r"found no dict\.en\.txt"):
        load_fairseq_checkpoint(data / "model.pt", data)
    torch.save({"model": weights(), "args": argparse.Namespace(**settings(target_lang=None))}, data / "model.pt")
    with pytest.raises(InvalidInputError, match="target_lang is None, expected the name of a language"):
        load_fairseq_checkpoint(data / "model.pt", data)

"""Checkpoints of real fairseq, loaded without it: the same logits, attention and encoder output."""

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from alignment.fairseq import load_fairseq_checkpoint
from captum_norm import InvalidInputError
from tests.alignment.fairseq import make_reference
from tests.alignment.fairseq.make_reference import CASES, PAD, Case, batch
from tests.alignment.fairseq.small import SOURCE, TARGET, settings, weights, write_dictionary


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.form}")
def test_model_computes_what_fairseq_computes(case: Case, reference: Path) -> None:
    same_as_fairseq(reference / f"{case.name}.pt", reference / case.name)


@pytest.mark.parametrize("program", ["train", "hydra_train"])
def test_checkpoint_of_a_training(program: str, fairseq_python: Path, tmp_path: Path) -> None:
    def run(*command: str) -> None:
        variables = os.environ | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "PYTHONWARNINGS": "ignore"}
        command = (str(fairseq_python), *command)
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]

    for language, symbols in (("fr", "abcdefghijkl"), ("en", "abcdefghijklmnopqrst")):
        lines = [" ".join(symbols[start:] + symbols[:start]) + "\n" for start in range(len(symbols))]
        (tmp_path / f"text.{language}").write_text("".join(lines[:12]), encoding="utf-8")
    texts = "--trainpref=text", "--validpref=text"
    run("-m", "fairseq_cli.preprocess", "--source-lang=fr", "--target-lang=en", *texts, "--destdir=data")
    run("-m", f"fairseq_cli.{program}", *TRAININGS[program].split())
    run(make_reference.__file__, str(tmp_path), "checkpoint_last.pt")
    same_as_fairseq(tmp_path / "checkpoint_last.pt", tmp_path / "data")


TRAININGS = {
    "train": """data --arch=transformer_iwslt_de_en --encoder-layers=2 --decoder-layers=2 --encoder-embed-dim=16
        --decoder-embed-dim=16 --encoder-attention-heads=2 --share-decoder-input-output-embed --optimizer=adam --lr=0.1
        --max-tokens=200 --max-update=2 --save-dir=. --cpu""",
    "hydra_train": """task=translation task.data=${hydra:runtime.cwd}/data task.source_lang=fr task.target_lang=en
        +model._name=transformer +model.encoder_layers=2 +model.decoder_layers=2 +model.encoder_embed_dim=16
        +model.decoder_embed_dim=16 +model.encoder_attention_heads=2 +model.decoder_attention_heads=4
        +model.activation_fn=gelu criterion=cross_entropy optimizer=adam lr_scheduler=fixed optimization.lr=[0.1]
        dataset.max_tokens=200 optimization.max_update=2 checkpoint.save_dir=${hydra:runtime.cwd} common.cpu=true
        distributed_training.distributed_world_size=1""",
}


def same_as_fairseq(checkpoint: Path, data: Path) -> None:
    """The model is what fairseq, which wrote the arrays beside the checkpoint, computes."""
    expected = {name: torch.from_numpy(array) for name, array in np.load(checkpoint.with_suffix(".npz")).items()}
    model: Any = load_fairseq_checkpoint(checkpoint, data, codes=False)[0]
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
    with pytest.raises(InvalidInputError, match=r"does not name its languages.*expected one pair in .*, found none"):
        load_fairseq_checkpoint(data / "model.pt", data)
    for pair in ("fr-de", "fr-en"):
        (data / f"train.{pair}.fr.idx").touch()
    with pytest.raises(InvalidInputError, match=r"expected one pair in .*, found fr-de, fr-en"):
        load_fairseq_checkpoint(data / "model.pt", data)

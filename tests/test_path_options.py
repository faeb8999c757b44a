"""Every option that takes a path, given one that the system refuses: one sentence, whichever the program."""

import os
from pathlib import Path

import pytest
import torch
import transformers

import alignment.cli
import captum_norm.cli
from tests.tiny import bert_config, save_tiny

MAINS = {"captum-norm": captum_norm.cli.main, "norm-align": alignment.cli.main}
REFUSED = [
    "captum-norm explain text --model LONG",
    "captum-norm explain text --model BERT --layouts LONG",
    *(f"captum-norm explain text --model BERT --out LONG.{suffix}" for suffix in ("csv", "json", "png", "html")),
    "captum-norm compare text --model BERT --out LONG.html",
    "captum-norm compare text --model BERT --scores LONG.csv",
    "captum-norm models --check LONG",
    "captum-norm models --out LONG.csv",
    "captum-norm demo --out LONG.png",
    "captum-norm analyze dispersion --model LONG --corpus text",
    "captum-norm analyze dispersion --model BERT --corpus LONG",
    "captum-norm analyze dispersion --model BERT --corpus text --out LONG",
    "captum-norm analyze dispersion --model BERT --corpus text --tokens LONG.parquet",
    "captum-norm analyze frequency --model BERT --corpus text --frequencies LONG",
    "norm-align extract LONG text",
    "norm-align extract text LONG",
    "norm-align extract text text --out LONG",
    "norm-align extract text text --model LONG",
    "norm-align extract text text --model LONG.pt --data .",
    "norm-align extract text text --model text.pt --data LONG",
    "norm-align extract text text --page LONG.html",
    "norm-align extract text text --page page.html --gold LONG --gold-base 0",
    "norm-align evaluate LONG text --gold-base 0",
    "norm-align evaluate text LONG --gold-base 0",
    "norm-align evaluate text text --gold-base 0 --source LONG",
    "norm-align sweep --out LONG",
    "norm-align sweep --corpus wpt03=LONG",
    "norm-align sweep --model LONG",
    "norm-align translate LONG",
    "norm-align translate text --model LONG",
    "norm-align translate text --page LONG.html",
]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    return str(save_tiny(transformers.BertModel(bert_config()), tmp_path_factory.mktemp("bert")))


@pytest.mark.parametrize("command", REFUSED)
def test_a_name_longer_than_the_system_has_them_is_one_sentence(
    command: str, bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("0-0\n")
    program, *words = command.replace("BERT", bert).replace("LONG", "x" * 300).split()
    assert MAINS[program](words) == 2
    output, error = capfd.readouterr()
    assert output == ""
    assert error.startswith(f"{program}: error: ")
    assert error.count("\n") == 1
    assert "File name too long" in error
    assert os.listdir() == ["text"]  # noqa: PTH208

"""Folders with tiny models and tokenizers, and a terminal without colours."""

from pathlib import Path

import pytest
import torch
import transformers

from tests.tiny import WORDS, bert_config, save_tiny


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    return str(save_tiny(transformers.BertModel(bert_config()), tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_embd=8, n_layer=3, n_head=2, n_positions=12, bos_token_id=2, eos_token_id=3
    )
    return str(save_tiny(transformers.GPT2LMHeadModel(config), tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(bert_config())
    return str(save_tiny(model, tmp_path_factory.mktemp("classifier")))


@pytest.fixture
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

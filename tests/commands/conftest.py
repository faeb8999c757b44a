"""Folders with tiny models and tokenizers, and a terminal without colours."""

from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save_tiny(tiny.bert(), tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save_tiny(tiny.gpt2(3, bos_token_id=2, eos_token_id=3), tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save_tiny(tiny.classifier(), tmp_path_factory.mktemp("classifier")))


@pytest.fixture
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

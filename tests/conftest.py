"""Fixtures of the whole test suite."""

from pathlib import Path

import pytest

from tests.fairseq_environment import UnavailableError, fairseq_python


@pytest.fixture(scope="session", name="fairseq_python")
def ready_fairseq_python() -> Path:
    """An interpreter with real fairseq; tests skip where there can be none."""
    try:
        return fairseq_python()
    except UnavailableError as reason:
        pytest.skip(str(reason))

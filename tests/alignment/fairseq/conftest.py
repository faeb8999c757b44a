"""What real fairseq writes and computes, made once a session."""

import os
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from tests.alignment.fairseq import make_reference


@pytest.fixture(scope="session")
def reference(fairseq_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that ``make_reference.py`` fills; the workers of one session share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fairseq-reference"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = tmp_path_factory.mktemp("reference")
            command = [str(fairseq_python), make_reference.__file__, str(unfinished)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
            unfinished.rename(folder)
    return folder

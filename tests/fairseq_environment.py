"""An interpreter with real fairseq, in an environment of its own that is made once and kept in the user's cache.

fairseq cannot live beside this project: it pins what nothing else can use, and its torchaudio breaks transformers on
a torch for CPUs. Set ``CAPTUM_NORM_FAIRSEQ_PYTHON`` to an interpreter that has it to make none. ``make fairseq`` runs
this file on a Python without any package.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

READY = "CAPTUM_NORM_FAIRSEQ_PYTHON"

REQUIREMENTS = Path(__file__).parents[1] / "benchmarks" / "translation" / "requirements.txt"
# What pip installs, in this order: fairseq is compiled against what comes before it, and goes without its dependencies.
RECIPE = (
    ("torch==2.13.0", "numpy>=2", "cython", "setuptools<81", "wheel"),
    ("--no-deps", "--no-build-isolation", "fairseq-fixed==0.12.3.1"),
    ("--requirement", str(REQUIREMENTS)),
)
COMPILER = "g++"
# What pip says when it cannot reach an index.
OFFLINE = ("connection broken by", "Max retries exceeded", "Failed to establish a new connection", "ConnectionError")


class UnavailableError(Exception):
    """Why no environment can be made on this machine."""


def fairseq_python() -> Path:
    """The interpreter; the first call on a machine takes some minutes, calls in other processes wait for it.

    Raises:
        UnavailableError: there is no compiler, or no network.
        RuntimeError: the installation failed for another reason.
    """
    ready = os.environ.get(READY)
    if ready:
        return Path(ready)
    import fcntl  # Windows has none

    environment = _cache() / f"fairseq-{_key()}"
    python = environment / "bin" / "python"
    complete = environment / "complete"
    environment.parent.mkdir(parents=True, exist_ok=True)
    with environment.with_suffix(".lock").open("w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            _make(environment, python)
            complete.touch()
    return python


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "captum-norm"


def _key() -> str:
    recipe = (RECIPE[:-1], REQUIREMENTS.read_bytes(), sys.version_info[:2], sys.base_prefix)
    return hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]


def _make(environment: Path, python: Path) -> None:
    if shutil.which(COMPILER) is None:
        raise UnavailableError(f"fairseq must be compiled, and there is no {COMPILER}")
    _run(sys.executable, "-m", "venv", "--clear", str(environment))
    for packages in RECIPE:
        _run(str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--retries", "2", *packages)


def _run(*command: str) -> None:
    # The project's constraints are for other versions of the same packages.
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_CONSTRAINT")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stdout + done.stderr
        if any(sign in said for sign in OFFLINE):
            raise UnavailableError("fairseq must be installed, and no package index can be reached")
        raise RuntimeError(f"{' '.join(command)} failed:\n{said[-4000:]}")


if __name__ == "__main__":
    fairseq_python()

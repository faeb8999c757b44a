"""The documentation builds without a warning and has every public name."""

import subprocess
import sys
from pathlib import Path

from sphinx.util.inventory import InventoryFile

import alignment
import captum_norm
from captum_norm import comparison, evaluation, functional, models, runs

ROOT = Path(__file__).parents[1]


def test_docs_build_without_warnings_and_have_every_public_name(tmp_path: Path) -> None:
    # A process of its own: Sphinx changes global state, and its extensions warn about each other.
    build = subprocess.run(
        [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", ROOT / "docs", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    inventory = InventoryFile.loads((tmp_path / "objects.inv").read_bytes(), uri="").data
    documented = {
        name.rpartition(".")[2] for domain, names in inventory.items() if domain.startswith("py:") for name in names
    }
    packages = (alignment, captum_norm, comparison, evaluation, functional, models, runs)
    public = {name for package in packages for name in package.__all__}
    assert public - documented == set()

"""The documentation builds without a warning, runs its notebooks, has every public name and needs no network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

import alignment
import captum_norm
from captum_norm import functional, models, runs, show
from captum_norm.lab import comparison, evaluation

ROOT = Path(__file__).parents[1]


# What a browser loads for a page, unlike the links that a reader follows.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'> ]+
    |<link\b(?=[^>]*\brel=["']?(?:stylesheet|icon|preload|modulepreload))[^>]*\bhref=["']?(?:https?:)?//[^"'> ]+
    |(?:@import\s+|url\(\s*)["']?(?:https?:)?//[^"') ]+""",
    re.VERBOSE,
)


@pytest.mark.long
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
    packages = (alignment, captum_norm, comparison, evaluation, functional, models, runs, show)
    public = {name for package in packages for name in package.__all__}
    assert public - documented == set()
    files = [file for file in tmp_path.rglob("*") if file.suffix in {".html", ".css"}]
    loaded = {found[0] for file in files for found in LOADED.finditer(file.read_text(encoding="utf-8"))}
    assert loaded == set()
    formulas = (tmp_path / "methods.html").read_text(encoding="utf-8")
    assert formulas.count("<math ") > 100
    notebook = (tmp_path / "tutorials" / "weights-and-norms.html").read_text(encoding="utf-8")
    assert len(re.findall(r'<img [^>]*src="\.\./_images/', notebook)) >= 3

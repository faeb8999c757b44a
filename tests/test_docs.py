"""The documentation builds without a warning, runs its notebooks, has every public name and needs no network."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

import alignment
import captum_norm
from benchmarks import alignment_error, faithfulness
from captum_norm import functional, models, runs, show
from captum_norm.lab import comparison, evaluation
from tests.browser.visits import started

ROOT = Path(__file__).parents[1]
METHODS = ("methods", "methods-further", "methods-computed")
"""The pages with formulas."""


# What a browser loads for a page, unlike the links that a reader follows.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'> ]+
    |<link\b(?=[^>]*\brel=["']?(?:stylesheet|icon|preload|modulepreload))[^>]*\bhref=["']?(?:https?:)?//[^"'> ]+
    |(?:@import\s+|url\(\s*)["']?(?:https?:)?//[^"') ]+""",
    re.VERBOSE,
)


def table(text: str) -> tuple[list[str], list[str]]:
    """The head and the rows of the first table in a text."""
    lines = text[text.index("\n|") :].lstrip().partition("\n\n")[0].splitlines()
    return lines[:2], lines[2:]


def test_first_pages_have_the_rows_of_their_tables() -> None:
    """The commands that write both would write the first page of the numbers in the second, and the same words."""
    docs = ROOT / "docs"
    first, tables = ((docs / f"alignment-error{end}.md").read_text(encoding="utf-8") for end in ("", "-tables"))
    assert tables.startswith(f"{alignment_error.TABLES}\n## All texts\n\n{alignment_error.OVERVIEW}\n| model |")
    lexical = re.search(r"^## Corpus statistics\n.*?\n(?=\n## )", first, re.MULTILINE | re.DOTALL)
    assert lexical is not None
    (header, _), overview = table(tables)
    cells = [line.strip("| ").split(" | ") for line in (header, *overview)]
    assert first == alignment_error.first_page(lexical[0], cells[0], cells[1:])
    first, tables = ((docs / f"which-method{end}.md").read_text(encoding="utf-8") for end in ("", "-tables"))
    assert tables.startswith(faithfulness.page(faithfulness.TABLES, "## All methods", "|  | question |")[:-1])
    head, overview = table(tables)
    shown = [line for line in overview if line[2:].partition(" |")[0] in faithfulness.SHOWN]
    (measured,) = re.findall("^Measured on .*", tables, re.MULTILINE)
    text = "\n".join([*head, *shown])
    assert first == faithfulness.page(faithfulness.INTRODUCTION, text, measured, faithfulness.READ_ON)


def build(folder: Path, *options: str) -> Path:
    """Build the site without a warning."""
    # A process of its own: Sphinx changes global state, and its extensions warn about each other.
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", *options]
    done = subprocess.run([*command, ROOT / "docs", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, whose notebooks are not run."""
    # Which lexer a notebook's cells want is known once it has run.
    settings = {"nb_execution_mode": "off", "suppress_warnings": "myst-nb.lexer"}
    return build(tmp_path_factory.mktemp("site"), *(f"--define={name}={value}" for name, value in settings.items()))


@pytest.mark.long
@pytest.mark.rest
def test_the_circuit_is_found_and_taken_out(tmp_path: Path) -> None:
    """Notebooks run; each of two kinds of heads does one half of the work, and as many other heads do none of it."""
    built = build(tmp_path)
    notebook = (built / "tutorials" / "weights-and-norms.html").read_text(encoding="utf-8")
    assert len(re.findall(r'<img [^>]*src="\.\./_images/', notebook)) >= 3
    text = (built / "tutorials" / "circuit.html").read_text(encoding="utf-8")
    number = r"(-?\d+\.\d)"
    line = f": {number}; without the name movers {number}, without the negative one {number}, without others {number}"
    there, gives = ([float(part) for part in found.groups()] for found in re.finditer(line, text))
    for (whole, *parts, control), taken in ((there, 0), (gives, 1)):
        assert abs(parts[taken]) < 0.1 * whole
        assert parts[1 - taken] > 0.9 * whole
        assert control == pytest.approx(whole, rel=0.02)


@pytest.mark.long
def test_no_page_is_wider_than_the_window(built: Path) -> None:
    with started() as browser:
        if browser is None:
            pytest.skip("there is no Chromium")
        page = browser.new_page()
        too_wide = []
        files = sorted(built.rglob("*.html"))
        reference = [file for file in files if file.parent.name == "reference"]
        # The pages of the reference are of a few kinds.
        for file in (file for file in files if file not in reference or file in reference[::16]):
            page.goto(file.as_uri())
            for width in (1280, 1400):
                page.set_viewport_size({"width": width, "height": 900})
                if page.evaluate("document.documentElement.scrollWidth") > width:
                    too_wide.append(f"{file.relative_to(built)} at {width}")
        assert too_wide == []


@pytest.mark.long
def test_docs_have_every_public_name_and_need_no_network(built: Path) -> None:
    inventory = InventoryFile.loads((built / "objects.inv").read_bytes(), uri="").data
    documented = {
        name.rpartition(".")[2] for domain, names in inventory.items() if domain.startswith("py:") for name in names
    }
    packages = (alignment, captum_norm, comparison, evaluation, functional, models, runs, show)
    public = {name for package in packages for name in package.__all__}
    assert public - documented == set()
    files = [file for file in built.rglob("*") if file.suffix in {".html", ".css"}]
    loaded = {found[0] for file in files for found in LOADED.finditer(file.read_text(encoding="utf-8"))}
    assert loaded == set()
    formulas = [(built / f"{page}.html").read_text(encoding="utf-8") for page in METHODS]
    assert sum(page.count("<math ") for page in formulas) > 100
    tutorials = {page.stem for page in (ROOT / "docs" / "tutorials").glob("*.md")}
    downloads = {file.stem: json.loads(file.read_bytes()) for file in (built / "_downloads").rglob("*.ipynb")}
    assert downloads.keys() == tutorials
    assert all(any(cell["cell_type"] == "code" for cell in page["cells"]) for page in downloads.values())

"""Imports go one way: from the mathematics to the models, the recording, the methods and what is built on them."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "captum_norm"

FOUNDATION = {"arguments", "bars", "characters", "errors", "files", "functional", "memory", "texts"}
METHODS = FOUNDATION | {"aggregation", "attr", "maps", "models", "recording"}
RESULTS = METHODS | {"loading", "runs", "visualization"}
PUBLIC = RESULTS | {"analysis", "comparison", "evaluation", "methods"}

# What each module or package directly under captum_norm may import, besides itself, from the others.
ALLOWED = {
    "arguments": {"errors"},
    "bars": set(),
    "characters": set(),
    "errors": set(),
    "files": {"errors"},
    "functional": set(),
    "memory": set(),
    "methods": set(),
    "texts": {"errors"},
    "versions": {"__init__"},
    "aggregation": FOUNDATION,
    "maps": FOUNDATION,
    "models": FOUNDATION,
    "loading": FOUNDATION,
    "identity": {"errors", "models"},
    "runs": {"errors", "files"},
    "recording": FOUNDATION | {"models"},
    "attr": FOUNDATION | {"aggregation", "maps", "models", "recording"},
    "visualization": METHODS,
    "analysis": RESULTS | {"identity", "versions"},
    "comparison": RESULTS | {"evaluation", "methods", "versions"},
    "evaluation": RESULTS,
    "__init__": PUBLIC,
    "demo": PUBLIC,
    "commands": PUBLIC | {"__init__", "demo", "versions"},
    "cli": PUBLIC | {"__init__", "commands", "demo"},
}

# Where less than every dependency may be imported.
THIRD_PARTY = {
    "arguments": set(),
    "bars": {"tqdm"},
    "characters": set(),
    "errors": set(),
    "files": set(),
    "functional": {"torch"},
    "memory": {"torch"},
    "methods": set(),
    "aggregation": {"torch"},
    "maps": {"torch"},
    "runs": {"filelock"},
    "texts": set(),
}

# The translation side and the libraries whose models are recognised by their structure alone.
NEVER = {"alignment", "fairseq"}


def unit(path: Path) -> str:
    """The module or package directly under captum_norm to which a file belongs."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.Module) -> Iterator[str]:
    """The full names that a module imports, wherever in it; a relative import begins with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def breaches(importer: str, names: Iterator[str]) -> Iterator[str]:
    """Those of the imported names that the unit ``importer`` may not import."""
    for name in names:
        package, _, rest = name.partition(".")
        if package == "captum_norm":
            part = rest.partition(".")[0]
            source = part if part in ALLOWED else "__init__"
            allowed = source == importer or source in ALLOWED[importer]
        elif package in sys.stdlib_module_names:
            allowed = True
        else:
            allowed = package not in NEVER | {""} and package in THIRD_PARTY.get(importer, {package})
        if not allowed:
            yield name


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_module_imports_only_what_its_place_allows(path: Path) -> None:
    assert unit(path) in ALLOWED, "give the new module its place in the table"
    assert list(breaches(unit(path), imported(ast.parse(path.read_text(encoding="utf-8"))))) == []


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("functional", "from captum_norm import errors"),
        ("functional", "import numpy"),
        ("models", "from captum_norm.recording import record"),
        ("models", "from captum_norm import NormAttribution"),
        ("recording", "def late():\n    import captum_norm.attr.base"),
        ("attr", "from captum_norm import visualization"),
        ("attr", "from .base import Base"),
        ("__init__", "from captum_norm.cli import main"),
        ("cli", "from alignment import WordAligner"),
        ("models", "import fairseq.models"),
    ],
)
def test_breach_is_seen(importer: str, statement: str) -> None:
    assert len(list(breaches(importer, imported(ast.parse(statement))))) == 1

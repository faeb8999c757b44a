"""Which file may import which: no circles, one direction, lab and alignment on public names, no private ones."""

import ast
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("captum_norm", "alignment")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
"""Every file by its module's name."""

LAYERS = {
    "captum_norm": (
        {"errors", "functional", "versions"},
        {"checks", "memory"},
        {"text"},
        {"bars"},
        {"results", "runs"},
        {"loading", "models"},
        {"forward"},
        {"attr"},
        {"generation", "methods"},
        {"lab"},
        {"explanation"},
        {"show"},
        {"__init__"},
        {"demo"},
        {"commands"},
        {"cli"},
    ),
    "alignment": (
        {"identity", "tokenization", "word_maps"},
        {"inspection", "lexicon", "links", "markup", "normalization", "subwords"},
        {"alignments", "decoding", "documents", "formats", "symmetrization", "tags"},
        {"aer", "corpora", "fairseq", "huggingface", "pipeline", "selection"},
        {"recipes", "teacher_forcing"},
        {"aligner", "translation"},
        {"encoder", "gradients", "inspector", "matrices"},
        {"sweep"},
        {"pages"},
        {"__init__"},
        {"commands"},
        {"cli"},
    ),
}
"""The modules and packages of each package; each may import those of the sets before its own."""

THIRD_PARTY: dict[str, dict[str, set[str]]] = {
    "captum_norm": {
        "bars": {"tqdm"},
        "checks": set(),
        "errors": set(),
        "functional": {"torch"},
        "memory": {"torch"},
        "methods": set(),
        "results": {"matplotlib", "pandas", "safetensors", "torch"},
        "runs": {"filelock", "numpy", "ray", "torch", "tqdm"},
        "text": {"fsspec", "regex", "torch"},
        "versions": set(),
    },
    "alignment": {
        "aer": {"sacrebleu"},
        "corpora": set(),
        "decoding": {"numpy"},
        "documents": {"numpy"},
        "formats": {"numpy"},
        "huggingface": {"transformers"},
        "inspection": {"numpy"},
        "lexicon": {"numpy"},
        "links": {"numpy"},
        "markup": set(),
        "normalization": {"sacremoses"},
        "pipeline": {"tqdm"},
        "recipes": {"numpy"},
        "selection": set(),
        "subwords": {"numpy"},
        "symmetrization": set(),
        "tags": set(),
        "tokenization": set(),
        "word_maps": {"numpy"},
    },
}
"""What some of them may import of other distributions; the others may import all but those in NEVER.

Those of alignment read, write, decode and score without a model.
"""

NO_TORCH = ("InvalidInputError", "bars", "checks", "results.tables", "runs", "text")
"""What these may import of captum_norm."""

NEVER = {"", "alignment", "fairseq"}
"""Relative names, the translation side, and a library whose models are recognised by their structure alone."""


def imported(source: str) -> Iterator[str]:
    """The full names that a file imports: inside functions, and for type checkers alone, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_of(path: Path) -> Iterator[str]:
    """The full names that a file imports; a package's stub says which it imports when they are asked for."""
    yield from imported(path.read_text(encoding="utf-8"))
    stub = path.with_suffix(".pyi")
    if stub.exists():
        yield from (f"{path.parent.name}{name}" for name in imported(stub.read_text(encoding="utf-8")))


def module_of(name: str) -> str | None:
    """The module of ours that an imported name is, or comes from."""
    while name and name not in FILES:
        name = name.rpartition(".")[0]
    return name or None


def unit_of(name: str) -> str:
    """The module or package directly under its package to which an imported name of ours belongs."""
    return [*(module_of(name) or name).split("."), "__init__"][1]


def breaks_layers(unit: str, name: str, layers: Sequence[set[str]]) -> bool:
    """Whether a module or package may not import a name of its own distribution."""
    other = unit_of(name)
    return other != unit and not any(other in layer for layer in layers[: layer_of(unit, layers)])


def layer_of(unit: str, layers: Sequence[set[str]]) -> int:
    """The number of the layer of a module or package."""
    found = [number for number, layer in enumerate(layers) if unit in layer]
    assert found, f"give {unit} its place in the layers"
    return found[0]


def is_private(path: Path, name: str) -> bool:
    """Whether an imported name of ours, or a module on the way to it, is private to another folder than the file's."""
    if name.partition(".")[0] not in PACKAGES:
        return False
    parts = name.split(".")
    hidden = [place for place, part in enumerate(parts) if part.startswith("_") and not part.endswith("__")]
    return any(FILES[str(module_of(".".join(parts[:place])))].parent != path.parent for place in hidden)


def place_of(path: Path) -> tuple[str, str]:
    """The package of a file, and the module or package directly under it."""
    package, unit, *_ = path.relative_to(ROOT).parts
    return package, unit.removesuffix(".py")


def is_forbidden(path: Path, name: str) -> bool:
    """Whether a file may not import a name."""
    (ours, unit), (package, _, rest) = place_of(path), name.partition(".")
    if package == ours:
        return breaks_layers(unit, name, LAYERS[ours])
    allowed = THIRD_PARTY[ours].get(unit)
    if package == "captum_norm":
        return not is_public(name) or (allowed is not None and not rest.startswith(NO_TORCH))
    return package not in sys.stdlib_module_names and (
        package in NEVER or package not in ({package} if allowed is None else allowed)
    )


def documented() -> tuple[set[str], set[str]]:
    """The modules of captum_norm all of whose names the reference documents, and its single names."""
    pages = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
    modules = re.findall(r"^\.\. automodule:: (captum_norm[\w.]*)\n   :members:", pages, re.MULTILINE)
    return set(modules), set(re.findall(r"^\.\. auto\w+:: (captum_norm\.[\w.]+)", pages, re.MULTILINE))


@cache
def names_of(module: str) -> set[str]:
    """The public names of a module: those of ``__all__`` where it has one, else those that it has if documented."""
    found = import_module(module)
    exported = getattr(found, "__all__", vars(found) if module in MODULES else ())
    public = {name for name in exported if not name.startswith("_")}
    return public | ({"__version__"} if module == "captum_norm" else set())


MODULES, NAMES = documented()


def is_public(name: str) -> bool:
    """Whether a name of captum_norm is in its module's ``__all__`` or in the reference; a module, if it has such."""
    module = module_of(name) or ""
    if name == module:
        return bool(names_of(module))
    return name in NAMES or name.removeprefix(f"{module}.") in names_of(module)


EXPORTED = {f"captum_norm{name}" for name in imported((ROOT / "captum_norm/__init__.pyi").read_text(encoding="utf-8"))}
"""The names of the top package, where they come from: what it exports itself imports them from there."""


def reaches_inside(path: Path, name: str) -> bool:
    """Whether a file of lab, which is built on public names as a package of somebody else is, imports another one."""
    inside = (
        place_of(path) == ("captum_norm", "lab")
        and name.startswith("captum_norm.")
        and not name.startswith("captum_norm.lab")
    )
    return inside and name not in EXPORTED and not is_public(name)


def breaches() -> Iterator[str]:
    """What files import and may not."""
    for path in FILES.values():
        for name in imports_of(path):
            if is_private(path, name) or is_forbidden(path, name) or reaches_inside(path, name):
                yield f"{path.relative_to(ROOT)}: {name}"


def test_no_circle_of_files() -> None:
    graph = {module: {module_of(name) for name in imports_of(path)} - {None, module} for module, path in FILES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"files import each other in a circle: {' ← '.join(error.args[1])}")


def test_files_import_what_their_place_allows() -> None:
    assert sorted(breaches()) == []


@pytest.mark.parametrize(
    ("check", "file", "statement"),
    [
        (is_forbidden, "captum_norm/functional/vectors.py", "import numpy"),
        (is_forbidden, "captum_norm/models/blocks.py", "from captum_norm import NormAttribution"),
        (is_forbidden, "captum_norm/models/blocks.py", "import fairseq.models"),
        (is_forbidden, "captum_norm/forward/recording.py", "def late():\n    import captum_norm.attr.norms"),
        (is_forbidden, "captum_norm/attr/norms.py", "from .alti import ALTI"),
        (is_forbidden, "captum_norm/cli.py", "from alignment import WordAligner"),
        (is_forbidden, "alignment/links.py", "from alignment.aligner import WordAligner"),
        (is_forbidden, "alignment/formats/gold.py", "import torch"),
        (is_forbidden, "alignment/recipes.py", "from captum_norm import NormAttribution"),
        (is_forbidden, "alignment/aligner.py", "from captum_norm.attr.norms import NormAttribution"),
        (is_forbidden, "alignment/aligner.py", "from captum_norm.models.hooks import evaluating"),
        (is_forbidden, "alignment/sweep.py", "from captum_norm.functional.contributions import spearman"),
        (is_forbidden, "alignment/commands/sweep.py", "from captum_norm.bars import _asked"),
        (is_private, "captum_norm/lab/comparison/run.py", "from captum_norm.models.outputs import _labels"),
        (reaches_inside, "captum_norm/lab/comparison/run.py", "from captum_norm.models.inputs import bind_inputs"),
        (reaches_inside, "captum_norm/lab/comparison/run.py", "import captum_norm.models.hooks"),
    ],
)
def test_a_breach_is_seen(check: Callable[[Path, str], bool], file: str, statement: str) -> None:
    assert [check(ROOT / file, name) for name in imported(statement)] == [True]

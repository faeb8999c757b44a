"""What modules may import: those of the base no torch, and none what is private to captum_norm."""

import ast
import sys
from pathlib import Path

import pytest

from tests.test_imports import imported

PACKAGE = Path(__file__).parents[2] / "alignment"

FOUNDATION = {"captum_norm.InvalidInputError", "captum_norm.texts"}
ALLOWED = {
    "links.py": set[str](),
    "formats": {"alignment.links", "captum_norm.files"},
    "symmetrization.py": {"alignment.links"},
    "aer.py": {"alignment.links", "alignment.formats", "sacrebleu"},
    "corpora.py": {"alignment.links", "alignment.formats"},
    "plausibility.py": {"alignment.aer", "alignment.links"},
    "significance.py": {"alignment.aer", "alignment.links", "sacrebleu"},
    "pipeline": {
        "alignment.links",
        "alignment.formats",
        "captum_norm.bars",
        "captum_norm.characters",
        "captum_norm.files",
        "captum_norm.runs",
        "tqdm",
    },
    "word_maps.py": {"numpy"},
    "decoding.py": {"alignment.links", "alignment.word_maps", "numpy"},
    "pieces.py": set[str](),
    "tokenization.py": set[str](),
    "settings.py": {"alignment.tokenization"},
    "normalization.py": {"alignment.tokenization", "sacremoses"},
    "huggingface.py": {
        "alignment.formats",
        "alignment.pieces",
        "alignment.subwords",
        "alignment.tokenization",
        "captum_norm.identity",
        "transformers",
    },
    "recipes.py": {"alignment.decoding", "alignment.links", "alignment.settings", "alignment.word_maps", "numpy"},
    "selection.py": {"alignment.decoding", "alignment.links", "alignment.settings", "alignment.word_maps"},
    "subwords.py": {"alignment.pieces", "alignment.word_maps", "numpy"},
}
MODULES = [
    path for unit in ALLOWED for path in sorted([PACKAGE / unit, *(PACKAGE / unit).glob("*.py")]) if path.is_file()
]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_module_imports_only_what_its_place_allows(path: Path) -> None:
    unit = path.relative_to(PACKAGE).parts[0]
    allowed = ALLOWED[unit] | FOUNDATION | {f"alignment.{unit}"}
    for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        inside = any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)
        assert inside or name.partition(".")[0] in sys.stdlib_module_names, name


# Where captum_norm keeps its methods and what they stand on; they are had from the package itself.
INSIDE = {"aggregation", "attr", "maps", "recording"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_methods_are_used_by_their_public_names(path: Path) -> None:
    for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        package, *parts = name.split(".")
        if package == "captum_norm":
            assert not INSIDE.intersection(parts[:1]), name
            assert not any(part.startswith("_") and part != "__version__" for part in parts), name

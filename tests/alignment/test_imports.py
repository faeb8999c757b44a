"""What files of ``alignment`` may import: one direction, a base without torch, and public names of captum_norm."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_imports import FILES, ROOT, breaks_layers, imported, imports_of, is_public

PACKAGE = ROOT / "alignment"

LAYERS = (
    {"tokenization", "word_maps"},
    {"inspection", "lexicon", "links", "markup", "normalization", "subwords"},
    {"alignments", "decoding", "formats", "symmetrization", "tags"},
    {"aer", "corpora", "fairseq", "huggingface", "pipeline", "selection"},
    {"recipes", "teacher_forcing"},
    {"aligner", "translation"},
    {"gradients", "inspector"},
    {"sweep"},
    {"pages"},
    {"__init__"},
    {"commands"},
    {"cli"},
)
"""The modules and packages of alignment; each may import those of the sets before its own."""

WITHOUT_TORCH = {
    "aer": {"sacrebleu"},
    "corpora": set(),
    "decoding": {"numpy"},
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
}
"""Those that read, write, decode and score without a model, and which other distributions they may import."""

NO_TORCH = {"InvalidInputError", "bars", "checks", "identity", "results.tables", "runs", "text"}
"""What they may import of captum_norm."""


def is_forbidden(path: Path, name: str) -> bool:
    """Whether a file of alignment may not import a name."""
    package, _, rest = name.partition(".")
    unit = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if package == "alignment":
        return breaks_layers(unit, name, LAYERS)
    if package == "captum_norm":
        return not is_public(name) or (unit in WITHOUT_TORCH and not rest.startswith(tuple(NO_TORCH)))
    return package not in sys.stdlib_module_names and package not in WITHOUT_TORCH.get(unit, {package})


def breaches() -> Iterator[str]:
    """What files import and may not."""
    for path in FILES.values():
        if path.is_relative_to(PACKAGE):
            for name in imports_of(path):
                if is_forbidden(path, name):
                    yield f"{path.relative_to(PACKAGE)}: {name}"


def test_files_import_what_their_place_allows() -> None:
    assert sorted(breaches()) == []


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("links.py", "from alignment.aligner import WordAligner"),
        ("formats/gold.py", "import torch"),
        ("recipes.py", "from captum_norm import NormAttribution"),
        ("aligner.py", "from captum_norm.attr.norms import NormAttribution"),
        ("aligner.py", "from captum_norm.models.hooks import evaluating"),
        ("sweep.py", "from captum_norm.functional.contributions import spearman"),
        ("commands/sweep.py", "from captum_norm.bars import _asked"),
    ],
)
def test_forbidden_import_is_seen(file: str, statement: str) -> None:
    assert [is_forbidden(PACKAGE / file, name) for name in imported(statement)] == [True]

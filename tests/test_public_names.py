"""The packages' names: all there, and those that need torch loaded when they are asked for."""

import subprocess
import sys
from types import ModuleType

import pytest

import alignment
import captum_norm

PACKAGES = [captum_norm, alignment]
HEAVY = {"captum", "matplotlib", "pandas", "torch", "transformers"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_there_and_listed(package: ModuleType) -> None:
    names = package.__all__
    assert len(set(names)) == len(names)
    assert set(names) <= set(dir(package))
    for name in names:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="attribute no_such_name"):
        package.no_such_name  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_the_top_level_is_a_first_page(package: ModuleType) -> None:
    assert len(package.__all__) <= 31
    fixed = {"NormAttribution", "AttentionBlockAttribution"} if package is captum_norm else {"WordAligner", "AER"}
    assert fixed <= set(package.__all__)


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import captum_norm", False),
        ("from captum_norm import InvalidInputError, __version__", False),
        pytest.param("from captum_norm import NormAttribution", True, marks=pytest.mark.long),
        ("from alignment import AER, RECIPES, HuggingFaceTokenizer, load_alibi, read_gold", False),
        pytest.param("from alignment import WordAligner", True, marks=pytest.mark.long),
    ],
)
def test_torch_is_loaded_by_what_needs_it(statement: str, heavy: bool) -> None:
    program = f"import sys; {statement}; print(not {HEAVY}.isdisjoint(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{heavy}\n"

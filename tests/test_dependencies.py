"""Each lower bound is a version that the tests are run with, and no page of the documentation names another."""

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.lowest_versions import ROOT, requirements
from tests.versions import pinned

DIRECT = [Requirement(line) for line in requirements()]


def bounds() -> dict[str, Version]:
    found: dict[str, Version] = {}
    for requirement in DIRECT:
        (specifier,) = requirement.specifier
        assert specifier.operator == ">=", requirement
        found[canonicalize_name(requirement.name)] = Version(specifier.version)
    return found


def test_the_versions_of_the_checks_fit_the_bounds() -> None:
    lowest = pinned("constraints-lowest.txt")
    assert {name: lowest[name] for name in bounds()} == bounds()
    versions = pinned("constraints.txt")
    assert [name for name, bound in bounds().items() if versions[name] < bound] == []


def test_the_readme_has_the_bounds() -> None:
    names = {"PyTorch": "torch", "transformers": "transformers", "Captum": "captum"}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, distribution in names.items():
        assert f"{name} ≥ {bounds()[distribution]}" in readme

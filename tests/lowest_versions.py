"""The lower bounds in pyproject.toml as constraints of pip: ``python -m tests.lowest_versions`` prints them."""

import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]


def requirements() -> list[str]:
    """What the tests run with by pyproject.toml: dependencies, extras, what builds the package, three groups.

    Not the package of models, which is that of this repository.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = (project["dependency-groups"][name] for name in ("docs", "ecosystem", "test"))
    extras = project["project"]["optional-dependencies"].values()
    found = [*project["build-system"]["requires"], *project["project"]["dependencies"], *chain(*extras, *groups)]
    return [requirement for requirement in found if not requirement.startswith("captum-norm-models")]


if __name__ == "__main__":
    for requirement in requirements():
        plain = re.sub(r"\[.*\]", "", requirement)  # constraints have no extras
        sys.stdout.write(f"{plain.replace('>=', '==')}\n")

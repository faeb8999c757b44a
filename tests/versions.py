"""The versions that the checks run with, and those that tests need."""

from functools import cache
from importlib.metadata import version

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.lowest_versions import ROOT


@cache
def pinned(constraints: str = "constraints.txt") -> dict[str, Version]:
    """The versions that a file of constraints pins, by package."""
    lines = (ROOT / constraints).read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines)
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def older(lowest: str) -> bool:
    """Whether transformers is older than this version."""
    return Version(version("transformers")) < Version(lowest)


def since(lowest: str, why: str) -> pytest.MarkDecorator:
    """Skip a test where transformers is older than this version."""
    return pytest.mark.skipif(older(lowest), reason=f"transformers before {lowest}: {why}")

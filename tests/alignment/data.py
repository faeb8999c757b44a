"""Data sets that may not lie in the repository: beside it in ``shared/data``, or the tests that need them skip."""

from pathlib import Path

import pytest

DATA = Path(__file__).parents[3] / "shared" / "data"


def needs(folder: str) -> pytest.MarkDecorator:
    """Skips a test where a data set is not there."""
    return pytest.mark.skipif(not (DATA / folder).is_dir(), reason=f"needs the data set {DATA / folder}")


def lines(path: str) -> list[str]:
    """The lines of a data file, without their ends."""
    return (DATA / path).read_text(encoding="utf-8").removesuffix("\n").split("\n")

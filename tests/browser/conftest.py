"""One Chromium for the tests of this folder; each test's pages must be without fault."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser.visits import VARIABLE, Visits, started


# Not for the whole session: while Playwright runs, its thread has an event loop, and others cannot start one.
@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    with started() as browser:
        if browser is None:
            reason = f"there is no Chromium on PATH; install it, or name one in {VARIABLE}"
            if os.environ.get("CI"):
                pytest.fail(reason)
            pytest.skip(reason)
        yield browser


@pytest.fixture
def visit(chromium: Browser, tmp_path: Path) -> Iterator[Visits]:
    """Opens pages; at the end of the test none may have logged, thrown or requested anything."""
    visits = Visits(chromium, tmp_path)
    yield visits
    visits.close()
    assert visits.faults == []

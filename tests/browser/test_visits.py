"""The watch on pages sees what it is there to see."""

import time
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser.visits import Visits, violations

POLICY = "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'\">"
FAULTS = {
    "console.error('a')": "error in the console: a",
    "console.warn('a')": "warning in the console: a",
    "setTimeout(() => { throw new Error('a') })": "thrown: a",
    "fetch('https://example.org/a').catch(() => 0)": "request: https://example.org/a",
    "new Image().src = 'file:///etc/a.png'": "request: file:///etc/a.png",
    "alert('a')": "dialog: a",
    "window.open('https://example.org/')": "popup: ",
}


@pytest.mark.parametrize("script", FAULTS)
def test_faults_are_noticed(chromium: Browser, tmp_path: Path, script: str) -> None:
    visits = Visits(chromium, tmp_path)
    page = visits(f"<!doctype html><title>a</title><script>{script}</script>")

    def noticed() -> bool:
        return any(fault.startswith(FAULTS[script]) for fault in visits.faults)

    # The browser reports a popup only once it has its window, which takes long on a busy machine.
    deadline = time.monotonic() + 10
    while not noticed() and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    visits.close()
    assert noticed()


def test_what_the_policy_of_a_page_blocks_is_a_fault(chromium: Browser, tmp_path: Path) -> None:
    visits = Visits(chromium, tmp_path)
    visits(f"<!doctype html>{POLICY}<title>a</title><script>document.title = 'b'</script>")
    visits.close()
    assert "Content Security Policy" in "".join(visits.faults)


def test_axe_is_at_work(visit: Visits) -> None:
    assert "alternative text" in violations(visit("<!doctype html><img src='data:,'>"))
    assert violations(visit("<!doctype html><html lang=en><title>a</title><main><h1>a</h1></main>")) == ""

"""The watch on pages sees what it is there to see."""

from pathlib import Path

from playwright.sync_api import Browser

from tests.browser.visits import Visits, violations

POLICY = "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'\">"
FAULTS = {
    "console.error('a')": "error in the console: a",
    "setTimeout(() => { throw new Error('a') })": "thrown: a",
    "fetch('https://example.org/a').catch(() => 0)": "request: https://example.org/a",
    "alert('a')": "dialog: a",
}


def test_faults_are_noticed(chromium: Browser, tmp_path: Path) -> None:
    visits = Visits(chromium, tmp_path)
    for script, said in FAULTS.items():
        visits(f"<!doctype html><title>a</title><script>{script}</script>").wait_for_timeout(200)
        assert any(fault.startswith(said) for fault in visits.faults), script
    visits(f"<!doctype html>{POLICY}<title>a</title><script>document.title = 'b'</script>")
    visits.close()
    assert "Content Security Policy" in "".join(visits.faults)


def test_axe_is_at_work(visit: Visits) -> None:
    assert "alternative text" in violations(visit("<!doctype html><img src='data:,'>"))
    assert violations(visit("<!doctype html><html lang=en><title>a</title><main><h1>a</h1></main>")) == ""

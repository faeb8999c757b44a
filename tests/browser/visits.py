"""Pages in a real browser, watched: whatever they log, throw or ask for beyond their own file is a fault."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, sync_playwright

VARIABLE = "CAPTUM_NORM_CHROMIUM"
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def executable(playwright: Playwright) -> str | None:
    """The Chromium that the variable names, else the first one on PATH, else Playwright's own if it is installed."""
    if named := os.environ.get(VARIABLE):
        return named
    on_path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    own = playwright.chromium.executable_path
    return on_path or (own if Path(own).exists() else None)


@contextmanager
def started() -> Iterator[Browser | None]:
    """A browser without a window; None where there is none."""
    with sync_playwright() as playwright:
        if (path := executable(playwright)) is None:
            yield None
            return
        # Chromium's sandbox refuses to be run by root, as containers do.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@dataclass
class Visits:
    """Opens pages from files, without a network, and keeps what was wrong with any of them."""

    browser: Browser
    folder: Path
    faults: list[str] = field(default_factory=list)
    _contexts: list[BrowserContext] = field(default_factory=list)

    def __call__(
        self,
        html: str,
        *,
        fragment: str = "",
        width: int = 1280,
        dark: bool = False,
        **options: Any,
    ) -> Page:
        """Write the HTML into a file of its own and open it, with options of Playwright's ``new_context``."""
        context = self.browser.new_context(
            viewport={"width": width, "height": 800},
            color_scheme="dark" if dark else "light",
            offline=True,
            **options,
        )
        context.set_default_timeout(10_000)
        self._contexts.append(context)
        path = self.folder / f"page-{len(self._contexts)}.html"
        path.write_text(html, encoding="utf-8")
        page = context.new_page()
        self._watch(page, path.as_uri())
        page.goto(f"{path.as_uri()}#{fragment}" if fragment else path.as_uri())
        return page

    def _watch(self, page: Page, address: str) -> None:
        def on_console(message: Any) -> None:
            if message.type in ("error", "warning"):
                self.faults.append(f"{message.type} in the console: {message.text}")

        def on_request(request: Any) -> None:
            if request.url.partition("#")[0] != address and not request.url.startswith(("data:", "blob:", "about:")):
                self.faults.append(f"request: {request.url[:200]}")

        def on_dialog(dialog: Any) -> None:
            self.faults.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        page.on("console", on_console)
        page.on("pageerror", lambda error: self.faults.append(f"thrown: {error}"))
        page.on("request", on_request)
        page.on("dialog", on_dialog)
        page.on("popup", lambda popup: self.faults.append(f"popup: {popup.url}"))

    def close(self) -> None:
        """Close all pages that were opened."""
        for context in self._contexts:
            context.close()


def violations(page: Page) -> str:
    """What axe-core finds wrong with the page as it is shown now, in full; nothing: an empty string."""
    results = Axe().run(page)
    return str(results.generate_report()) if results.violations_count else ""

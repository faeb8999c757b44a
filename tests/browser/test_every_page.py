"""What holds for every page: it stays in its place, is accessible, fits the screen, and stands what texts may be."""

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page as Tab
from playwright.sync_api import expect

from captum_norm.show.page import Page, render
from tests.browser import pages
from tests.browser.visits import Visits, violations

PAGES: dict[str, Callable[[], Page]] = {
    "sentences": pages.two_sentences,
    "everything": pages.everything,
    "hostile": lambda: pages.hostile(pages.HOSTILE[:8]),
    "empty": lambda: Page("Nothing"),
    "tables alone": lambda: Page("Numbers", tables=[pages.TABLE], figures=[pages.FIGURE]),
}
every_page = pytest.mark.parametrize("name", PAGES)


def each_example(tab: Tab, page: Page, most: int = 4) -> Iterator[int]:
    """Choose one example after the other."""
    settle(tab)
    choice = tab.get_by_role("combobox", name="Example", exact=True)
    expect(choice).to_have_count(int(len(page.examples) > 1))
    yield 0
    for index in range(1, min(most, len(page.examples))):
        choice.select_option(index=index)
        settle(tab)
        yield index


def settle(tab: Tab) -> None:
    """Wait until what was asked for is drawn."""
    tab.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")


def overflow(tab: Tab) -> int:
    """By how many pixels the page is wider than the window."""
    return int(tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@every_page
@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_no_violation(visit: Visits, name: str, dark: bool) -> None:
    page = PAGES[name]()
    tab = visit(render(page), dark=dark)
    for _ in each_example(tab, page):
        assert violations(tab) == ""


@every_page
def test_pages_fit_a_phone(visit: Visits, name: str) -> None:
    page = PAGES[name]()
    tab = visit(render(page), width=360, has_touch=True, is_mobile=True)
    for _ in each_example(tab, page):
        assert overflow(tab) == 0


@every_page
def test_colours_are_those_that_the_reader_prefers_and_paper_is_light(visit: Visits, name: str) -> None:
    tab = visit(render(PAGES[name]()), dark=True)

    def ground() -> int:
        color = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", color)[:3]))

    assert ground() < 150
    tab.emulate_media(color_scheme="light")
    assert ground() > 700
    tab.emulate_media(color_scheme="dark", media="print")
    settle(tab)
    assert ground() > 700
    expect(tab.get_by_role("toolbar")).to_be_hidden()
    assert overflow(tab) == 0
    assert tab.pdf()[:4] == b"%PDF"


@every_page
def test_pages_live_in_a_sandboxed_frame(visit: Visits, name: str) -> None:
    """As in notebooks: of an origin of its own, without an address to keep the view in."""
    tab = visit(f'<!doctype html><html lang="en"><title>notebook</title>{PAGES[name]()._repr_html_()}')
    frame = tab.frame_locator("iframe")
    expect(frame.get_by_role("heading", level=1)).to_have_count(1)
    if PAGES[name]().examples:
        expect(frame.get_by_role("region").first).to_be_visible()
        choice = frame.get_by_role("combobox", name="Example", exact=True)
        choice.select_option("1")
        expect(choice).to_have_value("1")


def test_without_script_the_page_says_what_it_needs(visit: Visits) -> None:
    tab = visit(render(pages.two_sentences()), java_script_enabled=False)
    notice = tab.locator("noscript p")
    expect(notice).to_be_visible()
    expect(notice).to_contain_text("switch on JavaScript")
    expect(tab.get_by_role("heading", level=1)).to_be_visible()


def test_hostile_texts_are_texts(visit: Visits) -> None:
    page = pages.hostile()
    tab = visit(render(page))
    for _ in each_example(tab, page, len(page.examples)):
        assert tab.title() == pages.HOSTILE[0]
    expect(tab.get_by_role("heading", level=1)).to_have_text(pages.HOSTILE[0])
    assert tab.locator("img[src='x'], main script, header script, footer script").count() == 0
    text = tab.locator("body").inner_text()
    assert not re.search("[\u202e\u200b\u2060\x00\x1b\x7f\x9b]", text)
    assert "\\u202egnihtemos" in text
    assert overflow(tab) == 0


@pytest.mark.parametrize(
    "fragment",
    [
        "example=-1&layer=x&head=1e9",
        "method=<script>document.title='taken over'</script>",
        "method=__proto__&stack=constructor",
        "pins=output:99999,input:0",
        "pins=output:0,output:0,output:0",
        "threshold=NaN&scale=toString",
        "%E0%A4%A",
        "__proto__=1&constructor=2&hasOwnProperty=3",
    ],
    ids=lambda fragment: fragment[:20],
)
def test_hostile_fragments_are_ignored(visit: Visits, fragment: str) -> None:
    plain, named = visit(render(pages.two_sentences())), visit(render(pages.two_sentences()), fragment=fragment)
    settle(plain)
    settle(named)
    assert named.title() == "Norms of a sentence"
    assert named.locator("main").inner_text() == plain.locator("main").inner_text()

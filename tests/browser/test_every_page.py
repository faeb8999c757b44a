"""What holds for every page: it stays in its place, is accessible, fits the screen, and stands what texts may be."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from playwright.sync_api import Page as Tab
from playwright.sync_api import expect

from captum_norm.show.page import Example, Maps, Page, Scores, Tokens, render
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


def each_example(tab: Tab, page: Page, most: int = 6) -> Iterator[int]:
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


OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def overflow(tab: Tab) -> int:
    """By how many pixels the page is wider than the window."""
    return int(tab.evaluate(OVERFLOW))


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


VS_CODE = (
    "default-src 'none'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; img-src "
    "'self' https: http: data:; font-src 'self' https:; connect-src https:; child-src https: data:"
)
NOTEBOOKS = {"JupyterLab": ("", 900), "VS Code": (VS_CODE, 640), "nbviewer": ("connect-src 'none'", 1140)}
"""The content policies under which they show outputs, which frames inherit, and how wide outputs are there."""


@every_page
@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_pages_live_in_the_frames_of_notebooks(visit: Visits, name: str, notebook: str) -> None:
    """They have an origin of their own, without an address to keep the view in."""
    policy, width = NOTEBOOKS[notebook]
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>notebook</title>'
    tab = visit(f'<!doctype html><html lang="en">{head}{PAGES[name]()._repr_html_()}', width=width)
    frame = tab.frame_locator("iframe")
    expect(frame.get_by_role("heading", level=1)).to_have_count(1)
    assert tab.frames[1].evaluate(OVERFLOW) == 0
    if PAGES[name]().examples:
        expect(frame.get_by_role("region").first).to_be_visible()
        choice = frame.get_by_role("combobox", name="Example", exact=True)
        choice.select_option("1")
        expect(choice).to_have_value("1")
    box = tab.locator("iframe").bounding_box()
    assert box is not None
    assert (box["x"], box["width"], box["height"]) == (8, width - 16, 640)
    # Taken away, it leaves no more room than what it hid.
    assert tab.evaluate("document.querySelector('iframe').remove() ?? document.body.offsetHeight") <= 640


ANSWER = "“good” rests most on “unbelievably” (31 %) and “well” (22 %), least on “A” (0.4 %)."


@pytest.mark.parametrize("size", [(1400, 900), (390, 844)], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", ["text", "links", "picture", "components", "edges", "findings"])
def test_the_first_screen_has_the_question_the_answer_and_what_shows_it(
    visit: Visits, name: str, size: tuple[int, int]
) -> None:
    settings = {f"setting {number}": "a long value of a setting" for number in range(20)}
    examples: dict[str, Callable[[], Example]] = {
        "text": pages.sentence,
        "links": pages.translation,
        "picture": pages.picture,
        "components": lambda: pages.component_example("heads", "feed_forward", "residual"),
        "edges": lambda: pages.component_example("heads", "feed_forward", "residual", "edges"),
    }
    page = Page("What does it rest on?", settings, tables=[pages.TABLE, pages.TABLE], answer=ANSWER)
    if name in examples:
        page = replace(page, tables=[], answer="", examples=[replace(examples[name](), answer=ANSWER)])
    tab = visit(render(page), has_touch=True)
    tab.set_viewport_size({"width": size[0], "height": size[1]})
    settle(tab)
    for part in ("h1", ".answer", "[data-answer]"):
        box = tab.locator(part).first.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= size[1], part
    expect(tab.locator(".answer")).to_have_text(ANSWER)
    assert (
        tab.get_by_role("region").first.get_attribute("aria-labelledby")
        == f"view-{'components' if name == 'edges' else name}"
    )
    expect(tab.get_by_text("setting 19")).to_be_hidden()
    tab.get_by_text("Settings", exact=True).click()
    expect(tab.get_by_text("setting 19")).to_be_visible()


def test_text_from_right_to_left_runs_so_and_keeps_its_joiners(visit: Visits) -> None:
    words = ["[CLS]", "او", "می\u200cرود", "به", "مدرسه", "👩\u200d👧", "."]
    scores = Scores("norm", "norm", pages.numbers(60, len(words)))
    answer = "The output rests most on “می\u200cرود” (31 %), least on “به” (2 %)."
    tab = visit(
        render(Page("Why “می\u200cرود”?", examples=[Example("او", Tokens(words), scores=[scores], answer=answer)]))
    )
    tokens = tab.get_by_role("group", name="Text, norm").get_by_role("button")
    expect(tokens).to_have_text(words)
    places = tokens.evaluate_all("all => all.map(one => one.getBoundingClientRect().x)")
    assert places == sorted(places, reverse=True)
    assert tab.locator(".answer bdi, h1 bdi").all_text_contents() == ["می\u200cرود", "می\u200cرود", "به"]
    tokens.first.focus()
    tab.keyboard.press("ArrowLeft")
    expect(tokens.nth(1)).to_be_focused()


def test_many_texts_are_searched_sorted_and_chosen_in_a_list(visit: Visits) -> None:
    examples = [
        replace(pages.sentence(number, f"text number {number}"), value=(number * 7) % 20 / 20, probability=number / 20)
        for number in range(20)
    ]
    tab = visit(render(Page("Many", examples=examples)))
    rows = tab.get_by_role("list", name="texts").get_by_role("button")
    expect(rows).to_have_count(20)
    tab.get_by_role("combobox", name="Sort").select_option("by score")
    expect(rows.first).to_contain_text("text number 17")  # 119 % 20 = 19
    tab.get_by_role("combobox", name="Sort").select_option("by surprise")
    expect(rows.first).to_contain_text("text number 0")
    tab.get_by_role("searchbox", name="Search the texts").fill("number 13")
    expect(rows).to_have_count(1)
    rows.click()
    expect(tab.get_by_role("combobox", name="Example", exact=True)).to_have_value("13")
    assert violations(tab) == ""


def test_heads_of_long_inputs_are_opened_when_asked_for(visit: Visits) -> None:
    size, layers, heads = 300, 4, 12
    values = np.random.default_rng(0).random((layers, heads, size, size), dtype=np.float32)
    tokens = Tokens([f"token{index}" for index in range(size)])
    page = Page("Long", examples=[Example("Long", tokens, maps=[Maps("norm", "norm", values, range(layers))])])
    html = render(page)
    assert len(html) < 2_000_000
    tab = visit(html)
    expect(tab.locator(".panel h3")).to_have_text("norm mean of 4 layers, mean of heads")
    links = tab.get_by_role("region", name="Links").get_by_role("list", name="input tokens").get_by_role("button")
    assert 0 < links.count() <= 40
    expect(tab.get_by_role("combobox", name="Head")).to_have_count(0)
    tab.get_by_role("button", name="Show 48 heads").click()
    tab.get_by_role("combobox", name="Head").select_option("3")
    tab.get_by_role("combobox", name="Layer").select_option("1")
    largest = values[1, 3].max()
    expect(tab.locator(".panel .legend")).to_contain_text(f"{largest:#.4g}")


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

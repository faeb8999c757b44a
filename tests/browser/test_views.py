"""Links, flows, tables, pictures and figures show what they are given."""

import re

import numpy as np
import pytest
from playwright.sync_api import Locator, expect
from playwright.sync_api import Page as Tab

from captum_norm.show.page import Page, render
from tests.browser import pages
from tests.browser.visits import Visits, violations


def region(tab: Tab, name: str) -> Locator:
    return tab.get_by_role("region", name=name, exact=True)


def test_links_are_told_apart_by_the_gold_ones(visit: Visits) -> None:
    tab = visit(render(Page("a", examples=[pages.translation()])))
    links = region(tab, "Links")
    legend = links.locator(".legend")
    for text in ("3 agree with a sure gold link", "1 agree with a possible one", "1 wrong", "1 missed sure gold links"):
        expect(legend).to_contain_text(text)
    # Outputs first in the data, inputs on the left: "chat" has links to "cat" and, wrongly, to "sleeps".
    links.get_by_role("list", name="input tokens").get_by_role("button", name="chat").hover()
    outputs = links.get_by_role("list", name="output tokens").get_by_role("button")
    faded = outputs.evaluate_all("all => all.map(one => one.classList.contains('apart'))")
    assert faded == [True, False, False, True]


def test_lines_of_a_map_are_the_strongest(visit: Visits) -> None:
    example = pages.translation()
    tab = visit(render(Page("a", examples=[example])), fragment="layer=1")
    values, links = example.maps[0].values[1], region(tab, "Links")
    links.get_by_role("button", name="Map").click()
    slider = links.get_by_role("slider")
    for count in (3, 9):
        slider.fill(str(count))
        drawn = links.locator("svg path title")
        expect(drawn).to_have_count(count)
        found = sorted(map(float, drawn.all_text_contents()), reverse=True)
        assert found == [float(f"{value:.4g}") for value in sorted(values.ravel(), reverse=True)[:count]]
    links.get_by_role("list", name="output tokens").get_by_role("button", name="cat").hover()
    strongest = values[1].max()
    titles = links.locator("svg path title").all_text_contents()
    assert len(titles) == 4
    assert max(map(float, titles)) == float(f"{strongest:.4g}")


def test_heads_lie_over_each_other_in_their_colours(visit: Visits) -> None:
    example = pages.sentence()
    tab = visit(render(Page("a", examples=[example])), fragment="words=0&layer=1&lines=12")
    heads, links = example.maps[0].values[1].copy(), region(tab, "Links")
    for head in ("1", "0"):
        links.get_by_role("group", name="Heads in colours").get_by_role("button", name=head).click()
    for values in heads:
        np.fill_diagonal(values, 0)
    titles = links.locator("svg path title").all_text_contents()
    shares = [(value / heads[head].max(), value, head) for head in (0, 1) for value in heads[head].ravel()]
    assert sorted(titles) == sorted(f"head {head}: {value:#.4g}" for _, value, head in sorted(shares)[-12:])
    drawn = links.locator("svg path").evaluate_all(
        "all => all.map(one => [one.textContent[5], getComputedStyle(one).stroke])"
    )
    assert len({color for _, color in drawn}) == len({tuple(pair) for pair in drawn}) == 2
    again = visit(render(Page("a", examples=[example])), fragment=tab.url.partition("#")[2])
    assert region(again, "Links").locator("svg path title").all_text_contents() == titles
    assert violations(again) == ""


def test_lines_run_between_the_tokens_picked(visit: Visits) -> None:
    example = pages.translation()
    tab = visit(render(Page("a", examples=[example])), fragment="layer=1")
    values, links = example.maps[0].values[1], region(tab, "Links")
    links.get_by_role("searchbox", name="source").fill("CHAT le")
    outputs = links.get_by_role("list", name="output tokens").get_by_role("button")
    assert links.locator(".columns svg path").count() == 4  # three links, and the cross on the wrong one
    links.get_by_role("button", name="Map").click()
    links.get_by_role("searchbox", name="target").fill("cat")
    expect(links.locator("svg path title")).to_have_count(2)
    found = sorted(map(float, links.locator("svg path:not(.link) title").all_text_contents()))
    assert found == pytest.approx(sorted(values[1, :2]), rel=1e-3)
    faded = outputs.evaluate_all("all => all.map(one => one.classList.contains('apart'))")
    assert faded == [True, False, True, True]
    links.get_by_role("searchbox", name="target").fill("dog")
    expect(links).to_contain_text("No line runs between these tokens.")
    expect(links.get_by_role("searchbox", name="target")).to_be_focused()


def test_a_flow_adds_up_its_routes_above_the_threshold(visit: Visits) -> None:
    tab = visit(render(Page("a", examples=[pages.flow()])), fragment="flow=0.1")
    flow = region(tab, "Flow")
    shares = flow.get_by_role("list").get_by_role("listitem")

    def percents() -> list[float]:
        return [float((re.search(r"[\d.]+", text) or ["0"])[0]) for text in shares.all_text_contents()]

    assert percents() == [23, 30, 28]
    expect(flow).to_contain_text("The edges shown carry 81")
    flow.get_by_role("slider").fill("0.25")  # drops the edge of 0.2 from the drawing, not from the shares
    expect(flow).to_contain_text("The edges shown carry 73")
    assert percents() == [23, 30, 28]


def test_a_pinned_output_is_followed(visit: Visits) -> None:
    tab = visit(render(Page("a", examples=[pages.answer()])), fragment="flow=0")
    flow, text = region(tab, "Flow"), region(tab, "Text")
    expect(text.locator(".next")).to_have_text("Point at a token to see which ones were likely.")
    shares = flow.get_by_role("list").get_by_role("listitem")
    expect(flow).to_contain_text("What reaches all outputs together.")
    expect(shares).to_have_text([re.compile(text) for text in ("^40.*le$", "^20.*chat$", "^15.*<s>$", "^25.*the$")])
    pinned = text.get_by_role("group", name="Output, information-flow").get_by_role("button", name="cat")
    pinned.click()
    expect(flow).to_contain_text("What reaches “cat”.")
    expect(text.locator(".next")).to_have_text("Likely there: “cat” 55 %, “dog” 31 %, “ox” 4 %")
    expect(shares).to_have_text([re.compile(text) for text in ("^le$", "^40.*chat$", "^10.*<s>$", "^50.*the$")])
    pinned.click()
    expect(flow).to_contain_text("What reaches all outputs together.")


def test_tokens_that_owe_nothing_to_the_context_are_grey(visit: Visits) -> None:
    tab = visit(render(Page("a", examples=[pages.answer()])))
    text = region(tab, "Text")
    buttons = text.get_by_role("group", name="Output, information-flow").get_by_role("button")
    grey, dark = (button.evaluate("one => getComputedStyle(one).color") for button in buttons.all())
    quiet, ink = (element.evaluate("one => getComputedStyle(one).color") for element in (text.locator(".next"), text))
    assert (grey, dark) == (quiet, ink)
    assert quiet != ink
    # They are reached, pointed at and pinned as the others.
    buttons.first.focus()
    expect(text.locator(".next")).to_have_text("Likely there: “the” 71 %, “a” 20 %, “my” 2 %")
    buttons.first.press("Enter")
    expect(buttons.first).to_have_attribute("aria-pressed", "true")
    buttons.first.press("ArrowRight")
    expect(buttons.last).to_be_focused()


def test_tables_are_sorted_by_a_column_and_have_bars_from_zero(visit: Visits) -> None:
    tab = visit(render(Page("a", tables=[pages.TABLE])))
    table = tab.get_by_role("table")
    first = table.locator("tbody tr td:first-child")
    expect(first).to_have_text(["norm", "weights", "random", "attnlrp"])
    header = table.get_by_role("columnheader", name="Difference")
    header.get_by_role("button").click()
    expect(first).to_have_text(["weights", "attnlrp", "norm", "random"])  # what has no number comes last
    expect(header).to_have_attribute("aria-sort", "descending")
    header.get_by_role("button").press("Enter")
    expect(first).to_have_text(["norm", "attnlrp", "weights", "random"])
    table.get_by_role("button", name="Method").click()
    expect(first).to_have_text(["attnlrp", "norm", "random", "weights"])
    row = table.get_by_role("row").filter(has_text="norm")
    bar, zero = (row.locator(part).bounding_box() for part in (".bar", ".zero"))
    assert bar is not None
    assert zero is not None
    assert bar["width"] > 5
    assert abs(bar["x"] + bar["width"] - zero["x"]) <= 1.5  # −0.125 lies left of zero


def test_pictures_are_read_patch_by_patch(visit: Visits) -> None:
    example = pages.picture()
    tab = visit(render(Page("a", examples=[example])))
    frame = region(tab, "Image").get_by_role("application")
    frame.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        tab.keyboard.press(key)
    patch = 1 + 4 * 1 + 2
    value = example.maps[0].values.astype("f8").mean(0)[patch, patch]
    expect(region(tab, "Image").locator("figcaption")).to_have_text(f"row 2, column 3: {value:#.4g}")

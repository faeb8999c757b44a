"""The view of components: every score, the strongest so many, and what each contributes at each token."""

import pytest
from playwright.sync_api import Locator, expect
from playwright.sync_api import Page as Tab

from captum_norm.show.page import Page, render
from tests.browser import pages
from tests.browser.visits import Visits, violations


def opened(visit: Visits, *kinds: str, fragment: str = "", dark: bool = False) -> tuple[Tab, Locator]:
    page = Page("Why?", examples=[pages.component_example(*kinds)])
    tab = visit(render(page), fragment=fragment, dark=dark)
    return tab, tab.get_by_role("region", name="Components", exact=True)


def listed(view: Locator) -> list[str]:
    return view.get_by_role("list").get_by_role("listitem").all_inner_texts()


def drawn(view: Locator, shape: str) -> list[str]:
    """What is told of each node of the drawing, by name."""
    return sorted(view.locator(f"svg {shape} title").all_text_contents())


def test_the_graph_has_the_strongest_that_carry_most_and_the_inputs(visit: Visits) -> None:
    _, view = opened(visit, "heads", "feed_forward", "residual")
    # Of 14 in all, 4, −3, 3 and 2.5 are 89 %, the first three 71 %.
    assert [text.replace("\n\n", "\n") for text in listed(view)] == [
        "head 1.1\n4.000",
        "head 0.0\n−3.000",
        "feed-forward 0\n3.000",
        "head 0.2\n2.500",
    ]
    expect(view.locator("output")).to_have_text("4 of 8, 89 % of the sum of absolute scores")
    assert drawn(view, "circle") == [
        "feed-forward 0: 3.000 (75 % of all feed-forward networks)",
        "head 0.0: −3.000 (30 % of all heads)",
        "head 0.2: 2.500 (25 % of all heads)",
        "head 1.1: 4.000 (40 % of all heads)",
        "residual stream 0 at “Ada”: −1.000 (25 % of the stream there)",
        "residual stream 0 at “Eve”: 2.000 (50 % of the stream there)",
        "residual stream 0 at “gave”: 0 (0 % of the stream there)",
        "residual stream 0 at “to”: 1.000 (25 % of the stream there)",
    ]
    assert view.locator("svg path").count() == 4  # to the output
    assert view.locator("svg path.below").count() == 1
    # Areas are as scores.
    radii = view.locator("svg circle.above, svg circle.below").evaluate_all(
        "all => Object.fromEntries(all.map(one => [one.textContent.split(':')[0], Number(one.getAttribute('r'))]))"
    )
    assert (radii["head 0.0"] / radii["head 1.1"]) ** 2 == pytest.approx(3 / 4, rel=0.01)
    assert (radii["residual stream 0 at “Eve”"] / radii["head 1.1"]) ** 2 == pytest.approx(1 / 2, rel=0.01)
    heights = view.locator("svg circle").evaluate_all(
        "all => Object.fromEntries(all.map(one => [one.textContent.split(':')[0], Number(one.getAttribute('cy'))]))"
    )
    assert heights["head 1.1"] < heights["head 0.0"] == heights["feed-forward 0"]
    assert heights["head 0.0"] < heights["residual stream 0 at “Eve”"]


def test_the_slider_shows_from_one_to_all(visit: Visits) -> None:
    tab, view = opened(visit, "heads", "feed_forward")
    slider = view.get_by_role("slider", name="Strongest")
    for count, share in ((1, "29 %"), (8, "100 %")):
        slider.fill(str(count))
        assert len(listed(view)) == len(drawn(view, "circle.above, svg circle.below")) == count
        expect(view.locator("output")).to_have_text(f"{count} of 8, {share} of the sum of absolute scores")
    again, view = opened(visit, "heads", "feed_forward", fragment=tab.url.partition("#")[2])
    assert len(listed(view)) == 8
    assert violations(again) == ""


def test_a_node_shows_what_it_contributes_at_each_token(visit: Visits) -> None:
    tab, view = opened(visit, "heads", "feed_forward", "residual")
    tokens = view.locator(".strip .token")
    expect(view.locator(".caption")).to_have_text("head 1.1: 4.000 (40 % of all heads)")
    expect(tokens).to_have_text(["Eve", "gave", "Ada", "to"])
    titles = "all => all.map(one => one.title)"
    assert tokens.evaluate_all(titles) == ["1.000", "0", "0", "3.000"]
    expect(view).to_contain_text("At single tokens: to 3.000 · Eve 1.000")
    expect(view).to_contain_text("Adds directly to logits where the output is read: “ Ada” +3.500 · “ Eve” −0.2500")
    view.get_by_role("button", name="head 0.2").click()
    expect(view.locator(".caption")).to_have_text("head 0.2: 2.500 (25 % of all heads)")
    assert tokens.evaluate_all(titles) == ["0.5000", "1.500", "0", "0.5000"]
    expect(view.get_by_role("button", name="head 0.2")).to_have_attribute("aria-pressed", "true")
    expect(view.locator("p[role=status]")).to_have_text(
        "head 0.2: 2.500 (25 % of all heads). At single tokens: gave 1.500 · Eve 0.5000 · to 0.5000"
    )
    view.locator("svg circle", has_text="residual stream 0 at “Ada”").click()
    assert tokens.evaluate_all(titles) == ["2.000", "0", "−1.000", "1.000"]
    # By keyboard: the list is one stop, arrows move in it.
    view.get_by_role("slider").focus()
    tab.keyboard.press("Tab")
    expect(view.get_by_role("button", name="head 1.1")).to_be_focused()
    tab.keyboard.press("End")
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Enter")
    expect(view.locator(".caption")).to_have_text("head 0.2: 2.500 (25 % of all heads)")
    again, view = opened(visit, "heads", "feed_forward", "residual", fragment=tab.url.partition("#")[2])
    expect(view.locator(".caption")).to_have_text("head 0.2: 2.500 (25 % of all heads)")
    expect(view.locator("svg .chosen title")).to_have_text("head 0.2: 2.500 (25 % of all heads)")
    assert violations(again) == ""


GRIDS = {
    "heads": (6, "head 1.1: 4.000 (40 % of all heads)"),
    "residual": (12, "residual stream 0 at “Eve”: 2.000 (50 % of the stream there)"),
    "feed_forward": (8, "feed-forward 0 at “Eve”: 1.000 (25 % of all feed-forward networks)"),
}


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_one_kind_fills_a_grid(visit: Visits, kind: str, dark: bool) -> None:
    tab, view = opened(visit, kind, dark=dark)
    count, strongest = GRIDS[kind]
    assert len(drawn(view, "rect")) == count
    expect(view.locator(".caption")).to_have_text(strongest)
    expect(view.locator("svg rect").filter(has_text=strongest)).to_have_class("chosen")
    assert len(set(view.locator("svg rect").evaluate_all("all => all.map(one => one.getAttribute('fill'))"))) > 2
    assert violations(tab) == ""


def test_edges_are_lines_between_nodes_which_lead_from_one_to_the_other(visit: Visits) -> None:
    tab, view = opened(visit, "heads", "feed_forward", "residual", "edges")
    # Of 15.25, those into head 1.1 from head 0.0 are 3 together.
    expect(view.locator("output")).to_have_text("4 of 7 edges, 82 % of the sum of absolute scores")
    paths = view.locator("svg path")
    assert paths.count() == 4
    assert view.locator("svg path.below").count() == 2
    names = ["head 1.1", "head 0.0", "feed-forward 0", "input"]
    assert [text.split("\n")[0] for text in listed(view)[:4]] == names
    expect(view.locator(".caption")).to_have_text("head 1.1: 4.000 (40 % of all heads)")
    read, readers = view.get_by_role("list", name="Reads most from"), view.get_by_role("list", name="Is read most by")
    assert [text.replace("\n", " ") for text in read.get_by_role("listitem").all_inner_texts()] == [
        "head 0.0 −3.000 (values −2.000, queries −1.000)",
        "feed-forward 0 0.2500 (keys)",
    ]
    assert [text.replace("\n", " ") for text in readers.get_by_role("listitem").all_inner_texts()] == ["output 4.000"]
    assert violations(tab) == ""
    tab.set_viewport_size({"width": 390, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    # By keyboard from node to node; the focus stays with what is told, and other edges fade.
    read.get_by_role("button", name="head 0.0").press("Enter")
    expect(view.locator(".caption")).to_have_text("head 0.0: −3.000 (30 % of all heads)")
    expect(view.locator(".caption")).to_be_focused()
    assert view.locator("svg path.dim").count() == 2
    read.get_by_role("button", name="input").click()
    expect(view.locator(".caption")).to_have_text("input: 2.000")
    expect(view.locator(".strip .token")).to_have_text(["Eve", "gave", "Ada", "to"])
    expect(read).to_have_count(0)
    view.locator("svg circle.output").click()
    expect(view.locator(".caption")).to_have_text("output")
    expect(view).not_to_contain_text("Adds directly")
    assert [text.split("\n")[0] for text in read.get_by_role("listitem").all_inner_texts()] == [
        "head 1.1",
        "feed-forward 0",
    ]
    expect(view.locator("p[role=status]")).to_have_text("output. Reads most from")
    view.get_by_role("slider").fill("7")
    assert paths.count() == 7
    again, view = opened(visit, "heads", "feed_forward", "edges", fragment=tab.url.partition("#")[2], dark=True)
    expect(view.locator(".caption")).to_have_text("output")
    assert violations(again) == ""


def test_edges_alone_give_nodes_what_leaves_them(visit: Visits) -> None:
    tab, view = opened(visit, "edges")
    expect(view.locator(".caption")).to_have_text("head 1.1: 4.000 (53 % of all heads)")
    assert "head 0.0: −3.000 (40 % of all heads)" in drawn(view, "circle")
    assert "input: −0.5000" in drawn(view, "circle")
    assert violations(tab) == ""


def test_neurons_are_the_strongest_of_many(visit: Visits) -> None:
    tab, view = opened(visit, "neurons")
    assert len(drawn(view, "circle.above, svg circle.below")) == 60
    names = view.get_by_role("list").get_by_role("button")
    assert {names.nth(0).inner_text(), names.nth(1).inner_text()} == {"neuron 0.199", "neuron 1.199"}
    expect(view).to_contain_text("Its scores at single tokens are not on this page.")
    view.get_by_role("slider").fill("400")
    assert len(drawn(view, "circle.above, svg circle.below")) == 400
    assert len(listed(view)) == 200
    assert violations(tab) == ""

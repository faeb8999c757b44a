"""The text and the maps show the numbers that they are given, by pointer, by keys and by address."""

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from playwright.sync_api import Locator, expect
from playwright.sync_api import Page as Tab

from captum_norm.show.page import Example, Maps, Page, Tokens, render
from tests.browser import pages
from tests.browser.pages import OF_WORD, PIECES, ROW, WORDS
from tests.browser.test_every_page import settle
from tests.browser.visits import Visits

HTML = render(pages.two_sentences())
EXAMPLE = pages.two_sentences().examples[0]
NORM_OF_HEADS, NORM, WEIGHTS = (maps.values.astype("f8") for maps in EXAMPLE.maps)
NORM_SCORES, SIGNED_SCORES = (scores.values.astype("f8") for scores in EXAMPLE.scores)
Numbers = npt.NDArray[np.float64]


def strip(tab: Tab, method: str) -> Locator:
    return tab.get_by_role("group", name=f"Text, {method}", exact=True)


def token(tab: Tab, text: str, method: str = "norm") -> Locator:
    return strip(tab, method).get_by_role("button", name=text, exact=True)


def shown(tab: Tab, method: str) -> Numbers:
    """The numbers behind the colours of the tokens."""
    titles = strip(tab, method).get_by_role("button").evaluate_all("all => all.map(one => one.title)")
    return np.array([float(title.partition(" (")[0].replace("−", "-")) for title in titles])


def choice(tab: Tab, label: str) -> Locator:
    return tab.get_by_role("combobox", name=label, exact=True)


def is_near(found: Numbers, expected: Numbers) -> bool:
    """To the four digits that a page shows."""
    return found.shape == expected.shape and bool(np.allclose(found, expected, rtol=6e-4, atol=1e-7))


def as_words(values: Numbers, axis: int, how: Any) -> Numbers:
    """Put the pieces of one word together; ``[CLS]`` and ``[SEP]`` stay alone."""
    groups = [[0], *([i for i, word in enumerate(OF_WORD) if word == number] for number in range(len(WORDS))), [9]]
    return np.stack([how(values.take(group, axis), axis) for group in groups], axis)


def test_there_are_scores_or_the_explained_row_and_a_token_pointed_at_shows_its_row(visit: Visits) -> None:
    tab = visit(HTML, fragment="words=0")
    assert is_near(shown(tab, "norm"), NORM_SCORES)
    assert is_near(shown(tab, "attnlrp"), SIGNED_SCORES)
    assert is_near(shown(tab, "weights"), WEIGHTS.mean((0, 1))[ROW])
    token(tab, "man").hover()
    assert is_near(shown(tab, "norm"), NORM.mean(0)[2])
    assert is_near(shown(tab, "weights"), WEIGHTS.mean((0, 1))[2])
    assert is_near(shown(tab, "attnlrp"), SIGNED_SCORES)  # has scores alone
    expect(tab.get_by_text(re.compile("What man receives"))).not_to_have_count(0)
    token(tab, "well", "weights").hover()
    assert is_near(shown(tab, "norm"), NORM.mean(0)[7])
    tab.mouse.move(0, 0)
    assert is_near(shown(tab, "norm"), NORM_SCORES)


def test_strips_have_one_scale_of_shares_of_their_sums(visit: Visits) -> None:
    tab = visit(HTML, fragment="words=0")
    shares = [NORM_SCORES / NORM_SCORES.sum(), SIGNED_SCORES / abs(SIGNED_SCORES).sum()]
    shares.append(WEIGHTS.mean((0, 1))[ROW] / WEIGHTS.mean((0, 1))[ROW].sum())
    top = max(abs(share).max() for share in shares)
    legend = tab.get_by_role("region", name="Text").locator(".legend")
    expect(legend).to_have_count(1)
    expect(legend).to_contain_text(f"{100 * top:.0f} % of the strip’s sum")
    for method, share in zip(("norm", "attnlrp", "weights"), shares, strict=True):
        title = token(tab, "man", method).get_attribute("title") or ""
        assert f"({100 * share[2]:.{0 if abs(share[2]) >= 0.0995 else 1}f} %)".replace("-", "−") in title
    # What is not the same thing says so.
    expect(tab.get_by_role("region", name="Text")).to_contain_text("weight, mean of 3 layers, mean of heads")


def test_two_pinned_tokens_show_the_difference(visit: Visits) -> None:
    tab = visit(HTML, fragment="words=0")
    token(tab, "man").click()
    token(tab, "well").click()
    tab.mouse.move(0, 0)
    assert is_near(shown(tab, "norm"), NORM.mean(0)[2] - NORM.mean(0)[7])
    assert is_near(shown(tab, "weights"), WEIGHTS.mean((0, 1))[2] - WEIGHTS.mean((0, 1))[7])
    expect(token(tab, "man")).to_have_attribute("aria-pressed", "true")
    expect(token(tab, "man", "weights")).to_have_attribute("aria-pressed", "true")
    token(tab, ".").click()  # takes the place of the second
    assert is_near(shown(tab, "norm"), NORM.mean(0)[2] - NORM.mean(0)[8])
    token(tab, "man").click()  # unpins it
    tab.mouse.move(0, 0)
    assert is_near(shown(tab, "norm"), NORM.mean(0)[8])
    token(tab, ".").press("Escape")
    assert strip(tab, "norm").locator("[aria-pressed=true]").count() == 0


def test_layers_and_heads_are_those_chosen(visit: Visits) -> None:
    tab = visit(HTML, fragment="words=0&pins=output:3")
    choice(tab, "Layer").select_option("1")
    assert is_near(shown(tab, "norm"), NORM[1, 3])
    assert is_near(shown(tab, "weights"), WEIGHTS[1].mean(0)[3])
    choice(tab, "Head").select_option("1")
    assert is_near(shown(tab, "norm"), NORM_OF_HEADS[1, 1, 3])
    assert is_near(shown(tab, "weights"), WEIGHTS[1, 1, 3])
    choice(tab, "Layer").select_option("all")
    assert is_near(shown(tab, "norm"), NORM_OF_HEADS[:, 1, 3].mean(0))
    for text in ("norm mean of 3 layers, head 1", "weights mean of 3 layers, head 1"):
        expect(tab.get_by_role("heading", name=text)).to_be_visible()


def test_words_add_up_their_columns_and_average_their_rows(visit: Visits) -> None:
    tab = visit(HTML, fragment="pins=output:4")
    assert is_near(shown(tab, "norm"), as_words(as_words(NORM.mean(0), 0, np.mean), 1, np.sum)[4])
    tab.get_by_role("button", name="Pieces").click()
    tab.mouse.move(0, 0)
    assert len(shown(tab, "norm")) == len(PIECES)
    expect(token(tab, "un")).to_have_attribute("aria-pressed", "true")
    tab.get_by_role("button", name="Words", exact=True).click()
    expect(token(tab, "unbelievably")).to_have_attribute("aria-pressed", "true")


def test_another_example_has_its_own_numbers_and_no_pins(visit: Visits) -> None:
    tab = visit(HTML, fragment="words=0&pins=output:3")
    tab.get_by_role("button", name="Next example").click()
    second = pages.two_sentences().examples[1]
    expect(choice(tab, "Example")).to_have_value("1")
    assert is_near(shown(tab, "norm"), second.scores[0].values.astype("f8"))
    assert strip(tab, "norm").locator("[aria-pressed=true]").count() == 0
    choice(tab, "Example").select_option("0")
    assert is_near(shown(tab, "norm"), NORM_SCORES)


def test_the_strongest_colour_is_that_of_the_scale(visit: Visits) -> None:
    layer, head = 0, int(NORM_OF_HEADS[0].max((1, 2)).argmin())
    tops = {
        "each map": NORM_OF_HEADS[layer, head].max(),
        "each layer": NORM_OF_HEADS[layer].max(),
        "all maps": NORM_OF_HEADS.max(),
    }
    assert len({float(top) for top in tops.values()}) == 3
    tab = visit(HTML, fragment=f"words=0&layer={layer}&head={head}")
    for scale, largest in tops.items():
        tab.get_by_role("button", name=scale).click()
        expect(tab.locator(".panel .legend").first).to_contain_text(f"{largest:#.4g}")


def test_the_address_brings_back_the_view(visit: Visits) -> None:
    tab = visit(HTML)
    choice(tab, "Example").select_option("1")
    tab.get_by_role("button", name="Pieces").click()
    choice(tab, "Method").select_option("weights")
    choice(tab, "Layer").select_option("2")
    choice(tab, "Head").select_option("0")
    tab.get_by_role("button", name="all maps").click()
    token(tab, "man").click()
    token(tab, "well").click()
    tab.mouse.move(0, 0)
    again = visit(HTML, fragment=tab.url.partition("#")[2])
    settle(tab)
    settle(again)
    assert is_near(shown(again, "weights"), shown(tab, "weights"))
    assert again.locator("main").inner_text() == tab.locator("main").inner_text()
    pressed = "all => all.map(one => one.getAttribute('aria-pressed'))"
    buttons = [one.get_by_role("button").evaluate_all(pressed) for one in (tab, again)]
    assert buttons[0] == buttons[1]
    assert again.url.partition("#")[2] == tab.url.partition("#")[2]


def test_everything_is_done_with_keys(visit: Visits) -> None:
    tab = visit(HTML, fragment="words=0")

    def tab_to(target: Locator) -> None:
        for _ in range(40):
            if target.evaluate("one => one === document.activeElement"):
                return
            tab.keyboard.press("Tab")
        pytest.fail(f"the tab key does not reach {target}")

    tab_to(choice(tab, "Layer"))
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowDown")
    expect(choice(tab, "Layer")).to_have_value("1")  # the first key left it the focus for the second
    tab_to(token(tab, "[CLS]"))
    for _ in range(2):
        tab.keyboard.press("ArrowRight")
    assert is_near(shown(tab, "norm"), NORM[1, 2])
    tab.keyboard.press("Enter")
    tab.keyboard.press("End")
    tab.keyboard.press("Enter")
    assert is_near(shown(tab, "norm"), NORM[1, 2] - NORM[1, 9])
    tab.keyboard.press("Escape")
    assert is_near(shown(tab, "norm"), NORM[1, 9])
    field = tab.get_by_role("application").first
    tab_to(field)
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    said = tab.get_by_role("region", name="Maps").get_by_role("status")
    value = f"{NORM[1, ROW + 1, 1]:.4f}, weights {WEIGHTS[1].mean(0)[ROW + 1, 1]:.4f}"
    expect(said).to_have_text(f"{PIECES[ROW + 1]} from A: norm {value}")
    tab.keyboard.press("Enter")
    expect(token(tab, PIECES[ROW + 1])).to_have_attribute("aria-pressed", "true")


DARKEST = """canvas => {
    const { data, width, height } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let [best, place] = [1e9, 0];
    for (let i = 0; i < width * height; i++) {
        if (data[4 * i + 3] < 255) continue;
        const brightness = data[4 * i] + data[4 * i + 1];  // blue means large: red and green are least
        const blue = data[4 * i + 2];
        if (blue > 60 && brightness < best) [best, place] = [brightness, i];
    }
    const scale = canvas.getBoundingClientRect().width / width;
    return [(place % width) * scale, Math.floor(place / width) * scale];
}"""


@pytest.mark.parametrize("places", [(1, 3), (4, 0)])
def test_the_map_is_drawn_where_it_is_pointed_at(visit: Visits, places: tuple[int, int]) -> None:
    """Rows down, columns across: the one cell with a number is coloured, and it is the one that the tip names."""
    values = np.zeros((1, 5, 6))
    values[0][places] = 0.5
    inputs, outputs = Tokens([f"in{place}" for place in range(6)]), Tokens([f"out{place}" for place in range(5)])
    tab = visit(render(Page("a", examples=[Example("a", inputs, outputs, maps=[Maps("norm", "norm", values, [7])])])))
    settle(tab)
    canvas = tab.locator(".field canvas")
    x, y = canvas.evaluate(DARKEST)
    canvas.hover(position={"x": x + 3, "y": y + 3})
    expect(tab.locator(".tip")).to_contain_text(f"out{places[0]} ← in{places[1]}")
    expect(tab.locator(".tip")).to_contain_text("0.5000")


def test_long_maps_are_zoomed_to_what_can_be_read(visit: Visits) -> None:
    tab = visit(render(pages.long()))
    field = tab.get_by_role("application")
    field.focus()
    for _ in range(12):
        tab.get_by_role("button", name="Zoom in").click()
    field.focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("End")
    value = pages.numbers(40, 500 * 500)[499]
    expect(tab.get_by_role("region", name="Maps").get_by_role("status")).to_have_text(
        re.compile(f"^token0 from token499: norm {value:.4g}"[:34])
    )

"""The page: escaped, self-contained, and with the right numbers and colours."""

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from captum_norm.visualization import Panel, render_page, write_page
from captum_norm.visualization.colors import color_of, color_table, hex_of

HOSTILE = "<script>alert('x')</script>"


class Outline(HTMLParser):
    """The tags of a page, and the texts of its list items and cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.tags[-1][0], data))

    def of(self, tag: str) -> list[str]:
        return [text for found, text in self.texts if found == tag]


def test_everything_given_is_escaped() -> None:
    page = render_page(
        [HOSTILE, "b"],
        [1.0, 0.5],
        title=HOSTILE,
        unit=HOSTILE,
        panels=[Panel(f'"{HOSTILE}', torch.ones(2, 2), HOSTILE)],
        facts={HOSTILE: HOSTILE},
    )
    assert "<script" not in page
    outline = Outline(page)
    assert "script" not in [tag for tag, _ in outline.tags]
    assert outline.of("li")[0] == HOSTILE
    assert outline.of("h1") == outline.of("dt") == outline.of("dd") == [HOSTILE]
    assert [attributes.get("aria-label") for tag, attributes in outline.tags if tag == "svg"] == [f'"{HOSTILE}']


def test_tokens_have_their_colours_and_the_table_their_scores() -> None:
    outline = Outline(render_page(["x", "y"], [0.25, 1.0], title="t", unit="share"))
    styles = [attributes["style"] or "" for tag, attributes in outline.tags if tag == "li"]
    assert [re.findall("#[0-9a-f]{6}", style) for style in styles] == [
        [hex_of(color_of(0.25)), "#000000"],
        [hex_of(color_of(1.0)), "#ffffff"],
    ]
    assert outline.of("td") == ["0", "x", "0.250", "1", "y", "1.000"]


def test_page_loads_nothing_from_anywhere() -> None:
    page = render_page(["x"], [1.0], title="t", unit="u", panels=[Panel("m", torch.ones(1, 1), "u")])
    for tag, attributes in Outline(page).tags:
        assert tag not in {"link", "script", "iframe", "base"}
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert "@import" not in page
    assert "url(" not in page
    assert 'name="viewport" content="width=device-width' in page


def test_map_is_a_picture_with_one_pixel_an_entry() -> None:
    values = torch.tensor([[0.0, 4.0, 2.0], [1.0, 0.0, 0.0]])
    page = render_page(
        ["q0", "q1"],
        [1.0, 1.0],
        title="t",
        unit="u",
        panels=[Panel("m", values, "norm")],
        key_tokens=["k0", "k1", "k2"],
    )
    encoded = re.search("base64,([A-Za-z0-9+/=]+)", page)
    assert encoded
    pixels = imread(io.BytesIO(base64.b64decode(encoded[1])))[..., :3]
    expected = color_table()[np.rint(values.numpy() / 4 * 255).astype(int)]
    np.testing.assert_array_equal(np.rint(pixels * 255).astype(int), expected)
    outline = Outline(page)
    hovers = [text for text in outline.of("title") if "←" in text]
    assert hovers == ["q0 ← k0: 0", "q0 ← k1: 4", "q0 ← k2: 2", "q1 ← k0: 1", "q1 ← k1: 0", "q1 ← k2: 0"]
    assert {"q0", "q1", "k0", "k1", "k2", "key (gives)", "query (receives)"} <= set(outline.of("text"))


def test_long_maps_thin_their_labels_and_have_no_hover_areas() -> None:
    count = 300
    tokens = [f"t{index}" for index in range(count)]
    page = render_page(tokens, [1.0] * count, title="t", unit="u", panels=[Panel("m", torch.rand(count, count), "u")])
    assert "←" not in page
    assert len(Outline(page).of("text")) < 2 * 60
    assert len(page) < 500_000


def test_page_is_written_whole(tmp_path: Path) -> None:
    page = render_page(["Ä"], [1.0], title="t", unit="u")
    assert write_page(tmp_path / "p.html", page).read_text(encoding="utf-8") == page
    assert [path.name for path in tmp_path.iterdir()] == ["p.html"]


@pytest.mark.parametrize(
    ("scores", "shape", "message"),
    [
        ([1.0], (2, 2), "2 tokens do not fit scores of 1"),
        ([1.0, 1.0], (3, 2), "2 tokens do not fit the queries"),
        ([1.0, 1.0], (2, 3), "2 tokens do not fit the keys"),
        ([1.0, 1.0], (2,), "'m' has shape \\(2,\\)"),
    ],
)
def test_what_does_not_fit_is_named(scores: list[float], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render_page(["a", "b"], scores, title="t", unit="u", panels=[Panel("m", torch.ones(shape), "u")])

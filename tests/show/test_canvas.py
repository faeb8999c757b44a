"""Files of figures: no trace in pyplot, a picture in notebooks, whole or not there."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from captum_norm.show import Panel, draw_heatmaps, save_figure
from captum_norm.show.canvas import figure_bytes


def heatmaps(count: int, tokens: list[str]) -> Figure:
    generator = torch.Generator().manual_seed(count)
    size = len(tokens)
    return draw_heatmaps([Panel("m", torch.rand(size, size, generator=generator), "norm")] * count, tokens)


def test_a_figure_is_a_picture_in_notebooks_and_unknown_to_pyplot() -> None:
    figure: Any = heatmaps(1, ["a", "b"])
    picture = figure._repr_png_()  # what IPython asks for
    assert picture.startswith(b"\x89PNG")
    assert picture == figure_bytes(heatmaps(1, ["a", "b"]))
    pyplot = sys.modules.get("matplotlib.pyplot")
    before = pyplot.get_fignums() if pyplot else []
    figure_bytes(heatmaps(2, ["a", "b"]))
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert (pyplot.get_fignums() if pyplot else []) == before


def test_suffix_says_the_format(tmp_path: Path) -> None:
    figure = heatmaps(1, ["a", "b"])
    assert save_figure(figure, tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in save_figure(figure, tmp_path / "m.svg").read_bytes()
    with pytest.raises(ValueError, match="xyz"):
        save_figure(figure, tmp_path / "m.xyz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.png", "m.svg"]


def test_drawing_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = heatmaps(1, ["a", "b"])

    def fail(buffer: io.BytesIO, **_: Any) -> None:
        buffer.write(b"half a picture")
        raise RuntimeError("no font")

    monkeypatch.setattr(figure, "savefig", fail)
    with pytest.raises(RuntimeError, match="no font"):
        save_figure(figure, tmp_path / "m.png")
    assert list(tmp_path.iterdir()) == []

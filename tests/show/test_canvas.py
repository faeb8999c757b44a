"""Files of figures: no trace in pyplot, a picture in notebooks, nothing that cannot be seen."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from captum_norm.show import Panel, draw_heatmaps, figure_bytes


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


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_savefig_spells_out_what_cannot_be_seen(suffix: str, tmp_path: Path) -> None:
    made = [[draw_heatmaps([Panel("m", [[1.0]], f"a{end}")], ["b"]) for end in ("\u202e", "\\u202e")] for _ in range(2)]
    assert len({figure_bytes(figure, suffix) for figure in made[0]}) == 1
    paths = [tmp_path / f"{name}.{suffix}" for name in ("hidden", "spelled")]
    for figure, path in zip(made[1], paths, strict=True):
        figure.savefig(path)
    if suffix == "png":
        assert paths[0].read_bytes() == paths[1].read_bytes()

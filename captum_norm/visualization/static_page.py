"""Renders an explanation as one HTML page: coloured tokens, their scores, and the maps.

The page is self-contained: styles are inline, and each map is an SVG with a small embedded PNG. It adapts to narrow
screens and to dark mode.
"""

import base64
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from captum_norm.characters import spelled_lines
from captum_norm.files import write_whole
from captum_norm.visualization.colors import Rgb, color_of, color_table, hex_of, ink_on, shares_of
from captum_norm.visualization.heatmap import KEY_LABEL, QUERY_LABEL, Panel, check_panel
from captum_norm.visualization.text import formatted, printable, same_length, shortened, thinned

if TYPE_CHECKING:
    from jinja2 import Template

_NO_FACTS: Mapping[str, str] = MappingProxyType({})
_LABEL_WIDTH = 14
_LABEL_HEIGHT = 13
_CHARACTER = 7.4
_TITLE_ROOM = 22
# More hover areas than this slow down a browser; pages with more entries have none.
_MOST_HOVERED = 5000


def render_page(
    tokens: Sequence[str],
    scores: Sequence[float],
    *,
    title: str,
    unit: str,
    panels: Sequence[Panel] = (),
    facts: Mapping[str, str] = _NO_FACTS,
    key_tokens: Sequence[str] | None = None,
    query_tokens: Sequence[str] | None = None,
    segments: Sequence[tuple[str, float]] = (),
) -> str:
    """Render the page; all arguments are escaped.

    Args:
        tokens: the S tokens of the input.
        scores: S scores; those below zero count as zero.
        title: the page's heading.
        unit: what the scores measure.
        panels: the maps below the tokens, (Q, K) each.
        facts: names and values to list under the heading (model, method, layer, ...).
        key_tokens: the K keys of the maps; ``tokens`` if None.
        query_tokens: the Q queries of the maps; ``tokens`` if None.
        segments: names and scores of groups of tokens, shown in a table above.

    Returns:
        A complete HTML document.

    Raises:
        InvalidInputError: the scores or maps do not fit the tokens.

    Example:
        >>> "&lt;script&gt;" in render_page(["<script>"], [1.0], title="Norms", unit="norm")
        True
    """
    same_length(tokens, len(scores), "scores")
    keys, queries = (tokens if given is None else given for given in (key_tokens, query_tokens))
    entries = sum(panel.map.numel() for panel in panels)
    return template("page.html").render(
        title=title,
        unit=unit,
        facts=facts,
        tokens=_tokens(tokens, scores),
        segments=_tokens([name for name, _ in segments], [score for _, score in segments]),
        top=f"{max(scores, default=0.0):.3g}",
        ramp=ramp(color_of),
        maps=[_map(panel, queries, keys, hovered=entries <= _MOST_HOVERED) for panel in panels],
        query_label=QUERY_LABEL,
        key_label=KEY_LABEL,
    )


def template(name: str) -> "Template":
    """Load a template of this package, which escapes its arguments and spells out unprintable characters."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("captum_norm.visualization", "templates"),
        autoescape=True,
        finalize=lambda value: (
            spelled_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value
        ),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def on_ground(ground: Rgb) -> dict[str, str]:
    """Return a background colour and the text colour on it, for CSS."""
    return {"ground": hex_of(ground), "ink": hex_of(ink_on(ground))}


def ramp(color: Callable[[float], Rgb], start: float = 0.0) -> str:
    """Return the stops of a CSS gradient along a scale, from ``start`` to 1."""
    return ", ".join(hex_of(color(start + (1 - start) * step / 16)) for step in range(17))


def write_page(path: str | os.PathLike[str], page: str) -> Path:
    """Write a page atomically.

    Args:
        path: the file; its folder must exist.
        page: the page, see :func:`render_page`.

    Returns:
        The path.

    Raises:
        OSError: the folder does not exist or cannot be written to.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_page(folder + "/norms.html", render_page(["a"], [1.0], title="Norms", unit="norm")).name
        'norms.html'
    """
    return write_whole(path, page.encode())


def _tokens(tokens: Sequence[str], scores: Sequence[float]) -> list[dict[str, Any]]:
    rows = zip(tokens, formatted(scores), shares_of(scores), strict=True)
    return [
        {"index": index, "text": printable(token), "score": score, "percent": f"{100 * share:.1f}"}
        | on_ground(color_of(share))
        for index, (token, score, share) in enumerate(rows)
    ]


def _map(panel: Panel, queries: Sequence[str], keys: Sequence[str], *, hovered: bool) -> dict[str, Any]:
    check_panel(panel, queries, keys)
    values = panel.map.detach().double().cpu().numpy()
    cell = min(max(560 / max(1, *values.shape), 2.0), 24.0)
    left = _TITLE_ROOM + _label_room(queries)
    above = _TITLE_ROOM + _label_room(keys)
    down, across = (cell * count for count in values.shape)
    return {
        "title": panel.title,
        "unit": panel.unit,
        "top": f"{values.max():.3g}" if values.size else "0",
        "width": left + across + 2,
        "height": above + down + 2,
        "left": left,
        "above": above,
        "cell": cell,
        "across": across,
        "down": down,
        "image": _image(values),
        "query_labels": [_label(text, left - 5, above + place) for text, place in _labels(queries, cell)],
        "key_labels": [_label(text, left + place, above - 5) for text, place in _labels(keys, cell)],
        "hovers": _hovers(values, queries, keys, left, above, cell) if hovered else [],
    }


def _label(text: str, x: float, y: float) -> dict[str, Any]:
    return {"text": text, "x": x, "y": y}


def _label_room(tokens: Sequence[str]) -> float:
    return 8 + _CHARACTER * max((len(shortened(token, _LABEL_WIDTH)) for token in tokens), default=0)


def _labels(tokens: Sequence[str], cell: float) -> list[tuple[str, float]]:
    """The labels to show, each with the middle of its cell."""
    room = max(1, int(len(tokens) * cell / _LABEL_HEIGHT))
    return [(shortened(tokens[index], _LABEL_WIDTH), (index + 0.5) * cell) for index in thinned(len(tokens), room)]


def _hovers(
    values: npt.NDArray[Any], queries: Sequence[str], keys: Sequence[str], left: float, above: float, cell: float
) -> list[dict[str, Any]]:
    return [
        _label(f"{printable(query)} ← {printable(key)}: {value:.4g}", left + column * cell, above + row * cell)
        for row, (query, line) in enumerate(zip(queries, values.tolist(), strict=True))
        for column, (key, value) in enumerate(zip(keys, line, strict=True))
    ]


def _image(values: npt.NDArray[Any]) -> str:
    """A PNG with one pixel for each entry, in base64."""
    from matplotlib.image import imsave

    top = values.max(initial=0.0)
    shares = values / top if top > 0 else np.zeros_like(values)
    table = color_table()
    buffer = io.BytesIO()
    imsave(buffer, table[np.rint(shares.clip(0, 1) * (len(table) - 1)).astype(int)], format="png")
    return base64.b64encode(buffer.getvalue()).decode("ascii")

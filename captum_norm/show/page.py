"""A page: its data, and how it becomes one HTML file that needs nothing else and is allowed nothing else.

Results become pages in :mod:`captum_norm.show.pages`. ``types.d.ts`` in the folder of the page's script declares the
same data under the same names.
"""

import base64
import functools
import hashlib
import html
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from captum_norm.errors import InvalidInputError
from captum_norm.text.characters import spelled_lines, spelled_out
from captum_norm.text.files import write_whole

__all__ = [
    "Column",
    "Example",
    "Figure",
    "Graph",
    "Links",
    "Maps",
    "Page",
    "Picture",
    "Scores",
    "Table",
    "Tokens",
    "render",
    "write_page",
]

Stack = Literal["encoder", "decoder", "cross", "answer", "links", "vision"]
Cell = str | int | float | None
Precision = Literal["f4", "f2", "i1"]

# Entries of all maps of a page: at most 4 MB, 8 MB, and for 50 examples of 12 layers, 12 heads and 64 tokens 14 MB.
_MOST_EXACT = 1_000_000
_MOST_HALF = 4_000_000
_HEIGHT = 640
_NO_SCRIPT = "This page draws with the script that it contains: switch on JavaScript."
_PRECISE_TO = {
    "f2": "Maps are stored in half precision (three digits).",
    "i1": "Maps are stored in 127 steps: to 1/254 of each map's largest entry.",
}


@dataclass(frozen=True)
class Tokens:
    """The tokens of one side of an example.

    Attributes:
        texts: the N tokens, as they are to be read.
        words: the number of each token's word, from 0 without gaps; -1 for a token outside of all words. None: every
            token is a word.
        word_texts: the text of each word. None: its tokens' texts, joined.
    """

    texts: Sequence[str]
    words: Sequence[int] | None = None
    word_texts: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.words is not None:
            _check_count("words", self.words, "tokens", len(self.texts))

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Scores:
    """One score for each input token.

    Attributes:
        method: the method's name, as on the command line.
        unit: what the scores are.
        values: (K,), any array or tensor.
        signed: whether scores below zero mean something, and are shown in the other colour; None: whether there are
            some.
    """

    method: str
    unit: str
    values: Any
    signed: bool | None = None

    def __post_init__(self) -> None:
        _set_values(self, (1,), f"the scores of {self.method}")


@dataclass(frozen=True)
class Maps:
    """One map for each layer, or for each head of each layer, of one method; rows are outputs, columns inputs.

    A method may have two of them for the same stack: one with heads, and one without, which then is what "all heads"
    shows. Without the latter "all heads" is the mean of the heads.

    Attributes:
        method: the method's name, as on the command line.
        unit: what the entries are.
        values: (L, Q, K) or (L, H, Q, K), any array or tensor.
        layers: the numbers of the L layers, from 0; ascending.
        stack: the layers' stack. Maps of no single layer, which need one number all the same: ``"answer"``, what an
            answer rests on, and ``"links"``, what links were read from.
        signed: whether entries below zero mean something; None: whether there are some.
        residual: whether the residual connection is part of the entries; if not, their rollout gives it as much as
            attention. None: the layers have no rollout.
    """

    method: str
    unit: str
    values: Any
    layers: Sequence[int]
    stack: Stack = "encoder"
    signed: bool | None = None
    residual: bool | None = None

    def __post_init__(self) -> None:
        _set_values(self, (3, 4), f"the maps of {self.method}")
        _check_count("layers", self.layers, "layers of maps", len(self.values))


@dataclass(frozen=True)
class Links:
    """Links between outputs and inputs, such as a word alignment.

    Attributes:
        links: (output position, input position, probability or None) each.
        sure: the gold links that are sure, (output position, input position) each; None without gold links.
        possible: the gold links that are possible, the sure ones among them or not; None without gold links.
        method: the name of the method that found them.
    """

    links: Sequence[tuple[int, int, float | None]]
    sure: Sequence[tuple[int, int]] | None = None
    possible: Sequence[tuple[int, int]] | None = None
    method: str = ""


@dataclass(frozen=True)
class Graph:
    """The routes by which information flows to output positions.

    Attributes:
        nodes: (stack, layer, block, position) each, as in :class:`captum_norm.attr.flow_graph.FlowNode`; positions are
            indices of the example's inputs.
        edges: (index of the source, index of the target, part, head or None, importance) each.
        outputs: (row of the example's maps, index of its node) each, of the nodes that the routes lead to.
        threshold: the importance that every edge exceeds.
        method: the method's name.
    """

    nodes: Sequence[tuple[str, int, str, int]]
    edges: Sequence[tuple[int, int, str, int | None, float]]
    outputs: Sequence[tuple[int, int]]
    threshold: float
    method: str = ""


@dataclass(frozen=True)
class Picture:
    """The picture that a vision model saw.

    Attributes:
        png: the picture as a PNG file.
        positions: (rows, columns) of the patches; each entry is the index of the patch's input token.
    """

    png: bytes
    positions: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Example:
    """One text, pair of texts, or picture, and what explains it.

    Attributes:
        title: what to call it in the list of examples.
        inputs: the K columns of its maps.
        outputs: the Q rows of its maps; None: the inputs.
        scores: scores of the inputs, one set for each method.
        maps: maps, one or more for each method.
        links: links from outputs to inputs.
        graph: a graph of what flows through the layers.
        pictures: pictures that the inputs are patches of.
        row: the row that is explained; None: no single one.
        facts: names and values that hold for this example alone.
        counted: which inputs the scores are relative to: others are shown without a colour. None: all.
    """

    title: str
    inputs: Tokens
    outputs: Tokens | None = None
    scores: Sequence[Scores] = ()
    maps: Sequence[Maps] = ()
    links: Sequence[Links] = ()
    graph: Graph | None = None
    pictures: Sequence[Picture] = ()
    row: int | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    counted: Sequence[bool] | None = None

    def __post_init__(self) -> None:
        rows, columns = len(self.inputs if self.outputs is None else self.outputs), len(self.inputs)
        for scores in self.scores:
            _check_count(f"scores of {scores.method}", scores.values, "tokens", columns)
        for maps in self.maps:
            if maps.values.shape[-2:] != (rows, columns):
                raise InvalidInputError(
                    f"maps of {maps.method} of shape {tuple(maps.values.shape)} do not fit {rows} outputs and "
                    f"{columns} inputs: the last two axes are these"
                )
        for links in self.links:
            found = [(row, column) for row, column, _ in links.links]
            for row, column in (*found, *(links.sure or ()), *(links.possible or ())):
                if not (0 <= row < rows and 0 <= column < columns):
                    raise InvalidInputError(
                        f"the link ({row}, {column}) is not between {rows} outputs and {columns} inputs; count from 0, "
                        "the output first"
                    )


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: its title.
        kind: ``"text"``; ``"number"``; ``"signed"`` for numbers with bars from a line at zero; ``"heat"`` for numbers
            on grounds in their colours.
        digits: the digits after the point; None for as many as give the largest number four significant ones.
        meaning: what the numbers are, in a sentence.
    """

    name: str
    kind: Literal["text", "number", "signed", "heat"] = "text"
    digits: int | None = None
    meaning: str = ""


@dataclass(frozen=True)
class Table:
    """A table, which the reader can sort by its columns.

    Attributes:
        title: its heading.
        columns: its columns.
        rows: one cell for each column; None for an empty cell. Texts in a column of numbers are sorted by the number
            that they begin with.
        note: a sentence to read it by.
        strong: the (row, column) of each cell to print bold.
        folded: whether it is shown only on demand.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    strong: Sequence[tuple[int, int]] = ()
    folded: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            _check_count("cells", row, f"columns of the table “{self.title}”", len(self.columns))


@dataclass(frozen=True)
class Figure:
    """A drawing.

    Attributes:
        title: its caption, and what screen readers read.
        svg: an SVG document. The page shows it as an image, so it needs its own styles and cannot use the page's.
        group: the heading that it shares with other figures, if any.
        note: a sentence to read it by; shown once for a group.
    """

    title: str
    svg: str
    group: str = ""
    note: str = ""


@dataclass(frozen=True)
class Page:
    """A page: what :func:`captum_norm.show.write_page` writes as one HTML file, and what a notebook shows.

    Attributes:
        title: its heading.
        facts: names and values under the heading, such as the model's name.
        examples: one or more texts; shown one at a time.
        tables: tables.
        figures: drawings.
        notes: sentences that the reader must know to understand the page.
        lead: a paragraph under the heading.

    Example:
        >>> from captum_norm.show.page import Maps, render
        >>> example = Example("a b", Tokens(["a", "b"]), maps=[Maps("norm", "norm", [[[1.0, 0.0], [0.5, 2.0]]], [0])])
        >>> "<h1>Norms</h1>" in render(Page("Norms", examples=[example]))
        True
    """

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    examples: Sequence[Example] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()
    lead: str = ""

    def _repr_html_(self) -> str:
        """Put the page into a frame with a content policy of its own: it can run its script and reach nothing else."""
        return (
            f'<iframe title="{html.escape(spelled_out(self.title))}" sandbox="allow-scripts" loading="lazy" '
            f'style="width:100%;height:{_HEIGHT}px;border:0" srcdoc="{html.escape(render(self))}"></iframe>'
        )


def _check_count(what: str, entries: Sequence[Any], of: str, count: int) -> None:
    """Check that there is one entry for each of what they are of."""
    if len(entries) != count:
        raise InvalidInputError(f"{len(entries)} {what} do not fit {count} {of}: give one for each")


def _set_values(data: Scores | Maps, axes: tuple[int, ...], what: str) -> None:
    """Convert the values to a finite array with one of these numbers of axes, and note whether some are negative."""
    values = data.values.detach().float().cpu() if hasattr(data.values, "detach") else data.values
    array = np.asarray(values, dtype=np.float32)
    if array.ndim not in axes:
        raise InvalidInputError(f"{what} have the shape {tuple(array.shape)}; give {' or '.join(map(str, axes))} axes")
    if not np.isfinite(array).all():
        raise InvalidInputError(f"{what} are not all finite; a page shows finite numbers only")
    object.__setattr__(data, "values", array)
    object.__setattr__(data, "signed", bool((array < 0).any()) if data.signed is None else data.signed)


def render(page: Page) -> str:
    """Render a page as one self-contained HTML file.

    The file has its data, script and style inside. Its content policy allows this script and this style by their hashes
    and images from the file itself; nothing else, in particular no request to anywhere. Everything in the page is
    escaped, and characters that are unprintable or change the direction of text are spelled out.

    Args:
        page: the data.

    Returns:
        A complete HTML document, for :func:`write_page`; or for the ``srcdoc`` of an
        ``<iframe sandbox="allow-scripts">``.
    """
    precision = _precision(maps.values.shape for example in page.examples for maps in example.maps)
    notes = [*page.notes, *([_PRECISE_TO[precision]] if precision in _PRECISE_TO else [])]
    content = _content(page, precision) | {"notes": [spelled_lines(note) for note in notes]}
    script, style = _asset("page.js"), _asset("page.css")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{_text(page.title)}</title>",
            f"<style>{style}</style>",
            "<body>",
            *_header(page),
            f'<main id="views"><noscript><p>{_NO_SCRIPT}</p></noscript></main>',
            *([] if not notes else ["<footer>", *(f"<p>{_text(note)}</p>" for note in notes), "</footer>"]),
            f'<script type="application/json" id="page">{_json(content)}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>\n",
        ]
    )


def write_page(path: str | os.PathLike[str], page: Page) -> Path:
    """Write a page atomically.

    Args:
        path: the file; its folder must exist.
        page: the page, such as a result's ``page()`` returns.

    Returns:
        The path.

    Raises:
        OSError: the folder does not exist or cannot be written to.
    """
    return write_whole(path, render(page).encode())


def _header(page: Page) -> list[str]:
    facts = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in page.facts.items())
    lead = [f'<p class="lead">{_text(page.lead)}</p>'] if page.lead else []
    return ["<header>", f"<h1>{_text(page.title)}</h1>", *lead, *([f"<dl>{facts}</dl>"] if facts else []), "</header>"]


def _text(text: str) -> str:
    return html.escape(spelled_lines(text))


def _json(content: Any) -> str:
    """Format JSON for a script element: without ``<``, so that nothing in it ends the element."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _content(value: Any, precision: Precision) -> Any:
    """Convert data to JSON: the dataclasses' fields under their names, arrays encoded, texts printable."""
    if isinstance(value, Tokens):
        words = None if value.words is None else [int(word) for word in value.words]
        return {"texts": _spelled(value.texts), "words": words, "word_texts": _spelled(value.word_texts)}
    if is_dataclass(value):
        content = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, Maps):
            content |= {"values": encode(value.values, precision), "layers": [int(layer) for layer in value.layers]}
        return _content(content, precision)
    if isinstance(value, str):
        return spelled_lines(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, np.ndarray):
        return encode(value)
    if isinstance(value, Mapping):
        return {_content(name, precision): _content(entry, precision) for name, entry in value.items()}
    if isinstance(value, Sequence):
        return [_content(entry, precision) for entry in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _spelled(texts: Sequence[str] | None) -> list[str] | None:
    return None if texts is None else [spelled_out(text) or "∅" for text in texts]


@functools.cache
def _asset(name: str) -> str:
    """Read one of the files that ``make script`` writes."""
    return (files("captum_norm.show") / "assets" / name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


class EncodedArray(TypedDict):
    """An array as text, which the page's script decodes.

    ``data`` is base64 of zlib of the little-endian, row-major bytes: first the first byte of every entry, then the
    second ... (neighbouring entries share their leading bytes, which compresses better).

    ``dtype`` is ``f4`` (float32, exact; ``max`` is empty), ``f2`` (float16 of the share of the array's largest absolute
    value, the one number in ``max``), or ``i1``: each byte, from -127 to 127, is so many 127ths of the largest absolute
    value of its map, i.e. of the last two axes; ``max`` has one number for each map, and each map is written column by
    column, since keys that much is drawn from make columns alike.
    """

    shape: list[int]
    dtype: Precision
    max: list[float]
    data: str


def _precision(shapes: Iterable[tuple[int, ...]]) -> Precision:
    """Choose the precision of all maps of a page, whose shapes these are."""
    entries = sum(math.prod(shape) for shape in shapes)
    return "f4" if entries <= _MOST_EXACT else "f2" if entries <= _MOST_HALF else "i1"


def encode(values: npt.NDArray[np.float32], precision: Precision = "f4") -> EncodedArray:
    """Encode an array of finite numbers, as :class:`EncodedArray` says."""
    shape = list(values.shape)
    if precision == "f4":
        return {"shape": shape, "dtype": "f4", "max": [], "data": _compressed(values.astype("<f4"))}
    largest = np.abs(values).max(axis=(-2, -1) if precision == "i1" else None, keepdims=True, initial=0.0)
    shares = np.divide(values, largest, out=np.zeros_like(values), where=largest > 0)
    entries = shares.astype("<f2") if precision == "f2" else np.rint(127 * shares).astype("i1").swapaxes(-1, -2)
    tops = [float(f"{top:.7g}") for top in largest.ravel().tolist()]
    return {"shape": shape, "dtype": precision, "max": tops, "data": _compressed(entries)}


def _compressed(entries: npt.NDArray[Any]) -> str:
    planes = np.ascontiguousarray(entries).view("u1").reshape(-1, entries.dtype.itemsize).T
    # Numbers compress better without a search for what repeats at length, and levels above 6 take far longer.
    compressor = zlib.compressobj(6, zlib.DEFLATED, 15, 9, zlib.Z_FILTERED)
    return base64.b64encode(compressor.compress(planes.tobytes()) + compressor.flush()).decode("ascii")

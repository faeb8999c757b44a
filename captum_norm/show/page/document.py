"""The data of a page, before it becomes HTML: examples with scores and maps, tables, figures.

Results become a :class:`captum_norm.show.page.Page` by functions in the files next to this one.
``types.d.ts`` in the folder of the page's script declares the same data under the same names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from captum_norm.errors import InvalidInputError

Stack = Literal["encoder", "decoder", "cross", "answer", "links", "vision"]
Kind = Literal["text", "number", "signed", "heat"]
Array = npt.NDArray[np.float32]
Cell = str | int | float | None


@dataclass(frozen=True)
class Tokens:
    """The tokens of one side of an example.

    Attributes:
        texts: the N tokens, as they are to be read.
        words: the number of each token's word, from 0 without gaps; -1 for a token outside of all words. None: every
            token is a word.
        word_texts: the text of each word. None: its tokens' texts, joined.

    Example:
        >>> len(Tokens(["[CLS]", "eff", "##ably", "[SEP]"], words=[-1, 0, 0, -1], word_texts=["effably"]))
        4
    """

    texts: Sequence[str]
    words: Sequence[int] | None = None
    word_texts: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.words is None:
            if self.word_texts is not None:
                raise InvalidInputError("got texts of words without the words of tokens; give words, too")
            return
        if len(self.words) != len(self.texts):
            raise InvalidInputError(f"{len(self.words)} words do not fit {len(self.texts)} tokens: give one for each")
        count = max(self.words, default=-1) + 1
        if set(self.words) - {-1} != set(range(count)):
            raise InvalidInputError("got words with gaps; number them from 0 without gaps, -1 outside of words")
        if self.word_texts is not None and len(self.word_texts) != count:
            raise InvalidInputError(f"{len(self.word_texts)} texts do not fit {count} words: give one for each")

    def __len__(self) -> int:
        """Count the tokens."""
        return len(self.texts)


@dataclass(frozen=True)
class Scores:
    """One score for each input token.

    Attributes:
        method: the method's name, as on the command line.
        unit: what the scores are.
        values: (K,), any array or tensor.
        signed: whether scores below zero mean something, and are shown in the other colour.
    """

    method: str
    unit: str
    values: Any
    signed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _checked(self.values, (1,), f"the scores of {self.method}"))


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
        signed: whether entries below zero mean something.
        residual: whether the residual connection is part of the entries; if not, their rollout gives it as much as
            attention. None: the layers have no rollout.
    """

    method: str
    unit: str
    values: Any
    layers: Sequence[int]
    stack: Stack = "encoder"
    signed: bool = False
    residual: bool | None = None

    def __post_init__(self) -> None:
        values = _checked(self.values, (3, 4), f"the maps of {self.method}")
        object.__setattr__(self, "values", values)
        if len(self.layers) != len(values):
            raise InvalidInputError(f"{len(self.layers)} layers do not fit maps of {len(values)}: give one for each")


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

    def check(self, rows: int, columns: int) -> None:
        """Check that all links are between so many outputs and inputs."""
        found = [(output, given) for output, given, _ in self.links]
        for output, given in (*found, *(self.sure or ()), *(self.possible or ())):
            if not (0 <= output < rows and 0 <= given < columns):
                raise InvalidInputError(
                    f"the link ({output}, {given}) is not between {rows} outputs and {columns} inputs; count from 0, "
                    "the output first"
                )


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

    def check(self, rows: int, columns: int) -> None:
        """Check that all positions and rows are those of so many outputs and inputs."""
        inside = all(0 <= position < columns for _, _, _, position in self.nodes)
        if not (inside and self.outputs and all(0 <= row < rows for row, _ in self.outputs)):
            raise InvalidInputError(
                f"the graph of {self.method} does not fit {rows} outputs and {columns} inputs: its positions are "
                "indices of inputs, and it leads to one output or more"
            )


@dataclass(frozen=True)
class Picture:
    """The picture that a vision model saw.

    Attributes:
        png: the picture as a PNG file.
        positions: (rows, columns) of the patches; each entry is the index of the patch's input token.
    """

    png: bytes
    positions: Sequence[Sequence[int]]

    def check(self, columns: int) -> None:
        """Check that the patches are a rectangle of indices of so many inputs."""
        inside = all(0 <= position < columns for row in self.positions for position in row)
        if not inside or len({len(row) for row in self.positions}) != 1:
            raise InvalidInputError(f"the patches of a picture are no rectangle of indices among {columns} inputs")


@dataclass(frozen=True)
class Example:
    """One text, pair of texts, or picture, and what was found out about it.

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

    Example:
        >>> Example("a b", Tokens(["a", "b"]), scores=[Scores("norm", "norm", [0.5, 1.0])]).scores[0].values.tolist()
        [0.5, 1.0]
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
            if len(scores.values) != columns:
                raise InvalidInputError(
                    f"{len(scores.values)} scores of {scores.method} do not fit {columns} tokens: give one for each"
                )
        for maps in self.maps:
            if maps.values.shape[-2:] != (rows, columns):
                raise InvalidInputError(
                    f"maps of {maps.method} of shape {tuple(maps.values.shape)} do not fit {rows} outputs and "
                    f"{columns} inputs: the last two axes are these"
                )
        for links in self.links:
            links.check(rows, columns)
        for picture in self.pictures:
            picture.check(columns)
        if self.graph is not None:
            self.graph.check(rows, columns)
        if self.counted is not None and len(self.counted) != columns:
            raise InvalidInputError(f"{len(self.counted)} marks do not fit {columns} inputs: give one for each")
        if self.row is not None and not 0 <= self.row < rows:
            raise InvalidInputError(f"there is no row {self.row} to mark among {rows}; count them from 0")


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
    kind: Kind = "text"
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
            if len(row) != len(self.columns):
                raise InvalidInputError(
                    f"a row of {len(row)} cells does not fit the {len(self.columns)} columns of the table "
                    f"“{self.title}”: give one cell for each"
                )


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


def _checked(values: Any, axes: tuple[int, ...], what: str) -> Array:
    """Return a finite array of float32 with one of these numbers of axes."""
    if hasattr(values, "detach"):
        values = values.detach().float().cpu()
    array = np.asarray(values, dtype=np.float32)
    if array.ndim not in axes:
        raise InvalidInputError(f"{what} have the shape {tuple(array.shape)}; give {' or '.join(map(str, axes))} axes")
    if not np.isfinite(array).all():
        raise InvalidInputError(f"{what} are not all finite; a page shows finite numbers only")
    return array

"""Pages whose every number is known: small ones, long ones, ones with everything, and hostile ones."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib import image

from captum_norm.attr.components import PART
from captum_norm.results.components import Component, ComponentScores, edge_ends
from captum_norm.results.outputs import NamedOutput
from captum_norm.show.page import (
    Column,
    Components,
    Example,
    Figure,
    Graph,
    Links,
    Maps,
    Page,
    Picture,
    Scores,
    Table,
    Tokens,
)

WORDS = ["A", "man", "plays", "unbelievably", "well", "."]
PIECES = ["[CLS]", "A", "man", "plays", "un", "##believ", "##ably", "well", ".", "[SEP]"]
OF_WORD = [-1, 0, 1, 2, 3, 3, 3, 4, 5, -1]
LAYERS, HEADS = 3, 2
ROW = 4
"""The row that is explained."""


def numbers(seed: int, *shape: int) -> npt.NDArray[Any]:
    """Random numbers above zero, no two alike in four digits."""
    count = int(np.prod(shape))
    return (np.random.default_rng(seed).permutation(count).reshape(shape) + 1).astype(np.float32) / count


def sentence(seed: int = 0, title: str = "A man plays unbelievably well.") -> Example:
    """Words of several pieces; a method with maps, with and without heads; another one; signed scores."""
    size = len(PIECES)
    signed = numbers(seed + 3, size) - 0.5
    return Example(
        title,
        Tokens(PIECES, OF_WORD, WORDS),
        scores=[Scores("norm", "norm", numbers(seed + 4, size)), Scores("attnlrp", "relevance", signed, signed=True)],
        maps=[
            Maps("norm", "norm", numbers(seed, LAYERS, HEADS, size, size), range(LAYERS)),
            Maps("norm", "norm", numbers(seed + 1, LAYERS, size, size), range(LAYERS)),
            Maps("weights", "weight", numbers(seed + 2, LAYERS, HEADS, size, size), range(LAYERS)),
        ],
        row=ROW,
    )


def two_sentences() -> Page:
    return Page(
        "Norms of a sentence",
        {"model": "tiny", "layers": "3"},
        [sentence(), sentence(10, "Another one.")],
        notes=["The model is random."],
    )


def translation() -> Example:
    source, target = ["Le", "chat", "dort", "."], ["The", "cat", "sleeps", "."]
    return Example(
        "Le chat dort.",
        Tokens(source),
        Tokens(target),
        maps=[Maps("norm", "norm", numbers(20, 2, 4, 4), [0, 1], stack="cross")],
        links=[
            Links(
                [(0, 0, 0.9), (1, 1, 0.8), (2, 2, None), (2, 1, 0.3), (2, 3, 0.5)],
                sure=[(0, 0), (1, 1), (2, 2), (3, 3)],
                possible=[(2, 3)],
                method="norm",
            )
        ],
    )


def flow() -> Example:
    """Two layers: 23 % of the output come from the first token, 30 % from the second, 28 % from the third."""
    inputs = [("encoder", -1, "input", place) for place in range(3)]
    nodes = [*inputs, ("encoder", 0, "attention", 1), ("encoder", 0, "attention", 2), ("encoder", 1, "attention", 2)]
    edges: list[tuple[int, int, str, int | None, float]] = [
        (0, 3, "attention", 0, 0.3),
        (1, 3, "residual", None, 0.6),
        (0, 4, "attention", 1, 0.2),
        (2, 4, "residual", None, 0.7),
        (3, 5, "attention", 0, 0.5),
        (4, 5, "residual", None, 0.4),
    ]
    graph = Graph(nodes, edges, outputs=[(2, 5)], threshold=0.05, method="information-flow")
    return Example("a b c", Tokens(["a", "b", "c"]), graph=graph, row=2)


def answer() -> Example:
    """An answer of two tokens to two: the first comes from the source alone, the second from the first, too."""
    nodes = [
        ("encoder", -1, "input", 0),
        ("encoder", -1, "input", 1),
        ("decoder", -1, "input", 2),
        ("decoder", -1, "input", 3),
        ("decoder", 0, "cross-attention", 2),
        ("decoder", 0, "cross-attention", 3),
    ]
    edges: list[tuple[int, int, str, int | None, float]] = [
        (0, 4, "attention", None, 0.8),
        (2, 4, "residual", None, 0.2),
        (1, 5, "attention", None, 0.4),
        (2, 5, "attention", None, 0.1),
        (3, 5, "residual", None, 0.5),
    ]
    graph = Graph(nodes, edges, outputs=[(0, 4), (1, 5)], threshold=0.05, method="information-flow")
    inputs = Tokens(["le", "chat", "<s>", "the"])
    scores = Scores("information-flow", "share of rollout", [0.8, 0.4, 0.3, 0.5])
    maps = Maps("information-flow", "share of rollout", [[[0.8, 0, 0.2, 0], [0, 0.4, 0.1, 0.5]]], [0], "answer")
    outputs = Tokens(["the", "cat"], likely=["“the” 71 %, “a” 20 %, “my” 2 %", "“cat” 55 %, “dog” 31 %, “ox” 4 %"])
    return Example("the cat", inputs, outputs, scores=[scores], maps=[maps], graph=graph, dependent=[False, True])


def picture() -> Example:
    png = io.BytesIO()
    image.imsave(png, np.random.default_rng(0).random((64, 64, 3)), format="png")
    texts = ["[CLS]", *(f"row {row}, column {column}" for row in range(4) for column in range(4))]
    return Example(
        "A picture",
        Tokens(texts),
        scores=[Scores("norm", "norm", numbers(30, 17))],
        maps=[Maps("norm", "norm", numbers(31, 2, 17, 17), [0, 1], stack="vision")],
        pictures=[Picture(png.getvalue(), [[1 + 4 * row + column for column in range(4)] for row in range(4)])],
        row=0,
    )


TEXTS = ["ĠEve", "Ġgave", "ĠAda", "Ġto"]
HEAD_SCORES: list[list[list[float]]] = [
    [[-3.0, 0, 0, 0], [0, 0, 0, 0.25], [0.5, 1.5, 0, 0.5]],
    [[0, 0, -0.25, 0], [1, 0, 0, 3], [0, 0, 0, 0]],
]
"""Scores of two layers with three heads at four tokens: in all −3, .25, 2.5; −.25, 4, 0."""
NETWORKS = [[1.0, 1, 0, 1], [0, 0, -1, 0]]
STREAMS = [[2.0, 0, -1, 1], [1, 0, 1, 0], [0, 0, 0, 2]]
EDGES = {
    "input->m0": 2.5,
    "a0.h2->m0": 0.5,
    "input->a0.h0<v>": -3.0,
    "a0.h0->a1.h1<q>": -1.0,
    "a0.h0->a1.h1<v>": -2.0,
    "m0->a1.h1<k>": 0.25,
    "m0->logits": 2.0,
    "a1.h1->logits": 4.0,
}
"""Between the heads and networks of two layers; 15.25 in all."""
PROMOTED = [{"decoder heads 1.1": [(" Ada", 3.5), (" Eve", -0.25)], "decoder heads 0.0": [(" to", 0.5)]}]
NEURONS = [[0.01 * number for number in range(200)], [-0.01 * number for number in range(200)]]


def components(*kinds: str, unit: str = PART) -> ComponentScores:
    """Components of these kinds, each of whose scores is known: part of one output minus another."""
    values: dict[Component, Any] = {
        "heads": HEAD_SCORES,
        "feed_forward": NETWORKS,
        "residual": STREAMS,
        "neurons": NEURONS,
    }
    parts = {kind: {"decoder": torch.tensor([part])} for kind, part in values.items() if kind in kinds}
    if "edges" in kinds:
        sources, targets = edge_ends(9, 21)
        edges = torch.zeros(1, 9, 21)
        for name, score in EDGES.items():
            source, target = name.split("->")
            edges[0, sources.index(source), targets.index(target)] = score
        parts["edges"] = {"decoder": edges}
    outputs = [NamedOutput((4, 7), " Ada −  Eve", 3.5)]
    real = torch.ones(1, len(TEXTS), dtype=torch.bool)
    texts = {"decoder": [TEXTS]}
    return ComponentScores(parts, {"decoder": real}, texts, outputs, "Tiny", "relp", unit, promoted=PROMOTED)


def component_example(*kinds: str) -> Example:
    (example,) = components(*kinds).page().examples
    return example  # type: ignore[no-any-return]


TABLE = Table(
    "Faithfulness",
    [Column("Method"), Column("Comprehensiveness", "number"), Column("Difference", "signed")],
    [["norm", 0.25, -0.125], ["weights", 0.125, 0.5], ["random", 0.0, None], ["attnlrp", 0.375, 0.0]],
    note="More is better.",
)
FIGURE = Figure(
    "Norms by layer",
    '<svg xmlns="http://www.w3.org/2000/svg" width="100" height="50"><style>path { stroke: red }</style>'
    '<path d="M0 0L100 50"/></svg>',
)


def everything() -> Page:
    """An example for every view."""
    return Page(
        "Everything",
        {"model": "tiny"},
        [
            sentence(),
            translation(),
            flow(),
            answer(),
            picture(),
            component_example("heads", "feed_forward", "residual"),
        ],
        tables=[TABLE],
        figures=[FIGURE],
        notes=["The model is random."],
    )


def long(length: int = 500) -> Page:
    tokens = [f"token{index}" for index in range(length)]
    values = numbers(40, length * length).reshape(1, 1, length, length)
    return Page("Long", examples=[Example("A long text", Tokens(tokens), maps=[Maps("norm", "norm", values, [0])])])


HOSTILE = [
    "<script>document.title = 'taken over'</script>",
    "</script><script>document.title = 'taken over'</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.title = 'taken over'\">",
    "&lt;b&gt;&amp;amp;",
    "\"'`${document.title}",
    "\u202egnihtemos",  # right-to-left override
    "a\u200bb\u200d\u2060",  # zero width
    "\ud83d",  # half of a surrogate pair
    "\x00\x1b[31m\x7f\x9b",
    "\u2028\u2029",
    "",
    "W" * 3000,
    "__proto__",
    "constructor",
]


def hostile(texts: Sequence[str] = HOSTILE) -> Page:
    """These texts wherever there are texts."""
    count = len(texts)
    examples = [
        Example(
            text,
            Tokens(texts),
            scores=[Scores(text, text, numbers(50, count))],
            maps=[Maps(text, text, numbers(51, 2, count, count), [0, 1])],
            components=[Components("residual", "encoder", text, numbers(52, 2, 1, count), Tokens(texts))],
            facts={text: text},
            row=1,
        )
        for text in texts
    ]
    table = Table(texts[0], [Column(text, meaning=text) for text in texts], [list(texts)], note=texts[1])
    return Page(
        texts[0],
        {text: text for text in texts},
        examples,
        tables=[table],
        figures=[Figure(text, FIGURE.svg) for text in texts[:3]],
        notes=texts,
    )

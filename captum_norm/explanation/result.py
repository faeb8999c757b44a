"""Scores of texts, and what they depend on: the result of :func:`captum_norm.explain`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from captum_norm.attr.flow_graph import FlowGraph
from captum_norm.checks import check_count
from captum_norm.results.aggregation import CAUSAL_ROLLOUT, ROLLED, with_prefix_rows
from captum_norm.results.base import Result, contents
from captum_norm.results.maps import AttributionMaps
from captum_norm.results.outputs import NamedOutput, facts_of_outputs, named_alone
from captum_norm.results.stacks import STACKS, kept_entries, place_of
from captum_norm.text.characters import spelled_out
from captum_norm.text.words import Words, WordScore
from captum_norm.versions import versions


class TokenScore(NamedTuple):
    """A token, its score, and the number of its text."""

    token: str
    score: float
    text: int


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(Result):
    """The result of :func:`captum_norm.explain`: the scores of texts, the maps behind them, and how they came about.

    ``explanation[0]`` is that of the first text without padding. A notebook shows it as a page.

    Attributes:
        texts: the B texts.
        model: the name of the model or its class.
        method: the method's name.
        scope: the method's scope; None if it has none.
        outputs: the output explained of each text, or what the model predicts if ``explained`` is False, where hidden
            states are; none if the model has no head or an output at every position, of which none was chosen.
        aggregation: how the layers are combined; None for a single layer.
        layer: the index of the layer explained; None for all together.
        position: the output position explained: an index, several, or "first", "last" or "mean".
        tokens: the S tokens of each text as people write them, padding included, virtual tokens first; or its words.
        real: True at tokens, False at padding, (B, S).
        scores: a score for each token, (B, S), 0 at padding.
        unit: what the scores are.
        maps: their maps; None if the method has none.
        map_unit: what the entries of the maps are.
        convergence_delta: the completeness error of each text, (B,): for methods with maps the largest of the layers,
            relative to what they computed; None if the method has none.
        graphs: the routes of information in each text without padding, if requested.
        words_of_tokens: the words of each text's tokens, without padding.
        beside: explanations of the same texts that the page shows, too: by attention weights, and by single heads.
    """

    texts: Sequence[str]
    model: str
    method: str
    scope: str | None
    outputs: Sequence[NamedOutput]
    aggregation: str | None
    layer: int | None
    position: int | str
    tokens: Sequence[Sequence[str]]
    real: Tensor
    scores: Tensor
    unit: str
    maps: AttributionMaps | None = None
    map_unit: str = ""
    convergence_delta: Tensor | None = None
    graphs: Sequence[FlowGraph] = ()
    words_of_tokens: Sequence[Words] = ()
    beside: Sequence["Explanation"] = ()

    _added = MappingProxyType({"beside": []})
    _axes = MappingProxyType({"texts": ("B",), "tokens": ("B",), "real": ("BS",), "scores": ("BS",)})

    @classmethod
    def _upgraded(cls, content: dict[str, Any], version: int) -> dict[str, Any]:
        """Return the content of a file of an earlier version, in which an output had a name alone."""
        for name in ("changes", "head"):  # which this class had once
            content.pop(name, None)
        if "target" in content:
            target = content.pop("target")
            content["outputs"] = [] if target is None else named_alone([target] * len(content["texts"]))
        content = super()._upgraded(content, version)
        if version > 1:  # before, the numbers of layers are beside their maps, and a graph has one output
            return content
        graph = content.pop("graph")
        content["graphs"] = [] if graph is None else [{"outputs": [graph.pop("output")], **graph}]
        layers, maps = content.pop("layers"), content["maps"]
        if maps is not None:
            numbers = {name: layers for name in STACKS if maps[name] is not None}
            content["maps"] = AttributionMaps._upgraded(maps, version) | {"layers": numbers}
        return content

    def __repr__(self) -> str:
        count = "1 text" if len(self) == 1 else f"{len(self)} texts"
        best = ", ".join(f"{token!r} {score:.3g}" for token, score, _ in self.top(3))
        delta = self.facts().get("convergence delta")
        ends = "" if delta is None else f"; convergence delta {delta}"
        maps = "" if self.maps is None else f"; {self.maps!r}"
        first = "".join(f"{name} {text}; " for name, text in facts_of_outputs(self.outputs).items() if name != "top 3")
        return spelled_out(f"Explanation({first}{self._method}, {self.model}: {count}, most {best}{ends}{maps})")

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, example: int) -> "Explanation":
        """Return the explanation of one text, without padding; refuse if there is no such text."""
        number = place_of("text", example, len(self))
        real, delta = self.real[number], self.convergence_delta
        return replace(
            self,
            texts=[self.texts[number]],
            outputs=self.outputs[number : number + 1],
            tokens=[kept_entries(self.tokens[number], real)],
            real=real[None, real],
            scores=self.scores[number][None, real],
            maps=None if self.maps is None else self.maps[number],
            convergence_delta=None if delta is None else delta[number : number + 1],
            graphs=self.graphs[number : number + 1],
            words_of_tokens=self.words_of_tokens[number : number + 1],
            beside=[other[number] for other in self.beside],
        )

    def __iter__(self) -> Iterator["Explanation"]:
        return (self[example] for example in range(len(self)))

    def words(self, score: WordScore = "sum") -> "Explanation":
        """Return the explanation of words: their scores and maps from those of their tokens.

        Args:
            score: how a word's score, and its column in the maps, comes from its tokens': ``"sum"``, ``"mean"`` or
                ``"max"``, the one farthest from zero. Its row is the mean of theirs. For norms of vectors added, see
                :meth:`captum_norm.text.words.Words.segments`.

        Raises:
            InvalidInputError: this is no way to score words.
        """
        texts, position = [words.texts for words in self.words_of_tokens], self.position
        size = max(map(len, texts))
        scores = [words.scores(part.scores[0], score) for words, part in zip(self.words_of_tokens, self, strict=True)]
        if isinstance(position, int) and len(self) == 1:
            position = self.words_of_tokens[0].numbers[position]
        return replace(
            self,
            position=position,
            tokens=[[*words, *[""] * (size - len(words))] for words in texts],
            real=torch.arange(size) < torch.tensor(list(map(len, texts)))[:, None],
            scores=torch.stack([pad(of_words, (0, size - len(of_words))) for of_words in scores]),
            maps=None if self.maps is None else self.maps.words(score, self.words_of_tokens),
            graphs=(),
            words_of_tokens=[Words(words, tuple(range(len(words))), words) for words in texts],
            beside=[other.words(score) for other in self.beside],
        )

    @property
    def layers(self) -> Sequence[int]:
        """The numbers of the layers that have maps."""
        return () if self.maps is None else next(iter(self.maps.layers.values()))

    @property
    def squares(self) -> Tensor | None:
        """The maps with a row and a column for each token, (B, L, [H,] S, S); None if the method has none."""
        if self.maps is None:
            return None
        size = self.scores.shape[1]
        # The tokens of a tuned prefix receive nothing.
        return with_prefix_rows(self.maps.self_attention, 0)[..., -size:, -size:]

    def facts(self) -> dict[str, str]:
        """Return the names and values to show beside the scores."""
        facts = {**facts_of_outputs(self.outputs), "model": self.model, "method": self._method}
        if self.layer is not None:
            facts["layer"] = str(self.layer)
        elif self.aggregation is not None:
            facts["layer"] = f"all ({self.aggregation})"
        facts["position"] = str(self.position)
        if self.convergence_delta is not None:
            facts["convergence delta"] = f"{float(self.convergence_delta.abs().max()):.1e}"
        return facts

    @property
    def notes(self) -> list[str]:
        """What to know before reading the scores."""
        causal = self.maps is not None and self.maps.decoder is not None
        return [CAUSAL_ROLLOUT] if causal and self.unit == ROLLED else []

    def top(self, count: int = 10) -> list["TokenScore"]:
        """Return the tokens of highest score in all texts: each with its score and the number of its text."""
        rows = sorted(self.records(), key=lambda row: -row["score"])[: check_count("count", count)]
        return [TokenScore(row["token"], row["score"], row["example"]) for row in rows]

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each token: the number of its text, the output, its number in the text, token and score."""
        return [
            {"example": example, **(output.record() if output else {}), "index": index, "token": token, "score": score}
            for example, single in enumerate(self)
            for output in [next(iter(single.outputs), None)]
            for index, (token, score) in enumerate(zip(single.tokens[0], single.scores[0].tolist(), strict=True))
        ]

    def _json(self) -> Any:
        """Return everything; of several texts a list."""
        every = [single._content() for single in self]
        return every[0] if len(self) == 1 else every

    @property
    def _method(self) -> str:
        return self.method if self.scope is None else f"{self.method} ({self.scope})"

    def _content(self) -> dict[str, Any]:
        """Return everything about the only text, for JSON."""
        squares, words = self.squares, self.words_of_tokens[0]
        names = ("model", "method", "scope", "aggregation", "layer", "position")
        maps = None
        if squares is not None:
            axes = ["layer", *["head"] * (squares.dim() - 4), "query", "key"]
            maps = {"axes": axes, "layers": list(self.layers), "unit": self.map_unit, "values": squares[0].tolist()}
        output = [contents(output) for output in self.outputs]
        return {"text": self.texts[0], "output": output[0] if output else None} | {
            **{name: getattr(self, name) for name in names},
            "tokens": list(self.tokens[0]),
            "words": {"texts": list(words.texts), "of_tokens": list(words.numbers)},
            "scores": self.scores[0].tolist(),
            "unit": self.unit,
            "map": maps,
            "convergence_delta": None if self.convergence_delta is None else float(self.convergence_delta[0]),
            "versions": versions(),
        }

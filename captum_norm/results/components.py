"""What components inside a model contribute to an output: streams, heads, networks, neurons, experts, edges."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from captum_norm.checks import check_bool, check_choice, check_count
from captum_norm.errors import InvalidInputError
from captum_norm.results.base import Result
from captum_norm.results.outputs import NamedOutput, facts_of_outputs
from captum_norm.results.stacks import kept_entries, place_of
from captum_norm.text.characters import spelled_out

__all__ = ["Component", "ComponentScore", "ComponentScores", "edge_ends"]

Component = Literal["residual", "heads", "feed_forward", "neurons", "experts", "edges"]
"""A kind of components: the residual streams between layers, attention's heads, feed-forward networks, their neurons,
the experts of a mixture, or the edges by which what one component writes to the stream is read by another."""
Promoted = Mapping[str, Sequence[tuple[str, float]]]  # by stack, kind and name of a component
NUMBERED = frozenset({"heads", "neurons", "experts", "edges"})
"""The kinds with two axes, of layers and of several in each, or of the sources and targets of edges."""


class ComponentScore(NamedTuple):
    """The score of one component.

    Attributes:
        name: its layer, and its number there, such as ``"9.6"`` for head 6 of layer 9; of an edge its source and its
            target, such as ``"a9.h6->m10"``, as :func:`edge_ends` names them.
        score: what it contributes.
        kind: the kind of component.
        stack: ``"encoder"``, ``"decoder"`` or ``"cross"``.
        layer: its layer, from 0; of residual streams the layer that they enter, of edges that of their target, or the
            number of layers for the last, and the logits.
        number: its number in the layer, from 0; None where there is one, and of edges.
        position: the position; None for all together, as edges always are.
        token: the token there.
        example: the index of the example.
    """

    name: str
    score: float
    kind: Component
    stack: str
    layer: int
    number: int | None
    position: int | None
    token: str | None
    example: int


@dataclass(frozen=True, eq=False, repr=False)
class ComponentScores(Result):
    """What components inside a model contribute to one output of each example.

    ``scores[0]`` are those of the first example without padding. A notebook shows the result as a page.

    Attributes:
        parts: by kind and stack, at every position of the stack, 0 at padding: residual streams (B, L + 1, S) as they
            enter each layer and leave the last; heads (B, L, H, S) before the output projection; feed-forward networks
            (B, L, S), their neurons (B, L, N) or at each position (B, L, N, S); experts (B, L, E, S); edges (B, U, V)
            from U sources to V targets, which :func:`edge_ends` names. Where layers have different numbers, those
            that a layer lacks are 0, as is what is no edge.
        real: of each stack, True at positions that are no padding, (B, S).
        tokens: the texts of each stack's positions, if they are known.
        outputs: the output explained of each example.
        model: the model's class.
        method: the method's name.
        unit: what a score is.
        convergence_delta: the relative error of the sum of the inputs' contributions, (B,); None without one.
        promoted: of each example the tokens whose logits rise most by what one of the strongest components, such as
            ``"decoder heads 9.6"``, writes directly where the output is read, then those explained, and by how much.
    """

    parts: Mapping[Component, Mapping[str, Tensor]]
    real: Mapping[str, Tensor]
    tokens: Mapping[str, Sequence[Sequence[str]]]
    outputs: Sequence[NamedOutput]
    model: str
    method: str
    unit: str
    convergence_delta: Tensor | None = None
    promoted: Sequence[Promoted] = ()

    def __repr__(self) -> str:
        entries = (entry for kind in self.parts for entry in self.top(3, kind))
        best = ", ".join(f"{entry.kind} {entry.name} {entry.score:.3g}" for entry in entries)
        said = "".join(f"{name} {value}; " for name, value in facts_of_outputs(self.outputs).items() if name != "top 3")
        return spelled_out(f"ComponentScores({said}{self.method}, {self.model}: {best})")

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, example: int) -> "ComponentScores":
        """Return the scores of one example, without padding.

        Raises:
            InvalidInputError: there is no such example.
        """
        number, delta = place_of("example", example, len(self)), self.convergence_delta
        kept = {stack: real[number] for stack, real in self.real.items()}

        def cut(kind: str, part: Tensor, real: Tensor) -> Tensor:
            one = part[number : number + 1]
            return one[..., real.to(one.device)] if _at_positions(kind, part) else one

        return replace(
            self,
            parts={
                kind: {stack: cut(kind, part, kept[stack]) for stack, part in stacks.items()}
                for kind, stacks in self.parts.items()
            },
            real={stack: real[None, real] for stack, real in kept.items()},
            tokens={stack: [kept_entries(texts[number], kept[stack])] for stack, texts in self.tokens.items()},
            outputs=self.outputs[number : number + 1],
            convergence_delta=None if delta is None else delta[number : number + 1],
            promoted=self.promoted[number : number + 1],
        )

    def __iter__(self) -> Iterator["ComponentScores"]:
        return (self[example] for example in range(len(self)))

    @property
    def scores(self) -> Tensor:
        """The scores of the only kind in the only stack.

        Raises:
            InvalidInputError: there are several, which ``parts`` has.
        """
        names = [f'parts["{kind}"]["{stack}"]' for kind, stacks in self.parts.items() for stack in stacks]
        if len(names) != 1:
            raise InvalidInputError(f"got scores of several kinds or stacks: read {', '.join(names)}")
        return next(iter(next(iter(self.parts.values())).values()))

    def totals(self, kind: Component | None = None) -> Mapping[str, Tensor]:
        """Add up the positions of a kind's scores, by stack: (B, L), (B, L, H) where a layer has several, (B, U, V).

        Args:
            kind: the kind; None for the first.
        """
        chosen = self._kind(kind)
        parts = self.parts[chosen].items()
        return {stack: part.sum(-1) if _at_positions(chosen, part) else part for stack, part in parts}

    def top(
        self, count: int = 10, kind: Component | None = None, *, per_position: bool = False
    ) -> list[ComponentScore]:
        """Return the components whose scores are farthest from 0 in all examples.

        Args:
            count: how many.
            kind: their kind; None for the first.
            per_position: rank scores at single positions, as is always done for residual streams.
        """
        rows = self._entries(self._kind(kind), per_position=check_bool("per_position", per_position))
        return sorted(rows, key=lambda row: -abs(row.score))[: check_count("count", count)]

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each component, at each position where scores have these, with the output explained.

        Edges have a row each if their score is not 0.
        """
        return [
            {"example": row.example, **self.outputs[row.example].record()}
            | {name: value for name, value in row._asdict().items() if name not in ("example", "score")}
            | {"score": row.score}
            for kind in self.parts
            for row in self._entries(kind, per_position=True)
        ]

    def facts(self) -> dict[str, str]:
        """Return the names and values to show beside the scores."""
        facts = {**facts_of_outputs(self.outputs), "model": self.model, "method": self.method}
        if self.convergence_delta is not None:
            facts["convergence delta"] = f"{float(self.convergence_delta.abs().max()):.1e}"
        return facts

    def _kind(self, kind: Component | None) -> Component:
        return next(iter(self.parts)) if kind is None else check_choice("kind", kind, tuple(self.parts))

    def _entries(self, kind: Component, *, per_position: bool) -> Iterator[ComponentScore]:
        """Yield the scores of a kind without padding, each at a position or of all together."""
        several = kind in NUMBERED
        for example, single in enumerate(self):
            for stack, part in single.parts[kind].items():
                values, at_positions = part[0].detach().cpu(), _at_positions(kind, part)
                if at_positions and not (per_position or kind == "residual"):
                    values, at_positions = values.sum(-1), False
                if kind == "edges":
                    yield from _edges(values, stack, example)
                    continue
                texts = single.tokens[stack][0] if at_positions and stack in single.tokens else None
                places = torch.cartesian_prod(*map(torch.arange, values.shape)).reshape(values.numel(), -1).tolist()
                for (layer, *rest), score in zip(places, values.flatten().tolist(), strict=True):
                    number = rest.pop(0) if several else None
                    position = rest[0] if rest else None
                    token = texts[position] if texts is not None and position is not None else None
                    name = str(layer) if number is None else f"{layer}.{number}"
                    yield ComponentScore(name, score, kind, stack, layer, number, position, token, example)


def edge_ends(sources: int, targets: int) -> tuple[list[str], list[str]]:
    """Name what U sources and V targets of edges are, which says how many layers and heads there are.

    Sources write to the residual stream: ``"input"``, then by layer its heads ``"a0.h1"`` and its network ``"m0"``.
    Targets read it: by layer all heads' queries ``"a0.h1<q>"``, keys and values, and the network; at last ``"logits"``.

    Example:
        >>> edge_ends(4, 8)
        (['input', 'a0.h0', 'a0.h1', 'm0'], ['a0.h0<q>', 'a0.h1<q>', 'a0.h0<k>', ..., 'a0.h1<v>', 'm0', 'logits'])
    """
    layers = (3 * sources - targets - 2) // 2  # U = L (H + 1) + 1, V = L (3 H + 1) + 1
    heads = [f"h{head}" for head in range((sources - 1) // layers - 1)]
    inputs = [f"{head}<{letter}>" for letter in "qkv" for head in heads]
    written, read = (
        [name for layer in range(layers) for name in (*(f"a{layer}.{part}" for part in parts), f"m{layer}")]
        for parts in (heads, inputs)
    )
    return ["input", *written], [*read, "logits"]


def _edges(values: Tensor, stack: str, example: int) -> Iterator[ComponentScore]:
    """Yield the edges of one example, of scores (U, V), that have one."""
    sources, targets = edge_ends(*values.shape)
    width = targets.index("m0") + 1  # how many targets a layer has
    for (u, v), score in zip(values.nonzero().tolist(), values[values != 0].tolist(), strict=True):
        name = f"{sources[u]}->{targets[v]}"
        yield ComponentScore(name, score, "edges", stack, v // width, None, None, None, example)


def _at_positions(kind: str, part: Tensor) -> bool:
    """Whether scores have an axis of positions, the last one."""
    return part.dim() == 3 + (kind in NUMBERED)

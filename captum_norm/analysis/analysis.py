"""Defines what every analysis is made of."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, TypedDict

from torch import Tensor

from captum_norm.analysis.categories import Categories
from captum_norm.analysis.results import Plot, Table
from captum_norm.analysis.sequences import Batch
from captum_norm.analysis.statistics import Statistic, dump, restore
from captum_norm.analysis.value_maps import ValueMap
from captum_norm.attr import Measurements, NormMeter
from captum_norm.errors import InvalidInputError
from captum_norm.models.layouts import Scope, Stage


@dataclass(frozen=True)
class AnalysisContext:
    """What an analysis knows of the model and the corpus before it begins.

    Attributes:
        meter: measures the model.
        layers: L.
        heads: H.
        causal: whether the model only looks back.
        scopes: those that the attention blocks have.
        categories: of the tokens.
        texts: each token's text, (V,).
        ranks: of each token id its frequency's rank among all tokens of the corpus in shares of their number, small for
            frequent tokens, (V,); None where the analysis does not ask for it.
        stages: the scopes through the layer; empty where the analysis does not ask for them.
        decode: the text of some token ids.
        value_maps: where each layer's f is in the model; empty where the analysis does not ask for it.
    """

    meter: NormMeter
    layers: int
    heads: int
    causal: bool
    scopes: tuple[Scope, ...]
    categories: Categories
    texts: Sequence[str] = ()
    ranks: Tensor | None = None
    stages: tuple[Stage, ...] = ()
    decode: Callable[[list[int]], str] = str
    value_maps: Sequence[ValueMap] = ()


@dataclass(frozen=True)
class Findings:
    """What an analysis found: the parts of an :class:`~captum_norm.analysis.results.AnalysisResult` that it knows."""

    summary: Mapping[str, float | None]
    tables: Sequence[Table]
    plots: Sequence[Plot] = ()


class Asked(TypedDict, total=False):
    """What an analysis asks of :meth:`captum_norm.NormMeter.measure`."""

    scopes: Sequence[Scope]
    weights: bool
    per_head: bool
    head_norms: bool
    maps: bool


class Analysis(ABC):
    """One of the papers' experiments as a set of statistics that parts of a corpus add to.

    Attributes:
        name: what the command line calls it.
        description: what it measures, and of which paper it is.
        needs_ranks: whether it asks for the frequency ranks of tokens.
        needs_stages: whether it asks for the scopes through the whole layer.
        needs_value_maps: whether it asks where attention's affine maps are.
        mask_rate: the share of tokens that are masked unless another is asked for.
        context: see :class:`AnalysisContext`.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    needs_ranks: ClassVar[bool] = False
    needs_stages: ClassVar[bool] = False
    needs_value_maps: ClassVar[bool] = False
    mask_rate: ClassVar[float] = 0.0

    def __init__(self, context: AnalysisContext) -> None:
        self.context = context

    @property
    @abstractmethod
    def statistics(self) -> Mapping[str, Statistic]:
        """What it has seen, by name."""

    def merge(self, other: Self) -> None:
        """Take in what the same analysis saw of another part of the corpus."""
        for name, statistic in self.statistics.items():
            statistic.merge(other.statistics[name])

    def state(self) -> bytes:
        """What it has seen, for :meth:`restore`."""
        return dump(self.statistics)

    def restore(self, state: bytes) -> None:
        """Put what another one's :meth:`state` gave in the place of what it has seen."""
        restore(self.statistics, state)

    def measure(self, batch: Batch) -> Measurements:
        """One forward pass."""
        inputs = batch.inputs(next(self.context.meter.model.parameters()).device)
        (measured,) = self.context.meter.measure(inputs, **self._asked()).values()
        return measured

    @abstractmethod
    def _asked(self) -> Asked:
        """What a forward pass has to give."""

    @abstractmethod
    def update(self, batch: Batch, measured: Measurements) -> None:
        """Take in a batch."""

    @abstractmethod
    def findings(self) -> Findings:
        """What the statistics say."""

    def token_values(self, batch: Batch, measured: Measurements) -> Mapping[str, Tensor]:  # noqa: ARG002
        """What a store of tokens keeps of each position, (B, S) or (B, S, L) by name.

        Raises:
            InvalidInputError: there is nothing to keep.
        """
        raise InvalidInputError(f"the analysis {self.name} measures nothing of single tokens; leave the store out")

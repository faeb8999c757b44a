"""The jobs of an analysis: counts the tokens of a corpus, and analyzes its blocks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from captum_norm.attr import NormMeter
from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis.analysis import Analysis, AnalysisContext
from captum_norm.lab.analysis.blocks import BlockAnalysis, join_content, merged, split_content
from captum_norm.lab.analysis.categories import Categories
from captum_norm.lab.analysis.corpus import Corpus
from captum_norm.lab.analysis.frequencies import count_tokens, frequency_ranks, read_ranks
from captum_norm.lab.analysis.results import AnalysisResult
from captum_norm.lab.analysis.sequences import Encoder, TokenSequence, longest
from captum_norm.lab.analysis.statistics import Array
from captum_norm.lab.analysis.tokens import TokenStore
from captum_norm.lab.analysis.value_maps import value_maps
from captum_norm.loading import on_device
from captum_norm.models.offloading import input_device
from captum_norm.models.stacks import encoder_of
from captum_norm.runs import Attempt, Block, Identity, Job, Parts, Record, Work

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COUNTED_TEXTS = 512


@dataclass(frozen=True)
class Setup:
    """An analysis of a corpus with a model.

    Attributes:
        kind: the analysis.
        model: the model.
        encoder: turns texts into inputs.
        corpus: the text.
        first: the first input, on which the model's structure is found.
        ranks: see :class:`AnalysisContext`.
    """

    kind: type[Analysis]
    model: nn.Module
    encoder: Encoder
    corpus: Corpus
    first: TokenSequence
    ranks: Tensor | None

    def context(self) -> AnalysisContext:
        """Find the model's structure."""
        part = encoder_of(self.model) or self.model
        meter = NormMeter(part)
        inputs = next(self.encoder.batches([self.first], 1)).inputs(input_device(part))
        ((stack, measured),) = meter.measure(inputs, head_norms=True, maps=False).items()
        lengths: Any = measured.transformed_norms
        scopes = [scope for scope in measured.layer_scopes[0] if all(scope in layer for layer in measured.layer_scopes)]
        texts = [""] * len(self.encoder.categories.of_token)
        for text, number in self.encoder.tokenizer.get_vocab().items():
            texts[number] = text
        return AnalysisContext(
            meter=meter,
            layers=lengths.shape[1],
            heads=lengths.shape[2],
            causal=stack == "decoder",
            scopes=tuple(scopes),
            categories=self.encoder.categories,
            texts=texts,
            ranks=self.ranks,
            stages=meter.stages(inputs) if self.kind.needs_stages else (),
            decode=lambda ids: str(self.encoder.tokenizer.decode(ids)),
            value_maps=value_maps(part, inputs) if self.kind.needs_value_maps else (),
        )


def set_up(
    kind: type[Analysis],
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    corpus: Corpus,
    *,
    seed: int = 0,
    mask_rate: float = 0.0,
    max_length: int | None = None,
    frequencies: str | PathLike[str] | None = None,
    count: Callable[[Encoder, Corpus], Array] | None = None,
) -> Setup:
    """Prepare an analysis: find the first input, and rank tokens by frequency.

    Args:
        kind: the analysis.
        model: see :func:`captum_norm.lab.analysis.analyze`, also for the other arguments.
        tokenizer: see there.
        corpus: see there.
        seed: see there.
        mask_rate: the share of ordinary tokens that the mask token replaces.
        max_length: see there.
        frequencies: see there.
        count: counts the tokens of the corpus, (V,); None to do it here.
    """
    if max_length is None:
        max_length = longest(model, tokenizer)
    windows = corpus.unit == "documents"
    encoder = Encoder(tokenizer, Categories.of(tokenizer), max_length, windows, mask_rate, seed)
    first = _first_sequence(encoder, corpus)
    ranks = None
    if kind.needs_ranks:
        listed = None if frequencies is None else read_ranks(frequencies, tokenizer.get_vocab())
        ranks = frequency_ranks((count or _count)(encoder, corpus), listed)
    elif frequencies is not None:
        raise InvalidInputError(f"got a list of frequencies, which the analysis {kind.name} does not use")
    return Setup(kind, model, encoder, corpus, first, ranks)


class AnalysisJob(Job[Record]):
    """Analyzes a corpus.

    Args:
        output: names the folder for unfinished work.
        identity: see :class:`captum_norm.runs.Job`.
        setup: the analysis.
        metadata: the metadata of the result, apart from the corpus.
        batch_tokens: see :func:`captum_norm.lab.analysis.analyze`, also for the other arguments.
        block_texts: see there.
        tokens: see there.
        device: see there.
    """

    unit = "texts"

    def __init__(
        self,
        output: str,
        identity: Identity,
        setup: Setup,
        metadata: Mapping[str, Any],
        *,
        batch_tokens: int,
        block_texts: int,
        tokens: str | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(output, identity)
        self.title = setup.kind.name
        self._setup, self._metadata = setup, metadata
        self._batch_tokens, self._block_texts, self._tokens, self._device = batch_tokens, block_texts, tokens, device

    def blocks(self) -> Iterator[Block]:
        """Find the blocks of the corpus."""
        return self._setup.corpus.blocks(self._block_texts)

    def worker(self) -> BlockAnalysis:
        """Move the model to its device and find its structure."""
        setup, store = self._setup, None if self._tokens is None else TokenStore()
        if self._device is not None:
            on_device(setup.model, self._device)
        return BlockAnalysis(setup.kind, self._context, setup.encoder, setup.corpus, self._batch_tokens, store)

    def combine(self, records: Iterable[Record]) -> Record:
        """Add up statistics and counts."""
        analysis, counts = merged(self._setup.kind, self._context, records)
        return Record({"counts": counts}, join_content(analysis.state()))

    def set_aside(self, block: Block) -> Record:
        """Return a record of nothing but the number of texts that were left out."""
        return Record({"counts": {"set_aside": block.texts}}, b"")

    def finish(self, parts: Parts) -> Record:
        """Add up the statistics of all blocks, and write the tokens if they are stored."""
        if self._tokens is not None:
            TokenStore().merge((split_content(record.content)[1] for record in parts.blocks()), self._tokens)
        return parts.combined()

    def result(self, whole: Record) -> AnalysisResult:
        """Evaluate the statistics of all blocks.

        Raises:
            InvalidInputError: all were set aside.
        """
        if "texts" not in whole.notes["counts"]:
            raise InvalidInputError("all blocks of the corpus were set aside; nothing is left to analyze")
        analysis = self._setup.kind(self._context)
        analysis.restore(split_content(whole.content)[0])
        corpus = self._metadata["corpus"] | whole.notes["counts"]
        return replace(analysis.result(), metadata={**self._metadata, "corpus": corpus})

    @cached_property
    def _context(self) -> AnalysisContext:
        return self._setup.context()


class TokenCounts(Job[Array]):
    """Counts each token id of a corpus, (V,).

    Args:
        output: names the folder for unfinished work.
        identity: see :class:`captum_norm.runs.Job`.
        encoder: turns texts into tokens.
        corpus: the text.
        block_texts: the number of texts in a block.
    """

    title = "counting tokens"
    unit = "texts"

    def __init__(self, output: str, identity: Identity, encoder: Encoder, corpus: Corpus, block_texts: int) -> None:
        super().__init__(output, identity)
        self._encoder, self._corpus, self._block_texts = encoder, corpus, block_texts

    def blocks(self) -> Iterator[Block]:
        """Find the blocks of the corpus."""
        return self._corpus.blocks(self._block_texts)

    def worker(self) -> Work:
        """Return a function that counts."""

        def count(attempt: Attempt) -> Record:
            texts = self._corpus.read(attempt.block)
            counts = count_tokens(self._encoder.sequences(texts), len(self._encoder.categories.of_token))
            (ids,) = counts.nonzero()
            return Record({}, np.stack([ids, counts[ids]]).tobytes())

        return count

    def combine(self, records: Iterable[Record]) -> Record:
        """Add up the counts."""
        total = np.zeros(len(self._encoder.categories.of_token), np.int64)
        for record in records:
            ids, counts = np.frombuffer(record.content, np.int64).reshape(2, -1)
            total[ids] += counts
        (ids,) = total.nonzero()
        return Record({}, np.stack([ids, total[ids]]).tobytes())

    def set_aside(self, block: Block) -> Record:  # noqa: ARG002
        """Return a record of nothing."""
        return Record({}, b"")

    def finish(self, parts: Parts) -> Array:
        """Return the counts, (V,)."""
        ids, counts = np.frombuffer(parts.combined().content, np.int64).reshape(2, -1)
        total = np.zeros(len(self._encoder.categories.of_token), np.int64)
        total[ids] = counts
        return total


def _count(encoder: Encoder, corpus: Corpus) -> Array:
    texts = corpus.texts()
    blocks = iter(lambda: list(islice(texts, _COUNTED_TEXTS)), [])
    return count_tokens(chain.from_iterable(map(encoder.sequences, blocks)), len(encoder.categories.of_token))


def _first_sequence(encoder: Encoder, corpus: Corpus) -> TokenSequence:
    for text in corpus.texts():
        if sequences := encoder.sequences([text]):
            return sequences[0]
    raise InvalidInputError(f"{corpus.name or corpus.path} has no token that the tokenizer knows")

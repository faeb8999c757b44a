"""Runs an analysis over a corpus, block by block; a run can be resumed and shared by workers on Ray."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.identity import configuration_digest, tokenizer_digest, weights_digest
from captum_norm.lab.analysis.corpus import Corpus, Encoder, longest
from captum_norm.lab.analysis.layers import ComponentChanges, ExpansionRate
from captum_norm.lab.analysis.norms import Dispersion, Frequency, MixingRatio, SpecialTokens
from captum_norm.lab.analysis.results import AnalysisResult
from captum_norm.lab.analysis.statistics import Analysis, AnalysisContext, dump, frequency_ranks, restore
from captum_norm.loading import on_device
from captum_norm.models import explained_module, input_device
from captum_norm.runs import Attempt, Backend, Block, Identity, Job, Journal, Parts, Record, Work, run_job
from captum_norm.text.files import check_folder, is_url
from captum_norm.versions import versions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KINDS = (Dispersion, SpecialTokens, Frequency, MixingRatio, ExpansionRate, ComponentChanges)
ANALYSES: Mapping[str, type[Analysis]] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""The analyses by their names on the command line."""

BLOCK_TEXTS = 512


def analyze(
    name: str,
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    corpus: Corpus,
    *,
    out: str | PathLike[str] | None = None,
    seed: int = 0,
    mask_rate: float | None = None,
    max_length: int | None = None,
    batch_tokens: int = 4096,
    block_texts: int = BLOCK_TEXTS,
    restart: bool = False,
    backend: Backend = "local",
    device: str | None = None,
    model_name: str | None = None,
    command: str | None = None,
    save: Callable[[AnalysisResult], object] = lambda _: None,
    report: Callable[[str], None] = lambda _: None,
) -> AnalysisResult:
    """Run one of the papers' experiments on a model and a corpus of any size.

    Memory does not grow with the corpus, whose blocks are computed one by one. With ``out``, they are saved in the
    folder ``OUT/NAME.parts``: a run that was killed at any moment resumes from there, if text, options, weights,
    configuration, tokenizer and versions are the same, and workers on Ray can share the blocks. The result is the same,
    bit for bit, as long as the workers compute alike (same device, same number of threads).

    Args:
        name: a name in ``captum_norm.lab.analysis.ANALYSES``.
        model: a Transformer of Hugging Face; the encoder of an encoder–decoder model is measured. It is not changed.
        tokenizer: its tokenizer.
        corpus: the text.
        out: the path or URL of a folder for unfinished work; created if its parent exists.
        seed: decides which tokens are masked.
        mask_rate: the share of ordinary tokens that the mask token replaces; None for the analysis's default, or 0 if
            the tokenizer has no mask token.
        max_length: the largest number of tokens in a sequence, to which longer lines are truncated; None for the limit
            of model and tokenizer.
        batch_tokens: the largest number of tokens in a batch, padding included.
        block_texts: the number of texts in a block, whose sequences are batched by length.
        restart: whether to discard unfinished work.
        backend: where blocks are computed, see :func:`captum_norm.runs.run_job`; a cluster needs an ``out`` that all of
            its nodes reach.
        device: the device that workers move the model to; None for where it is.
        model_name: the model's name in results; its class if None.
        command: the command line, for the metadata.
        save: called with the result; unfinished work is removed once it returns.
        report: called with messages about the run, such as blocks finished earlier.

    Raises:
        InvalidInputError: the analysis is unknown, the corpus has no text, an option is invalid, the unfinished run
            in ``out`` has other settings, the folder belongs to no run or cannot be read or written; or see
            :func:`captum_norm.runs.run_job`.
        CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.

    Example:
        >>> from captum_norm.lab.analysis import SAMPLE
        >>> from captum_norm.loading import load
        >>> result = analyze("special-tokens", *load(), Corpus(SAMPLE, limit=4))
        >>> result.table("correlation").column("category")
        ['[CLS]', '[SEP]', 'comma, period', 'other']
    """
    if name not in ANALYSES:
        raise InvalidInputError(f"got the analysis {name}; expected one of {', '.join(ANALYSES)}")
    if min(batch_tokens, block_texts) < 1:
        raise InvalidInputError(f"got batch_tokens={batch_tokens} and block_texts={block_texts}; expected at least 1")
    if out is None and not isinstance(backend, str) and backend.address is not None:
        raise InvalidInputError("got a cluster, which needs a folder that all nodes reach; name it with --out (out=)")
    model, kind = explained_module(model), ANALYSES[name]
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"got {type(model).__name__} with virtual tokens, which stand for no text of the corpus; pass the model "
            "inside: model.get_base_model()"
        )
    if mask_rate is None:
        mask_rate = kind.mask_rate if tokenizer.mask_token_id is not None else 0.0
    if max_length is None:
        max_length = longest(model, tokenizer)
    digest, model_class = corpus.digest(), type(model).__name__
    settings = {
        "limit": corpus.limit,
        "seed": seed,
        "mask_rate": mask_rate,
        "max_length": max_length,
        "batch_tokens": batch_tokens,
        "block_texts": block_texts,
    }
    identity = {
        "analysis": name,
        "model": f"{model_name or model_class} ({weights_digest(model)})",
        "configuration": configuration_digest(model),
        "tokenizer": tokenizer_digest(tokenizer),
        "corpus": digest,
        **settings,
        "device": (device or input_device(model).type).partition(":")[0],
        **versions(),
    }
    metadata = {
        "model": model_name or model_class,
        "model_class": model_class,
        "corpus": {"name": str(corpus), "sha256": digest},
        "seed": seed,
        "settings": settings,
        "versions": versions(),
        "command": command,
    }
    with _folder(out) as folder:
        output = f"{folder}/{name}"
        Journal(output, identity).check()
        encoder = Encoder(tokenizer, max_length, mask_rate, seed)
        job = AnalysisJob(output, identity, kind, model, encoder, corpus, batch_tokens, block_texts, device)
        results: list[AnalysisResult] = []

        def evaluate(record: Record) -> None:
            # Here, whatever the backend: the last bits depend on the number of threads.
            results.append(job.result(record, metadata))
            save(results[0])

        run_job(job, backend, restart=restart, save=evaluate, report=report)
        return results[0]


@contextmanager
def _folder(out: str | PathLike[str] | None) -> Iterator[str]:
    """Create the output folder, or a temporary one."""
    if out is None:
        with TemporaryDirectory(prefix="captum-norm-") as name:
            yield name
        return
    if not is_url(out):
        folder = Path(out)
        try:
            check_folder(folder)
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise InvalidInputError(f"cannot make the folder {folder}: {error.strerror}") from error
    yield os.fspath(out).rstrip("/")


@dataclass(eq=False)
class AnalysisJob(Job[Record]):
    """Analyzes a corpus, see :func:`analyze`; a record has statistics, and counts of what they are of in its notes."""

    output: str
    identity: Identity
    kind: type[Analysis]
    model: nn.Module
    encoder: Encoder
    corpus: Corpus
    batch_tokens: int
    block_texts: int
    device: str | None = None
    unit = "texts"

    def __post_init__(self) -> None:
        self.title = self.kind.name
        first = next(chain.from_iterable(self.encoder.sequences([text]) for text in self.corpus.texts()), None)
        if first is None:
            raise InvalidInputError(f"{self.corpus.path} has no token that the tokenizer knows")
        self._first = first
        self._ranks = self._frequency_ranks() if self.kind.needs_ranks else None

    @cached_property
    def context(self) -> AnalysisContext:
        """What this process knows of the model."""
        return AnalysisContext(self.kind, self.model, self.encoder, self._first, self._ranks)

    def _frequency_ranks(self) -> Tensor:
        vocabulary, texts = len(self.encoder.categories.of_token), self.corpus.texts()
        counts = np.zeros(vocabulary, np.int64)
        while some := list(islice(texts, BLOCK_TEXTS)):
            for sequence in self.encoder.sequences(some):
                visible = [token for place, token in enumerate(sequence.ids) if place not in sequence.masked]
                counts += np.bincount(visible, minlength=vocabulary)
        return frequency_ranks(counts)

    def blocks(self) -> Iterator[Block]:
        """Find the blocks of the corpus."""
        return self.corpus.blocks(self.block_texts)

    def worker(self) -> Work:
        """Move the model to its device and find its structure."""
        if self.device is not None:
            on_device(self.model, self.device)
        return partial(self._analyze, self.context)

    def _analyze(self, context: AnalysisContext, attempt: Attempt) -> Record:
        """Compute the statistics of a block; a saved record of an unfinished block is continued."""
        analysis, done = self.kind(context), 0
        if attempt.saved is not None:
            done = attempt.saved.notes["batches"]
            restore(analysis.statistics, attempt.saved.content)

        def record(**notes: object) -> Record:
            return Record(notes, dump(analysis.statistics))

        texts = self.corpus.read(attempt.block)
        sequences = self.encoder.sequences(texts)
        batches = self.encoder.batches(sequences, self.batch_tokens)
        for number, batch in enumerate(islice(batches, done, None), done + 1):
            analysis.update(batch, analysis.measure(batch))
            attempt.save(partial(record, batches=number))
        counts = {
            "texts": len(texts),
            "sequences": len(sequences),
            "tokens": sum(len(sequence.ids) for sequence in sequences),
            "masked": sum(len(sequence.masked) for sequence in sequences),
        }
        return record(counts=counts)

    def combine(self, records: Iterable[Record]) -> Record:
        """Add up statistics and counts, in the order of the corpus."""
        total, part = (self.kind(self.context).statistics for _ in range(2))
        counts = Counter[str]()
        for record in records:
            counts.update(record.notes["counts"])
            restore(part, record.content)
            for name, statistic in total.items():
                statistic.join(part[name].parts)
        return Record({"counts": counts}, dump(total))

    def finish(self, parts: Parts) -> Record:
        """Add up the statistics of all blocks."""
        return parts.combined()

    def result(self, record: Record, metadata: Mapping[str, Any]) -> AnalysisResult:
        """Evaluate the statistics of all blocks."""
        counts = record.notes["counts"]
        analysis = self.kind(self.context)
        restore(analysis.statistics, record.content)
        return replace(analysis.result(), metadata={**metadata, "corpus": metadata["corpus"] | counts})

"""Runs an analysis over a corpus, block by block; a run can be resumed and shared by workers on Ray."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import BytesIO
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from captum_norm.attr import NormMeter
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.identity import configuration_digest, tokenizer_digest, weights_digest
from captum_norm.lab.analysis.corpus import (
    Categories,
    Corpus,
    Encoder,
    TokenBatch,
    TokenSequence,
    encoder_part,
    longest,
    read_ranks,
)
from captum_norm.lab.analysis.layers import ComponentChanges, ExpansionRate, affine_maps
from captum_norm.lab.analysis.norms import Dispersion, Frequency, MixingRatio, SpecialTokens
from captum_norm.lab.analysis.results import AnalysisResult
from captum_norm.lab.analysis.statistics import Analysis, AnalysisContext, dump, frequency_ranks, restore
from captum_norm.loading import on_device
from captum_norm.models import explained_module, input_device
from captum_norm.runs import Attempt, Backend, Block, Identity, Job, Journal, Parts, Record, Work, run_job
from captum_norm.text.files import check_folder, is_url, place_of, whole_file
from captum_norm.versions import versions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KINDS = (Dispersion, SpecialTokens, Frequency, MixingRatio, ExpansionRate, ComponentChanges)
ANALYSES: Mapping[str, type[Analysis]] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""The analyses by their names on the command line."""

BATCH_TOKENS = 4096
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
    batch_tokens: int = BATCH_TOKENS,
    block_texts: int = BLOCK_TEXTS,
    frequencies: str | PathLike[str] | None = None,
    tokens: str | PathLike[str] | None = None,
    restart: bool = False,
    backend: Backend = "local",
    device: str | None = None,
    log: str | PathLike[str] | None = None,
    model_name: str | None = None,
    command: str | None = None,
    save: Callable[[AnalysisResult], object] = lambda _: None,
    report: Callable[[str], None] = lambda _: None,
) -> AnalysisResult:
    """Run one of the papers' experiments on a model and a corpus of any size.

    Only sufficient statistics are kept, so memory does not grow with the corpus. They are computed block by block and
    merged in the order of the blocks. With ``out``, finished blocks, and every few seconds the state of an unfinished
    one, are saved in the folder ``OUT/NAME.parts``: a run that was killed at any moment resumes from there, and workers
    on Ray can share the blocks. The result is always the same, bit for bit, as long as the workers compute alike (same
    device, same number of threads). A run resumes only with the same text, options, weights, configuration, tokenizer
    and versions.

    Args:
        name: a name in ``captum_norm.lab.analysis.ANALYSES``.
        model: a Transformer of Hugging Face; the encoder of an encoder–decoder model is measured. It is not changed.
        tokenizer: its tokenizer.
        corpus: the text.
        out: the path or URL of a folder for unfinished work; created if its parent exists.
        seed: decides which tokens are masked.
        mask_rate: the share of ordinary tokens that the mask token replaces; None for the analysis's default, or 0 if
            the tokenizer has no mask token.
        max_length: the largest number of tokens in a sequence; None for the limit of model and tokenizer. Longer lines
            are truncated, longer documents become several sequences.
        batch_tokens: the largest number of tokens in a batch, padding included.
        block_texts: the number of texts in a block, whose sequences are batched by length.
        frequencies: a list of tokens, the most frequent first, to rank tokens by instead of the corpus; see
            ``captum_norm.lab.analysis.read_ranks``.
        tokens: also store the values of each token, in a Parquet file at this path or URL, with the columns ``line``,
            ``window``, ``position`` (from 0), ``token``, ``category``, and one for each value: numbers, or lists with a
            number for each layer.
        restart: whether to discard unfinished work.
        backend: where blocks are computed, see :func:`captum_norm.runs.run_job`; a cluster needs an ``out`` that all of
            its nodes reach.
        device: the device that workers move the model to; None for where it is.
        log: a file for the events of the run, see there.
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
        "unit": corpus.unit,
        "limit": corpus.limit,
        "seed": seed,
        "mask_rate": mask_rate,
        "max_length": max_length,
        "batch_tokens": batch_tokens,
        "block_texts": block_texts,
        "frequencies": None if frequencies is None else str(frequencies),
    }
    identity = {
        "analysis": name,
        "model": f"{model_name or model_class} ({weights_digest(model)})",
        "configuration": configuration_digest(model),
        "tokenizer": tokenizer_digest(tokenizer),
        "corpus": digest,
        **settings,
        "frequencies": _with_digest(frequencies),
        "tokens": tokens is not None,
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
        if tokens is not None:
            TokenStore()
        encoder = Encoder(tokenizer, Categories.of(tokenizer), max_length, corpus.unit == "documents", mask_rate, seed)
        setup = Setup.of(kind, model, encoder, corpus, frequencies)
        job = AnalysisJob(output, identity, setup, metadata, batch_tokens, block_texts, tokens, device)
        results: list[AnalysisResult] = []

        def evaluate(whole: Record) -> None:
            # Here, whatever the backend: the last bits depend on the number of threads.
            results.append(job.result(whole))
            save(results[0])

        run_job(job, backend, restart=restart, save=evaluate, report=report, log=log)
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


def _with_digest(path: str | PathLike[str] | None) -> str | None:
    """The name of a file and its hash; only the name of an unreadable file, which its reader will report."""
    if path is None:
        return None
    try:
        content = place_of(path).read()
    except (InvalidInputError, OSError):
        return str(path)
    return f"{path} ({hashlib.blake2b(content, digest_size=16).hexdigest()})"


@dataclass(frozen=True)
class Setup:
    """An analysis of a corpus with a model; its first input, and the frequency ranks of tokens if it needs them."""

    kind: type[Analysis]
    model: nn.Module
    encoder: Encoder
    corpus: Corpus
    first: TokenSequence
    ranks: Tensor | None

    @classmethod
    def of(
        cls,
        kind: type[Analysis],
        model: nn.Module,
        encoder: Encoder,
        corpus: Corpus,
        frequencies: str | PathLike[str] | None = None,
    ) -> "Setup":
        """Find the first input, and rank tokens by frequency; see :func:`analyze`."""
        first = next(chain.from_iterable(encoder.sequences([text]) for text in corpus.texts()), None)
        if first is None:
            raise InvalidInputError(f"{corpus.name or corpus.path} has no token that the tokenizer knows")
        if not kind.needs_ranks:
            if frequencies is not None:
                raise InvalidInputError(f"got a list of frequencies, which the analysis {kind.name} does not use")
            return cls(kind, model, encoder, corpus, first, None)
        listed = None if frequencies is None else read_ranks(frequencies, encoder.tokenizer.get_vocab())
        vocabulary, texts = len(encoder.categories.of_token), corpus.texts()
        counts = np.zeros(vocabulary, np.int64)
        while some := list(islice(texts, BLOCK_TEXTS)):
            for sequence in encoder.sequences(some):
                visible = [token for place, token in enumerate(sequence.ids) if place not in sequence.masked]
                counts += np.bincount(visible, minlength=vocabulary)
        return cls(kind, model, encoder, corpus, first, frequency_ranks(counts, listed))

    def context(self) -> AnalysisContext:
        """Find the model's structure."""
        part, tokenizer = encoder_part(self.model), self.encoder.tokenizer
        meter = NormMeter(part)
        inputs = next(self.encoder.batches([self.first], 1)).inputs(input_device(part))
        ((stack, measured),) = meter.measure(inputs, head_norms=True, maps=False).items()
        lengths: Any = measured.transformed_norms
        scopes = [scope for scope in measured.layer_scopes[0] if all(scope in layer for layer in measured.layer_scopes)]
        texts = [""] * len(self.encoder.categories.of_token)
        for text, number in tokenizer.get_vocab().items():
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
            decode=lambda ids: str(tokenizer.decode(ids)),
            affine_maps=affine_maps(part, inputs) if self.kind.needs_affine_maps else (),
        )


class AnalysisJob(Job[Record]):
    """Analyzes a corpus; see :func:`analyze`.

    A record consists of the size of the analysis's state, that state, and the stored tokens of the block. Its notes
    count texts (lines or documents), sequences, tokens (with special ones) and masked tokens.
    """

    unit = "texts"

    def __init__(
        self,
        output: str,
        identity: Identity,
        setup: Setup,
        metadata: Mapping[str, Any],
        batch_tokens: int,
        block_texts: int,
        tokens: str | PathLike[str] | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(output, identity)
        self.title = setup.kind.name
        self._setup, self._metadata = setup, metadata
        self._batch_tokens, self._block_texts, self._device = batch_tokens, block_texts, device
        self._tokens = None if tokens is None else os.fspath(tokens)

    def blocks(self) -> Iterator[Block]:
        """Find the blocks of the corpus."""
        return self._setup.corpus.blocks(self._block_texts)

    def worker(self) -> Work:
        """Move the model to its device and find its structure."""
        if self._device is not None:
            on_device(self._setup.model, self._device)
        return partial(self._analyze, self._context, None if self._tokens is None else TokenStore())

    def _analyze(self, context: AnalysisContext, store: "TokenStore | None", attempt: Attempt) -> Record:
        """Compute the statistics of a block; a saved record of an unfinished block is continued."""
        setup, analysis, done = self._setup, self._setup.kind(context), 0
        texts, tokens = setup.corpus.read(attempt.block), b""
        if attempt.saved is not None:
            done = attempt.saved.notes["batches"]
            state, tokens = _split(attempt.saved.content)
            restore(analysis.statistics, state)
        if store is not None:
            store.restore(tokens)

        def record(**notes: object) -> Record:
            return Record(notes, _joined(dump(analysis.statistics), b"" if store is None else store.state()))

        sequences = setup.encoder.sequences(texts)
        batches = setup.encoder.batches(sequences, self._batch_tokens)
        for number, batch in enumerate(islice(batches, done, None), done + 1):
            measured = analysis.measure(batch)
            analysis.update(batch, measured)
            if store is not None:
                store.add(batch, analysis.token_values(batch, measured), context)
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
        whole, part = (self._setup.kind(self._context).statistics for _ in range(2))
        counts = Counter[str]()
        for record in records:
            counts.update(record.notes["counts"])
            if record.content:  # else the block was set aside
                restore(part, _split(record.content)[0])
                for name, statistic in whole.items():
                    statistic.join(part[name].parts)
        return Record({"counts": counts}, _joined(dump(whole)))

    def set_aside(self, block: Block) -> Record:
        """Return a record of nothing but the number of texts that were left out."""
        return Record({"counts": {"set_aside": block.texts}}, b"")

    def finish(self, parts: Parts) -> Record:
        """Add up the statistics of all blocks, and write the tokens if they are stored."""
        if self._tokens is not None:
            TokenStore().merge((_split(record.content)[1] for record in parts.blocks()), self._tokens)
        return parts.combined()

    def result(self, whole: Record) -> AnalysisResult:
        """Evaluate the statistics of all blocks."""
        if "texts" not in whole.notes["counts"]:
            raise InvalidInputError("all blocks of the corpus were set aside; nothing is left to analyze")
        analysis = self._setup.kind(self._context)
        restore(analysis.statistics, _split(whole.content)[0])
        corpus = self._metadata["corpus"] | whole.notes["counts"]
        return replace(analysis.result(), metadata={**self._metadata, "corpus": corpus})

    @cached_property
    def _context(self) -> AnalysisContext:
        return self._setup.context()


def _joined(state: bytes, tokens: bytes = b"") -> bytes:
    """Join the states of the analysis and of the token store to the content of a record."""
    return len(state).to_bytes(8) + state + tokens


def _split(content: bytes) -> tuple[bytes, bytes]:
    """Split the content of a record into the states of the analysis and of the token store."""
    end = 8 + int.from_bytes(content[:8])
    return content[8:end], content[end:]


class TokenStore:
    """Collects the tokens of a block as Parquet, and merges those of all blocks into one file."""

    def __init__(self) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise InvalidInputError("the token store needs pyarrow: pip install 'captum-norm[tables]'") from error
        self._arrow: Any = pyarrow
        self._batches: list[Any] = []

    def add(self, batch: TokenBatch, values: Mapping[str, Tensor], context: AnalysisContext) -> None:
        """Add the tokens of a batch; ``values`` are (B, S) or (B, S, L) by name."""
        rows, positions = batch.real.nonzero(as_tuple=True)
        sequences = [batch.sequences[row] for row in rows.tolist()]
        columns: dict[str, Any] = {
            "line": [sequence.line for sequence in sequences],
            "window": [sequence.window for sequence in sequences],
            "position": positions.tolist(),
            "token": [context.texts[token] for token in batch.ids[batch.real].tolist()],
            "category": [context.categories.names[place] for place in batch.categories[batch.real].tolist()],
        }
        for name, value in values.items():
            numbers = value.detach().float().cpu()[batch.real]
            kind = None if numbers.dim() == 1 else self._arrow.list_(self._arrow.float32())
            columns[name] = self._arrow.array(list(numbers.numpy()), kind)
        self._batches.append(self._arrow.table(columns))

    def state(self) -> bytes:
        """Serialize the tokens added, in the order of the text; empty if there are none."""
        if not self._batches:
            return b""
        order = [(name, "ascending") for name in ("line", "window", "position")]
        table = self._arrow.concat_tables(self._batches).sort_by(order).combine_chunks()
        stream = BytesIO()
        self._arrow.parquet.write_table(table, stream)
        return stream.getvalue()

    def restore(self, state: bytes) -> None:
        """Replace the tokens by those that :meth:`state` returned."""
        self._batches = [self._read(state)] if state else []

    def merge(self, states: Iterable[bytes], path: str) -> None:
        """Write the tokens of all blocks to one file, at a path or URL, unless there are none."""
        tables = map(self._read, filter(None, states))
        for first in tables:  # at most once: the inner loop consumes the rest
            try:
                with whole_file(path) as file, self._arrow.parquet.ParquetWriter(file, first.schema) as writer:
                    for table in chain([first], tables):
                        writer.write_table(table)
            except OSError as error:
                raise InvalidInputError(f"cannot write {path}: {error.strerror or error}") from error

    def _read(self, state: bytes) -> Any:
        return self._arrow.parquet.read_table(BytesIO(state))

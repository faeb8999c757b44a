"""Runs an analysis over a corpus: block by block, resumable, in several processes."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from captum_norm import bars
from captum_norm.analysis.analysis import Analysis, Setting
from captum_norm.analysis.categories import Categories
from captum_norm.analysis.corpus import Block, Corpus
from captum_norm.analysis.frequencies import count_tokens, frequency_ranks, read_ranks
from captum_norm.analysis.registry import ANALYSES
from captum_norm.analysis.results import AnalysisResult
from captum_norm.analysis.sequences import Encoder, TokenSequence, longest
from captum_norm.analysis.tokens import TokenStore
from captum_norm.analysis.value_maps import value_maps
from captum_norm.attr import NormMeter
from captum_norm.errors import InvalidInputError
from captum_norm.loading import weights_digest
from captum_norm.models.stacks import encoder_of
from captum_norm.runs import Journal, Team
from captum_norm.versions import versions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_TOKENS = 4096
BLOCK_TEXTS = 512


@dataclass(frozen=True)
class Counts:
    """How much of a corpus has been read.

    Attributes:
        texts: lines or documents.
        sequences: inputs of the model.
        tokens: their tokens, special ones included.
        masked: those of them that were masked.
    """

    texts: int = 0
    sequences: int = 0
    tokens: int = 0
    masked: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class _Work:
    """What makes a block's statistics."""

    kind: type[Analysis]
    setting: Setting
    encoder: Encoder
    batch_tokens: int
    store: TokenStore | None

    def __call__(self, block: Block) -> tuple[Analysis, Counts]:
        analysis = self.kind(self.setting)
        sequences = self.encoder.sequences(block.texts)
        for batch in self.encoder.batches(sequences, self.batch_tokens):
            measured = analysis.measure(batch)
            analysis.update(batch, measured)
            if self.store is not None:
                self.store.add(batch, analysis.token_values(batch, measured), self.setting)
        if self.store is not None:
            self.store.finish(block.index)
        tokens, masked = sum(len(found.ids) for found in sequences), sum(len(found.masked) for found in sequences)
        return analysis, Counts(len(block.texts), len(sequences), tokens, masked)


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
    rank: int = 0,
    world_size: int = 1,
    model_name: str | None = None,
    command: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> AnalysisResult | None:
    """Run one of the papers' experiments on a model and a corpus of any size.

    Only sufficient statistics are kept, so memory does not grow with the corpus. They are made block by block and added
    up in the order of the blocks: with ``out`` finished blocks wait in the folder ``OUT/NAME.parts``, and a run that
    was killed at any moment goes on from there when it is started again; several processes share the blocks, block b
    being made by process b mod ``world_size``. In every case the result is the same, bit for bit, as long as the
    processes compute alike (same device, same number of threads).

    Args:
        name: which one, of :data:`~captum_norm.analysis.registry.ANALYSES`.
        model: a Transformer of Hugging Face; of an encoder–decoder model the encoder is measured. It is left as it is.
        tokenizer: its tokenizer.
        corpus: the text.
        out: a folder for unfinished work; it is made if its parent exists.
        seed: decides which tokens are masked.
        mask_rate: the share of ordinary tokens that the mask token replaces; the analysis's own if None, 0 where the
            tokenizer has no mask token.
        max_length: the most tokens of a sequence; what model and tokenizer allow if None. Longer lines are cut off,
            longer documents become several sequences.
        batch_tokens: the most tokens of a batch, padding included.
        block_texts: texts a block: as much as is lost by a kill, and what length buckets are made of.
        frequencies: a list of tokens, the most frequent first, where ranks do not come from the corpus itself; see
            :func:`captum_norm.analysis.frequencies.read_ranks`.
        tokens: also store what is measured of each token, as this Parquet file.
        restart: whether to discard what an unfinished run left.
        rank: the number of this process; see :func:`captum_norm.runs.torchrun_rank`.
        world_size: the number of processes, all called in the same way, with ``out`` in common.
        model_name: what results call the model; its class if None.
        command: the command that made the result, for its metadata.
        report: told of what is not the result itself: blocks that were finished before, waiting for other processes.

    Returns:
        The result; None in all processes but the first.

    Raises:
        InvalidInputError: there is no such analysis, the corpus has no text, an option does not fit, or an unfinished
            run in ``out`` had other settings.
        CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.

    Example:
        >>> from captum_norm.analysis.corpus import SAMPLE
        >>> from captum_norm.loading import load
        >>> result = analyze("special-tokens", *load(), Corpus(SAMPLE, limit=4))
        >>> result.table("correlation").column("category")
        ['[CLS]', '[SEP]', 'comma, period', 'other']
    """
    if name not in ANALYSES:
        raise InvalidInputError(f"got the analysis {name}; expected one of {', '.join(ANALYSES)}")
    if min(batch_tokens, block_texts) < 1:
        raise InvalidInputError(f"got batch_tokens={batch_tokens} and block_texts={block_texts}; expected at least 1")
    if not 0 <= rank < world_size:
        raise InvalidInputError(f"got rank {rank} of {world_size} processes; expected 0 to {world_size - 1}")
    if out is None and world_size > 1:
        raise InvalidInputError(f"got {world_size} processes, which need a folder in common; name it with --out (out=)")
    kind = ANALYSES[name]
    if mask_rate is None:
        mask_rate = kind.mask_rate if tokenizer.mask_token_id is not None else 0.0
    if max_length is None:
        max_length = longest(model, tokenizer)
    facts = corpus.facts()
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
    job = {
        "analysis": name,
        "model": f"{model_name or type(model).__name__} ({weights_digest(model)})",
        "corpus": facts.sha256,
        **settings,
        "tokens": tokens is not None,
        "device": next(model.parameters()).device.type,
        **versions(),
    }
    with _folder(out) as folder:
        journal = Journal(folder / f"{name}.parts", f"{folder / name}", job)
        team = Team(journal.folder, rank, world_size, report)
        store = None if tokens is None else TokenStore(journal.folder)
        setting, encoder = prepare(
            kind,
            model,
            tokenizer,
            corpus,
            seed=seed,
            mask_rate=mask_rate,
            max_length=max_length,
            frequencies=frequencies,
        )
        work = _Work(kind, setting, encoder, batch_tokens, store)
        if rank > 0:
            _do_share(work, corpus.blocks(block_texts), journal, team, facts.texts)
            return None
        with journal.opened(restart=restart):
            if finished := journal.finished_blocks():
                report(f"{journal.folder}: {finished:,} blocks are finished already")
            blocks = _do_share(work, corpus.blocks(block_texts), journal, team, facts.texts)
            analysis, counts = _merge(kind, setting, journal, blocks)
            found = analysis.findings()
            if store is not None and tokens is not None:
                store.merge(blocks, Path(tokens))
            journal.clear()
        journal.remove()
    return AnalysisResult(
        analysis=name,
        description=kind.description,
        summary=found.summary,
        metadata={
            "model": model_name or type(model).__name__,
            "model_class": type(model).__name__,
            "corpus": {"name": str(corpus), "sha256": facts.sha256, **vars(counts)},
            "seed": seed,
            "settings": settings,
            "versions": versions(),
            "command": command,
        },
        tables=found.tables,
        plots=found.plots,
    )


@contextmanager
def _folder(out: str | PathLike[str] | None) -> Iterator[Path]:
    """Where unfinished work is; gone in the end if it has no name."""
    if out is None:
        with TemporaryDirectory(prefix="captum-norm-") as name:
            yield Path(name)
        return
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError(f"cannot use {folder} as a folder: it is a file")
    if not folder.parent.is_dir():
        raise InvalidInputError(f"cannot make the folder {folder}: there is no folder {folder.parent}")
    folder.mkdir(exist_ok=True)
    yield folder


def prepare(
    kind: type[Analysis],
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    corpus: Corpus,
    *,
    seed: int = 0,
    mask_rate: float = 0.0,
    max_length: int | None = None,
    frequencies: str | PathLike[str] | None = None,
) -> tuple[Setting, Encoder]:
    """What an analysis is told beforehand: the model's structure, seen on the first text, and frequencies.

    Args:
        kind: the analysis.
        model: as for :func:`analyze`, and so the others.
        tokenizer: as there.
        corpus: as there.
        seed: as there.
        mask_rate: the share of ordinary tokens that the mask token replaces.
        max_length: as there.
        frequencies: as there.

    Returns:
        The setting, and what makes batches of the corpus's texts.
    """
    if max_length is None:
        max_length = longest(model, tokenizer)
    windows = corpus.unit == "documents"
    encoder = Encoder(tokenizer, Categories.of(tokenizer), max_length, windows, mask_rate, seed)
    part = encoder_of(model) or model
    meter = NormMeter(part)
    first = next(encoder.batches(_first_sequence(encoder, corpus), 1))
    inputs = first.inputs(next(part.parameters()).device)
    ((stack, measured),) = meter.measure(inputs, head_norms=True, maps=False).items()
    lengths: Any = measured.transformed_norms
    scopes = [scope for scope in measured.layer_scopes[0] if all(scope in layer for layer in measured.layer_scopes)]
    vocabulary = encoder.tokenizer.get_vocab()
    size = len(encoder.categories.of_token)
    ranks = None
    if kind.needs_ranks:
        listed = None if frequencies is None else read_ranks(frequencies, vocabulary)
        blocks = corpus.blocks(BLOCK_TEXTS)
        counts = sum((count_tokens(encoder.sequences(block.texts), size) for block in blocks), np.zeros(size, np.int64))
        ranks = frequency_ranks(counts, listed)
    elif frequencies is not None:
        raise InvalidInputError(f"got a list of frequencies, which the analysis {kind.name} has no use for")
    texts = [""] * size
    for text, number in vocabulary.items():
        texts[number] = text
    setting = Setting(
        meter=meter,
        layers=lengths.shape[1],
        heads=lengths.shape[2],
        causal=stack == "decoder",
        scopes=tuple(scopes),
        categories=encoder.categories,
        texts=texts,
        ranks=ranks,
        stages=meter.stages(inputs) if kind.needs_stages else (),
        decode=lambda ids: str(encoder.tokenizer.decode(ids)),
        value_maps=value_maps(part, inputs) if kind.needs_value_maps else (),
    )
    return setting, encoder


def _first_sequence(encoder: Encoder, corpus: Corpus) -> list[TokenSequence]:
    for text in corpus.texts():
        if sequences := encoder.sequences([text]):
            return sequences[:1]
    raise InvalidInputError(f"{corpus.name or corpus.path} has no token that the tokenizer knows")


def _do_share(work: _Work, blocks: Iterator[Block], journal: Journal, team: Team, texts: int) -> int:
    """Finishes the blocks of this process, and in the first one waits for the others; the number of all blocks."""
    team.begin()
    journal.check_job()
    count = 0
    with bars.bar(work.kind.name, texts, "texts") as bar, bars.hidden():
        for block in blocks:
            count += 1
            if block.index % team.size == team.rank:
                digest = block.digest()
                if journal.finished(block.index, digest, str(block)) is None:
                    analysis, counts = work(block)
                    journal.write(block.index, digest, {"counts": vars(counts)}, analysis.state())
                elif not bar.disable:
                    bar.initial += len(block.texts)  # it was finished before and does not count towards the speed
            # The blocks of the others are taken to be as far as the last one of this process.
            bar.update(len(block.texts))
    team.end()
    return count


def _merge(kind: type[Analysis], setting: Setting, journal: Journal, blocks: int) -> tuple[Analysis, Counts]:
    """All blocks' statistics, added up in the order of the corpus."""
    whole, part, counts = kind(setting), kind(setting), Counts()
    for index in range(blocks):
        with journal.path(index).open("rb") as stream:
            counts += Counts(**json.loads(stream.readline())["counts"])
            part.restore(stream.read())
        whole.merge(part)
    return whole, counts

"""Runs an analysis over a corpus, block by block; a run can be resumed and shared by several processes."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from captum_norm import bars
from captum_norm.analysis.analysis import Analysis, AnalysisContext
from captum_norm.analysis.blocks import BlockAnalysis, merged, split_content
from captum_norm.analysis.categories import Categories
from captum_norm.analysis.corpus import Corpus
from captum_norm.analysis.frequencies import count_tokens, frequency_ranks, read_ranks
from captum_norm.analysis.registry import ANALYSES
from captum_norm.analysis.results import AnalysisResult
from captum_norm.analysis.sequences import Encoder, TokenSequence, longest
from captum_norm.analysis.tokens import TokenStore
from captum_norm.analysis.value_maps import value_maps
from captum_norm.attr import NormMeter
from captum_norm.errors import InvalidInputError
from captum_norm.files import check_folder
from captum_norm.identity import configuration_digest, tokenizer_digest, weights_digest
from captum_norm.models.stacks import encoder_of
from captum_norm.runs import Job, Journal, check_rank, work_through
from captum_norm.versions import versions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    rank: int = 0,
    world_size: int = 1,
    model_name: str | None = None,
    command: str | None = None,
    save: Callable[[AnalysisResult], object] = lambda _: None,
    report: Callable[[str], None] = lambda _: None,
) -> AnalysisResult | None:
    """Run one of the papers' experiments on a model and a corpus of any size.

    Only sufficient statistics are kept, so memory does not grow with the corpus. They are computed block by block and
    merged in the order of the blocks. With ``out``, finished blocks, and every few seconds the state of an unfinished
    one, are saved in the folder ``OUT/NAME.parts``: a run that was killed at any moment resumes from there, and several
    processes share the blocks (process b mod ``world_size`` computes block b). The result is always the same, bit for
    bit, as long as the processes compute alike (same device, same number of threads). A run resumes only with the same
    text, options, weights, configuration, tokenizer and versions.

    Args:
        name: a name in :data:`~captum_norm.analysis.registry.ANALYSES`.
        model: a Transformer of Hugging Face; the encoder of an encoder–decoder model is measured. It is not changed.
        tokenizer: its tokenizer.
        corpus: the text.
        out: a folder for unfinished work; created if its parent exists.
        seed: decides which tokens are masked.
        mask_rate: the share of ordinary tokens that the mask token replaces; None for the analysis's default, or 0 if
            the tokenizer has no mask token.
        max_length: the largest number of tokens in a sequence; None for the limit of model and tokenizer. Longer lines
            are truncated, longer documents become several sequences.
        batch_tokens: the largest number of tokens in a batch, padding included.
        block_texts: the number of texts in a block, whose sequences are batched by length.
        frequencies: a list of tokens, the most frequent first, to rank tokens by instead of the corpus; see
            :func:`captum_norm.analysis.frequencies.read_ranks`.
        tokens: also store the values of each token, in this Parquet file.
        restart: whether to discard unfinished work.
        rank: the number of this process; see :func:`captum_norm.runs.torchrun_rank`.
        world_size: the number of processes, all called with the same arguments and a common ``out``.
        model_name: the model's name in results; its class if None.
        command: the command line, for the metadata.
        save: called with the result; unfinished work is removed once it returns.
        report: called with messages about the run: blocks finished earlier, waiting for other processes.

    Returns:
        The result; None in all processes but the first.

    Raises:
        InvalidInputError: the analysis is unknown, the corpus has no text, an option is invalid, the unfinished run
            in ``out`` has other settings, or the folder belongs to no run or cannot be read or written.
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
    check_rank(rank, world_size)
    if out is None and world_size > 1:
        raise InvalidInputError(f"got {world_size} processes, which need a common folder; name it with --out (out=)")
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
        "configuration": configuration_digest(model),
        "tokenizer": tokenizer_digest(tokenizer),
        "corpus": facts.sha256,
        **settings,
        "frequencies": _with_digest(frequencies),
        "tokens": tokens is not None,
        "device": next(model.parameters()).device.type,
        **versions(),
    }
    with _folder(out) as folder:
        journal = journal_of(name, folder, job, report)
        journal.check()
        store = None if tokens is None else TokenStore()
        context, encoder = prepare(
            kind,
            model,
            tokenizer,
            corpus,
            seed=seed,
            mask_rate=mask_rate,
            max_length=max_length,
            frequencies=frequencies,
        )
        work = BlockAnalysis(kind, context, encoder, batch_tokens, store)
        cut = corpus.blocks(block_texts)
        with work_through(journal, cut, work, rank=rank, world_size=world_size, restart=restart) as steps:
            with bars.bar(name, facts.texts, "texts") as bar, bars.hidden():
                for step in steps:
                    bars.advance(bar, step.texts, fresh=step.fresh)
            if rank > 0:
                return None
            analysis, counts = merged(kind, context, journal.records())
            if store is not None and tokens is not None:
                store.merge((split_content(record.content)[1] for record in journal.records()), Path(tokens))
            result = replace(
                analysis.result(),
                metadata={
                    "model": model_name or type(model).__name__,
                    "model_class": type(model).__name__,
                    "corpus": {"name": str(corpus), "sha256": facts.sha256, **counts},
                    "seed": seed,
                    "settings": settings,
                    "versions": versions(),
                    "command": command,
                },
            )
            save(result)
    return result


def journal_of(name: str, folder: Path, job: Job, report: Callable[[str], None] = lambda _: None) -> Journal:
    """Return the journal of an analysis in its output folder."""
    return Journal(folder / f"{name}.parts", f"{folder / name}", job, report)


@contextmanager
def _folder(out: str | PathLike[str] | None) -> Iterator[Path]:
    """Create the output folder, or a temporary one."""
    if out is None:
        with TemporaryDirectory(prefix="captum-norm-") as name:
            yield Path(name)
        return
    folder = Path(out)
    try:
        check_folder(folder)
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"cannot make the folder {folder}: {error.strerror}") from error
    yield folder


def _with_digest(path: str | PathLike[str] | None) -> str | None:
    """The name of a file and its hash; only the name of an unreadable file, which its reader will report."""
    if path is None:
        return None
    try:
        content = Path(path).read_bytes() if Path(path).is_file() else None
    except OSError:
        content = None
    return str(path) if content is None else f"{path} ({hashlib.blake2b(content, digest_size=16).hexdigest()})"


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
) -> tuple[AnalysisContext, Encoder]:
    """Prepare an analysis: find the model's structure on the first text, and rank tokens by frequency.

    Args:
        kind: the analysis.
        model: see :func:`analyze`, also for the other arguments.
        tokenizer: see there.
        corpus: see there.
        seed: see there.
        mask_rate: the share of ordinary tokens that the mask token replaces.
        max_length: see there.
        frequencies: see there.

    Returns:
        The context, and the encoder for the texts of the corpus.
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
        raise InvalidInputError(f"got a list of frequencies, which the analysis {kind.name} does not use")
    texts = [""] * size
    for text, number in vocabulary.items():
        texts[number] = text
    context = AnalysisContext(
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
    return context, encoder


def _first_sequence(encoder: Encoder, corpus: Corpus) -> list[TokenSequence]:
    for text in corpus.texts():
        if sequences := encoder.sequences([text]):
            return sequences[:1]
    raise InvalidInputError(f"{corpus.name or corpus.path} has no token that the tokenizer knows")

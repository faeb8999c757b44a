"""Runs an analysis over a corpus, block by block; a run can be resumed and shared by workers on Ray."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from torch import nn

from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.identity import configuration_digest, tokenizer_digest, weights_digest
from captum_norm.lab.analysis.corpus import Corpus
from captum_norm.lab.analysis.job import AnalysisJob, TokenCounts, set_up
from captum_norm.lab.analysis.registry import ANALYSES
from captum_norm.lab.analysis.results import AnalysisResult
from captum_norm.lab.analysis.sequences import Encoder, longest
from captum_norm.lab.analysis.statistics import Array
from captum_norm.lab.analysis.tokens import TokenStore
from captum_norm.models.offloading import input_device
from captum_norm.models.virtual_tokens import virtual_tokens
from captum_norm.models.wrappers import explained_module
from captum_norm.runs import Backend, Journal, Record, run_job
from captum_norm.text.files import check_folder
from captum_norm.text.urls import Remote, is_url
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
        name: a name in :data:`~captum_norm.lab.analysis.registry.ANALYSES`.
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
            :func:`captum_norm.lab.analysis.frequencies.read_ranks`.
        tokens: also store the values of each token, in a Parquet file at this path or URL.
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
        >>> from captum_norm.lab.analysis.corpus import SAMPLE
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
    if virtual_tokens(model) is not None:
        raise UnsupportedModelError(
            f"got {type(model).__name__} with virtual tokens, which stand for no text of the corpus; pass the model "
            "inside: model.get_base_model()"
        )
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
    identity = {
        "analysis": name,
        "model": f"{model_name or type(model).__name__} ({weights_digest(model)})",
        "configuration": configuration_digest(model),
        "tokenizer": tokenizer_digest(tokenizer),
        "corpus": facts.sha256,
        **settings,
        "frequencies": _with_digest(frequencies),
        "tokens": tokens is not None,
        "device": (device or input_device(model).type).partition(":")[0],
        **versions(),
    }
    metadata = {
        "model": model_name or type(model).__name__,
        "model_class": type(model).__name__,
        "corpus": {"name": str(corpus), "sha256": facts.sha256},
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

        def count(encoder: Encoder, corpus: Corpus) -> Array:
            counting = TokenCounts(f"{output}-tokens", identity, encoder, corpus, block_texts)
            return run_job(counting, backend, restart=restart, report=report, log=log)

        setup = set_up(
            kind,
            model,
            tokenizer,
            corpus,
            seed=seed,
            mask_rate=mask_rate,
            max_length=max_length,
            frequencies=frequencies,
            count=None if backend == "local" else count,
        )
        # Tokens that workers did not survive are not counted, in this run, maybe, but not in the next.
        ranks = None if setup.ranks is None else hashlib.blake2b(bytes(setup.ranks.numpy()), digest_size=16).hexdigest()
        job = AnalysisJob(
            output,
            {**identity, "ranks": ranks},
            setup,
            metadata,
            batch_tokens=batch_tokens,
            block_texts=block_texts,
            tokens=None if tokens is None else os.fspath(tokens),
            device=device,
        )
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
        if is_url(path):
            content: bytes | None = Remote(os.fspath(path)).read()
        else:
            content = Path(path).read_bytes() if Path(path).is_file() else None
    except (InvalidInputError, OSError):
        content = None
    return str(path) if content is None else f"{path} ({hashlib.blake2b(content, digest_size=16).hexdigest()})"

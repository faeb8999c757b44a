"""Runs an analysis over a corpus."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import nn

from captum_norm.bars import bar, hidden
from captum_norm.checks import did_you_mean
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.lab.analysis.corpus import Corpus, Encoder, longest
from captum_norm.lab.analysis.layers import ComponentChanges, ExpansionRate
from captum_norm.lab.analysis.norms import Dispersion, Frequency, MixingRatio, SpecialTokens
from captum_norm.lab.analysis.results import AnalysisResult
from captum_norm.lab.analysis.statistics import Analysis, AnalysisContext
from captum_norm.models import explained_module
from captum_norm.versions import versions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KINDS = (Dispersion, SpecialTokens, Frequency, MixingRatio, ExpansionRate, ComponentChanges)
ANALYSES: Mapping[str, type[Analysis]] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""The analyses by their names on the command line."""


def analyze(
    name: str,
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    corpus: Corpus,
    *,
    seed: int = 0,
    mask_rate: float | None = None,
    max_length: int | None = None,
    batch_tokens: int = 4096,
    model_name: str | None = None,
    command: str | None = None,
) -> AnalysisResult:
    """Run one of the papers' experiments on a model and a corpus.

    Memory does not grow with the corpus: sequences are batched by length within blocks of 512 texts, and only sums and
    counts are kept. The corpus is read twice, once more for frequencies.

    Args:
        name: a name in ``captum_norm.lab.analysis.ANALYSES``.
        model: a Transformer of Hugging Face; the encoder of an encoder–decoder model is measured. It is not changed.
        tokenizer: its tokenizer.
        corpus: the text.
        seed: decides which tokens are masked.
        mask_rate: the share of ordinary tokens that the mask token replaces; None for the analysis's default, or 0 if
            the tokenizer has no mask token.
        max_length: the largest number of tokens in a sequence, to which longer lines are truncated; None for the limit
            of model and tokenizer.
        batch_tokens: the largest number of tokens in a batch, padding included.
        model_name: the model's name in results; its class if None.
        command: the command line, for the metadata.

    Raises:
        InvalidInputError: the analysis is unknown, an option is invalid, the corpus has no text, or changes meanwhile.
        CaptumNormError: see :meth:`captum_norm.NormMeter.measure`.

    Example:
        >>> from captum_norm.lab.analysis import SAMPLE
        >>> from captum_norm.loading import load
        >>> result = analyze("special-tokens", *load(), Corpus(SAMPLE, limit=4))
        >>> result.table("correlation").column("category")
        ['[CLS]', '[SEP]', 'comma, period', 'other']
    """
    if name not in ANALYSES:
        hint = did_you_mean(name, ANALYSES)
        raise InvalidInputError(f"got the analysis {name}; expected one of {', '.join(ANALYSES)}{hint}")
    if batch_tokens < 1:
        raise InvalidInputError(f"got batch_tokens={batch_tokens}; expected at least 1")
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
    encoder = Encoder(tokenizer, max_length, mask_rate, seed)
    digest, number = corpus.digest()
    context = AnalysisContext(kind, model, encoder, corpus)
    analysis, counts, read = kind(context), Counter[str](), hashlib.sha256()
    with bar(name, number, "texts") as shown, hidden():
        for texts in corpus.blocks():
            block, sequences = kind(context), encoder.sequences(texts)
            for batch in encoder.batches(sequences, batch_tokens):
                block.update(batch, block.measure(batch))
            for statistic, added in zip(analysis.statistics, block.statistics, strict=True):
                statistic.join(added.parts)
            counts.update(
                texts=len(texts),
                sequences=len(sequences),
                tokens=sum(len(sequence.ids) for sequence in sequences),
                masked=sum(len(sequence.masked) for sequence in sequences),
            )
            read.update("".join(f"{text}\n" for _, text in texts).encode())
            shown.update(len(texts))
    if read.hexdigest() != digest:
        raise InvalidInputError(f"{corpus.path} has changed since the start; start again")
    metadata = {
        "model": model_name or type(model).__name__,
        "model_class": type(model).__name__,
        "corpus": {"name": str(corpus), "sha256": digest, **counts},
        "seed": seed,
        "settings": {
            "limit": corpus.limit,
            "seed": seed,
            "mask_rate": mask_rate,
            "max_length": max_length,
            "batch_tokens": batch_tokens,
        },
        "versions": versions(),
        "command": command,
    }
    return replace(analysis.result(), metadata=metadata)

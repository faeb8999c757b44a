"""Finds the model, and the numbers of outputs that are named by a label, a token or a text."""

from typing import Any

from torch import nn

from captum_norm.errors import InvalidInputError
from captum_norm.loading import Quantization, load, load_poolings, load_sentence_transformer
from captum_norm.models.objects import SentenceEncoder, SentenceSimilarity
from captum_norm.models.outputs import POOLINGS, Difference, has_labels
from captum_norm.models.stacks import encoder_of


def load_subject(name_or_path: str, target: Any = None, quantization: Quantization | None = None) -> tuple[Any, Any]:
    """Load a model to explain and its tokenizer; with texts for a target, a sentence encoder's similarity to them."""
    if texts_of(target):
        sentences = load_sentence_transformer(name_or_path, quantization)
        if sentences is not None:
            return SentenceSimilarity(sentences, *texts_of(target)), sentences.tokenizer
    model, tokenizer = load(name_or_path, quantization)
    refuse_encoder_decoder(model)
    return model, tokenizer


def refuse_encoder_decoder(model: nn.Module) -> None:
    """Refuse encoder–decoder models."""
    if encoder_of(model) is not None:
        raise InvalidInputError(
            f"got the encoder–decoder model {type(model).__name__}; this explains models with one stack of layers. "
            "Its answers are explained with --generate N or --answer TEXT, in Python by GenerationAttribution; there "
            "maps() of NormAttribution, AttentionBlockAttribution, ALTI, InformationFlow, ValueZeroing, DecompX, "
            "AttentionWeights and AttentionRollout explains all three stacks of it"
        )


def default_position(model: nn.Module, name_or_path: str) -> Any:
    """Return what the pooling of a sentence encoder reads; None for another model, whose head decides."""
    poolings = [] if isinstance(model, SentenceEncoder) else load_poolings(name_or_path)
    if not poolings:
        return None
    position = POOLINGS.get(poolings[0]) if len(poolings) == 1 else None
    if position not in ("first", "last", "mean"):
        pooling = " and ".join(poolings)
        raise InvalidInputError(f"the pooling of {name_or_path} is {pooling}, not one position; choose a position")
    return position


def texts_of(target: Any) -> list[str]:
    """Return the names in a target."""
    parts = (target.target, target.other) if isinstance(target, Difference) else (target,)
    return [part for part in parts if isinstance(part, str)]


def numbered(model: Any, tokenizer: Any, target: Any) -> Any:
    """Replace the names in a target by the numbers of these outputs."""
    if isinstance(target, Difference):
        return Difference(numbered(model, tokenizer, target.target), numbered(model, tokenizer, target.other))
    return output_number(model, tokenizer, target, f"the target {target}") if isinstance(target, str) else target


def target_name(target: Any) -> str | None:
    """Format a target for people."""
    if isinstance(target, Difference):
        return f"{target_name(target.target)} − {target_name(target.other)}"
    if target is None or isinstance(target, str):
        return target
    listed = target.tolist() if hasattr(target, "tolist") else target
    return ", ".join(map(str, listed)) if isinstance(listed, list | tuple) else str(listed)


def output_number(model: Any, tokenizer: Any, name: str, named: str) -> int:
    """Return the index of an output by its number, text, label or token; ``named`` is its name in messages."""
    # Only the right kind is looked up: a misspelt label may be a token, and language models have labels, too.
    if isinstance(model, SentenceEncoder) and name in model.texts:
        return model.texts.index(name)
    kind = type(model).__name__
    labels = {label: number for number, label in model.config.id2label.items()} if has_labels(model) else {}
    if name in labels:
        return int(labels[name])
    try:
        return int(name)
    except ValueError:
        pass
    if labels:
        raise InvalidInputError(
            f"got {named}, which is no number and no label of {kind}; its labels are {', '.join(labels)}"
        )
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise InvalidInputError(f"got {named}, but the outputs of {kind} are neither labels nor tokens")
    pieces = [name] if name in tokenizer.get_vocab() else tokenizer.tokenize(name)
    if len(pieces) != 1 or tokenizer.unk_token in pieces:
        raise InvalidInputError(f"got {named}, which is no number and no single token of {kind}")
    return int(tokenizer.convert_tokens_to_ids(pieces[0]))

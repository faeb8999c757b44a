"""Chooses and names the output that a comparison explains."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.lab.comparison.examples import Batch, Examples, gathered
from captum_norm.models.hooks import evaluating
from captum_norm.models.objects import SentenceEncoder
from captum_norm.models.outputs import Difference, Readout, Target, has_labels, real_positions
from captum_norm.models.wrappers import config_of

PROJECTION = "projection of the mean-pooled output on its own direction (the model has no head)"
"""The explained output of a model that only returns hidden states."""


def count_outputs(batch: Batch) -> int | None:
    """Count the logits, at each position if every position has some; None if the model only returns hidden states.

    Raises:
        UnsupportedModelError: the model returns neither.
    """
    output = _run(batch)
    named = output if isinstance(output, Mapping) else {"logits": output}
    logits = named.get("logits")
    if not isinstance(logits, Tensor):
        if "last_hidden_state" in named:
            return None
        raise UnsupportedModelError(
            f"{type(batch.call.model).__name__} returns neither logits nor a last hidden state; take a classifier, a "
            "tagger, a language model or an encoder without a head, or in Python pass a readout"
        )
    return logits.shape[-1] if logits.dim() > 1 else 1


def own_directions(examples: Examples, size: int) -> Readout:
    """Create a readout for models without a head.

    Returns:
        a function that projects the mean-pooled hidden states of N inputs on the directions of the B examples, (N, B).
        The target of an example is its own index.
    """
    batches = list(examples.batches(size))
    parts = [_pooled(_run(batch), real_positions(batch.call)) for batch in batches]
    directions = nn.functional.normalize(gathered(parts, torch.cat([batch.index for batch in batches])), dim=-1)

    def project(output: Any, real: Tensor) -> Tensor:
        pooled = _pooled(output, real)
        return pooled @ directions.to(pooled).T

    return project


def as_target(chosen: Tensor | None) -> Target:
    """Convert what :func:`captum_norm.models.outputs.chosen_target` returns to a target."""
    return chosen if chosen is None or chosen.dim() < 2 else Difference(*chosen.unbind(1))


def target_names(model: nn.Module, chosen: Tensor, readout: Readout | None, tokenizer: Any) -> list[str]:
    """Name targets: by a classifier's labels, a language model's tokens, or the indices of a readout.

    Args:
        model: the model.
        chosen: what :func:`captum_norm.models.outputs.chosen_target` returns, (B,) or (B, 2).
        readout: the user's readout.
        tokenizer: knows the texts of tokens.
    """
    rows = (chosen[:, None] if chosen.dim() == 1 else chosen).tolist()
    if readout is not None:
        return [" − ".join(map(str, row)) for row in rows]
    return [" − ".join(_name(model, one, tokenizer) for one in row) for row in rows]


def tokens_of(examples: Examples, tokens: Sequence[Sequence[str]] | None, tokenizer: Any) -> list[list[str]]:
    """Return the texts of the tokens at the positions of the user's inputs; ids or indices if texts are not known."""
    tokens = examples.call.tokens if tokens is None else tokens
    if tokens is not None:
        return [list(texts) for texts in tokens]
    ids = examples.call.arguments.get("input_ids")
    if not isinstance(ids, Tensor):
        return [[str(place) for place in range(examples.real.shape[1])] for _ in range(len(examples))]
    rows = examples.call.positions.shift_back(ids, 1).tolist()
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    return [convert(row) if convert is not None else [str(token) for token in row] for row in rows]


def _name(model: nn.Module, target: int, tokenizer: Any) -> str:
    if isinstance(model, SentenceEncoder):
        return model.texts[target]
    labels = getattr(config_of(model), "id2label", None) or {}
    if has_labels(model):
        return str(labels.get(target, target))
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    return str(target if convert is None else convert(target))


def _run(batch: Batch) -> Any:
    with torch.no_grad(), evaluating(batch.call.model):
        return batch.call.run()


def _pooled(output: Any, real: Tensor) -> Tensor:
    """The mean hidden state of the real positions, (N, D)."""
    states: Tensor = output["last_hidden_state"]
    weights = real.to(states)
    return (states * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)

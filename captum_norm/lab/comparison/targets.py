"""Splits examples into batches, and chooses and names the output that is explained."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.models import Difference, SentenceSimilarity, TokenInputs
from captum_norm.models.outputs import Readout, Target

PROJECTION = "projection of the mean-pooled output on its own direction (the model has no head)"
"""The explained output of a model that only returns hidden states."""

_LABELLED = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForNextSentencePrediction",
    "ForTokenClassification",
)


@dataclass(frozen=True, eq=False)
class Batch:
    """Some of the examples, without padding that is common to all of them."""

    index: Tensor
    inputs: TokenInputs
    target: Target

    @property
    def position(self) -> Tensor | None:
        """Where the output is read, (N,); None for the default."""
        return None if self.inputs.read is None else self.inputs.read.long().argmax(1)

    def first(self) -> "Batch":
        """Return only the first example."""
        index = self.index.new_zeros(1)
        target = target_of_some(self.target, index, len(self.index))
        return Batch(self.index[:1], _cut(self.inputs, index, self.inputs.real.shape[1]), target)


def batches_of(inputs: TokenInputs, target: Target, size: int) -> Iterator[Batch]:
    """Batch examples of similar lengths, which need little padding."""
    lengths = inputs.real.sum(1)
    for index in lengths.argsort(stable=True).split(size):
        some = _cut(inputs, index, int(lengths[index].max()))
        yield Batch(index, some, target_of_some(target, index, len(inputs)))


def _cut(inputs: TokenInputs, index: Tensor, length: int) -> TokenInputs:
    return inputs.take(index, torch.arange(length, device=index.device).expand(len(index), -1))


def target_of_some(target: Target, index: Tensor, batch: int) -> Target:
    """Return the targets of some of B examples; invalid ones are refused where they are used."""
    if isinstance(target, Difference):
        parts: list[Any] = [target_of_some(part, index, batch) for part in (target.target, target.other)]
        return Difference(*parts)
    listed = isinstance(target, Sequence) or (isinstance(target, Tensor) and target.dim() > 0)
    if not listed or len(target) != batch:  # type: ignore[arg-type]
        return target
    return torch.as_tensor(target)[index.cpu()]


def in_order(parts: Sequence[Tensor], batches: Sequence[Batch], width: int | None = None) -> Tensor:
    """Concatenate rows of batches in the order of all examples, padded with zeros to (B, width) if given."""
    if width is not None:
        parts = [nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]
    rows, order = torch.cat(list(parts)), torch.cat([batch.index for batch in batches])
    return rows[order.argsort().to(rows.device)]


def count_outputs(inputs: TokenInputs) -> int | None:
    """Count the logits, at each position if every position has some; None if the model only returns hidden states."""
    output = next(batches_of(inputs, None, 1)).inputs.run()
    named = output if isinstance(output, Mapping) else {"logits": output}
    logits = named.get("logits")
    if not isinstance(logits, Tensor):
        if "last_hidden_state" in named:
            return None
        raise UnsupportedModelError(
            f"{type(inputs.model).__name__} returns neither logits nor a last hidden state; take a classifier, a "
            "tagger, a language model or an encoder without a head, or in Python pass a readout"
        )
    return logits.shape[-1] if logits.dim() > 1 else 1


def own_directions(inputs: TokenInputs, size: int) -> Readout:
    """Create a readout for models without a head."""
    batches = list(batches_of(inputs, None, size))
    parts = [_pooled(batch.inputs.run(), batch.inputs.real) for batch in batches]
    directions = nn.functional.normalize(in_order(parts, batches), dim=-1)

    def project(output: Any, real: Tensor) -> Tensor:
        pooled = _pooled(output, real)
        return pooled @ directions.to(pooled).T

    return project


def _pooled(output: Any, real: Tensor) -> Tensor:
    """The mean hidden state of the real positions, (N, D)."""
    states: Tensor = output["last_hidden_state"]
    weights = real.to(states)
    return (states * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


def target_names(model: nn.Module, chosen: Tensor, readout: Readout | None, tokenizer: Any) -> list[str]:
    """Name targets: by a classifier's labels, a language model's tokens, or the indices of a readout."""
    labels = getattr(getattr(model, "config", None), "id2label", None) or {}
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)

    def name(target: int) -> str:
        if readout is not None:
            return str(target)
        if isinstance(model, SentenceSimilarity):
            return model.texts[target]
        if type(model).__name__.endswith(_LABELLED):
            return str(labels.get(target, target))
        return str(target if convert is None else convert(target))

    rows = (chosen[:, None] if chosen.dim() == 1 else chosen).tolist()
    return [" − ".join(map(name, row)) for row in rows]


def tokens_of(inputs: TokenInputs, tokens: Sequence[Sequence[str]] | None, tokenizer: Any) -> list[list[str]]:
    """Return the texts of the tokens at the positions of the user's inputs; ids or indices if texts are not known."""
    tokens = inputs.tokens if tokens is None else tokens
    if tokens is not None:
        return [list(texts) for texts in tokens]
    ids = inputs.arguments.get("input_ids")
    if not isinstance(ids, Tensor):
        return [[str(place) for place in range(inputs.real.shape[1])] for _ in range(len(inputs))]
    convert = getattr(tokenizer, "convert_ids_to_tokens", None) or (lambda row: [str(token) for token in row])
    return [convert(row) for row in inputs.to_user(ids).tolist()]

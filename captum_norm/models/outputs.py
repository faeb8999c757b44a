"""Chooses what to explain in a model's output: the position that is read, the class, and values of several."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captum_norm.checks import check_index, check_indices, quoted
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.models.call import ModelCall
from captum_norm.models.objects import SentenceEncoder
from captum_norm.models.wrappers import class_of, config_of, unwrapped, virtual_tokens
from captum_norm.results.outputs import TOP, NamedOutput

ReadPosition = Literal["first", "last", "mean"]

Position = int | ReadPosition | Sequence[int] | Tensor | None
"""Output positions to explain, in the forms that users may pass."""

HeadPosition = ReadPosition | Literal["patches", "first and patches", "weighted mean"]
"""Image heads may read the mean of all patches, without the tokens before them, alone or with the first token.

Sentence encoders may weight each real position by its number, from 1."""

# They have logits at every position.
TAGGERS = ("ForMaskedLM", "ForTokenClassification")
# These have other outputs at every position: hidden states, or scores of where an answer begins.
_OF_EVERY_POSITION = (*TAGGERS, "Model", "ForPreTraining", "ForQuestionAnswering")
CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification", "ForNextSentencePrediction")
# Their outputs are labelled classes, not tokens of a vocabulary.
LABELLED = (*CLASSIFIERS, "ForTokenClassification")
# Image heads that do not read the first token alone; the first two may, by their configuration.
_IMAGES: Mapping[str, HeadPosition] = {
    "BeitForImageClassification": "patches",
    "Data2VecVisionForImageClassification": "patches",
    "CLIPForImageClassification": "patches",
    "MetaClip2ForImageClassification": "patches",
    "Dinov2ForImageClassification": "first and patches",
    "Dinov2WithRegistersForImageClassification": "first and patches",
    "IJepaForImageClassification": "mean",
    "SiglipForImageClassification": "mean",
    "Siglip2ForImageClassification": "mean",
}

# Scores whose rows sum to 1 are probabilities already.
_SUMS_TO_ONE = 1e-4

# What the poolings of a SentenceTransformer read; all others read no one position.
POOLINGS: Mapping[str, HeadPosition] = {
    "cls": "first",
    "lasttoken": "last",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean",
    "weightedmean": "weighted mean",
}

Readout = Callable[[Any, Tensor], Tensor]
"""What to explain: from a model's output and where its inputs are real, (N, S), to scores (N, C) or (N,)."""

Choice = int | Sequence[int] | Tensor
"""A class or token for all examples, or one for each example."""


@dataclass(frozen=True)
class Difference:
    """A target: the difference of two outputs, such as the logits of a word and of its rival.

    Attributes:
        target: the class or token that counts positively, for all examples or one for each example.
        other: the class or token whose output is subtracted.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from captum_norm import DecompX
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> DecompX(model).attribute(torch.tensor([[7, 9, 3]]), target=Difference(4, 11)).shape
        torch.Size([1, 3])
    """

    target: Choice
    other: Choice


Target = Choice | Difference | None
"""What to explain: a class or token, a difference of two, or None for the model's prediction."""


def read_position(model: nn.Module, *, causal: bool) -> HeadPosition | None:
    """Look up the position that a head reads, by the model's class; None outside transformers, or if heads differ."""
    if isinstance(model, SentenceEncoder):
        return POOLINGS.get(model.pooling or "")
    model, kind = unwrapped(model), class_of(model)
    name, config = kind.__name__, config_of(model)
    if not kind.__module__.startswith("transformers."):
        return None
    if causal:
        return "last"
    if name.endswith(_OF_EVERY_POSITION):
        return "mean"
    if not name.endswith(CLASSIFIERS) or getattr(model, "main_input_name", None) not in ("input_ids", "pixel_values"):
        return None
    if getattr(config, "classifier_pooling", None) in ("mean", "late"):
        return "mean"
    return _IMAGES.get(name, "first") if getattr(config, "use_mean_pooling", True) else "first"


def pooled_rows(position: str, real: Tensor, model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """Return the weight of each position, (B, S), if the head reads several real ones, (B, S); None if it reads one."""
    if position == "mean":
        return _shares(real, dtype)
    if position == "weighted mean":
        return _shares(real.cumsum(1) * real, dtype)
    if position not in ("patches", "first and patches"):
        return None
    before = 1 + getattr(config_of(model), "num_register_tokens", 0)
    patches = real & (torch.arange(real.shape[1], device=real.device) >= before)
    rows = _shares(patches, dtype)
    if position == "first and patches":
        rows = rows / 2
        rows[:, 0] = 0.5
    return rows


def _shares(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    numbers = numbers.to(dtype)
    return numbers / numbers.sum(1, keepdim=True)


def positions_of_examples(position: int | str | Sequence[int] | Tensor | None, real: Tensor) -> Tensor:
    """Resolve a position, one for each example, or the ``"first"`` or ``"last"`` real one, (B, S), to indices, (B,)."""
    batch, length = real.shape
    if isinstance(position, str):
        if position not in ("first", "last"):
            raise InvalidInputError(f'got the position "{position}"; expected an index, "first", "last" or "mean"')
        ends = real.long() if position == "first" else real.long().cumsum(1)
        return ends.argmax(1)
    single = not isinstance(position, Iterable) or (isinstance(position, Tensor) and position.dim() == 0)
    places = [check_index("position", position)] if single else check_indices("position", position)
    if len(places) not in (1, batch):
        raise InvalidInputError(f"got {len(places)} positions for {batch} examples")
    index = torch.tensor(places, device="cpu").expand(batch)
    for example, place in enumerate(index.tolist()):
        if not -length <= place < length:
            raise InvalidInputError(f"got position {place}; the sequence has {length} positions, 0 to {length - 1}")
        if not real[example, place]:
            raise InvalidInputError(f"got position {place}, which is padding in example {example}")
    return (index % length).to(real.device)


def position_rows(
    position: Position, head: HeadPosition | None, real: Tensor, like: Tensor, model: nn.Module
) -> Tensor:
    """Return the weight of each query's row, (B, Q), like a tensor: the user's position, else what the head reads."""
    chosen = head if position is None else position
    # Users may name only one pooled position: the mean.
    if isinstance(chosen, str) and (position is None or chosen == "mean"):
        pooled = pooled_rows(chosen, real, model, like.dtype)
        if pooled is not None:
            return pooled.to(like)
    rows = torch.zeros_like(real, dtype=like.dtype, device=like.device)
    rows[torch.arange(len(real), device=like.device), positions_of_examples(chosen, real)] = 1
    return rows


def read_mask(call: ModelCall, position: Position) -> Tensor | None:
    """Return a mask, (B, S), shifted as the user's inputs were, of their position to read; None for the last ones."""
    if position is None:
        return None
    if isinstance(position, str) and position == "mean":
        raise InvalidInputError('got position="mean"; an output is read at one position of each example')
    real = real_positions(call)
    shown = call.output_positions.shift_back(real, 1)
    chosen = torch.zeros_like(shown)
    chosen[torch.arange(call.batch, device=chosen.device), positions_of_examples(position, shown)] = True
    shifted: Tensor = call.output_positions.shift_left(chosen)
    return shifted


def real_positions(call: ModelCall) -> Tensor:
    """Return True at the real positions of the outputs, (B, S), the decoder's in an encoder–decoder model."""
    positions = call.output_positions
    if positions.real is not None:
        return positions.real
    main = next(value for value in call.arguments.values() if isinstance(value, Tensor))
    if positions.length is None:
        if call.encoder is not None:
            raise InvalidInputError(f"got no input of the decoder; {call.library.without_decoder}")
        raise InvalidInputError(f"got inputs of shape {tuple(main.shape)}; expected token ids or their embeddings")
    return torch.ones(call.batch, positions.length, dtype=torch.bool, device=main.device)


def read_output(model: nn.Module, output: Any, real: Tensor, read: Tensor | None, readout: Readout | None) -> Tensor:
    """Return the scores to explain, (N, C) or (N,): where ``read`` is True, (N, S), or at the last real positions."""
    scores = _scores(model, output, real, readout)
    return scores if scores.dim() < 3 else _at(scores, model, real, read)


def output_scores(call: ModelCall, output: Any, position: Position, readout: Readout | None) -> Tensor:
    """Return the scores to explain of one call, (B, C) or (B,): as :func:`read_output`, also for images."""
    positions = call.output_positions
    logits = logits_of(call.model, output)
    # Classifiers may make the decoder's inputs from the source.
    lacks_decoder = call.encoder is not None and isinstance(logits, Tensor) and logits.dim() > 2
    sequence = positions.real is not None or positions.length is not None or lacks_decoder
    real = real_positions(call) if sequence else torch.ones(call.batch, 1, dtype=torch.bool, device="cpu")
    scores = _scores(call.model, output, real, readout)
    return scores if scores.dim() < 3 else _at(scores, call.model, real, read_mask(call, position))


def _scores_at(call: ModelCall, output: Any, rows: Tensor, readout: Readout | None) -> Tensor:
    """Return the scores to explain at several positions of each example, ``rows`` (B, P) as received: (B·P, C)."""
    scores = _scores(call.model, output, real_positions(call), readout)
    batch, length = len(rows), real_positions(call).shape[1]
    if scores.dim() != 3 or scores.shape[1] < length:
        raise InvalidInputError(
            f"got {rows.shape[1]} positions for each example, but {type(call.model).__name__} returns outputs of shape "
            f"{tuple(scores.shape)} for {batch} examples of {length} positions; pass one position for each"
        )
    examples = torch.arange(batch, device=scores.device)[:, None]
    return scores[examples, rows.to(scores.device)].flatten(0, 1)


def _scores(model: nn.Module, output: Any, real: Tensor, readout: Readout | None) -> Tensor:
    """Return scores (N, S, C), (N, C) or (N,)."""
    if readout is not None:
        if not callable(readout):
            raise InvalidInputError(
                f"got readout={quoted(readout)}; expected a function of the model's output and a mask of its inputs"
            )
        scores: Any = readout(output, real)
        if not isinstance(scores, Tensor) or scores.dim() not in (1, 2) or len(scores) != len(real):
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise InvalidInputError(f"the readout returned {got} for {len(real)} examples; expected (N, C) or (N,)")
        return scores
    logits, virtual = logits_of(model, output), virtual_tokens(model)
    if virtual is not None and isinstance(logits, Tensor) and logits.dim() == 3:
        # Behind a prompt; in an encoder–decoder model the prompt is the encoder's.
        number, _ = virtual
        logits = logits[:, number:] if logits.shape[1] == number + real.shape[1] else logits
    if not isinstance(logits, Tensor):
        way = "take a model with a head, or choose what to explain by readout="
        if isinstance(model, SentenceEncoder):
            way = "compare it with texts: SentenceSimilarity(model, text)"
        raise UnsupportedModelError(f"{type(model).__name__} returns no logits; {way}")
    axes = logits.dim() - 1
    of_last = axes == 2 and logits.shape[:2] == (len(real), 1)
    if axes not in (0, 1, 2) or not (of_last or logits.shape[:axes] == real.shape[:axes]):
        raise InvalidInputError(
            f"{type(model).__name__} returns {tuple(logits.shape)} for {len(real)} examples of {real.shape[1]} "
            "positions; expected (B, C) or (B, S, C), or a readout= that chooses what to explain"
        )
    return logits


def logits_of(model: nn.Module, output: Any) -> Any:
    """Return the logits in a model's output: the first tensor of a tuple, as of (logits, loss), of a user's model."""
    if isinstance(output, Mapping):
        return output.get("logits")
    if isinstance(getattr(output, "logits", None), Tensor):  # a dataclass
        return output.logits
    # The tuples of transformers begin with a loss, logits or hidden states.
    if not isinstance(output, (tuple, list)) or type(unwrapped(model)).__module__.startswith("transformers."):
        return output
    first = next(iter(output), None)
    return first if isinstance(first, Tensor) and first.is_floating_point() and first.dim() > 1 else output


def _at(logits: Tensor, model: nn.Module, real: Tensor, read: Tensor | None) -> Tensor:
    """Return the logits at one position of each example: (N, S, C) -> (N, C)."""
    if logits.shape[1] < real.shape[1]:
        if not real[:, -1].all() or (read is not None and not read[:, -1].all()):
            raise InvalidInputError(
                f"{type(model).__name__} returns logits of the last position alone; expected that position, and "
                "examples without padding on the right, or the arguments for which it returns all logits"
            )
        return logits[:, 0]
    if read is None:
        if any(class_of(module).__name__.endswith(TAGGERS) for module in model.modules()):
            raise InvalidInputError(f"{type(model).__name__} has logits for every position; pass the position to read")
        places = torch.arange(real.shape[1], device=real.device)
        index = torch.where(real, places, -1).amax(1)
    else:
        index = read.long().argmax(1)
    return logits[torch.arange(len(logits), device=logits.device), index.to(logits.device)]


def chosen_target(target: Target, scores: Tensor) -> Tensor | None:
    """Return the class to explain of each example, (B,), of a difference both, (B, 2); None for scores (B,)."""
    if scores.dim() == 1:
        if target is not None:
            raise InvalidInputError(
                f"got target={quoted(target)}, but the output is one number for each example: leave it out"
            )
        return None
    if target is None:
        return scores.detach().argmax(1)
    if isinstance(target, Difference):
        return torch.stack([_classes(choice, scores) for choice in (target.target, target.other)], 1)
    return _classes(target, scores)


def _classes(target: Choice, scores: Tensor) -> Tensor:
    try:
        indices = torch.as_tensor(target, device=scores.device)
    except (TypeError, ValueError, RuntimeError):
        indices = torch.empty(0, device="cpu")
    integers = not (indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool)
    if not integers or indices.dim() > 1 or indices.numel() not in (1, len(scores)):
        raise InvalidInputError(
            f"got target={quoted(target)} for {len(scores)} examples; expected an integer, or one for each example "
            "(captum_norm.explain takes names, too)"
        )
    # Tensors made in inference mode cannot be saved for a gradient.
    classes = (indices.clone() if indices.is_inference() else indices).long().reshape(-1).expand(len(scores))
    wrong = classes[(classes < 0) | (classes >= scores.shape[1])]
    if len(wrong):
        raise InvalidInputError(f"got the target {int(wrong[0])}; expected 0 to {scores.shape[1] - 1}")
    return classes


def explained_number(scores: Tensor, chosen: Tensor | None) -> Tensor:
    """Return the number to explain of each example, (N,), of what :func:`chosen_target` chose, for N or for one."""
    numbers = _chosen_scores(scores, chosen)
    return numbers[:, 0] - numbers[:, 1] if numbers.shape[1] == 2 else numbers[:, 0]


def _chosen_scores(scores: Tensor, chosen: Tensor | None) -> Tensor:
    """Return the chosen scores, (N, 1), or (N, 2) for a difference."""
    if chosen is None:
        return scores[:, None]
    columns = chosen if chosen.dim() == 2 else chosen[:, None]
    return scores.gather(1, columns.to(scores.device).expand(len(scores), -1))


def probability_kind(model: nn.Module, count: int) -> Literal["softmax", "sigmoid"] | None:
    """Return how so many scores of a model's become probabilities; None for regression and similarities."""
    problem = getattr(config_of(model), "problem_type", None)
    if isinstance(model, SentenceEncoder) or problem == "regression":
        return None
    if problem == "multi_label_classification":
        return "sigmoid"
    return "softmax" if count > 1 else None


def output_names(model: nn.Module, count: int, tokenizer: Any = None) -> Callable[[int], str]:
    """Return what names ``count`` outputs: texts compared with, labels, tokens of a vocabulary, or their numbers."""
    if isinstance(model, SentenceEncoder):
        return lambda index: str(model.texts[index])
    labels = getattr(config_of(model), "id2label", None) or {}
    if len(labels) == count:
        return lambda index: str(labels.get(index, index))
    decode = getattr(tokenizer, "decode", None)
    if decode is None or getattr(model, "get_output_embeddings", lambda: None)() is None:
        return str

    def token(index: int) -> str:
        text = str(decode([index]))
        # Half a character, and what a tokenizer's decoder leaves out.
        return text if text and "\ufffd" not in text else str(tokenizer.convert_ids_to_tokens(index))

    return token


def name_outputs(
    model: nn.Module,
    scores: Tensor,
    chosen: Tensor | None,
    tokenizer: Any = None,
    *,
    title: str | None = None,
    readout: bool = False,
    explained: bool = True,
) -> list[NamedOutput]:
    """Name what :func:`chosen_target` chose in scores, (N, C) or (N,), and the three highest of each example.

    ``title`` names all, instead of labels, tokens or numbers; a ``readout`` has no labels and no probabilities.
    """
    scores = scores.detach().to("cpu", torch.promote_types(scores.dtype, torch.float32))
    shown = scores[:, None] if scores.dim() == 1 else scores
    kind = None if readout else probability_kind(model, shown.shape[1])
    names = str if readout else output_names(model, shown.shape[1], tokenizer)
    if kind == "sigmoid":
        shown = shown.sigmoid()
    elif kind == "softmax" and not ((shown >= 0).all() and ((shown.sum(1) - 1).abs() < _SUMS_TO_ONE).all()):
        shown = shown.softmax(1)
    chosen = None if chosen is None else chosen.cpu()
    values, best, named = explained_number(scores, chosen), shown.topk(min(TOP, shown.shape[1]), 1), []
    for row, value in enumerate(values.tolist()):
        index: Any = None if chosen is None else chosen[row].tolist()
        pair = tuple(index) if isinstance(index, list) else None
        name = title or ("the only number" if index is None else " − ".join(map(names, pair or [index])))
        share = None if kind is None or pair or index is None else float(shown[row, index])
        highest = zip(map(names, best.indices[row].tolist()), best.values[row].tolist(), strict=True)
        named.append(NamedOutput(pair or index, name, value, share, () if title else tuple(highest), explained))
    return named


@dataclass(frozen=True, eq=False)
class OutputValues:
    """P values of a model's output for each of B examples."""

    target: Any  # of several values a list of B·P
    position: Any
    rows: Tensor | None  # where each of several values is, (B, P), in the order that the model received
    readout: Readout | None
    batch: int
    count: int = 1
    several: bool = False  # whether targets or positions came with an axis P, which results then have
    together: bool = False  # unless the sum of each example's is explained

    @classmethod
    def of(cls, call: ModelCall, target: Any, position: Any, readout: Readout | None) -> "OutputValues":
        """Take those that a user names: nested sequences, or tensors or arrays with two axes, name several."""
        rows, nested = _several_positions(call, position), _first_row(target)
        if rows is None and nested is None:
            return cls(target, position, None, readout, call.batch)
        count = len(nested or ()) if rows is None else rows.shape[1]
        targets = _mapped(lambda choice: _spread(choice, call.batch, count), target)
        return cls(targets, position if rows is None else None, rows, readout, call.batch, count, several=True)

    def of_example(self, index: int) -> "OutputValues":
        """Select one example's."""

        def part(value: Any, size: int, what: str) -> Any:
            value = _listed(value)
            if not isinstance(value, list) or len(value) == 1:
                return value
            if len(value) != self.batch * size:
                raise InvalidInputError(f"got {len(value)} {what} for {self.batch} examples")
            return value[index * size : (index + 1) * size]

        target = _mapped(lambda choice: part(choice, self.count, "targets"), self.target)
        rows = None if self.rows is None else self.rows[index : index + 1]
        position = part(self.position, 1, "positions")
        return replace(self, target=target, position=position, rows=rows, batch=1)

    def read(self, call: ModelCall, output: Any) -> tuple[Tensor, Tensor]:
        """Read the values and the sizes of what was rounded in them, (N, P) each, in the output of N copies."""
        if self.rows is None:
            scores = output_scores(call, output, self.position, self.readout)
            scores = scores.repeat_interleave(self.count, 0) if self.several else scores
        else:
            scores = _scores_at(call, output, self.rows.repeat(call.batch // self.batch, 1), self.readout)
        values = self.batch * self.count
        chosen = chosen_target(self.target, scores[:values])
        if chosen is not None:
            chosen = chosen.repeat(len(scores) // values, *[1] * (chosen.dim() - 1))
        numbers, rounded = explained_number(scores, chosen), _chosen_scores(scores.detach(), chosen).abs().sum(1)
        return numbers.unflatten(0, (-1, self.count)), rounded.unflatten(0, (-1, self.count))


def _several_positions(call: ModelCall, position: Any) -> Tensor | None:
    """Resolve several positions of each example, (B, P), to indices in the sequence that the model received."""
    rows = _listed(position)
    if not _nested(rows):
        return None
    counts = {len(row) for row in rows}
    if len(rows) != call.batch or len(counts) != 1 or counts == {0}:
        raise InvalidInputError(
            f"got position={quoted(rows)} for {call.batch} examples; expected as many positions for each example, "
            "(B, P)"
        )
    positions = call.output_positions
    real = positions.shift_back(real_positions(call), 1)
    index = torch.stack([positions_of_examples(list(column), real) for column in zip(*rows, strict=True)], 1)
    return index if positions.shift is None else index - positions.shift.to(index.device)[:, None]


def _spread(choice: Any, batch: int, count: int) -> Any:
    """Give each of P values of each example its class: from one for all, one for each example, or (B, P)."""
    choice = _listed(choice)
    if not isinstance(choice, list):
        return choice
    rows = choice if _nested(choice) else [[entry] * count for entry in choice]
    if not count or len(rows) != batch or {len(row) for row in rows} != {count}:
        raise InvalidInputError(
            f"got target={quoted(choice)} for {count} values of each of {batch} examples; expected one for all, one "
            "for each example, or one for each value, (B, P)"
        )
    return [entry for row in rows for entry in row]


def _first_row(target: Any) -> list[Any] | None:
    """Return the first example's classes in a target with two axes, (B, P); None for one with fewer."""
    choices = [target.target, target.other] if isinstance(target, Difference) else [target]
    return next((list(rows[0]) for rows in map(_listed, choices) if _nested(rows)), None)


def _mapped(function: Callable[[Any], Any], target: Any) -> Any:
    if isinstance(target, Difference):
        return Difference(function(target.target), function(target.other))
    return function(target)


def _listed(value: Any) -> Any:
    """Turn tensors, arrays and tuples into lists."""
    if getattr(value, "is_meta", False):
        return value  # has no numbers, and is refused where they are read
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, tuple) else value


def _nested(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, (list, tuple)) for row in value)

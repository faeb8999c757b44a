"""Computes the gradient baselines: how much each target piece's probability depends on each source embedding."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd import grad

from alignment.teacher_forcing import NO_LABEL, PieceMaps, TeacherForcedBatch
from alignment.translation import forward_hook, log_probabilities
from captum_norm import InvalidInputError, UnsupportedModelError
from captum_norm.errors import NonFiniteError
from captum_norm.functional import length
from captum_norm.models import evaluating, explained_module

GradientKind = Literal["saliency", "gradient_x_input"]
"""How a gradient with respect to a source embedding becomes a number: its norm, or its product with the embedding."""

_REDUCE: Mapping[GradientKind, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "saliency": lambda gradient, _: length(gradient),
        "gradient_x_input": lambda gradient, embedded: (gradient * embedded).sum(-1),
    }
)
_SOURCE = frozenset({"input_ids", "attention_mask"})
_TARGET = frozenset({"decoder_input_ids", "decoder_attention_mask"})
# A block costs one more forward pass, but its backward passes skip the decoder's later rows.
_BLOCK = 16


def source_gradients(
    model: nn.Module,
    inputs: Mapping[str, Any],
    labels: Tensor,
    *,
    kind: GradientKind = "saliency",
    group_size: int = 16,
) -> Tensor:
    """Gradients of log p(y_t | y_<t, x) with respect to the source embeddings e_s, each reduced to a number.

    - ``"saliency"``: ‖∂ log p(y_t) / ∂e_s‖₂ [Li et al. 2016].
    - ``"gradient_x_input"``: ⟨∂ log p(y_t) / ∂e_s, e_s⟩, signed [Ding et al. 2019]; alignments use its absolute value.

    e_s is the output of the encoder's embedding module. A model that scales embeddings by √D afterwards, such as
    Marian, has √D times the saliency of the scaled embeddings; gradient × input is the same. An embedding table shared
    with the decoder is differentiated in the encoder only.

    There is one backward pass per target position, for a group of sentences of similar length at once; the memory
    needed is that of a training step on one group.

    Args:
        model: a Hugging Face sequence-to-sequence model with its language-modelling head, in any mode; left unchanged.
        inputs: ``input_ids`` and ``attention_mask``, (B, S), ``decoder_input_ids`` and optionally
            ``decoder_attention_mask``, (B, T), targets padded on the right. ``use_cache`` is accepted and ignored.
        labels: (B, T), y_t; -100 for none, as at padding.
        kind: how each gradient becomes a number.
        group_size: sentences per group; larger groups need more memory and use an accelerator better.

    Returns:
        (B, T, S) on the inputs' device, exactly 0 at padded sources and where there is no label; in the model's
        precision, but at least float32.

    Raises:
        InvalidInputError: an option, an input's name or shape, or a label is not as described.
        UnsupportedModelError: the model is not an encoder–decoder with a language-modelling head.
        NonFiniteError: a gradient is NaN or infinite.
    """
    if kind not in get_args(GradientKind) or group_size < 1:
        expected = f"one of {', '.join(get_args(GradientKind))}, and at least 1"
        raise InvalidInputError(f"got kind={kind!r} and group_size={group_size}, expected {expected}")
    model = explained_module(model)
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedModelError(f"got a {type(model).__name__}, expected an encoder–decoder of Hugging Face")
    tensors = _checked(inputs, labels)
    mask = tensors["attention_mask"] != 0
    labels = labels.to(mask.device)
    sources, targets = _lengths(mask), _lengths(labels != NO_LABEL)
    if not sources.all():
        raise InvalidInputError(f"got an attention_mask that hides all of sentence {int(sources.argmin())}")
    order = (sources + targets).argsort()
    with evaluating(model), torch.inference_mode(False), torch.enable_grad():
        result = torch.zeros(*labels.shape, mask.shape[1], dtype=_precision(model), device=mask.device)
        for group in order[targets[order] > 0].split(group_size):
            width, height = int(sources[group].max()), int(targets[group].max())
            for start in range(0, height, _BLOCK):
                end = min(start + _BLOCK, height)
                part = {name: x[group, : width if name in _SOURCE else end] for name, x in tensors.items()}
                rows = _rows(model, part, labels[group, start:end], _REDUCE[kind])
                result[group, start:end, :width] = rows.to(result)
    result.masked_fill_(~mask[:, None], 0)
    if not result.isfinite().all():
        raise NonFiniteError(f"the gradients of {type(model).__name__} contain NaN or infinity for these inputs")
    return result


def gradient_maps(model: nn.Module, kind: GradientKind) -> PieceMaps:
    """Piece maps from a gradient baseline: absolute values, (B, 1, T, S), in the row of the step that emits a piece."""

    def maps(batch: TeacherForcedBatch) -> Tensor:
        return source_gradients(model, batch.inputs, batch.labels, kind=kind).abs().unsqueeze(1)

    return maps


def _checked(inputs: Mapping[str, Any], labels: Tensor) -> dict[str, Tensor]:
    """The input tensors, with their names and shapes checked."""
    tensors = {name: value for name, value in inputs.items() if name != "use_cache"}
    needed = _SOURCE | {"decoder_input_ids"}
    if not needed <= tensors.keys() <= _SOURCE | _TARGET:
        expected = f"expected {', '.join(sorted(needed))}, and at most decoder_attention_mask too"
        raise InvalidInputError(f"got inputs named {', '.join(sorted(inputs))}, {expected}")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()} | {"labels": tuple(labels.shape)}
    source, target = shapes["input_ids"], shapes["labels"]
    uniform = all(shape == (source if name in _SOURCE else target) for name, shape in shapes.items())
    if not uniform or len(source) != 2 or len(target) != 2 or source[0] != target[0] or 0 in source + target:
        message = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InvalidInputError(f"got {message}, expected (B, S) for the source and (B, T) for the target, none empty")
    return tensors


def _lengths(real: Tensor) -> Tensor:
    """(B, n) -> (B,): the length of each row up to its last real position."""
    return (real * torch.arange(1, real.shape[1] + 1, device=real.device)).amax(1)


def _precision(model: Any) -> torch.dtype:
    return torch.promote_types(model.dtype, torch.float32)


def _rows(
    model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, reduce: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Labels (N, t) of the last t target positions of N sentences -> their maps, (N, t, S)."""
    embedded, hidden, logits = _forward(model, inputs)
    # All positions together: each log-probability depends on its own row only.
    (seeds,) = grad(log_probabilities(logits, labels).sum(), hidden, allow_unused=True)
    if seeds is None:
        raise UnsupportedModelError(f"{type(model).__name__} does not compute its logits from its decoder's output")
    read = embedded.detach().to(_precision(model))
    rows = []
    for position in range(-labels.shape[1], 0):
        (gradient,) = grad(hidden[:, position], embedded, seeds[:, position], retain_graph=True)
        rows.append(reduce(gradient.to(read), read))
    return torch.stack(rows, dim=1)


def _forward(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Source embeddings (N, S, D); as functions of them, the decoder's output (N, T, D) and the logits (N, T, V)."""
    seen: dict[str, Tensor] = {}

    def cut(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        # The decoder may use the same module; the encoder runs first.
        return output if "embedded" in seen else seen.setdefault("embedded", output.detach().requires_grad_())

    def keep(_module: nn.Module, _args: object, output: Any) -> None:
        seen["hidden"] = output[0]

    encoder = model.get_encoder()
    # FSMT's encoder is a plain nn.Module, without get_input_embeddings.
    embedding = encoder.embed_tokens if hasattr(encoder, "embed_tokens") else encoder.get_input_embeddings()
    with forward_hook(embedding, cut), forward_hook(model.get_decoder(), keep):
        # With a cache, FSMT's decoder drops its causal mask.
        output = model(**inputs, use_cache=False, return_dict=True)
    if "embedded" not in seen:
        raise UnsupportedModelError(
            f"{type(model).__name__} gives its encoder embeddings of its own, as prompt tuning does, so gradients with "
            "respect to the encoder's are unknown; use norms or weights"
        )
    logits: Tensor | None = getattr(output, "logits", None)
    if logits is None or logits.shape[:-1] != inputs["decoder_input_ids"].shape:
        raise UnsupportedModelError(f"got a {type(model).__name__}, expected a model with a language-modelling head")
    return seen["embedded"], seen["hidden"], logits

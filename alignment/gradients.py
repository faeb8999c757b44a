"""Computes the gradient baselines: how much the probability of each target piece depends on each source embedding."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd import grad

from captum_norm import InvalidInputError, NonFiniteError, UnsupportedModelError
from captum_norm.functional import length
from captum_norm.models import evaluating

GradientKind = Literal["saliency", "gradient_x_input"]
"""What is made of the gradient with respect to a source embedding: its norm, or its product with the embedding."""

_REDUCE: Mapping[GradientKind, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "saliency": lambda gradient, _: length(gradient),
        "gradient_x_input": lambda gradient, embedded: (gradient * embedded).sum(-1),
    }
)
_SOURCE = frozenset({"input_ids", "attention_mask"})
_TARGET = frozenset({"decoder_input_ids", "decoder_attention_mask"})
_NO_LABEL = -100
# A block costs one more forward pass, and spares each of its backward passes the decoder's later rows.
_BLOCK = 16


def source_gradients(
    model: nn.Module,
    inputs: Mapping[str, Any],
    labels: Tensor,
    *,
    kind: GradientKind = "saliency",
    group_size: int = 16,
) -> Tensor:
    """Gradients of log p(y_t | y_<t, x) with respect to the source embeddings e_s, each reduced to one number.

    - ``"saliency"``: ‖∂ log p(y_t) / ∂e_s‖₂ [Li et al. 2016].
    - ``"gradient_x_input"``: ⟨∂ log p(y_t) / ∂e_s, e_s⟩, signed [Ding et al. 2019]; alignments take its absolute value.

    e_s is what the encoder's embedding module returns. A model that scales embeddings by √D after it, as Marian does,
    has a saliency √D times that of the scaled embeddings; gradient × input is the same. An embedding table shared with
    the decoder counts in the encoder alone.

    Sentences go through the model in groups of like length, each group cut to its longest. One backward pass is made
    for each target position, for the whole group at once. It starts from the decoder's last hidden state: from log p to
    there all positions are taken back together, since each depends on its own row alone. Target positions come in
    blocks, so that early ones need not go back through later ones. Memory is that of a training step of one group.

    Args:
        model: a sequence-to-sequence model of Hugging Face with its language-modelling head, in any mode; it is left
            as it was.
        inputs: ``input_ids`` and ``attention_mask``, (B, S), ``decoder_input_ids`` and, if the model should have it,
            ``decoder_attention_mask``, (B, T), targets padded on the right. ``use_cache`` is taken and has no effect.
        labels: (B, T), y_t; -100 where there is none, as at padding.
        kind: what to make of each gradient.
        group_size: how many sentences a group has; more need more memory and keep an accelerator busier.

    Returns:
        (B, T, S) on the inputs' device, exactly 0 at padded sources and where there is no label; in the model's
        precision, at least single.

    Raises:
        InvalidInputError: an option, an input's name or shape, or a label is not as described.
        UnsupportedModelError: the model is no encoder–decoder with a language-modelling head.
        NonFiniteError: a gradient is NaN or infinite.

    >>> from transformers import BartConfig, BartForConditionalGeneration
    >>> model = BartForConditionalGeneration(BartConfig(vocab_size=9, d_model=16, encoder_layers=1, decoder_layers=1))
    >>> source = {"input_ids": torch.tensor([[4, 5, 2]]), "attention_mask": torch.ones(1, 3)}
    >>> target = {"decoder_input_ids": torch.tensor([[2, 7]])}
    >>> source_gradients(model, source | target, labels=torch.tensor([[7, 2]])).shape
    torch.Size([1, 2, 3])
    """
    if kind not in get_args(GradientKind) or group_size < 1:
        expected = f"one of {', '.join(get_args(GradientKind))}, and at least 1"
        raise InvalidInputError(f"got kind={kind!r} and group_size={group_size}, expected {expected}")
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedModelError(f"got a {type(model).__name__}, expected an encoder–decoder of Hugging Face")
    tensors = _checked(inputs, labels)
    mask = tensors["attention_mask"] != 0
    labels = labels.to(mask.device)
    sources, targets = _lengths(mask), _lengths(labels != _NO_LABEL)
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


def _checked(inputs: Mapping[str, Any], labels: Tensor) -> dict[str, Tensor]:
    """The tensors among the inputs, if they are the expected ones."""
    tensors = {name: value for name, value in inputs.items() if name != "use_cache"}
    needed = _SOURCE | {"decoder_input_ids"}
    if not needed <= tensors.keys() <= _SOURCE | _TARGET:
        found = f"got inputs named {', '.join(sorted(inputs))}"
        raise InvalidInputError(
            f"{found}, expected {', '.join(sorted(needed))}, and at most decoder_attention_mask too"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()} | {"labels": tuple(labels.shape)}
    source, target = shapes["input_ids"], shapes["labels"]
    uniform = all(shape == (source if name in _SOURCE else target) for name, shape in shapes.items())
    if not uniform or len(source) != 2 or len(target) != 2 or source[0] != target[0] or 0 in source + target:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InvalidInputError(f"got {found}, expected (B, S) for the source and (B, T) for the target, none empty")
    return tensors


def _lengths(real: Tensor) -> Tensor:
    """(B, n) -> (B,): where the last real position of each row ends; 0 if there is none."""
    return (real * torch.arange(1, real.shape[1] + 1, device=real.device)).amax(1)


def _precision(model: Any) -> torch.dtype:
    return torch.promote_types(model.dtype, torch.float32)


def _rows(
    model: nn.Module, inputs: dict[str, Tensor], labels: Tensor, reduce: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """(N, t, S): the maps of the last t target positions of N sentences, whose labels are (N, t)."""
    embedded, hidden, seeds = _ends(model, inputs, labels)
    read = embedded.detach().to(_precision(model))
    rows = []
    for position in range(-labels.shape[1], 0):
        (gradient,) = grad(hidden[:, position], embedded, seeds[:, position], retain_graph=True)
        rows.append(reduce(gradient.to(read), read))
    return torch.stack(rows, dim=1)


def _ends(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the backward passes end and begin.

    Returns:
        The source embeddings (N, S, D), the decoder's output (N, T, D) as a function of them, and (N, T, D) the
        gradient with respect to that output of the log-probability of the labels, (N, t) of the last t positions.
    """
    embedded, hidden, logits = _forward(model, inputs)
    (seeds,) = grad(_log_probabilities(logits, labels).sum(), hidden, allow_unused=True)
    if seeds is None:
        raise UnsupportedModelError(f"{type(model).__name__} does not make its logits from what its decoder returns")
    return embedded, hidden, seeds


def _forward(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Source embeddings (N, S, D), and as functions of them the decoder's output (N, T, D) and the logits (N, T, V)."""
    seen: dict[str, Tensor] = {}

    def cut(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        # The decoder may embed with the same module; the encoder comes first.
        return output if "embedded" in seen else seen.setdefault("embedded", output.detach().requires_grad_())

    def keep(_module: nn.Module, _args: object, output: Any) -> None:
        seen["hidden"] = output[0]

    encoder = model.get_encoder()
    # FSMT's encoder is a plain module, which cannot be asked.
    embedding = encoder.embed_tokens if hasattr(encoder, "embed_tokens") else encoder.get_input_embeddings()
    with _hook(embedding, cut), _hook(model.get_decoder(), keep):
        # With a cache, FSMT's decoder looks ahead.
        output = model(**inputs, use_cache=False, return_dict=True)
    logits: Tensor | None = getattr(output, "logits", None)
    if logits is None or logits.shape[:-1] != inputs["decoder_input_ids"].shape:
        raise UnsupportedModelError(f"got a {type(model).__name__}, expected a model with a language-modelling head")
    return seen["embedded"], seen["hidden"], logits


def _log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits (N, T, V), labels (N, t) of the last t positions -> log p(y_t) (N, t), 0 where there is no label."""
    labels = labels.to(logits.device)
    vocabulary = logits.shape[-1]
    there = labels != _NO_LABEL
    unknown = labels[there & ((labels < 0) | (labels >= vocabulary))]
    if len(unknown):
        raise InvalidInputError(
            f"got the label {int(unknown[0])}, expected {_NO_LABEL} or one of the model's {vocabulary} pieces"
        )
    logits = logits[:, -labels.shape[1] :].to(torch.promote_types(logits.dtype, torch.float32))
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return chosen * there


@contextmanager
def _hook(module: nn.Module, hook: Callable[[nn.Module, Any, Any], Any]) -> Iterator[None]:
    """While open, ``hook`` sees what the module returns in this thread."""
    thread = get_ident()
    handle = module.register_forward_hook(lambda *seen: hook(*seen) if get_ident() == thread else None)
    try:
        yield
    finally:
        handle.remove()

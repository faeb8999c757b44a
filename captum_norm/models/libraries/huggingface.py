"""Observes every attention call of a Hugging Face model.

Most models look up their attention function in transformers' registry each time they run, under the implementation that
their configuration names. While a context is open, that name leads to a function that notes the call and hands it on
to the model's own function: no configuration, mask or output changes. Files that do not use the registry are observed
in their own products (:mod:`captum_norm.models.libraries.own_code`).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from captum_norm.errors import UnsupportedModelError
from captum_norm.models.attention import AttentionCall, AttentionFunction, OwnAttention, mask_rows, scaled_dot_product
from captum_norm.models.hooks import modules_of, numbers, undone
from captum_norm.models.libraries.library import AttentionThrough, Library, Towers
from captum_norm.models.libraries.own_code import AttentionProducts, watching_sequences
from captum_norm.models.wrappers import class_of, config_of, unwrapped

# The name under which model files import the registry.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"

# What attention calls of this thread are told to.
_current: ContextVar[AttentionFunction | None] = ContextVar("current attention function", default=None)
# Every registry that has had an entry of ours, by its identity: files may have one of their own.
_registries: dict[int, Any] = {id(ALL_ATTENTION_FUNCTIONS): ALL_ATTENTION_FUNCTIONS}


def _entry(name: str, registered: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Make an entry that notes a call and runs the model's own function; in other threads, that alone."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        eager, attend = _in_file_of(module, "eager_attention_forward"), _current.get()
        own = eager if registered is None else registered  # "eager" has no entry
        if attend is None:
            return own(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
        if eager is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} calls the attention interface, but its file {type(module).__module__} "
                "defines no eager_attention_forward to get the attention weights from"
            )
        arguments = module, query, key, value, attention_mask
        run = partial(own, *arguments, **options)
        if name == "flex_attention":
            run = partial(_without_gradients, own, *arguments, **options)
        if name == "eager":
            mask: Any = partial(_rows, attention_mask)
        else:
            causal = options.get("is_causal")
            causal = query.shape[2] > 1 and (getattr(module, "is_causal", True) if causal is None else causal)
            # Functions that never see a mask over queries, such as flash attention, get that of the keys' padding.
            padding = attention_mask if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 else None
            mask = partial(
                mask_rows,
                None if padding is not None else attention_mask,
                query,
                key.shape[2],
                causal=causal,
                masked=-torch.inf if own is sdpa_attention_forward else torch.finfo(query.dtype).min,
                padding=padding,
                window=options.get("sliding_window"),
            )
        if "scaling" in options and options["scaling"] is None:
            # Which the other attention functions take for this one.
            options = options | {"scaling": query.shape[-1] ** -0.5}
        if own is sdpa_attention_forward:
            eager = scaled_dot_product  # the file's own may round softmax to float32
        noted = OwnAttention(run, mask)
        return attend(AttentionCall(eager, module, query, key, value, None, options=options, own=noted)), None

    vars(attention).update(number=next(numbers), registered=registered)
    return attention


def _without_gradients(own: Callable[..., Any], module: nn.Module, *tensors: Any, **options: Any) -> Any:
    """Call an attention function that, on a CPU, refuses tensors that require gradients."""
    if not torch.is_grad_enabled():
        tensors = tuple(part.detach() if isinstance(part, Tensor) else part for part in tensors)
    return own(module, *tensors, **options)


def _rows(mask: Tensor | None, rows: slice) -> Tensor | None:
    """Select queries of a mask that is added to the scores."""
    return mask if mask is None or mask.dim() < 3 or mask.shape[-2] == 1 else mask[..., rows, :]


def _restore(since: int = 0) -> None:
    """Remove our entries with numbers from ``since`` on from every registry."""
    for registry in _registries.values():
        mapping = registry._local_mapping
        for name, entry in list(mapping.items()):
            if _is_ours(entry) and entry.number >= since:
                if entry.registered is None or registry._global_mapping.get(name) is entry.registered:
                    mapping.pop(name, None)
                else:
                    mapping[name] = entry.registered


def _is_ours(entry: Any) -> bool:
    return isinstance(entry, FunctionType) and entry.__module__ == __name__


undone.append(_restore)


def observer(model: nn.Module) -> AttentionThrough:
    """Return a context, to be open inside of ``evaluating``, in which a function is told of every attention call."""
    registered, places, config = not _intercepts(model), _places(modules_of(model)), config_of(model)
    crosses = getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False)
    crosses = crosses or _towers(model) is not None

    @contextmanager
    def attention_through(function: AttentionFunction) -> Iterator[None]:
        def attend(call: AttentionCall) -> Tensor:
            call = call if products is None else products.unwatched_call(call)
            return function(replace(call, cross=True) if call.module in crossing else call)

        products = None if registered else AttentionProducts(model, attend)
        first, token = next(numbers), _current.set(attend)
        try:
            for registry, name in places:
                _registries[id(registry)] = registry
                if not _is_ours(registry.get(name)):
                    registry[name] = _entry(name, registry.get(name))
            with (
                watching_sequences(model) if crosses else nullcontext(set[nn.Module]()) as crossing,
                nullcontext() if products is None else products.watching(),
            ):
                yield
        finally:
            _restore(first)
            _current.reset(token)

    return attention_through


def _places(modules: Sequence[nn.Module]) -> list[tuple[Any, str]]:
    """The registries that modules' files read, and the names under which."""
    found: dict[tuple[int, str], tuple[Any, str]] = {}
    for module in modules:
        name: Any = getattr(vars(module).get("config"), "_attn_implementation", None)
        registry = None if name is None else _in_file_of(module, INTERFACE)
        if registry is not None:
            found[id(registry), name] = registry, name
    return list(found.values())


def _intercepts(model: nn.Module) -> bool:
    """Whether some file that defines a model, or a model in it, does not use the attention interface."""
    models = [unwrapped(model), *(module for module in modules_of(model) if isinstance(module, PreTrainedModel))]
    return not all(hasattr(sys.modules.get(class_of(module).__module__), INTERFACE) for module in models)


def _in_file_of(module: nn.Module, name: str) -> Any:
    """Return what has this name in the file of the module's class, or of a base class; None if nothing has."""
    files = (sys.modules.get(base.__module__) for base in type(module).__mro__)
    return next((getattr(file, name) for file in files if hasattr(file, name)), None)


def _halves(model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    whole: Any = unwrapped(model)
    if not getattr(config_of(model), "is_encoder_decoder", False):
        return None
    encoder = whole.get_encoder()
    return None if encoder is whole else (encoder, whole.get_decoder())


def _embeddings(model: nn.Module) -> nn.Module | None:
    get_embeddings = getattr(unwrapped(model), "get_input_embeddings", None)
    try:
        return get_embeddings() if callable(get_embeddings) else None
    except NotImplementedError:  # models with several towers
        return None


def _towers(model: nn.Module) -> Towers | None:
    whole = unwrapped(model)
    if sum(isinstance(module, PreTrainedModel) for module in modules_of(whole)) < 2 or _halves(model) is not None:
        return None
    models = [(name, module) for name, module in whole.named_modules() if isinstance(module, PreTrainedModel)]
    # Most models hold one other, which embeds the tokens.
    if len(models) == 2 and isinstance(_embeddings(models[1][1]), nn.Embedding):
        return None
    # A model of two towers side by side may name no embeddings, or those of one tower.
    tables = (_embeddings(module) for _, module in models)
    embeddings = next((table for table in tables if isinstance(table, nn.Embedding)), None)
    if embeddings is None:
        return None
    text, others, inside = whole, dict[str, nn.Module](), set[nn.Module]()
    named = ((key, getattr(module.config, key, None)) for _, module in models for key in module.config.sub_configs)
    kinds = {type(own): key.removesuffix("_config") for key, own in named if own is not None}
    for name, module in models:
        if module in inside:
            continue
        modules = set(module.modules())
        # T5 names one module and runs another that has the same table.
        if any(isinstance(table, nn.Embedding) and table.weight is embeddings.weight for table in modules):
            text = module
            continue
        inside |= modules
        kind = kinds.get(type(module.config))
        others[name.rpartition(".")[2] if kind is None or kind in others else kind] = module
    return (text, others) if others else None


SIGNALS = ("pixel_values", "input_features", "input_values")
HUGGING_FACE = Library(
    models="a model that attends through transformers' attention interface, by softmax(scores) @ values or by "
    "scaled_dot_product_attention",
    fits=lambda _: True,
    observer=observer,
    intercepts=_intercepts,
    halves=_halves,
    embeddings=_embeddings,
    inputs=("input_ids", "inputs_embeds", *SIGNALS),
    decoder=("decoder_input_ids", "decoder_inputs_embeds"),
    decoder_prefixes=("decoder_", "labels"),
    mask="attention_mask",
    decoder_mask="decoder_attention_mask",
    signals=SIGNALS,
    with_weights='attn_implementation="eager"',
    towers=_towers,
    without_decoder="pass decoder_input_ids in a mapping of inputs, or the encoder alone: model.get_encoder()",
)

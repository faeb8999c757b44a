"""Reads and copies caches of past keys and values, since every forward pass extends the one that it is given."""

from collections.abc import Collection, Mapping
from copy import copy
from functools import partial
from typing import Any, cast

import torch
from torch import LongTensor, Tensor
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache, LinearAttentionCacheLayerMixin

from captum_norm.errors import InvalidInputError

CACHE = "past_key_values"
STATES = "cache_params"  # which cannot be taken as keys
_PARTS = ("self_attention_cache", "cross_attention_cache")  # of an encoder–decoder model's


def taken_cache(arguments: dict[str, Any], examples: int) -> Cache | None:
    """Take the cache out of a model's arguments, by name; an empty one, which tells the model nothing, is dropped."""
    states, cache = arguments.get(STATES), arguments.get(CACHE)
    for name, given in ((STATES, states), (CACHE, cache)):
        if given is not None:
            _expect_cache(name, given)
            arguments[name] = None
    if states is not None and past_length(states):
        raise InvalidInputError(
            f"got {STATES} of type {type(states).__name__} with positions in it; expected the whole sequence as "
            f"input, and no {STATES}"
        )
    if cache is None or not past_length(cache):
        return None
    keys = (getattr(layer, "keys", None) for layer in _parts(cache)[0].layers)
    held = next(len(own) for own in keys if isinstance(own, Tensor))
    if held != examples:
        raise InvalidInputError(f"got {CACHE} of {held} examples for inputs of {examples}; expected one batch")
    return cache  # type: ignore[no-any-return]


def past_length(cache: Cache) -> int:
    """Return the number of positions that a cache has seen, those that a sliding window has dropped included."""
    try:
        return int(cache.get_seq_length())
    except ValueError as error:
        raise InvalidInputError(
            f"got a {type(cache).__name__} with the states of recurrent layers alone; expected the whole sequence as "
            "input, and no cache"
        ) from error


def copied(cache: Cache, only: Collection[int] | None = None) -> Cache:
    """Copy a cache for one forward pass. Tensors that the model replaces, not overwrites, are shared."""
    made = copy(cache)
    if isinstance(made, EncoderDecoderCache):
        for name in _PARTS:
            setattr(made, name, copied(getattr(made, name), only))
        made.is_updated = dict(made.is_updated)
    else:
        made.layers = [
            _copied_layer(layer) if only is None or index in only else layer for index, layer in enumerate(made.layers)
        ]
    return made


def selected(cache: Cache, index: Tensor, only: Collection[int] | None = None) -> Cache:
    """Copy some examples of a cache, (N,), which may repeat; ``only`` as for :func:`copied`."""
    made = copied(cache, only)
    for part in _parts(made):
        for place, layer in enumerate(part.layers):
            if only is None or place in only:
                layer.reorder_cache(cast(LongTensor, index))
    return made


def _parts(cache: Cache) -> list[Cache]:
    return [getattr(cache, name) for name in _PARTS] if isinstance(cache, EncoderDecoderCache) else [cache]


def of_first_copy(cache: Cache, only: Collection[int] | None = None) -> Cache:
    """Copy a cache of one example for a pass over copies of it: all get the keys and values of the first."""
    made = copied(cache, only)
    for part in _parts(made):
        vars(part)["update"] = partial(_update_by_first, part.update)
    return made


def _update_by_first(update: Any, keys: Tensor, values: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    every = update(keys[:1], values[:1], *args, **options)
    first, second = (heads.expand(len(keys), *heads.shape[1:]) for heads in every)
    return first, second


def refuse_chains(positions: int) -> None:
    """Refuse to multiply the maps of layers if ``positions`` have no rows: cached ones, or all but the last."""
    if positions:
        raise InvalidInputError(
            f"got maps without rows of the first {positions} positions ({CACHE}, or last=), which a product of the "
            "layers' maps needs; pass the whole sequence without a cache, leave last= out, or explain one layer "
            '(layer=) or the mean (aggregation="mean")'
        )


def _expect_cache(name: str, given: Any) -> None:
    if not isinstance(given, Cache) or not (isinstance(given, EncoderDecoderCache) or hasattr(given, "layers")):
        raise InvalidInputError(
            f"got {name} of type {type(given).__name__}; expected a cache of transformers, such as a DynamicCache, or "
            f"for a tuple transformers.DynamicCache({name})"
        )


def _copied_layer(layer: Any) -> Any:
    made = copy(layer)
    # Dynamic layers concatenate; static ones and those with recurrent states write into their tensors.
    overwrites = not isinstance(layer, DynamicLayer) or isinstance(layer, LinearAttentionCacheLayerMixin)
    vars(made).update({name: _kept(value, overwrites) for name, value in vars(made).items()})
    return made


def _kept(value: Any, overwrites: bool) -> Any:
    if isinstance(value, Tensor):
        # Autograd cannot record tensors made in inference mode.
        foreign = value.is_inference() and not torch.is_inference_mode_enabled()
        return value.clone() if overwrites or foreign else value
    if isinstance(value, Mapping):
        return {name: _kept(item, overwrites) for name, item in value.items()}
    return [_kept(item, overwrites) for item in value] if type(value) is list else value

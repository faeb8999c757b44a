"""Copies caches of keys and values, since every layer that is run extends the one that it is given."""

from collections.abc import Collection
from copy import copy
from functools import partial
from typing import Any, cast

from torch import LongTensor, Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

_PARTS = ("self_attention_cache", "cross_attention_cache")  # of an encoder–decoder model's


def copied(cache: Cache, only: Collection[int] | None = None) -> Cache:
    """Copy a cache of the model's for one forward pass, or some of its layers, which replace their tensors."""
    made = copy(cache)
    if isinstance(made, EncoderDecoderCache):
        for name in _PARTS:
            setattr(made, name, copied(getattr(made, name), only))
        made.is_updated = dict(made.is_updated)
    else:
        made.layers = [copy(layer) if only is None or at in only else layer for at, layer in enumerate(made.layers)]
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

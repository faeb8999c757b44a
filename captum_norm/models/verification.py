"""Checks once per model that explaining it does not change its outputs."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

import torch
from transformers.cache_utils import Cache

from captum_norm.errors import InvalidInputError
from captum_norm.models.agreement import attending_plainly, expect_same_output
from captum_norm.models.caches import cache_kind
from captum_norm.models.call import ModelCall
from captum_norm.models.layers import mixing_layer
from captum_norm.models.stacks import Sizes

Result = TypeVar("Result")
EXCERPT = 16
"""Number of positions that suffice to find a model's structure."""


def verify(call: ModelCall) -> None:
    """Check that a model's outputs are the same while it is explained; note its sizes and mixing layer.

    Raises:
        UnsupportedModelError: if not; see :func:`captum_norm.models.agreement.expect_same_output`.
    """
    # A single position attends only to itself.
    if call.positions.several:
        call.known.mixing, sizes = on_excerpt(call, _verify)
        # Without its inputs, a tower has not been seen.
        call.known.sizes = sizes or None


def verify_cache(call: ModelCall) -> None:
    """Check the same of a call with a cache, once for each kind of cache.

    Raises:
        UnsupportedModelError: see :func:`verify`.
    """
    kind = cache_kind(cast(Cache, call.before.cache))
    if kind not in call.known.caches:
        expect_same_output(call)
        call.known.caches.add(kind)


def verify_last(call: ModelCall) -> None:
    """Check the same of a call with rows of the last positions alone, once for each model.

    Raises:
        UnsupportedModelError: see :func:`verify`.
    """
    if not call.known.last:
        on_excerpt(call, lambda excerpt: expect_same_output(replace(excerpt, last=1)))
        call.known.last = True


def stack_sizes(call: ModelCall) -> Sizes:
    """Sizes of a model's stacks of layers on an excerpt of these inputs, or of earlier ones."""
    return on_excerpt(call, _sizes) if call.known.sizes is None else call.known.sizes


def on_excerpt(call: ModelCall, work: Callable[[ModelCall], Result]) -> Result:
    """Apply a function to an excerpt of a call, or to the whole call if an argument does not fit the excerpt."""
    try:
        return work(call.excerpt(EXCERPT))
    except InvalidInputError:
        return work(call)


def _sizes(call: ModelCall) -> Sizes:
    with torch.no_grad(), attending_plainly(call) as stacks:
        call.run()
    return stacks.sizes


def _verify(call: ModelCall) -> tuple[str | None, Sizes]:
    stacks = expect_same_output(call)
    layer = mixing_layer(call, stacks.queries)
    names = {module: name for name, module in call.model.named_modules()}
    return None if layer is None else f'"{names[layer]}" ({type(layer).__name__})', stacks.sizes

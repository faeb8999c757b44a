"""Finds what comes before a model's inputs: the positions of a cache, or an adapter's virtual tokens."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from captum_norm.errors import InvalidInputError
from captum_norm.models.caches import CACHE, copied, past_length, selected, taken_cache
from captum_norm.models.libraries.library import Library
from captum_norm.models.virtual_tokens import virtual_tokens


@dataclass(frozen=True)
class Before:
    """What comes before the inputs.

    Attributes:
        cache: the user's cache of past keys and values, of which each forward pass gets a copy.
        past: number of keys before those of the inputs in self-attention, a decoder's in an encoder–decoder model:
            those of the cache, or a tuned prefix.
        past_real: True at the real ones of these keys, (B, past); None if all are.
        virtual: number of virtual tokens, with queries and keys, before the inputs', the encoder's in an
            encoder–decoder model.
    """

    cache: Cache | None = None
    past: int = 0
    past_real: Tensor | None = None
    virtual: int = 0

    @property
    def cached(self) -> int:
        """Number of positions in the cache."""
        return 0 if self.cache is None else self.past

    @property
    def virtual_tokens(self) -> int:
        """Number of virtual tokens, those of a tuned prefix included."""
        return self.virtual + self.past - self.cached

    def texts(self, *, encoder: bool = False, decoder: bool = False) -> list[str]:
        """Return what stands for these positions' tokens in one stack of layers, or in one half of two."""
        virtual = self.virtual * (not decoder) + (self.past - self.cached) * (not encoder)
        kinds = {"virtual": virtual, "cached": self.cached * (not encoder)}
        return [f"[{kind} {place}]" for kind, count in kinds.items() for place in range(1, count + 1)]

    def passed(self, arguments: dict[str, Any], mask: str) -> dict[str, Any]:
        """Return a model's arguments with a copy of the cache, and with a mask over its positions, too."""
        if self.cache is None:
            return arguments
        passed, new = {**arguments, CACHE: copied(self.cache)}, arguments.get(mask)
        if isinstance(new, Tensor):
            old = new.new_ones(len(new), self.past) if self.past_real is None else self.past_real.to(new)
            passed[mask] = torch.cat([old, new], dim=1)
        return passed

    def of_examples(self, examples: Sequence[int]) -> "Before":
        """Return the same for some examples, which may repeat."""
        if self.cache is None:
            return self
        index = torch.tensor(examples, dtype=torch.long, device="cpu")
        real = None if self.past_real is None else self.past_real[index.to(self.past_real.device)]
        return replace(self, cache=selected(self.cache, index), past_real=real)

    def without_cache(self) -> "Before":
        """Return the same without a cache."""
        return self if self.cache is None else Before()


def read_before(
    model: nn.Module,
    library: Library,
    arguments: dict[str, Any],
    main: Tensor,
    continued: Tensor,
    parameters: Collection[str],
) -> Before:
    """Take the cache out of the arguments, and find the virtual tokens.

    Args:
        model: the model.
        library: the library that it is built with.
        arguments: by name; changed.
        main: the main input.
        continued: the input that a cache belongs to, the decoder's in an encoder–decoder model.
        parameters: those of the model's forward function.

    Raises:
        InvalidInputError: if the model reads no cache, or the cache or its mask does not fit the inputs.
    """
    virtual, cache = virtual_tokens(model), taken_cache(arguments, len(main) if main.dim() else 0)
    if cache is None:
        if virtual is not None and not virtual.attend:
            return Before(past=virtual.number)
        # A cache is of use to nobody here, but where positions restart its absence tells transformers to see several
        # sequences in one: then the model's own default decides.
        if "use_cache" in parameters and arguments.get("use_cache") is None and arguments.get("position_ids") is None:
            arguments["use_cache"] = False
        return Before(virtual=0 if virtual is None else virtual.number)
    if virtual is not None:
        raise InvalidInputError(
            f"got past_key_values for {type(model).__name__}, which puts its virtual tokens before the inputs of every "
            "call; expected the whole sequence, and no past_key_values"
        )
    mask = library.mask if continued is main else library.decoder_mask
    if mask is None or library.sequences is not None:
        raise InvalidInputError(
            f"got past_key_values for {type(model).__name__}; caches are supported for Hugging Face models: expected "
            "the whole sequence, and no past_key_values"
        )
    past = past_length(cache)
    return Before(cache, past, _split_mask(arguments, mask, past, continued))


def _split_mask(arguments: dict[str, Any], name: str, past: int, new: Tensor) -> Tensor | None:
    """Cut a mask over cached and new positions to the new ones; return where the cached ones are real, (B, past).

    Raises:
        InvalidInputError: if it has another length.
    """
    mask = arguments.get(name)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    expected = (len(new), past + new.shape[1])
    if tuple(mask.shape) != expected:
        raise InvalidInputError(
            f"got {name} of shape {tuple(mask.shape)} for {past} cached and {new.shape[1]} new positions; expected "
            f"{expected}"
        )
    arguments[name] = mask[:, past:]
    return None if mask[:, :past].all() else mask[:, :past].bool()

"""Describes one call of attention in the same form for all libraries."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

EagerAttention = Callable[..., tuple[Tensor, Tensor]]
"""From a module, queries, keys, values and a mask to output, (B, Q, H, d), and weights, (B, H, Q, K)."""


class Part(NamedTuple):
    """A slice of examples, one of their queries and one of their keys, outside of which nothing is attended to."""

    examples: slice = slice(None)
    rows: slice = slice(None)
    keys: slice = slice(None)


@dataclass(eq=False)
class OwnAttention:
    """What the model itself does in an attention call."""

    run: Callable[[], tuple[Tensor, Tensor | None]]  # to output, (B, Q, H, d), and weights, (B, H, Q, K), if it has any
    mask: Callable[[slice], Tensor | None]  # what is added to the scores of some queries, (B or 1, 1 or H, rows, K)
    weights: Tensor | None = None  # those that it made when it was run

    def output(self) -> Tensor:
        """Run the model's own function; return its output."""
        output, self.weights = self.run()
        return output


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Arguments of an attention call.

    Attributes:
        eager: the model's own attention, ``eager(module, query, key, value, mask, **options)``. It returns output and
            weights for any part of the tensors below, even after the module has returned.
        module: the attention module.
        query: (B, H, Q, d).
        key: (B, H or fewer, K, d).
        value: the same shape as ``key``.
        mask: in a part of a call, what is added to the scores, or None.
        cross: whether keys and values come from another sequence than queries.
        options: further arguments of ``eager``.
        own: what the model itself does; None in a part of a call.
        ungated: if weights and values hold a gate (:func:`captum_norm.models.blocks.fold_gate`), the call without it.
    """

    eager: EagerAttention
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    cross: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    own: OwnAttention | None = None
    ungated: "AttentionCall | None" = None

    @property
    def values_by_head(self) -> Tensor:
        """Values of every head, (B, H, K, d); repeated for heads that share them."""
        shared = self.query.shape[1] // self.value.shape[1]
        return self.value if shared == 1 else self.value.repeat_interleave(shared, dim=1)

    def run(self) -> tuple[Tensor, Tensor]:
        """Return attention's output, (B, Q, H, d), and weights, (B, H, Q, K)."""
        mask = self.mask if self.own is None else self.own.mask(slice(None))
        return self.eager(self.module, self.query, self.key, self.value, mask, **self.options)

    def output(self) -> Tensor:
        """Return attention's output alone, (B, Q, H, d)."""
        return self.run()[0] if self.own is None else self.own.output()

    def whole(self) -> "AttentionCall":
        """Return the call with its mask made for all queries, without what the model itself does."""
        return self.part(Part())

    def over_keys(self, count: int) -> "AttentionCall":
        """Return the call over ``count`` keys, the queries' own last: fewer of a static cache, or more, masked ones."""
        held = self.key.shape[2]
        missing = count - held
        if missing == 0:
            return self

        def sized(option: Any, fill: float = 0) -> Any:
            if not isinstance(option, Tensor) or option.dim() < 3 or option.shape[-1] != held:
                return option
            return functional.pad(option, (missing, 0), value=fill) if missing > 0 else option[..., :count]

        def mask_of(rows: slice) -> Tensor | None:
            mask = self.own.mask(rows) if self.own is not None else self.mask
            if mask is None and missing > 0:
                mask = self.query.new_zeros(1, 1, 1, held)
            return sized(mask, torch.finfo(mask.dtype).min) if mask is not None else None

        # Where a product takes the weights for queries, they have one column for each key.
        query = sized(self.query) if self.key is self.value else self.query
        key, value = (
            functional.pad(heads, (0, 0, missing, 0)) if missing > 0 else heads[:, :, :count]
            for heads in (self.key, self.value)
        )
        options = {name: sized(option) for name, option in self.options.items()}
        own = OwnAttention(lambda: (self.output(), None), mask_of)
        return replace(self, query=query, key=key, value=value, own=own, options=options)

    def part(self, part: Part) -> "AttentionCall":
        """Restrict the call to some queries of some examples, and to some keys."""
        keys = part.keys

        def cut(option: Any) -> Any:
            """Cut a mask or bias over ([B, H,] Q, K); return anything else unchanged."""
            if not isinstance(option, Tensor) or option.dim() < 3 or option.shape[-1] != self.key.shape[2]:
                return option
            option = of_examples(option)
            if option.shape[-2] == 1:
                return option[..., keys]
            return option[..., part.rows, keys] if option.shape[-2] == self.query.shape[2] else option

        def of_examples(mask: Tensor) -> Tensor:
            return mask[part.examples] if mask.dim() == 4 and mask.shape[0] == len(self.query) > 1 else mask

        own = None if self.own is None else self.own.mask(part.rows)
        key = self.key[part.examples, :, keys]
        return replace(
            self,
            query=self.query[part.examples, :, part.rows],
            key=key,
            value=key if self.value is self.key else self.value[part.examples, :, keys],
            mask=cut(self.mask) if own is None else of_examples(own)[..., keys],
            own=None,
            options={name: cut(option) for name, option in self.options.items()},
        )


def scaled_dot_product(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the output and the weights of scaled dot-product attention as its kernels do: in float32 or better."""
    dtype, group = torch.promote_types(query.dtype, torch.float32), query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (heads.repeat_interleave(group, dim=1) for heads in (key, value))
    # There are fewer queries than scores to scale, which the product would copy in this order.
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query.to(dtype, copy=True, memory_format=torch.contiguous_format).mul_(scale) @ key.to(dtype).mT
    for summand in (mask, position_bias):
        scores = scores if summand is None else scores.add_(summand)
    weights = scores.softmax(-1)
    if mask is not None and (alone := mask.isneginf().all(-1, keepdim=True)).any():
        # The kernels give nothing to a query whose keys are all masked.
        weights = weights.masked_fill(alone, 0)
    # In memory as the kernels leave it, which models rely on.
    output = (weights @ value.to(dtype)).transpose(1, 2).contiguous()
    return output.to(value.dtype), weights


def mask_rows(
    mask: Any,  # to be added, or True where queries attend, ([B, [H,]] Q, K); or a block mask of flex_attention
    query: Tensor,  # (B, H, Q, d)
    keys: int,
    rows: slice,
    *,
    causal: bool,  # whether, without a mask, query i attends to the keys 0 to i
    masked: float,  # what masked scores get
    padding: Tensor | None = None,  # True at real keys, (B, K)
    window: int | None = None,  # without a mask, how many keys to either side a query attends to, its own included
) -> Tensor | None:
    """Return what is added to the scores of some queries, (B or 1, H or 1, rows or 1, K), where no weights are made."""
    batch, heads, queries, _ = query.shape
    if hasattr(mask, "mask_mod"):
        from torch.nn.attention.flex_attention import create_mask  # slow to import

        mask = create_mask(mask.mask_mod, batch, heads, queries, keys, device=query.device.type)[:, :, rows]
    elif mask is not None:
        mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
        mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
    elif causal or padding is not None or window is not None:
        places = torch.arange(queries, device=query.device)[rows].unsqueeze(1)
        distance = places - torch.arange(keys, device=query.device)
        mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        mask = mask[None, None] if window is None else (mask & (distance.abs() < window))[None, None]
        mask = mask if padding is None else mask & padding.bool()[:, None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask  # type: ignore[no-any-return]
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, masked)


AttentionFunction = Callable[[AttentionCall], Tensor]
"""Told of an attention call; returns its output, (B, Q, H, d), which is :meth:`AttentionCall.output` to observe it."""

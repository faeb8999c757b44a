"""Describes one call of attention, in the same form whatever library the model is built with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

EagerAttention = Callable[..., tuple[Tensor, Tensor]]


class Part(NamedTuple):
    """Some queries of some examples."""

    examples: slice
    rows: slice


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What attention is called with.

    Attributes:
        eager: the model's own attention over any part of the tensors below, ``eager(module, query, key, value, mask,
            **options)``; it gives output and weights, also when the module has returned.
        module: the module that attends.
        query: (B, H, Q, d).
        key: (B, H or fewer, K, d).
        value: the same.
        mask: what the model adds to the scores, or None.
        cross: whether keys and values come from another sequence than the queries.
        options: further arguments of ``eager``.
    """

    eager: EagerAttention
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    cross: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def values_by_head(self) -> Tensor:
        """The values of every head, (B, H, K, d), also of those that share them."""
        shared = self.query.shape[1] // self.value.shape[1]
        return self.value if shared == 1 else self.value.repeat_interleave(shared, dim=1)

    def run(self) -> tuple[Tensor, Tensor]:
        """Attention's output, (B, Q, H, d), and its weights, (B, H, Q, K)."""
        return self.eager(self.module, self.query, self.key, self.value, self.mask, **self.options)

    def part(self, part: Part, keys: slice = slice(None)) -> "AttentionCall":
        """The call of some queries of some examples over some keys."""

        def cut(option: Any) -> Any:
            """Of a mask or bias over ([B, H,] Q, K); anything else stays as it is."""
            if not isinstance(option, Tensor) or option.dim() < 3 or option.shape[-1] != self.key.shape[2]:
                return option
            if option.dim() == 4 and option.shape[0] == len(self.query) > 1:
                option = option[part.examples]
            if option.shape[-2] == 1:
                return option[..., keys]
            return option[..., part.rows, keys] if option.shape[-2] == self.query.shape[2] else option

        return replace(
            self,
            query=self.query[part.examples, :, part.rows],
            key=self.key[part.examples, :, keys],
            value=self.value[part.examples, :, keys],
            mask=cut(self.mask),
            options={name: cut(option) for name, option in self.options.items()},
        )


AttentionFunction = Callable[[AttentionCall], Tensor]
"""Takes the place of a model's attention: gives its output, (B, Q, H, d)."""

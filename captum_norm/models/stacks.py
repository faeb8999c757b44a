"""Checks a forward pass's attention calls by stack of layers: one stack, or an encoder–decoder model's three."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from captum_norm.errors import NonFiniteError, UnsupportedModelError
from captum_norm.models.attention import AttentionCall
from captum_norm.models.libraries.registry import library_of

StackName = Literal["encoder", "decoder", "cross"]
Role = Literal["self", "encoder", "decoder", "cross"]
"""A stack of attention layers: one of an encoder–decoder model's three, or ``"self"``, the only one of other models."""


@dataclass(frozen=True)
class Place:
    """An attention layer: its stack, and its index there."""

    role: Role
    index: int

    def __str__(self) -> str:
        return f"layer {self.index}" if self.role == "self" else f"{self.role} layer {self.index}"


def encoder_of(model: nn.Module) -> nn.Module | None:
    """The encoder of an encoder–decoder model; None for any other model, an encoder alone included."""
    halves = library_of(model).halves(model)
    return None if halves is None else halves[0]


@dataclass
class StackSize:
    """Size of a stack of layers in a forward pass.

    Attributes:
        batch: B.
        heads: H.
        queries: Q.
        keys: K.
        dtype: dtype of its values.
        device: device of its first layer.
        layers: L.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    dtype: torch.dtype
    device: torch.device
    layers: int = 0


Sizes = Mapping[Role, StackSize]
"""Sizes of a model's stacks."""


class Stacks:
    """Checks the attention calls of a forward pass in order.

    Args:
        encoder: the encoder of an encoder–decoder model; None for any other model.
        several: whether any example has more than one real position; otherwise weights cannot show causality.

    Attributes:
        sizes: size of each stack.
        queries: number of queries of each attention module.
        causal: whether the only stack, if not an encoder–decoder model's, is causal.
    """

    def __init__(self, encoder: nn.Module | None, *, several: bool) -> None:
        self.sizes: dict[Role, StackSize] = {}
        self.queries: dict[nn.Module, int] = {}
        self.causal = False
        self._encoder = None if encoder is None else frozenset(encoder.modules())
        self._several = several
        self._ahead = False
        self._place: Place

    @contextmanager
    def attending(self, call: AttentionCall) -> Iterator[Place]:
        """Check a call, whose weights go to :meth:`look` meanwhile, each example's from the first query on.

        Raises:
            UnsupportedModelError: if self-attention has keys of another sequence, or if sequence lengths or causality
                differ from earlier calls of the stack.
        """
        role, module = self._role(call), call.module
        batch, heads, queries, _ = call.query.shape
        keys = call.key.shape[2]
        if role == "self" and (call.cross or queries != keys):
            raise UnsupportedModelError(
                f"{type(module).__name__} attends from {queries} to {keys} positions of another sequence; a decoder "
                "alone may attend only to its whole sequence: pass no past_key_values, and the whole encoder–decoder "
                "model"
            )
        if role != "cross" and queries != keys:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends from {queries} to {keys} positions; expected as many keys as queries "
                "in self-attention: pass no past_key_values"
            )
        size = self.sizes.setdefault(role, StackSize(batch, heads, queries, keys, call.value.dtype, call.value.device))
        if (size.batch, size.queries, size.keys) != (batch, queries, keys):
            raise UnsupportedModelError(
                f"{type(module).__name__} attends over {batch} × {queries} positions, unlike the {size.layers} "
                f"attention layers before it ({size.batch} × {size.queries}); pass one stack of layers alone"
            )
        self._place = Place(role, size.layers)
        self._ahead = False
        size.layers += 1
        self.queries[module] = queries
        yield self._place
        if role == "self":
            self._expect_same_direction(module)

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Run and check a call in one piece; return its output and weights."""
        with self.attending(call):
            output, weights = call.run()
            self.look(weights)
        return output, weights

    def _role(self, call: AttentionCall) -> Role:
        if self._encoder is None:
            return "self"
        if call.cross:
            return "cross"
        return "encoder" if call.module in self._encoder else "decoder"

    def look(self, weights: Tensor) -> None:
        """Check the weights of some examples from their first query on, (B, H, Q, K).

        Raises:
            NonFiniteError: if the first query's weights contain NaN or infinity.
        """
        first = weights[:, :, 0].detach()
        if not first.isfinite().all():
            raise NonFiniteError(f"the attention weights of {self._place} contain NaN or infinity")
        self._ahead |= bool(first[..., 1:].any())

    def _expect_same_direction(self, module: nn.Module) -> None:
        causal = not self._ahead if self._several else bool(getattr(module, "is_causal", False))
        if self._place.index > 0 and causal != self.causal:
            raise UnsupportedModelError(
                f"{type(module).__name__} is {'causal' if causal else 'not causal'}, unlike the {self._place.index} "
                "attention layers before it; pass one stack of layers alone"
            )
        self.causal = causal

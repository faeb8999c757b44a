"""Follows the stacks of attention layers that a forward pass goes through: one, or an encoder–decoder's three."""

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
"""What an attention layer is: one of an encoder–decoder's stacks, or of the one stack of any other model."""


@dataclass(frozen=True)
class Place:
    """Which attention layer a call is: the layer ``index`` of its stack."""

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
    """How large a stack of layers is in a forward pass.

    Attributes:
        batch: B.
        heads: H.
        queries: Q.
        keys: K.
        dtype: what its values are in.
        device: where its first layer is.
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
"""The stacks of a model."""


class Stacks:
    """Checks the attention calls of a forward pass, in their order.

    Args:
        encoder: of an encoder–decoder model; None of any other.
        several: whether some example has more than one real position, so that looking ahead can be seen.

    Attributes:
        sizes: how large each stack is.
        queries: the modules that attended, and how many queries each had.
        causal: whether the one stack of a model that is no encoder–decoder looks back only.
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
        """While open, the weights of a call are made and looked at, all examples' from their first query on.

        Raises:
            UnsupportedModelError: if queries and keys are different sequences where they must not be, or others than
                in the calls before, or if the call looks another way than those of its stack before it.
        """
        role, module = self._role(call), call.module
        batch, heads, queries, _ = call.query.shape
        keys = call.key.shape[2]
        if role == "self" and (call.cross or queries != keys):
            raise UnsupportedModelError(
                f"{type(module).__name__} attends from {queries} to {keys} positions of another sequence; of a decoder "
                "alone only self-attention over the whole sequence is supported: pass no past_key_values, and the "
                "whole encoder–decoder model"
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
        """Run a call whose weights are made all at once: its output and its weights."""
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
        """The weights of some examples from their first query on, (B, H, Q, K).

        Raises:
            NonFiniteError: if they contain NaN or infinity.
        """
        first = weights[:, :, 0].detach()
        if not first.isfinite().all():
            raise NonFiniteError(f"the attention weights of {self._place} contain NaN or infinity")
        self._ahead |= bool(first[..., 1:].any())

    def _expect_same_direction(self, module: nn.Module) -> None:
        causal = not self._ahead if self._several else bool(getattr(module, "is_causal", False))
        if self._place.index > 0 and causal != self.causal:
            raise UnsupportedModelError(
                f"{type(module).__name__} looks {'back only' if causal else 'ahead'}, unlike the {self._place.index} "
                "attention layers before it; pass one stack of layers alone"
            )
        self.causal = causal

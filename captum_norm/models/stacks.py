"""Checks a forward pass's attention calls by stack: one, an encoder–decoder model's three, or those of towers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor, nn

from captum_norm.errors import NonFiniteError, UnsupportedModelError
from captum_norm.models.attention import AttentionCall

StackName = str
"""A stack for users: ``"encoder"``, ``"decoder"``, ``"cross"``, ``"text"``, or a tower's name such as ``"vision"``."""
Role = str
"""A stack of attention layers: ``"self"``, the one that reads the inputs' tokens, is the only one of most models.

An encoder–decoder model has ``"encoder"``, ``"decoder"`` and ``"cross"``. A model with towers has ``"self"``,
``"cross"`` if that stack also attends to a tower's positions, each tower's name, and ``"NAME cross"`` if the tower
attends to another's positions.
"""
TEXT_STACKS: tuple[Role, ...] = ("self", "cross")
EXTENDED: tuple[Role, ...] = ("self", "decoder")
"""The stacks whose keys a cache or a tuned prefix extends."""
ROWED: tuple[Role, ...] = ("self", "decoder", "cross")
"""The stacks whose queries are the positions that a model has outputs at, or a decoder's."""


@dataclass(frozen=True)
class Place:
    """An attention layer: its stack, and its index there."""

    role: Role
    index: int

    def __str__(self) -> str:
        return f"layer {self.index}" if self.role == "self" else f"{self.role} layer {self.index}"


def stack_reader(encoder: nn.Module | None, towers: Mapping[str, nn.Module]) -> Callable[[AttentionCall], Role]:
    """Return what says to which stack an attention call belongs, of a model with this encoder and these towers."""
    encoding = None if encoder is None else frozenset(encoder.modules())
    tower_of = {module: name for name, tower in towers.items() for module in tower.modules()}

    def role(call: AttentionCall) -> Role:
        tower = tower_of.get(call.module)
        if tower is not None:
            return f"{tower} cross" if call.cross else tower
        if encoding is None:
            return "cross" if call.cross and towers else "self"
        if call.cross:
            return "cross"
        return "encoder" if call.module in encoding else "decoder"

    return role


@dataclass
class StackSize:
    """Size of a stack of layers in a forward pass, with the dtype of its values and the device of its first layer."""

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
    """Checks the attention calls of a forward pass in order."""

    def __init__(
        self,
        role: Callable[[AttentionCall], Role],  # says which stack a call belongs to
        *,
        towers: bool,  # whether the model has towers
        several: bool,  # whether any example has more than one real position; else weights cannot show causality
        see: Callable[[Role, AttentionCall], object],  # told of the first call of each stack that reads no tokens
        past: int = 0,  # number of keys before the queries' own in the stacks EXTENDED
        grows: bool = False,  # whether these are a cache, which only a causal model reads
    ) -> None:
        self.sizes: dict[Role, StackSize] = {}
        self.queries: dict[nn.Module, int] = {}
        self.modules: dict[Role, list[ref[nn.Module]]] = {}  # in the order of their calls
        self.causal = False  # whether the only stack, if not an encoder–decoder model's, is causal
        self._role, self._towers, self._several, self._see = role, towers, several, see
        self._past, self._grows = past, grows
        self._directed = False

    def enter(self, call: AttentionCall) -> Place:
        """Count a call; refuse keys of another sequence, and other lengths than in earlier calls of the stack."""
        role, module = self._role(call), call.module
        batch, heads, queries, _ = call.query.shape
        keys = call.key.shape[2]
        past, size = self._past if role in EXTENDED else 0, self.sizes.get(role)
        attends = (
            f"{Place(role, size.layers if size else 0)} ({type(module).__name__}) attends from {queries} to {keys}"
        )
        if role == "self" and call.cross:
            raise UnsupportedModelError(
                f"{attends} positions of another sequence that it was given; a decoder alone may attend only to its "
                "own: pass the whole encoder–decoder model"
            )
        if size is not None and queries < size.queries and keys == size.keys and not role.endswith("cross"):
            raise UnsupportedModelError(
                f"{attends} positions, but the {size.layers} layers before it from {size.queries}: the model goes on "
                "with its last positions alone; leave out the argument that asks for these, such as logits_to_keep"
            )
        if not role.endswith("cross") and keys != past + queries:
            raise UnsupportedModelError(
                f"{attends} positions; expected {past + queries} keys in self-attention, one for each position of the "
                f"inputs{' and of past_key_values' * (past > 0)}, not chunks or compressed positions"
            )
        if self._towers and role != "self" and role not in self.sizes:
            self._see(role, call)
        size = self.sizes.setdefault(role, StackSize(batch, heads, queries, keys, call.value.dtype, call.value.device))
        if (size.batch, size.queries, size.keys) != (batch, queries, keys):
            raise UnsupportedModelError(
                f"{type(module).__name__} attends over {batch} × {queries} positions, unlike the {size.layers} "
                f"attention layers before it ({size.batch} × {size.queries}); pass one stack of layers alone"
            )
        place = Place(role, size.layers)
        size.layers += 1
        self.queries[module] = queries
        self.modules.setdefault(role, []).append(ref(module))
        return place

    def attend(self, call: AttentionCall, part: AttentionCall | None = None) -> tuple[Place, Tensor, Tensor]:
        """Check a call, and compute it, or a part with its first query, from weights; return place, output, weights."""
        place = self.enter(call)
        output, weights = (part or call).run()
        first = weights[:, :, 0].detach()
        if not first.isfinite().all():
            raise NonFiniteError(f"the attention weights of {place} contain NaN or infinity")
        past = self._past if place.role in EXTENDED else 0
        self.note_direction(place, call.module, ahead=bool(first[..., past + 1 :].any()))
        return place, output, weights

    def note_direction(self, place: Place, module: nn.Module, *, ahead: bool) -> None:
        """Note whether a layer's first query attends to later keys; refuse what differs from earlier layers."""
        if place.role != "self":
            return
        causal, declared = not ahead, bool(getattr(module, "is_causal", False))
        if not self._several:
            causal = declared
        elif self._towers:
            # The patches of an image, or a whole prompt with images, may attend ahead in a decoder.
            causal = causal or declared
        # A padded first query attends anywhere, and one behind a cache may be padded.
        causal = causal or self._grows
        if self._directed and causal != self.causal:
            raise UnsupportedModelError(
                f"{type(module).__name__} is {'causal' if causal else 'not causal'}, unlike the attention layers "
                "before it; pass one stack of layers alone"
            )
        self.causal, self._directed = causal, True

"""Reads the relevance of components inside a frozen network: residual streams, heads, neurons, experts.

A component's relevance is ⟨a, ∂m/∂a⟩ with a its activation and m the number explained, whose gradient is that of the
frozen network. Where the rules conserve, what is read from a layer's residual stream and what biases behind it keep
add up to m, which :meth:`ComponentNetwork.levels` checks for every layer.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from captum_norm.attr.frozen.network import FrozenNetwork, HookedModules
from captum_norm.attr.frozen.rules import DECOMPX, RuleSet, depends_on_input
from captum_norm.checks import check_bool, check_choice
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.functional.feed_forward import Use
from captum_norm.models.attention import AttentionCall
from captum_norm.models.blocks import FeedForwardBlock
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import Hook, first_argument, first_tensor, with_argument, with_result
from captum_norm.models.stacks import Role
from captum_norm.results.components import Component

ROUNDED = 16
"""An error is relative to a sum's parts, or to this share of the products that these are sums of, which are rounded."""
FEED_FORWARD = frozenset({"feed_forward", "neurons", "experts", "edges"})


class Tap(NamedTuple):
    """Where activations are read: the components of a kind in one layer; ``part`` tells networks of a layer apart."""

    kind: Component
    role: Role
    layer: int
    part: int = 0


@dataclass(frozen=True)
class ComponentRequest:
    """Which components to read.

    Attributes:
        kinds: their kinds.
        per_position: whether neurons are read at each position.
        moves: what gradients are multiplied by instead of activations: how these change in a counterfactual.
        path: the streams that enter the first layers in a counterfactual, and how far to go to them, from 0 to 1.
    """

    kinds: tuple[Component, ...]
    per_position: bool = False
    moves: Mapping[Tap, Tensor] | None = None
    path: tuple[Sequence[Tensor], float] | None = None


def component_request(components: Any, *, per_position: Any = False) -> ComponentRequest | None:
    """Check the kinds of components that a user asks for; None for none."""
    per_position = check_bool("per_position", per_position)
    kinds: Any = (components,) if isinstance(components, str) or not isinstance(components, Sequence) else components
    for kind in kinds:
        check_choice("components", kind, get_args(Component))
    return ComponentRequest(tuple(dict.fromkeys(kinds)), per_position=per_position) if kinds else None


@dataclass(frozen=True)
class ComponentReading:
    """What components contribute to a number of each example.

    Attributes:
        parts: the contribution of each, (B, S), heads and experts (B, H, S), neurons (B, N[, S]), edges (B, U, V).
        sums: what every residual stream and the biases behind it contribute together, and the size of that, (2, B).
    """

    parts: Mapping[Tap, Tensor]
    sums: Mapping[Tap, Tensor]


class ComponentNetwork(FrozenNetwork):
    """The frozen network, or without rules the model with its own gradients, read at its components."""

    def __init__(
        self, modules: HookedModules, call: ModelCall, rules: RuleSet | None, request: ComponentRequest
    ) -> None:
        super().__init__(modules, call, rules or DECOMPX)
        self._request, self._plain = request, rules is None
        behind = feed_forward_blocks(modules, request.kinds, plain=self._plain)
        self._networks = {block.written.module for block in behind}
        self._outer = {reader.outer.module: part for block in behind for part, reader in enumerate(block.dense)}
        readers = [block.experts for block in behind if block.experts is not None]
        self._most_experts = max((len(reader.module.get_parameter(reader.inner)) for reader in readers), default=0)
        # Of one pass without gradients: the activations. Of one backward pass: what each component contributes, and
        # what a layer reads beside its stream, such as an encoder's output, by the level at which its half begins.
        self.activations: dict[Tap, Tensor] = {}
        self._parts: dict[Tap, Tensor] = {}
        self._products: dict[Tap, Tensor] = {}  # the sums of a stream's products with its gradient, without signs
        self._beside: list[tuple[int, int, Tensor]] = []
        self._passes: list[ComponentReading] = []
        self.readings: list[ComponentReading] = []
        # The level at which each half begins, the half that runs and the number of its layers that have run.
        self._begins: dict[Role, int] = {}
        self._role, self._layer = "", 0
        self.layers: dict[Role, int] = {}  # how many each half has

    def hooks(self) -> list[tuple[Literal["before", "after"], Iterable[nn.Module], Hook]]:
        """Return the functions to call before and after modules, in the order of their calls."""
        layers = self.modules.layers
        hooks = [("before", layers, self._enter)] if self._plain else super().hooks()
        return [
            *hooks,
            ("before", layers, self._begin),
            ("before", self._outer, self._fire),
            ("after", self._networks, self._write),
            ("after", layers, self._leave),
        ]

    @property
    def is_active(self) -> bool:
        """Whether steps are replaced at this point of the forward pass."""
        return not self._plain and super().is_active

    def enter(self, stream: Tensor) -> Tensor:
        """Replace the first layer's input, and begin to count layers."""
        self.level += bool(self.streams)
        self._role = "self"
        if self.modules.has_encoder:
            self._role = "decoder" if self.streams else "encoder"
        self._begins[self._role], self._layer = self.level, 0
        if self._request.path is not None:
            ends, share = self._request.path
            stream = torch.lerp(stream, ends[len(self.streams)].to(stream), share)
        return self.tap(Tap("residual", self._role, 0), super().enter(stream))

    def attention(self, call: AttentionCall) -> Tensor:
        """Replace attention, before the output projection, and read its heads."""
        if self._plain:
            self.place, output = self.stacks.enter(call), call.output()
        else:
            output = super().attention(call)
        return self.tap(Tap("heads", self.place.role, self.place.index), output)

    def through(self, use: Use, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Carry inputs through an expert, and read it."""
        written, constant = super().through(use, inputs)
        self.tap(Tap("experts", self._role, self._layer, use.expert), written, use.queries, written + constant)
        return written, constant

    def relevances(self, values: Tensor, *, again: bool) -> tuple[Tensor, Tensor]:
        """Compute the relevance of positions, (B, S), and biases, (B,), and read that of components."""
        self._passes.clear()
        made = super().relevances(values, again=again)
        first, *others = self._passes
        if others:  # each example had a backward pass of its own, in which all relevance is its
            every = self._passes
            first = ComponentReading(
                {tap: torch.stack([each.parts[tap][i] for i, each in enumerate(every)]) for tap in first.parts},
                {tap: torch.stack([each.sums[tap].sum(1) for each in every], 1) for tap in first.sums},
            )
        self.readings.append(first)
        return made

    def stacked(self, kind: Component) -> dict[Role, Tensor]:
        """Stack what components contribute to P numbers by layer, (B, P, L, ...), with 0 for what a layer lacks."""
        roles = dict.fromkeys(tap.role for tap in self.readings[0].parts if tap.kind == kind)
        return {role: torch.stack([self._layers(each, kind, role) for each in self.readings], 1) for role in roles}

    def _layers(self, reading: ComponentReading, kind: Component, role: Role) -> Tensor:
        layers: dict[int, list[Tensor]] = {}
        for tap in sorted(reading.parts):
            if (tap.kind, tap.role) == (kind, role):
                layers.setdefault(tap.layer, []).append(reading.parts[tap])
        if kind in ("feed_forward", "experts"):
            without = [torch.zeros_like(next(iter(layers.values()))[0])]
            layers = {layer: layers.get(layer, without) for layer in range(self.layers[role])}
        units = [torch.cat(parts, 1) if len(parts) > 1 else parts[0] for parts in layers.values()]
        if kind in ("heads", "neurons"):  # of which layers may have different numbers
            most, others = max(part.shape[1] for part in units), units[0].dim() - 2
            units = [pad(part, (*[0] * 2 * others, 0, most - part.shape[1])) for part in units]
        return units[0] if kind == "edges" else torch.stack(units, 1)

    def _relevances(self, value: Tensor, *, again: bool) -> tuple[Tensor, Tensor]:
        self._parts.clear()
        self._beside.clear()
        made = super()._relevances(value, again=again)
        self._passes.append(ComponentReading(dict(self._parts), self._sums()))
        return made

    def _sums(self) -> dict[Tap, Tensor]:
        """Add up what each residual stream and all behind it contribute, unless that is not to add up."""
        if self._plain or self._request.moves is not None:
            return {}
        streams = {tap: parts for tap, parts in self._parts.items() if tap.kind == "residual"}
        sums = {}
        for tap, parts in streams.items():
            level = self._begins[tap.role] + tap.layer
            behind = [share for at, share in self._shares if at >= level]
            beside = [read for begin, at, read in self._beside if begin <= level <= at]
            if tap.role == "encoder":
                beside.append(streams[Tap("residual", "decoder", 0)].sum(1))
            bias = sum((share.to(parts) for share in [*behind, *beside]), torch.zeros_like(parts[:, 0]))
            size = torch.maximum(parts.abs().sum(1) + bias.abs(), self._products[tap] / ROUNDED)
            sums[tap] = torch.stack([parts.sum(1) + bias, size])
        return sums

    def _begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tell what a layer reads beside its stream from what others do."""
        stream, received = first_argument(args, kwargs), (args, kwargs)
        for tensor in (*args, *kwargs.values()):
            if isinstance(tensor, Tensor) and tensor is not stream and depends_on_input(tensor):
                view = tensor.view_as(tensor)
                self._see_beside(view)
                received = with_argument(*received, tensor, view)
        return received

    def _see_beside(self, tensor: Tensor) -> None:
        begin, level, network, factor = self._begins[self._role], self.level, proxy(self), tensor.detach()

        def keep(gradient: Tensor) -> None:
            products = network._batch_first(gradient.to(network.dtype) * factor.to(network.dtype))
            network._beside.append((begin, level, products.flatten(1).sum(1)))

        tensor.register_hook(keep)

    def _leave(self, _module: nn.Module, *seen: Any) -> Any:
        self.layers[self._role] = self._layer = self._layer + 1
        self.level += 1
        return self._tap_result(Tap("residual", self._role, self._layer), seen[-1])

    def _fire(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = first_argument(args, kwargs)
        if hidden is None or not self._entered:
            return None
        tapped = self.tap(Tap("neurons", self._role, self._layer, self._outer[module]), hidden)
        return None if tapped is hidden else with_argument(args, kwargs, hidden, tapped)

    def _write(self, _module: nn.Module, *seen: Any) -> Any:
        return self._tap_result(Tap("feed_forward", self._role, self._layer), seen[-1]) if self._entered else None

    def _tap_result(self, tap: Tap, output: Any) -> Any:
        """Tap the first tensor that a module returns; return its output with another in place, or None."""
        tensor = first_tensor(output)
        if tensor is None:
            return None
        tapped = self.tap(tap, tensor)
        return None if tapped is tensor else with_result(output, tensor, tapped)

    def tap(self, tap: Tap, tensor: Tensor, rows: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        """Note an activation, or what it contributes, once its gradient is known; return what goes on in its place."""
        checked = tap.kind == "residual" and self._request.moves is None
        if tap.kind not in self._request.kinds and not checked:
            return tensor
        if not tensor.requires_grad:
            self.activations[tap] = tensor.detach()
            return tensor
        network, factor = proxy(self), (tensor if value is None else value).detach()
        if self._request.moves is not None:
            factor = self._request.moves[tap]

        def keep(gradient: Tensor) -> None:
            products = gradient.to(network.dtype) * factor.to(network.dtype)
            if checked:
                network._products[tap] = network._batch_first(products).abs().flatten(1).sum(1)
            parts = network._placed(tap, products, rows)
            whole = tap._replace(part=0) if tap.kind == "experts" else tap
            known = network._parts.get(whole)
            network._parts[whole] = parts if known is None else known + parts

        tensor.register_hook(keep)
        return tensor

    def by_position(self, tensor: Tensor) -> Tensor:
        """View an activation by example and position, (B, S, ...)."""
        if tensor.dim() > 2:
            return self._batch_first(tensor)
        rows: Tensor = tensor.unflatten(0, (-1, self._batch) if self._queries_first else (self._batch, -1))
        return rows.transpose(0, 1) if self._queries_first else rows

    def _placed(self, tap: Tap, parts: Tensor, rows: Tensor | None) -> Tensor:
        """Add up what an activation's channels contribute: (B, S), heads and experts (B, H, S), neurons (B, N[, S])."""
        if tap.kind == "heads":
            return parts.sum(-1).transpose(1, 2)
        if tap.kind != "neurons":
            parts = parts.sum(-1, keepdim=True)
        if rows is not None:
            positions = self._batch * self.lengths[-1]
            parts = parts.new_zeros(positions, 1).index_add(0, rows % positions, parts)
        parts = self.by_position(parts)
        if tap.kind == "experts":
            return pad(parts.transpose(1, 2), (0, 0, tap.part, self._most_experts - 1 - tap.part))
        if tap.kind != "neurons":
            return parts.squeeze(-1)
        return parts.transpose(1, 2) if self._request.per_position else parts.sum(1)


def feed_forward_blocks(modules: HookedModules, kinds: Collection[Component], *, plain: bool) -> list[FeedForwardBlock]:
    """Return the layers' feed-forward blocks, if components inside are to be read; refuse what cannot be."""
    wanted = FEED_FORWARD.intersection(kinds)
    if not wanted:
        return []
    behind = {
        modules.layer_of[name]: block.feed_forward for name, block in modules.blocks.items() if block.feed_forward
    }
    without = next((block for name, block in modules.blocks.items() if modules.layer_of[name] not in behind), None)
    if without is not None:
        raise UnsupportedModelError(
            f'got components="{min(wanted)}", but {without.without_feed_forward}; ask for "heads" or "residual"'
        )
    routed = any(block.experts is not None for block in behind.values())
    if "experts" in wanted and not routed:
        raise InvalidInputError(
            'got components="experts" of a model whose feed-forward networks have none; ask for "feed_forward" or '
            '"neurons"'
        )
    if routed and "neurons" in wanted:
        raise UnsupportedModelError(
            'got components="neurons", but the neurons of experts that share a module are not seen one by one; ask for '
            '"experts" or "feed_forward"'
        )
    if "experts" in wanted and plain:
        raise UnsupportedModelError(
            'got components="experts" for the model\'s own gradients or a counterfactual, where experts that share a '
            'module are not seen one by one; ask for "feed_forward", or take a method such as RelP alone'
        )
    return list(behind.values())

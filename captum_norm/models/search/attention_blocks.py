"""Finds the parts of a model's attention blocks from the tensors of one forward pass.

The output projection is the module that receives attention's output. The smallest module in which its sum with a
residual stream is found, and from which the module's output follows, is the layer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from captum_norm.errors import UnsupportedModelError
from captum_norm.models.attention import AttentionCall
from captum_norm.models.blocks import Block
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import OBSERVING, first_tensor, hooked
from captum_norm.models.layouts import Site, registered_layouts
from captum_norm.models.model import refusal_of
from captum_norm.models.precision import least_precise
from captum_norm.models.probes import affine_test, may_be_affine
from captum_norm.models.projections import equal, reproduces
from captum_norm.models.search.attention_layouts import bind, candidates, projections
from captum_norm.models.search.feed_forward_blocks import FeedForwardSearch
from captum_norm.models.search.trace import Event, Trace
from captum_norm.models.wrappers import class_of

HOW_TO = 'Declare the layer with captum_norm.models.register_layout: see "Describe a new model" in the documentation'

RANDOMIZED = (nn.Linear, Conv1D, nn.Embedding, nn.Conv2d)
"""The modules whose outputs are replaced by random numbers during the search, as those of all affine ones are.

So no equation holds by accident: no summand is negligible beside another, no activation is seen only near 0, and no two
tensors are equal unless the model's code makes them so.
"""

CROWDED = 4  # with more open calls of attention, the first that is not understood ends the search in a module

OpenCall = tuple[nn.Module, Tensor, int]
"""A call of attention without a block yet: its module, its output (B, Q, H·d), and the number of events before it."""


def find_blocks(call: ModelCall, *, feed_forward: bool = False) -> dict[nn.Module, Block]:
    """Find a model's attention blocks, by attention module, and with ``feed_forward`` also the block behind each."""
    try:
        return _find_blocks(call, {}, feed_forward=feed_forward)
    except UnsupportedModelError:
        gated = _gated_projections(call)  # by two forward passes more
        if not gated:
            raise
    return _find_blocks(call, gated, feed_forward=feed_forward)


def _find_blocks(
    call: ModelCall, gated: Mapping[nn.Module, nn.Module], *, feed_forward: bool
) -> dict[nn.Module, Block]:
    """Find blocks; ``gated`` has the projections that receive attention's output gated, by attention module."""
    feed_forwards = FeedForwardSearch(feed_forward, refusal_of(call.model, "without_feed_forward"))
    search = _Search(call, feed_forwards, gated)
    with torch.no_grad(), call.attention_through(search.attention), hooked(search.hooks()):
        call.run()
    if not search.stacks.sizes:
        raise UnsupportedModelError(call.unseen)
    call.facts.excerpt.modules = call.facts.excerpt.modules or search.stacks.modules
    if search.open_calls and search.last_trace is not None:
        raise _not_understood(search, search.last_trace, *search.open_calls[0][:2])
    feed_forwards.give_up()
    behind, missing = feed_forwards.blocks, feed_forwards.missing
    return {
        module: replace(block, feed_forward=behind.get(module), without_feed_forward=missing.get(module))
        for module, block in search.blocks.items()
    }


class _Search:
    """Watches all modules during one forward pass and finds each layer's block when the layer returns."""

    def __init__(self, call: ModelCall, feed_forwards: FeedForwardSearch, gated: Mapping[nn.Module, nn.Module]) -> None:
        watched = {role.removesuffix(" cross") for role in call.facts.watched}
        others = (tower for name, tower in call.facts.towers.items() if name not in watched)
        unwatched = {module for tower in others for module in tower.modules()}
        self.model, self.stacks = call.model, call.stacks()
        self.names = {module: name for name, module in call.model.named_modules() if module not in unwatched}
        self.blocks: dict[nn.Module, Block] = {}
        self.open_calls: list[OpenCall] = []
        self.last_trace: Trace | None = None
        self._feed_forwards, self._gated = feed_forwards, gated
        self._crossing: set[nn.Module] = set()
        self._events: list[Event] = []
        self._entered: list[tuple[int, Tensor | None]] = []
        self._is_affine = affine_test()
        self._inside: nn.Module | None = None
        self._device: torch.device | None = None
        self._generator = torch.Generator().manual_seed(0)

    def attention(self, call: AttentionCall) -> Tensor:
        """Make attention's output, and note the call."""
        if not OBSERVING.get():
            raise RuntimeError("attention is not affine")
        self._feed_forwards.attention_begins(call.module, cross=call.cross)
        self.stacks.enter(call)
        output = call.output()
        if call.cross:
            self._crossing.add(call.module)
        if call.module not in self.blocks:
            self.open_calls.append((call.module, self._copied(output).flatten(2), len(self._events)))
        return output

    def hooks(self) -> Iterator[Any]:
        """Yield hooks for the input and the output of every module."""
        for module in self.names:
            yield module, "input", self._enter
            yield module, "result", self._leave
            if any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
                yield module, "arguments", self._feed_forwards.routed

    def _enter(self, module: nn.Module, tensor: Tensor | None) -> None:
        """Note a module's input; inside of a composite that is one affine map, note nothing."""
        if self._inside is not None:
            return
        self._entered.append((len(self._events), self._note(module, "input", tensor)))
        if tensor is not None and may_be_affine(module) and self._is_affine(module, tensor):
            self._inside = module

    def _leave(self, module: nn.Module, result: Any) -> Tensor | None:
        """Note a module's output, look for blocks inside, and return the numbers that replace the output, if any."""
        if self._inside not in (None, module):
            return None
        (start, received), tensor, chosen = self._entered.pop(), first_tensor(result), None
        if tensor is not None and tensor is result and (module is self._inside or isinstance(module, RANDOMIZED)):
            chosen = torch.randn(tensor.shape, generator=self._generator, device="cpu").to(tensor)
        self._inside = None
        self._note(module, "output", tensor if chosen is None else chosen, received, None if chosen is None else tensor)
        inside = [opened for opened in self.open_calls if opened[2] >= start]
        waiting = self._feed_forwards.waiting.keys()
        if inside or (waiting and not waiting.isdisjoint(module.modules())):
            trace = self.last_trace = Trace(self.names[module], module, self._events[start:])
            for opened in inside:
                block = self._block(trace, *opened[:2], opened[2] - start)
                if block is not None:
                    self.blocks[block.attention] = block
                    self.open_calls.remove(opened)
                    self._feed_forwards.expect(block, trace)
                elif len(inside) > CROWDED:
                    break
            self._feed_forwards.look(trace)
        if not self.open_calls and not waiting:
            # Only the module's own input and output still matter, to the layer around it.
            self._events[start:] = [event for event in self._events[start:] if event.site.module is module]
        return chosen

    def _note(
        self,
        module: nn.Module,
        end: Literal["input", "output"],
        tensor: Tensor | None,
        received: Tensor | None = None,
        computed: Tensor | None = None,
    ) -> Tensor | None:
        """Note a tensor, and at the end of a call what the module received and computed; return the copy noted."""
        if tensor is None:
            return None
        copy = self._copied(tensor)
        computed = None if computed is None else self._copied(computed)
        inputs = copy if received is None else received
        self._events.append(Event(Site(module, end), copy, tensor, inputs, received is not None, computed))
        return copy

    def _copied(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the one device on which those of a model on several are compared."""
        self._device = self._device or tensor.device
        return tensor.to(self._device, copy=True)

    def _block(self, trace: Trace, attention: nn.Module, context: Tensor, order: int) -> Block | None:
        declared, gated = registered_layouts().get(class_of(trace.layer).__name__), self._gated.get(attention)
        if gated is not None:
            received = trace.call_of(gated) if gated in trace.layer.modules() else None
            if received is None:
                return None
            context = received.inputs.reshape(context.shape)
        attending = {*self.blocks, *(module for module, _, _ in self.open_calls)}
        # Sums that the model adds in our order are exact, so these are tried first. In a newly initialised model, whose
        # layers change next to nothing, a comparison up to rounding cannot tell a stream from its norm.
        layouts = (
            layout
            for same, factored in product((equal, reproduces), (False, True))
            for layout in candidates(trace, attention, context, order, attending, same, factored=factored)
        )
        layout = declared or next(layouts, None)
        if layout is None:
            return None
        block = bind(trace, layout, attention, context)
        return replace(block, gated=gated is not None, cross=attention in self._crossing)


def _not_understood(search: _Search, trace: Trace, attention: nn.Module, context: Tensor) -> UnsupportedModelError:
    """Make the error for the first layer that was not understood: what was found of it, what was not, what to do."""
    attends = f'{type(search.model).__name__} is not understood: "{search.names[attention]}" attends'
    projection = next((call.module for call in projections(trace, context)), None)
    if projection is not None:
        return UnsupportedModelError(
            f'{attends} and "{search.names[projection]}" projects its output, but no sum with a residual stream was '
            f"found from which the layer's output follows. {HOW_TO}"
        )
    received = next((call.module for call in trace.calls_on(context) if trace.name(call.module)), None)
    if received is None:
        return UnsupportedModelError(f"{attends}, but no module receives its output. {HOW_TO}")
    return UnsupportedModelError(
        f'{attends}, but "{search.names[received]}" ({type(received).__name__}), which receives its output, is not '
        f"affine{_plainer(received)}. {HOW_TO}"
    )


def _plainer(module: nn.Module) -> str:
    """Say how a module that holds an adapter or quantised weights becomes a plain linear map."""
    parts = list(module.modules())
    held = [tensor for part in parts for tensor in (*part._parameters.values(), *part._buffers.values())]
    matrices = [tensor for tensor in held if tensor is not None and tensor.dim() > 1]
    quantised = any(not t.is_floating_point() or type(t) not in (Tensor, nn.Parameter) for t in matrices)
    adapted = any(type(part).__module__.startswith("peft.") for part in parts)
    ways = ["merge the adapter (merge_and_unload())"] * adapted + ["dequantize() the weights"] * quantised
    return ": " * bool(ways) + " and ".join(ways)


def _gated_projections(call: ModelCall) -> dict[nn.Module, nn.Module]:
    """Map attention modules to a module that receives their output times factors that do not depend on the key."""
    # In the second of two runs with the same random numbers each number of attention's output is multiplied by another
    # one. What the module receives is multiplied likewise, up to a number for each head and query, such as a norm's σ.
    before, after = (_received_after_attention(call, changed=changed) for changed in (False, True))
    gated: dict[nn.Module, nn.Module] = {}
    for attention, (output, factors, received) in before.items():
        later = after[attention][2] if attention in after else {}
        for module, tensor in received.items():
            if module in later and not equal(tensor, output) and _is_multiplied(tensor, later[module], factors):
                gated.setdefault(attention, module)
    return gated


def _received_after_attention(
    call: ModelCall, *, changed: bool
) -> dict[nn.Module, tuple[Tensor, Tensor, dict[nn.Module, Tensor]]]:
    """Return by attention its output, random factors that may change it, (B, Q, H, d), and what modules received."""
    seen: dict[nn.Module, tuple[Tensor, Tensor, dict[nn.Module, Tensor]]] = {}
    numbers, signs = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    latest: list[nn.Module] = []

    def attend(attention: AttentionCall) -> Tensor:
        output, _ = attention.run()
        factors = torch.rand(output.shape, generator=signs, device="cpu") + 0.5
        factors = (factors * torch.randn(output.shape, generator=signs, device="cpu").sign()).to(output)
        seen.setdefault(attention.module, (output, factors, {}))
        latest[:] = [attention.module]
        return output * factors if changed else output

    def note(module: nn.Module, tensor: Tensor | None) -> None:
        if latest and tensor is not None:
            _, factors, received = seen[latest[0]]
            if tensor.numel() == factors.numel():
                received.setdefault(module, tensor.clone())

    def randomize(_: nn.Module, result: Any) -> Tensor | None:
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return None
        return torch.randn(result.shape, generator=numbers, device="cpu").to(result)

    modules = list(call.model.modules())
    hooks: list[Any] = [(module, "input", note) for module in modules]
    hooks += [(module, "result", randomize) for module in modules if isinstance(module, RANDOMIZED)]
    with torch.no_grad(), call.attention_through(attend), hooked(hooks):
        call.run()
    return seen


def _is_multiplied(before: Tensor, after: Tensor, factors: Tensor) -> bool:
    """Whether ``after`` is ``before`` times ``factors``, up to one number for each head and query."""
    before, after = (tensor.double().reshape(factors.shape) for tensor in (before, after))
    expected = before * factors.double()
    if not expected.all() or expected.shape[-1] < 2:
        return False
    ratios = after / expected
    spread = ratios.amax(-1) - ratios.amin(-1)
    precision = torch.finfo(least_precise(factors.dtype, torch.float32)).eps
    return bool((spread <= 64 * precision * ratios.abs().amax(-1)).all())

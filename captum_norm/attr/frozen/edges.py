"""Reads the edges between components of a residual stream: what one writes to it, as another reads it.

An edge u → v is what component u (the input vectors, a head, a feed-forward network) writes to the stream, as v reads
it: a head's queries, keys or values, a network, or the logits. Its score is ⟨a_u, ∂m/∂(v's input)⟩, with the gradient
through v's own branch alone; with a counterfactual ⟨a_u′ − a_u, ∂m/∂(v's input)⟩, edge attribution patching.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import pad

from captum_norm.attr.frozen.components import ComponentNetwork, ComponentRequest, Tap
from captum_norm.attr.frozen.network import HookedModules
from captum_norm.attr.frozen.rules import RuleSet
from captum_norm.attr.layer_maps import TOLERANCE
from captum_norm.errors import IncompleteDecompositionError, UnsupportedModelError
from captum_norm.functional import Normalization, apply_linear, inverse_scale
from captum_norm.models.attention import AttentionCall
from captum_norm.models.blocks import Block, FeedForwardBlock
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import Hook, first_argument
from captum_norm.models.layouts import FEED_FORWARD_SCOPES
from captum_norm.models.precision import least_precise

MAPS: Mapping[Any, int] = {F.linear: 0, torch.addmm: 1}
"""Functions that compute linear maps, and which of their arguments is mapped, before the matrix."""


class EdgeNetwork(ComponentNetwork):
    """The frozen network, or without rules the model with its own gradients, read at components and their inputs."""

    def __init__(
        self, modules: HookedModules, call: ModelCall, rules: RuleSet | None, request: ComponentRequest
    ) -> None:
        expect_one_stream(modules, type(call.model).__name__)
        super().__init__(modules, call, rules, request)
        self._block_of = {
            modules.layer_of[attention]: (block, block.feed_forward)
            for attention, block in modules.blocks.items()
            if block.feed_forward is not None
        }
        # By layer: its blocks; the stream that it reads, and at last what the last returns; attention's output with
        # queries, keys and values; what the norm before the feed-forward network reads; what that network writes.
        self.blocks: list[tuple[Block, FeedForwardBlock]] = []
        self._stream: list[Tensor] = []
        self._attentions: list[tuple[Tensor, Sequence[Tensor]]] = []
        self._normed: dict[int, Tensor] = {}
        self._written: dict[int, Tensor] = {}
        self._gradients: dict[Tap, Tensor] = {}  # of what heads and networks write
        self._expected: Tensor  # of the stream that the present layer reads and what it has written

    def hooks(self) -> list[tuple[Literal["before", "after"], Iterable[nn.Module], Hook]]:
        """Return the functions to call before and after modules, in the order of their calls."""
        norms = {behind.norm.module for _, behind in self._block_of.values() if behind.norm is not None}
        return [*super().hooks(), ("before", norms, self.read)]

    def attention(self, call: AttentionCall) -> Tensor:
        """Replace attention, before the output projection, and note what it reads."""
        if call.key is call.value:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} computes attention by its own products, in which queries and keys are "
                "not seen; edges need a model that calls an attention function"
            )
        self._inputs = call.query, call.key, call.value
        return super().attention(call)

    def read(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note what the norm before a feed-forward network reads."""
        self._normed[self._layer] = cast(Tensor, first_argument(args, kwargs))

    def tap(self, tap: Tap, tensor: Tensor, rows: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        """Note an activation, and what components write to the stream; expect it to be all that is written."""
        if tap.kind not in ("residual", "heads", "feed_forward"):
            return super().tap(tap, tensor, rows, value)
        # No hook on an activation sees the passes that begin or end beside it.
        passed, layer = super().tap(tap, tensor.view_as(tensor), rows, value), self._layer
        if tap.kind == "residual":
            passed = passed.view_as(passed)
            self._stream.append(passed)
            stream = tensor.detach().to(self.dtype)
            if tap.layer:
                problem = f"what the components of layer {layer - 1} write does not add up"
                expect_equal(self._expected, stream, self._precision(tensor), problem, stream)
            else:
                self.activations[Tap("edges", tap.role, 0)] = stream.unsqueeze(2)
            self._expected = stream
            return passed
        with torch.no_grad():
            if tap.kind == "heads":
                self._attentions.append((tensor, self._inputs))
                parts = self._by_head(tensor.detach().to(self.dtype))
                self.activations[Tap("edges", tap.role, 2 * layer + 1)] = parts[:, :, :-1]
            else:
                self._written[layer] = tensor
                parts = tensor.detach().to(self.dtype).reshape(*self._expected.shape[:2], 1, -1)
                parts = _through(self.blocks[-1][1].carry("atb_ff_res", self.dtype).branch, parts)
                self.activations[Tap("edges", tap.role, 2 * layer + 2)] = parts
            self._expected = self._expected + parts.sum(2)
        if passed.requires_grad:
            network = proxy(self)
            passed.register_hook(lambda gradient: network._gradients.__setitem__(tap, gradient))
        return passed

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.blocks.append(self._block_of[module])
        return super()._begin(module, args, kwargs)

    def _by_head(self, output: Tensor) -> Tensor:
        """Return what each head writes to the stream, and their bias together behind them, (B, S, H + 1, D)."""
        block, _ = self.blocks[-1]
        weight, bias = block.projection.weight(self.dtype), block.projection.bias(self.dtype)
        heads = torch.einsum("bshd,hde->bshe", output, weight.unflatten(0, (output.shape[2], -1)))
        constant = torch.zeros_like(heads[:, :, :1]) + (0 if bias is None else bias)
        return _through(block.carry("attn_res", self.dtype).branch, torch.cat([heads, constant], 2))

    def _precision(self, tensor: Tensor) -> torch.dtype:
        """Return the least precise dtype of a tensor and of the layers that have run."""
        return least_precise(tensor.dtype, *(block.precision(FEED_FORWARD_SCOPES) for block, _ in self.blocks))

    def _relevances(self, value: Tensor, *, again: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - always again
        relevance, bias = super()._relevances(value, again=True)
        counts = {output.shape[2] for output, _ in self._attentions}
        if len(counts) != 1:
            raise UnsupportedModelError(
                f"got edges of a model whose layers have {counts} heads; expected as many in each"
            )
        sources = sources_of(self.activations if self._request.moves is None else self._request.moves)
        scores, total = [], torch.zeros_like(sources[:, :, 0])
        for before, gradients in self._gradients_of_targets(value, total):
            products = torch.einsum("bsud,bsvd->buv", sources[:, :, :before], gradients)
            scores.append(pad(products, (0, 0, 0, sources.shape[2] - before)))
            total += gradients.sum(2)
        products = total * self.streams[0].detach()
        problem = "what the edges of the input contribute is not what the input does"
        sizes = products.abs().sum(-1)
        expect_equal(products.sum(-1), relevance.to(total), self._precision(value), problem, sizes)
        reading = self._passes[-1]
        parts = {**reading.parts, Tap("edges", self._role, 0): torch.cat(scores, 2)}
        self._passes[-1] = replace(reading, parts=parts)
        return relevance, bias

    def _gradients_of_targets(self, value: Tensor, like: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield, for some targets after the other, how many sources come before, and gradients, (B, S, N, D)."""
        before, role = 1, self._role
        for layer, (output, _) in enumerate(self._attentions):
            heads = output.shape[2]
            yield before, self._gradients_of_heads(layer, self._gradients[Tap("heads", role, layer)]).to(like)
            written, passed = self._written[layer], self._gradients[Tap("feed_forward", role, layer)]
            (gradient,) = torch.autograd.grad(written, self._normed[layer], passed, retain_graph=True)
            beside = 0 if self.blocks[layer][1].parallel else heads
            yield before + beside, gradient.reshape(like.shape).unsqueeze(2).to(like)
            before += heads + 1
        (gradient,) = torch.autograd.grad(value, self._stream[-1], retain_graph=True)
        yield before, gradient.unsqueeze(2).to(like)

    def _gradients_of_heads(self, layer: int, passed: Tensor) -> Tensor:
        (output, inputs), stream = self._attentions[layer], self._stream[layer]
        heads, shared = output.shape[2], output.shape[2] // inputs[1].shape[1]
        found = stream.new_zeros(*output.shape[:2], 3, heads, stream.shape[-1])
        for member in range(shared):  # of the heads with the same keys, each of which has its own gradient of these
            own = torch.zeros_like(output)
            own[:, :, member::shared] = passed[:, :, member::shared]
            # Constant attention weights pass nothing to queries and keys.
            gradients = torch.autograd.grad(output, inputs, own, retain_graph=True, materialize_grads=True)
            for i, (tensor, whole) in enumerate(zip(inputs, gradients, strict=True)):
                for head in range(member, heads, shared):
                    place = head * tensor.shape[1] // heads
                    alone = torch.zeros_like(whole)
                    alone[:, place] = whole[:, place]
                    (found[:, :, i, head],) = torch.autograd.grad(tensor, stream, alone, retain_graph=True)
        return found.flatten(2, 3)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the output of a torch function that the model's code calls."""
        if func in MAPS and self._entered and not self._replacing and len(args) == 3 and not kwargs:
            inputs, matrix = args[MAPS[func]], args[MAPS[func] + 1]
            if type(matrix) in (Tensor, nn.Parameter) and inputs.requires_grad:
                func = partial(SparseMap.apply, func)
        return super().__torch_function__(func, types, args, kwargs)


class SparseMap(torch.autograd.Function):
    """A linear map whose gradient is computed of the outputs that have one: for a single head, those of its columns."""

    @staticmethod
    def forward(ctx: Any, func: Callable[..., Tensor], *args: Tensor) -> Tensor:  # noqa: D102
        ctx.place = MAPS[func]
        ctx.save_for_backward(args[1] if func is F.linear else args[2].T)
        return func(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        ((rows,), (gradient,)) = ctx.saved_tensors, gradients
        some = gradient.flatten(0, -2).any(0)
        passed = gradient[..., some] @ rows[some].to(gradient.dtype)
        return (None, passed, None, None) if ctx.place == 0 else (None, None, passed, None)


def sources_of(activations: Mapping[Tap, Tensor]) -> Tensor:
    """Return what the components of a stream write to it among activations or their changes, (B, S, U, D)."""
    return torch.cat([written for tap, written in sorted(activations.items()) if tap.kind == "edges"], 2)


def expect_one_stream(modules: HookedModules, name: str) -> None:
    """Refuse a model that has another structure than one residual stream."""
    for block in modules.blocks.values():
        behind = block.feed_forward
        problems: dict[str, Any] = {
            "has two sequences": modules.has_encoder or block.cross,
            f"is {block.layout.style}": block.layout.style not in ("pre-norm", "sandwich", "parallel"),
            "is a mixture of experts": behind is not None and behind.experts is not None,
            "has no feed-forward network behind a norm": behind is None or behind.norm is None,
            "multiplies the residual stream": block.residual_factor or (behind and behind.residual_factor),
            "has positions before examples": block.queries_first,
        }
        problem = next((text for text, holds in problems.items() if holds), None)
        if problem is not None:
            raise UnsupportedModelError(
                f'got edges of {name}, of which "{block.name}" {problem}; edges are those of one residual stream that '
                "attention and dense feed-forward networks read through norms (pre-norm, sandwich, or parallel)"
            )


def _through(norm: Normalization | None, parts: Tensor) -> Tensor:
    """Carry parts, (B, S, N, D), of which the last gets its bias, through a frozen norm of their sum."""
    if norm is None:
        return parts
    parts = apply_linear(norm, parts) * inverse_scale(norm, parts.sum(2, keepdim=True))
    return parts if norm.bias is None else torch.cat([parts[:, :, :-1], parts[:, :, -1:] + norm.bias], 2)


def expect_equal(found: Tensor, expected: Tensor, precision: torch.dtype, problem: str, sizes: Tensor) -> None:
    """Refuse what differs from what it is to be by more than the rounding of summands of these sizes."""
    error = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(sizes).clamp(min=1e-30)
    if not error <= TOLERANCE[precision]:
        raise IncompleteDecompositionError(
            f"{problem}: relative error {float(error):.1e}, accepted {TOLERANCE[precision]:.0e} for {precision}"
        )

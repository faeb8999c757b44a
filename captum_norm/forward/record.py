"""Runs a model once, as it is, and hands on each attention layer as soon as its last tensor exists.

Nothing that the model computes is replaced: its own attention function makes its output. A layer keeps queries, keys,
values and mask, from which it makes the attention weights of some rows at a time; that these are the model's is checked
against the output that its own function returned.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil, prod
from threading import get_ident
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from captum_norm.errors import NotEnoughMemoryError, UnsupportedModelError
from captum_norm.functional import Carry, Scales, length, own_keys, relative_error
from captum_norm.functional.feed_forward import Baseline
from captum_norm.functional.vectors import DIRECTIONS, random_directions
from captum_norm.memory import ACCELERATOR_BYTES, MemoryBudget, free_bytes, readable
from captum_norm.models.attention import AttentionCall, Part
from captum_norm.models.blocks import Block, FeedForwardBlock, fold_gate, multiplied
from captum_norm.models.call import WATCH, ModelCall
from captum_norm.models.hooks import OBSERVING, End, Hook, first_tensor, hooked
from captum_norm.models.layers import seen
from captum_norm.models.layouts import Scope, Site
from captum_norm.models.networks import ExpertsReader, Routing, routing_of, routing_of_scores
from captum_norm.models.offloading import loaded
from captum_norm.models.stacks import EXTENDED, ROWED, Place, Role

Result = TypeVar("Result")

# Attention weights of this size stay in a CPU's cache until they are reduced,
CHUNK_BYTES = 4 * 2**20
# but with fewer queries than this, loading the keys dominates.
CHUNK_ROWS = 64
ACCUMULATED_BYTES = 4
# Number of tensors as large as a part's weights that exist at a time: scores, masked scores, softmax, ...
WORKING_COPIES = 8


@dataclass(frozen=True)
class FeedForwardTensors:
    """The tensors of one feed-forward block in one forward pass, (B, Q, D) each but for the routing.

    Attributes:
        written: the output of its networks.
        total: its sum with the residual stream and, in a parallel layer, the attention output.
        read: the output of the norm before the networks, if there is one.
        normed: the final norm's output, if there is one.
        routing: the decision of a mixture's router, if there is one.
    """

    written: Tensor
    total: Tensor
    read: Tensor | None
    normed: Tensor | None
    routing: Routing | None

    def rows(self, rows: slice | Tensor, device: torch.device, dtype: torch.dtype) -> "FeedForwardTensors":
        """Slice query positions, on a device and in another dtype."""
        batch, queries = self.written.shape[:2]
        routing = self.routing
        if routing is not None:
            routing = Routing(*(table.unflatten(0, (batch, queries))[:, rows].flatten(0, 1) for table in routing))
        read, normed = (None if t is None else t[:, rows].to(device, dtype) for t in (self.read, self.normed))
        written, total = (t[:, rows].to(device, dtype) for t in (self.written, self.total))
        return FeedForwardTensors(written, total, read, normed, routing)


@dataclass(frozen=True)
class BlockTensors:
    """The tensors of one block in one forward pass, each (B, Q, D) but for the context.

    Attributes:
        context: attention's output, times its gate if it has one, which the projection receives, (B, Q, H·d).
        projected: the output of the output projection.
        residual: the residual stream before the block, as it enters the sum.
        total: their sum as the model computed it; without the feed-forward output in a parallel layer.
        normed: the final norm's output, if there is one.
        behind: the tensors of the feed-forward block behind it, if requested.
    """

    context: Tensor
    projected: Tensor
    residual: Tensor
    total: Tensor
    normed: Tensor | None
    behind: FeedForwardTensors | None = None

    def rows(self, rows: slice | Tensor, dtype: torch.dtype) -> "BlockTensors":
        """Slice query positions, in another dtype and on one device.

        Where two devices share a model, a layer receives its inputs on that of the layer before.
        """
        device = self.projected.device
        normed = None if self.normed is None else self.normed[:, rows].to(device, dtype)
        tensors = (self.context, self.projected, self.residual, self.total)
        context, projected, residual, total = (tensor[:, rows].to(device, dtype) for tensor in tensors)
        behind = None if self.behind is None else self.behind.rows(rows, device, dtype)
        return BlockTensors(context, projected, residual, total, normed, behind)


@dataclass(frozen=True)
class Options:
    """How methods compute; see :class:`captum_norm.forward.session.MeterOptions`."""

    accumulate: torch.dtype = torch.float32
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    baseline: Baseline = "zero"


def no_bar(_queries: int) -> None:
    """Show no progress."""


@dataclass(eq=False)
class Layer:
    """One attention block in one forward pass.

    Its tensors are the model's own: read them only.

    Attributes:
        place: where it is in the model.
        call: its attention call, with a gate on attention's output folded into weights and values.
        attended: what the model's own attention function returned, (B, Q, H, d); times a gate as the model computed it.
        made: the weights that this function made, (B, H, Q, K), or None if it makes none.
        real: True at real queries, (B, Q), or None if all are.
        options: how to compute.
        past: number of keys before the model's first query's own.
        first: number of the model's queries before the first one here.
        advance: told how many queries have been treated.
        gate: factors of the weights of a gate on attention's output, (B, H, 1 or d, Q), or None.
        scope: how far :attr:`carry` goes.
        block: the block's parts, such as ``block.projection`` and ``block.layout``; not set where attention weights
            alone are recorded.
        recorded: the block's tensors in the model's dtype, likewise.
        dtype: the dtype to compute in, likewise.
        ahead: whether the first query attends to later keys, (), noted as weights are made.
        difference: length of the difference of Σ_j α_ij v_j and what the model computed, and the length of the latter,
            (B, Q) each, likewise.
    """

    place: Place
    call: AttentionCall
    attended: Tensor
    made: Tensor | None
    real: Tensor | None
    options: Options
    past: int = 0
    first: int = 0
    advance: Callable[[int], object] = field(default_factory=lambda: no_bar)
    gate: Tensor | None = None
    scope: Scope = "atb"
    block: Block = field(init=False)
    recorded: BlockTensors = field(init=False)
    dtype: torch.dtype = field(init=False)
    ahead: Tensor | None = None
    difference: tuple[Tensor, Tensor] | None = None

    @property
    def cross(self) -> bool:
        """Whether the keys are positions of another sequence than the queries."""
        return self.call.cross

    def at(self, scope: Scope) -> "Layer":
        """The same layer, with another scope for :attr:`carry`."""
        layer = copy(self)
        layer.scope = scope
        for name in ("carry", "scales", "stream", "projection", "scaled_weights"):
            vars(layer).pop(name, None)
        return layer

    def in_float64(self) -> "Layer":
        """The same layer with the same attention weights, its vectors to be formed in float64."""
        layer = self.at(self.scope)
        layer.dtype = torch.float64
        for name in ("tensors", "values", "_weight"):
            vars(layer).pop(name, None)
        return layer

    @cached_property
    def tensors(self) -> BlockTensors:
        """The hidden states ``projected``, ``residual``, ``total`` and ``normed`` of the block, (B, Q, D) each."""
        tensors = self.recorded.rows(slice(None), self.dtype)
        # Inference tensors have no version counter, so a write would go unnoticed.
        copies: dict[str, Any] = {
            name: tensor.clone()
            for name, tensor in vars(tensors).items()
            if isinstance(tensor, Tensor) and tensor.is_inference()
        }
        return replace(tensors, **copies)

    @property
    def attention(self) -> AttentionCall:
        """The attention call without a gate."""
        return self.call.ungated or self.call

    def parts(self, *, advancing: bool = True) -> Iterator[tuple[Part, Tensor, Tensor]]:
        """Yield the attention weights of some rows at a time, (examples, H, rows, keys), without and with a gate.

        Args:
            advancing: tell the progress bar.
        """
        dtype = torch.promote_types(self.call.value.dtype, torch.float32)
        values, attended = self.call.value.detach().to(dtype), self.attended.detach().to(dtype)
        if values.shape[-1] > DIRECTIONS:
            signs = random_directions(values.shape[-1], values)
            values, attended = values @ signs, attended @ signs
        error, size = (attended.new_empty(attended.shape[:2]) for _ in range(2))
        self.difference = error, size
        # What the function itself would make of its weights does not count.
        attention = replace(self.attention, value=self.attention.value[..., :0])
        parts = list(parts_of(self.attention, self.options.budget, self.call.query.shape[1]))
        values = replace(self.call, value=values).values_by_head
        for whole in parts:
            part = whole
            if self.made is None:
                # Its parameters (sinks) may have been offloaded since.
                with loaded(attention.module) if attention.module._parameters else nullcontext():
                    some = attention.part(whole)
                    if whole.rows.stop < self.call.query.shape[2]:
                        part = attended_keys(self.call, whole, some.mask)
                        some = some.part(Part(keys=part.keys))
                    _, weights = some.run()
            else:
                weights = self.made[part.examples, :, part.rows]
            gated = weights
            if self.gate is not None:
                factors = self.gate[part.examples, ..., part.rows]
                gated = (weights.to(factors.dtype).unsqueeze(2) * factors.unsqueeze(-1)).flatten(1, 2)
            # With so few columns, the transposed product is several times faster.
            output = (values[part.examples, :, part.keys].mT @ gated.detach().to(dtype).mT).permute(0, 3, 1, 2)
            queries = part[:2]
            seen = attended[queries]
            error[queries] = torch.linalg.vector_norm(output - seen, dim=(2, 3))
            size[queries] = torch.linalg.vector_norm(seen, dim=(2, 3))
            if part.rows.start == 0 and self.first == 0:
                ahead = (weights[:, :, 0, self.past + 1 :].detach().abs() > 0).any()  # NaN says nothing of it
                self.ahead = ahead if part.examples.start == 0 or self.ahead is None else self.ahead | ahead
            yield part, weights, gated
            if advancing:
                self.advance(weights.shape[0] * weights.shape[2])
            del weights, gated  # before the next ones are made

    @cached_property
    def weights(self) -> Tensor:
        """Attention weights α, (B, H, Q, K), times the gate if there is one."""
        made = self.values.new_zeros(*self.call.query.shape[:3], self.call.key.shape[2])
        for part, _, gated in self.parts():
            made[part.examples, :, part.rows, part.keys] = gated.to(self.dtype)
        return made

    @cached_property
    def values(self) -> Tensor:
        """Value vectors of every query head, their bias included, (B, H, K, d)."""
        values = self.call.values_by_head.to(self.dtype)
        return values.clone() if values.is_inference() else values

    @cached_property
    def channels(self) -> int:
        """The number of heads that one of the model's became, more than one if a gate multiplies single channels."""
        return self.call.query.shape[1] // self.attention.query.shape[1]

    @cached_property
    def carry(self) -> Carry:
        """The steps from attention's output to the block's end, linear since the statistics of norms are frozen."""
        return self.block.carry(self.scope, self.dtype)

    @cached_property
    def scales(self) -> Scales:
        """1/σ of the norms in :attr:`carry` at each query."""
        return self.carry.scales(self.tensors.projected, self.tensors.total)

    @property
    def output(self) -> Tensor:
        """The block's output, (B, Q, D), the residual sum or the norm behind it."""
        return self.tensors.total if self.tensors.normed is None else self.tensors.normed

    @cached_property
    def stream(self) -> Tensor:
        """Contribution of the residual connection to the output, (B, Q, D); zeros at a scope before it."""
        if not self.carry.residual:
            return torch.zeros_like(self.tensors.residual)
        stream = self.carry.linear_final(self.tensors.residual)
        return stream if self.scales.final is None else stream * self.scales.final

    @cached_property
    def projection(self) -> Tensor:
        """Rows of the output projection by head, (H, d, D), through the norms in :attr:`carry` but for 1/σ."""
        return self.carry.linear(self._weight.unflatten(0, (self.call.query.shape[1], -1)))

    @cached_property
    def scaled_weights(self) -> Tensor:
        """Weights times 1/σ, (B, H, Q, K); times ``values`` and ``projection`` they give the vectors."""
        scale = self.scales.divide(torch.ones_like(self.output[..., :1]))
        return self.weights * scale.squeeze(-1)[:, None, :, None]

    def vectors(self) -> Tensor:
        """Contribution of each key to the block's output, (B, Q, K, D), the residual connection at the query's own.

        Forms all vectors at once: for short inputs. Cross-attention has no residual connection at any key.

        Raises:
            NotEnoughMemoryError: if they do not fit.
        """
        batch, _, queries, keys = self.weights.shape
        shape = (batch, queries, keys, self.output.shape[-1])
        # The sum over heads needs as many numbers once more.
        needed, free = 2 * prod(shape) * self.weights.element_size(), free_bytes(self.weights.device)
        if free is not None and needed > free:
            raise NotEnoughMemoryError(
                f"the vectors of a layer, {shape}, need {readable(needed)}, and {readable(free)} are free; pass "
                "shorter inputs, or work with scaled_weights, values and projection"
            )
        vectors = torch.einsum("bhqk,bhkd,hde->bqke", self.scaled_weights, self.values, self.projection)
        if not self.cross:
            own_keys(vectors.movedim(-1, 1)).add_(self.stream.transpose(1, 2))
        return vectors

    def own_vectors(self) -> Tensor:
        """Contribution of each query to itself, the residual connection included, (B, Q, D)."""
        weights = own_keys(self.scaled_weights).unsqueeze(-1)
        values = self.values[:, :, -weights.shape[2] :]
        return self.carry.linear((values * weights).transpose(1, 2).flatten(2) @ self._weight) + self.stream

    def error(self) -> Tensor:
        """Relative completeness error of the vectors, (B,), over real queries."""
        bias = self.block.projection.bias(self.dtype)
        projected = (self.weights @ self.values).transpose(1, 2).flatten(2) @ self._weight
        projected = projected if bias is None else projected + bias
        carried = self.carry.constant(self.tensors.projected, self.tensors.residual, self.scales)
        pairs = [(projected, self.tensors.projected), (carried, self.output)]
        errors = [relative_error(length(computed - actual), length(actual), self.real) for computed, actual in pairs]
        return torch.stack(errors).amax(0)

    @cached_property
    def _weight(self) -> Tensor:
        return self.block.projection.weight(self.dtype)


def _largest(error: Tensor, size: Tensor, real: Tensor | None) -> Tensor:
    """Return the largest relative difference of two attention outputs at real queries, from lengths (B, Q)."""
    # Relative to a query's own output, or to the mean of all if that is larger: values may cancel. Queries whose own
    # output is not finite, as where every key is masked, are left out; where only the other one is not, it is infinite.
    compared = size.isfinite() if real is None else size.isfinite() & real.to(size.device)
    mean = size.where(compared, 0).sum() / compared.sum().clamp(min=1)
    error = error / torch.maximum(size, mean).clamp(min=torch.finfo(size.dtype).tiny)
    return error.where(compared, 0).detach().nan_to_num(torch.inf).amax()


Recording = tuple[dict[Role, list[tuple[int, Result]]], bool]
"""The number and the result of each layer requested, by stack, and whether the one stack of a model only looked back.

The latter says nothing of an encoder–decoder model.
"""


def record(
    call: ModelCall,
    reduce: Callable[[Layer], Result],  # nothing else outlives a layer
    options: Options,
    blocks: Mapping[nn.Module, Block] | None = None,  # None if only attention weights are needed
    *,
    chosen: Callable[[Place], bool] | None = None,  # which layers to reduce; all if None
    feed_forward: bool = False,  # whether a layer ends with the feed-forward block behind it, whose tensors it has
    advance: Callable[[int], object] = no_bar,  # told how many queries have been treated
) -> Recording[Result]:
    """Run a model once, and reduce each of its attention layers, in order, as soon as its last tensor exists."""
    if call.last is not None and call.facts.decoder is None:
        seen(call)  # of the direction, the last queries say nothing
    recorder = _Recorder(call, reduce, options, blocks, chosen, feed_forward, advance)
    with call.attention_through(recorder.attention), hooked(list(recorder.hooks())):
        output = (call if call.last is None else call.with_few_outputs()).run()
    if WATCH.get() is not None:
        call.note(output)
    del output  # logits of all positions may be large
    return recorder.finished()


@dataclass(eq=False)
class _Recorder(Generic[Result]):
    model_call: ModelCall
    reduce: Callable[[Layer], Result]
    options: Options
    blocks: Mapping[nn.Module, Block] | None
    chosen: Callable[[Place], bool] | None
    feed_forward: bool
    advance: Callable[[int], object]

    def __post_init__(self) -> None:
        self.results: dict[Role, list[tuple[int, Result]]] = {}
        # Of each layer: where it is, its dtype, whether it looks ahead, and how its weights differ from the model's.
        self.checks: list[tuple[Place, nn.Module, torch.dtype, Tensor | None, tuple[Tensor, Tensor], Tensor | None]]
        self.checks = []
        # Of layers that have not ended: the tensors of the sites seen; the routing of a mixture of experts; and the
        # layer, from its attention call on, None if it was not chosen.
        self._tensors = {module: dict[Site[nn.Module], Tensor]() for module in self.blocks or ()}
        self._routings: dict[nn.Module, Routing | None] = {}
        self._layers: dict[nn.Module, Layer | None] = {}
        self._sites = {module: self._sites_of(block) for module, block in (self.blocks or {}).items()}
        self.stacks = self.model_call.stacks()
        self._thread = get_ident()

    def _sites_of(self, block: Block) -> frozenset[Site[nn.Module]]:
        behind = block.feed_forward if self.feed_forward else None
        return block.sites if behind is None else block.sites | behind.sites

    def hooks(self) -> Iterator[tuple[nn.Module, End, Hook]]:
        """Yield hooks that note the tensors of all blocks, and the routing of mixtures of experts."""
        for module, sites in self._sites.items():
            block = cast(Mapping[nn.Module, Block], self.blocks)[module]
            for site in sites:
                yield site.module, "before" if site.end == "input" else "after", partial(self._arrive, block, site)
            behind = block.feed_forward if self.feed_forward else None
            if behind is not None and behind.experts is not None:
                yield self._routing(module, behind.experts)

    def _routing(self, attention: nn.Module, experts: ExpertsReader) -> tuple[nn.Module, End, Hook]:
        def note(routing: Routing | None) -> None:
            self._routings[attention] = routing

        if experts.scorer is None:
            return experts.module, "arguments", lambda _, received: note(routing_of(received))
        return experts.scorer, "output", lambda _, scores: note(routing_of_scores(scores))

    def attention(self, call: AttentionCall) -> Tensor:
        """Note an attention call, whose output the model's own function makes."""
        place = self.stacks.enter(call)
        output, queries = call.output(), call.query.shape[2]
        if place.role == "cross" and (self.chosen is None or self.chosen(place)):
            self._refuse_merged(call)
        first = 0 if self.model_call.last is None or place.role not in ROWED else queries - self.model_call.last
        layer = None
        if self.chosen is None or self.chosen(place):
            noted = call.part(Part(rows=slice(first, queries))) if first else call
            made = None if call.own is None or call.own.weights is None else call.own.weights[:, :, first:]
            real = self.model_call.positions_of(place.role)[0].real
            attended = output[:, first:].detach() if not torch.is_grad_enabled() else output[:, first:]
            past = self.model_call.prefix.past if place.role in EXTENDED else 0
            layer = Layer(place, noted, attended, made, real, self.options, past, first, self.advance)
        if self.blocks is None:
            if layer is not None:
                self._note(layer, self.reduce(layer))
        elif call.module not in self._tensors:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} was not seen when the model's structure was read"
            )
        else:
            self._layers[call.module], tensors = layer, self._tensors[call.module]
            if layer is not None and first:
                block = self.blocks[call.module]
                tensors |= {site: _rows(block, layer, tensor).clone() for site, tensor in tensors.items()}
        return output

    def _refuse_merged(self, call: AttentionCall) -> None:
        """Refuse one softmax over a decoder's own positions and the encoder's, whose maps would be no stack's."""
        encoder, past = self.stacks.sizes.get("encoder"), self.model_call.prefix.past
        source = self.model_call.positions_of("cross")[1].length if encoder is None else encoder.queries
        if source and self.model_call.encoder is not None and call.key.shape[2] == past + call.query.shape[2] + source:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} attends to {source} positions of the encoder and to the decoder's own "
                'by one softmax, which are no separate stacks "decoder" and "cross"; explain the encoder alone, '
                'stacks=["encoder"], or the output with DecompX'
            )

    def _arrive(self, block: Block, site: Site[nn.Module], _module: nn.Module, *seen: Any) -> None:
        """Note the tensor of a site, from a module's arguments and, behind it, its output."""
        if get_ident() != self._thread or not OBSERVING.get():
            return
        tensors, behind = self._tensors[block.attention], block.feed_forward
        layer = self._layers.get(block.attention)
        value = seen if site.end == "input" else seen[-1]
        tensor = value if isinstance(value, Tensor) else first_tensor(value)
        if tensor is not None:
            overwritten = site in block.overwritten or (behind is not None and site in behind.overwritten)
            tensor = tensor.clone() if overwritten else tensor
            # In memory of their own, the rows kept do not keep the others.
            tensors[site] = _rows(block, layer, tensor).clone() if layer is not None and layer.first else tensor
        if len(tensors) == len(self._sites[block.attention]):
            self._tensors[block.attention] = {}
            self._layers.pop(block.attention, None)
            routing = self._routings.pop(block.attention, None)
            if layer is not None:
                parts = behind if self.feed_forward else None
                layer.block, layer.recorded = block, _block_tensors(block, layer, tensors, parts, routing)
                layer.dtype = torch.promote_types(self.options.accumulate, block.projection.dtype)
                if block.gated:
                    attended, received = layer.attended.flatten(2), layer.recorded.context
                    layer.call, layer.gate = fold_gate(layer.call, attended, received)
                    layer.attended = received.unflatten(2, (layer.call.value.shape[1], -1))
                self._note(layer, self.reduce(layer))

    def _note(self, layer: Layer, result: Result) -> None:
        self.results.setdefault(layer.place.role, []).append((layer.place.index, result))
        if layer.difference is not None:  # else nothing was made of its weights
            attention = layer.attention
            made = layer.place, attention.module, attention.value.dtype, layer.ahead, layer.difference, layer.real
            self.checks.append(made)

    def finished(self) -> Recording[Result]:
        """Return the results, once all layers were seen to their ends and their weights were the model's."""
        if not self.stacks.sizes:
            raise UnsupportedModelError(self.model_call.unseen)
        self._expect_layers()
        for module, layer in self._layers.items():
            if layer is not None:
                raise UnsupportedModelError(
                    f"the attention block of {type(module).__name__} was not seen to its end: some of its modules did "
                    "not run in this forward pass"
                )
        for place, module, _, ahead, _, _ in self.checks:
            if ahead is not None:
                self.stacks.note_direction(place, module, ahead=bool(ahead))
        for place, _, dtype, _, difference, real in self.checks:
            worst = _largest(*difference, real)
            accepted = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) ** 0.5  # half of the digits
            if worst > accepted:
                raise UnsupportedModelError(
                    f"the attention weights of {place} of {type(self.model_call.model).__name__} are not those of its "
                    f"own attention function: their outputs differ by {worst:.1e}, accepted {accepted:.0e} for "
                    f"{dtype}; weights can be explained that the model itself computes"
                    f"{self.model_call.facts.with_weights}"
                )
        directed = any(ahead is not None and place.role == "self" for place, _, _, ahead, _, _ in self.checks)
        one_stack = "self" in self.results and not directed
        causal = bool(seen(self.model_call).causal) if one_stack else self.stacks.causal
        return {role: sorted(layers, key=lambda one: one[0]) for role, layers in self.results.items()}, causal

    def _expect_layers(self) -> None:
        """Refuse stacks in which other layers attend than do over the first positions, so their numbers differ."""
        known, now = self.model_call.facts.excerpt.modules or {}, self.stacks.modules
        for role in known.keys() & now.keys():
            if known[role] != now[role]:
                changed = {seen() for seen in {*known[role]} ^ {*now[role]}} or {seen() for seen in now[role]}
                names = [f'"{name}"' for name, module in self.model_call.model.named_modules() if module in changed]
                raise UnsupportedModelError(
                    f"{type(self.model_call.model).__name__} attends {len(now[role])} times over these inputs and "
                    f"{len(known[role])} times over a few positions, which differs in {', '.join(names)}; layers "
                    "are told apart by their order, so explain inputs over which the same ones attend by softmax"
                )


def _block_tensors(
    block: Block,
    layer: Layer,
    tensors: Mapping[Site[nn.Module], Tensor],
    parts: FeedForwardBlock | None,
    routing: Routing | None,
) -> BlockTensors:
    def at(site: Site[nn.Module]) -> Tensor:
        """Reshape to (B, Q, D) what may have its first two axes merged or exchanged; what was cut has this shape."""
        return tensors[site] if layer.first else _rows(block, layer, tensors[site])

    normed = None if block.final_norm is None else at(block.final_norm.output)
    total, projected = at(block.total), at(block.projection.output)
    if block.minus is not None:
        total = total - at(block.minus).to(total.device)
    residual = at(block.residual)
    if block.residual_factor is not None:
        residual = multiplied(block.residual_factor, residual)
    behind = None
    if parts is not None:
        read, behind_normed = (None if norm is None else at(norm.output) for norm in (parts.norm, parts.final_norm))
        routing = routing and Routing(*(_rows(block, layer, table).flatten(0, 1) for table in routing))
        behind = FeedForwardTensors(at(parts.written), at(parts.total), read, behind_normed, routing)
    context = at(block.received) if block.gated else layer.attended.flatten(2)
    return BlockTensors(context, projected, residual, total, normed, behind)


def _rows(block: Block, layer: Layer, tensor: Tensor) -> Tensor:
    """Cut a tensor, whose first two axes may be merged or exchanged, to the queries that have rows, (B, rows, ·)."""
    batch, _, rows, _ = layer.call.query.shape
    queries = layer.first + rows
    if block.queries_first:
        shaped = tensor.reshape(queries, batch, -1).transpose(0, 1)
    else:
        shaped = tensor.reshape(batch, queries, -1)
    return shaped[:, layer.first :]


def rows_at_once(query: Tensor, row: int, budget: MemoryBudget) -> int:
    """Number of queries, of ``row`` attention weights each, to treat at a time: fast, and within the budget."""
    size = row * max(query.element_size(), ACCUMULATED_BYTES) * WORKING_COPIES
    fast = CHUNK_BYTES if query.device.type == "cpu" else ACCELERATOR_BYTES
    rows = max(CHUNK_ROWS, fast // (row * ACCUMULATED_BYTES))
    return max(1, budget.granted(query.device, rows * size) // size)


def parts_of(call: AttentionCall, budget: MemoryBudget, heads: int | None = None) -> Iterator[Part]:
    """Whole examples if they fit, else rows of single examples; with weights of as many heads."""
    batch, own_heads, queries, _ = call.query.shape
    fitting_rows = rows_at_once(call.query, (heads or own_heads) * call.key.shape[2], budget)
    examples, rows = max(1, fitting_rows // queries), ceil(queries / ceil(queries / fitting_rows))
    if (examples < batch or rows < queries) and not parts_are_independent(call):
        examples, rows = batch, queries
    for first in range(0, batch, examples):
        for start in range(0, queries, rows):
            yield Part(slice(first, first + examples), slice(start, min(start + rows, queries)))


def attended_keys(call: AttentionCall, part: Part, mask: Tensor | None) -> Part:
    """Leave out keys behind a part's last row's own if no row attends to them, by its mask, as under causal masks."""
    keys = call.key.shape[2]
    end = keys - call.query.shape[2] + part.rows.stop
    if mask is None or mask.shape[-1] != keys or call.cross or end >= keys:
        return part
    least = torch.finfo(mask.dtype).min
    # Where a row attends to nothing, a function may spread its weights over all keys.
    hidden = (mask[..., end:].amax() <= least) & (mask[..., :end].amax(-1).amin() > least)
    return part._replace(keys=slice(end)) if hidden else part


def parts_are_independent(call: AttentionCall) -> bool:
    """Whether attention over a part equals that part of attention over all, tried on a corner."""
    corner, examples = min(8, call.query.shape[2]), min(2, len(call.query))
    keys = slice(0, corner)
    whole, _ = call.part(Part(slice(0, examples), keys, keys)).run()
    part, _ = call.part(Part(slice(examples - 1, examples), slice(corner // 2, corner), keys)).run()
    expected = whole[-1:, corner // 2 :].detach().float()
    error, size = (float(length(tensor.flatten())) for tensor in (part.detach().float() - expected, expected))
    accepted = torch.finfo(part.dtype).eps ** 0.5
    return bool(error <= accepted * size)

"""One forward pass with every attention block's tensors handed to a reducer as soon as they exist.

Attention weights are produced for a few query rows at a time and reduced at once, so they are never held for a whole
long sequence; the other tensors of a block live until its last one has come. The model is left as it was.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError
from captum_norm.memory import MemoryBudget
from captum_norm.models.blocks import Block
from captum_norm.models.inputs import ModelCall
from captum_norm.models.layouts import Site
from captum_norm.models.library import EagerAttention
from captum_norm.models.seams import library_of, no_attention
from captum_norm.models.stacks import Place, Stacks
from captum_norm.models.tracing import evaluating, hooked

# Attention weights of this size stay in a processor's cache between their making and their reduction,
CHUNK_BYTES = 4 * 2**20
# but with fewer queries than this the products of a part wait for the keys to come from memory.
CHUNK_ROWS = 64
ACCUMULATED_BYTES = 4
# How many tensors as large as a part's weights its making and reduction need: scores, masked scores, softmax, ...
WORKING_COPIES = 8


@dataclass(frozen=True)
class BlockTensors:
    """The tensors of one block in one forward pass, each (B, Q, D).

    Attributes:
        projected: the output projection's output.
        residual: the residual stream before the block.
        total: their sum as the model computed it; without the feed-forward output in a parallel layer.
        normed: the final norm's output, or None where the block has none.
    """

    projected: Tensor
    residual: Tensor
    total: Tensor
    normed: Tensor | None

    def rows(self, rows: slice, dtype: torch.dtype) -> "BlockTensors":
        """The tensors at some query positions, in another dtype and on one device.

        Where two devices share a model, a layer receives its inputs on that of the layer before.
        """
        device = self.projected.device
        normed = None if self.normed is None else self.normed[:, rows].to(device, dtype)
        projected, residual, total = (t[:, rows].to(device, dtype) for t in (self.projected, self.residual, self.total))
        return BlockTensors(projected, residual, total, normed)


class Part(NamedTuple):
    """Some queries of some examples."""

    examples: slice
    rows: slice


class Reducer(Protocol):
    """What is made of one attention block while the forward pass goes through it."""

    def begin(self, values: Tensor, heads: int, queries: int, *, cross: bool) -> None:
        """Attention starts: values (B, H or fewer, K, d), the number of heads and of query positions.

        ``cross`` says that the keys are positions of another sequence than the queries.
        """
        ...

    def consume(self, weights: Tensor, part: Part) -> None:
        """The attention weights of a part, (examples, H, rows, K); every part comes once."""
        ...

    def finish(self, tensors: BlockTensors | None) -> None:
        """The block's tensors; None where blocks are not needed."""
        ...


ReducerFactory = Callable[[Place, Block | None], Reducer | None]


def record(
    call: ModelCall,
    make_reducer: ReducerFactory,
    blocks: Mapping[nn.Module, Block] | None,
    budget: MemoryBudget | None = None,
    chunk_bytes: int | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> bool:
    """Run a model once and reduce each of its attention blocks.

    Args:
        call: the model and its inputs.
        make_reducer: called with the layer's place, in the order of the forward pass, and its block; None for a layer
            that is not wanted.
        blocks: the model's blocks by attention module; None if only attention weights are needed.
        budget: how much memory the making and reduction of attention weights may take at a time.
        chunk_bytes: the size of attention weights that is made at a time for speed; if None, what stays in a CPU's
            cache, and on another device as much as the budget allows.
        advance: told how many queries have been treated since it was last called.

    Returns:
        whether the one stack of a model that is no encoder–decoder only looked back (a causal model).

    Raises:
        UnsupportedModelError: if no attention was seen, or queries and keys are different sequences where they should
            not be.
    """
    stacks = Stacks(call.model, several=call.positions.several)
    library = library_of(call.model)
    sizes = _PartSizes(budget or MemoryBudget(), chunk_bytes)
    recorder = _Recorder(make_reducer, blocks, sizes, advance, stacks, library.batch_axis)
    # The seam is held by one thread at a time, so the hooks inside it see one forward pass.
    seam = library.attention_through(call.model, recorder.attention)
    with seam, hooked(recorder.hooks()), evaluating(call.model):
        call.run()
    if not stacks.layers:
        raise UnsupportedModelError(no_attention(call.model))
    recorder.expect_nothing_open()
    return stacks.causal


@dataclass(frozen=True)
class _PartSizes:
    """How large the parts of the attention weights are; see :func:`record`."""

    budget: MemoryBudget
    chunk_bytes: int | None

    def rows(self, query: Tensor, row: int) -> int:
        """How many queries with ``row`` attention weights each are fast to treat together and fit the budget."""
        itemsize = max(query.element_size(), ACCUMULATED_BYTES)
        rows = self.budget.on(query.device) // (row * itemsize * WORKING_COPIES)
        if self.chunk_bytes is not None:
            rows = min(rows, self.chunk_bytes // (row * ACCUMULATED_BYTES))
        elif query.device.type == "cpu":
            rows = min(rows, max(CHUNK_ROWS, CHUNK_BYTES // (row * ACCUMULATED_BYTES)))
        return max(1, rows)


@dataclass
class _OpenBlock:
    """A block that the forward pass is in."""

    tensors: dict[Site, Tensor] = field(default_factory=dict)
    reducer: Reducer | None = None


class _Recorder:
    def __init__(
        self,
        make_reducer: ReducerFactory,
        blocks: Mapping[nn.Module, Block] | None,
        sizes: "_PartSizes",
        advance: Callable[[int], object],
        stacks: Stacks,
        batch_axis: Callable[[nn.Module], int],
    ) -> None:
        self._stacks = stacks
        self._batch_axis = batch_axis
        self._make_reducer = make_reducer
        self._blocks = blocks
        self._sizes = sizes
        self._advance = advance
        self._open = {module: _OpenBlock() for module in blocks or ()}

    def hooks(self) -> Iterator[Any]:
        """A hook at every site of every block."""
        for block in (self._blocks or {}).values():
            for site in _sites(block):
                try:
                    module = block.layer.get_submodule(site.module)
                except AttributeError:
                    raise UnsupportedModelError(f'the layer "{block.name}" has no "{site.module}" any more') from None
                yield module, site.end, partial(self._arrive, block, site)

    def attention(
        self,
        eager: EagerAttention,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        cross: bool,
        **options: Any,
    ) -> Tensor:
        """Stands in for the model's attention function."""
        block = self._block_of(module)
        reducer = self._make_reducer(self._stacks.begin(module, query, key, cross=cross), block)
        if reducer is not None:
            reducer.begin(value, query.shape[1], query.shape[2], cross=cross)
        # Heads come as strided views, which every part's product would copy anew.
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()

        def attend(part: Part, keys: slice = slice(None)) -> tuple[Tensor, Tensor]:
            def cut(option: Any) -> Any:
                return _cut(option, part, keys, (len(query), query.shape[2], key.shape[2]))

            heads = (tensor[part.examples] for tensor in (query[:, :, part.rows], key[:, :, keys], value[:, :, keys]))
            return eager(module, *heads, cut(mask), **{name: cut(option) for name, option in options.items()})

        outputs: list[Tensor] = []
        for part in self._parts(query, key, attend):
            output, weights = attend(part)
            if part.rows.start == 0:
                self._stacks.look(weights)
            if reducer is not None:
                reducer.consume(weights, part)
            outputs.append(output)
            self._advance(output.shape[0] * output.shape[1])
        self._stacks.end(module)
        if block is not None:
            self._open[module].reducer = reducer
        elif reducer is not None:
            reducer.finish(None)
        return _joined(outputs, len(query))

    def _block_of(self, module: nn.Module) -> Block | None:
        if self._blocks is None:
            return None
        if module not in self._blocks:
            raise UnsupportedModelError(f"{type(module).__name__} was not seen when the model's structure was read")
        return self._blocks[module]

    def expect_nothing_open(self) -> None:
        """Every block that began must have been finished by the tensors it waits for."""
        for module, opened in self._open.items():
            if opened.reducer is not None:
                raise UnsupportedModelError(
                    f"the attention block of {type(module).__name__} was not seen to its end: some of its modules did "
                    "not run in this forward pass"
                )

    def _parts(self, query: Tensor, key: Tensor, attend: Callable[..., tuple[Tensor, Tensor]]) -> Iterator[Part]:
        """Whole examples as far as they fit, else rows of single examples."""
        batch, heads, queries, _ = query.shape
        fitting_rows = self._sizes.rows(query, heads * key.shape[2])
        examples, rows = max(1, fitting_rows // queries), ceil(queries / ceil(queries / fitting_rows))
        if (examples < batch or rows < queries) and not _parts_are_independent(attend, batch, queries):
            examples, rows = batch, queries
        for first in range(0, batch, examples):
            for start in range(0, queries, rows):
                yield Part(slice(first, first + examples), slice(start, min(start + rows, queries)))

    def _arrive(self, block: Block, site: Site, _module: nn.Module, tensor: Tensor | None) -> None:
        opened = self._open[block.attention]
        if tensor is not None:
            opened.tensors[site] = tensor
        if opened.tensors.keys() >= _sites(block):
            self._open[block.attention] = _OpenBlock()
            if opened.reducer is not None:
                batch_axis = self._batch_axis(block.attention)
                opened.reducer.finish(_block_tensors(block, opened.tensors, batch_axis))


def _sites(block: Block) -> set[Site]:
    layout = block.layout
    sites = {Site(layout.projection, "output"), layout.residual, layout.total}
    if layout.minus is not None:
        sites.add(layout.minus)
    if layout.final_norm is not None:
        sites.add(Site(layout.final_norm, "output"))
    return sites


def _block_tensors(block: Block, tensors: Mapping[Site, Tensor], batch_axis: int) -> BlockTensors:
    layout, shape = block.layout, tensors[block.layout.residual].shape

    def at(site: Site) -> Tensor:
        return tensors[site].reshape(shape).transpose(0, batch_axis)

    total = at(layout.total)
    if layout.minus is not None:
        total = total - at(layout.minus).to(total.device)
    normed = None if layout.final_norm is None else at(Site(layout.final_norm, "output"))
    return BlockTensors(at(Site(layout.projection, "output")), at(layout.residual), total, normed)


def _joined(outputs: list[Tensor], batch: int) -> Tensor:
    """The attention output of all parts, (B, Q, H, d)."""
    if len(outputs) == 1:
        return outputs[0]
    per_example = len(outputs) // batch
    if per_example > 1:
        outputs = [torch.cat(outputs[at : at + per_example], dim=1) for at in range(0, len(outputs), per_example)]
    return torch.cat(outputs)


def _cut(option: Any, part: Part, keys: slice, shape: tuple[int, int, int]) -> Any:
    """The part of a mask or bias over ([B, H,] Q, K) for some examples, queries and keys; anything else as it is."""
    if not isinstance(option, Tensor) or option.dim() < 3 or option.shape[-1] != shape[2]:
        return option
    if option.dim() == 4 and option.shape[0] == shape[0] > 1:
        option = option[part.examples]
    if option.shape[-2] == 1:
        return option[..., keys]
    return option[..., part.rows, keys] if option.shape[-2] == shape[1] else option


def _parts_are_independent(attend: Callable[..., tuple[Tensor, Tensor]], batch: int, queries: int) -> bool:
    """Whether single examples and rows get what they get among all; seen on a corner of the attention."""
    corner, examples = min(8, queries), min(2, batch)
    whole, _ = attend(Part(slice(0, examples), slice(0, corner)), slice(0, corner))
    part, _ = attend(Part(slice(examples - 1, examples), slice(corner // 2, corner)), slice(0, corner))
    expected = whole[-1:, corner // 2 :].float()
    return bool((part.float() - expected).norm() <= torch.finfo(part.dtype).eps ** 0.5 * expected.norm())

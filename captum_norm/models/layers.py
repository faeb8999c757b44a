"""Finds a model's layers, sees its stacks of them on a few positions, and the first that mixes positions otherwise.

A layer is attention with its feed-forward network. Only where layers mix positions by attention alone may attention
maps be chained.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.models.attention import AttentionCall
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import (
    End,
    Hook,
    Received,
    evaluating,
    first_argument,
    first_tensor,
    hooked,
    with_argument,
)
from captum_norm.models.precision import epsilon_of, least_precise
from captum_norm.models.probes import drawn
from captum_norm.models.stacks import Sizes, Stacks

Result = TypeVar("Result")
EXCERPT = 16
"""Number of positions that suffice to find a model's structure."""


def layer_of(
    model: nn.Module, attention: Iterable[nn.Module], cross: Collection[nn.Module] = ()
) -> dict[nn.Module, nn.Module]:
    """Map each attention module to its layer: the largest element of a module list without another attention module.

    Modules in ``cross`` read another sequence; beside them, a layer may attend to its own.
    """
    modules = set(attention)
    kinds = modules.intersection(cross), modules.difference(cross)
    names = {module: name for name, module in model.named_modules() if module in modules}
    return {module: _layer(model, name, kinds) for module, name in names.items()}


def _layer(model: nn.Module, name: str, kinds: Iterable[set[nn.Module]]) -> nn.Module:
    path = name.split(".")
    for length in range(1, len(path) + 1):
        parent = model.get_submodule(".".join(path[: length - 1]))
        if not isinstance(parent, (nn.ModuleList, nn.Sequential)):
            continue
        layer = model.get_submodule(".".join(path[:length]))
        if all(len(kind.intersection(layer.modules())) <= 1 for kind in kinds):
            return layer
    raise UnsupportedModelError(
        f'found no layer around the attention module "{name}" of {type(model).__name__}; expected an element of a '
        "ModuleList with one attention module"
    )


def not_run(model: nn.Module, layers: Iterable[nn.Module]) -> UnsupportedModelError:
    """Make the error for layers whose forward functions did not run, such as lists of their parts."""
    kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
    return UnsupportedModelError(
        f"the layers of {type(model).__name__} around attention ({kinds}) are not called as modules, so what enters "
        "and leaves them is unknown; expected modules with a forward function, with attention and feed-forward network "
        "inside"
    )


def verify(call: ModelCall) -> None:
    """Note the sizes of a model's stacks, their direction, and a layer that mixes positions otherwise."""
    # A single position attends only to itself.
    if call.positions.several:
        stacks = on_excerpt(call, _expect_same_output)
        layer = on_excerpt(call, lambda excerpt: mixing_layer(excerpt, stacks.queries))
        names = {module: name for name, module in call.model.named_modules()}
        call.facts.excerpt.mixing = None if layer is None else f'"{names[layer]}" ({type(layer).__name__})'
        # Without its inputs, a tower has not been seen.
        call.facts.excerpt.sizes, call.facts.excerpt.causal = stacks.sizes or None, stacks.causal


def on_excerpt(call: ModelCall, work: Callable[[ModelCall], Result]) -> Result:
    """Apply a function to an excerpt of a call, or to the whole call if an argument does not fit the excerpt."""
    try:
        return work(call.excerpt(EXCERPT))
    except InvalidInputError:
        return work(call)


def stack_sizes(call: ModelCall) -> Sizes:
    """Return the sizes of a model's stacks of layers on an excerpt of these inputs, or of earlier ones."""
    known = call.facts.excerpt.sizes
    return on_excerpt(call, seen_stacks)[0].sizes if known is None else known


def seen_stacks(call: ModelCall) -> tuple[Stacks, Any]:
    """Run a call; return the stacks of layers that it went through, and its output."""
    stacks = call.stacks()

    def attend(attention: AttentionCall) -> Tensor:
        stacks.attend(attention)
        return attention.output()

    with torch.no_grad(), call.attention_through(attend):
        return stacks, call.run()


def _expect_same_output(call: ModelCall) -> Stacks:
    """See a model's stacks; refuse a model that computes something else while observed, as by fused operations."""
    devices = {parameter.device for parameter in call.model.parameters() if parameter.device.type == "cuda"}
    # A model may draw random numbers, such as which patches it sees.
    with torch.random.fork_rng(devices):
        stacks, output = seen_stacks(call)
    with torch.random.fork_rng(devices), torch.no_grad(), evaluating(call.model):
        again = call.run()
    observed, plain = (_real(first_tensor(returned), call) for returned in (output, again))
    if observed is None or plain is None or observed.shape != plain.shape:
        return stacks
    error, size = (difference.float().norm() for difference in (observed - plain, plain))
    accepted = epsilon_of(least_precise(torch.float32, plain.dtype)) ** 0.5  # half of the digits
    if error > accepted * size:
        raise UnsupportedModelError(
            f"{type(call.model).__name__} computes something else by itself than while it is observed: relative "
            f"difference {float(error / size):.1e}, accepted {accepted:.0e} for {plain.dtype}; to explain it, run it "
            f"in the same way{call.library.with_weights}"
        )
    return stacks


def _real(output: Tensor | None, call: ModelCall) -> Tensor | None:
    """Return the output at real positions, or all of it if it has no axis of positions."""
    for positions in (call.decoder, call.positions_of("self")[0]):
        for real in () if positions.real is None or output is None else (positions.real, positions.real.T):
            if output is not None and output.shape[:2] == real.shape and output.dim() > 2:
                return output[real.to(output.device)]
    return output


def mixing_layer(call: ModelCall, queries: Mapping[nn.Module, int]) -> nn.Module | None:
    """Return the first layer in which positions depend on each other by more than attention weights; None if none does.

    One forward pass of a short call, and one backward pass through each layer, in which every position attends only to
    its own value. Gradients between positions are then exactly 0 unless something else mixes them: a state-space model,
    linear attention, a convolution. If a layer has no gradient, or the gradient overflows, the layer runs twice more,
    the second time with other vectors at the other positions. ``queries`` has the numbers of queries by module.
    """
    watch = _LayerGradients(_layers(call.model, queries))
    attending = call.attention_through(watch.attend)
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        attending,
        hooked(watch.hooks()),
        warnings.catch_warnings(),
    ):
        # Quantised maps without a gradient warn; without one, a layer is run instead.
        warnings.simplefilter("ignore")
        try:
            call.outside_inference().run()
            watch.end()
        except InvalidInputError:
            return None  # some of the model's code has no gradient
    return watch.mixing


def _layers(model: nn.Module, queries: Mapping[nn.Module, int]) -> list[dict[nn.Module, int]]:
    """Return the layers of the lists that hold attention, and their numbers of positions, by level, innermost first."""
    levels: list[dict[nn.Module, int]] = []
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if module in queries:
            path = name.split(".")
            around = (modules[".".join(path[:length])] for length in reversed(range(len(path))))
            lists = [parent for parent in around if isinstance(parent, (nn.ModuleList, nn.Sequential))]
            levels += [{} for _ in lists[len(levels) :]]
            for level, held in zip(levels, lists, strict=False):
                level.update(dict.fromkeys(held, queries[module]))
    return levels


class _LayerGradients:
    """Computes the gradient between each layer's input and the next one's, or its output, by level of lists."""

    def __init__(self, levels: list[dict[nn.Module, int]]) -> None:
        self.mixing: nn.Module | None = None
        self._levels = levels
        self._entered: dict[int, tuple[nn.Module, Tensor, Received]] = {}
        self._outputs: dict[int, Tensor | None] = {}
        self._alone = False

    def hooks(self) -> Iterator[tuple[nn.Module, End, Hook]]:
        """Yield hooks that watch the layers."""
        for level, layers in enumerate(self._levels):
            for layer in layers:
                yield layer, "arguments", partial(self._enter, level)
                yield layer, "output", partial(self._leave, level)

    def attend(self, call: AttentionCall) -> Tensor:
        """Return attention's output, with a gradient to each query's own value only; in later runs, just that value."""
        heads, queries = call.query.shape[1:3]
        values = call.value.repeat_interleave(heads // call.value.shape[1], dim=1).transpose(1, 2)
        if self._alone and not call.cross:
            return values[:, -queries:]  # a cache may hold those of the first run before them
        with torch.no_grad():
            output, _ = call.run()
        return output if call.cross or values.shape != output.shape else output + (values - values.detach())

    def _enter(self, level: int, layer: nn.Module, received: Received) -> Received | None:
        stream = first_argument(*received)
        if stream is None or self._alone:
            return None
        self._look(level, stream)
        # If no parameter requires a gradient, the graph begins here.
        start = stream if stream.requires_grad else stream.detach().requires_grad_()
        # The layer may change its input in place.
        self._entered[level] = layer, start, with_argument(*received, stream, start)
        return with_argument(*received, stream, start.clone())

    def _leave(self, level: int, _layer: nn.Module, output: Tensor | None) -> None:
        if not self._alone:
            self._outputs[level] = output

    def end(self) -> None:
        """Look at the last layers' outputs when the model has run."""
        for level, output in self._outputs.items():
            if output is not None:
                self._look(level, output)

    def _look(self, level: int, reached: Tensor) -> None:
        """Test whether the last position of ``reached`` depends on another position of the layer before."""
        entered = self._entered.pop(level, None)
        if entered is None or self.mixing is not None:
            return
        layer, stream, received = entered
        positions = self._levels[level][layer]
        start, end = _axis(stream, positions), _axis(reached, positions)
        if start is None or end is None or positions < 2:
            return
        others = None
        if reached.requires_grad:
            last = reached.select(end, -1)
            number = (last * drawn(last, last.shape)[0]).sum()
            gradient = _gradient(number, stream)
            others = None if gradient is None else gradient.narrow(start, 0, positions - 1)
        # An overflow tells nothing: zero times infinity shows no dependence.
        if others is None or not others.isfinite().all():
            mixes = self._changes(layer, positions, stream, received)
        else:
            mixes = bool(others.any())
        if mixes:
            self.mixing = layer

    def _changes(self, layer: nn.Module, positions: int, stream: Tensor, received: Received) -> bool:
        """Whether a layer's output at the last position changes with its input at the others."""
        changed = stream.detach().clone()
        others = changed.narrow(_axis(stream, positions) or 0, 0, positions - 1)
        others += others.abs().mean() * drawn(others, others.shape)[0]
        self._alone = True
        try:
            with torch.no_grad():
                calls = (with_argument(*received, stream, value) for value in (stream.clone(), changed))
                first, second = (first_tensor(layer(*args, **kwargs)) for args, kwargs in calls)
        finally:
            self._alone = False
        end = None if first is None else _axis(first, positions)
        if first is None or second is None or end is None:
            return False
        before, after = (output.select(end, -1).double() for output in (first, second))
        # Experts may round in another order when other positions are routed to them.
        return bool((after - before).norm() > 8 * torch.finfo(first.dtype).eps * before.norm())


def _axis(tensor: Tensor, positions: int) -> int | None:
    """Return the axis of the positions in a stream of one example; None if it has none."""
    axes = [tensor.dim() - 2, *range(tensor.dim() - 2)]
    return next((axis for axis in axes if tensor.shape[axis] == positions), None)


def _gradient(number: Tensor, stream: Tensor) -> Tensor | None:
    """Gradient of a number, None if a layer of integers passes none on or its backward function fails."""
    try:
        (gradient,) = torch.autograd.grad(number, stream, retain_graph=True, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None
    return gradient

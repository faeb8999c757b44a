"""Finds the layers (attention and feed-forward network) of a model, and the first that mixes positions otherwise.

Only where layers mix positions by attention alone may attention maps be chained.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.models.attention import AttentionCall
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import End, Hook, Received, first_argument, first_tensor, hooked, with_argument
from captum_norm.models.probes import drawn


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

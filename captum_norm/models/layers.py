"""Finds a model's layers, sees its stacks of them on a few positions, and the first that mixes positions otherwise.

A layer is attention with its feed-forward network. Only where layers mix positions by attention alone may attention
maps be chained.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.models import hooks
from captum_norm.models.attention import AttentionCall
from captum_norm.models.call import ModelCall
from captum_norm.models.model import Excerpt
from captum_norm.models.precision import epsilon_of, least_precise
from captum_norm.models.probes import drawn
from captum_norm.models.stacks import Stacks

Result = TypeVar("Result")
EXCERPT = 16  # number of positions that suffice to find a model's structure
LISTS = (nn.ModuleList, nn.Sequential)


class _NoGradientError(Exception):
    """A layer passes no gradient on, or one that overflows."""


def layer_of(
    model: nn.Module, attention: Iterable[nn.Module], cross: Collection[nn.Module] = ()
) -> dict[nn.Module, nn.Module]:
    """Map attention modules to layers: the largest elements of module lists with one, or a ``cross`` one beside it."""
    modules = set(attention)
    kinds = modules.intersection(cross), modules.difference(cross)
    names = {module: name for name, module in model.named_modules() if module in modules}
    return {module: _layer(model, name, kinds) for module, name in names.items()}


def _layer(model: nn.Module, name: str, kinds: Iterable[set[nn.Module]]) -> nn.Module:
    path = name.split(".")
    for length in range(1, len(path) + 1):
        parent = model.get_submodule(".".join(path[: length - 1]))
        if not isinstance(parent, LISTS):
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
        "and leaves is unknown; expected modules with a forward function, and attention and feed-forward network inside"
    )


def on_excerpt(call: ModelCall, work: Callable[[ModelCall], Result]) -> Result:
    """Apply a function to an excerpt of a call, or to the whole call if an argument does not fit the excerpt."""
    call = replace(call, seen={})  # what the call's own pass shows stays
    with hooks.unchanged(call.model), hooks.unchanged(call.model):  # of two, one survives an interrupt on its way out
        try:
            return work(call.excerpt(EXCERPT))
        except InvalidInputError:
            return work(call)


def seen(call: ModelCall) -> Excerpt:
    """Return what a forward pass over an excerpt of a call shows of its model, or what an earlier one has shown."""
    known = call.facts.excerpt
    if known.sizes is not None:
        return known
    stacks, output, layer = on_excerpt(call, _watched)
    names = {module: name for name, module in call.model.named_modules()}
    # A single position attends only to itself.
    excerpt = known if call.positions.several else Excerpt(known.state)
    # Without its inputs, a tower has not been seen.
    excerpt.sizes, excerpt.modules, excerpt.causal = stacks.sizes or None, stacks.modules, stacks.causal
    excerpt.headless = isinstance(output, Mapping) and "logits" not in output
    excerpt.longest = EXCERPT
    excerpt.mixing = None if layer is None else f'"{names[layer]}" ({type(layer).__name__})'
    return excerpt


def _watched(call: ModelCall) -> tuple[Stacks, Any, nn.Module | None]:
    """Return a short call's stacks, output, and first layer that mixes positions by more than attention weights."""
    devices = {parameter.device for parameter in call.model.parameters() if parameter.device.type == "cuda"}
    # A model may draw random numbers, such as which patches it sees.
    with torch.random.fork_rng(devices):
        try:
            stacks, output, layer = _with_gradients(call)
        except (InvalidInputError, _NoGradientError):  # some of the model's code, or a layer, has no gradient
            (stacks, output), layer = _without_gradients(call), None
            with suppress(InvalidInputError):
                layer = _mixing_by_others(call, _layers(call.model, stacks.queries), exact=True)
    if call.facts.intercepted:
        with torch.random.fork_rng(devices), torch.no_grad(), hooks.evaluating(call.model):
            plain = call.run()
        _expect_same(call, *(_real(hooks.first_tensor(returned), call) for returned in (output, plain)))
    return stacks, output, layer


def see_at_length(call: ModelCall) -> None:
    """See whether layers mix positions otherwise over more positions than those of :func:`seen` and of calls before."""
    known, length = call.facts.excerpt, max(call.positions.length or 0, call.decoder.length or 0)
    if length <= known.longest or known.mixing is not None or known.modules is None:
        return
    known.longest = length
    attending = {module: 0 for stack in known.modules.values() for seen in stack if (module := seen()) is not None}
    layers = _layers(call.model, attending)
    try:
        mixing = _mixing_by_others(call.example(0), layers)
        if mixing is None or on_excerpt(call, partial(_mixing_by_others, layers=layers)) is not None:
            return  # as few positions show it, too, which gradients excluded, it is rounding
    except InvalidInputError:
        return
    name = next(name for name, module in call.model.named_modules() if module is mixing)
    known.mixing = f'"{name}" ({type(mixing).__name__}) over {length} positions'


def _mixing_by_others(call: ModelCall, layers: Collection[nn.Module], *, exact: bool = False) -> nn.Module | None:
    """Return the first layer around which, or attention before which, two positions depend on others."""
    # Attention gives each query its own value. A second run begins with other vectors at the other positions; at each
    # step the two, the second position and the last, are those of the first run again.
    noted: list[tuple[nn.Module, Tensor]] = []
    again: Iterator[tuple[nn.Module, Tensor]] | None = None
    encoder, noise, mixing = frozenset(call.encoder.modules() if call.encoder else ()), {True: 1.0, False: 1.0}, []

    def attend(attention: AttentionCall) -> Tensor:
        values = attention.values_by_head.transpose(1, 2)
        if attention.cross:
            return values.new_zeros(len(values), attention.query.shape[2], *values.shape[2:])
        own = values[:, -attention.query.shape[2] :].flatten(2)
        changed = reach(attention.module, own)
        return (own if changed is None else changed).reshape(own.shape[:2] + values.shape[2:])

    def reach(module: nn.Module, stream: Tensor | None) -> Tensor | None:
        """Note a stream at the two positions, or compare it and return it with what was noted there."""
        if stream is None or stream.dim() != 3 or max(stream.shape[:2]) < 2:
            return None
        axis = int(stream.shape[1] >= stream.shape[0])
        places = torch.tensor(sorted({1, stream.shape[axis] - 1}), device=stream.device)
        reached = stream.index_select(axis, places)
        if again is None:
            noted.append((module, reached))
            return None
        before, expected = next(again, (module, reached))
        # Experts round in another order when other positions are routed to them; over many, half of the digits hold.
        accepted = 8 * epsilon_of(stream.dtype) if exact else epsilon_of(stream.dtype) ** 0.5
        if before is not module or (reached - expected).norm() > accepted * expected.norm():
            mixing.append(module)
        # Once is enough in either half of a model: all that follows differs, too.
        factor = noise.pop(module in encoder, 0.0)
        stream = stream + factor * stream.abs().mean() * drawn(stream, stream.shape)[0]
        return stream.index_copy(axis, places, expected)

    def enter(module: nn.Module, received: hooks.Received) -> hooks.Received | None:
        stream = hooks.first_argument(*received)
        changed = reach(module, stream)
        return None if stream is None or changed is None else hooks.with_argument(*received, stream, changed)

    def leave(module: nn.Module, output: Tensor | None) -> None:
        reach(module, output)

    ends: tuple[tuple[hooks.End, hooks.Hook], ...] = (("arguments", enter), ("output", leave))
    devices = {parameter.device for parameter in call.model.parameters() if parameter.device.type == "cuda"}
    with (
        torch.no_grad(),
        call.attention_through(attend),
        hooks.hooked((layer, *end) for layer in layers for end in ends),
    ):
        for _ in range(2):
            with torch.random.fork_rng(devices):
                call.run()
            again = iter(noted)
    return next(iter(mixing), None)


def _without_gradients(call: ModelCall) -> tuple[Stacks, Any]:
    """Return a call's stacks and its output."""
    stacks = call.stacks()

    def attend(attention: AttentionCall) -> Tensor:
        stacks.attend(attention)
        return attention.output()

    with torch.no_grad(), call.attention_through(attend):
        return stacks, call.run()


def _with_gradients(call: ModelCall) -> tuple[Stacks, Any, nn.Module | None]:
    """Return a call's stacks, its output, and the first layer that mixes positions by more than attention weights."""
    # One forward pass, and one backward pass through each layer, in which every position attends only to its own value.
    # Gradients between positions are then exactly 0 unless something else mixes them: a state-space model, linear
    # attention, a convolution.
    stacks, entered, outputs = call.stacks(), list[tuple[nn.Module, Tensor, Tensor]](), dict[nn.Module, Tensor]()

    def attend(attention: AttentionCall) -> Tensor:
        """Return attention's output, with a gradient to each query's own value only."""
        values = attention.values_by_head.transpose(1, 2)
        with torch.no_grad():
            stacks.attend(attention)
            output = attention.output()
        return output if attention.cross or values.shape != output.shape else output + (values - values.detach())

    def enter(module: nn.Module, received: hooks.Received) -> hooks.Received | None:
        stream = hooks.first_argument(*received)
        if stream is None:
            return None
        # If no parameter requires a gradient, the graph begins here.
        start = stream if stream.requires_grad else stream.detach().requires_grad_()
        # The model may change its tensors in place.
        entered.append((module, start, stream.clone()))
        return hooks.with_argument(*received, stream, start.clone())

    def leave(module: nn.Module, output: Tensor | None) -> None:
        if output is not None:
            outputs.pop(module, None)  # the last one stays last
            outputs[module] = output

    elements = {element for module in hooks.modules_of(call.model) if isinstance(module, LISTS) for element in module}
    watched: tuple[tuple[hooks.End, hooks.Hook], ...] = (("arguments", enter), ("output", leave))
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        call.attention_through(attend),
        hooks.hooked((element, *end) for element in elements for end in watched),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of quantised maps without a gradient
        output = call.outside_inference().run()
        for layers in _levels(call.model, stacks.queries):
            path = [entry for entry in entered if entry[0] in layers]
            last = [reached for module, reached in outputs.items() if module in layers]
            ends = [*(stream for _, _, stream in path[1:]), *last[-1:]]
            for (layer, start, _), end in zip(path, ends, strict=False):
                if _mixes(start, end, layers[layer]):
                    return stacks, output, layer
        return stacks, output, None


def _expect_same(call: ModelCall, observed: Tensor | None, plain: Tensor | None) -> None:
    """Refuse a model that computes something else while its attention is intercepted, as by fused operations."""
    if observed is None or plain is None or observed.shape != plain.shape:
        return
    error, size = (difference.float().norm() for difference in (observed - plain, plain))
    accepted = epsilon_of(least_precise(torch.float32, plain.dtype)) ** 0.5  # half of the digits
    if error > accepted * size:
        raise UnsupportedModelError(
            f"{type(call.model).__name__} computes something else by itself than while it is observed: relative "
            f"difference {float(error / size):.1e}, accepted {accepted:.0e} for {plain.dtype}; a "
            f"model can be explained whose own code computes softmax and products{call.facts.with_weights}"
        )


def _real(output: Tensor | None, call: ModelCall) -> Tensor | None:
    """Return the output at real positions, or all of it if it has no axis of positions."""
    for positions in (call.decoder, call.positions_of("self")[0]):
        for real in () if positions.real is None or output is None else (positions.real, positions.real.T):
            if output is not None and output.shape[:2] == real.shape and output.dim() > 2:
                return output.detach()[real.to(output.device)]
    return output


def _layers(model: nn.Module, attending: Mapping[nn.Module, int]) -> set[nn.Module]:
    return {layer for level in _levels(model, attending) for layer in level}


def _levels(model: nn.Module, queries: Mapping[nn.Module, int]) -> list[dict[nn.Module, int]]:
    """Return the layers of the lists that hold attention, and their numbers of positions, by level, innermost first."""
    levels: list[dict[nn.Module, int]] = []
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if module in queries:
            path = name.split(".")
            around = (modules[".".join(path[:length])] for length in reversed(range(len(path))))
            lists = [parent for parent in around if isinstance(parent, LISTS)]
            levels += [{} for _ in lists[len(levels) :]]
            for level, held in zip(levels, lists, strict=False):
                level.update(dict.fromkeys(held, queries[module]))
    return levels


def _mixes(start: Tensor, end: Tensor, positions: int) -> bool:
    """Whether the last position of ``end`` depends on another position of ``start``."""
    begins, ends = (_axis(stream, positions) for stream in (start, end))
    if begins is None or ends is None or positions < 2:
        return False
    last = end.select(ends, -1)
    number = (last * drawn(last, last.shape)[0]).sum()
    try:
        gradients: Any = torch.autograd.grad(number, start, retain_graph=True, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise _NoGradientError from error
    (gradient,) = gradients
    # An overflow tells nothing: zero times infinity shows no dependence.
    if gradient is None or not (others := gradient.narrow(begins, 0, positions - 1)).isfinite().all():
        raise _NoGradientError
    return bool(others.any())


def _axis(tensor: Tensor, positions: int) -> int | None:
    """Return the axis of the positions in a stream of one example; None if it has none."""
    axes = [tensor.dim() - 2, *range(tensor.dim() - 2)]
    return next((axis for axis in axes if tensor.shape[axis] == positions), None)

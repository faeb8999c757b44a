"""Runs a model once with its attention weights, statistics of norms and slopes of activations as constants.

Linear maps, residual connections, pooling and selection are left to the model's own code. What is not linear in it is
exchanged on the way: attention at the library's seam, norms, activations, routers and experts at the modules that
compute them, and activations and products with them that are functions in the model's code as these functions are
called.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from captum_norm.errors import NonFiniteError
from captum_norm.functional import Elementwise, Normalization, Use
from captum_norm.models.attention import AttentionCall
from captum_norm.models.blocks import Block
from captum_norm.models.feed_forward import ExpertsReader
from captum_norm.models.hooks import Hook, first_argument, first_tensor, with_argument
from captum_norm.models.inputs import ModelCall
from captum_norm.models.layers import layer_of
from captum_norm.models.projections import NormReader, Projection, accumulation_dtype
from captum_norm.models.search.experts import ExpertsCall, routers_beside, routing_of, stacked_maps
from captum_norm.models.steps import ActivationReader, Step, read_step
from captum_norm.models.threads import here

# Activations that model files call as functions.
ACTIVATIONS = frozenset(
    {
        *(torch.tanh, torch.Tensor.tanh, torch.sigmoid, torch.Tensor.sigmoid, torch.relu, torch.Tensor.relu),
        *(F.relu, F.gelu, F.silu, F.softplus, F.leaky_relu, F.elu, F.mish, F.hardtanh, F.hardswish),
    }
)
PRODUCTS = frozenset({torch.mul, torch.Tensor.mul})


class FrozenNetwork(Protocol):
    """What takes the place of the steps that are not linear, from the first layer's input on.

    Tensors are the model's own; each result has the shape and the dtype of what it stands for.
    """

    def attention(self, call: AttentionCall) -> Tensor:
        """What takes the place of attention at the library's seam."""
        ...

    def enter(self, stream: Tensor) -> Tensor:
        """The first layer's input."""
        ...

    def leave(self, stream: Tensor) -> None:
        """A layer's output."""
        ...

    @property
    def copies(self) -> int:
        """How many times the model's positions go through it, one copy of all behind the other."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that the model would have computed."""
        ...

    def given(self, tensor: Tensor) -> Tensor:
        """A tensor taken as given: a router's choice and weights, a gate of a whole position."""
        ...

    def carries(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the first layer's input."""
        ...

    def norm(self, norm: Normalization, inputs: Tensor, output: Tensor) -> Tensor:
        """A normalisation."""
        ...

    def affine(self, bias: Tensor, output: Tensor) -> Tensor:
        """A linear map's output with a bias in it."""
        ...

    def activation(self, function: Elementwise, inputs: Tensor, output: Tensor) -> Tensor:
        """g(z)."""
        ...

    def product(self, function: Elementwise, gate: Tensor, other: Tensor, output: Tensor) -> Tensor:
        """g(u) ⊙ w."""
        ...

    def experts(self, uses: Sequence[Use], inputs: Tensor, output: Tensor, rows: Tensor) -> Tensor:
        """Networks that each act on some positions of a copy, times coefficients, added up: (N, D) -> (N, D).

        ``rows`` (copies, R) says which rows are the R positions of each copy.
        """
        ...

    def begin_attention(self) -> None:
        """The first linear map of an attention module begins: that of its queries, keys or values."""
        ...

    def end_attention(self, output: Tensor) -> Tensor | None:
        """Attention's output, behind its projection; None leaves it."""
        ...


class Exchanges:
    """Where a model has steps that are not linear: found once, learnt as they run.

    Args:
        model: the model.
        blocks: its attention blocks by attention module; the first of the layers around them to run begins the frozen
            part.

    Attributes:
        blocks: the same.
        layers: the layers around them.
        routers: the modules that score the experts of a mixture.
        experts: the modules with stacked maps.
        leaves: all other modules without children.
        linear: the linear maps inside attention.
        steps: what modules compute, as far as they have run.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[nn.Module, Block]) -> None:
        modules = list(model.modules())
        self.blocks = blocks
        self.layers = set(layer_of(model, blocks).values())
        self.routers = {router for module in modules for router in routers_beside(module)}
        self.experts = [module for module in modules if module not in self.routers and stacked_maps(module)]
        exchanged = self.routers.union(self.experts)
        self.leaves = [module for module in modules if module not in exchanged and not list(module.children())]
        self.linear = [module for attention in blocks for module in attention.modules() if _is_linear(module)]
        self.steps: dict[nn.Module, Step] = {}


@contextmanager
def frozen(call: ModelCall, exchanges: Exchanges, network: FrozenNetwork) -> Iterator[None]:
    """While open, the model runs by ``network`` in this thread; it is left as it was."""
    watcher = _Watcher(exchanges, network)
    with call.attention_through(watcher.attention), watcher.hooked(), _Functions(watcher):
        yield


class _Watcher:
    def __init__(self, exchanges: Exchanges, network: FrozenNetwork) -> None:
        self._exchanges = exchanges
        self._steps = exchanges.steps
        self._network = network
        self._entered = False
        self._busy = False
        self._attention_begins = False
        self._paused: nn.Module | None = None
        # The latest activation, which the next product may gate something with: its output, function and input.
        self._latest: tuple[Tensor, Elementwise, Tensor] | None = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hooks on layers, attention's linear maps, routers and experts, and on the other modules without children."""
        known = self._exchanges
        projections = [block.projection.module for block in known.blocks.values()]
        with ExitStack() as stack:

            def before(modules: Iterable[nn.Module], hook: Hook) -> None:
                hook = here(hook)
                for module in modules:
                    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

            def behind(modules: Iterable[nn.Module], hook: Hook) -> None:
                hook = here(hook)
                for module in modules:
                    stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)

            before(known.layers, self._enter)
            behind(known.layers, self._leave)
            before(known.routers, self._pause)
            behind(known.routers, self._router)
            before(known.experts, self._begin_experts)
            behind(known.experts, self._experts)
            behind(known.leaves, self._module)
            before(known.blocks, self._expect_attention)
            before(known.linear, self._begin_attention)
            # Behind the hook that counts the projection's own bias.
            behind(projections, self._end_attention)
            yield

    def attention(self, call: AttentionCall) -> Tensor:
        with self._working():
            return self._network.attention(call)

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """A function of torch that the model's code calls, and what it gave."""
        if self._busy or not self._entered or not isinstance(output, Tensor):
            return output
        if func in PRODUCTS:
            return self._product(args, output)
        if func not in ACTIVATIONS or not isinstance(args[0], Tensor) or not self._network.carries(args[0]):
            return output
        inputs, rest = args[0], args[1:]
        return self._activation(lambda values: func(values, *rest, **kwargs), inputs, output)

    def _product(self, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if self._latest is None or len(args) != 2:
            return output
        active, function, gate = self._latest
        other = next((factor for factor in args if factor is not active), None)
        gates = any(factor is active for factor in args) and isinstance(other, Tensor)
        if not isinstance(other, Tensor) or not gates or not self._network.carries(other):
            return output
        with self._working():
            if other.shape == active.shape:
                return self._network.product(function, gate, other, output)
            # One number for a whole position, as in front of a shared expert, is a weight of what it multiplies.
            weighs = active.shape[-1] == 1 and other.shape[:-1] == active.shape[:-1]
            return self._network.given(active) * other if weighs else output

    def _activation(self, function: Elementwise, inputs: Tensor, output: Tensor) -> Tensor:
        with self._working():
            if inputs.isinf().any():
                raise NonFiniteError(
                    "an activation receives infinite numbers, to which no line from zero has a slope; check inputs, "
                    "or convert the model to a wider dtype"
                )
            active = self._network.activation(function, inputs, output)
        self._latest = (active, function, inputs)
        return active

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._entered:
            return None
        stream = first_argument(args, kwargs)
        if stream is None:
            return None
        self._entered = True
        return with_argument(args, kwargs, stream, self._network.enter(stream))

    def _leave(self, *seen: Any) -> None:
        stream = first_tensor(seen[-1])
        if stream is not None:
            self._network.leave(stream)

    def _expect_attention(self, *_: Any) -> None:
        self._attention_begins = self._watches()

    def _begin_attention(self, *_: Any) -> None:
        if self._attention_begins and self._watches():
            self._attention_begins = False
            self._network.begin_attention()

    def _end_attention(self, *seen: Any) -> Any:
        output = seen[-1]
        if not self._watches() or not isinstance(output, Tensor) or not self._network.carries(output):
            return None
        with self._working():
            return self._network.end_attention(output)

    def _watches(self) -> bool:
        return self._entered and not self._busy

    def _module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        inputs = first_argument(args, kwargs)
        if not self._watches() or inputs is None or not isinstance(output, Tensor) or not self._network.carries(output):
            return None
        step = self._step(module, inputs, output)
        if isinstance(step, ActivationReader):
            return self._activation(step, inputs, output)
        with self._working():
            if isinstance(step, NormReader):
                normed = self._network.norm(step.read(accumulation_dtype(output.dtype)), inputs, output)
                # As the module gave it, since a model may take views of it.
                return normed.contiguous() if output.is_contiguous() else normed
            bias = step.bias(accumulation_dtype(output.dtype)) if isinstance(step, Projection) else None
            return None if bias is None else self._network.affine(bias, output)

    def _begin_experts(self, module: nn.Module, *received: Any) -> None:
        # Where every head of attention has maps of its own they are stacked, too, but it reads sequences.
        stream = first_tensor(received)
        if routing_of(received) is not None or (stream is not None and stream.dim() == 2):
            self._pause(module)

    def _pause(self, module: nn.Module, *_: Any) -> None:
        """A router or experts begin, which are exchanged as a whole."""
        if self._watches():
            self._paused, self._busy = module, True

    def _resumes(self, module: nn.Module) -> bool:
        """Whether the module that ends is the one since whose beginning nothing was exchanged."""
        if self._paused is not module:
            return False
        self._paused, self._busy = None, False
        return True

    def _router(self, module: nn.Module, *seen: Any) -> Any:
        return self._given(seen[-1]) if self._resumes(module) else None

    def _given(self, output: Any) -> Any:
        if isinstance(output, Tensor):
            return self._network.given(output)
        return type(output)(map(self._given, output)) if type(output) in (tuple, list) else output

    def _experts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self._resumes(module) or not isinstance(output, Tensor) or not self._network.carries(output):
            return None
        with self._working():
            call = ExpertsCall.of(module, (args, kwargs), output, self._network.copies)
            reader = self._steps.get(module)
            if not isinstance(reader, ExpertsReader):
                reader = self._steps[module] = call.read()
            with torch.no_grad():
                uses = list(reader.uses(call.routing, accumulation_dtype(output.dtype)))
            return self._network.experts(uses, call.inputs, call.output, call.rows).reshape(output.shape)

    def _step(self, module: nn.Module, inputs: Tensor, output: Tensor) -> Step | None:
        step = self._steps.get(module)
        if step is None:
            with self._working(), torch.no_grad():
                step = read_step(module, self._network.whole(inputs), self._network.whole(output))
            if step is not None:
                self._steps[module] = step
        return step

    @contextmanager
    def _working(self) -> Iterator[None]:
        """While open, nothing is exchanged: what runs is ours."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2


class _Functions(TorchFunctionMode):
    """Hands the functions that the model's code calls to a watcher."""

    def __init__(self, watcher: _Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Here, so that what the model's own code asks too much of torch is known as that.
        return self._watcher.function(func, args, kwargs or {}, func(*args, **(kwargs or {})))

"""Runs a model with its attention weights, norm statistics and activation slopes frozen.

Linear maps, residual connections, pooling and indexing are left to the model's own code. Nonlinear steps are replaced
as they run: attention through its library's interface; norms, activations, routers and experts by hooks on their
modules; activations that the model calls as functions, and products with activations, when torch is called.
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
    """Replacements of nonlinear steps, from the first layer's input on.

    Tensors are the model's own; each result has the shape and the dtype of what it replaces.
    """

    def attention(self, call: AttentionCall) -> Tensor:
        """Replace attention, before the output projection."""
        ...

    def enter(self, stream: Tensor) -> Tensor:
        """Replace the first layer's input."""
        ...

    def leave(self, stream: Tensor) -> None:
        """Receive a layer's output."""
        ...

    @property
    def copies(self) -> int:
        """Number of copies of the model's positions, one after the other."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """Select the part of a tensor that the model would have computed."""
        ...

    def given(self, tensor: Tensor) -> Tensor:
        """Make a tensor constant: a router's choice and weights, a gate of a whole position."""
        ...

    def carries(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on the first layer's input."""
        ...

    def norm(self, norm: Normalization, inputs: Tensor, output: Tensor) -> Tensor:
        """Replace a normalisation."""
        ...

    def affine(self, bias: Tensor, output: Tensor) -> Tensor:
        """Replace the output of a linear map that has a bias."""
        ...

    def activation(self, function: Elementwise, inputs: Tensor, output: Tensor) -> Tensor:
        """Replace g(z)."""
        ...

    def product(self, function: Elementwise, gate: Tensor, other: Tensor, output: Tensor) -> Tensor:
        """Replace g(u) ⊙ w."""
        ...

    def experts(self, uses: Sequence[Use], inputs: Tensor, output: Tensor, rows: Tensor) -> Tensor:
        """Replace a weighted sum of networks that each act on some positions of a copy, (N, D) -> (N, D).

        ``rows`` (copies, R) has the rows of each copy's R positions.
        """
        ...

    def begin_attention(self) -> None:
        """Prepare for the first linear map of an attention module: that of queries, keys or values."""
        ...

    def end_attention(self, output: Tensor) -> Tensor | None:
        """Replace attention's output after its projection; None leaves it."""
        ...


class HookedModules:
    """The modules of a model that :func:`frozen` hooks, found once.

    Args:
        model: the model.
        blocks: its attention blocks by attention module; the first of their layers to run begins the frozen part.

    Attributes:
        blocks: the same.
        layers: the layers around them.
        routers: the modules that score the experts of a mixture.
        experts: the modules with stacked maps.
        leaves: all other modules without children.
        linear: the linear maps inside attention.
        steps: what each module computes, once it has run.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[nn.Module, Block]) -> None:
        modules = list(model.modules())
        self.blocks = blocks
        self.layers = set(layer_of(model, blocks).values())
        self.routers = {router for module in modules for router in routers_beside(module)}
        self.experts = [module for module in modules if module not in self.routers and stacked_maps(module)]
        whole = self.routers.union(self.experts)
        self.leaves = [module for module in modules if module not in whole and not list(module.children())]
        self.linear = [module for attention in blocks for module in attention.modules() if _is_linear(module)]
        self.steps: dict[nn.Module, Step] = {}


@contextmanager
def frozen(call: ModelCall, modules: HookedModules, network: FrozenNetwork) -> Iterator[None]:
    """While open, replace the model's nonlinear steps by ``network`` in this thread; leave the model as it was."""
    interceptor = _Interceptor(modules, network)
    with call.attention_through(interceptor.attention), interceptor.hooked(), _Functions(interceptor):
        yield


class _Interceptor:
    def __init__(self, modules: HookedModules, network: FrozenNetwork) -> None:
        self._modules = modules
        self._steps = modules.steps
        self._network = network
        self._entered = False
        self._suspended = False
        self._attention_begins = False
        self._suspended_by: nn.Module | None = None
        # Output, function and input of the last activation, which may gate the next product.
        self._last_activation: tuple[Tensor, Elementwise, Tensor] | None = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        known = self._modules
        projections = [block.projection.module for block in known.blocks.values()]
        with ExitStack() as stack:

            def before(modules: Iterable[nn.Module], hook: Hook) -> None:
                hook = here(hook)
                for module in modules:
                    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

            def after(modules: Iterable[nn.Module], hook: Hook) -> None:
                hook = here(hook)
                for module in modules:
                    stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)

            before(known.layers, self._enter)
            after(known.layers, self._leave)
            before(known.routers, self._suspend)
            after(known.routers, self._router)
            before(known.experts, self._begin_experts)
            after(known.experts, self._experts)
            after(known.leaves, self._module)
            before(known.blocks, self._expect_attention)
            before(known.linear, self._begin_attention)
            # After the hook that counts the projection's own bias.
            after(projections, self._end_attention)
            yield

    def attention(self, call: AttentionCall) -> Tensor:
        with self._suspending():
            return self._network.attention(call)

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """Replace the output of a torch function that the model's code calls."""
        if not self._active() or not isinstance(output, Tensor):
            return output
        if func in PRODUCTS:
            return self._product(args, output)
        if func not in ACTIVATIONS or not isinstance(args[0], Tensor) or not self._network.carries(args[0]):
            return output
        inputs, rest = args[0], args[1:]
        return self._activation(lambda values: func(values, *rest, **kwargs), inputs, output)

    def _product(self, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if self._last_activation is None or len(args) != 2:
            return output
        active, function, gate = self._last_activation
        other = next((factor for factor in args if factor is not active), None)
        gates = any(factor is active for factor in args) and isinstance(other, Tensor)
        if not isinstance(other, Tensor) or not gates or not self._network.carries(other):
            return output
        with self._suspending():
            if other.shape == active.shape:
                return self._network.product(function, gate, other, output)
            # One number per position, such as a shared expert's gate, is a constant weight.
            weighs = active.shape[-1] == 1 and other.shape[:-1] == active.shape[:-1]
            return self._network.given(active) * other if weighs else output

    def _activation(self, function: Elementwise, inputs: Tensor, output: Tensor) -> Tensor:
        with self._suspending():
            if inputs.isinf().any():
                raise NonFiniteError(
                    "an activation receives infinite numbers, where its slope from zero is undefined; check the "
                    "inputs, or convert the model to a wider dtype"
                )
            active = self._network.activation(function, inputs, output)
        self._last_activation = (active, function, inputs)
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
        self._attention_begins = self._active()

    def _begin_attention(self, *_: Any) -> None:
        if self._attention_begins and self._active():
            self._attention_begins = False
            self._network.begin_attention()

    def _end_attention(self, *seen: Any) -> Any:
        output = seen[-1]
        if not self._active() or not isinstance(output, Tensor) or not self._network.carries(output):
            return None
        with self._suspending():
            return self._network.end_attention(output)

    def _active(self) -> bool:
        return self._entered and not self._suspended

    def _module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        inputs = first_argument(args, kwargs)
        if not self._active() or inputs is None or not isinstance(output, Tensor) or not self._network.carries(output):
            return None
        step = self._step(module, inputs, output)
        if isinstance(step, ActivationReader):
            return self._activation(step, inputs, output)
        with self._suspending():
            if isinstance(step, NormReader):
                normed = self._network.norm(step.read(accumulation_dtype(output.dtype)), inputs, output)
                # The model may take views, so keep the memory layout.
                return normed.contiguous() if output.is_contiguous() else normed
            bias = step.bias(accumulation_dtype(output.dtype)) if isinstance(step, Projection) else None
            return None if bias is None else self._network.affine(bias, output)

    def _begin_experts(self, module: nn.Module, *received: Any) -> None:
        # Attention with one map per head has stacked maps, too, but reads sequences.
        stream = first_tensor(received)
        if routing_of(received) is not None or (stream is not None and stream.dim() == 2):
            self._suspend(module)

    def _suspend(self, module: nn.Module, *_: Any) -> None:
        """Replace nothing inside a router or experts, which are replaced as a whole."""
        if self._active():
            self._suspended_by, self._suspended = module, True

    def _resumes(self, module: nn.Module) -> bool:
        """Resume if ``module`` suspended replacement; return whether it did."""
        if self._suspended_by is not module:
            return False
        self._suspended_by, self._suspended = None, False
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
        with self._suspending():
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
            with self._suspending(), torch.no_grad():
                step = read_step(module, self._network.whole(inputs), self._network.whole(output))
            if step is not None:
                self._steps[module] = step
        return step

    @contextmanager
    def _suspending(self) -> Iterator[None]:
        """While open, replace nothing: what runs is our own code."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2


class _Functions(TorchFunctionMode):
    """Hands the torch functions that the model's code calls to an interceptor."""

    def __init__(self, interceptor: _Interceptor) -> None:
        super().__init__()
        self._interceptor = interceptor

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Called here, errors of the model's own calls are recognised as such.
        return self._interceptor.function(func, args, kwargs or {}, func(*args, **(kwargs or {})))

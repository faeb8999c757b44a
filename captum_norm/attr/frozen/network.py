"""Runs a model with its attention weights, norm statistics and activation slopes frozen.

Linear maps, residual connections, pooling and indexing are left to the model's own code. Nonlinear steps are replaced
as they run: attention through its library's interface; norms, activations, routers and experts by hooks on their
modules; activations that the model calls as functions, and products with activations, when torch is called.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, wrap_torch_function

from captum_norm.errors import NonFiniteError, UnsupportedModelError
from captum_norm.functional import Elementwise, Normalization, Use
from captum_norm.models.attention import AttentionCall
from captum_norm.models.blocks import Block
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import Hook, first_argument, first_tensor, with_argument
from captum_norm.models.layers import layer_of, not_run
from captum_norm.models.networks import (
    ExpertsReader,
    read_routed,
    routed_rows,
    routers_beside,
    routing_of,
    stacked_maps,
)
from captum_norm.models.precision import accumulation_dtype
from captum_norm.models.probes import affine_test, may_be_affine
from captum_norm.models.projections import NormReader, Projection, read_step, tensor_of
from captum_norm.models.stacks import encoder_of

Step = NormReader | Projection | Elementwise | ExpertsReader
"""What a module computes."""

# Activations that model files call as functions.
ACTIVATIONS = frozenset(
    {
        *(torch.tanh, torch.Tensor.tanh, torch.sigmoid, torch.Tensor.sigmoid, torch.relu, torch.Tensor.relu),
        *(F.relu, F.gelu, F.silu, F.softplus, F.leaky_relu, F.elu, F.mish, F.hardtanh, F.hardswish),
    }
)
PRODUCTS = frozenset({torch.mul, torch.Tensor.mul})
SUMS = frozenset({torch.add, torch.Tensor.add})
# Modules that do nothing in ``eval()``.
IDLE = (nn.Dropout, nn.Identity)


class HookedModules:
    """The modules of a model that a :class:`FrozenNetwork` hooks, found once.

    Args:
        model: the model.
        blocks: its attention blocks by attention module; the first of their layers to run begins the frozen part, in an
            encoder–decoder model that of the encoder and that of the decoder.

    Attributes:
        blocks: the same.
        layers: the layers around them.
        encoder: all modules of an encoder–decoder model's encoder.
        routers: the modules that score the experts of a mixture.
        experts: the modules with stacked maps.
        leaves: all other modules without children, except those that do nothing in ``eval()``.
        composites: modules with children that may together be one affine map, such as an adapted linear layer.
        is_affine: tests whether one of these is.
        linear: the linear maps inside attention.
        steps: what each module computes, once it has run.
        complete: whether its parts have added up with attention weights as constants.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[nn.Module, Block]) -> None:
        modules = list(model.modules())
        self.blocks = blocks
        encoder, crossing = encoder_of(model), [module for module, block in blocks.items() if block.cross]
        self.layers = set(layer_of(model, blocks, crossing).values())
        self.encoder = frozenset(() if encoder is None else encoder.modules())
        self.routers = {router for module in modules for router in routers_beside(module)}
        self.experts = [module for module in modules if module not in self.routers and stacked_maps(module)]
        whole = self.routers.union(self.experts)
        replaced = [module for module in modules if module not in whole and type(module) not in IDLE]
        self.leaves = [module for module in replaced if not list(module.children())]
        others = (module for module in replaced if list(module.children()) and may_be_affine(module))
        apart = whole.union(blocks)
        self.composites = [module for module in others if apart.isdisjoint(module.modules())]
        self.is_affine = affine_test({module: name for name, module in model.named_modules()})
        self.linear = [module for attention in blocks for module in attention.modules() if _is_linear(module)]
        self.steps: dict[nn.Module, Step] = {}
        self.complete = False


def _is_linear(module: nn.Module) -> bool:
    weight = tensor_of(module, "weight")
    return weight is not None and weight.dim() == 2


class FrozenNetwork(TorchFunctionMode, ABC):
    """A model's forward pass whose nonlinear steps are replaced, from the first layer's input on.

    Tensors are the model's own; each result has the shape and the dtype of what it replaces.

    Args:
        modules: what to hook.

    Attributes:
        modules: the same.
        copies: number of copies of the model's positions, one after the other.
    """

    copies: int

    def __init__(self, modules: HookedModules) -> None:
        super().__init__()
        self.modules = modules
        # Whether the layers entered are an encoder's.
        self._entered: set[bool] = set()
        # Our own code runs, in which nothing is replaced.
        self._replacing = False
        # A router, experts, or an affine map of several modules, which are replaced as a whole.
        self._inside: nn.Module | None = None
        # Output of the last sum with a constant vector.
        self._last_sum: Tensor | None = None
        # Output, function and input of the last activation, which may gate the next product.
        self._last_activation: tuple[Tensor, Elementwise, Tensor] | None = None

    def run(self, call: ModelCall) -> Any:
        """Run a call of the model in this thread and return its output; leave the model as it was."""
        with call.attention_through(self._unseen(self.attention)), self.hooking():
            output = call.run()
        if not self._entered:
            raise not_run(call.model, self.modules.layers)
        if self.modules.encoder and True not in self._entered:
            raise UnsupportedModelError(
                f"the encoder of {type(call.model).__name__} did not run, so the source's parts are unknown; pass the "
                "source itself, no encoder_outputs"
            )
        return output

    @contextmanager
    def hooking(self) -> Iterator[None]:
        """Replace steps of the forward passes in this thread, attention aside, while the context is open."""
        with ExitStack() as stack:
            for when, modules, function in self.hooks():
                hook = self._hook(function)
                for module in modules:
                    register = module.register_forward_hook if when == "after" else module.register_forward_pre_hook
                    stack.callback(register(hook, with_kwargs=True).remove)
            with self:
                yield

    @abstractmethod
    def attention(self, call: AttentionCall) -> Tensor:
        """Replace attention, before the output projection."""

    @abstractmethod
    def enter(self, stream: Tensor) -> Tensor:
        """Replace the first layer's input; that of the decoder comes after that of the encoder."""

    @abstractmethod
    def whole(self, tensor: Tensor) -> Tensor:
        """Select the part of a tensor that the model would have computed."""

    @abstractmethod
    def given(self, tensor: Tensor) -> Tensor:
        """Make a tensor constant: a router's choice and weights, a gate of a whole position."""

    @abstractmethod
    def carries(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on the first layer's input."""

    @abstractmethod
    def norm(self, norm: Normalization, inputs: Tensor, output: Tensor) -> Tensor:
        """Replace a normalisation."""

    @abstractmethod
    def affine(self, bias: Tensor, output: Tensor) -> Tensor:
        """Replace the output of a linear map that has a bias."""

    @abstractmethod
    def activation(self, function: Elementwise, inputs: Tensor, output: Tensor) -> Tensor:
        """Replace g(z)."""

    @abstractmethod
    def product(self, function: Elementwise, gate: Tensor, other: Tensor, output: Tensor) -> Tensor:
        """Replace g(u) ⊙ w."""

    @abstractmethod
    def experts(self, uses: Sequence[Use], inputs: Tensor, output: Tensor, rows: Tensor) -> Tensor:
        """Replace a weighted sum of networks that each act on some positions of a copy, (N, D) -> (N, D).

        ``rows`` (copies, R) has the rows of each copy's R positions.
        """

    def hooks(self) -> list[tuple[Literal["before", "after"], Iterable[nn.Module], Hook]]:
        """The functions to call before and after modules, in the order of their calls."""
        known = self.modules
        return [
            ("before", known.layers, self._enter),
            ("before", known.routers, self._replace_whole),
            ("after", known.routers, self._router),
            ("before", known.experts, self._begin_experts),
            ("after", known.experts, self._experts),
            ("before", known.composites, self._begin_composite),
            ("after", known.composites, self._composite),
            ("after", known.leaves, self._leaf),
        ]

    def _hook(self, function: Hook) -> Hook:
        """Make a hook for this thread; calls in others may pass fewer arguments once it is removed."""
        thread, run = get_ident(), self._unseen(function)
        return lambda *seen: run(*seen) if get_ident() == thread and not self._replacing else None

    def _unseen(self, function: Hook) -> Hook:
        """Make a torch function of our own code: inside of one this mode is off."""

        @wrap_torch_function(lambda *args: args)
        def run(*args: Any) -> Any:
            before, self._replacing = self._replacing, True
            try:
                return function(*args)
            finally:
                self._replacing = before

        return run

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the output of a torch function that the model's code calls."""
        kwargs = kwargs or {}
        # Called here, errors of the model's own calls are recognised as such.
        output = func(*args, **kwargs)
        if not self.is_active or self._replacing or not isinstance(output, Tensor):
            return output
        if func in PRODUCTS:
            return self._product(args, output)
        if func in SUMS:
            return self._sum(args, output)
        if func not in ACTIVATIONS or not isinstance(args[0], Tensor) or not self.carries(args[0]):
            return output
        inputs, rest = args[0], args[1:]
        return self._activation(lambda values: func(values, *rest, **kwargs), inputs, output)

    @property
    def is_active(self) -> bool:
        """Whether steps are replaced at this point of the forward pass."""
        return bool(self._entered) and self._inside is None

    def _product(self, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if self._last_activation is None or len(args) != 2:
            return output
        active, function, gate = self._last_activation
        other = next((factor for factor in args if factor is not active), None)
        gates = any(factor is active for factor in args) and isinstance(other, Tensor)
        if not isinstance(other, Tensor) or not gates or not self.carries(other):
            return output
        if other.shape == active.shape:
            return self.product(function, gate, other, output)
        # One number per position, such as a shared expert's gate, is a constant weight.
        weighs = active.shape[-1] == 1 and other.shape[:-1] == active.shape[:-1]
        return self.given(active) * other if weighs else output

    def _sum(self, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Treat a constant vector that model code adds, such as a bias of the logits, like a linear map's bias."""
        if len(args) != 2 or not all(isinstance(term, Tensor) for term in args):
            return output
        constants = [term for term in args if not self.carries(term) and term.numel() == output.shape[-1:].numel()]
        if len(constants) != 1 or not self.carries(output) or not constants[0].is_floating_point():
            return output
        bias = constants[0].detach().flatten().to(accumulation_dtype(output.dtype))
        if bias.any() and bias.isfinite().all():
            self._last_sum = self.affine(bias, output)
            return self._last_sum
        return output

    def _activation(self, function: Elementwise, inputs: Tensor, output: Tensor) -> Tensor:
        if inputs.isinf().any():
            raise NonFiniteError(
                "an activation receives infinite numbers, where its slope from zero is undefined; check the "
                "inputs, or convert the model to a wider dtype"
            )
        active = self.activation(function, inputs, output)
        self._last_activation = (active, function, inputs)
        return active

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        encodes = module in self.modules.encoder
        stream = None if encodes in self._entered else first_argument(args, kwargs)
        if stream is None:
            return None
        self._entered.add(encodes)
        return with_argument(args, kwargs, stream, self.enter(stream))

    def _leaf(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self.is_active or not isinstance(output, Tensor) or not self.carries(output):
            return None
        if output is self._last_sum or (self._last_activation is not None and output is self._last_activation[0]):
            return None  # the module called a function, which was replaced
        step, dtype = self.modules.steps.get(module), accumulation_dtype(output.dtype)
        if step is None:
            step = self._read(module, first_argument(args, kwargs), output)
        if isinstance(step, Projection):
            bias = step.bias(dtype)
            return None if bias is None else self.affine(bias, output)
        inputs = None if step is None else first_argument(args, kwargs)
        if inputs is None:
            return None
        if callable(step):
            return self._activation(step, inputs, output)
        if isinstance(step, NormReader):
            normed = self.norm(step.read(dtype), inputs, output)
            # The model may take views, so keep the memory layout.
            return normed.contiguous() if output.is_contiguous() else normed
        return None

    def _read(self, module: nn.Module, inputs: Tensor | None, output: Tensor) -> Step | None:
        if inputs is None:
            return None
        with torch.no_grad():
            step = read_step(module, self.whole(inputs), self.whole(output))
        if step is not None:
            self.modules.steps[module] = step
        return step

    def _begin_composite(self, module: nn.Module, *received: Any) -> None:
        inputs = first_argument(*received) if self.is_active else None
        if inputs is not None and self.carries(inputs):
            known = module in self.modules.steps
            if known or self.modules.is_affine(module, self.whole(inputs)):
                self._replace_whole(module)

    def _composite(self, module: nn.Module, *seen: Any) -> Any:
        return self._leaf(module, *seen) if self._has_run(module) else None

    def _replace_whole(self, module: nn.Module, *_: Any) -> None:
        """Replace nothing inside a module."""
        if self.is_active:
            self._inside = module

    def _begin_experts(self, module: nn.Module, *received: Any) -> None:
        # Attention with one map per head has stacked maps, too, but reads sequences.
        stream = first_tensor(received)
        if routing_of(received) is not None or (stream is not None and stream.dim() == 2):
            self._replace_whole(module)

    def _has_run(self, module: nn.Module) -> bool:
        """Go on with replacing steps if it was ``module`` that was replaced as a whole; return whether it was."""
        if self._inside is not module:
            return False
        self._inside = None
        return True

    def _router(self, module: nn.Module, *seen: Any) -> Any:
        return self._given(seen[-1]) if self._has_run(module) else None

    def _given(self, output: Any) -> Any:
        if isinstance(output, Tensor):
            return self.given(output)
        return type(output)(map(self._given, output)) if type(output) in (tuple, list) else output

    def _experts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self._has_run(module) or not isinstance(output, Tensor) or not self.carries(output):
            return None
        received = (args, kwargs)
        routing, rows = routed_rows(module, received, output, self.copies)
        reader = self.modules.steps.get(module)
        if not isinstance(reader, ExpertsReader):
            reader = self.modules.steps[module] = read_routed(module, received, output, routing, rows)
        with torch.no_grad():
            uses = list(reader.uses(routing, accumulation_dtype(output.dtype)))
        inputs = cast(Tensor, first_tensor(received)).flatten(0, -2)
        return self.experts(uses, inputs, output.flatten(0, -2), rows).reshape(output.shape)

"""Runs a model whose values are its own and whose gradients are those of a network that is linear in its input vectors.

Linear maps, residual connections, pooling and indexing are left to the model's own code. Behind every nonlinear step,
the value is what the model computed, and the gradient is that of the line that a rule set puts in its place: value +
line − line.detach(). So the number explained is the model's. Steps are seen as they run: attention through its
library's interface; norms, activations, routers and experts by hooks on their modules; activations that the model calls
as functions, and products with activations, when torch is called. By how much a line differs from the model is noted.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any, Literal, cast
from weakref import WeakMethod, proxy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.overrides import TorchFunctionMode, wrap_torch_function
from torch.utils.checkpoint import checkpoint

from captum_norm.attr.frozen.rules import ACTIVATIONS, DECOMPX, AttentionRules, FusedAttentionRules, RuleSet, with_rules
from captum_norm.errors import NonFiniteError, UnsupportedModelError
from captum_norm.forward.record import attended_keys, parts_of
from captum_norm.functional import Normalization, apply_linear, inverse_scale
from captum_norm.functional.feed_forward import Elementwise, Use
from captum_norm.memory import MemoryBudget
from captum_norm.models import networks
from captum_norm.models.attention import AttentionCall, Part, scaled_dot_product
from captum_norm.models.blocks import Block
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import Hook, first_argument, first_tensor, hooked, with_argument
from captum_norm.models.layers import layer_of, not_run
from captum_norm.models.libraries.own_code import multi_head_attention
from captum_norm.models.model import encoder_of
from captum_norm.models.offloading import is_elsewhere, loaded, tensor_of
from captum_norm.models.precision import accumulation_dtype
from captum_norm.models.probes import FAILURES, affine_test, may_be_affine
from captum_norm.models.projections import NormReader, Projection, read_step, reproduces
from captum_norm.models.stacks import Place

Step = NormReader | Projection | Elementwise | networks.ExpertsReader | Tensor
"""What a module computes; a tensor is the bias of an affine map."""

PRODUCTS = frozenset({torch.mul, torch.Tensor.mul})
SUMS = frozenset({torch.add, torch.Tensor.add})
# Modules that do nothing in ``eval()``.
IDLE = (nn.Dropout, nn.Identity)
# A map to at least as many times its inputs is one to a vocabulary.
VOCABULARY = 8


class HookedModules:
    """The modules of a model that a :class:`FrozenNetwork` hooks, and what each was found to compute."""

    def __init__(self, model: nn.Module, blocks: Mapping[nn.Module, Block], budget: MemoryBudget) -> None:
        self.budget = budget  # of the attention weights at a time
        self.names = {module: name for name, module in model.named_modules()}
        self.blocks = blocks
        # The first of the layers to run begins the frozen part, in an encoder–decoder model one in either half.
        encoder, crossing = encoder_of(model), [module for module, block in blocks.items() if block.cross]
        self.layer_of, encoding = layer_of(model, blocks, crossing), set(() if encoder is None else encoder.modules())
        self.layers = set(self.layer_of.values())
        self.encoder = {layer for attention, layer in self.layer_of.items() if attention in encoding}
        self.has_encoder = encoder is not None
        # Whether layers have the axes (S, B, D), unless they were seen with one example of one position.
        self.queries_first = any(block.queries_first for block in blocks.values())
        # The modules that score the experts of a mixture, and those with their stacked maps.
        self.routers = {router for module in self.names for router in networks.routers_beside(module)}
        self.experts = [module for module in self.names if module not in self.routers and networks.stacked_maps(module)]
        mixtures = self.routers.union(self.experts)
        # Each makes a weight, whatever of, such as of a norm and a direction.
        self.parametrizations = [module for module in self.names if isinstance(module, ParametrizationList)]
        no_steps = mixtures.union(*(module.modules() for module in self.parametrizations))
        others = [module for module in self.names if module not in no_steps and type(module) not in IDLE]
        self.leaves = [module for module in others if len(list(module.children())) == is_parametrized(module)]
        apart = mixtures.union(blocks)
        # Modules that may together be one affine map, such as an adapted linear layer.
        self.composites = [
            module
            for module in others
            if list(module.children()) and may_be_affine(module) and apart.isdisjoint(module.modules())
        ]
        self.is_affine = affine_test()
        inside = (module for attention in blocks for module in attention.modules())
        self.linear = [
            module for module in inside if (weight := tensor_of(module, "weight")) is not None and weight.dim() == 2
        ]
        self.steps: dict[nn.Module, Step] = {}
        self.precisions: set[torch.dtype] = set()
        # Modules that are no step, in the order of their first calls, with some rows of their inputs, (1, N, C).
        self.unread: dict[nn.Module, Tensor] = {}
        # Whether parts have added up with attention weights as constants.
        self.complete = False

    def where_sums_break(self) -> str:
        """Name the first module whose output is not the sum of what its input's parts become, for messages, if any."""
        for module, rows in self.unread.items():
            try:
                output, moved = torch.autograd.functional.jvp(module.forward, rows, rows)
            except FAILURES:
                continue
            if isinstance(output, Tensor) and not reproduces(moved, output):
                kind = f'"{self.names[module]}" ({type(module).__name__})'
                return f"; the sum breaks first in {kind}, which is neither an affine map, a norm nor an activation"
        return ""


class FrozenNetwork(TorchFunctionMode):
    """A model's forward pass as an autograd graph in which gradient × input decomposes an output value."""

    # How many copies of the model's positions it runs, one after the other.
    copies = 1

    def __init__(self, modules: HookedModules, call: ModelCall, rules: RuleSet = DECOMPX) -> None:
        super().__init__()
        self.modules, self.call, self.rules = modules, call, rules
        self.stacks, self._batch = call.stacks(), call.batch
        self.dtype = torch.float32  # in which lines are computed
        # What enters the first layers, leaves, and their numbers of positions.
        self.streams: list[Tensor] = []
        self.lengths: list[int] = []
        self._queries_first = modules.queries_first  # whether they have the axes (S, B, D)
        # Each step's name, and the relative deviation of its line from what the model computed.
        self.deviations: list[tuple[str, Tensor]] = []
        self.scored_apart = False  # whether the model's own code computes scores of attention that are not constant
        self.level = 0  # the number of layers that have run, and of halves that have been entered behind them
        # The share of the output that biases and softmaxes take, (B,) each, by the level at which they do.
        self._shares: list[tuple[int, Tensor]] = []
        self._entered: set[bool] = set()  # whether the layers entered are an encoder's
        self._differentiable = False  # whether the layers make a graph
        self._replacing = False  # our own code runs, in which nothing is replaced
        self._projecting = False  # torch's own attention function runs
        # A router, experts, or an affine map of several modules, which are replaced as a whole.
        self._inside: nn.Module | None = None
        self._latest = ""  # the name of the module that ran last, which tells where a function is called
        self._attended = 0
        self.place: Place  # of the attention call that ran last
        self._last_sum: Tensor | None = None  # output of the last sum with a constant vector
        # Output, function and input of the last activation, which may gate the next product.
        self._last_activation: tuple[Tensor, Elementwise, Tensor] | None = None

    def run(self) -> Any:
        """Run the call in this thread and return the model's output; leave the model as it was."""
        call, self._differentiable = self.call, torch.is_grad_enabled()
        # What is made before the first layer, such as embeddings for each layer, is constant.
        with torch.no_grad(), call.attention_through(self._hook(self.attention)), self.hooking():
            output = call.run()
        if not self._entered:
            raise not_run(call.model, self.modules.layers)
        if self.modules.has_encoder and True not in self._entered:
            raise UnsupportedModelError(
                f"the encoder of {type(call.model).__name__} did not run, so the source's parts are unknown; pass the "
                "whole encoder–decoder model and the source itself, no encoder_outputs"
            )
        return output

    @contextmanager
    def hooking(self) -> Iterator[None]:
        """Replace steps of the forward passes in this thread, attention aside, while the context is open."""
        hooks = ((modules, end, self._hook(function)) for end, modules, function in self.hooks())
        steps = hooked((module, end, hook) for modules, end, hook in hooks for module in modules)
        # A compiler, such as that of flex_attention and its masks, does not trace function modes.
        with torch.compiler.set_stance("force_eager"), steps, self:
            yield

    def hooks(self) -> list[tuple[Literal["before", "after"], Iterable[nn.Module], Hook]]:
        """Return the functions to call before and after modules, in the order of their calls."""
        known = self.modules
        return [
            ("before", known.layers, self._enter),
            ("before", known.routers, self._skip),
            ("after", known.routers, self._router),
            ("before", known.parametrizations, self._skip),
            ("after", known.parametrizations, self._weight),
            ("before", known.experts, self._begin_experts),
            ("after", known.experts, self._experts),
            ("before", known.composites, self._begin_composite),
            ("after", known.composites, self._composite),
            ("after", known.leaves, self._leaf),
        ]

    def _hook(self, function: Hook) -> Hook:
        """Make a torch function, inside of which this mode is off, of code that runs in this thread alone."""
        # A torch function holds itself, and would hold the network until garbage is collected.
        thread, network = get_ident(), proxy(self)
        method: Any = WeakMethod(function)

        # Once a hook is removed, other threads may call it with fewer arguments.
        @wrap_torch_function(lambda *args: args)
        def run(*args: Any) -> Any:
            if get_ident() != thread or network._replacing:
                return None
            network._replacing = True
            try:
                return method()(*args)
            finally:
                network._replacing = False

        return run

    @property
    def is_active(self) -> bool:
        """Whether steps are replaced at this point of the forward pass."""
        return bool(self._entered) and self._inside is None

    def relevances(self, values: Tensor, *, again: bool) -> tuple[Tensor, Tensor]:
        """Compute the relevance of positions, (B, S), and biases, (B,), for values, (B,), of which more may follow."""
        if self._queries_first and self._batch in self.lengths:
            # Behind layers it is unknown which of two equal axes is which, so each example has a pass of its own.
            last = len(values) - 1
            each = [self._relevances(value, again=again or i < last) for i, value in enumerate(values)]
            return torch.stack([rows[i] for i, (rows, _) in enumerate(each)]), torch.stack([b.sum() for _, b in each])
        return self._relevances(values.sum(), again=again)

    def _relevances(self, value: Tensor, *, again: bool) -> tuple[Tensor, Tensor]:
        self._shares.clear()
        gradients = torch.autograd.grad(value, self.streams, retain_graph=again, materialize_grads=True)
        dtype, pairs = self.dtype, zip(gradients, self.streams, strict=True)
        parts = ((g.to(dtype) * x.detach().to(dtype)).sum(-1).to(value.device) for g, x in pairs)
        relevance = torch.cat([part.T if self._queries_first else part for part in parts], 1)
        shares = [share.to(relevance) for _, share in self._shares]
        return relevance, torch.stack(shares).sum(0) if shares else relevance.new_zeros(self._batch)

    def largest_deviation(self) -> tuple[str, Tensor]:
        """Return the name of the step whose line is farthest from what the model computed, and its deviation."""
        if not self.deviations:
            return "", torch.zeros(())
        deviations = torch.stack([deviation.float().cpu() for _, deviation in self.deviations])
        worst = deviations.argmax()
        return self.deviations[int(worst)][0], deviations[worst]

    # What the network makes of single steps.

    def enter(self, stream: Tensor) -> Tensor:
        """Replace the first layer's input; that of the decoder comes after that of the encoder."""
        self._see_axes(stream)
        torch.set_grad_enabled(self._differentiable)
        self.streams.append(stream.detach().clone().requires_grad_())
        # The model may write in place, which a leaf does not allow.
        return self.streams[-1].clone()

    def example(self, tensor: Tensor) -> Tensor:
        """Select the part of a tensor that the model alone would have computed."""
        return tensor

    def constant(self, tensor: Tensor) -> Tensor:
        """Make a tensor constant: a router's choice and weights, a gate of a whole position."""
        return tensor.detach()

    def depends(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on the first layer's input."""
        return tensor.requires_grad and not tensor.is_leaf  # no parameter

    def attention(self, call: AttentionCall) -> Tensor:
        """Replace attention, before the output projection."""
        self._attended += 1
        with torch.no_grad():
            output = call.output()
            self.place, _, _ = self.stacks.attend(call, call.part(Part(rows=slice(1))))
        if call.own is not None:
            call.own.weights = None  # which may be large, and are made again in parts
        line, read = self._attention_line(call)
        if self.rules.temperature is not None:
            # Where attention weights come in place of the queries, they do in place of the keys.
            self.scored_apart |= call.key is call.value
            line = line.view_as(line)
            self._keep(line, line)
            for tensor in read:
                self._keep(tensor, tensor, -1)
        real = self.call.positions_of(self.place.role)[0].real
        self._note(str(self.place), line, output, None if real is None else real.to(output.device))
        return output + (line - line.detach()).to(output.dtype)

    def _attention_line(self, call: AttentionCall) -> tuple[Tensor, Sequence[Tensor]]:
        """Compute attention's output, (B, Q, H, d), by the rules; return it, and views of the queries, keys and values.

        No layer's weights are kept for the backward pass where this is possible, which makes them again: by torch's own
        function, or part by part.
        """
        if call.eager is scaled_dot_product and call.own is not None:
            with FusedAttentionRules(self.rules) as fused:
                line, _ = call.own.run()
            if fused.read:
                return line, fused.read
        query, key, value = read = [tensor.view_as(tensor) for tensor in (call.query, call.key, call.value)]
        call = replace(call, query=query, key=key, value=value)
        with torch.no_grad():
            parts = list(parts_of(call, self.modules.budget))
        rows: dict[int, list[Tensor]] = {}
        for part in parts:
            run = partial(self._attention_part, call, part)
            again = len(parts) > 1 and torch.is_grad_enabled()
            output = checkpoint(run, use_reentrant=False, preserve_rng_state=False) if again else run()
            rows.setdefault(part.examples.start, []).append(output)
        return torch.cat([torch.cat(some, 1) for some in rows.values()]), read

    def _attention_part(self, call: AttentionCall, part: Part) -> Tensor:
        """Compute a part of attention's output by the rules."""
        # Its parameters (sinks) may have been offloaded since.
        with loaded(call.module) if call.module._parameters else nullcontext():
            some = call.part(part)
            some = some.part(Part(keys=attended_keys(call, part, some.mask).keys))
            if self.rules.temperature is not None:
                with AttentionRules(self.rules):
                    return some.run()[0]
            with torch.no_grad():
                _, weights = some.run()
            return (weights @ some.values_by_head.to(weights.dtype)).transpose(1, 2)

    def norm(self, norm: Normalization, inputs: Tensor, output: Tensor) -> Tensor:
        """Replace a normalisation."""
        inputs = inputs.to(self.dtype)
        return self._observed(apply_linear(norm, inputs) * inverse_scale(norm, inputs.detach()), norm.bias, output)

    def affine(self, bias: Tensor, output: Tensor) -> Tensor:
        """Replace the output of a linear map that has a bias."""
        self._keep(output, bias)
        return output

    def projection(self, bias: Tensor | None, output: Tensor) -> Tensor:
        """Replace queries, keys or values, (S, B, D), that torch's attention function makes of its inputs."""
        ordered = output if self._queries_first else output.transpose(0, 1)
        if bias is None or not self.depends(ordered):
            return output
        ordered = self.affine(bias.detach().to(self.dtype), ordered)
        return ordered if self._queries_first else ordered.transpose(0, 1).contiguous()

    def activation(self, function: Elementwise, inputs: Tensor, output: Tensor) -> Tensor:
        """Replace g(z)."""
        line = self.rules.activation(function, inputs.detach())
        return self._observed(line.of(inputs), line.constant, output)

    def product(self, function: Elementwise, gate: Tensor, other: Tensor, output: Tensor) -> Tensor:
        """Replace g(u) ⊙ w."""
        line = self.rules.product(function, None, gate.detach(), other.detach())
        return self._observed(line.of(gate, other), line.constant, output)

    def experts(self, uses: Sequence[Use], inputs: Tensor, output: Tensor, rows: Tensor) -> Tensor:
        """Replace the experts' weighted sum, (N, D); ``rows`` (copies, R) has the rows of each copy's R positions."""
        inputs, every = inputs.to(self.dtype), rows[0]
        linear, constant = torch.zeros_like(inputs), torch.zeros_like(inputs).detach()
        for use in uses:
            chosen = every if use.queries is None else use.queries
            written, bias = self.through(use, inputs)
            linear, constant = linear.index_add(0, chosen, written), constant.index_add(0, chosen, bias)
        # Experts that read rows of their own have the whole batch for each expert.
        times = max(1, len(every) // self.streams[-1][..., 0].numel())
        return self._observed(linear, constant, output, times)

    def through(self, use: Use, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Carry inputs, (N, D), through a network; return what depends on them, (n, D), and what does not."""
        network, read = use.network, use.reads(inputs)
        points = [affine.linear(read) for affine in network.inner]
        with torch.no_grad():
            biases = [affine.whole(torch.zeros_like(read)) for affine in network.inner]
            sums = [point + bias for point, bias in zip(points, biases, strict=True)]
            if len(sums) == 1:
                line = self.rules.activation(network.activation, *sums)
            else:
                line = self.rules.product(network.activation, network.factor, *sums)
            constant = network.outer.whole(line.of(*biases) + line.constant)
        written = network.outer.linear(line.of(*points))
        if use.coefficient is None:
            return written, constant
        return written * use.coefficient, constant * use.coefficient

    def _observed(self, linear: Tensor, constant: Tensor | None, output: Tensor, times: int = 1) -> Tensor:
        """Return what the model computed, with the gradient of a line; note the line's constant and deviation."""
        constant = None if constant is None or not constant.any() else constant.detach()
        self._note(self._latest, linear if constant is None else linear + constant, output)
        value = output.detach() + (linear - linear.detach()).to(output.dtype)
        if constant is not None:
            self._keep(value, constant, times=times)
        return value

    @torch.no_grad()
    def _note(self, name: str, line: Tensor, output: Tensor, rows: Tensor | None = None) -> None:
        """Note by how much a line differs from the model's output, relative to its norm."""
        if rows is not None:
            line, output = line[rows], output[rows]
        error, size = (torch.linalg.vector_norm(part.float()) for part in (line - output, output))
        self.deviations.append((name, error / size.clamp(min=torch.finfo(size.dtype).tiny)))

    def _keep(self, tensor: Tensor, constant: Tensor, sign: int = 1, times: int = 1) -> None:
        """Record the contribution of a constant added to ``tensor``, once its gradient is known."""
        # The graph holds the hook, and must not hold the network, whose tensors hold the graph.
        constant, network, level = constant.detach(), proxy(self), self.level

        def keep(gradient: Tensor) -> None:
            shares = (gradient.to(network.dtype) * constant.to(network.dtype)).sum(-1)
            network._shares.append((level, sign * network._shares_of(shares, times)))

        if tensor.requires_grad:
            tensor.register_hook(keep)

    def _shares_of(self, shares: Tensor, times: int) -> Tensor:
        """Sum the shares of rows by example, (B,); mixtures have all examples' rows several times."""
        return self._batch_first(shares, 2).reshape(times, self._batch, -1).sum((0, 2))

    def _see_axes(self, stream: Tensor) -> None:
        """Note how many positions enter layers, and whether their axis comes first."""
        if len(stream) != self._batch:
            self._queries_first = stream.dim() > 2 and stream.shape[1] == self._batch
        self.lengths.append(stream.shape[0 if self._queries_first else 1])

    def _batch_first(self, tensor: Tensor, axes: int = 3) -> Tensor:
        """Exchange the first two of a tensor's axes if they are those of positions and examples, in this order."""
        first = self._queries_first and tensor.dim() == axes and tensor.shape[0] in self.lengths
        return tensor.transpose(0, 1) if first and tensor.shape[1] == self._batch else tensor

    # Where steps are seen.

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the output of a torch function that the model's code calls."""
        options, attended = kwargs or {}, self._attended
        if not self.is_active or self._replacing:
            return func(*args, **options)
        if func is F.multi_head_attention_forward:  # whose inner steps are then in sight
            self._projecting = True
            try:
                with self:
                    return multi_head_attention(*args, **options)
            finally:
                self._projecting = False
        # The rows of its output projection, a module, have two axes.
        projects = self._projecting and func is F.linear and args[0].dim() == 3
        # Called here, errors of the model's own calls are recognised as such.
        if func is F.linear and len(args) > 1 and options.keys() <= {"bias"} and _is_to_vocabulary(*args[:2]):
            func = _linear
        output = func(*args, **options)
        if not isinstance(output, Tensor):
            return output
        if projects:
            return self.projection(args[2], output)
        output = self._replaced(func, args, options, output)
        if self.rules.temperature is None or self._attended != attended:
            return output
        if output.dtype is not self.dtype and output.requires_grad:
            self.modules.precisions.add(output.dtype.to_real())  # such as rotations of queries in float32
        return with_rules(func, args, options, output, self.rules)

    def _replaced(
        self, func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], output: Tensor
    ) -> Tensor:
        if func in PRODUCTS:
            return self._product(args, output)
        if func in SUMS:
            return self._sum(args, output)
        if func in ACTIVATIONS and isinstance(args[0], Tensor) and self.depends(args[0]):
            inputs, rest = args[0], args[1:]
            return self._activation(lambda values: func(values, *rest, **options), inputs, output)
        return output

    def _product(self, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if self._last_activation is None or len(args) != 2:
            return output
        active, function, gate = self._last_activation
        other = next((factor for factor in args if factor is not active), None)
        gates = any(factor is active for factor in args) and isinstance(other, Tensor)
        if not isinstance(other, Tensor) or not gates or not self.depends(other):
            return output
        if other.shape == active.shape:
            return self.product(function, gate, other, output)
        # One number per position, such as a shared expert's gate, is a constant weight.
        weighs = active.shape[-1] == 1 and other.shape[:-1] == active.shape[:-1]
        return self.constant(active) * other if weighs else output

    def _sum(self, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Treat a constant vector that model code adds, such as a bias of the logits, like a linear map's bias."""
        if len(args) != 2 or not all(isinstance(term, Tensor) for term in args):
            return output
        constants = [term for term in args if not self.depends(term) and term.numel() == output.shape[-1:].numel()]
        if len(constants) != 1 or not self.depends(output) or not constants[0].is_floating_point():
            return output
        bias = constants[0].detach().flatten().to(self.dtype)
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
        self.dtype = accumulation_dtype(stream.dtype)
        return with_argument(args, kwargs, stream, self.enter(stream))

    def _leaf(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self.is_active or not isinstance(output, Tensor) or not self.depends(output):
            return None
        self._latest = self.modules.names[module]
        if output is self._last_sum or (self._last_activation is not None and output is self._last_activation[0]):
            return None  # the module called a function, which was replaced
        step = self.modules.steps.get(module)
        if step is None:
            step = self._read(module, first_argument(args, kwargs), output)
        if isinstance(step, (Tensor, Projection)):
            bias = step.to(self.dtype) if isinstance(step, Tensor) else step.bias(self.dtype)
            return None if bias is None else self.affine(bias, output)
        inputs = None if step is None else first_argument(args, kwargs)
        if inputs is None:
            return None
        if isinstance(step, NormReader):
            return self.norm(step.read(self.dtype), inputs, output)
        return self._activation(step, inputs, output) if callable(step) else None

    def _read(self, module: nn.Module, inputs: Tensor | None, output: Tensor) -> Step | None:
        if inputs is None:
            return None
        with torch.no_grad():
            step: Step | None = read_step(module, self.example(inputs), self.example(output))
        if isinstance(step, (NormReader, Projection)):
            self.modules.precisions.add(step.precision)
        if isinstance(step, Projection):
            stored, bias = tensor_of(module, "bias"), step.read()[1]
            if bias is not None and bias is stored and not is_elsewhere(module, bias):
                step = bias
        if step is not None:
            self.modules.steps[module] = step
        elif module not in self.modules.unread:
            self.modules.unread[module] = self.example(inputs).detach().flatten(0, -2)[None, :8].clone()
        return step

    def _begin_composite(self, module: nn.Module, *received: Any) -> None:
        inputs = first_argument(*received) if self.is_active else None
        if inputs is not None and self.depends(inputs):
            if module in self.modules.steps or self.modules.is_affine(module, self.example(inputs)):
                self._skip(module)
            else:
                self.modules.composites.remove(module)

    def _composite(self, module: nn.Module, *seen: Any) -> Any:
        return self._leaf(module, *seen) if self._was_skipped(module) else None

    def _skip(self, module: nn.Module, *_: Any) -> None:
        """Replace nothing inside a module, which is replaced as a whole."""
        if self.is_active:
            self._inside = module

    def _was_skipped(self, module: nn.Module) -> bool:
        """Go on with replacing steps if it was ``module`` that is replaced as a whole; return whether it was."""
        if self._inside is not module:
            return False
        self._inside = None
        return True

    def _router(self, module: nn.Module, *seen: Any) -> Any:
        return self._constants(seen[-1]) if self._was_skipped(module) else None

    def _weight(self, module: nn.Module, *seen: Any) -> Tensor | None:
        return cast(Tensor, seen[-1]).detach() if self._was_skipped(module) else None

    def _constants(self, output: Any) -> Any:
        if isinstance(output, Tensor):
            return self.constant(output)
        return type(output)(map(self._constants, output)) if type(output) in (tuple, list) else output

    def _begin_experts(self, module: nn.Module, *received: Any) -> None:
        # Attention with one map per head has stacked maps, too, but reads sequences.
        stream = first_tensor(received)
        if networks.routing_of(received) is not None or (stream is not None and stream.dim() == 2):
            self._skip(module)

    def _experts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self._was_skipped(module) or not isinstance(output, Tensor) or not self.depends(output):
            return None
        self._latest = self.modules.names[module]
        received = (args, kwargs)
        routing, rows = networks.routed_rows(module, received, output, self.copies)
        reader = self.modules.steps.get(module)
        if not isinstance(reader, networks.ExpertsReader):
            reader = self.modules.steps[module] = networks.read_routed(module, received, output, routing, rows)
        with torch.no_grad():
            uses = list(reader.uses(routing, self.dtype))
        inputs = cast(Tensor, first_tensor(received)).flatten(0, -2)
        return self.experts(uses, inputs, output.flatten(0, -2), rows).reshape(output.shape)


class _VocabularyMap(torch.autograd.Function):
    """x W + b, whose gradient is computed in the rows that have one: the positions whose outputs are explained."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ((weight,), (gradient,)) = ctx.saved_tensors, gradients
        some = gradient.any(-1)
        passed = gradient.new_zeros(*gradient.shape[:-1], weight.shape[1])
        passed[some] = gradient[some] @ weight
        return passed, None, None


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    output: Tensor = _VocabularyMap.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
    return output


def _is_to_vocabulary(inputs: Tensor, weight: Tensor) -> bool:
    plain = type(weight) in (Tensor, nn.Parameter) and type(inputs) is Tensor and inputs.requires_grad
    return plain and len(weight) >= VOCABULARY * weight.shape[1]

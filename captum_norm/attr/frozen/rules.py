"""Defines what the backward pass of each method makes of a network's nonlinear steps.

The scores are gradient × input of a network whose forward pass is the model's own and whose steps pass gradients on as
the rules say:

====================  ====================  ====================  ====================  ====================
step                  DecompX               CP-LRP                AttnLRP; RelP         GIM
====================  ====================  ====================  ====================  ====================
softmax of scores     constant weights      constant weights      gradient              gradient at
                                                                                        temperature 2
product q·k           nothing               nothing               half to each; all     half to each
product weights·v     all to v              all to v              half to each; all     half to each
norm                  frozen statistics     frozen statistics     frozen statistics     frozen statistics
activation g(z)       (g(z) − g(0)) / z     g(z) / z              g(z) / z              g′(z)
gated g(u) ⊙ w        integrated along the  all to w, by g(u)     half to each, by      half to each, by
                      straight path                               g(u) w / u and g(u)   g′(u) w and g(u)
routing of experts    constant              constant              constant              constant
====================  ====================  ====================  ====================  ====================

RelP differs from AttnLRP in attention, which has its own gradient, and in a stabiliser of g(z) / z.
Biases keep what they contribute: it reaches no token. Under AttnLRP, RelP and GIM the softmax keeps something, too, and
under GIM the activations do, as their gradients are not those of a line through zero.

Where relevance flows through attention weights, the model's own attention function runs, so grouped queries, positions,
masks, windows, soft caps and sinks are its own. Each product of two tensors that both depend on the input is a bilinear
map; halving the gradient of its output gives half of the relevance to either factor: q and k get a quarter of what
attention's output has, v a half.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, wrap_torch_function

from captum_norm.functional.feed_forward import Elementwise, derivative, gate_slopes, secant_slope
from captum_norm.models.hooks import tensors_in
from captum_norm.models.libraries.own_code import SOFTMAX
from captum_norm.models.precision import accumulation_dtype

# Activations that model files call as functions.
ACTIVATIONS = frozenset(
    {
        *(torch.tanh, torch.Tensor.tanh, torch.sigmoid, torch.Tensor.sigmoid, torch.relu, torch.Tensor.relu),
        *(F.relu, F.gelu, F.silu, F.softplus, F.leaky_relu, F.elu, F.mish, F.hardtanh, F.hardswish),
    }
)
MATRIX_PRODUCTS = frozenset(
    {torch.matmul, Tensor.matmul, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm, torch.einsum}
)
SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
# How many steps back a tensor is followed to tell a function of parameters from one of the input.
STEPS = 50

STABILIZER, RELP_STABILIZER = 1e-10, 1e-6
"""Added to the denominator of g(z) / z where g(0) is not 0; and under RelP always, away from 0, as by its authors."""


class Line(NamedTuple):
    """A function of one or two arguments made linear: Σ slope ⊙ argument + constant."""

    slopes: tuple[Tensor, ...]
    constant: Tensor  # in the function's shape, or (1,)

    def of(self, *arguments: Tensor) -> Tensor:
        """Apply the linear part to other arguments."""
        total = self.slopes[0] * arguments[0]
        for slope, argument in zip(self.slopes[1:], arguments[1:], strict=True):
            total = total + slope * argument
        return total


@dataclass(frozen=True)
class RuleSet:
    """The rules of one method; those for norms, routing and products of attention are the same in all."""

    # From g and z, the line in place of g(z); from g, h (None: the identity), u and w, that in place of g(u) ⊙ h(w).
    activation: Callable[[Elementwise, Tensor], Line]
    product: Callable[[Elementwise, Elementwise | None, Tensor, Tensor], Line]
    temperature: float | None = None  # of the softmax in the backward pass; None: attention weights are constant
    halved: bool = True  # whether the factors of attention's products share their gradient


def secant(function: Elementwise, point: Tensor) -> Line:
    """Return the line from zero, with slope (g(z) − g(0)) / z [Modarressi et al. 2023, zero-origin]."""
    zero = point.new_zeros(1)
    return Line((secant_slope(function, zero, point),), function(zero))


def proportional(function: Elementwise, point: Tensor) -> Line:
    """Return the line with slope g(z) / z, so that z gets all of g(z) [Achtibat et al. 2024, eq. 9]."""
    line = secant(function, point)
    if not line.constant.any():
        return line
    value = function(point)
    slope = value / (point + STABILIZER)
    return Line((slope,), value - slope * point)


def stabilized(function: Elementwise, point: Tensor) -> Line:
    """Return the line with slope g(z) / (z ± ε) [Jafari et al. 2025, as released]."""
    value, away = function(point), torch.where(point < 0, -RELP_STABILIZER, RELP_STABILIZER)
    slope = value / (point + away)
    return Line((slope,), value - slope * point)


def tangent(function: Elementwise, point: Tensor) -> Line:
    """Return the line with slope g′(z)."""
    slope = derivative(function, point)
    return Line((slope,), function(point) - slope * point)


def straight_path(function: Elementwise, factor: Elementwise | None, gate: Tensor, other: Tensor) -> Line:
    """Split a product between its factors along the straight path from zero: integrated gradients."""
    zero = gate.new_zeros(1)
    slopes = gate_slopes(function, factor, (zero, zero), (gate, other))
    return Line(slopes, zero if factor is None else function(zero) * factor(zero))


def gate_stopped(function: Elementwise, factor: Elementwise | None, gate: Tensor, other: Tensor) -> Line:
    """Give all of a product to w; the gate is constant [Ali et al. 2022; Achtibat et al. 2024]."""
    active = function(gate)
    if factor is None:
        return Line((torch.zeros_like(gate), active), gate.new_zeros(1))
    line = secant(factor, other)
    return Line((torch.zeros_like(gate), active * line.slopes[0]), active * line.constant)


def halves(activation: Callable[[Elementwise, Tensor], Line]) -> Callable[..., Line]:
    """Give half of a product to each factor [Achtibat et al. 2024, eq. 7], which passes it on by a rule."""

    def product(function: Elementwise, factor: Elementwise | None, gate: Tensor, other: Tensor) -> Line:
        rule = activation if activation is tangent else secant
        first, active = activation(function, gate), function(gate)
        # What h adds to zero is a bias, which keeps its share.
        second = Line((torch.ones_like(other),), other.new_zeros(1)) if factor is None else rule(factor, other)
        value = other if factor is None else factor(other)
        slopes = (first.slopes[0] * value / 2, second.slopes[0] * active / 2)
        return Line(slopes, (first.constant * value + second.constant * active) / 2)

    return product


DECOMPX = RuleSet(activation=secant, product=straight_path)
"""Integrated gradients of activations and gated pairs from zero [Modarressi et al. 2023]."""

CP_LRP = RuleSet(activation=proportional, product=gate_stopped)
"""Conservative propagation: attention and gates are constant [Ali et al. 2022]."""

ATTN_LRP = RuleSet(activation=proportional, product=halves(proportional), temperature=1)
"""Relevance also flows through the softmax; each product is halved [Achtibat et al. 2024]."""

RELP = RuleSet(activation=stabilized, product=halves(stabilized), temperature=1, halved=False)
"""As AttnLRP, with attention's own gradient [Jafari et al. 2025]."""

GIM = RuleSet(activation=tangent, product=halves(tangent), temperature=2)
"""As AttnLRP, with true gradients of activations and a softer softmax [Edin et al. 2025b]."""


# Wrapped as a torch function, so that the mode that traces attention weights sees it.
@wrap_torch_function(lambda weights, *_: (weights,))
def tempered(weights: Tensor, scores: Tensor, temperature: float, axis: int) -> Tensor:
    """Return weights with the gradient of softmax(z / T), but for the factor 1 / T [Edin et al. 2025b]."""
    softer = temperature * F.softmax(scores.to(accumulation_dtype(scores.dtype)) / temperature, axis)
    return weights.detach() + (softer - softer.detach()).to(weights.dtype)


def halve(tensor: Tensor, times: int = 1) -> None:
    """Halve the gradient that a tensor passes on, so many times."""
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: gradient / 2**times)


def with_rules(
    func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], output: Tensor, rules: RuleSet
) -> Tensor:
    """Return a torch function's output, which passes gradients on as the rules of attention say."""
    if not output.requires_grad:
        return output
    if func in MATRIX_PRODUCTS and rules.halved:
        # What is added to the product comes before its factors.
        if all(map(depends_on_input, tensors_in([*args, *options.values()])[-2:])):
            halve(output)
    elif func in SOFTMAX and rules.temperature not in (None, 1):
        named = dict(zip(("input", "dim"), args, strict=False)) | options
        softer: Tensor = tempered(output, named["input"], rules.temperature, named.get("dim", -1))
        return softer
    return output


def depends_on_input(tensor: Tensor) -> bool:
    """Whether a tensor depends on a leaf of the graph that is no parameter."""
    if tensor.grad_fn is None:
        return tensor.requires_grad and not isinstance(tensor, nn.Parameter)
    ahead, seen = [tensor.grad_fn], set[Any]()
    while ahead and len(seen) < STEPS:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and not isinstance(leaf, nn.Parameter):
                return True
            ahead.extend(function for function, _ in node.next_functions if function is not None)
    return bool(ahead)


class AttentionRules(TorchFunctionMode):
    """Applies rules inside an attention function: to its softmax, its products, and activations such as a soft cap."""

    def __init__(self, rules: RuleSet) -> None:
        super().__init__()
        self._rules = rules

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run in place of every torch function."""
        options = kwargs or {}
        output = func(*args, **options)
        if not isinstance(output, Tensor):
            return output
        if func in ACTIVATIONS and args and output.requires_grad:
            inputs, rest = args[0], args[1:]
            line = self._rules.activation(lambda values: func(values, *rest, **options), inputs.detach())
            return (line.of(inputs) + line.constant).to(output.dtype)
        return with_rules(func, args, options, output, self._rules)


class FusedAttentionRules(TorchFunctionMode):
    """Applies rules to torch's scaled dot-product attention, whose softmax and products are not seen.

    All are gradients of that function: at the inputs, times ½ for values and ¼ for queries and keys; of its queries
    and keys alone at scores divided by a temperature; of its values alone.
    """

    def __init__(self, rules: RuleSet) -> None:
        super().__init__()
        self._rules = rules
        self.read: list[Tensor] = []  # views of queries, keys and values, once the function was called

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run in place of every torch function."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs or {})
        named = dict(zip(SDPA_ARGUMENTS, args, strict=False)) | (kwargs or {})
        query, key, value = self.read = [given.view_as(given) for given in map(named.pop, SDPA_ARGUMENTS[:3])]
        dtype, temperature = torch.promote_types(value.dtype, torch.float32), self._rules.temperature
        query, key, heads = (tensor.to(dtype).view_as(tensor) for tensor in (query, key, value))
        if self._rules.halved and temperature is not None:
            for tensor, times in ((query, 2), (key, 2), (heads, 1)):
                halve(tensor, times)
        if named.pop("enable_gqa", False):  # for which not all kernels make the weights again
            key, heads = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, heads))
        mask: Any = named.pop("attn_mask", None)
        if mask is not None:
            mask = mask.detach().to(dtype if mask.is_floating_point() else mask.dtype)
        if temperature == 1:
            return func(query, key, heads, mask, **named).to(value.dtype)
        line = func(query.detach(), key.detach(), heads, mask, **named)
        if temperature is not None:
            scale = named.pop("scale", None) or query.shape[-1] ** -0.5
            mask = mask / temperature if mask is not None and mask.is_floating_point() else mask
            softer = func(query, key, heads.detach(), mask, scale=scale / temperature, **named)
            line = line + temperature * (softer - softer.detach())
        return line.to(value.dtype)

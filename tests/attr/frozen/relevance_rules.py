"""LRP's rules by hand, as backward passes that carry relevance, not gradients.

Each function's ``backward`` turns the relevance of its output into that of its inputs, by the rules of Achtibat et al.
2024 (AttnLRP), Ali et al. 2022 (CP-LRP), Jafari et al. 2025 (RelP) and Edin et al. 2025b (GIM), and autograd adds up
what several uses give.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def apply(function: Any, *args: Any) -> Tensor:
    return function.apply(*args)  # type: ignore[no-any-return]


class Linear(torch.autograd.Function):
    """z = x W + b; b keeps its share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        z = x @ weight if bias is None else x @ weight + bias
        ctx.save_for_backward(x, weight, z)
        return z

    @staticmethod
    def backward(ctx: Any, *relevance: Tensor) -> Any:
        x, weight, z = ctx.saved_tensors
        return x * ((relevance[0] / z) @ weight.T), None, None


class Add(torch.autograd.Function):
    """z = a + b."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a + b

    @staticmethod
    def backward(ctx: Any, *relevance: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return a / (a + b) * relevance[0], b / (a + b) * relevance[0]


class Product(torch.autograd.Function):
    """z = a @ b; each gets a share of the relevance."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, shares: tuple[float, float]) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.shares = shares
        return a @ b

    @staticmethod
    def backward(ctx: Any, *relevance: Tensor) -> Any:
        a, b = ctx.saved_tensors
        unit = relevance[0] / (a @ b)
        left, right = ctx.shares
        return left * a * (unit @ b.transpose(-1, -2)), right * b * (a.transpose(-1, -2) @ unit), None


class Softmax(torch.autograd.Function):
    """s = softmax(z), by the gradient at a temperature; masked entries take no part."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, allowed: Tensor, temperature: float) -> Tensor:
        def softmax(scores: Tensor) -> Tensor:
            powers = (scores - scores.masked_fill(~allowed, -1e300).amax(-1, keepdim=True)).exp() * allowed
            return powers / powers.sum(-1, keepdim=True)

        s = softmax(z)
        ctx.save_for_backward(z, s, softmax(z / temperature), allowed)
        return s

    @staticmethod
    def backward(ctx: Any, *relevance: Tensor) -> Any:
        z, s, softer, allowed = ctx.saved_tensors
        gradient = (relevance[0] / s).where(allowed, 0)
        jacobian = torch.diag_embed(softer) - softer.unsqueeze(-1) * softer.unsqueeze(-2)
        return z * (jacobian @ gradient.unsqueeze(-1)).squeeze(-1), None, None


class Normed(torch.autograd.Function):
    """y = γ (x − m) / σ + β with σ as a constant; β keeps its share, and m is a linear map (none: RMSNorm)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        width = x.shape[-1]
        matrix = torch.eye(width).to(x)
        if bias is not None:
            matrix = matrix - 1 / width
        sigma = ((x @ matrix).square().mean(-1, keepdim=True) + eps).sqrt()
        ctx.save_for_backward(x, matrix * gain, sigma)
        ctx.bias = 0 if bias is None else bias
        y: Tensor = x @ (matrix * gain) / sigma + ctx.bias
        return y

    @staticmethod
    def backward(ctx: Any, *relevance: Tensor) -> Any:
        x, matrix, sigma = ctx.saved_tensors
        return x * ((relevance[0] / (x @ matrix / sigma + ctx.bias)) @ matrix.T) / sigma, None, None, None


class Active(torch.autograd.Function):
    """g(z): all relevance passes, but for z / (z ± ε), or that of the tangent."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, function: Function, tangent: bool, stabilizer: float) -> Tensor:
        ctx.save_for_backward(z)
        ctx.function, ctx.tangent, ctx.stabilizer = function, tangent, stabilizer
        return function(z)

    @staticmethod
    def backward(ctx: Any, *relevance: Tensor) -> Any:
        (z,) = ctx.saved_tensors
        if not ctx.tangent:
            return relevance[0] * z / (z + ctx.stabilizer * z.sign()), None, None, None
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            value = ctx.function(z)
            (slope,) = torch.autograd.grad(value.sum(), z)
        return (z * slope / value * relevance[0]).where(value != 0, 0).detach(), None, None, None


class Gated(torch.autograd.Function):
    """a ⊙ w; each gets a share."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor, shares: tuple[float, float]) -> Tensor:
        ctx.shares = shares
        return a * w

    @staticmethod
    def backward(ctx: Any, *relevance: Tensor) -> Any:
        return ctx.shares[0] * relevance[0], ctx.shares[1] * relevance[0], None


class Passed(torch.autograd.Function):
    """A map that multiplies by constants or turns pairs (rotary embeddings): x M, M orthogonal in blocks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Function, back: Function) -> Tensor:
        z = function(x)
        ctx.save_for_backward(x, z)
        ctx.back = back
        return z

    @staticmethod
    def backward(ctx: Any, *relevance: Tensor) -> Any:
        x, z = ctx.saved_tensors
        return x * ctx.back(relevance[0] / z), None, None


class Weighted(torch.autograd.Function):
    """Σ_e c_e y_e of stacked y with constant coefficients c."""

    @staticmethod
    def forward(ctx: Any, stacked: Tensor, coefficients: Tensor) -> Tensor:
        ctx.save_for_backward(stacked, coefficients)
        return (coefficients * stacked).sum(0)

    @staticmethod
    def backward(ctx: Any, *relevance: Tensor) -> Any:
        stacked, coefficients = ctx.saved_tensors
        terms = coefficients * stacked
        return terms / terms.sum(0) * relevance[0], None


class Rules:
    """The steps of a model under one rule set: ``cp-lrp``, ``attnlrp``, ``relp`` or ``gim``."""

    def __init__(self, name: str) -> None:
        self.constant, self.tangent = name == "cp-lrp", name == "gim"
        self.temperature = 2 if name == "gim" else 1
        self.stabilizer = 1e-6 if name == "relp" else 0.0
        # The shares of attention's products.
        self.shares = {"cp-lrp": (0.0, 1.0), "relp": (1.0, 1.0)}.get(name, (0.5, 0.5))
        # The relevance of what was noted, by kind and number.
        self.noted: dict[str, dict[int, Tensor]] = {}

    def note(self, kind: str, x: Tensor) -> Tensor:
        kept = self.noted.setdefault(kind, {})
        index = len(kept)
        kept[index] = x.detach()  # until its relevance is known
        x.register_hook(lambda relevance: kept.update({index: relevance}))
        return x

    def read(self, kind: str) -> Tensor:
        """The relevance of all layers, (B, L, ...)."""
        return torch.stack([self.noted[kind][index] for index in sorted(self.noted[kind])], 1)

    def linear(self, x: Tensor, module: Any) -> Tensor:
        weight = module.weight if type(module).__name__ == "Conv1D" else module.weight.T
        return apply(Linear, x, weight.detach(), None if module.bias is None else module.bias.detach())

    def norm(self, x: Tensor, module: Any) -> Tensor:
        bias = getattr(module, "bias", None)
        if bias is None and isinstance(module, torch.nn.LayerNorm):
            bias = torch.zeros_like(module.weight)
        eps = module.eps if getattr(module, "eps", None) is not None else torch.finfo(x.dtype).eps
        return apply(Normed, x, module.weight.detach(), None if bias is None else bias.detach(), eps)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return apply(Add, a, b)

    def active(self, z: Tensor, function: Function, divisor: float = 1) -> Tensor:
        """g(z / divisor), of which the model's code divides before it calls g."""
        return apply(Active, z, function, self.tangent, divisor * self.stabilizer)

    def gated(self, u: Tensor, w: Tensor, function: Function) -> Tensor:
        shares = (0.0, 1.0) if self.constant else (0.5, 0.5)
        return apply(Gated, self.active(u, function), w, shares)

    def rotary(self, x: Tensor, base: float = 10) -> Tensor:
        return apply(Passed, x, lambda z: turned(z, 1, base), lambda z: turned(z, -1, base))

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, *, capped: bool = False
    ) -> Tensor:
        """(B, H, Q, d) from queries and (B, H or fewer, K, d) keys and values."""
        repeats = q.shape[1] // k.shape[1]
        k, v = (x[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2) for x in (k, v))
        scores = scale * apply(Product, q, k.transpose(-1, -2), self.shares)
        # A constant factor passes relevance on as it is.
        scores = scores.detach() + (_passed(scores, scale))
        scores = self.active(scores, soft_cap, 2) if capped else scores
        weights = apply(Softmax, scores, allowed.expand_as(scores), self.temperature)
        return self.note("heads", apply(Product, weights, v, self.shares))


def _passed(tensor: Tensor, scale: float) -> Tensor:
    """Zero, whose backward pass undoes that of the factor before."""
    return (tensor - tensor.detach()) / scale


def soft_cap(scores: Tensor) -> Tensor:
    return torch.tanh(scores / 2) * 2


def turned(x: Tensor, sign: int = 1, base: float = 10) -> Tensor:
    """Rotary positions; with sign −1 turned back."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] / base ** (torch.arange(half) / half)
    cos, sin = (part.to(x) for part in (angles.cos(), sign * angles.sin()))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

"""The direct way, in float64: every vector materialised, every formula written out as in the papers.

Shares no code with the library. Letters as in the design: B, H, Q, K, D, d.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class DirectNorm:
    """LayerNorm (centered) or RMSNorm with its statistics taken from ``whole`` and applied to ``part``."""

    centered: bool
    gain: Tensor
    bias: Tensor
    eps: float

    def statistics(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        mean = whole.mean(-1) if self.centered else torch.zeros_like(whole[..., 0])
        sigma = (((whole - mean[..., None]) ** 2).sum(-1) / whole.shape[-1] + self.eps) ** 0.5
        return mean, sigma

    def part(self, part: Tensor, sigma: Tensor) -> Tensor:
        own_mean = part.mean(-1, keepdim=True) if self.centered else 0.0
        return self.gain * (part - own_mean) / sigma[..., None]

    def whole(self, whole: Tensor) -> Tensor:
        mean, sigma = self.statistics(whole)
        return self.gain * (whole - mean[..., None]) / sigma[..., None] + self.bias


def vectors_per_head(weights: Tensor, values: Tensor, projection: Tensor) -> Tensor:
    """α_ij f_h(x_j): (B, H, Q, K), (B, H, K, d), (H, d, D) -> (B, H, Q, K, D)."""
    transformed = torch.einsum("bhkd,hde->bhke", values, projection)
    return weights[..., None] * transformed[:, :, None]


def block_vectors(
    attention: Tensor,
    bias: Tensor,
    residual: Tensor,
    branch: DirectNorm | None,
    add_residual: bool,
    final: DirectNorm | None,
    factor: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(B, Q, K, D) vectors summed over heads, carried as far as asked; and what belongs to no key, (B, Q, D)."""
    vectors, constant = norm_parts(branch, attention, bias.expand(attention.shape[0], attention.shape[1], -1))
    if add_residual:
        vectors, constant = vectors * factor, constant * factor
        own = torch.arange(vectors.shape[1])
        vectors[:, own, own] += residual
    return norm_parts(final, vectors, constant)


def mixing_ratio(vectors: Tensor) -> Tensor:
    """(B, Q, K, D) -> (B, Q)."""
    own_index = torch.arange(vectors.shape[1])
    own = vectors[:, own_index, own_index]
    length = torch.linalg.vector_norm
    others: Tensor = length(vectors.sum(2) - own, dim=-1)
    return others.div(others + length(own, dim=-1))


@dataclass
class Layer:
    """What one layer of a model computed in an ordinary forward pass."""

    weights: Tensor  # (B, H, Q, K)
    values: Tensor  # (B, H, K, d)
    projection: Tensor  # (H, d, D)
    bias: Tensor  # (D,)
    residual: Tensor  # (B, Q, D)
    branch: DirectNorm | None
    final: DirectNorm | None
    # (D,) or one number: multiplies the attention output where the residual is added.
    factor: Tensor = field(default_factory=lambda: torch.tensor(1.0))
    value_heads: int | None = None
    # (B, Q, H, d): multiplies attention's output before the projection.
    gate: Tensor | None = None

    def vectors(self, scope: str) -> tuple[Tensor, Tensor]:
        """(B, Q, K, D) at a scope, and what belongs to no key."""
        if self.gate is None:
            attention = vectors_per_head(self.weights, self.values, self.projection).sum(1)
        else:
            parts = torch.einsum("bhqk,bhkd,bqhd->bqkhd", self.weights, self.values, self.gate)
            attention = torch.einsum("bqkhd,hde->bqke", parts, self.projection)
        through = scope not in ("attn", "attn_res")
        return block_vectors(
            attention,
            self.bias,
            self.residual,
            self.branch if scope != "attn" else None,
            scope != "attn",
            self.final if through else None,
            self.factor,
        )

    def across(self, *, residual: bool = True, norm: bool = True) -> tuple[Tensor, Tensor]:
        """Of cross-attention: (B, Q, K + 1, D) of the keys and, as one more, the stream; and what belongs to none."""
        vectors = vectors_per_head(self.weights, self.values, self.projection).sum(1)
        vectors = torch.cat([vectors, residual * self.residual[:, :, None]], 2)
        return norm_parts(self.final if norm else None, vectors, self.bias.expand_as(self.residual))


def plain_layer(weights: Tensor, values: Tensor, projection: Any, residual: Tensor, norm: Any) -> Layer:
    """A layer with a LayerNorm on its sum, or none, from what its modules gave and its linear map behind attention."""
    matrix = projection.weight.detach().double().T
    zeros = torch.zeros(matrix.shape[1], dtype=torch.float64)
    bias, beta = (
        zeros if getattr(module, "bias", None) is None else module.bias.detach().double()
        for module in (projection, norm)
    )
    final = None if norm is None else DirectNorm(True, norm.weight.detach().double(), beta, norm.eps)
    heads = matrix.unflatten(0, (weights.shape[1], -1))
    return Layer(weights.double(), values.double(), heads, bias, residual.double(), None, final)


@contextmanager
def watched(model: Any, places: Mapping[Any, tuple[str, str]]) -> Iterator[dict[Any, list[Any]]]:
    """What named modules take ("input") or give ("output", or its "first" tensor) within the context, call by call."""
    seen: dict[Any, list[Any]] = {key: [] for key in places}
    with ExitStack() as stack:
        for key, (name, end) in places.items():
            module, notes = model.get_submodule(name), seen[key]

            def at_input(_: Any, args: Any, kwargs: Any, notes: list[Any] = notes) -> None:
                notes.append(args[0] if args else next(iter(kwargs.values())))

            def at_output(_: Any, __: Any, output: Any, notes: list[Any] = notes, end: str = end) -> None:
                notes.append(output[0] if end == "first" and not isinstance(output, Tensor) else output)

            handle = (
                module.register_forward_pre_hook(at_input, with_kwargs=True)
                if end == "input"
                else module.register_forward_hook(at_output)
            )
            stack.callback(handle.remove)
        yield seen


@contextmanager
def eager(model: Any) -> Iterator[None]:
    """Attention by the model file's own formula, without gradients."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        yield
    model.set_attn_implementation(implementation)


def layers(family: Any, model: Any, inputs: Tensor, **arguments: Any) -> list[Layer]:
    """The layers of a model whose parts are at the places that ``family`` names, by its own eager attention."""
    names = [family.layer.format(index) for index in range(model.config.num_hidden_layers)]
    places = {}
    for name in names:
        places[name, "residual"] = name, "input"
        places[name, "value"] = f"{name}.{family.value}", "output"
        if family.gate is not None:
            places[name, "gate"] = f"{name}.{family.gate[0]}", family.gate[1]
    with watched(model, places) as seen, eager(model):
        attentions = model(inputs, **arguments, output_attentions=True).attentions

    def gate_of(name: str) -> Tensor | None:
        if family.gate is None:
            return None
        place, _, gate = family.gate
        return gate(model.get_submodule(f"{name}.{place}"), seen[name, "gate"].pop(0)).detach().double()  # type: ignore[no-any-return]

    return [
        layer_of(
            family,
            model.get_submodule(name),
            weights,
            seen[name, "value"].pop(0),
            seen[name, "residual"].pop(0),
            gate_of(name),
        )
        for name, weights in zip(names, attentions, strict=True)
    ]


def factor_of(layer: Any, name: str | None) -> Any:
    """What multiplies a summand: the number or parameter of this name, or 1 over it."""
    if name is None:
        return 1.0
    value: Any = attrgetter(name.removeprefix("1/"))(layer)
    return 1 / value if name.startswith("1/") else value


def layer_of(
    family: Any, layer: Any, weights: Tensor, value: Tensor, residual: Tensor, gate: Tensor | None = None
) -> Layer:
    """What a layer computed, from its weights, its value module's output, (B, K, ...), its input, and its gate."""
    output = family.values(value).double()
    if family.value_bias is not None:
        output = output + layer.get_parameter(family.value_bias).detach().double()
    projection = layer.get_submodule(family.projection)
    matrix = projection.weight.detach().double()
    # GPT-2 keeps its matrices as (inputs, outputs).
    matrix = matrix if type(projection).__name__ == "Conv1D" else matrix.T
    heads = weights.shape[1]
    width = matrix.shape[0] // heads
    values = output.unflatten(-1, (-1, width)).transpose(1, 2)
    value_heads = values.shape[1]
    factor, stream_factor = (
        torch.as_tensor(factor_of(layer, name), dtype=torch.float64).detach()
        for name in (family.branch_factor, family.residual_factor)
    )
    bias = getattr(projection, "bias", None)
    return Layer(
        weights.double(),
        values.repeat_interleave(heads // value_heads, dim=1),
        matrix.reshape(heads, width, -1),
        torch.zeros(matrix.shape[1], dtype=torch.float64) if bias is None else bias.detach().double(),
        residual.double() * stream_factor,
        family.norm(layer, family.branch_norm),
        family.norm(layer, family.final_norm),
        factor,
        value_heads,
        None if gate is None else gate.unflatten(-1, (heads, -1)),
    )


Elementwise = Callable[[Tensor], Tensor]


def slope_of(function: Elementwise, points: Tensor) -> Tensor:
    """The derivative of each entry."""
    with torch.enable_grad():
        points = points.detach().requires_grad_()
        (slopes,) = torch.autograd.grad(function(points).sum(), points)
    return slopes


def path(origin: Tensor, point: Tensor, count: int = 64) -> list[tuple[float, Tensor]]:
    """Weights and points of a quadrature along the straight line between two tensors."""
    places, weights = np.polynomial.legendre.leggauss(count)
    step = point - origin
    return [(weight / 2, origin + (place + 1) / 2 * step) for place, weight in zip(places, weights, strict=True)]


def integrated_slopes(
    activation: Elementwise, factor: Elementwise | None, origins: list[Tensor], points: list[Tensor]
) -> list[Tensor]:
    """∫ of the partial derivatives of g(u), or of g(u) h(w), along the path, numerically."""
    if len(points) == 1:
        return [sum((w * slope_of(activation, z) for w, z in path(origins[0], points[0])), torch.tensor(0.0).double())]
    gate = other = torch.zeros_like(points[0])
    for (weight, u), (_, w) in zip(path(origins[0], points[0]), path(origins[1], points[1]), strict=True):
        gate = gate + weight * slope_of(activation, u) * (w if factor is None else factor(w))
        other = other + weight * activation(u) * (1 if factor is None else slope_of(factor, w))
    return [gate, other]


@dataclass
class DirectNetwork:
    """A feed-forward network in float64: inner maps (D, F) with biases (F,), the gate's first, and the outer map.

    What it reads is multiplied by ``scale``, (B, Q), first.
    """

    inner: list[tuple[Tensor, Tensor]]
    outer: tuple[Tensor, Tensor]
    activation: Elementwise
    factor: Elementwise | None = None
    scale: Tensor | None = None

    def parts(self, vectors: Tensor, constant: Tensor, baseline: str = "zero") -> tuple[Tensor, Tensor]:
        """(B, Q, K, D) and what belongs to no key, (B, Q, D), through the network."""
        if self.scale is not None:
            vectors, constant = vectors * self.scale[:, :, None, None], constant * self.scale[:, :, None]
        biases = [constant @ weight + bias for weight, bias in self.inner]
        points = [vectors.sum(2) @ weight + z for (weight, _), z in zip(self.inner, biases, strict=True)]
        origins = [torch.zeros_like(z) for z in points] if baseline == "zero" else biases
        slopes = integrated_slopes(self.activation, self.factor, origins, points)
        hidden = torch.zeros(*vectors.shape[:3], len(self.outer[0]), dtype=torch.float64)
        unowned = self.activation(origins[0])
        for origin in origins[1:]:
            unowned = unowned * (origin if self.factor is None else self.factor(origin))
        for (weight, _), slope, z, origin in zip(self.inner, slopes, biases, origins, strict=True):
            hidden = hidden + (vectors @ weight) * slope[:, :, None]
            unowned = unowned + slope * (z - origin)
        return hidden @ self.outer[0], unowned @ self.outer[0] + self.outer[1]


def norm_parts(norm: DirectNorm | None, vectors: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
    """(B, Q, K, D) and what belongs to no key, (B, Q, D), through a norm of their whole."""
    if norm is None:
        return vectors, constant
    _, sigma = norm.statistics(vectors.sum(2) + constant)
    return norm.part(vectors, sigma[:, :, None].expand(vectors.shape[:-1])), norm.part(constant, sigma) + norm.bias


@dataclass
class FeedForwardLayer:
    """The feed-forward part of a layer: networks with a coefficient at each position, (B, Q), norms, and a factor."""

    networks: list[tuple[DirectNetwork, Tensor]]
    norm: DirectNorm | None = None
    branch_norm: DirectNorm | None = None
    final_norm: DirectNorm | None = None
    factor: Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.float64))

    def through(self, vectors: Tensor, constant: Tensor, baseline: str = "zero") -> tuple[Tensor, Tensor]:
        """(B, Q, K, D) and what belongs to no key through the norm and the networks."""
        vectors, constant = norm_parts(self.norm, vectors, constant)
        pairs = [(network.parts(vectors, constant, baseline), c) for network, c in self.networks]
        zero = torch.zeros(1, dtype=torch.float64)
        written = sum((parts * c[:, :, None, None] for (parts, _), c in pairs), zero)
        return written, sum((unowned * c[..., None] for (_, unowned), c in pairs), zero)

    def scopes(self, vectors: Tensor, constant: Tensor, baseline: str = "zero") -> dict[str, tuple[Tensor, Tensor]]:
        """Vectors at the end of the attention block at every scope behind it, and what belongs to no key there."""
        written = self.through(vectors, constant, baseline)
        branch, unowned = norm_parts(self.branch_norm, *written)
        total = vectors + branch * self.factor, constant + unowned * self.factor
        return {
            "atb_ln": norm_parts(self.norm, vectors, constant),
            "atb_ff": written,
            "atb_ff_res": total,
            "atb_ff_res_ln": norm_parts(self.final_norm, *total),
        }

    def parallel(
        self, vectors: Tensor, constant: Tensor, residual: Tensor, baseline: str = "zero"
    ) -> tuple[Tensor, Tensor]:
        """The end of a parallel layer, whose networks read the residual stream before attention, (B, Q, D)."""
        own, unowned = self.through(residual[:, :, None], torch.zeros_like(residual), baseline)
        vectors, places = vectors.clone(), torch.arange(vectors.shape[1])
        vectors[:, places, places] += own[:, :, 0]
        return vectors, constant + unowned

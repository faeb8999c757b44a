"""Hand-written layers whose sums can be read in several ways, and what is added to what."""

from collections.abc import Callable
from dataclasses import replace
from inspect import isfunction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests import oracle

WIDTH, HEADS = 16, 2
IDS = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(0))
LATER = (torch.arange(5) > 1)[:, None]
"""Positions, as (Q, 1)."""


class Attention(nn.Module):
    """Its heads' outputs are a tensor of its own, for a second projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and values, (B, H, Q, K) and (B, H, K, d)."""
        q, k, v = (map_(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for map_ in (self.q, self.k, self.v))
        return (q @ k.mT).softmax(-1), v

    def context(self, x: Tensor) -> Tensor:
        weights, v = self.heads(x)
        return (weights @ v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.o(self.context(x))
        return output


class Network(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))


class Mixer(nn.Module):
    """Mixes positions by their running sum."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(self.inside(x).cumsum(1).tanh())
        return output


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Sum(NamedTuple):
    """What is added to what.

    Attributes:
        attention: the attention.
        read: what it attends to.
        stream: the residual stream that its output is added to.
        factor: what multiplies its output.
        norm: the norm on its output.
    """

    attention: Attention
    read: Tensor
    stream: Tensor
    factor: Any = 1.0
    norm: nn.LayerNorm | None = None

    def exact(self) -> oracle.Layer:
        norm = (
            self.norm if self.norm is None else oracle.DirectNorm(True, self.norm.weight, self.norm.bias, self.norm.eps)
        )
        layer = oracle.plain_layer(*self.attention.heads(self.read), self.attention.o, self.stream, None)
        return replace(layer, branch=norm, factor=torch.as_tensor(self.factor, dtype=torch.float64))


Arranged = tuple[Tensor, list[Sum]]


class Layer(nn.Module):
    """Parts for any arrangement, which gives the output and the sums that its attentions' outputs are added in."""

    def __init__(self, arrange: Callable[["Layer", Tensor], Arranged]) -> None:
        super().__init__()
        self.attn, self.other = Attention(), Attention()
        self.ff, self.ff2 = Network(), Network()
        self.mixer, self.sine, self.seen = Mixer(), Sine(), nn.Identity()
        self.n1, self.n2, self.n3, self.n4 = (nn.LayerNorm(WIDTH) for _ in range(4))
        self.low, self.up, self.score = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1)
        # An ε, and gates that are not open yet.
        self.tiny = 1e-12
        self.closed, self.closed2 = (nn.Parameter(torch.zeros(1)) for _ in range(2))
        if "alpha" in arrange.__code__.co_names:
            self.alpha, self.beta = 0.7, 1.3
        if "scale" in arrange.__code__.co_names:
            self.scale, self.scale2 = (nn.Parameter(torch.rand(WIDTH)) for _ in range(2))
        self.arrange = arrange

    def forward(self, x: Tensor) -> Tensor:
        return self.arrange(self, x)[0]


def two_networks(p: Layer, x: Tensor) -> Arranged:
    n = p.n1(x)
    h = x + p.alpha * p.attn(n)
    m = p.n2(h)
    return h + p.alpha * (p.ff(m) + p.ff2(m)), [Sum(p.attn, n, x, p.alpha)]


def sandwich_of_two_networks(p: Layer, x: Tensor) -> Arranged:
    n = p.n1(x)
    h = x + p.n3(p.attn(n))
    m = p.n2(h)
    return h + p.n4(p.ff(m) + p.ff2(m)), [Sum(p.attn, n, x, norm=p.n3)]


def network_at_some_positions(p: Layer, x: Tensor) -> Arranged:
    n = p.n1(x)
    h = x + p.attn(n)
    return h + LATER * p.ff(p.n2(h)), [Sum(p.attn, n, x)]


def attention_at_some_positions(p: Layer, x: Tensor) -> Arranged:
    h = x + LATER * p.attn(p.n1(x))
    return h + p.ff(p.n2(h)), []


def positions_that_skip_the_layer(p: Layer, x: Tensor) -> Arranged:
    h = x + p.attn(p.n1(x))
    return torch.where(LATER, h + p.ff(p.n2(h)), x), []


def positions_with_another_stream(p: Layer, x: Tensor) -> Arranged:
    n = p.n1(x)
    a = p.attn(n)
    return torch.where(LATER, p.seen(n + a), x + a), []


def network_before(p: Layer, x: Tensor) -> Arranged:
    h = x + p.ff(p.n2(x))
    n = p.n1(h)
    return h + p.attn(n), [Sum(p.attn, n, h)]


def network_before_without_norms(p: Layer, x: Tensor) -> Arranged:
    h = x + p.ff(x)
    return h + p.attn(h), [Sum(p.attn, h, h)]


def network_before_a_norm_that_is_no_module(p: Layer, x: Tensor) -> Arranged:
    h = x + p.ff(p.n2(x))
    return h + p.attn(nn.functional.layer_norm(h, (WIDTH,))), []


def two_attentions(p: Layer, x: Tensor) -> Arranged:
    n = p.n1(x)
    h = x + p.attn(n)
    m = p.n2(h)
    return h + p.other(m), [Sum(p.attn, n, x), Sum(p.other, m, h)]


def attention_then_a_parallel_layer(p: Layer, x: Tensor) -> Arranged:
    n = p.n1(x)
    h = x + p.attn(n)
    m = p.n2(h)
    return h + p.ff(m) + p.other(m), [Sum(p.attn, n, x), Sum(p.other, m, h)]


def attentions_in_one_sum(p: Layer, x: Tensor) -> Arranged:
    n = p.n1(x)
    return x + p.attn(n) + p.other(n), []


def mixer_beside_attention(p: Layer, x: Tensor) -> Arranged:
    n = p.n1(x)
    return x + p.attn(n) + p.mixer(n), [Sum(p.attn, n, x)]


def mixer_beside_attention_before_a_network(p: Layer, x: Tensor) -> Arranged:
    n = p.n1(x)
    h = x + p.attn(n) + p.mixer(n)
    return h + p.ff(p.n2(h)), []


def parallel(p: Layer, x: Tensor) -> Arranged:
    n = p.n1(x)
    return x + p.attn(n) + p.ff(p.n2(x)), [Sum(p.attn, n, x)]


def parallel_with_the_network_first(p: Layer, x: Tensor) -> Arranged:
    n = p.n1(x)
    fed = p.seen(p.ff(n))
    return x + fed + p.attn(n), [Sum(p.attn, n, x)]


def parallel_without_modules_around_the_network(p: Layer, x: Tensor) -> Arranged:
    n = p.n1(x)
    return x + p.attn(n) + p.up(nn.functional.gelu(p.low(n))), [Sum(p.attn, n, x)]


def parallel_with_factors(p: Layer, x: Tensor) -> Arranged:
    return x + p.alpha * p.attn(p.n1(x)) + p.beta * p.ff(p.n2(x)), []


def second_path_from_attention(p: Layer, x: Tensor) -> Arranged:
    """LoRA, written into the layer."""
    context = p.attn.context(p.n1(x))
    return x + p.attn.o(context) + p.up(p.low(context)), []


def adapter_on_attention(p: Layer, x: Tensor) -> Arranged:
    a = p.attn(p.n1(x))
    return x + a + p.up(p.low(a)), []


def network_of_attention_alone(p: Layer, x: Tensor) -> Arranged:
    a = p.attn(p.n1(x))
    return x + a + p.ff(p.n2(a)), []


def sum_that_only_a_score_reads(p: Layer, x: Tensor) -> Arranged:
    n = p.n1(x)
    a = p.attn(n)
    h = x + a
    return h + p.score(n + a).sigmoid() * p.ff(p.n2(h)), []


def attention_twice(p: Layer, x: Tensor) -> Arranged:
    a = p.attn(p.n1(x))
    return p.seen(x + a) + a, []


def scales(p: Layer, x: Tensor) -> Arranged:
    n = p.n1(x)
    h = x + p.scale * p.attn(n)
    return h + p.scale2 * p.ff(p.n2(h)), [Sum(p.attn, n, x, p.scale)]


def closed_gates(p: Layer, x: Tensor) -> Arranged:
    """Gates at their initial 0 hide what they multiply."""
    h = x + p.closed.tanh() * p.attn(p.n1(x))
    return h + p.closed2.tanh() * p.ff(p.n2(h)), []


def closed_gate_of_the_network(p: Layer, x: Tensor) -> Arranged:
    return x + p.sine(p.attn(p.n1(x))) + p.closed * p.ff(p.n2(x)), []


def one_network_twice(p: Layer, x: Tensor) -> Arranged:
    n = p.n1(x)
    h = x + p.attn(n)
    return h + p.ff(p.n2(h)) + p.ff(p.n3(h)), []


ARRANGEMENTS = [each for each in list(globals().values()) if isfunction(each) and each.__module__ == __name__]
"""All of them."""

"""Slopes against slow numeric integration; parts through frozen networks add up to the whole."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from captum_norm.functional.feed_forward import (
    Affine,
    Baseline,
    FrozenFeedForward,
    Network,
    Use,
    gate_slopes,
    secant_slope,
    written_by,
)
from tests.oracle import integrated_slopes

SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "tanh gelu": lambda z: functional.gelu(z, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "mish": functional.mish,
}
KINKED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "squared relu": lambda z: torch.relu(z).square(),
    "leaky relu": functional.leaky_relu,
}
TINY = [0.0, 1e-300, -1e-30, 1e-12, -1e-9, 3e-8, -1e-7, 1e-5, -1e-3, 0.05]


def points(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.tensor(TINY), 3 * torch.randn(200, generator=generator)]).to(dtype)


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("seed", range(3))
def test_slopes_equal_numeric_integration(name: str, seed: int) -> None:
    function, point = SMOOTH[name], points(seed)
    origin = points(seed + 10).flip(0)
    for start in (torch.zeros_like(point), origin, point + 1e-9, point.clone()):
        (expected,) = integrated_slopes(function, None, [start], [point])
        # A difference quotient over a step of 1e-6 keeps 9 of float64's 16 digits.
        tolerance = torch.where((point - start).abs() < 1e-2, 1e-8, 1e-12)
        assert ((secant_slope(function, start, point) - expected).abs() <= tolerance).all()


@pytest.mark.parametrize("name", SMOOTH)
def test_slopes_from_zero_are_exact_however_small_the_point(name: str) -> None:
    function, point = SMOOTH[name], points(0, torch.float32)
    (expected,) = integrated_slopes(function, None, [torch.zeros_like(point).double()], [point.double()])
    found = secant_slope(function, torch.zeros_like(point), point).double()
    # Functions that are not 0 at 0 lose digits in their difference, down to half of them.
    tolerance = 1e-6 if float(function(torch.zeros(()))) == 0 else 1e-3
    assert (found - expected).abs().max() < tolerance


@pytest.mark.parametrize("name", KINKED)
def test_slopes_across_a_kink_are_those_of_the_secant(name: str) -> None:
    function, point, origin = KINKED[name], points(1), points(2).flip(0)
    found = secant_slope(function, origin, point) * (point - origin)
    torch.testing.assert_close(found, function(point) - function(origin), rtol=1e-9, atol=1e-15)
    # By hand: from −1 to 3, ReLU rises by 3 over a step of 4.
    assert secant_slope(torch.relu, torch.tensor(-1.0), torch.tensor(3.0)) == 0.75


@pytest.mark.parametrize("name", [*SMOOTH, *KINKED])
@pytest.mark.parametrize("factor", [None, torch.tanh])
@pytest.mark.parametrize("seed", range(3))
def test_gated_shares_equal_numeric_integration_and_add_up(
    name: str, factor: Callable[[Tensor], Tensor] | None, seed: int
) -> None:
    function = (SMOOTH | KINKED)[name]
    gate, other = points(seed) / 2, points(seed + 20).flip(0) / 2
    origins = torch.zeros_like(gate), torch.zeros_like(other)
    if name in SMOOTH and seed:
        origins = points(seed + 30).roll(50) / 2, points(seed + 40).roll(70) / 2
    found = gate_slopes(function, factor, origins, (gate, other))
    expected = integrated_slopes(function, factor, list(origins), [gate, other])
    for slope, exact in zip(found, expected, strict=True):
        assert (slope - exact).abs().max() < 1e-6  # what 16 points reach on paths of up to 8 units
    value = torch.tanh if factor else (lambda w: w)
    change = function(gate) * value(other) - function(origins[0]) * value(origins[1])
    shares = found[0] * (gate - origins[0]) + found[1] * (other - origins[1])
    torch.testing.assert_close(shares, change, rtol=1e-12, atol=1e-12)


def test_quadrature_error_on_the_paths_of_usual_gates() -> None:
    """The accuracy that the documentation states for SwiGLU and GEGLU gates, by their size."""
    for function in (functional.silu, functional.gelu):
        for size, bound in ((4.0, 1e-11), (8.0, 1e-8), (16.0, 1e-5)):
            gate = torch.linspace(-size, size, 401, dtype=torch.float64)
            _, slope = gate_slopes(function, None, (torch.zeros(1).double(), torch.zeros(1).double()), (gate, gate))
            places, weights = np.polynomial.legendre.leggauss(200)
            exact = sum(w / 2 * function((p + 1) / 2 * gate) for p, w in zip(places, weights, strict=True))
            assert (slope - exact).abs().max() < bound, (function, size)


WIDTH, NEURONS, QUERIES, PARTS = 6, 20, 5, 40


def affine(inputs: int, outputs: int) -> Affine:
    return Affine(torch.randn(inputs, outputs, dtype=torch.float64), torch.randn(outputs, dtype=torch.float64))


def networks() -> dict[str, Network]:
    outer = affine(NEURONS, WIDTH)
    return {
        "gelu": Network((affine(WIDTH, NEURONS),), outer, functional.gelu),
        "relu": Network((affine(WIDTH, NEURONS),), outer, torch.relu),
        "swiglu": Network((affine(WIDTH, NEURONS), affine(WIDTH, NEURONS)), outer, functional.silu),
        "clamped": Network(
            (affine(WIDTH, NEURONS), affine(WIDTH, NEURONS)), outer, torch.relu, lambda w: w.clamp(-1, 1) + 1
        ),
    }


@pytest.mark.parametrize("name", ["gelu", "relu", "swiglu", "clamped"])
@pytest.mark.parametrize("baseline", ["zero", "bias"])
@pytest.mark.parametrize("seed", range(3))
def test_parts_add_up_either_way(name: str, baseline: Baseline, seed: int) -> None:
    torch.manual_seed(seed)
    network = networks()[name]
    parts = torch.randn(QUERIES, PARTS, WIDTH, dtype=torch.float64)
    constant = torch.randn(QUERIES, WIDTH, dtype=torch.float64)
    some, coefficient = torch.tensor([0, 2, 3]), torch.randn(3, 1, dtype=torch.float64)
    scale = torch.randn(3, 1, dtype=torch.float64)
    uses = [Use(network), Use(network, some, coefficient), Use(network, some, scale=scale)]
    whole = parts.sum(1) + constant
    frozen = FrozenFeedForward(uses, whole, constant, baseline)
    queries = torch.arange(QUERIES).repeat_interleave(PARTS)
    # No room for a query's matrix, room for all, and too few parts of most queries to make it worth while.
    singly, together = (frozen.through(parts.flatten(0, 1), queries, numbers) for numbers in (0, 10**9))
    torch.testing.assert_close(together, singly, rtol=1e-12, atol=1e-12)
    few = torch.cat([torch.arange(PARTS), torch.arange(PARTS, QUERIES * PARTS, PARTS)])
    mixed = frozen.through(parts.flatten(0, 1)[few], queries[few], 10**9)
    torch.testing.assert_close(mixed, singly[few], rtol=1e-12, atol=1e-12)
    expected = network.whole(whole)
    expected[some] += coefficient * network.whole(whole[some]) + network.whole(scale * whole[some])
    torch.testing.assert_close(written_by(uses, whole), expected)
    torch.testing.assert_close(singly.unflatten(0, (QUERIES, PARTS)).sum(1) + frozen.constant, expected)


def test_from_the_biases_no_part_means_no_share() -> None:
    """The constants are what the network gives without any part; from zero they get the slope of the whole."""
    torch.manual_seed(0)
    network, constant = networks()["gelu"], torch.randn(1, WIDTH, dtype=torch.float64)
    whole = constant + torch.randn(1, WIDTH, dtype=torch.float64)
    bias = FrozenFeedForward([Use(network)], whole, constant, "bias")
    torch.testing.assert_close(bias.constant, network.whole(constant))
    point, share = network.inner[0].whole(whole), network.inner[0].whole(constant)
    slope = functional.gelu(point) / point
    zero = FrozenFeedForward([Use(network)], whole, constant, "zero")
    torch.testing.assert_close(zero.constant, network.outer.whole(slope * share))

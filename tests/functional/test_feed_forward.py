"""Frozen networks: parts add up to the whole, and the two ways through are one map."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from captum_norm.functional import Affine, Baseline, FrozenFeedForward, Network, Use, written_by

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


def test_dead_neurons_are_left_out_of_a_query_s_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network, whole = networks()["relu"], torch.randn(1, WIDTH, dtype=torch.float64)
    frozen = FrozenFeedForward([Use(network)], whole, torch.zeros_like(whole), "zero")
    live = int((network.inner[0].whole(whole) > 0).sum())
    assert 0 < live < NEURONS
    shapes = []
    product = Tensor.__matmul__

    def watched(left: Tensor, right: Tensor) -> Tensor:
        shapes.append((tuple(left.shape), tuple(right.shape)))
        return product(left, right)

    monkeypatch.setattr(Tensor, "__matmul__", watched)
    frozen.through(torch.randn(PARTS, WIDTH, dtype=torch.float64), torch.zeros(PARTS, dtype=torch.long), 10**9)
    assert shapes == [((WIDTH, live), (live, WIDTH)), ((PARTS, WIDTH), (WIDTH, WIDTH))]

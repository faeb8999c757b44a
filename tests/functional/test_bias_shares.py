"""Shared biases: the shares by hand, their sum, and what nothing is in proportion to."""

import pytest
import torch

from captum_norm.functional import BIAS_SHARES, add_bias

PARTS = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]], [[-1.0, 0.0]]])
BIAS = torch.tensor([1.0, -1.0])


@pytest.mark.parametrize(
    ("sharing", "weights"),
    [
        ("absdot", [1, 0, 1]),
        ("abssim", [1 / 5, 0, 1]),
        ("norm", [5, 0, 1]),
        ("equal", [1, 0, 1]),
        ("cls", [1, 0, 0]),
    ],
)
def test_shares_are_in_proportion(sharing: str, weights: list[float]) -> None:
    shares = torch.tensor(weights) / sum(weights)
    torch.testing.assert_close(add_bias(PARTS, BIAS, sharing), PARTS + shares[:, None, None] * BIAS)


@pytest.mark.parametrize("sharing", BIAS_SHARES)
def test_a_bias_that_stands_apart_from_all_parts_is_not_lost(sharing: str) -> None:
    for parts in (torch.zeros(4, 2, 2), torch.tensor([[[1.0, 1.0]], [[0.0, 0.0]], [[2.0, 2.0]]])):
        shared = add_bias(parts, BIAS, sharing)
        torch.testing.assert_close(shared.sum(0), parts.sum(0) + BIAS)
    assert sharing == "cls" or not shared[1].any()

"""Importance handed on through intermediate tokens, against walks written out."""

import pytest
import torch

from captum_norm.generation import handed_on


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("hops", [0, 1, 2, 5])
def test_importance_takes_all_walks(seed: int, hops: int) -> None:
    torch.manual_seed(seed)
    first, count, size = 3, 4, 8
    rows = torch.rand(count, size, dtype=torch.float64).tril(first - 1)
    importance = torch.rand(size, dtype=torch.float64)
    step = torch.eye(size, dtype=torch.float64)
    step[first : first + count] = rows / rows.sum(1, keepdim=True)
    expected, before = importance @ torch.linalg.matrix_power(step, hops), importance.clone()
    found = handed_on(importance, rows, first, hops)
    assert torch.equal(importance, before)
    assert torch.allclose(found, expected, rtol=1e-12)
    assert torch.allclose(found.sum(), importance.sum(), rtol=1e-12)
    if hops > count:
        assert not found[first : first + count].any(), "a chain of four tokens has been walked to its beginning"


def test_a_token_that_rests_on_nothing_keeps_what_it_has() -> None:
    rows = torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    found = handed_on(torch.tensor([0.0, 0.4, 0.6]), rows, 1, 1)
    assert torch.allclose(found, torch.tensor([0.3, 0.7, 0.0]))

"""Seeds hold inside, nothing changes outside."""

import numpy as np
import pytest
import torch
from torch import nn

from captum_norm.lab.comparison.seeding import seeded


def drawn() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand())]  # noqa: NPY002


def test_draws_follow_from_the_seed_alone() -> None:
    model = nn.Linear(1, 1)
    torch.manual_seed(9)
    np.random.seed(9)  # noqa: NPY002
    outside = [drawn(), drawn()]
    torch.manual_seed(9)
    np.random.seed(9)  # noqa: NPY002
    first = drawn()
    with seeded(model, 1):
        inside = drawn()
    again: list[float] = []

    def fail() -> None:
        with seeded(model, 1):
            again.extend(drawn())
            raise RuntimeError("the model's")

    with pytest.raises(RuntimeError, match="the model's"):
        fail()
    assert again == inside
    assert [first, drawn()] == outside

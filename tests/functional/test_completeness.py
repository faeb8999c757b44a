"""The random check estimates an error's size and misses none."""

import torch
from torch import Tensor

from captum_norm import functional as F


def estimate(error: Tensor, reference: Tensor, real: Tensor | None = None) -> Tensor:
    sketch = error @ F.random_directions(error.shape[-1], error)
    return F.relative_error(F.estimated_length(sketch), reference.norm(dim=-1), real)


def test_the_estimate_is_near_the_error() -> None:
    torch.manual_seed(0)
    reference = torch.randn(3, 400, 64, dtype=torch.float64)
    error = 1e-4 * torch.randn_like(reference)
    exact = error.flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1)
    # 400 positions, each estimated from 8 directions: a relative deviation of about 1/sqrt(2·8·400) ≈ 1 %.
    torch.testing.assert_close(estimate(error, reference), exact, rtol=0.1, atol=0)


def test_one_wrong_coordinate_is_seen() -> None:
    reference = torch.ones(1, 3, 16)
    for coordinate in range(16):
        error = torch.zeros_like(reference)
        error[0, 1, coordinate] = 0.5
        assert estimate(error, reference).item() > 0.05


def test_padded_positions_do_not_count_and_nan_does() -> None:
    reference, error = torch.ones(1, 2, 4), torch.zeros(1, 2, 4)
    error[0, 1] = torch.nan
    assert estimate(error, reference, torch.tensor([[True, False]])).item() == 0
    assert estimate(error, reference).isnan().item()

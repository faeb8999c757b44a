"""Do the vectors add up to what the model computed? Checked through a few random directions.

Adding up Σ_j Σ_h α_ij f_h(x_j) exactly costs as much as the attention itself. Projected on k random directions Ω it
costs k/d of that, and for a vector e the mean of ‖eᵀΩ‖²/k is ‖e‖² (random signs): an error of the decomposition cannot
hide in all directions, and its size is estimated without bias (Freivalds' check of a matrix product).
"""

import torch
from torch import Tensor

DIRECTIONS = 8


def random_directions(width: int, like: Tensor) -> Tensor:
    """Ω, (D, k): random signs, the same on every call. dtype and device are those of ``like``."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (width, DIRECTIONS), generator=generator)
    return (signs * 2 - 1).to(like)


def relative_error(error: Tensor, reference: Tensor, real: Tensor | None) -> Tensor:
    """‖error‖ / ‖reference‖ of each example.

    Args:
        error: the error's projections on the random directions, (B, Q, k).
        reference: what the model computed, (B, Q, D).
        real: True at real query positions, (B, Q), or None where all are.

    Returns:
        (B,), without unit. NaN if anything was.
    """
    squares = error.square().mean(-1)
    scale = reference.square().sum(-1)
    if real is not None:
        squares = torch.where(real, squares, torch.zeros_like(squares))
        scale = torch.where(real, scale, torch.zeros_like(scale))
    return (squares.sum(1) / scale.sum(1).clamp(min=torch.finfo(scale.dtype).tiny)).sqrt()

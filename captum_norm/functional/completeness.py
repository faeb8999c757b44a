"""Do the vectors add up to what the model computed? Checked through a few random directions.

Adding up Σ_j Σ_h α_ij f_h(x_j) exactly costs as much as the attention itself. Projected on k random directions Ω it
costs k/d of that, and for a vector e the mean of ‖eᵀΩ‖²/k is ‖e‖² (random signs): an error of the decomposition cannot
hide in all directions, and its size is estimated without bias (Freivalds' check of a matrix product).
"""

from functools import lru_cache

import torch
from torch import Tensor

DIRECTIONS = 8


def random_directions(width: int, like: Tensor) -> Tensor:
    """Ω, (D, k): random signs, the same on every call. dtype and device are those of ``like``."""
    return _directions(width, like.dtype, like.device)


@lru_cache(maxsize=16)
def _directions(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Kept for later calls, which may want gradients that tensors of inference mode cannot take part in.
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (width, DIRECTIONS), generator=generator)
        return (signs * 2 - 1).to(device, dtype)


def squared_length(sketch: Tensor) -> Tensor:
    """An unbiased estimate of ‖e‖² from e's projections on the random directions, (..., k) -> (...)."""
    return sketch.square().mean(-1)


def relative_error(squared_error: Tensor, squared_reference: Tensor, real: Tensor | None) -> Tensor:
    """‖error‖ / ‖reference‖ of each example.

    Args:
        squared_error: squared length of the error at each query position, (B, Q).
        squared_reference: squared length of what the model computed there, (B, Q).
        real: True at real query positions, (B, Q), or None where all are.

    Returns:
        (B,), without unit. NaN if anything was.
    """
    if real is not None:
        real = real.to(squared_error.device)
        squared_error, squared_reference = squared_error.where(real, 0), squared_reference.where(real, 0)
    smallest = torch.finfo(squared_reference.dtype).tiny
    return (squared_error.sum(1) / squared_reference.sum(1).clamp(min=smallest)).sqrt()

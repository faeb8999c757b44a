"""Do the vectors add up to what the model computed? Checked through a few random directions.

Adding up Σ_j Σ_h α_ij f_h(x_j) exactly costs as much as the attention itself. Projected on k random directions Ω it
costs k/d of that, and for a vector e the mean of ‖eᵀΩ‖²/k is ‖e‖² (random signs): an error of the decomposition cannot
hide in all directions, and its size is estimated without bias (Freivalds' check of a matrix product).
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from captum_norm.functional.lengths import length

DIRECTIONS = 8


def random_directions(width: int, like: Tensor) -> Tensor:
    """Ω, (D, k): random signs, the same on every call. dtype and device are those of ``like``."""
    return _directions(width, like.dtype, like.device)


@lru_cache(maxsize=16)
def _directions(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Kept for later calls, which may want gradients that tensors of inference mode cannot take part in.
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (width, DIRECTIONS), generator=generator, device="cpu")
        return (signs * 2 - 1).to(device, dtype)


def estimated_length(sketch: Tensor) -> Tensor:
    """An estimate of ‖e‖, whose square is unbiased, from e's projections on the directions, (..., k) -> (...)."""
    return length(sketch) / math.sqrt(sketch.shape[-1])


def relative_error(error: Tensor, reference: Tensor, real: Tensor | None) -> Tensor:
    """‖error‖ / ‖reference‖ of each example.

    Args:
        error: length of the error at each query position, (B, Q).
        reference: length of what the model computed there, (B, Q).
        real: True at real query positions, (B, Q), or None where all are.

    Returns:
        (B,), without unit. NaN if anything was.
    """
    if real is not None:
        real = real.to(error.device)
        error, reference = error.where(real, 0), reference.where(real, 0)
    return length(error) / length(reference).clamp(min=torch.finfo(reference.dtype).tiny)

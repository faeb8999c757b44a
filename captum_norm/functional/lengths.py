"""Measures vectors: Euclidean norms that do not underflow, and estimates from a few random projections.

Checking that a decomposition adds up to what the model computed takes the sum Σ_j Σ_h α_ij f_h(x_j), which costs as
much as attention itself. Projected on k random directions Ω (random signs) it costs k/d of that. For a vector e the
mean of ‖eᵀΩ‖²/k is ‖e‖²: an error cannot hide from all directions, and its squared size is estimated without bias
(Freivalds' check of a matrix product).
"""

import math
from functools import cache, lru_cache

import torch
from torch import Tensor

DIRECTIONS = 8


@cache
def least_exact(dtype: torch.dtype) -> float:
    """Return the norm above which underflow in the square costs no significant digits."""
    limits = torch.finfo(dtype)
    return 4 * math.sqrt(limits.tiny / limits.eps)


def in_range(norms: Tensor) -> bool:
    """Return whether no norm lost digits in its square: none is nearly zero, infinite or NaN."""
    if not norms.numel():
        return True
    low, high = norms.detach().aminmax()
    return least_exact(norms.dtype) < low.item() and high.item() < math.inf


def out_of_range(norms: Tensor) -> Tensor:
    """Return a mask of the norms that may have lost digits; see :func:`in_range`."""
    norms = norms.detach()
    return ((norms > least_exact(norms.dtype)) & (norms < math.inf)).logical_not()


def balanced(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Divide vectors by powers of two to bring their largest entries between 1 and 2, without rounding.

    Args:
        vectors: (..., D).

    Returns:
        (..., D) and the powers of two, (..., 1); zero and non-finite vectors are divided by one.

    Example:
        >>> balanced(torch.tensor([[3e-30, 0.0], [0.0, 0.0]]))[0]
        tensor([[1.9015, 0.0000],
                [0.0000, 0.0000]])
    """
    largest = vectors.detach().abs().amax(-1, keepdim=True)
    exponent = torch.frexp(largest).exponent - 1
    power = torch.ldexp(torch.ones_like(largest), exponent)
    power = torch.where((largest > 0) & (largest < torch.inf), power, torch.ones_like(power))
    return vectors / power, power


def length(vectors: Tensor) -> Tensor:
    """Compute ‖x‖, (..., D) -> (...).

    If its square leaves the dtype's range, the vector is divided by a power of two first; otherwise the result is
    bitwise equal to torch's.

    Example:
        >>> length(torch.tensor([3e-30, 4e-30])), length(torch.tensor([3e30, 4e30]))
        (tensor(5.0000e-30), tensor(5.0000e+30))
    """
    (norms,) = lengths(vectors)
    return norms


def lengths(*vectors: Tensor) -> tuple[Tensor, ...]:
    """Compute :func:`length` of several tensors of one dtype, with one range check for all."""
    if vectors[0].is_cuda:
        return tuple(map(_balanced_length, vectors))  # checking the range would synchronise
    norms: list[Tensor] = [torch.linalg.vector_norm(several, dim=-1) for several in vectors]
    if not in_range(norms[0] if len(norms) == 1 else torch.cat([found.detach().flatten() for found in norms])):
        norms = [_refined(*pair) for pair in zip(norms, vectors, strict=True)]
    return tuple(norms)


def _refined(norms: Tensor, vectors: Tensor) -> Tensor:
    again = out_of_range(norms)
    return norms.masked_scatter(again, _balanced_length(vectors[again])) if again.any() else norms


def _balanced_length(vectors: Tensor) -> Tensor:
    rows, power = balanced(vectors)
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1) * power.squeeze(-1)
    return lengths


def unit(vectors: Tensor) -> Tensor:
    """Divide vectors by their lengths, (..., D) -> (..., D); zero stays zero."""
    norms = length(vectors).unsqueeze(-1)
    return vectors / torch.where(norms > 0, norms, torch.ones_like(norms))


def random_directions(width: int, like: Tensor) -> Tensor:
    """Return Ω, (D, k): random signs, the same on every call, with the dtype and device of ``like``."""
    return _directions(width, like.dtype, like.device)


@lru_cache(maxsize=16)
def _directions(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Later calls may need gradients, which inference tensors do not support.
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (width, DIRECTIONS), generator=generator, device="cpu")
        # In column-major order, in which multiplying by so few columns is several times faster.
        return (signs * 2 - 1).T.contiguous().T.to(device, dtype)


def estimated_length(sketch: Tensor) -> Tensor:
    """Estimate ‖e‖ from e's projections on the directions, (..., k) -> (...); the square is unbiased."""
    return length(sketch) / math.sqrt(sketch.shape[-1])


def relative_error(error: Tensor, reference: Tensor, real: Tensor | None) -> Tensor:
    """Compute ‖error‖ / ‖reference‖ of each example.

    Args:
        error: length of the error at each query position, (B, Q).
        reference: length of what the model computed there, (B, Q).
        real: True at real query positions, (B, Q); None if all are.

    Returns:
        (B,), dimensionless; NaN if any input is.
    """
    if real is not None:
        real = real.to(error.device)
        error, reference = error.where(real, 0), reference.where(real, 0)
    error, reference = lengths(error, reference)
    return error / reference.clamp(min=torch.finfo(reference.dtype).tiny)

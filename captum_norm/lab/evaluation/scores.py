"""Computes faithfulness scores from outputs: tensors in, tensors out.

f is the model's output for the explained class, x the whole input, x₁ … x_K are perturbed inputs.
"""

import torch
from torch import Tensor

from captum_norm.checks import shown
from captum_norm.errors import InvalidInputError

MOST = 10**6
"""The largest number of steps or samples; more would not fit into memory."""


def mean_drop(whole: Tensor, perturbed: Tensor) -> Tensor:
    """1/K Σ_k f(x) − f(x_k): area over the perturbation curve, comprehensiveness or sufficiency, depending on x_k.

    Args:
        whole: f(x), (B,).
        perturbed: f(x_k), (B, K).

    Returns:
        (B,).

    >>> mean_drop(torch.tensor([0.75]), torch.tensor([[0.5, 0.25]]))
    tensor([0.3750])
    """
    return (whole[:, None] - perturbed).mean(1)


def area(curve: Tensor) -> Tensor:
    """∫₀¹ of a curve at equal steps, by the trapezoidal rule: (B, K + 1) -> (B,)."""
    return torch.trapezoid(curve, dx=1 / (curve.shape[1] - 1), dim=1)


def relevance_gain(most_relevant_first: Tensor, least_relevant_first: Tensor) -> Tensor:
    """Area between the two perturbation curves, LeRF minus MoRF [Blücher et al. 2024]: (B, K + 1) twice -> (B,).

    >>> relevance_gain(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]]))
    tensor([0.5000])
    """
    return area(least_relevant_first) - area(most_relevant_first)


def check_scores(scores: object, removable: Tensor) -> None:
    """Check that scores have a number for each token, (B, S).

    Raises:
        InvalidInputError: they have not.
    """
    if not isinstance(scores, Tensor) or scores.is_nested or scores.is_meta:
        raise InvalidInputError(f"got scores {shown(scores)}; expected a tensor with their numbers")
    if scores.shape != removable.shape:
        raise InvalidInputError(f"got scores of shape {tuple(scores.shape)}; expected {tuple(removable.shape)}")

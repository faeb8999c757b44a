"""Names the precisions in which models compute and norms are computed."""

import torch

EIGHT_BITS = torch.int8
"""Precision of a map that rounds its inputs to eight bits, as LLM.int8 and dynamic quantisation do."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute norms in: float32, or the model's own if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def least_precise(*precisions: torch.dtype) -> torch.dtype:
    """Return the least precise of some dtypes: floating-point ones, or :data:`EIGHT_BITS`."""
    return max(precisions, key=epsilon_of)


def epsilon_of(precision: torch.dtype) -> float:
    """Return the distance of neighbouring numbers relative to the number, or to the largest one of eight bits."""
    return 1 / torch.iinfo(precision).max if precision == EIGHT_BITS else torch.finfo(precision).eps

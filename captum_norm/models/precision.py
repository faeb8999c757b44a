"""Names the precisions in which models compute and norms are computed."""

import torch

EIGHT_BITS = torch.int8
"""Precision of a map that rounds its inputs to eight bits, as LLM.int8 and dynamic quantisation do."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute norms in: float32, or the model's own if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def coarsest(*precisions: torch.dtype) -> torch.dtype:
    """Return the least precise of some precisions: floating-point dtypes, or :data:`EIGHT_BITS`."""
    if EIGHT_BITS in precisions:
        return EIGHT_BITS
    return max(precisions, key=lambda dtype: torch.finfo(dtype).eps)

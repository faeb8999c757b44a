"""The mathematics: tensors in, tensors out, independent of models and Captum; what methods of one's own build on."""

from captum_norm.functional.carry import Carry, Normalization, Scales, apply_linear, inverse_scale, normalize
from captum_norm.functional.contributions import centred_ranks, cosine_distance, spearman
from captum_norm.functional.vectors import (
    head_norms,
    key_gram,
    length,
    own_keys,
    ratio,
    relative_error,
    summed_norms,
    transformed_norms,
    unit,
    weight_gram,
)

__all__ = [
    "Carry",
    "Normalization",
    "Scales",
    "apply_linear",
    "centred_ranks",
    "cosine_distance",
    "head_norms",
    "inverse_scale",
    "key_gram",
    "length",
    "normalize",
    "own_keys",
    "ratio",
    "relative_error",
    "spearman",
    "summed_norms",
    "transformed_norms",
    "unit",
    "weight_gram",
]

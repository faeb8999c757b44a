"""The mathematics: tensors in, tensors out; knows neither models nor Captum."""

from captum_norm.functional.carry import Carry, FrozenCarry
from captum_norm.functional.completeness import random_directions, relative_error
from captum_norm.functional.normalization import Normalization, apply_linear, inverse_scale, normalize
from captum_norm.functional.norms import (
    head_norms,
    key_gram,
    mixing_ratio,
    ratio,
    summed_norms,
    transformed_norms,
    weight_gram,
)

__all__ = [
    "Carry",
    "FrozenCarry",
    "Normalization",
    "apply_linear",
    "head_norms",
    "inverse_scale",
    "key_gram",
    "mixing_ratio",
    "normalize",
    "random_directions",
    "ratio",
    "relative_error",
    "summed_norms",
    "transformed_norms",
    "weight_gram",
]

"""The mathematics: tensors in, tensors out; knows neither models nor Captum."""

from captum_norm.functional.block import BlockRows, CarriedAttention, block_rows
from captum_norm.functional.carry import Carry, Scales
from captum_norm.functional.completeness import random_directions, relative_error, squared_length
from captum_norm.functional.contributions import l1_distances, nearness
from captum_norm.functional.normalization import Normalization, apply_linear, inverse_scale, normalize
from captum_norm.functional.norms import (
    chunks,
    head_norms,
    key_gram,
    ratio,
    summed_norms,
    transformed_norms,
    weight_gram,
)

__all__ = [
    "BlockRows",
    "CarriedAttention",
    "Carry",
    "Normalization",
    "Scales",
    "apply_linear",
    "block_rows",
    "chunks",
    "head_norms",
    "inverse_scale",
    "key_gram",
    "l1_distances",
    "nearness",
    "normalize",
    "random_directions",
    "ratio",
    "relative_error",
    "squared_length",
    "summed_norms",
    "transformed_norms",
    "weight_gram",
]

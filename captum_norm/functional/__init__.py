"""Has the mathematics: tensors in, tensors out; it knows neither models nor Captum."""

from captum_norm.functional.activation import Elementwise, derivative, gate_slopes, secant_slope
from captum_norm.functional.bias_shares import BIAS_SHARES, add_bias
from captum_norm.functional.carry import BlockRows, CarriedAttention, Carry, Scales, block_rows
from captum_norm.functional.contributions import cosine_distance, l1_distances, nearness
from captum_norm.functional.feed_forward import Affine, Baseline, FrozenFeedForward, Network, Use, written_by
from captum_norm.functional.lengths import (
    balanced,
    estimated_length,
    length,
    lengths,
    random_directions,
    relative_error,
    unit,
)
from captum_norm.functional.normalization import Normalization, apply_linear, inverse_scale, normalize, scaled
from captum_norm.functional.norms import (
    chunks,
    head_norms,
    key_gram,
    ratio,
    refined_head_norms,
    refined_summed_norms,
    squared_difference,
    summed_norms,
    transformed_norms,
    value_norms,
    value_norms_error,
    weight_gram,
)
from captum_norm.functional.ranks import average_ranks, centred_ranks, spearman

__all__ = [
    "BIAS_SHARES",
    "Affine",
    "Baseline",
    "BlockRows",
    "CarriedAttention",
    "Carry",
    "Elementwise",
    "FrozenFeedForward",
    "Network",
    "Normalization",
    "Scales",
    "Use",
    "add_bias",
    "apply_linear",
    "average_ranks",
    "balanced",
    "block_rows",
    "centred_ranks",
    "chunks",
    "cosine_distance",
    "derivative",
    "estimated_length",
    "gate_slopes",
    "head_norms",
    "inverse_scale",
    "key_gram",
    "l1_distances",
    "length",
    "lengths",
    "nearness",
    "normalize",
    "random_directions",
    "ratio",
    "refined_head_norms",
    "refined_summed_norms",
    "relative_error",
    "scaled",
    "secant_slope",
    "spearman",
    "squared_difference",
    "summed_norms",
    "transformed_norms",
    "unit",
    "value_norms",
    "value_norms_error",
    "weight_gram",
    "written_by",
]

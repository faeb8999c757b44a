"""Explains Transformers by the vectors that their attention adds up: norms, not weights alone."""

from importlib.metadata import PackageNotFoundError, version

from captum_norm.attr import (
    TOLERANCE,
    AttentionBlockAttribution,
    AttentionRollout,
    AttentionWeights,
    Measurements,
    MeterOptions,
    NormAttribution,
    NormMeter,
)
from captum_norm.errors import (
    CaptumNormError,
    IncompleteDecompositionError,
    InvalidInputError,
    NonFiniteError,
    UnsupportedModelError,
    UnsupportedScopeError,
)
from captum_norm.maps import AttributionMaps
from captum_norm.models import Layout, Site, register_layout

try:
    __version__ = version("captum-norm")
except PackageNotFoundError:
    __version__ = "0+unknown"

__all__ = [
    "TOLERANCE",
    "AttentionBlockAttribution",
    "AttentionRollout",
    "AttentionWeights",
    "AttributionMaps",
    "CaptumNormError",
    "IncompleteDecompositionError",
    "InvalidInputError",
    "Layout",
    "Measurements",
    "MeterOptions",
    "NonFiniteError",
    "NormAttribution",
    "NormMeter",
    "Site",
    "UnsupportedModelError",
    "UnsupportedScopeError",
    "register_layout",
]

"""Explains Transformers by the vectors that their attention adds up: norms, not weights alone."""

from importlib import import_module
from typing import TYPE_CHECKING

from captum_norm.bars import progress
from captum_norm.errors import (
    CaptumNormError,
    IncompleteDecompositionError,
    InvalidInputError,
    NonFiniteError,
    NotEnoughMemoryError,
    UnsupportedModelError,
    UnsupportedScopeError,
)
from captum_norm.versions import __version__ as __version__

__all__ = [
    "ALTI",
    "TOLERANCE",
    "AttentionBlockAttribution",
    "AttentionRollout",
    "AttentionTimesGradient",
    "AttentionWeights",
    "AttributionMaps",
    "CaptumNormError",
    "Comparison",
    "ContextualizationChange",
    "DecompX",
    "Decomposition",
    "Difference",
    "FeedForwardLayout",
    "GlobEnc",
    "IncompleteDecompositionError",
    "InvalidInputError",
    "Layout",
    "Measurements",
    "MeterOptions",
    "NonFiniteError",
    "NormAttribution",
    "NormMeter",
    "NotEnoughMemoryError",
    "Site",
    "SourceAndPrefix",
    "TokenAttribution",
    "TokenVectors",
    "UnsupportedModelError",
    "UnsupportedScopeError",
    "ValueZeroing",
    "compare",
    "contextualization_change",
    "progress",
    "register_feed_forward",
    "register_layout",
]

if TYPE_CHECKING:
    from captum_norm.analysis import ContextualizationChange, contextualization_change
    from captum_norm.attr import (
        ALTI,
        TOLERANCE,
        AttentionBlockAttribution,
        AttentionRollout,
        AttentionTimesGradient,
        AttentionWeights,
        Decomposition,
        DecompX,
        GlobEnc,
        Measurements,
        MeterOptions,
        NormAttribution,
        NormMeter,
        SourceAndPrefix,
        TokenAttribution,
        TokenVectors,
        ValueZeroing,
    )
    from captum_norm.comparison import Comparison, compare
    from captum_norm.maps import AttributionMaps
    from captum_norm.models import Difference, FeedForwardLayout, Layout, Site, register_feed_forward, register_layout
else:
    # These need torch, which takes seconds to load: errors, --help and alignment files do without.
    _LATE = {
        "ALTI": "captum_norm.attr",
        "TOLERANCE": "captum_norm.attr",
        "AttentionBlockAttribution": "captum_norm.attr",
        "AttentionRollout": "captum_norm.attr",
        "AttentionTimesGradient": "captum_norm.attr",
        "AttentionWeights": "captum_norm.attr",
        "AttributionMaps": "captum_norm.maps",
        "DecompX": "captum_norm.attr",
        "Comparison": "captum_norm.comparison",
        "Decomposition": "captum_norm.attr",
        "Difference": "captum_norm.models",
        "GlobEnc": "captum_norm.attr",
        "ContextualizationChange": "captum_norm.analysis",
        "FeedForwardLayout": "captum_norm.models",
        "Layout": "captum_norm.models",
        "Measurements": "captum_norm.attr",
        "MeterOptions": "captum_norm.attr",
        "NormAttribution": "captum_norm.attr",
        "NormMeter": "captum_norm.attr",
        "Site": "captum_norm.models",
        "SourceAndPrefix": "captum_norm.attr",
        "TokenVectors": "captum_norm.attr",
        "ValueZeroing": "captum_norm.attr",
        "compare": "captum_norm.comparison",
        "contextualization_change": "captum_norm.analysis",
        "register_feed_forward": "captum_norm.models",
        "TokenAttribution": "captum_norm.attr",
        "register_layout": "captum_norm.models",
    }

    def __getattr__(name: str) -> object:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_LATE[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATE})

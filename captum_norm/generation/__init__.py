"""Generated text: what an answer rests on."""

from captum_norm.generation.attribution import GenerationAttribution
from captum_norm.generation.prompts import Segmentation, SegmentKind
from captum_norm.generation.result import Explained, GenerationResult
from captum_norm.generation.rows import handed_on

__all__ = ["Explained", "GenerationAttribution", "GenerationResult", "SegmentKind", "Segmentation", "handed_on"]

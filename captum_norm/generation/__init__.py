"""Generated text: what an answer rests on."""

from captum_norm.generation.attribution import GenerationAttribution, handed_on
from captum_norm.generation.prompts import Segmentation, SegmentKind
from captum_norm.generation.result import Explained, GenerationResult

__all__ = ["Explained", "GenerationAttribution", "GenerationResult", "SegmentKind", "Segmentation", "handed_on"]

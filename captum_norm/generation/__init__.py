"""Generated text: what an answer rests on."""

from captum_norm.generation.attribution import GenerationAttribution, handed_on
from captum_norm.generation.prompts import Segmentation, SegmentKind
from captum_norm.generation.responses import Response, read_response
from captum_norm.generation.result import Explained, GenerationResult

__all__ = ["Explained", "GenerationAttribution", "GenerationResult", "Response", "SegmentKind", "Segmentation"]
__all__ += ["handed_on", "read_response"]

"""Aligns parallel text of any size in blocks; a run that was killed goes on where it stopped."""

from alignment.pipeline.blocks import Aligner, Answer, ExtractionCounts
from alignment.pipeline.extraction import BadLines, extract

__all__ = ["Aligner", "Answer", "BadLines", "ExtractionCounts", "extract"]

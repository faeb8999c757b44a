"""Aligns parallel text of any size in blocks; runs can be resumed and shared by several processes."""

from alignment.pipeline.blocks import Aligner, Answer, ExtractionCounts, SteadyAligner
from alignment.pipeline.extraction import BadLines, extract
from captum_norm.runs import torchrun_rank

__all__ = ["Aligner", "Answer", "BadLines", "ExtractionCounts", "SteadyAligner", "extract", "torchrun_rank"]

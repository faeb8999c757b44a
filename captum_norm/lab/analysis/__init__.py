"""Repeats the papers' experiments on a model and a corpus."""

from captum_norm.lab.analysis.corpus import SAMPLE, Corpus
from captum_norm.lab.analysis.engine import ANALYSES, analyze
from captum_norm.lab.analysis.layers import ContextualizationChange, contextualization_change
from captum_norm.lab.analysis.results import AnalysisResult, read_result

__all__ = [
    "ANALYSES",
    "SAMPLE",
    "AnalysisResult",
    "ContextualizationChange",
    "Corpus",
    "analyze",
    "contextualization_change",
    "read_result",
]

"""Repeats the papers' experiments on a model and a corpus."""

from captum_norm.lab.analysis.contextualization import ContextualizationChange, contextualization_change
from captum_norm.lab.analysis.corpus import SAMPLE, Corpus
from captum_norm.lab.analysis.engine import analyze
from captum_norm.lab.analysis.files import read_result
from captum_norm.lab.analysis.registry import ANALYSES
from captum_norm.lab.analysis.results import AnalysisResult

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

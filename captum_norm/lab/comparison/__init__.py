"""Compares methods: scores, faithfulness, agreement and cost."""

from captum_norm.lab.comparison.measures import MEASURES, Measure
from captum_norm.lab.comparison.methods import RandomScores
from captum_norm.lab.comparison.results import Comparison, MethodResult
from captum_norm.lab.comparison.run import compare

__all__ = ["MEASURES", "Comparison", "Measure", "MethodResult", "RandomScores", "compare"]

"""Compares methods: scores, faithfulness, agreement and cost."""

from captum_norm.lab.comparison.methods import RandomScores
from captum_norm.lab.comparison.results import MEASURES, Comparison, Measure, MethodResult
from captum_norm.lab.comparison.run import compare

__all__ = ["MEASURES", "Comparison", "Measure", "MethodResult", "RandomScores", "compare"]

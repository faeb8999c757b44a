"""Compares methods: scores, faithfulness, agreement and cost."""

from captum_norm.lab.comparison.methods import RandomScores
from captum_norm.lab.comparison.results import LEVEL, MEASURES, Comparison, Measure, MethodResult, undefeated
from captum_norm.lab.comparison.run import compare

__all__ = ["LEVEL", "MEASURES", "Comparison", "Measure", "MethodResult", "RandomScores", "compare", "undefeated"]

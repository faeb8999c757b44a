"""Compares methods: their scores, how faithful they are, how much they agree and what they cost."""

from captum_norm.comparison.measures import MEASURES, Measure
from captum_norm.comparison.methods import RandomScores
from captum_norm.comparison.results import Comparison, MethodResult
from captum_norm.comparison.run import compare

__all__ = ["MEASURES", "Comparison", "Measure", "MethodResult", "RandomScores", "compare"]

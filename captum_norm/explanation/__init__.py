"""Explains texts in one call, and what it returns."""

from captum_norm.explanation.result import Explanation
from captum_norm.explanation.run import explain

__all__ = ["Explanation", "explain"]

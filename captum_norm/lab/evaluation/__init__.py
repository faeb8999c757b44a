"""Measures how faithful token scores are to a model, whatever method gave them."""

from captum_norm.lab.evaluation.faithfulness import (
    ERASER_BINS,
    Faithfulness,
    FaithfulnessScores,
    agreement,
    area,
    kendall,
    mean_drop,
    ranks,
    relevance_gain,
    spearman,
    token_counts,
)
from captum_norm.lab.evaluation.perturbation import Perturbation, PerturbedInputs, infidelity, max_sensitivity

__all__ = [
    "ERASER_BINS",
    "Faithfulness",
    "FaithfulnessScores",
    "Perturbation",
    "PerturbedInputs",
    "agreement",
    "area",
    "infidelity",
    "kendall",
    "max_sensitivity",
    "mean_drop",
    "ranks",
    "relevance_gain",
    "spearman",
    "token_counts",
]

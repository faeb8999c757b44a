"""Measures how faithful token scores are to a model, whatever method gave them."""

from captum_norm.lab.evaluation.captum_metrics import infidelity, max_sensitivity
from captum_norm.lab.evaluation.correlation import agreement, kendall, spearman
from captum_norm.lab.evaluation.faithfulness import ERASER_BINS, Faithfulness, FaithfulnessScores
from captum_norm.lab.evaluation.perturbation import Perturbation, PerturbedInputs
from captum_norm.lab.evaluation.ranking import ranks, token_counts
from captum_norm.lab.evaluation.scores import area, mean_drop, relevance_gain

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

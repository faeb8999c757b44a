"""What maps say of a model's components."""

from captum_norm.analysis.contextualization import ContextualizationChange, contextualization_change

__all__ = ["ContextualizationChange", "contextualization_change"]

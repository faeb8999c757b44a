"""Which output position a model's head reads: the position one usually wants explained."""

from typing import Literal

from torch import nn

ReadPosition = Literal["first", "last", "mean"]

CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice", "ForNextSentencePrediction")


def read_position(model: nn.Module, *, causal: bool) -> ReadPosition:
    """Where a model's head reads.

    Args:
        model: the model, with or without a head.
        causal: whether its attention looks back only.

    Returns:
        ``"last"`` for causal models (next word, or their classifiers), ``"first"`` for classifiers of bidirectional
        models unless they are configured to pool by the mean, ``"mean"`` of the real tokens otherwise.
    """
    if causal:
        return "last"
    if not type(model).__name__.endswith(CLASSIFIERS):
        return "mean"
    return "mean" if getattr(getattr(model, "config", None), "classifier_pooling", None) == "mean" else "first"

"""Attributes an output value to the tokens by conservative relevance propagation: CP-LRP."""

from captum_norm.attr.frozen.relevance import RelevanceAttribution
from captum_norm.attr.frozen.rules import CP_LRP


class CPLRP(RelevanceAttribution):
    """CP-LRP [Ali et al. 2022]: signed relevance of each token for one output value, conserved up to the biases.

    Attention weights, norms' statistics and the gates of gated networks are constant; an activation passes all of its
    output's relevance to its input.

    In networks without gates whose activations are 0 at 0 (ReLU, GELU, SiLU, tanh), this is
    :class:`captum_norm.DecompX` with biases apart. They differ where activations are not, such as sigmoids, as DecompX
    gives their value at 0 to the biases; and in gated networks, as DecompX gives the gate its share.

    Args:
        model: a Hugging Face model; left unchanged.
        readout: the values to explain instead of logits: see :data:`captum_norm.models.outputs.Readout`.
        memory_budget: see :class:`captum_norm.MeterOptions`.
        tokenizer: see :class:`captum_norm.MeterOptions`.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> parts = CPLRP(BertForSequenceClassification(config)).decompose(torch.tensor([[2, 7, 9, 3]]), target=1)
        >>> bool((parts.scores.sum(1) + parts.bias - parts.number).abs().max() < 1e-5)
        True
    """

    name, title = "cp-lrp", "CP-LRP"
    rules = CP_LRP

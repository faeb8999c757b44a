"""Attributes an output value to the tokens by gradients that heed interactions: GIM."""

from captum_norm.attr.frozen.relevance import RelevanceAttribution
from captum_norm.attr.frozen.rules import GIM as RULES


class GIM(RelevanceAttribution):
    """Gradient interaction modifications [Edin et al. 2025b]: gradient × input with three changes of the backward pass.

    Norms' statistics are constant; each product, of queries and keys, of weights and values, and in gated networks,
    gives half of its gradient to either factor; and the softmax's backward pass is that of temperature 2, in which
    keys that stand in for each other count. Activations have their true gradients.

    The scores do not conserve: activations, too, keep what is not linear. ``decompose`` returns all that is kept as
    ``bias``; the convergence delta is the error of the sum with it, as for :class:`captum_norm.AttnLRP`.

    Args:
        model: a Hugging Face model; left unchanged.
        readout: the values to explain instead of logits: see :data:`captum_norm.models.outputs.Readout`.
        memory_budget: see :class:`captum_norm.MeterOptions`.
        tokenizer: see :class:`captum_norm.MeterOptions`.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> GIM(model).attribute(torch.tensor([[7, 9, 3]]), target=11).shape
        torch.Size([1, 3])
    """

    name, title = "gim", "GIM"
    rules = RULES

"""Attributes an output value to the tokens by attention-aware relevance propagation: AttnLRP."""

from captum_norm.attr.frozen.relevance import RelevanceAttribution
from captum_norm.attr.frozen.rules import ATTN_LRP


class AttnLRP(RelevanceAttribution):
    """AttnLRP [Achtibat et al. 2024]: signed relevance of each token for one output value, in one backward pass.

    Relevance also flows through attention weights to queries and keys: the softmax passes on gradient × input, and each
    product, of queries and keys, of weights and values, and in gated networks, gives half to either factor.
    Norms' statistics and routing are constant; an activation passes all of its output's relevance to its input.

    Biases, and the softmax where it is not linear, keep a part of the relevance: ``decompose`` returns it as ``bias``,
    and with it the scores add up to the value. The convergence delta is the error of that sum. (In layers whose code
    computes softmax(scores) itself, ``bias`` is what remains; there the delta is the deviation of the forward pass, and
    the sum is checked once with constant weights.)

    The relevance of a token is that of the vector by which it enters the first layer, positions included.

    Args:
        model: a Hugging Face model; left unchanged.
        readout: the values to explain instead of logits: see :data:`captum_norm.models.outputs.Readout`.
        memory_budget: see :class:`captum_norm.MeterOptions`.
        tokenizer: see :class:`captum_norm.MeterOptions`.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> AttnLRP(model).attribute(torch.tensor([[7, 9, 3]]), target=11).shape
        torch.Size([1, 3])
    """

    name, title = "attnlrp", "AttnLRP"
    rules = ATTN_LRP

"""Attributes output values to the tokens by relevance propagation: gradient × input of the frozen network."""

from captum_norm.attr.frozen.rules import ATTN_LRP, CP_LRP, RELP
from captum_norm.attr.frozen.rules import GIM as GIM_RULES
from captum_norm.attr.output import RelevanceAttribution


class CPLRP(RelevanceAttribution):
    """CP-LRP [Ali et al. 2022]: signed relevance of each token for one output value, conserved up to the biases.

    Attention weights, norms' statistics and the gates of gated networks are constant; an activation passes all of its
    output's relevance to its input.

    In networks without gates whose activations are 0 at 0 (ReLU, GELU, SiLU, tanh), this is
    :class:`captum_norm.DecompX` with biases apart. They differ where activations are not, such as sigmoids, as DecompX
    gives their value at 0 to the biases; and in gated networks, as DecompX gives the gate its share.

    Its arguments are those of :class:`captum_norm.AttnLRP`.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
        >>> parts = CPLRP(BertForSequenceClassification(config)).decompose(torch.tensor([[2, 7, 9, 3]]), target=1)
        >>> bool((parts.scores.sum(1) + parts.bias - parts.number).abs().max() < 1e-5)
        True
    """

    name = "cp-lrp"
    rules = CP_LRP


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
        model: a Hugging Face or fairseq model, or one built with torch.nn's attention; left unchanged.
        readout: the values to explain instead of logits: see :data:`captum_norm.models.outputs.Readout`.
        memory_budget, tokenizer: see :class:`captum_norm.forward.session.MeterOptions`.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4))
        >>> AttnLRP(model).attribute(torch.tensor([[7, 9, 3]]), target=11).shape
        torch.Size([1, 3])
    """

    name = "attnlrp"
    rules = ATTN_LRP


class RelP(RelevanceAttribution):
    """RelP [Jafari et al. 2025]: gradient × input where norms, activations and gates pass on relevance, by their rules.

    Norms' statistics and routing are constant, an activation passes all of its output's relevance to its input, and
    gated networks give half to either factor, all as for :class:`captum_norm.AttnLRP`. Attention has its own gradient,
    so a product's relevance reaches both factors whole, and the softmax takes it back: ``decompose`` returns that, too,
    as ``bias``. It was made to find components that matter: see :class:`captum_norm.ComponentAttribution`.

    Arguments and calls are those of :class:`captum_norm.AttnLRP`.
    """

    name = "relp"
    rules = RELP


class GIM(RelevanceAttribution):
    """Gradient interaction modifications [Edin et al. 2025b]: gradient × input with three changes of the backward pass.

    Norms' statistics are constant; each product, of queries and keys, of weights and values, and in gated networks,
    gives half of its gradient to either factor; and the softmax's backward pass is that of temperature 2, in which
    keys that stand in for each other count. Activations have their true gradients.

    The scores do not conserve: activations, too, keep what is not linear. ``decompose`` returns all that is kept as
    ``bias``; the convergence delta is the error of the sum with it, as for :class:`captum_norm.AttnLRP`.

    Arguments and calls are those of :class:`captum_norm.AttnLRP`.
    """

    name = "gim"
    rules = GIM_RULES

"""One stack of self-attention layers, all of which look back only or all of which look both ways."""

from torch import Tensor, nn

from captum_norm.errors import UnsupportedModelError

ENCODER_ALONE = "of an encoder-decoder model pass the encoder (model.get_encoder())"


class Stack:
    """Checks the attention calls of a forward pass, in their order.

    Args:
        several: whether some example has more than one real position, so that looking ahead can be seen.

    Attributes:
        layers: how many calls there were.
        causal: whether they look back only.
    """

    def __init__(self, *, several: bool) -> None:
        self.layers = 0
        self.causal = False
        self._several = several

    def begin(self, module: nn.Module, query: Tensor, key: Tensor) -> None:
        """An attention call begins, (B, H, Q, d) and (B, H or fewer, K, d).

        Raises:
            UnsupportedModelError: if queries and keys are different sequences.
        """
        if query.shape[2] != key.shape[2]:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends from {query.shape[2]} to {key.shape[2]} positions; only "
                f"self-attention over the whole sequence is supported: pass no past_key_values, and {ENCODER_ALONE}"
            )
        self.layers += 1

    def look(self, module: nn.Module, weights: Tensor) -> None:
        """The weights of a call's first example and query (and any others), (B, H, Q, K).

        Raises:
            UnsupportedModelError: if the call looks another way than those before it.
        """
        ahead = bool(weights[:, :, 0, 1:].detach().any())
        causal = not ahead if self._several else bool(getattr(module, "is_causal", False))
        if self.layers > 1 and causal != self.causal:
            raise UnsupportedModelError(
                f"{type(module).__name__} looks {'back only' if causal else 'ahead'}, unlike the {self.layers - 1} "
                f"attention layers before it; {ENCODER_ALONE}"
            )
        self.causal = causal

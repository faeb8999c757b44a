"""One stack of self-attention layers, all of which look back only or all of which look both ways."""

from torch import Tensor, nn

from captum_norm.errors import NonFiniteError, UnsupportedModelError

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
        self._shape: tuple[int, int] | None = None
        self._ahead = False

    def begin(self, module: nn.Module, query: Tensor, key: Tensor) -> None:
        """An attention call begins, (B, H, Q, d) and (B, H or fewer, K, d).

        Raises:
            UnsupportedModelError: if queries and keys are different sequences, or other ones than in the calls before.
        """
        if query.shape[2] != key.shape[2]:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends from {query.shape[2]} to {key.shape[2]} positions; only "
                f"self-attention over the whole sequence is supported: pass no past_key_values, and {ENCODER_ALONE}"
            )
        shape = (query.shape[0], query.shape[2])
        if self._shape is not None and shape != self._shape:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends over {shape[0]} × {shape[1]} positions, unlike the {self.layers} "
                f"attention layers before it ({self._shape[0]} × {self._shape[1]}); pass one stack of layers alone"
            )
        self._shape = shape
        self._ahead = False
        self.layers += 1

    def look(self, weights: Tensor) -> None:
        """The weights of some examples from their first query on, (B, H, Q, K).

        Raises:
            NonFiniteError: if they contain NaN or infinity.
        """
        first = weights[:, :, 0].detach()
        if not first.isfinite().all():
            raise NonFiniteError(f"the attention weights of layer {self.layers - 1} contain NaN or infinity")
        self._ahead |= bool(first[..., 1:].any())

    def end(self, module: nn.Module) -> None:
        """All examples of a call were seen.

        Raises:
            UnsupportedModelError: if the call looks another way than those before it.
        """
        causal = not self._ahead if self._several else bool(getattr(module, "is_causal", False))
        if self.layers > 1 and causal != self.causal:
            raise UnsupportedModelError(
                f"{type(module).__name__} looks {'back only' if causal else 'ahead'}, unlike the {self.layers - 1} "
                f"attention layers before it; {ENCODER_ALONE}"
            )
        self.causal = causal

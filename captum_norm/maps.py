"""Holds the results of a method: a map for each layer, what was measured beside it, and in which units."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from captum_norm.errors import InvalidInputError


@dataclass(frozen=True)
class MapUnits:
    """What the numbers are of a method that has maps.

    Attributes:
        entry: what an entry of its maps is.
        together: what a score of all layers together is; None for what the aggregation makes of an entry.
        aggregation: how it makes one score of all layers, where that is no choice.
        target: what a score is if a number of the output is named.
    """

    entry: str
    together: str | None = None
    aggregation: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class AttributionMaps:
    """Maps of all layers of a model for one batch.

    Rows are queries (the position that receives), columns are keys (the position that gives). Entries at padded
    queries and keys are exactly 0.

    Attributes:
        encoder: (B, L, Q, K), or (B, L, H, Q, K) per head; None if the model has no bidirectional stack.
        decoder: the same for a causal stack; None if the model has none.
        cross: the same for attention from the decoder's positions (Q) to the encoder's (K); None if the model has none.
        mixing_ratio: (B, L, Q), ‖Σ_{j≠i} v_ij‖ / (‖Σ_{j≠i} v_ij‖ + ‖v_ii‖); None where the method defines none, and for
            encoder–decoder models, whose stacks have one each: see :meth:`captum_norm.NormMeter.measure`.
        convergence_delta: (B, L), relative completeness error of each layer, of an encoder–decoder model those of all
            stacks, encoder first; None for methods without one.
        real: (B, Q), True at real (unpadded) input positions.
        tokens: the tokens of each example, if the inputs brought them.
        decoder_real: the same as ``real`` for the decoder's positions of an encoder–decoder model, else None.
    """

    encoder: Tensor | None
    decoder: Tensor | None
    cross: Tensor | None
    mixing_ratio: Tensor | None
    convergence_delta: Tensor | None
    real: Tensor
    tokens: Sequence[Sequence[str]] | None = None
    decoder_real: Tensor | None = None

    @property
    def self_attention(self) -> Tensor:
        """The maps of the one self-attention stack that encoders and decoders have, (B, L, [H,] Q, K).

        Raises:
            InvalidInputError: for an encoder–decoder model.
        """
        stack = self.encoder if self.decoder is None else self.decoder
        if stack is None or (self.encoder is not None and self.decoder is not None):
            raise InvalidInputError(
                "got an encoder–decoder model, which has not one stack of layers to aggregate; read .encoder, .decoder "
                "and .cross of maps(), or explain the encoder alone (in transformers: model.get_encoder())"
            )
        return stack

    def with_tokens(self, tokens: Sequence[Sequence[str]]) -> "AttributionMaps":
        """The same maps with the tokens' texts, one sequence for each example."""
        return replace(self, tokens=tokens)


def only_layer(stack: Tensor) -> Tensor:
    """The map of a stack that has one: (B, 1, Q, K) -> (B, Q, K)."""
    if stack.shape[1] != 1:
        raise InvalidInputError(f"got the maps of {stack.shape[1]} layers and aggregate=False; expected one layer")
    return stack[:, 0]

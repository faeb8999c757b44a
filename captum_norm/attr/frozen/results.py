"""What decompositions of output values and hidden states return."""

from typing import Any, NamedTuple

from torch import Tensor


class Decomposition(NamedTuple):
    """Output values, decomposed: one of each example, or P, whose axis is then there.

    Attributes:
        scores: each token's contribution, (B[, P], S), 0 at padding, after those of virtual tokens, if any; for an
            encoder–decoder model a :class:`captum_norm.SourceAndPrefix` of those of the source, (B[, P], S), and the
            target prefix, (B[, P], T).
        bias: the biases' contribution, (B[, P]); 0 if they are shared among the tokens.
        number: the value, (B[, P]).
        convergence_delta: ``|Σ scores + bias − number| / (Σ |scores| + |bias|)``, or the frozen network's deviation
            from the model if larger, (B[, P]). For a difference of two outputs, the error is relative to their sizes if
            these are larger, since they were rounded.
    """

    scores: Any
    bias: Tensor
    number: Tensor
    convergence_delta: Tensor


class TokenVectors(NamedTuple):
    """Hidden states, decomposed.

    Attributes:
        vectors: each token's (K) contribution to each layer's output at each position (Q), (B, L, Q, K, D).
        bias: the biases' contribution, (B, L, Q, D); 0 if they are shared among the tokens.
    """

    vectors: Tensor
    bias: Tensor

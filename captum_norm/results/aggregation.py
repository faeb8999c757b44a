"""Combines the maps of all layers into one map of the model."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from captum_norm.functional import own_keys

CAUSAL_ROLLOUT = (
    "A rollout in a causal model leads to the first tokens, whatever they say: each layer hands importance on to "
    "earlier positions and never back. The mean of the layers does not."
)
"""What a rollout of a causal model does, beside its scores."""
ROLLED = "share of rollout"
"""The unit of its scores."""


def normalize_rows(maps: Tensor) -> Tensor:
    """Divide each row by its sum; rows of zeros (padded queries) stay zeros. (..., Q, K) -> (..., Q, K)."""
    sums = maps.sum(-1, keepdim=True)
    return maps / torch.where(sums > 0, sums, torch.ones_like(sums))


def add_half_identity(maps: Tensor) -> Tensor:
    """Compute (A + I) / 2 of row-normalised maps: a residual connection as strong as attention [Abnar & Zuidema 2020].

    (..., Q, K) -> (..., Q, K), with I at each query's own key, the last Q. Rows of zeros (padded queries) stay zeros.
    """
    identity = torch.zeros_like(maps[(0,) * (maps.dim() - 2)])
    own_keys(identity).fill_(1)
    live = (maps.sum(-1, keepdim=True) > 0).to(maps.dtype)
    return (maps + identity * live) / 2


def with_prefix_rows(maps: Tensor, own: float = 1) -> Tensor:
    """Add the rows of a tuned prefix, K − Q keys that contribute to themselves alone: (..., Q, K) -> (..., K, K)."""
    prefix = maps.shape[-1] - maps.shape[-2]
    if prefix == 0:
        return maps
    rows = torch.zeros_like(maps[..., :1, :]).repeat(*[1] * (maps.dim() - 2), prefix, 1)
    rows.diagonal(0, -2, -1).fill_(own)
    return torch.cat([rows, maps], dim=-2)


def rollout(maps: Tensor) -> Tensor:
    """Product of the layers' row-normalised maps, A_L ··· A_1 [Abnar & Zuidema 2020].

    Args:
        maps: (B, L, Q, K), residual connection included, first layer first; K − Q keys of a tuned prefix come first.

    Returns:
        (B, L, Q, K): entry l is the rollout of layers 1 to l+1; every row of a real query sums to 1.
    """
    return torch.stack(list(rollouts(maps)), dim=1)


def rollouts(maps: Tensor) -> Iterator[Tensor]:
    """Yield the entries of :func:`rollout`, (B, Q, K) each."""
    rolled: Tensor | None = None
    for layer in maps.unbind(1):
        shares = normalize_rows(layer)
        rolled = shares if rolled is None else shares @ with_prefix_rows(rolled)
        yield rolled


def replaced(stacks: tuple[Tensor, ...], layers: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Stack new maps of all layers, given layer by layer, in the memory of the old ones unless they need gradients."""
    if any(maps.requires_grad for maps in stacks):
        return tuple(torch.stack(made, dim=1) for made in zip(*layers, strict=True))
    for place, layer in enumerate(layers):
        for maps, made in zip(stacks, layer, strict=True):
            maps[:, place] = made
    return stacks


def encoder_decoder_rollout(encoder: Tensor, decoder: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of source and target prefix in the last decoder layer's output: ALTI+ [Ferrando et al. 2022b].

    The output of a decoder layer has the share c_s of the encoder's output s and the share 1 − Σ_s c_s of the output of
    its self-attention:

        source_l = C_l E + (1 − ΣC_l) D_l source_{l−1},    prefix_l = (1 − ΣC_l) D_l prefix_{l−1}

    with E the encoder's rollout, D_l the maps of decoder self-attention, C_l those of cross-attention, source_0 = 0 and
    prefix_0 = I.

    Args:
        encoder: (B, L, S, S), rows that sum to 1 (normalised here if not).
        decoder: (B, L, T, T), the same; with a tuned prefix (B, L, T, K), its keys first.
        cross: (B, L, T, S), rows that sum to 1 minus the share of the residual connection.

    Returns:
        (B, T, S) and (B, T, K); the two rows of a real position together sum to 1.
    """
    *_, through_encoder = rollouts(encoder)
    *_, last = encoder_decoder_rollouts(through_encoder, decoder, cross)
    return last


def encoder_decoder_rollouts(
    through_encoder: Tensor, decoder: Tensor, cross: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what :func:`encoder_decoder_rollout` returns, for each decoder layer, from the encoder's, (B, S, S)."""
    source, prefix = torch.zeros_like(cross[:, 0]), torch.zeros_like(decoder[:, 0])
    own_keys(prefix).fill_(1)
    positions = decoder.shape[-2]
    for self_map, cross_map in zip(decoder.unbind(1), cross.unbind(1), strict=True):
        before = (1 - cross_map.sum(-1, keepdim=True)) * normalize_rows(self_map)
        source = cross_map @ through_encoder + before[..., -positions:] @ source
        prefix = before @ with_prefix_rows(prefix)
        yield source, prefix


def encoder_decoder_relevance(encoder: Tensor, decoder: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
    """Relevance of source and target prefix for the decoder's positions [Chefer et al. 2021, eq. 6 to 10].

    With Ā the maps, E the encoder's relevance, from I, and in the decoder P = I and S = 0, each layer makes

        E ← E + Ā E                     in the encoder,
        P ← P + Ā P,   S ← S + Ā S      in the decoder's self-attention,
        S ← S + R(P)ᵀ Ā R(E)            in cross-attention,

    where R(X) = I + (X − I) / (row sums of X − I), or I in rows that X − I leaves 0.

    Args:
        encoder: (B, L, S, S), not negative.
        decoder: (B, L, T, T), the same; with a tuned prefix (B, L, T, K), its keys first.
        cross: (B, L, T, S), the same.

    Returns:
        (B, T, S) and (B, T, K).
    """
    positions, keys = decoder.shape[-2:]
    decoder, cross = with_prefix_rows(decoder, 0), functional.pad(cross, (0, 0, keys - positions, 0))
    own_source, own_prefix = (torch.eye(maps.shape[-1]).to(maps) for maps in (encoder, decoder))
    through_encoder, prefix = own_source.expand_as(encoder[:, 0]), own_prefix.expand_as(decoder[:, 0])
    for layer in encoder.unbind(1):
        through_encoder = through_encoder + layer @ through_encoder
    read = own_source + normalize_rows(through_encoder - own_source)
    source = torch.zeros_like(cross[:, 0])
    for self_map, cross_map in zip(decoder.unbind(1), cross.unbind(1), strict=True):
        prefix, source = prefix + self_map @ prefix, source + self_map @ source
        reading = own_prefix + normalize_rows(prefix - own_prefix)
        source = source + reading.mT @ (cross_map @ read)
    return source[:, -positions:], prefix[:, -positions:]


def _rollout_rows(maps: Tensor, rows: Tensor) -> Tensor:
    for layer in reversed(maps.unbind(1)):
        rows = rows @ normalize_rows(layer)
    return rows


def residual_rollout_rows(maps: Tensor, rows: Tensor) -> Tensor:
    """Rows of the product of (A + I)/2 of the layers' row-normalised maps A: (B, L, K, K), (B, P, K) -> (B, P, K)."""
    for layer in reversed(maps.unbind(1)):
        shares = normalize_rows(layer)
        kept = rows * (shares.sum(-1) > 0).unsqueeze(1)  # see add_half_identity
        rows = (rows @ shares + kept) / 2
    return rows


def _product_rows(maps: Tensor, rows: Tensor) -> Tensor:
    for layer in reversed(maps.unbind(1)):
        # Normalising the product's row changes no ratio, and avoids overflow and underflow over many layers.
        rows = normalize_rows(rows @ layer)
    return rows


AGGREGATIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"rollout": _rollout_rows, "product": _product_rows, "mean": lambda maps, rows: rows @ maps.mean(1)}
)
"""How ``attribute`` combines the maps of all layers: ``(maps (B, L, Q, K), rows (B, P, Q)) -> (B, P, K)``.

``rows`` are the weights of the positions to explain; only these rows are computed. ``rollout`` normalises the rows of
each map before the multiplication, ``product`` only the rows of the product.
"""

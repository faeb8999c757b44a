"""Computes norms of weighted, transformed vectors without forming the vectors.

Key j's vector through head h is f_h(x_j) = v_jh W_h, with v_jh (d,) its value and W_h (d, D) head h's slice of the
output projection. A query with weights a = (α_1, ..., α_H) for key j receives Σ_h a_h f_h(x_j) from it, and

    ‖Σ_h a_h f_h‖² = aᵀ G a,    G_hg = ⟨f_h, f_g⟩ = v_h (W_h W_gᵀ) v_gᵀ.

W_h W_gᵀ is a d×d product of the model's weights alone (:func:`weight_gram`, once per model); G is H×H per key
(:func:`key_gram`, once per input); aᵀ G a costs H² products per (query, key) pair (:func:`summed_norms`), against
H·D for adding up the vectors.

Squares underflow below 1e-38 in float32: norms below 1e-15 (small values, tiny weights) lose digits, and those below
1e-22 vanish. These few are recomputed from the keys' vectors in float64 (:func:`refined_summed_norms`,
:func:`refined_head_norms`).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from captum_norm.functional.lengths import in_range, length, out_of_range

# Intermediate results of this size (1 MiB in float32) stay in a processor core's cache.
CACHED_ELEMENTS = 2**18


def chunks(length: int, width: int, limit: int = CACHED_ELEMENTS) -> Iterator[slice]:
    """Cut ``length`` rows into slices.

    Args:
        length: number of rows.
        width: size of one row, in elements or bytes.
        limit: maximum size of a slice, in the same unit; a single row may exceed it. By default a number of elements
            that stay in a processor's cache.

    Example:
        >>> list(chunks(5, width=100, limit=256))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, limit // width)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def weight_gram(projection: Tensor) -> Tensor:
    """Compute inner products between the rows of an output projection, over all pairs of heads.

    Args:
        projection: W, (H, d, D): head h's slice maps a value (d,) to the model width (D,). To measure vectors after a
            linear map M (a frozen LayerNorm, say), pass W M.

    Returns:
        W Wᵀ, (H·d, H·d).
    """
    rows = projection.flatten(0, 1)
    return rows @ rows.T


def key_gram(values: Tensor, gram: Tensor, limit: int = CACHED_ELEMENTS) -> Tensor:
    """Compute the quadratic form of every key: H×H inner products of its transformed vectors.

    Args:
        values: (B, K, H, d); heads that share a value (grouped-query attention) repeat it.
        gram: :func:`weight_gram` of the output projection, (H·d, H·d).
        limit: maximum number of elements of an intermediate result.

    Returns:
        T, (B, H, H, K), upper triangular with the off-diagonal entries doubled, so that aᵀ T a = ‖Σ_h a_h f_h‖²:
        T_hh = ‖f_h‖², T_hg = 2⟨f_h, f_g⟩ for h < g, 0 for h > g.
    """
    batch, keys, heads, width = values.shape
    positions = values.reshape(batch * keys, heads * width)
    form = values.new_zeros(batch * keys, heads, heads)
    for rows in chunks(len(positions), heads * width, limit):
        flat = positions[rows]
        group = max(1, limit // flat.numel())
        for first in range(0, heads, group):
            # A few heads against themselves and all later ones.
            last, start = min(first + group, heads), first * width
            left = flat[:, start : last * width].unflatten(-1, (last - first, width)).transpose(0, 1)
            through = left @ gram[start : last * width, start:].unflatten(0, (last - first, width))
            products = (through * flat[:, start:]).unflatten(-1, (heads - first, width)).sum(-1)
            form[rows, first:last, first:] = products.transpose(0, 1)
    ones = form.new_ones(heads, heads)
    form *= ones.triu() + ones.triu(1)
    return form.reshape(batch, keys, heads, heads).permute(0, 2, 3, 1).contiguous()


def transformed_norms(form: Tensor) -> Tensor:
    """Compute ‖f_h(x_j)‖ for every head and key from :func:`key_gram`, (B, H, H, K) -> (B, H, K)."""
    return root(form.diagonal(dim1=1, dim2=2).transpose(1, 2))


def value_norms(values: Tensor, gram: Tensor) -> Tensor:
    """Compute :func:`transformed_norms` without :func:`key_gram`, from the gram's diagonal d×d blocks.

    Args:
        values: (B, K, H, d).
        gram: :func:`weight_gram` of the output projection, (H·d, H·d).

    Returns:
        (B, H, K).
    """
    heads, width = values.shape[2:]
    own = gram.unflatten(0, (heads, width)).unflatten(2, (heads, width)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    per_head = values.transpose(1, 2)  # (B, H, K, d)
    return root((per_head @ own * per_head).sum(-1))


def value_norms_error(norms: Tensor, values: Tensor, projection: Tensor) -> Tensor:
    """Compare the squares of ‖f_h(x_j)‖ with directly computed ones at one key.

    Args:
        norms: :func:`value_norms` at that key, (B, H).
        values: (B, H, d).
        projection: rows of the output projection by head, (H, d, D).

    Returns:
        (B,): the heads' largest difference, relative to ‖v_h‖² ‖W_h‖², the scale of rounding errors.
    """
    direct = length(values.transpose(0, 1) @ projection).T
    return squared_difference(norms, direct, length(values) * length(projection.flatten(1))).amax(1)


def squared_difference(norms: Tensor, others: Tensor, size: Tensor) -> Tensor:
    """Compute the difference of squared norms, relative to the square of ``size`` (of ``others`` if larger), (...).

    The squares themselves, which may leave the dtype's range, are never formed.
    """
    size = torch.maximum(size, others).clamp(min=torch.finfo(size.dtype).tiny)
    return ((norms - others).abs() / size) * ((norms + others) / size)


def head_norms(weights: Tensor, transformed: Tensor) -> Tensor:
    """Compute ‖α_ij f_h(x_j)‖ per head [Kobayashi et al. 2020, section 3].

    Args:
        weights: α, (B, H, Q, K).
        transformed: :func:`transformed_norms`, (B, H, K).

    Returns:
        (B, H, Q, K), in the units of the model's hidden states; weights are taken to be non-negative.
    """
    return weights * transformed.unsqueeze(2)


def summed_norms(weights: Tensor, form: Tensor) -> Tensor:
    """Compute ‖Σ_h α_ij f_h(x_j)‖, the norm of the sum over heads [Kobayashi et al. 2020, section 3].

    Args:
        weights: α, (B, H, Q, K).
        form: :func:`key_gram`, (B, H, H, K).

    Returns:
        (B, Q, K), in the units of the model's hidden states, or of what the projection is carried to.
    """
    alphas = weights.unbind(1)
    squares = weights.new_zeros(())
    for head, entries in enumerate(form.unsqueeze(3).unbind(1)):
        own, *later = entries[:, head:].unbind(1)
        row = alphas[head] * own
        for alpha, entry in zip(alphas[head + 1 :], later, strict=True):
            row.addcmul_(alpha, entry)
        squares = squares.addcmul_(row, alphas[head]) if head else row * alphas[head]
    return root(squares)


def own_keys(pairs: Tensor) -> Tensor:
    """Return what each query has at its own key, as a view: (..., Q, K) -> (..., Q).

    Keys without queries, cached ones or those of a tuned prefix, come first: query i's own key is i + K − Q.
    """
    queries, keys = pairs.shape[-2:]
    return pairs.diagonal(keys - queries, -2, -1)


def ratio(others: Tensor, own: Tensor) -> Tensor:
    """Compute others / (others + own) of two non-negative tensors; 0 where both are 0.

    Of the norms ‖Σ_{j≠i} v_ij‖ and ‖v_ii‖ it is the mixing ratio: how much of an output comes from other positions
    [Kobayashi et al. 2021].
    """
    total = others + own
    if total.isinf().any():
        # The sum of halves does not overflow.
        return ratio(others / 2, own / 2) if others.isfinite().all() and own.isfinite().all() else others / total
    return others / torch.where(total > 0, total, torch.ones_like(total))


def root(squares: Tensor) -> Tensor:
    """Take square roots, of negative rounding errors as of 0, with a gradient of 0, not infinity, at 0."""
    if not squares.requires_grad:
        return squares.clamp(min=0).sqrt()
    positive = squares > 0
    return torch.where(positive, squares, torch.ones_like(squares)).sqrt() * positive


def refined_summed_norms(norms: Tensor, weights: Tensor, values: Tensor, projection: Callable[[], Tensor]) -> Tensor:
    """Recompute the norms of :func:`captum_norm.functional.summed_norms` that are out of range.

    Args:
        norms: (B, Q, K).
        weights: α, (B, H, Q, K).
        values: (B, K, H, d).
        projection: returns the rows of the (carried) output projection by head in float64, (H, d, D).

    Returns:
        (B, Q, K); ``norms`` itself if none is out of range.
    """
    if in_range(norms):
        return norms
    # Zero is right where no head has weight, as under a causal mask.
    seen = norms.detach().masked_fill((weights.detach().amax(1) > 0).logical_not(), 1)
    if in_range(seen):
        return norms
    index = out_of_range(seen).nonzero()
    example, query, key = index.unbind(1)
    keys, heads = values.shape[1:3]
    chosen, place = (example * keys + key).unique(return_inverse=True)
    matrices = projection()
    grams = torch.cat(
        [
            vectors @ vectors.mT
            for rows in chunks(len(chosen), heads * matrices.shape[-1], CACHED_ELEMENTS)
            for vectors in [_transformed(values.flatten(0, 1)[chosen[rows]], matrices)]
        ]
    )
    alphas = weights.transpose(1, 2)[example, query, :, key].double()
    squares = torch.cat(
        [
            (alphas[rows].unsqueeze(1) @ grams[place[rows]] @ alphas[rows].unsqueeze(2)).flatten()
            for rows in chunks(len(index), heads * heads)
        ]
    )
    return norms.index_put((example, query, key), root(squares).to(norms))


def refined_head_norms(norms: Tensor, values: Tensor, projection: Callable[[], Tensor]) -> Tensor:
    """Recompute the norms of :func:`captum_norm.functional.transformed_norms` that are out of range.

    Args:
        norms: (B, H, K).
        values: (B, K, H, d).
        projection: returns the rows of the (carried) output projection by head in float64, (H, d, D).

    Returns:
        (B, H, K); ``norms`` itself if none is out of range.
    """
    if in_range(norms):
        return norms
    again = out_of_range(norms).transpose(1, 2) & (values.detach() != 0).any(-1)
    if not again.any():
        return norms
    matrices, refined = projection(), norms.transpose(1, 2)
    for head, matrix in enumerate(matrices):
        here = again[..., head]
        lengths = length(values[..., head, :][here].double() @ matrix).to(norms)
        example, key = here.nonzero().unbind(1)
        refined = refined.index_put((example, key, torch.full_like(key, head)), lengths)
    return refined.transpose(1, 2)


def _transformed(values: Tensor, matrices: Tensor) -> Tensor:
    """Multiply values (n, H, d) by each head's matrix in float64, (n, H, D)."""
    return (values.double().transpose(0, 1) @ matrices).transpose(0, 1)

"""Norms of vectors, and of the weighted, transformed vectors of attention without forming these.

Key j's vector through head h is f_h(x_j) = v_jh W_h, with v_jh (d,) its value and W_h (d, D) head h's slice of the
output projection. A query with weights a = (α_1, ..., α_H) for key j receives Σ_h a_h f_h(x_j) from it, and

    ‖Σ_h a_h f_h‖² = aᵀ G a,    G_hg = ⟨f_h, f_g⟩ = v_h (W_h W_gᵀ) v_gᵀ.

W_h W_gᵀ is a d×d product of the model's weights alone (:func:`weight_gram`, once per model); G is H×H per key
(:func:`key_gram`, once per input); aᵀ G a costs H² products per (query, key) pair (:func:`summed_norms`), against
H·D for adding up the vectors.

Squares underflow below 1e-38 in float32: norms below 1e-15 (small values, tiny weights) lose digits, and those below
1e-22 vanish. So do norms that are small beside their terms, as where heads cancel: of a square, rounding leaves the
terms' squares times ε. These few are computed anew, of vectors divided by a power of two (:func:`length`) or in float64
(:func:`refined_summed_norms`, :func:`refined_head_norms`).

Checking that Σ_j α_ij v_jh is what attention computed costs as much as attention itself. With values projected on k
random directions Ω (random signs) it costs k/d of that. For a vector e the mean of ‖eᵀΩ‖²/k is ‖e‖²: an error cannot
hide from all directions, and its squared size is estimated without bias (Freivalds' check of a matrix product).
"""

import math
from collections.abc import Callable, Iterator
from functools import cache, lru_cache

import torch
from torch import Tensor

# Intermediate results of this size (1 MiB in float32) stay in a processor core's cache.
CACHED_ELEMENTS = 2**18
DIRECTIONS = 8
# A sum whose norm is so many ε of its terms' has few digits left, as has a square that is so many ε of the squares.
SMALL = 2**16


def chunks(length: int, width: int, limit: int = CACHED_ELEMENTS) -> Iterator[slice]:
    """Cut ``length`` rows of ``width`` elements (or bytes) into slices of at most ``limit``, or of one row."""
    step = max(1, limit // width)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


@cache
def _least_exact(dtype: torch.dtype) -> float:
    """Return the norm above which underflow in the square costs no significant digits."""
    limits = torch.finfo(dtype)
    return 4 * math.sqrt(limits.tiny / limits.eps)


def in_range(norms: Tensor) -> bool:
    """Return whether no norm lost digits in its square: none is nearly zero, infinite or NaN."""
    if not norms.numel():
        return True
    low, high = norms.detach().aminmax()
    return _least_exact(norms.dtype) < low.item() and high.item() < math.inf


def _out_of_range(norms: Tensor) -> Tensor:
    """Return a mask of the norms that may have lost digits; see :func:`in_range`."""
    norms = norms.detach()
    return ((norms > _least_exact(norms.dtype)) & (norms < math.inf)).logical_not()


def balanced(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Divide vectors (..., D) by powers of two (..., 1) so that their largest entries are between 1 and 2."""
    largest = vectors.detach().abs().amax(-1, keepdim=True)
    exponent = torch.frexp(largest).exponent - 1
    power = torch.ldexp(torch.ones_like(largest), exponent)
    power = torch.where((largest > 0) & (largest < torch.inf), power, torch.ones_like(power))
    return vectors / power, power


def length(vectors: Tensor) -> Tensor:
    """Compute ‖x‖, (..., D) -> (...).

    If its square leaves the dtype's range, the vector is divided by a power of two first; otherwise the result is
    bitwise equal to torch's.

    Example:
        >>> length(torch.tensor([3e-30, 4e-30])), length(torch.tensor([3e30, 4e30]))
        (tensor(5.0000e-30), tensor(5.0000e+30))
    """
    if vectors.is_cuda:
        return _balanced_length(vectors)  # checking the range would synchronise
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return norms if in_range(norms) else _refined(norms, vectors)


def _refined(norms: Tensor, vectors: Tensor) -> Tensor:
    again = _out_of_range(norms)
    return norms.masked_scatter(again, _balanced_length(vectors[again])) if again.any() else norms


def _balanced_length(vectors: Tensor) -> Tensor:
    rows, power = balanced(vectors)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1) * power.squeeze(-1)
    return norms


def unit(vectors: Tensor) -> Tensor:
    """Divide vectors by their lengths, (..., D) -> (..., D); zero stays zero."""
    norms = length(vectors).unsqueeze(-1)
    return vectors / torch.where(norms > 0, norms, torch.ones_like(norms))


def random_directions(width: int, like: Tensor) -> Tensor:
    """Return Ω, (D, k): random signs, the same on every call, with the dtype and device of ``like``."""
    return _directions(width, like.dtype, like.device)


@lru_cache(maxsize=16)
def _directions(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Later calls may need gradients, which inference tensors do not support.
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (width, DIRECTIONS), generator=generator, device="cpu")
        # In column-major order, in which multiplying by so few columns is several times faster.
        return (signs * 2 - 1).T.contiguous().T.to(device, dtype)


def estimated_length(sketch: Tensor) -> Tensor:
    """Estimate ‖e‖ from e's projections on the directions, (..., k) -> (...); the square is unbiased."""
    return length(sketch) / math.sqrt(sketch.shape[-1])


def relative_error(error: Tensor, reference: Tensor, real: Tensor | None) -> Tensor:
    """Compute ‖error‖ / ‖reference‖ of each example.

    Args:
        error: length of the error at each query position, (B, Q).
        reference: length of what the model computed there, (B, Q).
        real: True at real query positions, (B, Q); None if all are.

    Returns:
        (B,), dimensionless; NaN if any input is.
    """
    if real is not None:
        real = real.to(error.device)
        error, reference = error.where(real, 0), reference.where(real, 0)
    return length(error) / length(reference).clamp(min=torch.finfo(reference.dtype).tiny)


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
    """Compute ‖f_h(x_j)‖, (B, H, K), from values (B, K, H, d) and the diagonal d×d blocks of :func:`weight_gram`."""
    heads, width = values.shape[2:]
    blocks = gram.unflatten(0, (heads, width)).unflatten(2, (heads, width)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    per_head = values.transpose(1, 2)  # (B, H, K, d)
    return root((per_head @ blocks * per_head).sum(-1))


def value_norms_error(norms: Tensor, values: Tensor, projection: Tensor) -> Tensor:
    """Compare ‖f_h(x_j)‖² at one key, (B, H), with directly computed ones: the heads' largest relative error, (B,)."""
    # Relative to ‖v_h‖² ‖W_h‖², the scale of rounding errors.
    direct = length(values.transpose(0, 1) @ projection).T
    return squared_difference(norms, direct, length(values) * length(projection.flatten(1))).amax(1)


def squared_difference(norms: Tensor, others: Tensor, size: Tensor) -> Tensor:
    """Compute the difference of squared norms, relative to the square of ``size`` (of ``others`` if larger), (...)."""
    # The squares themselves, which may leave the dtype's range, are never formed.
    size = torch.maximum(size, others).clamp(min=torch.finfo(size.dtype).tiny)
    return ((norms - others).abs() / size) * ((norms + others) / size)


def head_norms(weights: Tensor, transformed: Tensor) -> Tensor:
    """Compute ‖α_ij f_h(x_j)‖ per head [Kobayashi et al. 2020, section 3].

    Args:
        weights: α, not negative, (B, H, Q, K).
        transformed: :func:`transformed_norms`, (B, H, K).

    Returns:
        (B, H, Q, K), in the units of the model's hidden states.
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
    if weights.is_cuda:
        # A GPU multiplies matrices faster than it reads its memory once for every diagonal.
        rows = weights.permute(0, 3, 2, 1).contiguous()
        return root((rows @ form.permute(0, 3, 1, 2) * rows).sum(-1)).mT
    heads = weights.shape[1]
    diagonals = [form.diagonal(offset, 1, 2).mT.unsqueeze(2) for offset in range(heads)]
    # One operation treats all pairs of heads that are equally far apart.
    rows = weights * diagonals[0]
    for offset in range(1, heads):
        rows[:, : heads - offset].addcmul_(weights[:, offset:], diagonals[offset])
    return root(rows.mul_(weights).sum(1))


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
        return squares.clamp(min=0).sqrt_()
    positive = squares > 0
    return torch.where(positive, squares, torch.ones_like(squares)).sqrt() * positive


def term_sizes(values: Tensor, lengths: Tensor) -> Tensor:
    """Compute √Σ_r (v_r ‖w_r‖)², the scale of f_h's rounding errors, (B, H, K), of (B, K, H, d) and lengths (H, d)."""
    # Those that underflow belong to norms that are out of range.
    return torch.linalg.vector_norm(values.detach() * lengths, dim=-1).transpose(1, 2)  # type: ignore[no-any-return]


def cancelling_keys(form: Tensor, sizes: Tensor) -> Tensor:
    """Find the keys, (n,), at which ‖Σ_h a_h f_h‖ may be small beside √Σ_h (a_h s_h)² for some weights a_h ≥ 0."""
    # With b_h = a_h s_h and 2 b_h b_g ≤ b_h² + b_g², negative products of heads take at most so much of Σ_h b_h².
    sizes = sizes.clamp(min=torch.finfo(sizes.dtype).tiny)
    cosines = (form.detach() / sizes.unsqueeze(1)).div_(sizes.unsqueeze(2))
    negative = cosines.clamp(max=0)
    left = torch.add(negative.sum(1).add_(negative.sum(2)), cosines.diagonal(dim1=1, dim2=2).mT, alpha=2)
    least = 2 * SMALL * torch.finfo(form.dtype).eps
    if left.amin().item() >= least:
        return left.new_empty(0, dtype=torch.long)
    return (left.amin(1) >= least).logical_not().any(0).nonzero().squeeze(1)


def forms_of_keys(
    values: Tensor, gram: Tensor, lengths: Tensor, limit: int, *, maps: bool, signed: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Compute :func:`key_gram`, :func:`term_sizes` and :func:`cancelling_keys`: all keys if weights are signed."""
    # Where every channel is a head of its own, vectors are smaller than their inner products.
    form = key_gram(values, gram, limit) if maps and values.shape[-1] > 1 else None
    sizes = term_sizes(values, lengths)
    if form is None or signed:
        return form, sizes, torch.arange(values.shape[1], device=values.device)
    return form, sizes, cancelling_keys(form, sizes)


def cancelled(norms: Tensor, weights: Tensor, sizes: Tensor, least: float) -> Tensor:
    """Return a mask of the norms (B, Q, K) below ``least`` of √Σ_h (α_h s_h)², of α (B, H, Q, K) and s (B, H, K)."""
    return norms.detach() < least * (weights.detach() * sizes.unsqueeze(2)).square_().sum(1).sqrt_()


def refined_summed_norms(
    norms: Tensor,  # (B, Q, K)
    weights: Tensor,  # α, (B, H, Q, K)
    values: Tensor,  # v, (B, K, H, d)
    sizes: Tensor,  # see term_sizes
    keys: Tensor,  # at which heads may cancel
    projection: Callable[[], Tensor],  # makes W, (H, d, D), in float64
) -> Tensor:
    """Recompute norms of :func:`summed_norms` that are out of range or small beside their terms, in float64."""
    ranged = not norms.is_cuda and in_range(norms)  # checking the range would synchronise
    if len(keys):
        keys = keys[keys < norms.shape[2]]  # others have no weight here
    elif ranged:
        return norms
    # Zero is right where no head has weight, as under a causal mask.
    again = torch.zeros_like(norms, dtype=torch.bool)
    again = again if ranged else _out_of_range(norms) & (weights.detach().amax(1) > 0)
    if len(keys):
        least = math.sqrt(SMALL * torch.finfo(norms.dtype).eps)
        again[..., keys] |= cancelled(norms[..., keys], weights[..., keys], sizes[..., keys], least)
    index = again.any(1).nonzero()
    if not len(index):
        return norms
    (heads, queries), rows_by_head, exact = weights.shape[1:3], projection(), []
    for rows in chunks(len(index), heads * max(rows_by_head.shape[-1], queries)):
        example, key = index[rows].unbind(1)
        vectors = (values[example, key].double().transpose(0, 1) @ rows_by_head).transpose(0, 1)  # (n, H, D)
        # Squares would cancel; coordinates in a basis of what the heads span do not.
        coordinates = vectors @ torch.linalg.qr(vectors.detach().mT).Q
        exact.append(length(weights[example, :, :, key].double().mT @ coordinates).to(norms))
    example, key = index.unsqueeze(2).unbind(1)
    places = example, torch.arange(queries, device=key.device), key
    return norms.index_put(places, torch.cat(exact).where(again[places], norms[places]))


def refined_head_norms(norms: Tensor, values: Tensor, sizes: Tensor, projection: Callable[[], Tensor]) -> Tensor:
    """Recompute norms (B, H, K) as :func:`refined_summed_norms` does, from v (B, K, H, d) and W (H, d, D)."""
    again = norms.detach() < math.sqrt(SMALL * torch.finfo(norms.dtype).eps) * sizes
    if not in_range(norms):
        again |= _out_of_range(norms)
    again = again.transpose(1, 2) & (values.detach() != 0).any(-1)
    if not again.any():
        return norms
    refined = norms.transpose(1, 2)
    for head, rows in enumerate(projection()):
        here = again[..., head]
        exact = length(values[..., head, :][here].double() @ rows).to(norms)
        example, key = here.nonzero().unbind(1)
        refined = refined.index_put((example, key, torch.full_like(key, head)), exact)
    return refined.transpose(1, 2)


def refined_channel_norms(
    norms: Tensor, weights: Tensor, values: Tensor, sizes: Tensor, projection: Callable[[], Tensor]
) -> Tensor:
    """Recompute norms (B, Q, K) that are small beside their terms, as :func:`refined_summed_norms`, for many heads."""
    index = cancelled(norms, weights, sizes, SMALL * torch.finfo(norms.dtype).eps).nonzero()
    if not len(index):
        return norms
    rows, exact = projection().flatten(0, 1), []
    for some in chunks(len(index), sum(rows.shape)):
        example, query, key = index[some].unbind(1)
        context = weights[example, :, query, key].double() * values[example, key].squeeze(-1)
        exact.append(length(context @ rows).to(norms))
    return norms.index_put(index.unbind(1), torch.cat(exact))

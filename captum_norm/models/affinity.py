"""Tests whether a module of any class computes an affine map, by what it does to random inputs."""

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from captum_norm.models.hooks import unobserved
from captum_norm.models.offloading import is_shard
from captum_norm.models.precision import EIGHT_BITS, accumulation_dtype
from captum_norm.models.search.copies import FAILURES, drawn

TOLERATED = 0.04
"""Largest relative error that rounding to eight bits makes in a product with normally distributed numbers.

A step is 1/127 of the largest entry, which is four to five times the typical one.
"""
LARGE = (2.0**60, 2.0**30, 2.0**12, 2.0**7)
"""Factors of the inputs at which an activation is far from linear, unless the module overflows."""


def may_be_affine(module: nn.Module) -> bool:
    """Whether to test if a module that holds no plain matrix, or more than one, is an affine map."""
    owners = [part for part in module.modules() if any(True for _ in _tensors(part))]
    # Running statistics would change.
    if any(part.training and any(True for _ in part.buffers(recurse=False)) for part in owners):
        return False
    # Called while it runs, it would lose its weights.
    if is_shard(module):
        return False
    # A sequence's elements are looked at one by one.
    if isinstance(module, (nn.Linear, nn.Embedding, Conv1D, nn.modules.conv._ConvNd, nn.Sequential)):
        return False
    if module in owners:
        return len(owners) > 1 or any(tensor.dim() > 1 for tensor in _tensors(module))
    return len(owners) != 1


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def affinity(module: nn.Module, like: Tensor) -> tuple[Tensor, torch.dtype] | None:
    """Test whether a module computes an affine map of tensors such as ``like`` (..., C).

    An affine map preserves sums of vectors, up to its bias, and treats each row alone. Element-wise maps do not count.

    Returns:
        no rows of its outputs, (0, D), and the precision of its products; None if it computes no affine map.
    """
    try:
        with torch.no_grad():
            return _affinity(module, like)
    except FAILURES:
        return None


def _affinity(module: nn.Module, like: Tensor) -> tuple[Tensor, torch.dtype] | None:
    none = like.new_zeros(1, like.shape[-1])
    normal, other = drawn(none, *2 * [(4, like.shape[-1])])
    every_second = (torch.arange(like.shape[-1], device=like.device) % 2).to(like)
    zero, *found = _outputs(module, none, normal, other, normal + other, normal + every_second, 2 * normal, -normal)
    of_normal, (changed, twice, negative) = found[:3], found[3:]
    if changed.shape == normal.shape and torch.equal(changed[:, ::2], of_normal[0][:, ::2]):
        return None
    half = 4 * torch.finfo(torch.bfloat16).eps
    if not _error(zero, *of_normal) <= max(TOLERATED, half):
        return None
    # Zeros and ones, whose sums are zeros and ones again.
    first = (normal > 0).to(like)
    second = ((normal <= 0) & (other > 0)).to(like)
    bias, *of_binary = _outputs(module, none, first, second, first + second)
    # With small weights, activations are linear near zero.
    sizes = (size for size in LARGE if size < torch.finfo(like.dtype).max ** 0.5)
    larger = (_outputs(module, size * normal, size * other, size * (normal + other)) for size in sizes)
    of_large = next((outputs for outputs in larger if outputs[-1].isfinite().all()), of_normal)
    real = max(_error(zero, *of_normal), _error(zero, *of_large))
    binary = max(_error(bias, *of_binary), _error(bias, run_alone(module, first[:2]), bias, of_binary[0][:2]))
    exact = 4 * torch.finfo(zero.dtype).eps + 32 * torch.finfo(accumulation_dtype(zero.dtype)).eps
    if real <= exact and binary <= exact:
        return zero[:0], zero.dtype
    # Quantisation by the largest entry represents zeros and ones exactly.
    if real <= TOLERATED and binary <= exact:
        return zero[:0], EIGHT_BITS
    # Rounding of products commutes with powers of two and with the sign.
    turned = ((twice - zero) / 2, zero - negative)
    symmetric = all(_error(zero, rows + zero, zero, of_normal[0]) <= exact for rows in turned)
    return (zero[:0], torch.bfloat16) if max(real, binary) <= half and symmetric else None


def _outputs(module: nn.Module, *groups: Tensor) -> list[Tensor]:
    """Return a module's outputs for several groups of rows, run together."""
    return list(run_alone(module, torch.cat(groups)).split([len(rows) for rows in groups]))


def _error(zero: Tensor, *outputs: Tensor) -> float:
    """Return the largest relative error of x W + y W as (x + y) W, less what zero gives; infinity if there is NaN."""
    first, second, total = (output.double() - zero.double() for output in outputs)
    sizes = sum(part.norm(dim=-1) for part in (first, second, total, zero.double()))
    error = (first + second - total).norm(dim=-1)
    return float(torch.where(error == 0, error, error / sizes).nan_to_num(torch.inf).max())


def run_alone(module: nn.Module, rows: Tensor) -> Tensor:
    """Return a module's output, (N, D), for rows of our own, (N, C), as one sequence."""
    with unobserved(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a module that expects something else
        output = module(rows.unsqueeze(0))
    if not isinstance(output, Tensor) or output.dim() != 3:
        raise TypeError("expected one sequence")
    return output.squeeze(0)


# Attributes of every module, among them its hooks, which come and go with our own.
_COMMON = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (bool, int, float, str, list, tuple, set, dict)


def plain_attributes(module: nn.Module) -> list[str]:
    """Return the names of a module's own attributes that are numbers, texts, or collections."""
    return [name for name, value in vars(module).items() if name not in _COMMON and isinstance(value, _PLAIN)]


def plain(value: object) -> object:
    """Return a copy of a number, a text, or a collection of these; None for anything else."""
    if isinstance(value, dict):
        return [(plain(key), plain(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple, set)):
        return [plain(entry) for entry in value]
    return value if isinstance(value, _PLAIN) else None


def kind_of(module: nn.Module) -> str:
    """Return a text that modules share whose parts have the same classes and plain attributes."""
    return repr(
        [(type(part), [plain(vars(part)[name]) for name in plain_attributes(part)]) for part in module.modules()]
    )

"""Runs single modules on random inputs and parameters, which tell apart readings that agree by accident."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from captum_norm.models.hooks import modules_of, unobserved
from captum_norm.models.offloading import is_shard, loaded
from captum_norm.models.precision import EIGHT_BITS, accumulation_dtype

FAILURES = (LookupError, ValueError, RuntimeError, TypeError, AttributeError, AssertionError)
"""Errors of modules with unexpected arguments."""
# Largest relative error that rounding to eight bits makes in a product with normally distributed numbers: a step is
# 1/127 of the largest entry, which is four to five times the typical one.
TOLERATED = 0.04
LARGE = (2.0**60, 2.0**30, 2.0**12, 2.0**7)  # of inputs: activations are far from linear, unless modules overflow
STATISTICS = 2**16  # the most numbers of a buffer that may hold statistics of inputs; larger ones hold weights


def drawn(like: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return standard normal numbers, the same ones each time, in the dtype and on the device of a tensor."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(like) for shape in shapes]


def forward_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return a module's forward function without hooks; None if it cannot run on a copy of the module."""
    attributes = vars(module)
    # accelerate's hooks keep the original function here.
    replaced = attributes.get("_old_forward", attributes.get("forward"))
    return type(module).forward if replaced is None else getattr(replaced, "__func__", None)


def copy_with(module: nn.Module, parameters: Mapping[str, Tensor], like: Tensor) -> nn.Module | None:
    """Copy a module, to call ``forward``, with some parameters replaced and others cast like a tensor, if possible."""
    forward = forward_of(module)
    if forward is None:
        return None
    with loaded(module):
        copy = _unhooked(module)
        attributes = vars(copy)
        for tensors in ("_parameters", "_buffers"):
            # While a sharded module runs, torch keeps whole parameters among its plain attributes.
            present = {name: attributes.pop(name, value) for name, value in attributes[tensors].items()}
            attributes[tensors] = {
                name: value.to(like) if value is not None and value.is_floating_point() else value
                for name, value in present.items()
            }
    for name, value in parameters.items():
        holder = next((tensors for tensors in ("_parameters", "_buffers") if name in attributes[tensors]), None)
        (attributes if holder is None else attributes[holder])[name] = value
    attributes["forward"] = MethodType(forward, copy)
    return copy


def output_of(copy: nn.Module | None, *args: Any, **kwargs: Any) -> Tensor | None:
    """Return a copy's output; None if there is none, or if it fails or returns no tensor."""
    try:
        with torch.no_grad():
            output = None if copy is None else copy.forward(*args, **kwargs)
    except FAILURES:
        return None
    return output if isinstance(output, Tensor) else None


def _unhooked(module: nn.Module) -> nn.Module:
    copy = object.__new__(type(module))
    # What the module stores as it runs must not reach the model.
    for name, value in vars(module).items():
        vars(copy)[name] = value.copy() if type(value) in (list, dict, set) else value
    vars(copy).update({hooks: OrderedDict() for hooks in ("_forward_hooks", "_forward_pre_hooks")})
    vars(copy)["_modules"] = {name: child and _unhooked(child) for name, child in module._modules.items()}
    return copy


def may_be_affine(module: nn.Module) -> bool:
    """Whether a module without exactly one plain matrix may still be an affine map."""
    # A sequence's elements are looked at one by one.
    if isinstance(module, (nn.Linear, nn.Embedding, Conv1D, nn.modules.conv._ConvNd, nn.Sequential)):
        return False
    # Called while it runs, it would lose its weights.
    if is_shard(module):
        return False
    owners = [part for part in modules_of(module) if any(True for _ in _tensors(part))]
    # Running statistics would change.
    if any(part.training and any(buffer is not None for buffer in part._buffers.values()) for part in owners):
        return False
    if module in owners:
        return len(owners) > 1 or any(tensor.dim() > 1 for tensor in _tensors(module))
    return len(owners) != 1


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return (tensor for held in (module._parameters, module._buffers) for tensor in held.values() if tensor is not None)


def affinity(module: nn.Module, like: Tensor) -> tuple[Tensor, torch.dtype] | None:
    """Return no rows, (0, D), and the precision of a module's affine map of ``like`` (..., C); None if it is none."""
    try:
        with torch.no_grad():
            return _affinity(module, like)
    except FAILURES:
        return None


def _affinity(module: nn.Module, like: Tensor) -> tuple[Tensor, torch.dtype] | None:
    # An affine map preserves sums of vectors, up to its bias, and treats each row alone.
    none = like.new_zeros(1, like.shape[-1])
    normal, other = drawn(none, *2 * [(4, like.shape[-1])])
    few, others = normal[:2], other[:2]
    every_second = (torch.arange(like.shape[-1], device=like.device) % 2).to(like)
    zero, *rest = _outputs(module, none, normal, other, normal + other, few + every_second, 2 * few, -few)
    of_normal, (changed, twice, negative) = rest[:3], rest[3:]
    of_few = of_normal[0][:2]
    if changed.shape == few.shape and torch.equal(changed[:, ::2], of_few[:, ::2]):
        return None  # an element-wise map
    half, real = 4 * torch.finfo(torch.bfloat16).eps, _error(zero, *of_normal)
    if not real <= max(TOLERATED, half):
        return None
    exact = 4 * torch.finfo(zero.dtype).eps + 32 * torch.finfo(accumulation_dtype(zero.dtype)).eps
    # Zeros and ones, whose sums are zeros and ones again.
    first = (few > 0).to(like)
    second = ((few <= 0) & (others > 0)).to(like)
    binary = (none, first, second, first + second)
    # With small weights, activations are linear near zero.
    sizes = (size for size in LARGE if size < torch.finfo(like.dtype).max ** 0.5)
    large = ((size * few, size * others, size * (few + others)) for size in sizes)
    if real <= exact:
        again, bias, *outputs = _outputs(module, few, *binary, *next(large))
        of_binary, of_large = outputs[:3], outputs[3:]
        company = _error(zero, again, zero, of_few)
    else:
        # Where inputs are rounded, the largest of a run may decide the step of all.
        bias, *of_binary = _outputs(module, *binary)
        of_large = _outputs(module, *next(large))
        company = _error(bias, *_outputs(module, first), bias, of_binary[0])
    while not of_large[-1].isfinite().all():
        rows = next(large, None)
        of_large = of_normal if rows is None else _outputs(module, *rows)
    real = max(real, _error(zero, *of_large))
    ones = max(_error(bias, *of_binary), company)
    if real <= exact and ones <= exact:
        return zero[:0], zero.dtype
    # Quantisation by the largest entry represents zeros and ones exactly.
    if real <= TOLERATED and ones <= exact:
        return zero[:0], EIGHT_BITS
    # Rounding of products commutes with powers of two and with the sign.
    turned = ((twice - zero) / 2, zero - negative)
    symmetric = all(_error(zero, rows + zero, zero, of_few) <= exact for rows in turned)
    return (zero[:0], torch.bfloat16) if max(real, ones) <= half and symmetric else None


def _outputs(module: nn.Module, *groups: Tensor) -> list[Tensor]:
    """Return a module's outputs for several groups of rows, run together."""
    return list(run_alone(module, torch.cat(groups)).split([len(rows) for rows in groups]))


def _error(zero: Tensor, *outputs: Tensor) -> float:
    """Return the largest relative deviation of f(x) + f(y) from f(x + y) + f(0); infinity for NaN."""
    first, second, total = (output.double() - zero.double() for output in outputs)
    sizes = sum(part.norm(dim=-1) for part in (first, second, total, zero.double()))
    error = (first + second - total).norm(dim=-1)
    return float(torch.where(error == 0, error, error / sizes).nan_to_num(torch.inf).max())


def run_alone(module: nn.Module, rows: Tensor) -> Tensor:
    """Return a module's output, (N, D), for rows of our own, (N, C), as one sequence."""
    with unobserved(), statistics_kept(module), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a module that expects something else
        output = module(rows.unsqueeze(0))
    if not isinstance(output, Tensor) or output.dim() != 3:
        raise TypeError("expected one sequence")
    return output.squeeze(0)


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """On exit, give buffers their values back: an observer of quantisation notes whatever it is given."""
    held = [(part._buffers, name, buffer) for part in modules_of(module) for name, buffer in part._buffers.items()]
    small = [
        (owner, name, buffer, buffer._version, buffer.clone())
        for owner, name, buffer in held
        if buffer is not None and buffer.numel() <= STATISTICS and not (buffer.is_inference() or buffer.is_meta)
    ]
    try:
        yield
    finally:
        for owner, name, buffer, version, value in small:
            owner[name] = buffer
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(value)


# Attributes of every module, among them its hooks, which come and go with our own.
_COMMON = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (bool, int, float, str, list, tuple, set, dict)


def plain_attributes(module: nn.Module) -> list[tuple[str, object]]:
    """Return a module's attributes that are numbers, texts or collections, by name, as copies."""
    attributes = vars(module).items()
    return [(name, _plain(value)) for name, value in attributes if name not in _COMMON and isinstance(value, _PLAIN)]


def _plain(value: object) -> object:
    """Return a copy of a number, a text, or a collection of these; None for anything else."""
    if isinstance(value, dict):
        return [(_plain(key), _plain(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple, set)):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, _PLAIN) else None


def affine_test() -> Callable[[nn.Module, Tensor], bool]:
    """Return a test whether modules are affine maps, run once for all with the same parts if one of them is not."""
    refused: set[object] = set()

    def is_affine(module: nn.Module, like: Tensor) -> bool:
        kind = tuple((name, type(part)) for name, part in module.named_modules())
        if kind not in refused and affinity(module, like) is None:
            refused.add(kind)
        # Others may differ in their weights: an adapter that has not been trained adds nothing.
        return kind not in refused

    return is_affine

"""Batches of examples of several lengths, and that their maps are those of each example alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def padded(examples: Sequence[Tensor], side: str, value: int = 0) -> tuple[Tensor, Tensor]:
    """Ids (1, S) of several lengths as one batch, and its mask."""
    length = max(example.shape[1] for example in examples)
    missing = [length - example.shape[1] for example in examples]
    where = [(count, 0) if side == "left" else (0, count) for count in missing]
    batch = [pad(example, places, value=value) for example, places in zip(examples, where, strict=True)]
    mask = [pad(torch.ones_like(example), places) for example, places in zip(examples, where, strict=True)]
    return torch.cat(batch), torch.cat(mask)


def expect_alone(
    maps: Any, row: int, alone: Any, real: Mapping[str, tuple[Tensor, Tensor]], rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    """An example of a batch has the maps that it has alone, and zeros where queries or keys of a stack are not real."""
    for stack, (rows, columns) in real.items():
        whole = getattr(maps, stack)[row]
        inside = whole[..., rows, :][..., columns]
        torch.testing.assert_close(inside, getattr(alone, stack)[0], rtol=rtol, atol=atol)
        assert not whole[..., ~rows, :].any()
        assert not whole[..., ~columns].any()

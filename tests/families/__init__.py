"""The model families of the test matrix: tiny random models, and where a reader of their code finds the parts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.families.decoders import DECODERS
from tests.families.encoders import ENCODERS
from tests.families.family import GROUPED, HEADS, SPECIAL, TEXT, VOCABULARY, Family
from tests.families.further_decoders import FURTHER_DECODERS
from tests.families.further_encoders import FURTHER_ENCODERS
from tests.families.further_signals import FURTHER_AUDIO, FURTHER_VISION
from tests.families.llamas import LLAMAS
from tests.families.vision import VISION

__all__ = [
    "EVERY",
    "FAMILIES",
    "FURTHER",
    "GROUPED",
    "HEADS",
    "KINDS",
    "SPECIAL",
    "TEXT",
    "VOCABULARY",
    "Family",
    "build",
    "inputs",
    "randomized",
]

FAMILIES = ENCODERS | DECODERS | LLAMAS | VISION
FURTHER = FURTHER_ENCODERS | FURTHER_DECODERS | FURTHER_VISION | FURTHER_AUDIO
"""Families for each of which one test checks everything at once, in ``tests/test_further_families.py``."""
EVERY = FAMILIES | FURTHER
KINDS = {
    "Encoders": ENCODERS | FURTHER_ENCODERS,
    "Decoders": DECODERS | LLAMAS | FURTHER_DECODERS,
    "Vision": VISION | FURTHER_VISION,
    "Audio": FURTHER_AUDIO,
}


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model of the family with random weights, biases, γ and β, none of them at its initial value, in ``eval()``."""
    return randomized(EVERY[name].build, seed, dtype)


def randomized(make: Callable[[], nn.Module], seed: int, dtype: torch.dtype) -> Any:
    """A model with random parameters, none of them at its initial value, in ``eval()``."""
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    # Unlike to(), these leave complex numbers alone, which Llama 4's tower keeps its rotations in.
    names = {torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "float", torch.float64: "double"}
    return getattr(model, names[dtype])()


def inputs(name: str, seed: int = 0, batch: int = 3, length: int = 11, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random token ids without special ones, or random images or sounds."""
    generator, signal = torch.Generator().manual_seed(100 + seed), EVERY[name].signal
    if signal:
        return torch.randn(batch, *signal, generator=generator).to(dtype)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)

"""The model families of the test matrix: tiny random models, and where a reader of their code finds the parts."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_norm import NormMeter
from tests.families.decoders import DECODERS
from tests.families.encoders import ENCODERS
from tests.families.family import GROUPED, HEADS, SPECIAL, TEXT, VOCABULARY, Family
from tests.families.further_decoders import FURTHER_DECODERS
from tests.families.further_encoders import FURTHER_ENCODERS
from tests.families.further_signals import FURTHER_AUDIO, FURTHER_VISION
from tests.families.llamas import LLAMAS
from tests.families.vision import VISION
from tests.tiers import later

__all__ = ["GROUPED", "HEADS", "SPECIAL", "TEXT", "VOCABULARY", "Family"]
"""What the tests take from here of what is defined elsewhere."""

FAMILIES = ENCODERS | DECODERS | LLAMAS | VISION
TEXTS = [name for name, family in FAMILIES.items() if not family.image]
FURTHER = FURTHER_ENCODERS | FURTHER_DECODERS | FURTHER_VISION | FURTHER_AUDIO
"""Families that ``tests/test_families.py`` alone covers."""
EVERY = FAMILIES | FURTHER
KINDS = {
    "Encoders": ENCODERS | FURTHER_ENCODERS,
    "Decoders": DECODERS | LLAMAS | FURTHER_DECODERS,
    "Vision": VISION | FURTHER_VISION,
    "Audio": FURTHER_AUDIO,
}
OWN_CODE = frozenset(
    "rembert megatron-bert roformer mpnet deberta deberta-v2 openai-gpt gpt-neo gptj codegen bloom mpt "  # noqa: SIM905
    "falcon falcon-40b falcon-rw data2vec-vision blip-vision big-bird dpr luke tapas visual-bert imagegpt xglm "
    "trocr persimmon-fuyu sew-d".split()
)
"""Families whose files compute attention themselves rather than by the registry of attention functions."""


def kind_of(name: str) -> tuple[Any, ...]:
    """What the library's code depends on: arrangement, direction, input, special features, code of attention."""
    family = EVERY[name]
    return (family.style, family.causal, len(family.signal), tuple(sorted(family.special)), name in OWN_CODE)


REPRESENTATIVES = list({kind_of(name): name for name in reversed(FAMILIES)}.values())[::-1]
"""The first family of each kind."""


def arrangement_of(name: str) -> tuple[Any, ...]:
    """What methods beside the norms depend on."""
    return (EVERY[name].style, EVERY[name].causal, len(EVERY[name].signal))


def tiers(names: Iterable[str] = FAMILIES, kind: Callable[[str], tuple[Any, ...]] = kind_of) -> list[Any]:
    """Cases of a test: the first of these families of each kind in the short tier, a sixth of the others in CI."""
    names = list(names)
    first = {kind(name): name for name in reversed(names)}.values()
    others = [name for name in names if name not in first]
    marks = {name: later(place) for place, name in enumerate(others)}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


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


def measured(model: Any, inputs: Any, **asked: Any) -> Any:
    """What a meter measures in the only stack of a model."""
    (found,) = NormMeter(model).measure(inputs, **asked).values()
    return found


def state_of(model: Any) -> dict[str, Any]:
    """What explaining a model must not change."""
    modules, parameters = list(model.modules()), list(model.parameters())
    hooks = [
        {name: tuple(kept) for name, kept in vars(module).items() if name.endswith("_hooks")} for module in modules
    ]
    return {
        "hooks": hooks,
        "attributes": [(frozenset(vars(module)), module.training) for module in modules],
        "configs": [dict(vars(module.config)) for module in modules if hasattr(module, "config")],
        "parameters": [(float(p.detach().double().sum()), p.requires_grad, p.grad) for p in parameters],
    }

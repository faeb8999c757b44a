"""Weights at which one structure looks like another: what is found is the model's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import NormMeter
from captum_norm.models.inputs import bind_inputs
from captum_norm.models.search.attention_blocks import find_blocks
from tests import families, feed_forwards, oracle
from tests.test_matrix import SCOPES


def times(factor: float, *names: str) -> Callable[[Any], None]:
    """Multiplies the parameters in whose names one of these stands."""

    def change(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if any(part in name for part in names):
                parameter.mul_(factor)

    return change


def each(*changes: Callable[[Any], None]) -> Callable[[Any], None]:
    """Several changes."""

    def change(model: Any) -> None:
        for one in changes:
            one(model)

    return change


def equal_factors(model: Any) -> None:
    """The gate's map is the other factor's."""
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.copy_(layer.mlp.gate_proj.weight)


def vanishing_experts(model: Any) -> None:
    """What experts compute vanishes beside their bias."""
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj_bias"):
            parameter.zero_()
        elif name.endswith("experts.gate_up_proj"):
            parameter.mul_(1e-2)
        elif name.endswith("experts.down_proj_bias"):
            parameter.normal_(std=1e4)


def plain_norms(model: Any) -> None:
    """γ = 1 and β = 0, on a stream that is normalised already."""
    for name, parameter in model.named_parameters():
        if "layernorm" in name.lower() or ".ln_" in name or "LayerNorm" in name:
            parameter.fill_(float(name.endswith("weight")))
    torch.nn.init.normal_(next(model.parameters()))


small_attention = times(1e-9, "o_proj", "attention.dense", "out_proj", "self_attention.dense", "output.dense")
small_neurons = times(1e-9, "gate_proj", "up_proj", "h_to_4h", "intermediate.dense")
CASES = {
    # Its attention vanishes beside the stream, and with it what tells a parallel layer from one after the other.
    **{
        f"small attention, {name}": (name, small_attention)
        for name in "gpt-neox granite bert olmo2 llama falcon gemma2 opt gpt-neox-sequential".split()  # noqa: SIM905
    },
    # Near 0 GELU, SiLU and half of the identity are the same.
    **{f"small neurons, {name}": (name, small_neurons) for name in ("llama", "gpt-neox", "bert")},
    "equal factors": ("llama", equal_factors),
    "vanishing experts": ("gpt-oss", vanishing_experts),
    "small stream": ("llama", each(times(1e-9, "embed_tokens"), times(1e3, "o_proj"))),
    "plain norms, llama": ("llama", plain_norms),
    "plain norms, gpt2": ("gpt2", plain_norms),
    "plain norms, bert": ("bert", plain_norms),
}


def worst(found: Tensor, expected: Tensor) -> float:
    """The largest relative error of a layer's map, of its diagonal and of all beside it."""
    own = torch.eye(found.shape[-1], dtype=torch.bool)
    errors = []
    for chosen in (own, ~own):
        rows, exact = found[..., chosen].double(), expected[..., chosen]
        errors.append((rows - exact).norm(dim=-1) / exact.norm(dim=-1))
    return float(torch.stack(errors).max())


@pytest.mark.few
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_what_is_found_is_the_models_own_structure(case: str, dtype: torch.dtype) -> None:
    name, change = CASES[case]
    family, ids = families.FAMILIES[name], families.inputs(name)
    model = families.build(name, dtype=torch.float64)
    with torch.no_grad():
        change(model)
    model = model.to(dtype)
    for block in find_blocks(bind_inputs(model, ids), feed_forward=True).values():
        behind: Any = block.feed_forward
        assert block.layout.style == family.style
        assert (block.layout.branch_factor, block.layout.residual_factor) == (family.branch_factor, None)
        assert behind.parallel == (family.style == "parallel")
        assert set(behind.scopes) == set(feed_forwards.SCOPES[family.style])
        assert (behind.branch_factor is None) == (family.branch_factor is None)
    scopes = (*SCOPES[family.style], *feed_forwards.SCOPES[family.style])
    (measured,) = NormMeter(model).measure(ids, scopes=scopes).values()
    exact = oracle.layers(family, model.double(), ids)
    for scope in SCOPES[family.style]:
        expected = torch.stack([layer.vectors(scope)[0].norm(dim=-1) for layer in exact], 1)
        assert worst(measured.norms[scope], expected) < (1e-5 if dtype == torch.float32 else 4e-2), scope
    if dtype == torch.float32 and name in feed_forwards.PARTS:
        vectors = feed_forwards.vectors(name, model, ids)
        for scope in feed_forwards.SCOPES[family.style]:
            expected = torch.stack([layer[scope][0].norm(dim=-1) for layer in vectors], 1)
            assert worst(measured.norms[scope], expected) < 1e-5, scope

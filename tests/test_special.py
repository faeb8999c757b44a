"""What is said to be special of a family is active in its tests, not defaulted away by a tiny configuration."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_norm import AttentionWeights, NormMeter
from tests import encoder_decoders, families, oracle

EVERY: dict[str, Any] = {**families.EVERY, **encoder_decoders.ENCODER_DECODERS}


def weights(model: Any, inputs: Tensor) -> Tensor:
    """(B, L, H, Q, K)."""
    return AttentionWeights(model).maps(inputs, per_head=True).self_attention


def weights_of(name: str) -> Tensor:
    return weights(families.build(name), families.inputs(name))


def layers_of(name: str, dtype: torch.dtype = torch.float32) -> list[oracle.Layer]:
    return oracle.layers(EVERY[name], families.build(name, 0, dtype), families.inputs(name, dtype=dtype))


def window(name: str) -> bool:
    last = weights_of(name)[..., -1, :]
    return bool((last[..., 0] == 0).all((0, 2)).any() and (last[..., -2] > 0).all())


def soft_capping(name: str) -> bool:
    model, inputs = families.build(name), families.inputs(name)
    before = weights(model, inputs)
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    return bool((weights(model, inputs) - before).abs().max() > 1e-3)


def grouped(name: str) -> bool:
    # Some families have other numbers of heads in layers with a window.
    return {2} <= {layer.value_heads for layer in layers_of(name)} <= {1, 2, 4}


def latent(name: str) -> bool:
    config = families.build(name).config
    keys = config.qk_nope_head_dim + config.qk_rope_head_dim
    return bool(config.kv_lora_rank < config.hidden_size and config.v_head_dim != keys)


def layer_scale(name: str) -> bool:
    return all(layer.factor.numel() == 32 and layer.factor.std() > 0.05 for layer in layers_of(name, torch.float64))


def experts(name: str) -> bool:
    model = families.build(name) if name in families.EVERY else encoder_decoders.build(name)
    return any(key.endswith((".gate", ".router", ".router.layer")) for key, _ in model.named_modules())


def gated_attention(name: str) -> bool:
    return all(layer.gate is not None and layer.gate.std() > 0.01 for layer in layers_of(name))


def shared_layers(name: str) -> bool:
    names = NormMeter(families.build(name)).measure(families.inputs(name), scopes=["attn"])["encoder"].layer_names
    return len(names) == 2 and len(set(names)) == 1


CHECKS: dict[str, Callable[[str], bool]] = {
    "adapters": lambda name: any("adapter" in key for key, _ in families.build(name).named_modules()),
    "attention sinks": lambda name: bool((weights_of(name).sum(-1) < 0.9).any()),
    "gated attention": gated_attention,
    "grouped queries": grouped,
    "latent values": latent,
    "layer scale": layer_scale,
    "mixture of experts": experts,
    "one value head": lambda name: {layer.value_heads for layer in layers_of(name)} == {1},
    "residual multiplier": lambda name: all(float(layer.factor) not in (0, 1) for layer in layers_of(name)),
    "residual scale": lambda name: families.build(name).model.layers[0].input_residual.std() > 0.05,
    "shared layers": shared_layers,
    "sliding window": window,
    "soft-capping": soft_capping,
}


@pytest.mark.parametrize(("name", "special"), [(name, one) for name, family in EVERY.items() for one in family.special])
def test_what_is_special_is_active(name: str, special: str) -> None:
    assert CHECKS[special](name)


@pytest.mark.parametrize("name", [name for name, family in families.FAMILIES.items() if "relative" in family.positions])
def test_relative_positions_are_active(name: str) -> None:
    model, inputs = families.build(name), families.inputs(name)
    before = weights(model, inputs)
    for key, table in model.named_parameters():
        if "relative_" in key or "rel_embed" in key:
            nn.init.zeros_(table)
    assert (weights(model, inputs) - before).abs().max() > 1e-3


DISTANCES = [name for name, family in families.FAMILIES.items() if family.positions.startswith(("rotary", "ALiBi"))]


@pytest.mark.parametrize("name", DISTANCES)
def test_positions_by_distance_are_active(name: str) -> None:
    # All tokens are alike and no other positions are there, so only the distance can tell keys apart.
    inputs = torch.ones(1, 3, 16, 16) if families.FAMILIES[name].image else torch.full((1, 11), 7)
    first = weights(families.build(name), inputs)[0, 0, :, -1]
    seen = first > 0
    assert (first.where(seen, 0).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True) - first)[seen].abs().max() > 1e-4

"""Models that carry hooks of their users are explained with them, or the hooks are named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import CPLRP, GIM, AttnLRP, CaptumNormError, DecompX, NormAttribution, NormMeter
from tests import families, oracle

VECTOR = torch.linspace(-1, 1, 32, dtype=torch.float64)
PLACES = {
    "block": "model.layers.1",
    "attention": "model.layers.1.self_attn",
    "projection": "model.layers.1.self_attn.o_proj",
    "values": "model.layers.1.self_attn.v_proj",
    "queries": "model.layers.1.self_attn.q_proj",
    "network": "model.layers.1.mlp",
    "norm": "model.layers.1.post_attention_layernorm",
    "embeddings": "model.embed_tokens",
}


def changed(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return (change(result[0]), *result[1:]) if isinstance(result, tuple) else change(result)


def steer(_: Any, __: Any, output: Any) -> Any:
    return changed(output, lambda stream: stream + VECTOR[: stream.shape[-1]])


def scale(_: Any, __: Any, output: Any) -> Any:
    return changed(output, lambda stream: stream * 0.5)


def look(*_: Any) -> None:
    """Change nothing."""


def ablate(_: Any, received: tuple[Tensor, ...]) -> Any:
    """Set the first head to zero."""
    return changed(received, lambda heads: torch.cat([torch.zeros_like(heads[..., :8]), heads[..., 8:]], -1))


def hook(model: Any, place: str, function: Callable[..., Any]) -> None:
    module = model.get_submodule(PLACES[place])
    (module.register_forward_pre_hook if function is ablate else module.register_forward_hook)(function)


EXPLAINED = {
    *((place, look) for place in PLACES),
    *((place, effect) for place in ("projection", "values", "queries", "embeddings") for effect in (steer, scale)),
    *(("network", effect) for effect in (steer, scale)),
    *(("norm", effect) for effect in (steer, scale)),
    ("values", ablate),
    ("queries", ablate),
    ("block", ablate),
    ("network", ablate),
}
CASES = [(place, effect) for place in PLACES for effect in (steer, scale, look, ablate)]
CASES = [case for case in CASES if case not in (("embeddings", ablate), ("attention", ablate))]


@pytest.mark.few
@pytest.mark.parametrize(("place", "effect"), CASES)
def test_hooks_are_part_of_the_model_or_named(place: str, effect: Callable[..., Any]) -> None:
    model, inputs = families.build("llama", dtype=torch.float64), families.inputs("llama", batch=1, length=12)
    hook(model, place, effect)
    named = rf'"{PLACES[place]}" \({effect.__name__}\)'
    model.set_attn_implementation("eager")
    with torch.no_grad(), oracle.watched(model, {"": ("model.layers.1.self_attn.v_proj", "output")}) as seen:
        plain = model(inputs, output_attentions=True)
    if (place, effect) not in EXPLAINED:
        with pytest.raises(CaptumNormError, match=named):
            NormAttribution(model).maps(inputs)
        return
    maps: Any = NormAttribution(model).maps(inputs).decoder
    weight = model.model.layers[1].self_attn.o_proj.weight.detach().T.unflatten(0, (4, 8))
    heads = seen[""][0][0].unflatten(-1, (2, 8)).transpose(0, 1).repeat_interleave(2, 0)
    vectors = torch.einsum("hqk,hkd,hde->qke", plain.attentions[1][0].double(), heads, weight)
    factor = 0.5 if (place, effect) == ("projection", scale) else 1
    torch.testing.assert_close(maps[0, 1], factor * vectors.norm(dim=-1), rtol=1e-6, atol=1e-9)
    if place == "network" and effect is not look:
        with pytest.raises(CaptumNormError, match=named):
            NormMeter(model).measure(inputs, scopes=["atb_ff_res"])
    for method in (DecompX, AttnLRP, CPLRP, GIM):
        rules: Any = method(model)
        if place == "norm" and effect is not look:
            with pytest.raises(CaptumNormError, match=named):
                rules.decompose(inputs, target=7)
        else:
            assert abs(float(rules.decompose(inputs, target=7).number) - float(plain.logits[0, -1, 7])) < 1e-6


def test_hooks_stay_and_are_called_once_for_each_forward_pass() -> None:
    model, inputs, calls = families.build("llama"), families.inputs("llama", batch=1), list[int]()
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda *_: calls.append(1))
    method = NormAttribution(model)
    method.maps(inputs)
    calls.clear()
    method.maps(inputs)
    assert len(calls) == len(layer._forward_hooks) == 1

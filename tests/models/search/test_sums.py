"""Layers whose sums can be read in several ways: they are read as their code says, or refused."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_norm import NormMeter, UnsupportedModelError
from tests import encoder_decoders, oracle
from tests.arrangements import ARRANGEMENTS, IDS, WIDTH, Layer, Sum


@pytest.mark.few
@pytest.mark.parametrize("arrange", ARRANGEMENTS)
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.long)])
@torch.no_grad()
def test_sums_are_those_of_the_code(arrange: Any, dtype: torch.dtype) -> None:
    """An arrangement that names no sums is refused."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(20, WIDTH), Layer(arrange), Layer(arrange))
    for name, parameter in model.named_parameters():
        if "closed" not in name:
            parameter.add_(0.15 * torch.randn_like(parameter))
    stream, sums = model.double()[0](IDS), list[Sum]()
    for layer in model[1:]:
        stream, added = arrange(layer, stream)
        sums += added
    vectors = [one.exact().vectors("atb")[0] for one in sums]
    meter = NormMeter(model.to(dtype))
    if not sums:
        with pytest.raises(UnsupportedModelError, match="no sum with a residual stream was found"):
            meter.measure(IDS, scopes=["atb"])
        return
    measured = meter.measure(IDS, scopes=["atb"])["encoder"]
    exact = torch.stack(vectors, 1)
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    assert (measured.norms["atb"] - exact.norm(dim=-1)).abs().max() < tolerance * exact.norm(dim=-1).max()
    ratios = torch.stack([oracle.mixing_ratio(one) for one in vectors], 1)
    assert (measured.mixing_ratio["atb"] - ratios).abs().max() < tolerance


Part = Callable[[Tensor], Tensor]


def cross_alone(p: Any, x: Tensor, own: Part, cross: Part, _: Part) -> tuple[Tensor, Tensor | None]:
    h = x + own(p.self_attn_layer_norm(x))
    return h + cross(p.encoder_attn_layer_norm(h)), h


def cross_after_the_network(p: Any, x: Tensor, own: Part, cross: Part, network: Part) -> tuple[Tensor, Tensor | None]:
    h = x + own(p.self_attn_layer_norm(x))
    g = h + network(p.final_layer_norm(h))
    return g + cross(p.encoder_attn_layer_norm(g)), g


def cross_before_self(p: Any, x: Tensor, own: Part, cross: Part, network: Part) -> tuple[Tensor, Tensor | None]:
    h = x + cross(p.encoder_attn_layer_norm(x))
    g = h + own(p.self_attn_layer_norm(h))
    return g + network(p.final_layer_norm(g)), x


def cross_beside_the_network(p: Any, x: Tensor, own: Part, cross: Part, network: Part) -> tuple[Tensor, Tensor | None]:
    h = x + own(p.self_attn_layer_norm(x))
    return h + cross(p.encoder_attn_layer_norm(h)) + network(p.final_layer_norm(h)), None


def cross_beside_self(p: Any, x: Tensor, own: Part, cross: Part, _: Part) -> tuple[Tensor, Tensor | None]:
    n = p.self_attn_layer_norm(x)
    return x + own(n) + cross(n), None


def cross_of_self(p: Any, x: Tensor, own: Part, cross: Part, _: Part) -> tuple[Tensor, Tensor | None]:
    a = own(p.self_attn_layer_norm(x))
    return x + a + cross(p.encoder_attn_layer_norm(a)), None


@pytest.mark.few
@pytest.mark.parametrize(
    "arrange",
    [
        cross_alone,
        cross_after_the_network,
        cross_before_self,
        cross_beside_the_network,
        cross_beside_self,
        cross_of_self,
    ],
)
def test_the_stream_of_cross_attention_is_that_of_the_code(arrange: Any) -> None:
    """In mBART's decoder, arranged otherwise; the mixing ratio shows the stream's norm. No stream: it is refused."""
    model, inputs = encoder_decoders.build("mbart", dtype=torch.float64), encoder_decoders.inputs("mbart")
    streams: dict[nn.Module, Tensor | None] = {}

    def forward(
        layer: Any,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        **_: Any,
    ) -> Tensor:
        def own(x: Tensor) -> Tensor:
            return layer.self_attn(hidden_states=x, attention_mask=attention_mask)[0]  # type: ignore[no-any-return]

        def cross(x: Tensor) -> Tensor:
            found: Tensor = layer.encoder_attn(
                hidden_states=x, key_value_states=encoder_hidden_states, attention_mask=encoder_attention_mask
            )[0]
            return found

        def network(x: Tensor) -> Tensor:
            return layer.fc2(layer.activation_fn(layer.fc1(x)))  # type: ignore[no-any-return]

        output: Tensor
        output, streams[layer] = arrange(layer, hidden_states, own, cross, network)
        return output

    for layer in model.model.decoder.layers:
        layer.forward = MethodType(forward, layer)
    meter = NormMeter(model)
    with torch.no_grad():
        model(**inputs)
    exact = list(streams.values())
    if None in exact:
        with pytest.raises(UnsupportedModelError, match="no sum with a residual stream was found"):
            meter.measure(inputs, scopes=["atb"], stacks=["cross"])
        return
    measured = meter.measure(inputs, scopes=["attn", "atb"], stacks=["cross"])["cross"]
    others = measured.mixing_ratio["atb"]
    norms = torch.stack([stream.norm(dim=-1) for stream in exact], 1)  # type: ignore[union-attr]
    # others = ‖a‖ / (‖a‖ + ‖x‖), with a what cross-attention adds without the projection's bias.
    added: dict[int, Tensor] = {}
    for index, layer in enumerate(model.model.decoder.layers):
        bias = layer.encoder_attn.out_proj.bias
        layer.encoder_attn.register_forward_hook(
            lambda _m, _a, output, index=index, bias=bias: added.__setitem__(index, (output[0] - bias).norm(dim=-1))
        )
    with torch.no_grad():
        model(**inputs)
    own = torch.stack([added[index] for index in sorted(added)], 1)
    torch.testing.assert_close(others, own / (own + norms), rtol=1e-10, atol=1e-12)

"""Where one structure looks like another, what is found is the model's own, or it is refused."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_norm import NormMeter, UnsupportedModelError
from captum_norm.models.inputs import bind_inputs
from captum_norm.models.search.attention_blocks import find_blocks
from tests import encoder_decoders, families, feed_forwards, oracle
from tests.arrangements import ARRANGEMENTS, IDS, WIDTH, Layer, Sum
from tests.test_matrix import SCOPES


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

"""What multiplies attention's output before the output projection is frozen; what else stands there is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from captum_norm import ALTI, AttentionWeights, DecompX, InformationFlow, NormMeter, UnsupportedModelError
from tests import families, oracle
from tests.test_matrix import relative

WIDTH, HEADS = 12, 2
Between = Callable[["Layer", Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """A pre-norm layer with something between attention and its output projection."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.norm, self.between = nn.LayerNorm(WIDTH), between
        self.q, self.k, self.v, self.gate, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.inner, self.rms = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-3)
        self.kept: list[Tensor] = []

    def forward(self, stream: Tensor) -> Tensor:
        read = self.norm(stream)
        heads = (part(read).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        context = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return stream + self.out(self.between(self, read, context))  # type: ignore[no-any-return]


def built(between: Between, dtype: torch.dtype = torch.float64) -> Any:
    """A model of an embedding and two layers."""
    return families.randomized(lambda: nn.Sequential(nn.Embedding(30, WIDTH), Layer(between), Layer(between)), 0, dtype)


def by_head(layer: Layer, read: Tensor) -> Tensor:
    """One number for each head, over all its channels."""
    return layer.gate(read)[..., :HEADS].sigmoid().repeat_interleave(WIDTH // HEADS, -1)  # type: ignore[no-any-return]


def over_sigma(layer: Layer, context: Tensor) -> Tensor:
    return layer.rms.weight / (context.square().mean(-1, keepdim=True) + 1e-3).sqrt()


# What the model does, and the factor that this is.
GATES: dict[str, tuple[Between, Callable[[Layer, Tensor, Tensor], Tensor]]] = {
    "channels": (
        lambda layer, read, context: context * layer.gate(read).sigmoid(),
        lambda layer, read, _: layer.gate(read).sigmoid(),
    ),
    "heads": (lambda layer, read, context: context * by_head(layer, read), lambda layer, read, _: by_head(layer, read)),
    "rms norm": (lambda layer, _, context: layer.rms(context), lambda layer, _, context: over_sigma(layer, context)),
    "both": (
        lambda layer, read, context: layer.rms(context) * layer.gate(read),
        lambda layer, read, context: over_sigma(layer, context) * layer.gate(read),
    ),
}
OTHERS: dict[str, Between] = {
    "layer norm": lambda layer, _, context: layer.inner(context),
    "relu": lambda _, __, context: context.relu(),
    "absolute value": lambda _, __, context: context.abs(),
    "square": lambda _, __, context: context.square(),
    "other channels": lambda _, __, context: context.roll(1, -1),
    "other positions": lambda _, __, context: context.roll(1, 1),
    "a sum": lambda layer, read, context: context + layer.gate(read),
    "neighbours": lambda _, __, context: context + 0.3 * context.roll(1, -1),
}


def vectors(layer: Layer, stream: Tensor, factor: Callable[[Layer, Tensor, Tensor], Tensor]) -> Tensor:
    """(B, Q, K, D) by the definition, one key after the other."""
    return head_vectors(layer, stream, factor).sum(3)


def head_vectors(layer: Layer, stream: Tensor, factor: Callable[[Layer, Tensor, Tensor], Tensor]) -> Tensor:
    """Those of each head, (B, Q, K, H, D)."""
    read = layer.norm(stream)
    q, k, v = (part(read).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (layer.q, layer.k, layer.v))
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    gate = factor(layer, read, (weights @ v).transpose(1, 2).flatten(2))
    parts = []
    for key in range(stream.shape[1]):
        part = (weights[..., key, None] * v[:, :, None, key]).transpose(1, 2).flatten(2)
        heads = torch.eye(HEADS).to(part).repeat_interleave(WIDTH // HEADS, 1)
        parts.append(((part * gate).unsqueeze(-2) * heads) @ layer.out.weight.T)
    return torch.stack(parts, 2)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_norms_behind_a_gate_equal_their_definition(name: str, dtype: torch.dtype) -> None:
    between, factor = GATES[name]
    model = built(between, dtype)
    ids = torch.randint(30, (2, 5), generator=torch.Generator().manual_seed(0))
    measured = families.measured(model, ids, scopes=["attn", "atb"], weights=True)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    assert measured.convergence_delta.max() < tolerance
    embedding, *layers = model.double()
    with torch.no_grad():
        stream = embedding(ids)
        for index, layer in enumerate(layers):
            formed = vectors(layer, stream, factor)
            given = formed.norm(dim=-1).unsqueeze(1)
            assert relative(measured.norms["attn"][:, index : index + 1], given) < tolerance
            formed.diagonal(dim1=1, dim2=2).add_(stream.mT)
            assert relative(measured.norms["atb"][:, index : index + 1], formed.norm(dim=-1).unsqueeze(1)) < tolerance
            ratios = oracle.mixing_ratio(formed)
            assert (measured.mixing_ratio["atb"][:, index] - ratios).abs().max() < tolerance
            stream = layer(stream)


@pytest.mark.parametrize("name", OTHERS)
def test_anything_but_factors_is_refused(name: str) -> None:
    model = built(OTHERS[name], torch.float32)
    with pytest.raises(UnsupportedModelError, match="receives its output"):
        NormMeter(model).measure(torch.arange(5)[None], scopes=["attn"])


def test_weights_stay_those_of_attention_and_alti_uses_the_gate() -> None:
    between, factor = GATES["channels"]
    model = built(between)
    ids = torch.arange(6)[None]
    weights = AttentionWeights(model).maps(ids, per_head=True).self_attention
    assert weights.shape == (1, 2, HEADS, 6, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, HEADS, 6, dtype=torch.float64))
    with torch.no_grad():
        stream = model[0](ids)
        formed = vectors(model[1], stream, factor)
        formed.diagonal(dim1=1, dim2=2).add_(stream.mT)
        output = model[1](stream)
    near = (output.norm(p=1, dim=-1)[..., None] - (output[:, :, None] - formed).norm(p=1, dim=-1)).clamp(min=0)
    expected = near / near.sum(-1, keepdim=True)
    torch.testing.assert_close(ALTI(model).maps(ids).self_attention[:, 0], expected)


@pytest.mark.parametrize("name", ["channels", "both", "heads"])
def test_information_flows_through_the_heads_of_a_gate(name: str) -> None:
    between, factor = GATES[name]
    model = built(between)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        stream = model[0](ids)
        formed, output = head_vectors(model[1], stream, factor), model[1](stream)
    size = output.norm(p=1, dim=-1)
    heads = (size[..., None, None] - (output[:, :, None, None] - formed).norm(p=1, dim=-1)).clamp(min=0)
    residual = (size - (output - stream).norm(p=1, dim=-1)).clamp(min=0)
    expected = heads.sum(3) + torch.diag_embed(residual)
    expected = expected / expected.sum(-1, keepdim=True)
    for memory_budget in (None, 1):
        maps = InformationFlow(model, memory_budget=memory_budget).maps(ids)
        torch.testing.assert_close(maps.self_attention[:, 0], expected)


@pytest.mark.parametrize("chunked", [True, False])
def test_gradients_flow_and_chunks_change_nothing(chunked: bool) -> None:
    model = built(GATES["channels"][0])
    ids = torch.arange(6)[None]
    whole = NormMeter(model).measure(ids, scopes=["atb"])["encoder"].norms["atb"]
    meter = NormMeter(model, differentiable=True, memory_budget=1 if chunked else None)
    norms = meter.measure(ids, scopes=["atb"])["encoder"].norms["atb"]
    torch.testing.assert_close(norms.detach(), whole, rtol=1e-11, atol=1e-13)
    gradients = torch.autograd.grad(norms.sum(), [model[1].gate.weight, model[1].v.weight])
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


def test_norms_of_single_heads_need_one_factor_for_a_head() -> None:
    ids = torch.arange(6)[None]
    by_heads = built(GATES["heads"][0])
    measured = families.measured(by_heads, ids, scopes=["attn"], head_norms=True)
    assert measured.head_norms.shape == (1, 2, HEADS, 6, 6)
    by_channels = built(GATES["channels"][0])
    with pytest.raises(UnsupportedModelError, match="a gate multiplies each channel"):
        NormMeter(by_channels).measure(ids, scopes=["attn"], head_norms=True)


def test_decompx_refuses_gates() -> None:
    model = families.build("qwen3-5")
    with pytest.raises(UnsupportedModelError, match="DecompX does not support"):
        DecompX(model).maps(families.inputs("qwen3-5"))


def test_adapters_on_a_gated_model_are_those_of_the_merged_one() -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    model = peft.get_peft_model(families.build("qwen3-5"), settings).eval()
    ids = families.inputs("qwen3-5", batch=2, length=6)
    adapted = NormMeter(model).measure(ids, scopes=["atb"])["decoder"].norms["atb"]
    merged = NormMeter(model.merge_and_unload()).measure(ids, scopes=["atb"])["decoder"].norms["atb"]
    assert relative(adapted, merged) < 1e-5

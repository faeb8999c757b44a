"""Models in the styles that people write themselves: nanoGPT's, which returns a tuple, and that of x-transformers."""

from typing import Any

import pytest
import torch
from captum.attr import IntegratedGradients, Occlusion
from torch import Tensor, nn
from torch.nn import functional as F

import captum_norm as cn
from tests.classifiers import randomized

VOCABULARY, WIDTH, HEADS, LENGTH = 40, 24, 4, 6
IDS = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    def __init__(self, product: str) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=2))
        if self.product == "flash":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * q.shape[-1] ** -0.5
            weights = scores.masked_fill(future, -torch.finfo(scores.dtype).max).softmax(dim=-1).type(x.dtype)
            y = weights @ v if self.product == "matmul" else torch.einsum("b h i j, b h j d -> b h i d", weights, v)
        projected: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return projected


class Layer(nn.Module):
    def __init__(self, product: str) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention(product)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        hidden: Tensor = x + self.mlp(self.ln_2(x))
        return hidden


class NanoGPT(nn.Module):
    """Returns logits and loss; without targets the logits of the last position alone."""

    def __init__(self, product: str = "flash") -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.h = nn.ModuleList(Layer(product) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for layer in self.h:
            x = layer(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class Plain(NanoGPT):
    """The same model, which returns all logits and nothing else."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        logits, _ = super().forward(idx, idx if targets is None else targets)
        return logits


class Residual(nn.Module):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual


class Lists(nn.Module):
    """Layers are lists of their parts, as in x-transformers."""

    def __init__(self, product: str) -> None:
        super().__init__()
        parts = ([nn.LayerNorm(WIDTH), Attention(product), Residual()] for _ in range(2))
        self.layers, self.final_norm = nn.ModuleList(map(nn.ModuleList, parts)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.layers
        for norm, block, residual in layers:
            x = residual(block(norm(x)), x)
        normed: Tensor = self.final_norm(x)
        return normed


class InLists(nn.Module):
    def __init__(self, product: str = "flash") -> None:
        super().__init__()
        self.token_emb, self.to_logits = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.attn_layers = Lists(product)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.to_logits(self.attn_layers(self.token_emb(x)))
        return logits


def built(kind: Any, product: str = "flash") -> Any:
    torch.manual_seed(0)
    return randomized(kind(product), 1)


OUTPUT_METHODS: list[Any] = [cn.AttentionTimesGradient, cn.DecompX, lambda model: cn.DecompX(model, propagate=True)]


@pytest.mark.parametrize("number", range(len(OUTPUT_METHODS)))
def test_the_first_of_a_tuple_is_the_logits(number: int) -> None:
    model, plain = built(NanoGPT), built(Plain)
    method, expected = OUTPUT_METHODS[number](model), OUTPUT_METHODS[number](plain)
    last = expected.attribute(IDS, 3)
    torch.testing.assert_close(method.attribute(IDS, 3), last)
    torch.testing.assert_close(method.attribute({"idx": IDS, "targets": IDS}, 3), last)
    torch.testing.assert_close(method.attribute(IDS, 3, position=LENGTH - 1), last)
    third = method.attribute({"idx": IDS, "targets": IDS}, 3, position=2)
    torch.testing.assert_close(third, expected.attribute(IDS, 3, position=2))
    assert not third[:, 3:].any()
    torch.testing.assert_close(method.attribute(IDS), expected.attribute(IDS))
    with pytest.raises(cn.InvalidInputError, match="NanoGPT returns logits of the last position alone; expected that"):
        method.attribute(IDS, 3, position=2)


def test_methods_without_an_output_and_those_of_captum() -> None:
    model, plain = built(NanoGPT), built(Plain)
    for kind in (cn.NormAttribution, cn.AttentionBlockAttribution, cn.AttentionRollout, cn.ALTI, cn.ValueZeroing):
        torch.testing.assert_close(kind(model).maps(IDS).decoder, kind(plain).maps(IDS).decoder)
        torch.testing.assert_close(kind(model).attribute(IDS), kind(plain).attribute(IDS, position=-1))
    with pytest.raises(cn.UnsupportedModelError, match=r"NanoGPT has no known module .* a method get_input_embeddings"):
        cn.TokenAttribution(model, IntegratedGradients)
    model.get_input_embeddings, plain.get_input_embeddings = lambda: model.wte, lambda: plain.wte
    for captums in (IntegratedGradients, Occlusion):
        scores = [cn.TokenAttribution(each, captums).attribute(IDS, 3) for each in (model, plain)]
        torch.testing.assert_close(*scores)


def by_hand(model: InLists) -> dict[str, Tensor]:
    """Weights, (B, L, Q, K), and norms at ``attn``, of the products written out."""
    x, found = model.token_emb(IDS), {"weights": list[Tensor](), "norms": list[Tensor]()}
    layers: Any = model.attn_layers.layers
    for norm, attention, _ in layers:
        parts = attention.c_attn(norm(x)).chunk(3, dim=2)
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in parts)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / (WIDTH / HEADS) ** 0.5
        scores += torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        rows = attention.c_proj.weight.T.unflatten(0, (HEADS, -1))
        vectors = torch.einsum("bhij,bjhd,hde->bije", weights, v, rows)
        found["weights"].append(weights.mean(1))
        found["norms"].append(vectors.norm(dim=-1))
        x = x + vectors.sum(2) + attention.c_proj.bias
    return {name: torch.stack(layers, 1) for name, layers in found.items()}


@pytest.mark.parametrize("product", ["flash", "matmul", "einsum"])
@torch.no_grad()
def test_layers_in_lists_whatever_multiplies_weights_and_values(product: str) -> None:
    model = built(InLists, product)
    expected, before = by_hand(model), model(IDS)
    torch.testing.assert_close(cn.AttentionWeights(model).maps(IDS).decoder, expected["weights"])
    torch.testing.assert_close(cn.NormAttribution(model).maps(IDS).decoder, expected["norms"])
    reference = built(InLists, "matmul")
    for kind in (cn.AttentionBlockAttribution, cn.ALTI, cn.AttentionTimesGradient):
        method: cn.AttentionMapAttribution = kind(model)
        torch.testing.assert_close(method.attribute(IDS, 3), kind(reference).attribute(IDS, 3))
    for refused in (cn.ValueZeroing(model), cn.DecompX(model)):
        with pytest.raises(cn.UnsupportedModelError, match=r"around attention \(ModuleList\) are not called as"):
            refused.attribute(IDS, 3)
    assert torch.equal(model(IDS), before)

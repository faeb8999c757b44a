"""Attention that a model's own code computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from captum_norm import AttentionBlockAttribution, AttentionWeights, NormAttribution, NormMeter, UnsupportedModelError
from captum_norm.models import Scope
from captum_norm.models.attention import AttentionCall
from captum_norm.models.libraries.huggingface import observer
from tests import encoder_decoders, families

WIDTH, HEADS = 24, 3
sdpa: Callable[..., Tensor] = functional.scaled_dot_product_attention


class Block(nn.Module):
    """A layer as users write them, with one of several ways to attend."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        groups = 1 if way == "one value head" else HEADS
        self.key, self.value = nn.Linear(WIDTH, groups * 8), nn.Linear(WIDTH, groups * 8)
        self.drop = nn.Dropout(0.1)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended: Tensor = self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))
        hidden = hidden + attended
        fed: Tensor = self.feed_forward(self.second_norm(hidden))
        return hidden + fed

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        if self.way == "causal sdpa":
            return sdpa(query, key, value, is_causal=True)
        if self.way == "masked sdpa":
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            return sdpa(query, key, value, mask, scale=0.5)
        scores = query @ key.mT / 8**0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        if self.way == "flat heads":
            flat = torch.softmax(scores.flatten(0, 1), -1)
            return torch.bmm(self.drop(flat), value.flatten(0, 1)).reshape(batch, heads, length, -1)
        weights = scores.float().softmax(-1).to(value.dtype)
        if self.way == "masked afterwards":
            weights = weights * (torch.arange(length) != 1)
        return torch.matmul(self.drop(weights), value)

    def weights(self, hidden: Tensor) -> Tensor:
        """The attention weights, (B, H, Q, K), from the values 1 at one key and 0 at all others."""
        normed, length = self.norm(hidden), hidden.shape[1]
        query, key = (layer(normed).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.query, self.key))
        units = torch.eye(length).expand(len(hidden), HEADS, -1, -1).to(hidden.dtype)
        return self.attend(query, key, units)


def net(way: str) -> Any:
    """A decoder as users write them."""
    return nn.Sequential(nn.Embedding(20, WIDTH), Block(way), Block(way)).eval()


WAYS = ("plain", "flat heads", "one value head", "masked afterwards", "causal sdpa", "masked sdpa")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("memory_budget", [1, None])
def test_a_users_own_code_is_understood(way: str, memory_budget: int | None) -> None:
    torch.manual_seed(3)
    model, ids = net(way).double(), torch.randint(0, 20, (3, 7))
    meter = NormMeter(model, memory_budget=memory_budget)
    measured: Any = meter.measure(ids, scopes=["attn", "atb"], weights=True, per_head=True)["decoder"]
    assert measured.convergence_delta.max() < 1e-7  # one of the ways takes its softmax in float32
    hidden = model[0](ids)
    for layer, block in enumerate(model[1:]):
        expected = block.weights(hidden)
        torch.testing.assert_close(measured.weights[:, layer], expected.detach(), rtol=1e-12, atol=1e-12)
        values = block.value(block.norm(hidden)).unflatten(-1, (-1, 8)).transpose(1, 2).expand(-1, HEADS, -1, -1)
        matrix = block.out.weight.T.unflatten(0, (HEADS, 8))
        vectors = torch.einsum("bhqk,bhkd,hde->bqke", expected, values, matrix)
        torch.testing.assert_close(
            measured.norms["attn"][:, layer], vectors.norm(dim=-1).detach(), rtol=1e-9, atol=1e-10
        )
        hidden = block(hidden)


@pytest.mark.few
@pytest.mark.parametrize("way", WAYS)
def test_attention_is_asked_once_more_for_what_is_behind_the_network(way: str) -> None:
    torch.manual_seed(3)
    model, ids = net(way).double(), torch.randint(0, 20, (3, 7))
    scopes: list[Scope] = ["atb_ff", "atb_ff_res"]
    whole: Any
    whole, pieces = (NormMeter(model, memory_budget=size).measure(ids, scopes=scopes)["decoder"] for size in (None, 1))
    for scope in scopes:
        torch.testing.assert_close(pieces.norms[scope], whole.norms[scope], rtol=1e-6, atol=1e-7)
    assert whole.convergence_delta.max() < 1e-7  # one of the ways takes its softmax in float32


@pytest.mark.parametrize("name", families.tiers(name for name in families.FAMILIES if name in families.OWN_CODE))
def test_a_model_computes_while_it_is_watched_what_it_computes_alone(name: str) -> None:
    model, inputs = families.build(name), families.inputs(name)

    def attend(call: AttentionCall) -> Tensor:
        assert not call.cross
        output, _ = call.run()
        return output

    with torch.no_grad():
        alone = model(inputs)[0]
        with observer(model)(attend):
            watched = model(inputs)[0]
        assert torch.equal(model(inputs)[0], alone)
    torch.testing.assert_close(watched, alone, rtol=1e-5, atol=1e-6)


def test_what_a_model_chooses_for_speed_changes_nothing() -> None:
    """Falcon and data2vec run other code as they come than where their weights are asked for."""
    for name in ("falcon", "falcon-rw", "data2vec-vision"):
        model, inputs = families.build(name), families.inputs(name)
        config = type(model.config).from_dict(model.config.to_dict())
        fast = type(model)._from_config(config, attn_implementation="sdpa").eval()
        fast.load_state_dict(model.state_dict())
        assert fast.config._attn_implementation == "sdpa"
        for method in (AttentionWeights, AttentionBlockAttribution):
            if name == "falcon-rw":
                # The eager code of this file adds ALiBi to the scores that its mask holds already: another model.
                maps = method(fast).maps(inputs)
                assert maps.convergence_delta is None or maps.convergence_delta.max() < 1e-5
                continue
            expected, found = (method(each).maps(inputs).self_attention for each in (model, fast))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert fast.config._attn_implementation == "sdpa"


def test_cross_attention_is_told_from_self_attention_over_as_many_positions() -> None:
    for name in ("fsmt", "mvp"):
        model, inputs = encoder_decoders.build(name), encoder_decoders.inputs(name, source=6, target=6)
        assert list(NormMeter(model).measure(inputs, weights=True)) == ["encoder", "decoder", "cross"]


def test_an_error_inside_leaves_nothing_behind() -> None:
    model, ids = net("plain"), torch.randint(0, 20, (2, 5))
    handle = model[2].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        AttentionWeights(model).maps(ids)
    handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert AttentionWeights(model).maps(ids).decoder is not None
    assert torch.overrides._get_current_function_mode() is None


@pytest.mark.parametrize("method", [NormAttribution, AttentionWeights])
def test_products_of_other_softmaxes_are_no_attention(method: Any) -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, WIDTH)
            self.gate, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH))

        def forward(self, ids: Tensor) -> Tensor:
            hidden: Tensor = self.embedding(ids)
            mixed: Tensor = self.gate(hidden).flatten(0, 1).softmax(-1).matmul(self.experts)
            return hidden + mixed.view_as(hidden)

    with pytest.raises(UnsupportedModelError, match=r"no attention was seen in Router; expected a model that attends"):
        method(Router().eval()).maps(torch.randint(0, 20, (2, 5)))

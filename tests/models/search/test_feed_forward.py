"""Feed-forward blocks that are found, that are refused, and that are declared."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from captum_norm import AttentionBlockAttribution, NormMeter
from captum_norm.errors import UnsupportedScopeError
from captum_norm.models.inputs import bind_inputs
from captum_norm.models.networks import routing_of
from captum_norm.models.search.attention_blocks import find_blocks
from tests import encoder_decoders, families
from tests.feed_forwards import EVERY, PARTS, SCOPES


class _Function(nn.Module):
    """Stands in for a feed-forward network of LLaMA's layers: any function between two maps."""

    def __init__(self, function: Any, inner: int = 1) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.ModuleList(nn.Linear(32, 48) for _ in range(inner))
        self.outer = nn.Linear(48, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.outer(self.function(*(affine(hidden) for affine in self.inner)))
        return output


def llama(function: Any, inner: int = 1) -> Any:
    model = families.build("llama")
    for layer in model.model.layers:
        layer.mlp = _Function(function, inner)
    return model


def found_in(model: Any, ids: Tensor | None = None) -> list[Any]:
    call = bind_inputs(model, families.inputs("llama") if ids is None else ids)
    return [block.feed_forward for block in find_blocks(call, feed_forward=True).values()]


@pytest.mark.parametrize("name", families.tiers(PARTS))
@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, False)])
def test_the_parts_are_found(name: str, dtype: torch.dtype, noise: bool) -> None:
    """Freshly initialised models too, whose networks add next to nothing to the residual stream."""
    torch.manual_seed(1)
    model: Any = families.build(name, 1, dtype) if noise else EVERY[name].build().eval().to(dtype)
    with torch.no_grad():
        blocks = find_blocks(bind_inputs(model, families.inputs(name, 1, dtype=dtype)), feed_forward=True)
    names, parts = {module: place for place, module in model.named_modules()}, PARTS[name]
    for block in blocks.values():
        found = block.feed_forward
        assert found is not None, block.without_feed_forward
        assert (None if found.branch_factor is None else found.branch_factor.name) == parts.branch_factor
        assert found.residual_factor is None
        assert set(found.scopes) == set(SCOPES[EVERY[name].style])
        assert (found.experts is not None) == (parts.experts is not None)
        assert len(found.dense) == bool(parts.outer)
        for reader in found.dense:
            for projection, place in zip(reader.inner, parts.inner, strict=True):
                assert names[projection.module].endswith(place)
            assert names[reader.outer.module].endswith(parts.outer)
        for norm, expected in (
            (found.norm, parts.norm),
            (found.branch_norm, parts.branch_norm),
            (found.final_norm, parts.final_norm),
        ):
            assert (norm is None) == (expected is None)
            # A fresh parallel layer has two norms of the same numbers, of which either may stand for both.
            assert norm is None or not noise or names[norm.module].endswith(expected)


@pytest.mark.parametrize(
    ("function", "inner"),
    [
        (lambda z: functional.relu(z).square(), 1),
        (lambda u, w: functional.silu(u) * w, 2),
        (lambda w, u: functional.gelu(u, approximate="tanh") * w, 2),
        (nn.PReLU(), 1),
    ],
    ids=["squared relu", "gate first", "gate last", "module with weights"],
)
def test_activations_that_are_no_known_modules_are_recognised(function: Any, inner: int) -> None:
    measured = families.measured(llama(function, inner), families.inputs("llama"), scopes=["atb_ff", "atb_ff_res"])
    assert measured.convergence_delta.max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [functional.gelu, functional.silu, lambda z: z * torch.sigmoid(1.702 * z)])
def test_activations_are_told_apart_where_the_neurons_are_next_to_0(function: Any, dtype: torch.dtype) -> None:
    model = llama(function).to(dtype)
    with torch.no_grad():
        for layer in model.model.layers:
            for parameter in layer.mlp.inner.parameters():
                parameter.mul_(1e-9)
    values = torch.linspace(-3, 3, 31)
    for block in found_in(model):
        torch.testing.assert_close(block.dense[0].activation(values), function(values))


@pytest.mark.parametrize(
    "function",
    [lambda z: functional.layer_norm(z, (48,)), torch.sin, nn.LayerNorm(48), nn.Softmax(-1)],
    ids=["norm", "sine", "norm module", "softmax module"],
)
def test_what_is_no_known_elementwise_function_is_refused(function: Any) -> None:
    model, ids = llama(function), families.inputs("llama")
    assert AttentionBlockAttribution(model).maps(ids).decoder is not None
    assert found_in(model) == [None, None]
    with pytest.raises(UnsupportedScopeError) as caught:
        AttentionBlockAttribution(model, "atb_ff").maps(ids)
    message = str(caught.value)
    for part in ("model.layers.0", "linear maps ['mlp.inner.0']", "Describe a new model", "attn, attn_res, atb"):
        assert part in message


def test_the_search_waits_until_a_scope_needs_it() -> None:
    model, ids = families.build("llama"), families.inputs("llama")
    meter = NormMeter(model)
    assert [block.feed_forward for block in find_blocks(bind_inputs(model, ids)).values()] == [None, None]
    before = meter.measure(ids, scopes=["atb"])["decoder"].norms["atb"]
    both = meter.measure(ids, scopes=["atb", "atb_ff"])["decoder"]
    assert torch.equal(both.norms["atb"], before)
    assert torch.equal(meter.measure(ids, scopes=["atb"])["decoder"].norms["atb"], before)


def test_decoder_layers_with_cross_attention_are_refused_with_the_way_out() -> None:
    model, inputs = encoder_decoders.build("marian"), encoder_decoders.inputs("marian")
    meter = NormMeter(model)
    with pytest.raises(UnsupportedScopeError, match=r'cross-attention follows.*stacks=\["cross"\]'):
        meter.measure(inputs, scopes=["atb_ff"])
    assert list(meter.measure(inputs, scopes=["atb_ff"], stacks=["encoder", "cross"])) == ["encoder", "cross"]


def test_routings_are_told_from_other_tensors() -> None:
    index, coefficients = torch.zeros(5, 2, dtype=torch.long), torch.rand(5, 2)
    assert routing_of([torch.rand(5, 8), index, coefficients]) is not None
    assert routing_of([torch.rand(5, 2), index.bool()]) is None
    assert routing_of([torch.rand(5, 8), index]) is None


def test_an_expert_beyond_the_last_is_none() -> None:
    """Routers name the number of experts where they leave a position out."""
    model = families.build("mixtral")
    (reader, *_) = [block.experts for block in found_in(model)]
    routing: Any = routing_of([torch.tensor([[0, 4], [4, 4]]), torch.ones(2, 2)])
    (use,) = reader.uses(routing, torch.float32)
    assert use.queries.tolist() == [0]


class _Factored(nn.Module):
    """One layer: r x + Attention(x), then s y + FF(y), or both at once. The network is linear."""

    def __init__(self, *, parallel: bool) -> None:
        super().__init__()
        self.parallel, self.first, self.second = parallel, 0.7, 1.3
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.network = nn.Sequential(nn.Linear(16, 24), nn.Identity(), nn.Linear(24, 16))

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (layer(hidden)[:, None] for layer in (self.query, self.key, self.value))
        attended: Tensor = self.out(((query @ key.mT).softmax(-1) @ value)[:, 0])
        stream = hidden if self.parallel else hidden * self.first + attended
        fed: Tensor = self.network(stream)
        return stream * self.first + attended + fed if self.parallel else stream * self.second + fed


def factored(*, parallel: bool) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 16), _Factored(parallel=parallel)).double().eval()


def test_a_factor_on_the_stream_enters_the_vectors() -> None:
    model, ids = factored(parallel=False), torch.randint(0, 20, (2, 5))
    embedding, layer = model
    with torch.no_grad():
        stream = embedding(ids)
        weights = (layer.query(stream) @ layer.key(stream).mT).softmax(-1)
        vectors = weights[..., None] * (layer.value(stream) @ layer.out.weight.T)[:, None]
        vectors[:, range(5), range(5)] += 0.7 * stream
        fed = vectors @ layer.network[0].weight.T @ layer.network[2].weight.T
    measured = families.measured(model, ids, scopes=["atb_ff", "atb_ff_res"])
    torch.testing.assert_close(measured.norms["atb_ff"][:, 0], fed.norm(dim=-1))
    torch.testing.assert_close(measured.norms["atb_ff_res"][:, 0], (1.3 * vectors + fed).norm(dim=-1))
    assert measured.convergence_delta.max() < 1e-11


def test_a_factor_on_the_stream_of_a_parallel_layer_is_refused() -> None:
    model, ids = factored(parallel=True), torch.randint(0, 20, (2, 5))
    meter = NormMeter(model)
    assert list(meter.measure(ids, scopes=["atb"])) == ["encoder"]
    with pytest.raises(UnsupportedScopeError, match=r'reads a residual stream that "first" multiplies'):
        meter.measure(ids, scopes=["atb_ff_res"])

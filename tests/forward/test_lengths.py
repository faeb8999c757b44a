"""Models that compute something else beyond some length than over the first positions, on which they are understood."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import captum_norm as cn
from captum_norm.errors import IncompleteDecompositionError
from tests import families
from tests.families.family import new

WIDTH, HEADS = 16, 2


class Attention(nn.Module):
    """Causal attention in code of its own, which changes beyond some length; notes its weights."""

    def __init__(self, change: str, length: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.change, self.length = nn.Linear(WIDTH, WIDTH), change, length
        self.weights = torch.empty(0)

    def forward(self, stream: Tensor) -> Any:
        change = self.change if stream.shape[1] > self.length else ""
        if change == "flipped":
            stream = stream.flip(1)
        query, key, value = (part(stream).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.maps)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        if change == "window":
            scores = scores.masked_fill(torch.ones_like(scores).tril(-4).bool(), -torch.inf)
        self.weights = weights = scores.softmax(-1)
        if change == "squares":
            self.weights = weights = weights**2
        if change == "no product":
            output = (weights.unsqueeze(-1) * value.unsqueeze(2)).sum(-2)
        elif change == "no softmax":
            output = (weights := scores.sigmoid()) / weights.sum(-1, keepdim=True) @ value
        elif change == "chunks":
            output = torch.cat([rows @ value for rows in weights.split(8, 2)], 2)
        else:
            output = weights @ (value.roll(1, 1) if change == "other values" else value)
        if change == "mixed output":
            output = output + 0.3 * output.roll(1, 2)
        output = self.out(output.transpose(1, 2).flatten(2))
        return output.flip(1) if change == "flipped" else output


class Layer(nn.Module):
    def __init__(self, change: str, length: int) -> None:
        super().__init__()
        self.attention, self.norms = Attention(change, length), nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inner, self.outer = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.change, self.length = change, length

    def forward(self, stream: Tensor) -> Any:
        change = self.change if stream.shape[1] > self.length else ""
        if change != "no attention":
            stream = stream + self.attention(self.norms[0](stream))
        if change == "mixed before the network":
            stream = stream + stream.roll(20, 1)
        behind = self.outer(self.inner(self.norms[1](stream)).relu())
        if change == "mixed behind the network":
            behind = behind + 0.3 * torch.cat([behind[:, 1:], behind[:, :1]], 1)
        return stream + behind


class Model(nn.Module):
    def __init__(self, change: str, length: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(60, WIDTH), nn.Linear(WIDTH, 60)
        self.layers = nn.ModuleList([Layer("", length), Layer(change, length)])
        self.change, self.length = change, length

    def forward(self, input_ids: Tensor) -> Tensor:
        stream = self.embedding(input_ids)
        for layer in self.layers:
            stream = layer(stream)
            if self.change == "mixed between layers" and stream.shape[1] > self.length:
                stream = stream + 0.5 * stream.roll(1, 1)
        logits: Tensor = self.head(stream)
        return logits


def build(change: str, length: int) -> Any:
    torch.manual_seed(0)
    model = Model(change, length).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def ids(length: int) -> Tensor:
    return torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(length))


RULES: tuple[Any, ...] = (cn.DecompX, cn.AttnLRP, cn.CPLRP, cn.GIM)
LENGTHS = [16, 64, pytest.param(1000, marks=pytest.mark.long)]


@pytest.mark.few
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("change", ["window", "squares", "other values"])
def test_what_attends_otherwise_beyond_a_length_is_explained_as_it_runs(change: str, length: int) -> None:
    model, far = build(change, length), ids(length + 8)
    cn.AttentionWeights(model).maps(ids(length))
    with torch.no_grad():
        number = model(far)[0, -1, 7]
    made = torch.stack([layer.attention.weights for layer in model.layers], 1)
    torch.testing.assert_close(cn.AttentionWeights(model).maps(far, per_head=True).decoder, made, rtol=1e-11, atol=0)
    last = cn.AttentionWeights(model).maps(far, per_head=True, layers=[1], last=3).decoder
    torch.testing.assert_close(last, made[:, 1:, :, -3:], rtol=1e-11, atol=0)
    cn.NormAttribution(model).maps(far)
    for method in RULES if length < 1000 else ():
        assert abs(float(method(model).decompose(far, target=7, position=-1).number) - float(number)) < 1e-12


@pytest.mark.few
@pytest.mark.parametrize("change", ["no product", "no softmax", "chunks", "no attention"])
def test_a_layer_that_is_not_seen_beyond_a_length_is_missed(change: str) -> None:
    """Its maps would be missing, and the numbers of the layers behind it wrong."""
    calls: list[Callable[[Any, Tensor], Any]] = [
        lambda model, inputs: cn.AttentionWeights(model).maps(inputs),
        lambda model, inputs: cn.AttentionWeights(model).maps(inputs, layers=[0], last=2),
        lambda model, inputs: cn.AttentionRollout(model).attribute(inputs, position=3),
        lambda model, inputs: cn.NormAttribution(model).maps(inputs),
        lambda model, inputs: cn.NormMeter(model).measure(inputs, scopes=["attn"]),
        lambda model, inputs: cn.NormMeter(model).measure(inputs, weights=True),
        lambda model, inputs: cn.ALTI(model).maps(inputs),
        lambda model, inputs: cn.InformationFlow(model).maps(inputs),
        lambda model, inputs: cn.ValueZeroing(model).maps(inputs),
    ]
    for call in calls:
        for model, lengths in ((build(change, 16), (16, 17)), (build(change, 16), (17,))):
            for length in lengths[:-1]:
                call(model, ids(length))
            with pytest.raises(cn.UnsupportedModelError, match=r'(attends 1 times .* 2 times|mixes) .*"layers.1'):
                call(model, ids(17))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "change", ["mixed before the network", "mixed behind the network", "mixed between layers", "flipped"]
)
def test_layers_that_mix_positions_beyond_a_length_are_not_chained(change: str, length: int) -> None:
    place = r"layers\.1\.attention" if change == "flipped" else r"layers\.1"
    for method in (cn.AttentionRollout(build(change, length)), cn.NormAttribution(model := build(change, length))):
        for before in (method, cn.NormAttribution(model, "attn_res"), cn.ALTI(model)):
            before.attribute(ids(length), position=3)
        with pytest.raises(cn.UnsupportedModelError, match=rf'mixes .*"{place}" .* over {length + 8} positions'):
            method.attribute(ids(length + 8), position=3)


def test_parts_that_do_not_add_up_beyond_a_length_name_the_layer() -> None:
    model = build("mixed output", 16)
    cn.NormAttribution(model).maps(ids(16))
    with pytest.raises(IncompleteDecompositionError, match="vectors of layer 1 do not add up"):
        cn.NormAttribution(model).maps(ids(17))


def test_understanding_a_model_does_not_choose_its_attention() -> None:
    """BigBird attends in blocks until it has seen a short input."""
    sizes = {**families.TEXT, "max_position_embeddings": 256, "block_size": 4, "num_random_blocks": 1}
    model: Any = families.randomized(new("BigBirdModel", **sizes, attention_type="block_sparse"), 0, torch.float32)
    far = torch.randint(3, 60, (1, 80))
    for method in (cn.AttentionWeights, cn.NormAttribution):
        with pytest.raises(cn.UnsupportedModelError, match="sparse blocks"):
            method(model).maps(far)
        assert model.attention_type == "block_sparse"


def test_understanding_a_model_leaves_its_positions() -> None:
    """Frequencies that grow with the longest input so far, until a short one comes."""
    scaled = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    sizes = families.GROUPED | {"max_position_embeddings": 18, "rope_parameters": scaled}
    model: Any = families.randomized(new("LlamaForCausalLM", **sizes), 0, torch.float32)
    long, short = torch.randint(3, 60, (2, 1, 40)).split([1, 1])
    with torch.no_grad():
        model(long[0])
        number = model(short[0, :, :30]).logits[0, -1, 7]
    explained = cn.AttnLRP(model).decompose(short[0, :, :30], target=7)
    assert abs(float(explained.number) - float(number)) < 1e-6


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:_compile flag", "ignore:flex_attention called without")
def test_masks_of_flex_attention_are_the_models() -> None:
    sizes = families.GROUPED | {"hidden_size": 64, "head_dim": 16, "sliding_window": 6}
    model: Any = families.randomized(new("MistralForCausalLM", **sizes), 0, torch.float32)
    # At 24, 40 and 56 tokens, the kernel of torch 2.13 for processors reads memory that nobody has set.
    inputs = families.inputs("llama", batch=1, length=64)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        plain = model(inputs, output_attentions=True)
    model.set_attn_implementation("flex_attention")
    weights = cn.AttentionWeights(model).maps(inputs, per_head=True).decoder
    torch.testing.assert_close(weights, torch.stack(plain.attentions, 1), rtol=1e-5, atol=1e-6)
    number = cn.AttnLRP(model).decompose(inputs, target=7).number
    torch.testing.assert_close(number.flatten()[0], plain.logits[0, -1, 7], rtol=1e-4, atol=1e-5)

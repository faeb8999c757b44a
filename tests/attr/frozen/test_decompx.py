"""DecompX against vectors propagated by hand, in float64, through three models' formulas; its shared biases."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from captum.attr import NoiseTunnel
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention

from captum_norm import DecompX, Difference, InvalidInputError, UnsupportedModelError
from captum_norm.attr.frozen import parts
from captum_norm.attr.frozen.decompx import Bias
from captum_norm.errors import IncompleteDecompositionError, NotEnoughMemoryError
from tests import families
from tests.attr.frozen import decompx_by_hand
from tests.classifiers import classifier, randomized
from tests.families import FAMILIES, GROUPED, TEXT, tiers
from tests.families.decoders import GPT2
from tests.families.encoders import DISTILBERT
from tests.families.family import new

WIDTH, FEED_FORWARD = TEXT["hidden_size"], TEXT["intermediate_size"]
SHARINGS: tuple[Bias, ...] = ("absdot", "abssim", "norm", "equal", "cls")


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("propagate", [False, True])
@torch.no_grad()
def test_a_classifier_equals_vectors_by_hand(seed: int, propagate: bool) -> None:
    model, ids = classifier(seed), families.inputs("bert", seed, 2, 7)
    method = DecompX(model, propagate=propagate)
    found = method.decompose(ids, [2, 0])
    for example, target in enumerate((2, 0)):
        _, logits = decompx_by_hand.bert_by_hand(model, ids[example : example + 1], "apart")
        near(found.scores[example], logits[:-1, target])
        near(found.bias[example], logits[-1, target])
        near(found.number[example], model(ids).logits[example, target])
    scores, delta = method.attribute(ids, torch.tensor([2, 0]), return_convergence_delta=True)
    torch.testing.assert_close(scores, found.scores)
    assert delta.max() < 1e-12


@pytest.mark.parametrize(("seed", "bias"), list(enumerate(("apart", *SHARINGS))))
@torch.no_grad()
def test_hidden_states_and_shared_biases_equal_vectors_by_hand(seed: int, bias: Bias) -> None:
    model, ids = classifier(seed), families.inputs("bert", seed, 2, 7)
    method = DecompX(model, bias)
    maps: Any = method.maps(ids)
    found = method.decompose(ids, 1)
    assert maps.convergence_delta.max() < 1e-12
    for example in range(2):
        states, logits = decompx_by_hand.bert_by_hand(model, ids[example : example + 1], bias)
        for layer, state in enumerate(states):
            near(maps.self_attention[example, layer], state[:, :-1].norm(dim=-1))
        near(found.scores[example], logits[:-1, 1])
        near(found.bias[example : example + 1], logits[-1:, 1], 1e-10 if bias == "apart" else 0)
    torch.testing.assert_close(method.attribute(ids, layer=-1), maps.self_attention[:, 1, 0])
    torch.testing.assert_close(method.attribute(ids, layer=0, position=3), maps.self_attention[:, 0, 3])
    torch.testing.assert_close(method.maps(ids, layers=[-1]).self_attention, maps.self_attention[:, 1:])


@pytest.mark.parametrize("propagate", [False, True])
def test_next_words_equal_vectors_by_hand(propagate: bool) -> None:
    model, ids = randomized(families.build("gpt2"), 0), families.inputs("gpt2", 0, 1, 7)
    with torch.no_grad():
        logits = decompx_by_hand.gpt2_by_hand(model, ids, "apart")
    found = DecompX(model, propagate=propagate).decompose(ids, 5)
    near(found.scores[0], logits[:-1, 5])
    near(found.bias[0], logits[-1, 5])
    less = DecompX(model, propagate=propagate).attribute(ids, Difference(5, 9), position=-1)
    near(less[0], logits[:-1, 5] - logits[:-1, 9])


@pytest.mark.parametrize("bias", ["apart", "absdot"])
def test_rivals_that_are_nearly_alike_are_told_apart(bias: Bias) -> None:
    """The difference of two outputs cannot be more exact than they are."""
    model, ids = classifier(), families.inputs("bert", 0, 3, 7)
    with torch.no_grad():
        for parameter in model.classifier.parameters():
            parameter[2] = parameter[1] + 1e-3 * parameter[0]
    exact = DecompX(model, bias).decompose(ids, Difference(1, 2))
    found = DecompX(model.float(), bias).decompose(ids, Difference(1, 2))
    sizes = model(ids).logits.detach()[:, 1:].abs().sum(1)
    assert ((found.scores.sum(1) + found.bias - found.number).abs() > 1e-5 * exact.scores.abs().sum(1)).any()
    assert ((found.scores - exact.scores).abs() < 1e-5 * sizes[:, None]).all()
    assert (found.convergence_delta < 1e-5).all()


@pytest.mark.parametrize("propagate", [False, True])
def test_gated_networks_equal_integrals_by_hand(propagate: bool) -> None:
    model, ids = randomized(hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), 1), families.inputs("llama", 1, 1, 7)
    with torch.no_grad():
        logits = decompx_by_hand.llama_by_hand(model, ids, "apart")
    found = DecompX(model, propagate=propagate).decompose(ids, 5)
    near(found.scores[0], logits[:-1, 5], 1e-6)  # the norms of its file work in float32
    assert found.bias.abs().max() == 0


# Files that compute an activation, or add a value bias, by hand are not taken apart.
REFUSED = ["esm", "deberta"]


def first_output(output: Any, real: Tensor) -> Tensor:
    """The mean over all positions of what a model returns, with or without a head."""
    states: Tensor = output[0]
    assert len(real) == len(states)
    return states.flatten(1, -2).mean(1) if states.dim() > 2 else states


@pytest.mark.parametrize("propagate", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_linear_is_refused(name: str, propagate: bool) -> None:
    method = DecompX(families.build(name), propagate=propagate, readout=first_output)
    with pytest.raises(IncompleteDecompositionError, match="do not add up"):
        method.decompose(families.inputs(name, 0, 2, 7), 1)


@pytest.mark.few(cases=8)
@pytest.mark.parametrize("name", tiers(name for name in FAMILIES if name not in REFUSED))
def test_one_backward_pass_equals_propagated_vectors(name: str) -> None:
    model, ids = families.build(name), families.inputs(name, 0, 2, 7)
    graph, parts = (
        DecompX(model, propagate=propagate, readout=first_output).decompose(ids, 1) for propagate in (False, True)
    )
    size = parts.scores.abs().max()
    assert (graph.scores - parts.scores).abs().max() < 1e-5 * size
    assert (graph.bias - parts.bias).abs().max() < 1e-5 * size
    torch.testing.assert_close(graph.number, parts.number)
    assert max(graph.convergence_delta.max(), parts.convergence_delta.max()) < 1e-5
    shared = DecompX(model, "norm", readout=first_output).decompose(ids[:1], 1)
    assert not shared.bias.any()
    assert shared.convergence_delta.max() < 1e-5


HEADS: dict[str, Any] = {
    "softplus": new("BertForSequenceClassification", **TEXT),
    "tanh as a function": new("RobertaForSequenceClassification", **TEXT),
    "words": new("BertForMaskedLM", **TEXT, hidden_act="gelu_new"),
    "sigmoid": new("BertForSequenceClassification", **TEXT, hidden_act="sigmoid"),
    "quick gelu": new("BertForSequenceClassification", **TEXT, hidden_act="quick_gelu"),
    "relu": new("DistilBertForSequenceClassification", **DISTILBERT, activation="relu"),
    "last token": new("GPT2ForSequenceClassification", **GPT2, pad_token_id=0),
}
"""Heads and activations that are functions in the model's code, or not zero at zero."""


@pytest.mark.few
@pytest.mark.parametrize("name", HEADS)
def test_heads_and_activations_are_taken_apart(name: str) -> None:
    model, ids = families.randomized(HEADS[name], 0, torch.float64), families.inputs("bert", 0, 2, 7)
    if name == "softplus":  # which gives its parameter by position
        model.bert.encoder.layer[0].intermediate.intermediate_act_fn = torch.nn.Softplus(2.0)
    graph, parts = (DecompX(model, propagate=propagate).decompose(ids, 1, position=-1) for propagate in (False, True))
    near(graph.scores, parts.scores)
    near(graph.bias, parts.bias)
    assert max(graph.convergence_delta.max(), parts.convergence_delta.max()) < 1e-12
    shared = DecompX(model, "norm").decompose(ids, 1, position=-1)
    torch.testing.assert_close(shared.scores.sum(1), shared.number)


def batches_of(model: Any) -> list[int]:
    """A list that gets the number of examples of each later run of a model."""
    sizes: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len((*args, *kwargs.values())[0])), with_kwargs=True
    )
    return sizes


@pytest.mark.parametrize(("name", "width"), [("bert", FEED_FORWARD), ("albert", FEED_FORWARD), ("gpt2", 4 * WIDTH)])
def test_tokens_go_together_as_far_as_memory_allows(name: str, width: int) -> None:
    model, ids = randomized(families.build(name), 0), families.inputs(name, 0, 2, 7)
    copy = parts.LAYER_COPIES * 7 * width * 8
    copies = batches_of(model)

    def found(budget: int) -> tuple[list[Tensor], list[int]]:
        method = DecompX(model, propagate=True, readout=first_output, memory_budget=budget)
        method.maps(ids)  # what is learnt of the model takes runs of its own
        copies.clear()
        maps = method.maps(ids, layers=[0])
        results = [*method.decompose(ids, 1)[:3], maps.self_attention]
        return results, [count for count in copies if count > 1]

    together, counts = found(2**40)
    assert counts == 2 * 2 * [7 + 2]
    for budget, expected_counts in ((5 * copy, [5, 5, 3]), (1, 7 * [3])):
        apart, counts = found(budget)
        assert counts == 2 * 2 * expected_counts
        for result, expected in zip(apart, together, strict=True):
            near(result, expected)


def test_layers_may_write_into_the_stream_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = randomized(families.build("gpt2"), 0), families.inputs("gpt2", 0, 2, 7)

    def results() -> list[Tensor]:
        found = [DecompX(model, propagate=propagate).attribute(ids, 1) for propagate in (False, True)]
        return [*found, DecompX(model).maps(ids).self_attention]

    expected, forward = results(), hf.models.gpt2.modeling_gpt2.GPT2Block.forward

    def written(block: Any, stream: Tensor, *args: Any, **options: Any) -> Tensor:
        output: Any = forward(block, stream, *args, **options)  # type: ignore[arg-type]
        return stream.copy_(output)

    monkeypatch.setattr(hf.models.gpt2.modeling_gpt2.GPT2Block, "forward", written)
    for found, before in zip(results(), expected, strict=True):
        near(found, before)


def test_shared_biases_need_room_for_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = classifier(), families.inputs("bert", 0, 1, 7)
    expected = DecompX(model, "absdot").attribute(ids, 1)
    torch.testing.assert_close(DecompX(model, "absdot", memory_budget=1).attribute(ids, 1), expected, rtol=0, atol=0)
    needed = (7 + 2) * parts.LAYER_COPIES * 7 * FEED_FORWARD * 8
    monkeypatch.setattr(parts, "free_bytes", lambda _: needed)
    DecompX(model, "absdot").attribute(ids, 1)
    monkeypatch.setattr(parts, "free_bytes", lambda _: needed - 1)
    with pytest.raises(NotEnoughMemoryError, match=r'7 tokens take about 0\.2 MiB .*shared as "absdot" need all'):
        DecompX(model, "absdot").attribute(ids, 1)
    torch.testing.assert_close(DecompX(model, propagate=True).attribute(ids, 1), DecompX(model).attribute(ids, 1))


def test_changed_weights_are_seen() -> None:
    model, ids = classifier(), families.inputs("bert", 0, 1, 7)
    method = DecompX(model)
    method.attribute(ids, 1)
    last = model.bert.encoder.layer[1].output

    def write() -> None:
        last.LayerNorm.weight.data.mul_(torch.rand(32) + 0.5)

    def exchange() -> None:
        last.dense.bias = torch.nn.Parameter(torch.randn(32).double())

    for change in (write, exchange):
        change()
        with torch.no_grad():
            _, logits = decompx_by_hand.bert_by_hand(model, ids, "apart")
        found = method.decompose(ids, 1)
        near(found.scores[0], logits[:-1, 1])
        near(found.bias[0], logits[-1, 1])


def test_tolerance_follows_the_models_dtype() -> None:
    model, ids = classifier().bfloat16(), families.inputs("bert", 0, 1, 7)
    method = DecompX(model)
    method.attribute(ids, 1)
    model.float()
    method.attribute(ids, 1)
    with pytest.raises(IncompleteDecompositionError, match=r"3\.0e-02, accepted 1e-05 for torch\.float32"):
        method._accept(torch.tensor([0.03]), "the parts do not add up")


@pytest.mark.parametrize("propagate", [False, True])
def test_targets_of_any_kind(propagate: bool) -> None:
    model, ids = classifier(), families.inputs("bert", batch=2)
    method = DecompX(model, propagate=propagate)
    assert torch.equal(method.attribute(ids), method.attribute(ids, model(ids).logits.argmax(-1)))
    ones = method.attribute(ids, 1)
    for target in ([1], (1, 1), torch.tensor([1]), torch.tensor(1), torch.tensor([1, 1])):
        torch.testing.assert_close(method.attribute(ids, target), ones, rtol=0, atol=0)
    less = method.attribute(ids, Difference([1, 1], 2))
    torch.testing.assert_close(method.attribute(ids, Difference((1, 1), [2])), less, rtol=0, atol=0)


def test_captums_noise_tunnel_passes_targets_on() -> None:
    model, ids = classifier(), families.inputs("bert", batch=2)
    embeddings = model.bert.embeddings.word_embeddings(ids).detach()
    tunnel = NoiseTunnel(DecompX(model))
    smooth = tunnel.attribute(embeddings, nt_samples=2, nt_type="smoothgrad", stdevs=0.0, target=1)
    torch.testing.assert_close(smooth, DecompX(model).attribute(embeddings, 1))


def test_what_is_not_supported_is_refused() -> None:
    model, ids = classifier(), families.inputs("bert")
    with pytest.raises(InvalidInputError, match="got bias='none'; expected one of apart, absdot"):
        DecompX(model, "none")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="got layer=0; a layer's parts do not add up"):
        DecompX(model).attribute(ids, 1, layer=0)
    with pytest.raises(InvalidInputError, match="got 2 targets for 3 examples"):
        DecompX(model, propagate=True).attribute(ids, [0, 1])
    with pytest.raises(InvalidInputError, match="got the target 3; expected 0 to 2"):
        DecompX(model).attribute(ids, 3)
    with pytest.raises(InvalidInputError, match="no maps of single heads"):
        DecompX(model).maps(ids, per_head=True)


LLAMA_WITH_BIASES = families.GROUPED | {"attention_bias": True, "mlp_bias": True}
# The norms of llama's like work in float32, and the softmax of these files' eager attention.
MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor, str], Tensor], float]] = {
    "fused projection": (lambda: families.build("gpt2"), decompx_by_hand.gpt2_by_hand, 1e-10),
    "fused by head, parallel": (lambda: families.build("gpt-neox"), decompx_by_hand.gpt_neox_by_hand, 1e-6),
    "grouped": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA_WITH_BIASES)), decompx_by_hand.llama_by_hand, 1e-6),
    "grouped, no output bias": (lambda: families.build("qwen2"), decompx_by_hand.llama_by_hand, 1e-6),
}


@pytest.mark.few
@pytest.mark.parametrize("name", MODELS)
def test_biases_of_attention_are_shared_as_one(name: str) -> None:
    build, by_hand, tolerance = MODELS[name]
    for seed, bias in enumerate(SHARINGS):
        torch.manual_seed(seed)
        model, ids = randomized(build(), seed), families.inputs("llama", seed, 1, 7)
        with torch.no_grad():
            logits = by_hand(model, ids, bias)
        found = DecompX(model, bias).decompose(ids, 5)
        near(found.scores[0], logits[:-1, 5], tolerance)
        assert found.bias.abs().max() == 0


@torch.no_grad()
def test_all_that_is_added_from_the_value_projection_on_is_one_bias() -> None:
    config, ids = hf.LlamaConfig(**LLAMA_WITH_BIASES | {"num_hidden_layers": 1}), families.inputs("llama", 0, 1, 7)
    model = hf.LlamaForCausalLM(config)
    attention = model.model.layers[0].self_attn
    width, head_width = attention.v_proj.out_features, attention.head_dim
    attention.v_proj = nn.Sequential(nn.Linear(WIDTH, width), nn.LayerNorm(width), nn.Linear(width, width))
    model = randomized(model, 0)
    layer, value, output = model.model.layers[0], attention.v_proj, decompx_by_hand.eager(model, ids)
    parts = decompx_by_hand.start(output.hidden_states[0][0])
    for bias in SHARINGS:
        step, apart = decompx_by_hand.ByHand(bias), decompx_by_hand.ByHand()
        read = step.norm(parts, layer.input_layernorm)
        values = apart.affine(apart.norm(apart.affine(read, value[0]), value[1]), value[2])
        heads = values.unflatten(-1, (-1, head_width)).repeat_interleave(attention.num_key_value_groups, dim=2)
        mixed = torch.einsum("hqs,skhd->qkhd", output.attentions[0][0], heads).flatten(2)
        written = apart.affine(mixed, attention.o_proj)
        together = written[:, -1].clone()
        written[:, -1] = 0
        expected = decompx_by_hand.behind_attention(step, layer, parts + decompx_by_hand.share(written, together, bias))
        near(DecompX(model, bias).maps(ids).self_attention[0, 0], expected[:, :-1].norm(dim=-1), 1e-6)


class NormedInside(LlamaAttention):
    """Attention that begins with the norm of what it reads."""

    norm: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        return super().forward(self.norm(hidden_states), *args, **options)


def test_the_shift_of_a_norm_in_front_of_attention_is_shared_where_it_is_added() -> None:
    model, ids = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA_WITH_BIASES)), families.inputs("llama", 0, 1, 7)
    for layer in model.model.layers:
        layer.input_layernorm = nn.LayerNorm(WIDTH)
    model = randomized(model, 0)
    expected = DecompX(model, "absdot").maps(ids).self_attention
    for layer in model.model.layers:
        layer.self_attn.__class__, layer.self_attn.norm = NormedInside, layer.input_layernorm
        layer.input_layernorm = nn.Identity()
        # Linear maps that are called when attention is over are none of its own.
        layer.self_attn.others = layer.mlp
    near(DecompX(model, "absdot").maps(ids).self_attention, expected)


def test_values_projected_outside_of_attention_are_refused_where_biases_are_shared() -> None:
    model, ids = classifier(), families.inputs("bert", 0, 1, 7)
    expected = DecompX(model).attribute(ids, 1)
    model.projections = nn.ModuleList()
    for layer in model.bert.encoder.layer:
        for name in ("query", "key", "value"):
            projection = getattr(layer.attention.self, name)
            model.projections.append(projection)
            # No child of attention any more.
            delattr(layer.attention.self, name)
            object.__setattr__(layer.attention.self, name, projection)
    near(DecompX(model, propagate=True).attribute(ids, 1), expected)
    with pytest.raises(UnsupportedModelError, match=r'projected outside of it.*bias="apart"'):
        DecompX(model, "absdot").attribute(ids, 1)

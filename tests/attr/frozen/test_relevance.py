"""AttnLRP, GIM and CP-LRP against relevance propagated by hand, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm
from torch.utils.hooks import RemovableHandle
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.modernbert import modeling_modernbert

from captum_norm import CPLRP, GIM, AttnLRP, DecompX, Difference, InvalidInputError, RelP
from captum_norm.attr.frozen import network, rules
from captum_norm.errors import IncompleteDecompositionError
from captum_norm.forward import record
from tests import encoder_decoders, families
from tests.attr.frozen import relevance_by_hand as by_hand
from tests.attr.frozen.relevance_rules import Rules, soft_cap
from tests.attr.frozen.test_decompx import REFUSED, first_output
from tests.attr.frozen.test_decompx_encoder_decoders import WHOLE
from tests.classifiers import classifier, randomized

METHODS: dict[str, Any] = {method.name: method for method in (CPLRP, AttnLRP, RelP, GIM)}
every_method = pytest.mark.parametrize("name", METHODS)


def near(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def expect(method: Any, ids: Tensor, target: int, scores: Tensor, number: Tensor, *mask: Tensor) -> None:
    found = method.decompose(ids, target, *mask)
    near(found.scores, scores)
    near(found.number, number)
    # Which is that all the rest is in the biases' part.
    near(found.bias, number - scores.sum(1))
    assert found.convergence_delta.max() < 1e-9


@every_method
@pytest.mark.parametrize("seed", range(2))
def test_gpt2_equals_rules_by_hand(name: str, seed: int) -> None:
    model, ids = randomized(families.build("gpt2", seed), seed), families.inputs("gpt2", seed, 2, 7)
    expect(METHODS[name](model), ids, 5, *by_hand.gpt2(model, Rules(name), ids, 5))


@every_method
@pytest.mark.parametrize("seed", range(2))
def test_bert_equals_rules_by_hand(name: str, seed: int) -> None:
    model, ids = classifier(seed), families.inputs("bert", seed, 2, 7)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    scores, number = by_hand.bert(model, Rules(name), ids, 2, mask.bool())
    expect(METHODS[name](model), ids, 2, scores, number, mask)


@every_method
@pytest.mark.parametrize(("seed", "product"), [(0, "flash"), (1, "flash"), (0, "softmax"), (1, "capped")])
def test_grouped_queries_and_gates_equal_rules_by_hand(name: str, seed: int, product: str) -> None:
    model, ids = randomized(by_hand.Llama(product), seed), torch.randint(0, 40, (2, 6))
    expect(METHODS[name](model), ids, 5, *by_hand.llama(model, Rules(name), ids, 5))


@every_method
def test_mixtures_of_experts_equal_rules_by_hand(name: str) -> None:
    model, ids = randomized(families.build("mixtral", 1), 1), families.inputs("mixtral", 1, 2, 7)
    scores, number = by_hand.mixtral(model, Rules(name), ids, 5)
    found = METHODS[name](model).decompose(ids, 5)
    near(found.scores, scores, 1e-6)  # its file computes softmax and norms in float32
    near(found.scores.sum(1) + found.bias, number, 1e-6)


def test_cp_lrp_is_decompx_with_biases_apart_where_activations_are_zero_at_zero() -> None:
    ids = families.inputs("bert", 0, 2, 7)
    for activation in ("gelu", "relu", "silu", "gelu_new", "sigmoid"):
        model = classifier(hidden_act=activation)
        found, expected = (method(model).decompose(ids, 1) for method in (CPLRP, DecompX))
        if activation != "sigmoid":
            near(found.scores, expected.scores, 1e-13)
            near(found.bias, expected.bias, 1e-13)
        else:
            assert (found.scores - expected.scores).abs().max() > 0.1 * expected.scores.abs().max()
            assert found.convergence_delta.max() < 1e-12
    model, ids = randomized(by_hand.Llama(), 0), torch.randint(0, 40, (2, 6))
    found, expected = (method(model).decompose(ids, 1) for method in (CPLRP, DecompX))
    assert (found.scores - expected.scores).abs().max() > 0.01 * expected.scores.abs().max()


@every_method
def test_several_values_come_from_one_forward_pass(name: str) -> None:
    model, ids = randomized(families.build("gpt2"), 0), families.inputs("gpt2", 0, 2, 7)
    method, runs = METHODS[name](model), list[int]()
    method.attribute(ids)  # what is learnt of the model takes runs of its own
    model.transformer.wte.register_forward_hook(lambda *_: runs.append(1))

    where, answer = [[3, 4, 5]] * 2, ids[:, 4:]
    found = method.decompose(ids, answer, position=where)
    assert len(runs) == 1
    assert found.scores.shape == (2, 3, 7)
    for place in range(3):
        alone = method.decompose(ids, answer[:, place], position=3 + place)
        for value, expected in zip(found[:4], alone[:4], strict=True):
            torch.testing.assert_close(value[:, place], expected, rtol=1e-10, atol=1e-13)
        assert not found.scores[:, place, 4 + place :].any()
    whole = method.decompose(ids, answer, position=where, together=True)
    near(whole.scores, found.scores.sum(1), 1e-12)
    near(whole.bias, found.bias.sum(1), 1e-12)
    near(whole.number, found.number.sum(1), 1e-12)
    rivals = method.decompose(ids, Difference(answer, 4), position=where)
    near(rivals.scores, found.scores - method.decompose(ids, 4, position=where).scores, 1e-12)


@every_method
def test_several_values_of_one_position_have_a_target_each(name: str) -> None:
    method, ids = METHODS[name](classifier()), families.inputs("bert")
    every = [[0, 1, 2]] * len(ids)
    found = method.decompose(ids, every)
    for place in range(3):
        for value, expected in zip(found[:4], method.decompose(ids, place)[:4], strict=True):
            torch.testing.assert_close(value[:, place], expected, rtol=1e-5, atol=1e-6)
    near(method.decompose(ids, every, together=True).scores, found.scores.sum(1), 1e-5)


@pytest.mark.parametrize("bias", ["apart", "absdot"])
def test_several_values_come_from_one_propagation(bias: Any) -> None:
    model, ids = randomized(families.build("gpt2"), 0), families.inputs("gpt2", 0, 2, 7)
    method = DecompX(model, bias, propagate=True)
    tokens, where = [[9, 3], [4, 11]], [[2, 6], [6, 1]]
    found = method.decompose(ids, tokens, position=where)
    for place in range(2):
        column, row = ([one[place] for one in rows] for rows in (tokens, where))
        for value, expected in zip(found[:4], method.decompose(ids, column, position=row)[:4], strict=True):
            torch.testing.assert_close(value[:, place], expected, rtol=1e-10, atol=1e-13)
    best = method.decompose(ids, position=where).number
    near(best, model(ids).logits.amax(2)[[[0], [1]], where], 1e-10)
    near(method.decompose(ids, tokens, position=where, together=True).scores, found.scores.sum(1), 1e-12)


@pytest.mark.few(cases=8)
@pytest.mark.parametrize("name", families.tiers(name for name in families.FAMILIES if name not in REFUSED))
def test_every_family_is_complete_and_all_products_are_halved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = families.build(name), families.inputs(name, 0, 2, 7)
    layers, products, softer = model.config.num_hidden_layers, list[Tensor](), list[Tensor]()
    plain = first_output(model(ids), ids).detach()
    halve, tempered = rules.halve, rules.tempered

    def halve_and_count(product: Tensor, times: int = 1) -> None:
        products.append(product)
        halve(product, times)

    def temper_and_count(weights: Tensor, *given: Any) -> Tensor:
        softer.append(weights)
        return tempered(weights, *given)

    monkeypatch.setattr(rules, "halve", halve_and_count)
    monkeypatch.setattr(rules, "tempered", temper_and_count)
    for kind in METHODS.values():
        method = kind(model, readout=first_output)
        method.attribute(ids, 1)  # the first call looks at the model
        fused = method.decompose(ids, 1)
        products.clear()
        softer.clear()
        with monkeypatch.context() as apart:  # by the products and softmaxes of all attention functions
            apart.setattr(network, "scaled_dot_product", None)
            found = method.decompose(ids, 1)
        torch.testing.assert_close(fused[:3], found[:3], rtol=1e-5, atol=1e-5)
        # What is explained is the number of the plain call; torch folds some products only without gradients.
        torch.testing.assert_close(found.number, plain[:, 1], rtol=1e-6, atol=1e-7)
        assert found.convergence_delta.max() < 1e-5
        assert found.scores.abs().amax(1).min() > 1e-4
        # Products with positions alone are linear, and a pooling head's with its queries.
        pooling = sum(isinstance(module, nn.MultiheadAttention) for module in model.modules())
        assert len(products) == (2 * layers + pooling if kind.rules.halved and kind is not CPLRP else 0)
        assert len(softer) == (layers + pooling if kind is GIM else 0)


@pytest.mark.parametrize("name", ["attnlrp", "gim"])
def test_attention_functions_with_soft_caps_equal_rules_by_hand(name: str) -> None:
    """As Gemma 2's, which runs whole."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    seed, allowed = torch.randn(2, 3, 5, 4).double(), by_hand.causal(5)

    with rules.AttentionRules(METHODS[name].rules):
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.7
        weights = soft_cap(scores).masked_fill(~allowed, torch.finfo(scores.dtype).min)
        output = torch.matmul(torch.nn.functional.softmax(weights, dim=-1), v)
    gradients = torch.autograd.grad((output * seed).sum(), (q, k, v))
    expected = Rules(name).attention(q, k, v, allowed, 0.7, capped=True)
    near(output, expected)
    relevances = torch.autograd.grad(expected, (q, k, v), expected.detach() * seed)
    for tensor, gradient, relevance in zip((q, k, v), gradients, relevances, strict=True):
        near(tensor * gradient, relevance)


@pytest.mark.few
@pytest.mark.parametrize("family", WHOLE)
def test_encoder_decoders_are_complete(family: str) -> None:
    model, inputs = encoder_decoders.build(family), encoder_decoders.inputs(family, 0, 2, 5, 4)
    for kind in METHODS.values():
        method = kind(model)
        found = method.decompose(inputs, 7)
        assert found.convergence_delta.max() < 1e-5
        scores = method.attribute(inputs, 7)
        assert torch.equal(scores.source, found.scores.source)
        assert scores.source.abs().max() > 1e-3
        assert scores.prefix.abs().max() > 1e-3


class Squashed(nn.Module):
    """A parametrisation with an activation, whose value at 0 is not 0, and a product."""

    def forward(self, made: Tensor) -> Tensor:
        return torch.sigmoid(2 * made) * torch.tanh(made @ made.T if made.dim() > 1 else made)[..., :1]


def squashed(module: nn.Module) -> None:
    for name, _ in list(module.named_parameters(recurse=False)):
        parametrize.register_parametrization(module, name, Squashed())


PARAMETRIZED: dict[str, Any] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "activation": squashed,
    "older weight norm": weight_norm,
    "older spectral norm": spectral_norm,
}


@pytest.mark.few
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("parametrization", PARAMETRIZED.values(), ids=PARAMETRIZED)
@pytest.mark.parametrize("build", [classifier, lambda seed: randomized(families.build("llama", seed), seed)])
def test_a_parametrized_weight_is_a_constant(build: Any, parametrization: Any) -> None:
    model, plain = build(1), build(1)
    pairs = [
        (made, given) for made, given in zip(model.modules(), plain.modules(), strict=True) if type(made) is nn.Linear
    ]
    for made, given in pairs:
        parametrization(made)
        with torch.no_grad():
            made(torch.ones(1, made.in_features, dtype=torch.float64))
            given.weight.copy_(made.weight)
            if given.bias is not None:
                given.bias.copy_(made.bias)
    ids = families.inputs("bert", 1, 2, 6)
    kinds = [
        *METHODS.values(),
        DecompX,
        lambda model: DecompX(model, propagate=True),
        lambda model: DecompX(model, "absdot"),
    ]
    for kind in kinds:
        found, expected = kind(model).decompose(ids, 2), kind(plain).decompose(ids, 2)
        for part in ("scores", "bias", "number"):
            near(getattr(found, part), getattr(expected, part), 1e-10)


def test_steps_of_a_wide_model_in_float32_are_allowed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = families.build("modernbert", 0, torch.float64), families.inputs("modernbert", 0, 2, 7)

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        cos, sin, half = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), modeling_modernbert.rotate_half
        return q * cos + half(q) * sin, k * cos + half(k) * sin  # type: ignore[no-untyped-call]

    for kind in (AttnLRP, GIM):
        found = kind(model, readout=first_output).decompose(ids, 1)  # queries are rotated in float32
        assert found.convergence_delta.max() < 1e-6
        with monkeypatch.context() as widened:
            widened.setattr(modeling_modernbert, "apply_rotary_pos_emb", rotated)
            exact = kind(model, readout=first_output).decompose(ids, 1)
        assert exact.convergence_delta.max() < 1e-11
        near(found.scores, exact.scores, 1e-6)


@every_method
@pytest.mark.parametrize("product", ["flash", "softmax"])
def test_the_model_is_left_as_it_was(name: str, product: str) -> None:
    model, ids = randomized(by_hand.Llama(product), 0).train(), torch.randint(0, 40, (2, 6))
    attributes = {module: set(vars(module)) for module in model.modules()}
    method = METHODS[name](model)
    expected = method.attribute(ids, 1)
    with torch.inference_mode():
        torch.testing.assert_close(method.attribute(ids.clone(), 1), expected)
    model.requires_grad_(requires_grad=False)
    torch.testing.assert_close(method.attribute(ids, 1), expected)
    model.head.register_forward_pre_hook(lambda *_: 1 / 0)
    model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        METHODS[name](model).attribute(ids, 1)
    for module in model.modules():
        assert module.training
        assert not module._forward_hooks
        assert set(vars(module)) == attributes[module]
        assert all(parameter.grad is None for parameter in module.parameters())


def test_hooks_that_an_interrupt_leaves_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = classifier(), families.inputs("bert")

    def interrupt(_: RemovableHandle) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RemovableHandle, "remove", interrupt)
    with pytest.raises(KeyboardInterrupt):
        AttnLRP(model).attribute(ids, 1)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@every_method
@pytest.mark.parametrize("product", ["flash", "softmax"])
def test_steps_that_are_not_understood_are_refused(name: str, product: str) -> None:
    model, ids = randomized(by_hand.Llama(product), 0), torch.randint(0, 40, (2, 6))
    del model.layers[0].act
    model.layers[0].act = lambda z: z * z / 9
    with pytest.raises(IncompleteDecompositionError, match="do not add up to it"):
        METHODS[name](model).attribute(ids, 1)


@pytest.mark.parametrize("propagate", [False, True])
def test_attention_weights_that_are_not_the_models_are_refused(
    propagate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an attention function of its own does to long inputs alone."""

    def attend(module: Any, query: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
        output, _ = sdpa_attention_forward(module, query, *args, **options)
        return output * (1 if query.shape[2] < 30 or module is not last else 1.01), None

    model = classifier()
    last = model.bert.encoder.layer[1].attention.self
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "of its own", attend)
    model.config._attn_implementation = "of its own"
    method = DecompX(model, propagate=propagate)
    assert method.decompose(families.inputs("bert"), 1).convergence_delta.max() < 1e-5
    with pytest.raises(IncompleteDecompositionError, match=r'does not compute what Bert.* does in "layer 1"'):
        method.decompose(families.inputs("bert", 0, 1, 40), 1)


@every_method
def test_bad_requests_are_refused(name: str) -> None:
    method, ids = METHODS[name](classifier()), families.inputs("bert")
    with pytest.raises(InvalidInputError, match="has no maps of layers"):
        method.maps(ids)
    with pytest.raises(InvalidInputError, match="got layer=1; a layer's parts do not add up"):
        method.attribute(ids, 1, layer=1)
    with pytest.raises(InvalidInputError, match="got the target 3; expected 0 to 2"):
        method.attribute(ids, 3)
    with pytest.raises(InvalidInputError, match=r"the readout returned \(3, 11, 3\) for 3 examples"):
        METHODS[name](method.model, readout=lambda output, _: output.logits[:, None].expand(-1, 11, -1)).decompose(ids)
    with pytest.raises(InvalidInputError, match="got 2 values of each example; attribute and maps explain one"):
        method.attribute(ids, [[0, 1]] * 3)
    with pytest.raises(InvalidInputError, match="got readout=True; expected a function"):
        METHODS[name](method.model, readout=True).attribute(ids)
    default = method.attribute(ids)
    predicted = method.model(ids).logits.argmax(1)
    assert torch.equal(method.attribute(ids, predicted), default)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("name", "family"), [("decompx", "gpt2"), ("attnlrp", "gpt2"), ("gim", "gpt2")])
def test_no_layers_weights_are_kept(
    name: str, family: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one part are made at a time, and again in the backward pass."""
    model = randomized(families.build(family, 1), 1)
    model.set_attn_implementation(implementation)
    heads, ids = model.config.num_attention_heads, families.inputs(family, 1, 2, 23)
    method, mask, sizes = (METHODS | {"decompx": DecompX})[name](model), torch.ones_like(ids), list[int]()
    mask[1, :7] = 0

    def saved(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() if tensor.shape[-1] <= 23 and tensor.shape[1:2] == (heads,) else 0)
        return tensor

    whole = method.decompose(ids, 5, mask)
    monkeypatch.setattr(record, "CHUNK_ROWS", 5)
    monkeypatch.setattr(record, "CHUNK_BYTES", 0)
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        found = method.decompose(ids, 5, mask)
    assert max(sizes) < 2 * heads * 23 * 23
    for part, expected in zip(found[:4], whole[:4], strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-10, atol=1e-12)


@every_method
@pytest.mark.parametrize("family", ["bert", "llama", "bloom"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 5e-2), (torch.float16, 1e-2)])
def test_half_precision_stays_near(name: str, family: str, dtype: torch.dtype, tolerance: float) -> None:
    """The model itself rounds each activation to 2⁻⁸ (2⁻¹¹)."""
    model, ids = families.build(family, 0, dtype), families.inputs(family, 0, 2, 7)
    found = METHODS[name](model, readout=first_output).decompose(ids, 1)
    assert found.scores.dtype == torch.float32
    exact = METHODS[name](model.double(), readout=first_output).decompose(ids, 1)
    assert (found.scores - exact.scores).norm() < tolerance * exact.scores.norm()


@every_method
def test_maps_to_a_vocabulary_are_differentiated_where_they_are_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = by_hand.Llama(), torch.randint(0, 40, (2, 6))
    model.head = torch.nn.Linear(24, 300)
    randomized(model, 0)
    linear, rows = network._linear, list[Tensor]()

    def look(inputs: Tensor, *parameters: Any) -> Tensor:
        inputs.register_hook(lambda gradient: rows.append(gradient.any(-1)))
        return linear(inputs, *parameters)

    monkeypatch.setattr(network, "_linear", look)
    found = METHODS[name](model).decompose(ids, 5, position=[[2, 3]] * 2)
    assert [row.nonzero().tolist() for row in rows] == [[[0, 2], [1, 2]], [[0, 3], [1, 3]]]
    monkeypatch.setattr(network, "VOCABULARY", 1e9)
    expected = METHODS[name](model).decompose(ids, 5, position=[[2, 3]] * 2)
    assert len(rows) == 2
    for actual, value in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-11, atol=1e-13)

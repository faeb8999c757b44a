"""Every method × every family × the properties that hold for all of them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from captum_norm import (
    ALTI,
    TOLERANCE,
    AttentionBlockAttribution,
    AttentionRollout,
    AttentionWeights,
    CaptumNormError,
    DecompX,
    GlobEnc,
    InformationFlow,
    NormAttribution,
    NormMeter,
    UnsupportedScopeError,
    ValueZeroing,
)
from captum_norm.forward.parts import WORKING_COPIES
from captum_norm.models import Scope
from tests import families, oracle
from tests.families import FAMILIES

SCOPES: dict[str, tuple[Scope, ...]] = {
    "post-norm": ("attn", "attn_res", "attn_res_ln", "atb"),
    "pre-norm": ("attn", "attn_res", "atb"),
    "parallel": ("attn", "attn_res", "atb"),
    "sandwich": ("attn", "atb"),
    "norm-on-output": ("attn", "atb"),
}
METHODS: dict[str, Callable[..., Any]] = {
    "norms": NormAttribution,
    "attention block": AttentionBlockAttribution,
    "weights": AttentionWeights,
    "weights with residual": lambda model, **options: AttentionWeights(model, "attn_res", **options),
    "rollout": AttentionRollout,
    "alti": ALTI,
    "information flow": InformationFlow,
    "value zeroing": ValueZeroing,
    "decompx": DecompX,
}
EXAMPLES = ("bert", "llama", "vit")
"""Families with which what does not depend on the family is tested for every method."""
TEXT_FAMILIES = [name for name, family in FAMILIES.items() if not family.image]

every_family = pytest.mark.parametrize("name", FAMILIES)
REFUSED: dict[str, set[str]] = {
    "value zeroing": {"xmod", "bloom", "falcon-rw"},
    "decompx": {"esm", "deberta"},
}


def pairs(names: Iterable[str], *, without: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Every method with every family that it does not refuse."""
    methods = [method for method in METHODS if method not in without]
    taken = [(name, method) for name in names for method in methods if name not in REFUSED.get(method, ())]
    return pytest.mark.parametrize(("name", "method"), taken)


@pytest.mark.parametrize(("name", "method"), [(name, method) for method in REFUSED for name in sorted(REFUSED[method])])
def test_what_a_method_cannot_explain_is_refused(name: str, method: str) -> None:
    with pytest.raises(CaptumNormError):
        METHODS[method](families.build(name)).maps(families.inputs(name))


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest deviation of an example's layer, relative to the largest entry there.

    Entries on the diagonal, which may hold the residual stream, and those off it are compared apart.
    """
    own = torch.eye(*expected.shape[-2:], dtype=torch.bool)
    deviations = []
    for chosen in (own, ~own):
        entries = expected[..., chosen].double().flatten(2)
        deviation = (actual[..., chosen].double().flatten(2) - entries).abs().amax(-1)
        deviations.append(deviation / entries.amax(-1).clamp(min=1e-300))
    return float(torch.stack(deviations).max())


@every_family
@pytest.mark.parametrize(("seed", "dtype"), [*((seed, torch.float64) for seed in range(3)), (0, torch.float32)])
def test_norms_equal_the_oracle(name: str, seed: int, dtype: torch.dtype) -> None:
    family = FAMILIES[name]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-6 if family.single else 1e-11
    model, inputs = families.build(name, seed, dtype), families.inputs(name, seed, dtype=dtype)
    # The oracle sees the same parameters in float64: what a float32 model rounds is part of the deviation.
    exact = oracle.layers(family, model.double(), inputs.double() if inputs.is_floating_point() else inputs)
    scopes = SCOPES[family.style]
    meter = NormMeter(model.to(dtype))
    stacks = meter.measure(inputs, scopes=scopes, weights=True, per_head=True, head_norms=True)
    assert list(stacks) == ["decoder" if family.causal else "encoder"]
    (measured,) = stacks.values()
    vectors = {scope: torch.stack([layer.vectors(scope)[0] for layer in exact], 1) for scope in scopes}
    for scope in scopes:
        assert relative(measured.norms[scope], vectors[scope].norm(dim=-1)) < tolerance
        ratios = torch.stack([oracle.mixing_ratio(v) for v in vectors[scope].unbind(1)], 1)
        assert (measured.mixing_ratio[scope] - ratios).abs().max() < tolerance
    heads = [oracle.vectors_per_head(layer.weights, layer.values, layer.projection).norm(dim=-1) for layer in exact]
    assert measured.head_norms is not None
    assert relative(measured.head_norms, torch.stack(heads, 1)) < tolerance
    transformed = [torch.einsum("bhkd,hde->bhke", layer.values, layer.projection).norm(dim=-1) for layer in exact]
    assert measured.transformed_norms is not None
    assert relative(measured.transformed_norms, torch.stack(transformed, 1)) < tolerance
    assert measured.weights is not None
    weights = torch.stack([layer.weights for layer in exact], 1)
    assert relative(measured.weights, weights) < tolerance
    mean, own = weights.mean(2), torch.eye(weights.shape[-1], dtype=torch.bool)
    # With attention sinks the weights of a row do not add up to 1.
    others, total = mean.masked_fill(own, 0).sum(-1), mean.sum(-1)
    assert (measured.mixing_ratio["weights"] - others / total).abs().max() < tolerance
    assert (measured.mixing_ratio["weights_res"] - others / (total + 1)).abs().max() < tolerance
    assert measured.convergence_delta is not None
    assert measured.convergence_delta.max() < tolerance


@every_family
def test_without_maps_the_other_numbers_are_the_same(name: str) -> None:
    family = FAMILIES[name]
    meter = NormMeter(families.build(name, dtype=torch.float64))
    inputs, scopes = families.inputs(name, dtype=torch.float64), SCOPES[family.style]
    (whole,) = meter.measure(inputs, scopes=scopes, head_norms=True).values()
    (lean,) = meter.measure(inputs, scopes=scopes, head_norms=True, maps=False).values()
    (alone,) = meter.measure(inputs, head_norms=True, maps=False).values()
    assert not lean.norms
    assert lean.head_norms is None
    for scope in scopes:
        torch.testing.assert_close(lean.mixing_ratio[scope], whole.mixing_ratio[scope], rtol=1e-9, atol=1e-11)
    for measured in (lean, alone):
        torch.testing.assert_close(measured.transformed_norms, whole.transformed_norms, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(measured.residual_norm, whole.residual_norm)
        assert measured.convergence_delta is not None
        assert measured.convergence_delta.max() < (1e-6 if family.single else 1e-11)


@every_family
def test_vectors_of_the_oracle_add_up_to_what_the_model_computed(name: str) -> None:
    """Guards the oracle itself: Σ_j v_ij + bias is the tensor that the named module returned."""
    family = FAMILIES[name]
    model, inputs = families.build(name, 0, torch.float64), families.inputs(name, 0, dtype=torch.float64)
    outputs: list[Tensor] = []
    place = family.final_norm or family.projection
    names = dict.fromkeys(family.layer.format(index) for index in range(model.config.num_hidden_layers))
    handles = [
        model.get_submodule(f"{layer}.{place}").register_forward_hook(lambda _, __, output: outputs.append(output))
        for layer in names
    ]
    layers = oracle.layers(family, model, inputs)
    for handle in handles:
        handle.remove()
    for layer, output in zip(layers, outputs, strict=True):
        vectors, constant = layer.vectors("atb" if family.final_norm else "attn")
        tolerance = 1e-6 if family.single else 1e-10
        torch.testing.assert_close(vectors.sum(2) + constant, output, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in FAMILIES if "mixture of experts" in FAMILIES[name].special])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
def test_half_precision_stays_near_the_same_weights_in_float64(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """The model itself rounds each activation to 2⁻⁸ (2⁻¹¹); two layers of that, and no more, may show.

    For all other families :mod:`tests.test_half_precision` compares the same.
    """
    family = FAMILIES[name]
    model, inputs = families.build(name, 0, dtype), families.inputs(name, 0, dtype=dtype)
    (measured,) = NormMeter(model).measure(inputs, scopes=SCOPES[family.style]).values()
    assert measured.convergence_delta is not None
    assert measured.convergence_delta.max() < TOLERANCE[dtype]
    assert measured.convergence_delta.dtype == torch.float32
    exact = oracle.layers(family, model.double(), inputs.double() if inputs.is_floating_point() else inputs)
    for scope, maps in measured.norms.items():
        expected = torch.stack([layer.vectors(scope)[0].norm(dim=-1) for layer in exact], 1)
        assert maps.dtype == torch.float32
        error = (maps.double() - expected).flatten(2).norm(dim=-1) / expected.flatten(2).norm(dim=-1)
        assert error[:, 0].max() < tolerance  # rounding may choose other experts, and behind them all is different


@pairs(FAMILIES)
def test_maps_and_attributions_agree(name: str, method: str) -> None:
    model, inputs = families.build(name), families.inputs(name)
    explain = METHODS[method](model)
    maps = explain.maps(inputs)
    stack = maps.self_attention
    assert (maps.decoder is not None) == FAMILIES[name].causal
    assert torch.isfinite(stack).all()
    assert (stack >= 0).all()
    assert not stack.requires_grad
    for layer in (0, -1) if name in EXAMPLES else (-1,):
        torch.testing.assert_close(explain.attribute(inputs, layer=layer, position=2), stack[:, layer, 2])
        torch.testing.assert_close(explain.maps(inputs, layers=[layer]).self_attention[:, 0], stack[:, layer])
    everything = explain.attribute(inputs, position=3)
    # A row of ALTI may have no vector that is near the sum.
    if explain.aggregation == "rollout" and not (method == "alti" and name in ("gemma2", "gemma3", "llama4")):
        torch.testing.assert_close(everything.sum(-1), torch.ones(len(everything)))
    if explain.has_convergence_delta():
        again, delta = explain.attribute(inputs, position=3, return_convergence_delta=True)
        assert torch.equal(again, everything)
        assert torch.equal(delta, explain.compute_convergence_delta(everything, inputs))
        assert delta.max() < 1e-5


@every_family
def test_the_model_is_left_as_it_was(name: str) -> None:
    model, inputs = families.build(name), families.inputs(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = {module: set(vars(module)) for module in model.modules()}
    configs = {id(m.config): (m.config, dict(vars(m.config))) for m in model.modules() if hasattr(m, "config")}
    with torch.no_grad():
        before = model(inputs)[0]
    methods = [make for method, make in METHODS.items() if name not in REFUSED.get(method, ())]

    def refuse(*_: Any) -> None:
        raise KeyboardInterrupt

    family = FAMILIES[name]
    last = model.get_submodule(f"{family.layer.format(1)}.{family.projection}")
    for make in methods:
        method = make(model)
        method.maps(inputs)
        handle = last.register_forward_pre_hook(refuse)
        with pytest.raises(KeyboardInterrupt):
            method.maps(inputs)
        handle.remove()
    with torch.no_grad():
        assert torch.equal(model(inputs)[0], before)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert set(vars(module)) == attributes[module]
        assert not module.training
    for config, kept in configs.values():
        assert vars(config) == kept


@pairs(TEXT_FAMILIES, without=["weights with residual"])
def test_padding_and_batching_change_nothing(name: str, method: str) -> None:
    explain = METHODS[method](families.build(name))
    lengths = [11, 7, 4]
    examples = [families.inputs(name, seed, batch=1, length=length) for seed, length in enumerate(lengths)]
    alone = [(explain.maps(example), explain.attribute(example)[0]) for example in examples]
    for side in ("left", "right"):
        batch, mask = torch.zeros(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.long)
        for row, example in enumerate(examples):
            filled = slice(0, lengths[row]) if side == "right" else slice(11 - lengths[row], 11)
            batch[row, filled], mask[row, filled] = example[0], 1
        maps = explain.maps({"input_ids": batch, "attention_mask": mask})
        scores = explain.attribute(batch, additional_forward_args=mask)
        assert torch.equal(maps.real, mask.bool())
        for row, (own, own_scores) in enumerate(alone):
            places = mask[row].bool()
            inside = maps.self_attention[row, :, places][..., places]
            torch.testing.assert_close(inside, own.self_attention[0], rtol=1e-4, atol=1e-5)
            assert not maps.self_attention[row][:, ~places].any()
            assert not maps.self_attention[row][..., ~places].any()
            torch.testing.assert_close(scores[row, places], own_scores, rtol=1e-4, atol=1e-5)
            assert (scores[row, ~places] == 0).all()
            if maps.mixing_ratio is not None and own.mixing_ratio is not None:
                ratios = maps.mixing_ratio[row]
                torch.testing.assert_close(ratios[:, places], own.mixing_ratio[0], rtol=1e-4, atol=1e-5)
                assert (ratios[:, ~places] == 0).all()


# The first two take what "weights" does, the third has no chunks.
@pairs(FAMILIES, without=["weights with residual", "rollout", "decompx"])
def test_chunks_of_queries_change_nothing(name: str, method: str) -> None:
    model, inputs = families.build(name, dtype=torch.float64), families.inputs(name, dtype=torch.float64)
    whole = METHODS[method](model).maps(inputs).self_attention
    # Value zeroing runs the layer's own code on more or fewer copies; some of it computes in single precision.
    again = method == "value zeroing" and FAMILIES[name].single
    rtol, atol = (1e-6, 1e-8) if again else (1e-11, 1e-13)
    # Row by row everywhere; several rows at a time, whose cut is the library's, for every family or every method.
    several = [3 * 4 * 11 * 5 * 4 * WORKING_COPIES] if method == "norms" or name in EXAMPLES else []
    for memory_budget in (1, *several):
        chunked = METHODS[method](model, memory_budget=memory_budget).maps(inputs).self_attention
        torch.testing.assert_close(chunked, whole, rtol=rtol, atol=atol)


@every_family
def test_gradients_flow_when_asked_for(name: str) -> None:
    model, inputs = families.build(name, dtype=torch.float64), families.inputs(name, dtype=torch.float64)
    scope = SCOPES[FAMILIES[name].style][-1]
    parameter = next(p for n, p in model.named_parameters() if FAMILIES[name].value.rpartition(".")[2] in n)
    (measured,) = NormMeter(model, differentiable=True).measure(inputs, scopes=[scope]).values()
    loss = (measured.norms[scope] * torch.rand_like(measured.norms[scope])).sum()
    (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("method", [ALTI, GlobEnc, ValueZeroing])
def test_gradients_flow_through_the_other_methods_maps(method: Callable[..., Any]) -> None:
    model, ids = families.build("bert", dtype=torch.float64), families.inputs("bert")
    maps = method(model, differentiable=True).maps(ids).self_attention
    weight = model.get_submodule("encoder.layer.0.attention.self.value").weight
    (gradient,) = torch.autograd.grad((maps * torch.rand_like(maps)).sum(), weight)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


@every_family
def test_scopes_that_the_layers_lack_are_refused(name: str) -> None:
    model, inputs = families.build(name), families.inputs(name)
    available = SCOPES[FAMILIES[name].style]
    scopes: tuple[Literal["attn", "attn_res", "attn_res_ln"], ...] = ("attn", "attn_res", "attn_res_ln")
    for scope in scopes:
        if scope not in available:
            with pytest.raises(UnsupportedScopeError, match=f"are {FAMILIES[name].style}, .* {', '.join(available)}"):
                NormAttribution(model, scope).maps(inputs)

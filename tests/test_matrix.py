"""Every method × every arrangement of layers × the properties that hold for all of them.

The long tier compares maps with the other families, too; :mod:`tests.test_families` has all that depends on the family
alone.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import captum_norm as cn
from captum_norm.models import Scope
from tests import families
from tests.families import FAMILIES, REPRESENTATIVES, TEXTS, Family, arrangement_of, state_of, tiers
from tests.padding import expect_alone, padded

SCOPES: dict[str, tuple[Scope, ...]] = {
    "post-norm": ("attn", "attn_res", "attn_res_ln", "atb"),
    "pre-norm": ("attn", "attn_res", "atb"),
    "parallel": ("attn", "attn_res", "atb"),
    "sandwich": ("attn", "atb"),
    "norm-on-output": ("attn", "atb"),
}
METHODS: dict[str, Callable[..., Any]] = {
    "norms": cn.NormAttribution,
    "attention block": cn.AttentionBlockAttribution,
    "weights": cn.AttentionWeights,
    "weights with residual": lambda model, **options: cn.AttentionWeights(model, "attn_res", **options),
    "rollout": cn.AttentionRollout,
    "alti": cn.ALTI,
    "information flow": cn.InformationFlow,
    "value zeroing": cn.ValueZeroing,
    "decompx": cn.DecompX,
}
EXAMPLES = ("bert", "llama", "vit")
"""Families with which what does not depend on the family is tested for every method."""
REFUSED: dict[str, set[str]] = {"value zeroing": {"xmod", "bloom", "falcon-rw"}, "decompx": {"esm", "deberta"}}


def pairs(names: Iterable[str], *, without: Sequence[str] = (), every_kind: bool = False) -> pytest.MarkDecorator:
    """Every method with a family of each arrangement, or of each kind, unless it refuses it."""
    cases = [
        pytest.param(*case.values, method, marks=case.marks)
        for method in METHODS
        if method not in without
        for case in tiers((name for name in names if name not in REFUSED.get(method, ())), arrangement_of)
        if case.values[0] in REPRESENTATIVES and (every_kind or not case.marks)
    ]
    return pytest.mark.parametrize(("name", "method"), cases)


@pytest.mark.parametrize(("name", "method"), [(name, method) for method in REFUSED for name in sorted(REFUSED[method])])
def test_what_a_method_cannot_explain_is_refused(name: str, method: str) -> None:
    with pytest.raises(cn.CaptumNormError):
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


@pytest.mark.parametrize("name", tiers(kind=arrangement_of))
def test_without_maps_the_other_numbers_are_the_same(name: str) -> None:
    family, model = FAMILIES[name], families.build(name, dtype=torch.float64)
    inputs, scopes = families.inputs(name, dtype=torch.float64), SCOPES[family.style]
    whole = families.measured(model, inputs, scopes=scopes, head_norms=True)
    lean = families.measured(model, inputs, scopes=scopes, head_norms=True, maps=False)
    alone = families.measured(model, inputs, head_norms=True, maps=False)
    assert not lean.norms
    assert lean.head_norms is None
    for scope in scopes:
        torch.testing.assert_close(lean.mixing_ratio[scope], whole.mixing_ratio[scope], rtol=1e-9, atol=1e-11)
    for measured in (lean, alone):
        torch.testing.assert_close(measured.transformed_norms, whole.transformed_norms, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(measured.residual_norm, whole.residual_norm)
        assert measured.convergence_delta.max() < (1e-6 if family.single else 1e-11)


@pytest.mark.few
@pairs(FAMILIES, every_kind=True)
def test_maps_and_attributions_agree(name: str, method: str) -> None:
    model, inputs = families.build(name), families.inputs(name)
    with torch.no_grad():
        output, state = model(inputs)[0], state_of(model)
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
        # DecompX explains the prediction, whose error is not that of its maps.
        assert method == "decompx" or torch.equal(delta, explain.compute_convergence_delta(everything, inputs))
        assert delta.max() < 1e-5
    expect_an_interrupt(FAMILIES[name], model, lambda: explain.maps(inputs))
    with torch.no_grad():
        assert torch.equal(model(inputs)[0], output)
    assert state_of(model) == state


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def expect_an_interrupt(family: Family, model: Any, work: Callable[[], Any]) -> None:
    """An interrupt in the last layer comes through."""
    handle = model.get_submodule(f"{family.layer.format(1)}.{family.projection}").register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        work()
    handle.remove()


@pytest.mark.few
@pairs(TEXTS, without=["weights with residual"])
def test_padding_and_batching_change_nothing(name: str, method: str) -> None:
    explain = METHODS[method](families.build(name))
    examples = [families.inputs(name, seed, batch=1, length=length) for seed, length in enumerate((11, 7, 4))]
    alone = [(explain.maps(example), explain.attribute(example)[0]) for example in examples]
    for side in ("left", "right"):
        batch, mask = padded(examples, side)
        maps = explain.maps({"input_ids": batch, "attention_mask": mask})
        scores = explain.attribute(batch, additional_forward_args=mask)
        assert torch.equal(maps.real, mask.bool())
        for row, (own, own_scores) in enumerate(alone):
            places = mask[row].bool()
            expect_alone(maps, row, own, {"self_attention": (places, places)})
            torch.testing.assert_close(scores[row, places], own_scores, rtol=1e-4, atol=1e-5)
            assert (scores[row, ~places] == 0).all()
            if maps.mixing_ratio is not None and own.mixing_ratio is not None:
                ratios = maps.mixing_ratio[row]
                torch.testing.assert_close(ratios[:, places], own.mixing_ratio[0], rtol=1e-4, atol=1e-5)
                assert (ratios[:, ~places] == 0).all()


# The first two take what "weights" does, the third has no chunks.
@pytest.mark.few(cases=8)
@pairs(FAMILIES, without=["weights with residual", "rollout", "decompx"])
def test_chunks_of_queries_change_nothing(name: str, method: str) -> None:
    model, inputs = families.build(name, dtype=torch.float64), families.inputs(name, dtype=torch.float64)
    whole = METHODS[method](model).maps(inputs).self_attention
    # Value zeroing runs the layer's own code on more or fewer copies; some of it computes in single precision.
    again = method == "value zeroing" and FAMILIES[name].single
    rtol, atol = (1e-6, 1e-8) if again else (1e-11, 1e-13)
    for memory_budget in (1, 20_000):  # row by row, and several rows at a time
        chunked = METHODS[method](model, memory_budget=memory_budget).maps(inputs).self_attention
        torch.testing.assert_close(chunked, whole, rtol=rtol, atol=atol)


@pytest.mark.parametrize("method", [cn.ALTI, cn.GlobEnc, cn.ValueZeroing])
def test_gradients_flow_through_the_other_methods_maps(method: Callable[..., Any]) -> None:
    model, ids = families.build("bert", dtype=torch.float64), families.inputs("bert")
    maps = method(model, differentiable=True).maps(ids).self_attention
    weight = model.get_submodule("encoder.layer.0.attention.self.value").weight
    (gradient,) = torch.autograd.grad((maps * torch.rand_like(maps)).sum(), weight)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0

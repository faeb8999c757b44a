"""Every family: one test, which builds its model once and checks what holds for all of them."""

import inspect
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import AttentionBlockAttribution, AttentionWeights, NormAttribution, NormMeter
from captum_norm.errors import UnsupportedScopeError
from tests import families, feed_forwards, oracle
from tests.families import EVERY, FAMILIES, OWN_CODE, REPRESENTATIVES, kind_of, state_of
from tests.padding import expect_alone, padded
from tests.test_matrix import SCOPES, expect_an_interrupt, relative

BEHIND: tuple[Any, ...] = AttentionBlockAttribution.scopes[1:]
SMOOTH = {
    name
    for name, parts in feed_forwards.PARTS.items()
    if not parts.experts and parts.activation is not torch.nn.functional.relu
}
"""Families whose networks have slopes without jumps, which a difference quotient can follow."""


def test_each_kind_has_a_representative() -> None:
    assert {kind_of(name) for name in REPRESENTATIVES} == {kind_of(name) for name in FAMILIES}
    assert len(REPRESENTATIVES) == len({kind_of(name) for name in REPRESENTATIVES}) < 40
    for feature in ("style", "causal", "image"):
        represented = {getattr(FAMILIES[name], feature) for name in REPRESENTATIVES}
        assert represented == {getattr(family, feature) for family in FAMILIES.values()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in REPRESENTATIVES else pytest.mark.long) for name in EVERY]
)
def test_a_family(name: str) -> None:
    family = EVERY[name]
    model, inputs = families.build(name), families.inputs(name, batch=2, length=9)
    assert (name in OWN_CODE) == (
        "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(sys.modules[type(model).__module__])
    )
    scopes = SCOPES[family.style]
    behind = () if name in feed_forwards.NOT_UNDERSTOOD else feed_forwards.SCOPES[family.style]
    # Norms of single heads are refused where a gate multiplies channels.
    heads = family.gate is None
    asked: Any = {"scopes": (*scopes, *behind), "weights": True, "per_head": True, "head_norms": heads}

    if family.narrow:
        tolerance = 1e-5
        exact = exact_layers(name, model, inputs)
    else:
        # The oracle's eager softmax is in float32, that of scaled dot-product attention is not.
        tolerance = 4e-6 if family.single else 1e-11
        single = NormMeter(model).measure(inputs, **asked)
        # The oracle sees the same parameters in float64: what a float32 model rounds is part of the deviation.
        model, inputs = model.double(), inputs.double() if inputs.is_floating_point() else inputs
        exact = exact_layers(name, model, inputs)
        expect_norms(name, exact, single, 1e-5)

    state = state_of(model)
    with torch.no_grad():
        output = model(inputs)[0]
    meter = NormMeter(model)
    stacks = meter.measure(inputs, **asked)
    assert list(stacks) == ["decoder" if family.causal else "encoder"]
    expect_norms(name, exact, stacks, tolerance)
    expect_other_scopes_refused(name, meter, inputs)
    if name in REPRESENTATIVES:
        expect_the_same_in_pieces(model, inputs, asked, stacks, 1e-5 if family.narrow else 1e-11)
    last = (*scopes, *behind)[-1]
    methods = (AttentionBlockAttribution(model, last), NormAttribution(model), AttentionWeights(model))
    if not family.signal:
        lean = AttentionBlockAttribution(model, last, memory_budget=1) if name in REPRESENTATIVES else None
        expect_the_same_if_padded(methods[0], lean, inputs)
        expect_the_last_rows(methods, inputs, tolerance)
    expect_gradients(name, model, inputs, last)
    for method in methods[:2]:
        expect_an_interrupt(family, model, partial(method.maps, inputs))
    with torch.no_grad():
        assert torch.equal(model(inputs)[0], output)
    assert state_of(model) == state


def exact_layers(name: str, model: Any, inputs: Tensor) -> list[oracle.Layer]:
    """The oracle's layers, whose vectors add up to what the named modules returned."""
    family = EVERY[name]
    names = dict.fromkeys(family.layer.format(index) for index in range(model.config.num_hidden_layers))
    places = {name: (f"{name}.{family.final_norm or family.projection}", "output") for name in names}
    with oracle.watched(model, places) as seen:
        layers = oracle.layers(family, model, inputs)
    # A layer that is run twice gives both outputs at its place.
    outputs = [output for notes in seen.values() for output in notes]
    tolerance = 1e-4 if family.narrow else 1e-6 if family.single else 1e-10
    for layer, output in zip(layers, outputs, strict=True):
        vectors, constant = layer.vectors("atb" if family.final_norm else "attn")
        torch.testing.assert_close((vectors.sum(2) + constant).to(output), output, rtol=tolerance, atol=tolerance)
    return layers


def expect_norms(name: str, exact: list[oracle.Layer], stacks: Any, tolerance: float) -> None:
    """Norms, mixing ratios and weights are those of the direct way."""
    (measured,) = stacks.values()
    vectors = {scope: [layer.vectors(scope)[0] for layer in exact] for scope in SCOPES[EVERY[name].style]}
    for scope, layers in vectors.items():
        assert relative(measured.norms[scope], torch.stack(layers, 1).norm(dim=-1)) < tolerance, scope
        ratios = torch.stack([oracle.mixing_ratio(layer) for layer in layers], 1)
        assert (measured.mixing_ratio[scope] - ratios).abs().max() < tolerance, scope
    for scope in measured.norms.keys() - vectors.keys():
        assert measured.norms[scope].isfinite().all()
        assert measured.norms[scope].any()
    if EVERY[name].gate is None:
        heads = [oracle.vectors_per_head(layer.weights, layer.values, layer.projection).norm(dim=-1) for layer in exact]
        assert relative(measured.head_norms, torch.stack(heads, 1)) < tolerance
        transformed = [torch.einsum("bhkd,hde->bhke", layer.values, layer.projection).norm(dim=-1) for layer in exact]
        assert relative(measured.transformed_norms, torch.stack(transformed, 1)) < tolerance
    weights = torch.stack([layer.weights for layer in exact], 1)
    assert relative(measured.weights, weights) < tolerance
    mean, own = weights.mean(2), torch.eye(weights.shape[-1], dtype=torch.bool)
    # With attention sinks the weights of a row do not add up to 1.
    others, total = mean.masked_fill(own, 0).sum(-1), mean.sum(-1)
    assert (measured.mixing_ratio["weights"] - others / total).abs().max() < tolerance
    assert (measured.mixing_ratio["weights_res"] - others / (total + 1)).abs().max() < tolerance
    assert measured.convergence_delta.max() < tolerance


def expect_other_scopes_refused(name: str, meter: NormMeter, inputs: Tensor) -> None:
    """Scopes that the arrangement lacks are refused by its name; those behind an unknown network with the reason."""
    style, reason = EVERY[name].style, feed_forwards.NOT_UNDERSTOOD.get(name)
    available = SCOPES[style] if reason else (*SCOPES[style], *feed_forwards.SCOPES[style])
    for scope in ("attn_res", "attn_res_ln", *BEHIND):
        if scope not in available:
            with pytest.raises(UnsupportedScopeError) as refusal:
                meter.measure(inputs, scopes=[scope])
            behind = reason and scope in BEHIND
            said = f"no feed-forward network was understood: {reason}. " if behind else f"are {style}, "
            assert said in str(refusal.value)
            assert ", ".join(available) in str(refusal.value)
            assert len(str(refusal.value)) <= 400


def expect_the_same_in_pieces(model: Any, inputs: Tensor, asked: Any, stacks: Any, tolerance: float) -> None:
    """Some rows at a time, and the last layer alone."""
    ((stack, whole),) = stacks.items()
    close: Any = {"rtol": tolerance, "atol": tolerance / 100}
    pieces = NormMeter(model, memory_budget=10_000).measure(inputs, **asked)[stack]
    for scope, norms in whole.norms.items():
        torch.testing.assert_close(pieces.norms[scope], norms, **close)
        torch.testing.assert_close(pieces.mixing_ratio[scope], whole.mixing_ratio[scope], **close)
    torch.testing.assert_close(pieces.weights, whole.weights, **close)
    torch.testing.assert_close(pieces.head_norms, whole.head_norms, **close)
    scope = asked["scopes"][-1]
    alone = NormMeter(model).measure(inputs, scopes=[scope], layers=[-1])[stack]
    torch.testing.assert_close(alone.norms[scope][:, 0], whole.norms[scope][:, -1], **close)


def expect_the_same_if_padded(method: Any, lean: Any, inputs: Tensor) -> None:
    """The second example is cut and padded on either side; both give what they give alone."""
    examples = [inputs[:1], inputs[1:, 3:]]
    alone = [(method.maps(example), method.attribute(example)[0]) for example in examples]
    for side in ("left", "right"):
        batch, mask = padded(examples, side)
        maps = method.maps({"input_ids": batch, "attention_mask": mask})
        if lean:  # some rows of padding come alone
            torch.testing.assert_close(lean.maps(batch, mask).self_attention, maps.self_attention, rtol=1e-5, atol=1e-6)
        scores = method.attribute(batch, additional_forward_args=mask)
        for row, (expected, expected_scores) in enumerate(alone):
            real = mask[row].bool()
            expect_alone(maps, row, expected, {"self_attention": (real, real)}, 1e-5, 1e-6)
            torch.testing.assert_close(scores[row, real], expected_scores, rtol=1e-5, atol=1e-6)
            assert not scores[row, ~real].any()
            if maps.mixing_ratio is not None and expected.mixing_ratio is not None:
                ratios = maps.mixing_ratio[row]
                torch.testing.assert_close(ratios[:, real], expected.mixing_ratio[0], rtol=1e-5, atol=1e-6)
                assert not ratios[:, ~real].any()


def expect_the_last_rows(methods: Iterable[Any], inputs: Tensor, tolerance: float) -> None:
    """Rows of the last positions alone are those of the whole maps."""
    for method in methods:
        whole, rows = (method.maps(inputs, last=last) for last in (None, 3))
        error = (rows.self_attention - whole.self_attention[..., -3:, :]).abs().max()
        # Softmax in float32 rounds otherwise than the model's own function.
        assert error <= max(tolerance, 1e-10) * whole.self_attention.max()
        assert (rows.cached, rows.virtual, rows.real.shape) == (len(inputs[0]) - 3, 0, (2, 3))
        if whole.mixing_ratio is not None:
            torch.testing.assert_close(rows.mixing_ratio, whole.mixing_ratio[..., -3:], rtol=1e-5, atol=1e-6)


def expect_gradients(name: str, model: Any, inputs: Tensor, scope: Any) -> None:
    """Gradients of the last scope's norms, which a difference quotient confirms where all slopes are smooth."""
    # Where keys serve as values, their projection has no weight of its own.
    places = [place.rpartition(".")[2] for place in (EVERY[name].value, EVERY[name].projection)]
    parameter = next(p for place in places for key, p in model.named_parameters() if place in key)
    meter = NormMeter(model, differentiable=True)

    def loss() -> Tensor:
        (measured,) = meter.measure(inputs, scopes=[scope]).values()
        norms = measured.norms[scope]
        return (norms * torch.linspace(0, 1, norms.numel()).to(norms).view(norms.shape)).sum()

    (gradient,) = torch.autograd.grad(loss(), parameter)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0
    if name in SMOOTH:
        kept, direction = parameter.detach().clone(), torch.randn_like(parameter)
        step = 3e-4 if EVERY[name].single else 1e-6
        ends = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter.copy_(kept + sign * step * direction)
                ends.append(loss().detach())
            parameter.copy_(kept)
        quotient = (ends[0] - ends[1]) / (2 * step)
        torch.testing.assert_close((gradient * direction).sum(), quotient, rtol=2e-3, atol=1e-3)

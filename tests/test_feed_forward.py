"""The scopes behind the feed-forward network: every family against the direct way, and what holds for all of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import TOLERANCE, AttentionBlockAttribution, NormMeter, UnsupportedScopeError
from tests import encoder_decoders, families, feed_forwards, oracle
from tests.encoder_decoders import ENCODER_DECODERS
from tests.families import FAMILIES
from tests.feed_forwards import EVERY, NOT_UNDERSTOOD, PARTS, SCOPES
from tests.test_matrix import relative

# A path from another origin than zero meets ReLU's kink, where the oracle's quadrature fails.
SMOOTH = [name for name, parts in PARTS.items() if parts.activation is not torch.nn.functional.relu]
every_family = pytest.mark.parametrize("name", PARTS)


def inputs_of(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, batch: int = 3) -> Tensor:
    return families.inputs(name, seed, batch, dtype=dtype)


@pytest.mark.parametrize(("name", "baseline"), [(name, "zero") for name in PARTS] + [(name, "bias") for name in SMOOTH])
@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float64), (1, torch.float64), (0, torch.float32)])
def test_norms_equal_the_oracle(name: str, seed: int, baseline: Any, dtype: torch.dtype) -> None:
    family = EVERY[name]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-6 if family.single else 1e-11
    model, inputs = families.build(name, seed, dtype), inputs_of(name, seed, dtype)
    exact = feed_forwards.vectors(
        name, model.double(), inputs.double() if inputs.is_floating_point() else inputs, baseline
    )
    scopes = SCOPES[family.style]
    (measured,) = NormMeter(model.to(dtype), baseline=baseline).measure(inputs, scopes=scopes).values()
    for scope in scopes:
        vectors = torch.stack([layer[scope][0] for layer in exact], 1)
        assert relative(measured.norms[scope], vectors.norm(dim=-1)) < tolerance
        ratios = torch.stack([oracle.mixing_ratio(layer[scope][0]) for layer in exact], 1)
        assert (measured.mixing_ratio[scope] - ratios).abs().max() < tolerance
    assert measured.baseline == baseline
    assert measured.convergence_delta is not None
    assert measured.convergence_delta.max() < tolerance


@pytest.mark.parametrize("name", feed_forwards.CROSS)
@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float64), (1, torch.float64), (0, torch.float32)])
def test_norms_behind_cross_attention_equal_the_oracle(name: str, seed: int, dtype: torch.dtype) -> None:
    parts = feed_forwards.CROSS[name]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-6 if parts.single else 1e-11
    inputs, model = encoder_decoders.inputs(name, seed), encoder_decoders.build(name, seed, dtype)
    layers = encoder_decoders.oracle(name, model.double(), inputs)["cross"]
    exact = feed_forwards.cross_vectors(name, model, layers)
    scopes = SCOPES["post-norm" if parts.final_norm else "pre-norm"]
    measured = NormMeter(model.to(dtype)).measure(inputs, scopes=scopes, stacks=["cross"])["cross"]
    for scope in scopes:
        vectors = torch.stack([layer[scope][0] for layer in exact], 1)
        expected = vectors[:, :, :, :-1].norm(dim=-1)
        assert (measured.norms[scope] - expected).abs().max() < tolerance * expected.max()
        others, own = (part.norm(dim=-1) for part in (vectors[:, :, :, :-1].sum(3), vectors[:, :, :, -1]))
        assert (measured.mixing_ratio[scope] - others / (others + own)).abs().max() < tolerance
    assert measured.convergence_delta is not None
    assert measured.convergence_delta.max() < tolerance


@every_family
def test_vectors_of_the_oracle_add_up_to_what_the_model_computed(name: str) -> None:
    """Guards the oracle itself: at the last scope Σ_j v_ij + bias is what the layer returned."""
    model, inputs = families.build(name, 0, torch.float64), inputs_of(name, dtype=torch.float64)
    outputs: list[Tensor] = []
    layer = PARTS[name].layer or EVERY[name].layer
    names = dict.fromkeys(layer.format(index) for index in range(model.config.num_hidden_layers))

    def keep(_: Any, __: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    handles = [model.get_submodule(place).register_forward_hook(keep) for place in names]
    exact = feed_forwards.vectors(name, model, inputs)
    for handle in handles:
        handle.remove()
    for scopes, output in zip(exact, outputs, strict=False):
        vectors, constant = scopes[SCOPES[EVERY[name].style][-1]]
        single = EVERY[name].single
        torch.testing.assert_close(vectors.sum(2) + constant, output, rtol=0, atol=1e-5 if single else 1e-10)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in (*PARTS, *NOT_UNDERSTOOD)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_vectors_of_every_other_family_add_up(name: str, dtype: torch.dtype) -> None:
    """To what the model computed: families whose networks nobody wrote down."""
    family = FAMILIES[name]
    model, inputs = families.build(name, 0, dtype), inputs_of(name, dtype=dtype)
    (measured,) = NormMeter(model).measure(inputs, scopes=SCOPES[family.style]).values()
    assert measured.convergence_delta is not None
    assert measured.convergence_delta.max() < (1e-5 if dtype == torch.float32 else 1e-6 if family.single else 1e-11)


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_the_reason_is_that_of_the_table(name: str) -> None:
    inputs: Any
    if name in families.EVERY:
        model, inputs, stacks = families.build(name), families.inputs(name), None
    else:
        model, inputs, stacks = encoder_decoders.build(name), encoder_decoders.inputs(name), ["encoder", "cross"]
    for chosen in [None] if stacks is None else [[stack] for stack in stacks]:
        with pytest.raises(UnsupportedScopeError) as refusal:
            NormMeter(model).measure(inputs, scopes=["atb_ff_res"], stacks=chosen)
        assert f"no feed-forward network was understood: {NOT_UNDERSTOOD[name]}. " in str(refusal.value)
        assert len(str(refusal.value)) <= 400


@pytest.mark.parametrize("name", ENCODER_DECODERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_vectors_of_encoder_and_cross_attention_add_up(name: str, dtype: torch.dtype) -> None:
    """To what the model computed; behind a decoder's own attention there is no feed-forward network."""
    family = ENCODER_DECODERS[name]
    dtype = torch.float32 if family.narrow else dtype
    single = family.single or dtype == torch.float32
    behind = () if name in NOT_UNDERSTOOD else SCOPES[family.layout]
    meter, inputs = NormMeter(encoder_decoders.build(name, dtype=dtype)), encoder_decoders.inputs(name, dtype=dtype)
    for stack in ("encoder", "cross"):
        if name in NOT_UNDERSTOOD:
            continue
        measured = meter.measure(inputs, scopes=behind, stacks=[stack])[stack]
        assert set(measured.layer_scopes) == {(*family.scopes, *behind)}
        assert measured.convergence_delta is not None
        assert measured.convergence_delta.max() < (1e-6 if single else 1e-11)
    with pytest.raises(UnsupportedScopeError, match="cross-attention follows, not a feed-forward network"):
        meter.measure(inputs, scopes=["atb_ff_res"], stacks=["decoder"])


@pytest.mark.parametrize("name", [name for name in PARTS if not EVERY[name].image])
def test_padding_and_batching_change_nothing(name: str) -> None:
    scope, lengths = SCOPES[EVERY[name].style][-1], [11, 7, 4]
    model = families.build(name)
    method, lean = AttentionBlockAttribution(model, scope), AttentionBlockAttribution(model, scope, memory_budget=1)
    examples = [families.inputs(name, seed, batch=1, length=length) for seed, length in enumerate(lengths)]
    alone = [(method.maps(example), method.attribute(example)[0]) for example in examples]
    for side in ("left", "right"):
        batch, mask = torch.zeros(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.long)
        for row, example in enumerate(examples):
            filled = slice(0, lengths[row]) if side == "right" else slice(11 - lengths[row], 11)
            batch[row, filled], mask[row, filled] = example[0], 1
        maps = method.maps({"input_ids": batch, "attention_mask": mask})
        # Some rows of padding come alone.
        torch.testing.assert_close(lean.maps(batch, mask).self_attention, maps.self_attention, rtol=1e-4, atol=1e-6)
        scores = method.attribute(batch, additional_forward_args=mask)
        for row, (own, own_scores) in enumerate(alone):
            places = mask[row].bool()
            inside = maps.self_attention[row, :, places][..., places]
            torch.testing.assert_close(inside, own.self_attention[0], rtol=1e-4, atol=1e-5)
            assert not maps.self_attention[row][:, ~places].any()
            assert not maps.self_attention[row][..., ~places].any()
            torch.testing.assert_close(scores[row, places], own_scores, rtol=1e-4, atol=1e-5)
            assert maps.mixing_ratio is not None
            assert own.mixing_ratio is not None
            torch.testing.assert_close(maps.mixing_ratio[row][:, places], own.mixing_ratio[0], rtol=1e-4, atol=1e-5)
            assert not maps.mixing_ratio[row][:, ~places].any()


@every_family
def test_pieces_and_choices_of_scopes_change_nothing(name: str) -> None:
    model, inputs = families.build(name, 0, torch.float64), inputs_of(name, dtype=torch.float64, batch=2)
    scopes = SCOPES[EVERY[name].style]
    (whole,) = NormMeter(model).measure(inputs, scopes=["attn", *scopes], weights=True).values()
    for budget in (1, 3000):
        (pieces,) = NormMeter(model, memory_budget=budget).measure(inputs, scopes=scopes).values()
        for scope in scopes:
            torch.testing.assert_close(pieces.norms[scope], whole.norms[scope], rtol=1e-11, atol=1e-13)
    for scope in scopes:
        (alone,) = NormMeter(model).measure(inputs, scopes=[scope], layers=[-1]).values()
        torch.testing.assert_close(alone.norms[scope][:, 0], whole.norms[scope][:, -1], rtol=1e-11, atol=1e-13)


@every_family
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 6e-2), (torch.float16, 8e-3)])
def test_half_precision_stays_near_the_same_weights_in_float64(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """The model rounds each activation to 2⁻⁸ (2⁻¹¹), and the second layer's norms carry the first one's rounding."""
    model, inputs = families.build(name, 0, dtype), inputs_of(name, dtype=dtype)
    scopes = SCOPES[EVERY[name].style]
    (measured,) = NormMeter(model).measure(inputs, scopes=scopes).values()
    assert measured.convergence_delta is not None
    assert measured.convergence_delta.max() < TOLERANCE[dtype]
    exact = feed_forwards.vectors(name, model.double(), inputs.double() if inputs.is_floating_point() else inputs)
    for scope in scopes:
        expected = exact[0][scope][0].norm(dim=-1)
        maps = measured.norms[scope][:, 0]
        assert maps.dtype == torch.float32
        error = (maps.double() - expected).flatten(1).norm(dim=-1) / expected.flatten(1).norm(dim=-1)
        assert error.max() < tolerance


@every_family
def test_the_model_is_left_as_it_was(name: str) -> None:
    model, inputs = families.build(name), inputs_of(name)
    with torch.no_grad():
        before = model(inputs)[0]
    method = AttentionBlockAttribution(model, SCOPES[EVERY[name].style][-1])
    method.maps(inputs)

    def refuse(*_: Any) -> None:
        raise KeyboardInterrupt

    last = [module for module in model.modules() if not list(module.children())][-1]
    handle = last.register_forward_pre_hook(refuse)
    for explain in (method, AttentionBlockAttribution(model, SCOPES[EVERY[name].style][-1])):
        with pytest.raises(KeyboardInterrupt):
            explain.maps(inputs)
    handle.remove()
    with torch.no_grad():
        assert torch.equal(model(inputs)[0], before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@every_family
def test_gradients_flow_when_asked_for(name: str) -> None:
    model, inputs = families.build(name, 0, torch.float64), inputs_of(name, dtype=torch.float64)
    scope = SCOPES[EVERY[name].style][-1]
    place = EVERY[name].value.rpartition(".")[2]
    parameter = next(p for n, p in model.named_parameters() if place in n)
    meter = NormMeter(model, differentiable=True)

    def loss() -> Tensor:
        (measured,) = meter.measure(inputs, scopes=[scope]).values()
        generator = torch.Generator().manual_seed(0)
        weights = torch.rand(measured.norms[scope].shape, generator=generator, dtype=torch.float64)
        return (measured.norms[scope] * weights).sum()

    (gradient,) = torch.autograd.grad(loss(), parameter)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0
    if PARTS[name].experts or name not in SMOOTH:
        return  # the choice of experts and ReLU's slopes jump, which no difference quotient follows
    direction = torch.randn_like(parameter)
    step = 1e-3 if EVERY[name].single else 1e-6
    with torch.no_grad():
        parameter.add_(step * direction)
        ahead = loss().detach()
        parameter.sub_(2 * step * direction)
        behind = loss().detach()
    torch.testing.assert_close((gradient * direction).sum(), (ahead - behind) / (2 * step), rtol=2e-3, atol=1e-3)


@every_family
def test_scopes_that_the_layers_lack_are_refused(name: str) -> None:
    model, inputs = families.build(name), inputs_of(name)
    available = SCOPES[EVERY[name].style]
    for scope in AttentionBlockAttribution.scopes[1:]:
        if scope not in available:
            with pytest.raises(UnsupportedScopeError, match=f"are {EVERY[name].style}, .* {', '.join(available)}"):
                NormMeter(model).measure(inputs, scopes=[scope])


def test_inference_mode_leaves_nothing_behind() -> None:
    model, ids = families.build("llama"), families.inputs("llama")
    with torch.inference_mode():
        inferred = AttentionBlockAttribution(model, "atb_ff_res").maps(ids).decoder
    torch.testing.assert_close(inferred, AttentionBlockAttribution(model, "atb_ff_res").maps(ids).decoder)


def test_clamped_experts_add_up() -> None:
    """Where the quadrature meets the kinks of the clamps, the parts still make the whole."""
    model = families.build("gpt-oss")
    for layer in model.model.layers:
        layer.mlp.experts.limit = 0.4
    delta = AttentionBlockAttribution(model, "atb_ff").maps(families.inputs("gpt-oss")).convergence_delta
    assert delta is not None
    assert delta.max() < 1e-5

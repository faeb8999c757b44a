"""The scopes behind the feed-forward network, and the two baselines, against the direct way."""

from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import AttentionBlockAttribution, NormMeter
from tests import encoder_decoders, families, feed_forwards, oracle
from tests.feed_forwards import EVERY, PARTS, SCOPES
from tests.test_matrix import relative


@pytest.mark.few
@pytest.mark.parametrize("name", families.tiers(PARTS))
def test_norms_equal_the_oracle(name: str) -> None:
    family, scopes = EVERY[name], SCOPES[EVERY[name].style]
    model, inputs = families.build(name, 1), families.inputs(name, 1)
    # A path from another origin than zero meets ReLU's kink, where the oracle's quadrature fails.
    baselines: list[Any] = ["zero"] if PARTS[name].activation is torch.nn.functional.relu else ["zero", "bias"]
    narrow: list[Any] = [NormMeter(model, baseline=one).measure(inputs, scopes=scopes) for one in baselines]
    model, inputs = model.double(), inputs.double() if inputs.is_floating_point() else inputs
    for baseline, first in zip(baselines, narrow, strict=True):
        exact = exact_vectors(name, model, inputs, baseline)
        second: Any = NormMeter(model, baseline=baseline).measure(inputs, scopes=scopes)
        for stacks, tolerance in ((first, 1e-5), (second, 1e-6 if family.single else 1e-11)):
            (measured,) = stacks.values()
            for scope in scopes:
                vectors = torch.stack([layer[scope][0] for layer in exact], 1)
                assert relative(measured.norms[scope], vectors.norm(dim=-1)) < tolerance
                ratios = torch.stack([oracle.mixing_ratio(layer[scope][0]) for layer in exact], 1)
                assert (measured.mixing_ratio[scope] - ratios).abs().max() < tolerance
            assert measured.baseline == baseline
            assert measured.convergence_delta.max() < tolerance


def exact_vectors(name: str, model: Any, inputs: Tensor, baseline: str) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """The oracle's vectors, which at the last scope add up to what the layer returned."""
    layer = PARTS[name].layer or EVERY[name].layer
    names = dict.fromkeys(layer.format(index) for index in range(model.config.num_hidden_layers))
    with oracle.watched(model, {place: (place, "first") for place in names}) as seen:
        exact = feed_forwards.vectors(name, model, inputs, baseline)
    outputs = [output for notes in seen.values() for output in notes]
    for scopes, output in zip(exact, outputs, strict=False):
        vectors, constant = scopes[SCOPES[EVERY[name].style][-1]]
        single = EVERY[name].single
        torch.testing.assert_close(vectors.sum(2) + constant, output, rtol=0, atol=1e-5 if single else 1e-10)
    return exact


@pytest.mark.few
@pytest.mark.parametrize("name", feed_forwards.CROSS)
def test_norms_behind_cross_attention_equal_the_oracle(name: str) -> None:
    parts = feed_forwards.CROSS[name]
    inputs, model = encoder_decoders.inputs(name, 1), encoder_decoders.build(name, 1)
    scopes = SCOPES["post-norm" if parts.final_norm else "pre-norm"]
    narrow = NormMeter(model).measure(inputs, scopes=scopes, stacks=["cross"])
    layers = encoder_decoders.oracle(name, model.double(), inputs)["cross"]
    exact = feed_forwards.cross_vectors(name, model, layers)
    second = NormMeter(model).measure(inputs, scopes=scopes, stacks=["cross"])
    for stacks, tolerance in ((narrow, 1e-5), (second, 1e-6 if parts.single else 1e-11)):
        measured: Any = stacks["cross"]
        for scope in scopes:
            vectors = torch.stack([layer[scope][0] for layer in exact], 1)
            expected = vectors[:, :, :, :-1].norm(dim=-1)
            assert (measured.norms[scope] - expected).abs().max() < tolerance * expected.max()
            others, own = (part.norm(dim=-1) for part in (vectors[:, :, :, :-1].sum(3), vectors[:, :, :, -1]))
            assert (measured.mixing_ratio[scope] - others / (others + own)).abs().max() < tolerance
        assert measured.convergence_delta.max() < tolerance


def test_clamped_experts_add_up() -> None:
    """Where the quadrature meets the kinks of the clamps, the parts still make the whole."""
    model = families.build("gpt-oss")
    for layer in model.model.layers:
        layer.mlp.experts.limit = 0.4
    delta: Any = AttentionBlockAttribution(model, "atb_ff").maps(families.inputs("gpt-oss")).convergence_delta
    assert delta.max() < 1e-5

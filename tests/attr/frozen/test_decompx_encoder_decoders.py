"""DecompX of encoder–decoder models against vectors propagated by hand through encoder, cross-attention and decoder."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from captum_norm import DecompX, Difference, InvalidInputError, UnsupportedModelError
from captum_norm.attr.frozen.decompx import Bias
from captum_norm.errors import IncompleteDecompositionError
from tests import encoder_decoders
from tests.attr.frozen.decompx_by_hand import bart_by_hand, t5_by_hand
from tests.classifiers import randomized

SOURCE, TARGET = 5, 4
BY_HAND: dict[str, tuple[Any, float]] = {
    "bart": (bart_by_hand, 1e-10),
    "marian": (bart_by_hand, 1e-10),
    "t5": (t5_by_hand, 1e-6),  # its file computes norms and softmax in float32
}


def built(name: str, seed: int) -> tuple[Any, dict[str, Tensor]]:
    """More layers in BART's encoder than in its decoder, and a bias of the logits."""
    if name == "bart":
        model: Any = hf.BartForConditionalGeneration(hf.BartConfig(**encoder_decoders.BART | {"encoder_layers": 3}))
        randomized(model, seed)
    else:
        model = encoder_decoders.build(name, seed, torch.float64)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    return model, encoder_decoders.inputs(name, seed, 2, SOURCE, TARGET)


def example(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: value[row : row + 1] for name, value in inputs.items()}


def near(actual: Tensor, expected: Tensor, tolerance: float, size: Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * size.abs().max()


@pytest.mark.parametrize(("seed", "name"), list(enumerate(BY_HAND)))
@torch.no_grad()
def test_outputs_equal_vectors_by_hand(seed: int, name: str) -> None:
    by_hand, tolerance = BY_HAND[name]
    model, inputs = built(name, seed)
    logits = [by_hand(model, example(inputs, row), "apart")[2] for row in range(2)]
    for method in (DecompX(model), DecompX(model, propagate=True), DecompX(model, propagate=True, memory_budget=1)):
        for position, rows in ((None, [-1, -1]), ([1, 2], [1, 2])):
            found = method.decompose(inputs, [7, 9], position=position)
            for row, (place, target) in enumerate(zip(rows, (7, 9), strict=True)):
                parts = logits[row][place, :, target]
                near(found.scores.source[row], parts[:SOURCE], tolerance, parts)
                near(found.scores.prefix[row], parts[SOURCE:-1], tolerance, parts)
                near(found.bias[row], parts[-1], tolerance, parts)
                near(found.number[row], model(**inputs).logits[row, place, target], tolerance, parts)
                causal = range(SOURCE + TARGET)[SOURCE + (place % TARGET) + 1 :]
                assert not parts[list(causal)].any()
            total = found.scores.source.sum(1) + found.scores.prefix.sum(1) + found.bias
            torch.testing.assert_close(total, found.number, rtol=1e-6, atol=1e-7)
    less, delta = method.attribute(inputs, Difference(7, 9), return_convergence_delta=True)
    for row in range(2):
        parts = logits[row][-1, :, 7] - logits[row][-1, :, 9]
        near(less.source[row], parts[:SOURCE], tolerance, parts)
        near(less.prefix[row], parts[SOURCE:-1], tolerance, parts)
    assert delta.max() < tolerance


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "bias"), [("bart", "apart"), ("t5", "apart"), ("bart", "absdot"), ("marian", "equal"), ("bart", "cls")]
)
@torch.no_grad()
def test_hidden_states_and_shared_biases_equal_vectors_by_hand(name: str, bias: Bias) -> None:
    by_hand, tolerance = BY_HAND[name]
    model, inputs = built(name, 3)
    method = DecompX(model, bias)
    maps: Any = method.maps(inputs)
    found = method.decompose(inputs, 7)
    assert maps.convergence_delta.shape[1] == sum(stack.shape[1] for stack in (maps.encoder, maps.decoder, maps.cross))
    assert maps.convergence_delta.max() < tolerance
    for row in range(2):
        encoded, decoded, logits = by_hand(model, example(inputs, row), bias)
        for stack, states, tokens in (
            (maps.encoder, encoded, slice(0, SOURCE)),
            (maps.decoder, decoded, slice(SOURCE, -1)),
            (maps.cross, decoded, slice(0, SOURCE)),
        ):
            norms = torch.stack([parts[:, tokens].norm(dim=-1) for parts in states])
            near(stack[row], norms, tolerance, norms)
        parts = logits[-1, :, 7]
        near(found.scores.source[row], parts[:SOURCE], tolerance, parts)
        near(found.scores.prefix[row], parts[SOURCE:-1], tolerance, parts)
        near(found.bias[row], parts[-1], tolerance if bias == "apart" else 0, parts)
    for scores, stack in zip(method.attribute(inputs, layer=-1), (maps.cross, maps.decoder), strict=True):
        torch.testing.assert_close(scores, stack[:, -1, -1])
    for scores, stack in zip(method.attribute(inputs, layer=0, position=1), (maps.cross, maps.decoder), strict=True):
        torch.testing.assert_close(scores, stack[:, 0, 1])
    alone: Any = method.maps(inputs, layers=[-1], stacks=["cross"])
    assert alone.encoder is None
    torch.testing.assert_close(alone.cross[:, 0], maps.cross[:, -1])


WHOLE = [name for name, family in encoder_decoders.ENCODER_DECODERS.items() if not family.special]


# FSMT's file masks in float32 alone.
@pytest.mark.few
@pytest.mark.parametrize("name", [name for name in WHOLE if name not in (*BY_HAND, "fsmt")])
def test_every_family_is_complete_and_one_backward_pass_equals_propagated_vectors(name: str) -> None:
    model, inputs = built(name, 0)
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    graph, parts = (DecompX(model, propagate=propagate).decompose(inputs, 7) for propagate in (False, True))
    for found, expected in zip(graph.scores, parts.scores, strict=True):
        near(found, expected, 1e-6, expected)
        assert expected.abs().max() > 1e-4
    near(graph.bias, parts.bias, 1e-6, parts.number)


def test_what_is_not_supported_is_refused() -> None:
    model, inputs = built("bart", 0)
    with pytest.raises(InvalidInputError, match="got no input of the decoder; pass decoder_input_ids"):
        DecompX(model).attribute(inputs["input_ids"], 3)
    with torch.no_grad():
        encoded = model.get_encoder()(inputs["input_ids"])
    with pytest.raises(UnsupportedModelError, match=r"the encoder of BartFor.* did not run"):
        DecompX(model).attribute(inputs | {"encoder_outputs": encoded}, 3)
    first = model.model.encoder.layers[0]
    del first.activation_fn
    first.activation_fn = lambda z: z * z / 9
    for propagate in (False, True):
        with pytest.raises(IncompleteDecompositionError, match="do not add up to it"):
            DecompX(model, propagate=propagate).attribute(inputs, 1)

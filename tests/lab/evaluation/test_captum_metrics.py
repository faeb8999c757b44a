"""Captum's metrics on token scores, against their definitions."""

from typing import Any

import pytest
import torch
from captum.attr import InputXGradient, Saliency
from torch import Tensor

from captum_norm import AttentionRollout, InvalidInputError, NormAttribution, TokenAttribution
from captum_norm.lab.evaluation import Perturbation, infidelity, max_sensitivity
from tests.classifiers import MASK, TOKENIZER, alone, classifier, sentences


@pytest.mark.parametrize("normalize", [True, False])
def test_infidelity_follows_its_definition(normalize: bool) -> None:
    model, (ids, mask) = classifier(), sentences([7, 5, 6])
    target, samples = [2, 0, 1], 6
    scores = torch.randn(ids.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bound = Perturbation(model, "mask", tokenizer=TOKENIZER).bind(ids, mask, target=target)
    actual = infidelity(bound, scores, samples=samples, normalize=normalize, seed=3)
    # The same random numbers: each example's samples lie together.
    draws = torch.rand(3 * samples, ids.shape[1], generator=torch.Generator().manual_seed(3)).unflatten(0, (3, samples))
    for row in range(3):
        tokens = alone(ids, mask, row)[0]

        def f(changed: Tensor, row: int = row) -> float:
            with torch.no_grad():
                return float(model(changed[None]).logits[0].softmax(0)[target[row]])

        sums, drops = [], []
        for draw in draws[row]:
            removed = (draw < 0.5)[mask[row].bool()]
            removed[0] = removed[-1] = False
            sums.append(float(scores[row, mask[row].bool()][removed].sum()))
            drops.append(f(tokens) - f(tokens.masked_fill(removed, MASK)))
        factor = 1.0
        if normalize:
            factor = sum(s * d for s, d in zip(sums, drops, strict=True)) / sum(s * s for s in sums)
        expected = sum((factor * s - d) ** 2 for s, d in zip(sums, drops, strict=True)) / samples
        assert abs(float(actual[row]) - expected) < 1e-12


def test_max_sensitivity_follows_its_definition() -> None:
    model, (ids, mask) = classifier(), sentences([7, 5])
    method = TokenAttribution(model, InputXGradient)
    actual = max_sensitivity(
        method.attribute, model, ids, mask, radius=0.1, samples=4, seed=5, target=torch.tensor([2, 0])
    )
    uniform = torch.rand(8, ids.shape[1], 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    changes = (0.2 * uniform - 0.1).unflatten(0, (2, 4))
    for row, target in enumerate([2, 0]):
        tokens = alone(ids, mask, row)
        embedded = model.get_input_embeddings()(tokens).detach()
        whole = method.attribute(embedded, target)
        differences = [
            # The library moves left-padded examples to the left before it changes their embeddings.
            (method.attribute(embedded + change[: tokens.shape[1]], target) - whole).norm() / whole.norm()
            for change in changes[row]
        ]
        torch.testing.assert_close(actual[row], torch.stack(differences).max())


METHODS: dict[str, Any] = {
    "norms": NormAttribution,
    "rollout": AttentionRollout,
    "saliency": lambda model: TokenAttribution(model, Saliency),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_sensitivity(name: str) -> None:
    model, (ids, mask) = classifier(), sentences([7, 5])
    method = METHODS[name](model)
    values = max_sensitivity(method.attribute, model, ids, mask, radius=0.3, samples=3, target=1)
    assert (values > 1e-3).all()
    assert max_sensitivity(method.attribute, model, ids, mask, radius=0.0, samples=2, target=1).max() < 1e-12


def test_scores_of_other_inputs_are_refused() -> None:
    model, (ids, mask) = classifier(), sentences([7, 5])
    bound = Perturbation(model, "mask", tokenizer=TOKENIZER).bind(ids, mask)
    with pytest.raises(InvalidInputError, match=r"scores of shape \(2, 6\); expected \(2, 7\)"):
        infidelity(bound, torch.zeros(2, 6))

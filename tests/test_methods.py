"""The registry: every name leads to a method."""

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import Attribution, IntegratedGradients
from torch import Tensor

from captum_norm import AttentionMapAttribution, TokenAttribution
from captum_norm.methods import METHODS
from tests import families
from tests.classifiers import classifier


def test_every_name_leads_to_a_method() -> None:
    for name, method in METHODS.items():
        assert issubclass(method.load(), Attribution)
        assert issubclass(method.load(), AttentionMapAttribution) == method.maps
        assert not method.maps or method.load().name == name


COPIES: list[Callable[[Any], Any]] = [lambda method: pickle.loads(pickle.dumps(method)), deepcopy]


def seeded(method: Any, ids: Tensor) -> Tensor:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - Captum's generator
    scores: Tensor = method.attribute(ids, target=1)
    return scores


@pytest.mark.few
@pytest.mark.filterwarnings("ignore:Setting forward, backward hooks")
@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].package != "captum_norm.lab.comparison"])
def test_copies_of_a_used_method_give_its_scores(name: str) -> None:
    entry, model, ids = METHODS[name], classifier(), families.inputs("bert", 0, 2, 5)
    if entry.requires:
        pytest.importorskip(entry.requires)
    kind = entry.load()
    method = kind(model) if entry.maps else TokenAttribution(model, kind, **entry.options)
    scores = seeded(method, ids)
    for copied in COPIES:
        assert torch.equal(seeded(copied(method), ids), scores)


@pytest.mark.parametrize("baseline", [None, "zero", "mean", 17, torch.arange(32.0)])
def test_a_copys_baseline_is_that_of_its_own_model(baseline: Any) -> None:
    model, ids = classifier(), families.inputs("bert", 0, 2, 5)
    method = TokenAttribution(model, IntegratedGradients, baseline=baseline, n_steps=5)
    scores = method.attribute(ids, 1)
    for copied in COPIES:
        copy = copied(method)
        with torch.no_grad():
            copy.model.get_input_embeddings().weight.mul_(3)
        changed = TokenAttribution(copy.model, IntegratedGradients, baseline=baseline, n_steps=5)
        assert torch.equal(copy.attribute(ids, 1), changed.attribute(ids, 1))
        assert torch.equal(method.attribute(ids, 1), scores)

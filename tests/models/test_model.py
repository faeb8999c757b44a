"""What is known about a model follows the model, and does not keep it alive."""

import gc
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from captum_norm import InvalidInputError, NormAttribution, UnsupportedModelError
from captum_norm.models.hooks import modules_of
from captum_norm.models.model import understand
from tests import encoder_decoders, families
from tests.hybrids import HYBRIDS


def test_the_modules_of_a_model_in_their_order() -> None:
    shared = nn.Linear(2, 2)
    inner = nn.Sequential(shared, nn.ReLU(), nn.ModuleDict({"again": shared}))
    inner.register_module("nothing", None)
    for model in (nn.ModuleList([inner, shared, nn.ModuleList([inner])]), families.build("bert")):
        assert modules_of(model) == list(model.modules())


def test_another_forward_function_is_called_by_its_own_names() -> None:
    model, ids = families.build("bert"), families.inputs("bert")
    expected, own = NormAttribution(model).maps(ids).self_attention, model.forward
    model.forward = lambda words, seen=None: own(input_ids=words, attention_mask=seen)
    assert torch.equal(NormAttribution(model).maps(ids).self_attention, expected)


def own_forward(model: Any) -> None:
    model.forward = partial(lambda model, input_ids: type(model).forward(model, input_ids), model)


def default(model: Any) -> None:
    def forward(input_ids: Any, model: Any = model) -> Any:
        return type(model).forward(model, input_ids)

    model.forward = forward


def owner(model: Any) -> None:
    vars(model.get_input_embeddings())["owner"] = model


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "refer"),
    [("bert", own_forward), ("bert", default), ("bert", owner), ("bert", lambda _: None), ("bart", owner)],
)
def test_models_are_freed(name: str, refer: Any) -> None:
    source: Any = families if name == "bert" else encoder_decoders
    model, inputs = source.build(name), source.inputs(name)
    refer(model)
    NormAttribution(model).maps(inputs)
    left = ref(model)
    del model
    gc.collect()
    assert left() is None


def test_a_move_to_another_device_is_another_state() -> None:
    model = families.build("bert")
    known = understand(model)
    assert understand(model) is known
    assert understand(model.to("meta")) is not known


def test_that_layers_mix_positions_is_not_forgotten() -> None:
    model, ids = families.randomized(HYBRIDS["lfm2"], 0, torch.float32), families.inputs("llama")
    method = NormAttribution(model)
    maps = method.maps(ids)
    model.double()
    with pytest.raises(InvalidInputError):
        method.maps(ids + 10**6)
    with pytest.raises(UnsupportedModelError, match="mixes positions"):
        method.scores(maps, 0)

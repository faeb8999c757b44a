"""Every architecture in the table of refusals is refused for the reason given there, quickly and in few words."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from captum_norm import AttentionWeights, NormMeter, UnsupportedModelError
from captum_norm.commands.models import supported_models
from captum_norm.models.model import refusals
from tests import families, refused, support

REASONS = {name: refusal["reason"] for refusal in refusals() for name in refusal["model_types"]}


@pytest.mark.few
@pytest.mark.parametrize("name", refused.REFUSED)
def test_the_reason_is_that_of_the_table(name: str) -> None:
    model = families.randomized(refused.REFUSED[name], 0, torch.float32)
    inputs = refused.inputs(name, model)
    with torch.no_grad():
        before = model(**inputs)[0]
    with pytest.raises(UnsupportedModelError) as refusal:
        NormMeter(model).measure(inputs, scopes=["attn", "atb"])
    assert str(refusal.value) == f"{type(model).__name__} is not supported: {REASONS[name]}"
    assert type(refusal.value) is UnsupportedModelError
    assert len(str(refusal.value)) <= 400
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("refusal", refusals(), ids=lambda refusal: refusal["model_types"][0])
def test_every_reason_has_a_model(refusal: Mapping[str, Any]) -> None:
    assert any(name in refused.REFUSED for name in refusal["model_types"])


def test_what_is_refused_is_not_listed_as_supported() -> None:
    listed = {entry["model_type"] for entry in json.loads(support.DATA.read_text(encoding="utf-8"))}
    # Some settings of these are supported.
    assert listed & set(REASONS) == {"big_bird", "bigbird_pegasus"}


def test_the_list_and_its_page_are_those_of_the_test_matrix() -> None:
    found = list(support.supported())
    assert support.DATA.read_text(encoding="utf-8") == support.data(found), "run python -m tests.support"
    assert support.PAGE.read_text(encoding="utf-8") == support.page(found), "run python -m tests.support"
    assert supported_models() == found
    assert len({model["model_type"] for model in found}) >= 50


@pytest.mark.parametrize("name", ["led", "longt5", "pegasus_x"])
def test_the_decoder_can_be_explained_where_the_reason_says_so(name: str) -> None:
    model = families.randomized(refused.REFUSED[name], 0, torch.float32)
    inputs = refused.inputs(name, model)
    stacks = NormMeter(model).measure(inputs, scopes=["atb"], stacks=["decoder", "cross"])
    assert list(stacks) == ["decoder", "cross"]


@pytest.mark.parametrize(("name", "half"), [("blip-2 (T5)", "language_model"), ("florence2", "model.language_model")])
def test_the_encoder_decoder_behind_an_image_tower_can_be_explained_alone(name: str, half: str) -> None:
    model = families.randomized(refused.REFUSED[name], 0, torch.float32)
    assert f"model.{half}, with inputs_embeds" in REASONS[name]
    inputs = {"inputs_embeds": torch.randn(2, 7, 32), "decoder_input_ids": torch.tensor([[1, 5, 7], [1, 6, 8]])}
    stacks = NormMeter(model.get_submodule(half)).measure(inputs, scopes=["atb"])
    assert list(stacks) == ["encoder", "decoder", "cross"]


@pytest.mark.parametrize("name", ["mobilebert", "convbert", "gpt_neox_japanese"])
def test_weights_are_explained_where_attention_alone_is_understood(name: str) -> None:
    model = families.randomized(refused.REFUSED[name], 0, torch.float32)
    maps = AttentionWeights(model).maps(refused.inputs(name, model)).self_attention
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 2, 12))

"""Structures that are found, structures that are refused, and declarations."""

from typing import Any

import pytest
import torch
import transformers as hf

from captum_norm import AttentionBlockAttribution, NormAttribution, NormMeter, UnsupportedModelError
from captum_norm.models.inputs import bind_inputs
from captum_norm.models.layouts import Layout, Site
from captum_norm.models.search.attention_blocks import find_blocks
from tests import families


@pytest.mark.parametrize("name", families.tiers())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_arrangement_is_found(name: str, dtype: torch.dtype) -> None:
    """In fresh models, whose attention adds next to nothing to the stream; with noise, the oracle's tests need it."""
    torch.manual_seed(1)
    model: Any = families.FAMILIES[name].build().eval().to(dtype)
    inputs = families.inputs(name, 1, dtype=dtype)
    with torch.no_grad():
        blocks = find_blocks(bind_inputs(model, inputs))
    family = families.FAMILIES[name]
    assert {block.layout.style for block in blocks.values()} == {family.style}
    for block in blocks.values():
        assert f"{block.name}.{block.layout.projection}".endswith(family.projection)
        for found, expected in ((block.branch_norm, family.branch_norm), (block.final_norm, family.final_norm)):
            assert (found is None) == (expected is None)
    assert len(blocks) == (1 if "shared layers" in family.special else 2)


def test_a_norm_that_rounding_hides_behind_the_stream_is_found() -> None:
    """In bfloat16 a residual stream 3000 times larger swallows whatever is added to it."""
    model = families.build("olmo2", dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(3000)
    blocks = find_blocks(bind_inputs(model, families.inputs("olmo2")))
    assert {block.layout.style for block in blocks.values()} == {"norm-on-output"}


def test_a_block_that_is_not_understood_is_refused_with_what_was_found() -> None:
    # The output projection's bias is added by the layer, outside the projection.
    model: Any = hf.GPTNeoXJapaneseForCausalLM(hf.GPTNeoXJapaneseConfig(**families.TEXT))
    torch.nn.init.ones_(model.gpt_neox_japanese.layers[1].attention.dense_bias)
    with pytest.raises(UnsupportedModelError) as caught:
        find_blocks(bind_inputs(model, families.inputs("llama")))
    message = str(caught.value)
    for part in ("GPTNeoXJapaneseForCausalLM", '.layers.1.attention"', '.dense"', "no sum with a residual"):
        assert part in message


@pytest.mark.parametrize("name", [name for name, family in families.FAMILIES.items() if family.branch_factor])
def test_a_factor_is_found_and_its_present_value_is_used(name: str) -> None:
    family, inputs = families.FAMILIES[name], families.inputs(name)
    model = families.build(name)
    meter = NormMeter(model)
    (before,) = meter.measure(inputs, scopes=["attn", "atb"]).values()
    for block in find_blocks(bind_inputs(model, inputs)).values():
        assert (block.layout.branch_factor, block.layout.residual_factor) == (family.branch_factor, None)
        place, _, last = str(family.branch_factor).rpartition(".")
        owner: Any = block.layer.get_submodule(place)
        value = getattr(owner, last)
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.mul_(2)
        else:
            setattr(owner, last, 2 * value)
    (after,) = meter.measure(inputs, scopes=["attn", "atb"]).values()
    others = ~torch.eye(before.norms["atb"].shape[-1], dtype=torch.bool)
    torch.testing.assert_close(after.norms["attn"][:, 0], before.norms["attn"][:, 0])
    torch.testing.assert_close(after.norms["atb"][:, 0][:, others], 2 * before.norms["atb"][:, 0][:, others])


def test_a_factor_of_the_stream_is_found() -> None:
    config = hf.MiniMaxConfig(
        **families.GROUPED,
        num_local_experts=2,
        layer_types=["full_attention"] * 2,
        full_attn_alpha_factor=1.5,
        full_attn_beta_factor=0.7,
        mlp_alpha_factor=0.6,
    )
    torch.manual_seed(0)
    model: Any = hf.MiniMaxForCausalLM(config)
    model.eval()
    (block, _) = find_blocks(bind_inputs(model, families.inputs("llama"))).values()
    assert (block.layout.residual_factor, block.layout.branch_factor) == ("attn_alpha_factor", "attn_beta_factor")
    maps: Any = NormAttribution(model, "attn_res_ln").maps(families.inputs("llama"))
    assert maps.convergence_delta.max() < 1e-5


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attention": "mlp"}, 'attention is called by "self_attn", not by "mlp"'),
        ({"projection": "self_attn.q"}, 'there is no module "self_attn.q"'),
        ({"projection": "mlp.act_fn"}, '"mlp.act_fn" does not compute input @ weight'),
        ({"residual": Site.parse("input_layernorm.output")}, 'is not the sum of "input_layernorm.output"'),
        ({"total": Site.parse("nothing.output")}, 'no tensor passed "nothing.output"'),
        ({"branch_factor": "self_attn.scaling"}, 'is not the sum of "input" and the attention output'),
        ({"branch_factor": "mlp"}, '"mlp" is neither a number nor a vector of 32 numbers'),
        ({"residual_factor": "self_attn.v_proj.weight"}, "is neither a number nor a vector of 32 numbers"),
        ({"branch_norm": "mlp"}, '"mlp" does not receive the tensor that it should normalise'),
    ],
)
def test_a_wrong_declaration_is_refused(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], problem: str) -> None:
    right: dict[str, Any] = {
        "attention": "self_attn",
        "projection": "self_attn.o_proj",
        "residual": Site.parse("input"),
        "total": Site.parse("post_attention_layernorm.input"),
        "normed_input": True,
    }
    monkeypatch.setattr("captum_norm.models.layouts._layouts", {"LlamaDecoderLayer": Layout(**right)})
    model, ids = families.build("llama"), families.inputs("llama")
    torch.testing.assert_close(
        AttentionBlockAttribution(model).maps(ids).decoder, _found(model, ids, monkeypatch), rtol=0, atol=0
    )
    monkeypatch.setattr("captum_norm.models.layouts._layouts", {"LlamaDecoderLayer": Layout(**right | changes)})
    with pytest.raises(UnsupportedModelError, match=r"layout of LlamaDecoderLayer .* does not hold") as caught:
        AttentionBlockAttribution(model).maps(ids)
    assert problem in str(caught.value)


def _found(model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor | None:
    with monkeypatch.context() as undeclared:
        undeclared.setattr("captum_norm.models.layouts._layouts", {})
        return AttentionBlockAttribution(model).maps(ids).decoder

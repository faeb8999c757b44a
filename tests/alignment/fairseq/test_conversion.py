"""What fairseq's settings and weights make of a model: its configuration, each weight in its place; what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import FSMTConfig, FSMTForConditionalGeneration, MarianMTModel, PegasusForConditionalGeneration

from alignment.fairseq.conversion import architecture, build_model, sinusoidal_positions
from captum_norm import InvalidInputError, NormAttribution
from tests.alignment.fairseq.small import FFN, LAYERS, SOURCE, TARGET, WIDTH, settings, weights

PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}


@pytest.mark.parametrize("pre_norm", [False, True])
def test_shapes_come_from_the_weights_and_the_rest_from_the_settings(pre_norm: bool) -> None:
    changes = PRE_NORM if pre_norm else {}
    found = architecture(settings(activation_fn="gelu", dropout=0.3, **changes), weights(pre_norm=pre_norm))
    config: Any = found.config
    assert found.model_class is (PegasusForConditionalGeneration if pre_norm else MarianMTModel)
    assert (found.tied, found.shared) == (True, False)
    assert (config.d_model, config.activation_function, config.dropout) == (WIDTH, "gelu", 0.3)
    assert (config.encoder_layers, config.decoder_layers) == (LAYERS["encoder"], LAYERS["decoder"])
    assert (config.encoder_ffn_dim, config.decoder_ffn_dim) == (FFN["encoder"], FFN["decoder"])
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (2, 4)
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_id) == (0, 1, 2)
    assert (config.decoder_start_token_id, config.forced_eos_token_id) == (2, None)
    assert (config.scale_embedding, config.max_position_embeddings) == (True, 40)
    assert config.vocab_size == (TARGET if pre_norm else SOURCE)


@pytest.mark.parametrize(
    ("shared", "tied", "expected"),
    [(True, True, (True, True)), (False, True, (True, False)), (False, False, (False,) * 2)],
)
def test_the_weights_tell_what_is_tied(shared: bool, tied: bool, expected: tuple[bool, bool]) -> None:
    for said in (False, True):  # whatever the settings say
        found = architecture(settings(share_all_embeddings=said), weights(shared=shared, tied=tied))
        assert (found.tied, found.shared) == expected


def test_defaults_of_fairseq_and_learned_positions() -> None:
    few = {name: value for name, value in settings().items() if "attention_heads" in name}
    config: Any = architecture(few, weights()).config
    assert (config.activation_function, config.scale_embedding, config.max_position_embeddings) == ("relu", True, 1024)
    found = weights(learned=True)
    found["decoder.embed_positions.weight"] = torch.zeros(32, WIDTH)
    config = architecture(settings(max_target_positions=1024), found).config
    assert config.max_position_embeddings == 30


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layernorm_embedding", True),
        ("cross_self_attention", True),
        ("no_cross_attention", True),
        ("adaptive_input", True),
        ("adaptive_softmax_cutoff", "1000,2000"),
        ("encoder_layers_to_keep", "0,2"),
        ("quant_noise_pq", 0.1),
        ("no_token_positional_embeddings", True),
        ("merge_src_tgt_embed", True),
        ("activation_fn", "swish"),
        ("encoder_attention_heads", None),
        ("decoder_attention_heads", 3),
        ("encoder_normalize_before", True),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}(=| is ){value!r}"):
        architecture(settings(**{name: value}), weights())


def test_different_widths_are_refused() -> None:
    found = weights()
    found["decoder.embed_tokens.weight"] = torch.zeros(TARGET, 2 * WIDTH)
    with pytest.raises(InvalidInputError, match="an encoder of width 8 and a decoder of width 16"):
        architecture(settings(), found)


@pytest.mark.parametrize("name", ["encoder.embed_tokens.weight", "decoder.layers.0.fc1.weight"])
def test_a_weight_that_decides_the_shape_must_be_there(name: str) -> None:
    found = weights()
    del found[name]
    with pytest.raises(InvalidInputError, match=f"lacks {name}"):
        architecture(settings(), found)


SOURCE_IDS = torch.tensor([[5, 9, 4, 2, 1, 1], [8, 3, 10, 7, 12, 2]])
TARGET_IDS = torch.tensor([[2, 17, 4, 1], [2, 8, 23, 11]])


def build(**forms: bool) -> Any:
    changes = PRE_NORM if forms.get("pre_norm") else {}
    return build_model(settings(**changes), weights(**forms))


INPUTS = {"input_ids": SOURCE_IDS, "attention_mask": SOURCE_IDS.ne(1).long(), "decoder_input_ids": TARGET_IDS}


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """At real target positions."""
    found: Tensor = model(**INPUTS, use_cache=False).logits  # with a cache, FSMT masks nothing
    return found[TARGET_IDS.ne(1)]


@pytest.mark.parametrize("width", [4, 10, 7])
def test_sinusoidal_positions_begin_behind_the_padding_index(width: int) -> None:
    half, count = width // 2, 60
    expected = torch.zeros(count, width, dtype=torch.float64)
    for row, index in ((row, index) for row in range(count) for index in range(half)):
        angle = (row + 2) * math.exp(-index * math.log(10000) / (half - 1))
        expected[row, index], expected[row, half + index] = math.sin(angle), math.cos(angle)
    # Angles up to 62 in float32: half an ulp of 62 and of the product with the rounded frequency.
    torch.testing.assert_close(sinusoidal_positions(count, width).double(), expected, rtol=0, atol=62 * 2**-22)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("embeddings", ["shared", "tied", "separate"])
def test_every_weight_is_in_its_place(pre_norm: bool, learned: bool, embeddings: str) -> None:
    forms = {"pre_norm": pre_norm, "learned": learned, "shared": embeddings == "shared", "tied": embeddings == "tied"}
    model, given = build(**forms), weights(**forms)
    state = model.state_dict()
    names = {"decoder.output_projection.weight": "lm_head.weight"}
    for name, tensor in given.items():
        if name != "encoder.version":
            rows = tensor[2:] if "embed_positions" in name else tensor
            torch.testing.assert_close(state[names.get(name, f"model.{name}")], rows, rtol=0, atol=0)
    parameters = sum(tensor.numel() for name, tensor in given.items() if name != "encoder.version")
    parameters -= {"shared": 2, "tied": 1, "separate": 0}[embeddings] * TARGET * WIDTH
    parameters += -4 * WIDTH if learned else 2 * 40 * WIDTH
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert not model.final_logits_bias.any()
    assert not model.training
    assert model.get_input_embeddings() is model.model.encoder.embed_tokens
    assert model.get_input_embeddings().num_embeddings == len(given["encoder.embed_tokens.weight"])


def test_weights_are_copied_and_no_random_number_is_drawn() -> None:
    given, kept = weights(), weights()
    state = torch.random.get_rng_state()
    model = build_model(settings(), given)
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(given[name], kept[name]) for name in kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_are_in_float32(dtype: torch.dtype) -> None:
    model = build_model(settings(), {name: tensor.to(dtype) for name, tensor in weights().items()})
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    rounded = weights()["encoder.layers.0.fc1.weight"].to(dtype).float()
    assert torch.equal(model.state_dict()["model.encoder.layers.0.fc1.weight"], rounded)


def test_stale_copies_are_dropped_and_joint_projections_split() -> None:
    given = weights()
    expected = logits(build_model(settings(), given))
    for name in ("in_proj_weight", "in_proj_bias", "out_proj_weight", "fc1_bias", "fc2_weight"):
        given[f"encoder.layers.0.{name}"] = torch.full((3,), math.nan)
    given["decoder.version"] = torch.tensor([3.0])
    given["decoder.embed_positions._float_tensor"] = given["encoder.embed_positions.weights"] = torch.zeros(1)
    assert torch.equal(logits(build_model(settings(), given)), expected)
    for attention in ("encoder.layers.0.self_attn", "decoder.layers.1.encoder_attn"):
        for kind in ("weight", "bias"):
            parts = [given.pop(f"{attention}.{letter}_proj.{kind}") for letter in "qkv"]
            given[f"{attention}.in_proj_{kind}"] = torch.cat(parts)
    assert torch.equal(logits(build_model(settings(), given)), expected)


def test_outputs_of_old_checkpoints() -> None:
    tied, separate = weights(), weights(tied=False)
    expected = logits(build_model(settings(), tied)), logits(build_model(settings(), separate))
    del tied["decoder.output_projection.weight"]
    separate["decoder.embed_out"] = separate.pop("decoder.output_projection.weight")
    assert torch.equal(logits(build_model(settings(), tied)), expected[0])
    assert torch.equal(logits(build_model(settings(share_decoder_input_output_embed=False), separate)), expected[1])
    with pytest.raises(InvalidInputError, match=r"lacks decoder\.output_projection\.weight"):
        build_model(settings(share_decoder_input_output_embed=False), tied)


def test_weights_left_over_missing_and_misshapen_are_named() -> None:
    given = weights()
    given["encoder.layernorm_embedding.weight"] = torch.ones(WIDTH)
    del given["decoder.layers.1.fc2.bias"]
    given["encoder.layers.0.self_attn.q_proj.bias"] = torch.zeros(3)
    with pytest.raises(InvalidInputError) as caught:
        build_model(settings(), given)
    assert str(caught.value).endswith(
        "1 left over (encoder.layernorm_embedding.weight); 1 missing (decoder.layers.1.fc2.bias); "
        "1 misshapen (encoder.layers.0.self_attn.q_proj.bias)"
    )


def test_the_settings_must_fit_the_norms() -> None:
    with pytest.raises(InvalidInputError, match=r"4 missing \(decoder\.layer_norm\.bias"):
        build_model(settings(**PRE_NORM), weights())
    with pytest.raises(InvalidInputError, match=r"4 left over \(decoder\.layer_norm\.bias"):
        build_model(settings(), weights(pre_norm=True))


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_padding_on_the_right_changes_nothing(pre_norm: bool, learned: bool) -> None:
    model = build(pre_norm=pre_norm, learned=learned)
    with torch.no_grad():
        alone = model(input_ids=SOURCE_IDS[:1, :4], decoder_input_ids=TARGET_IDS[:1, :3]).logits[0]
    torch.testing.assert_close(logits(model)[:3], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("embeddings", ["shared", "tied", "separate"])
@pytest.mark.parametrize("learned", [False, True])
def test_a_saved_model_is_the_same_or_cannot_be_saved(
    pre_norm: bool, embeddings: str, learned: bool, tmp_path: Path
) -> None:
    model = build(pre_norm=pre_norm, learned=learned, shared=embeddings == "shared", tied=embeddings == "tied")
    expected = logits(model)
    model.tie_weights()
    assert torch.equal(logits(model), expected)
    if pre_norm and embeddings != "shared":
        with pytest.raises(RuntimeError, match="shared tensors"):
            model.save_pretrained(tmp_path)
        return
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), expected)
    assert loaded.generation_config.num_beams == 5


@pytest.mark.few
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("activation", ["relu", "gelu_accurate"])
@pytest.mark.parametrize("scaled", [False, True])
def test_fsmt_of_transformers_computes_the_same(seed: int, activation: str, scaled: bool) -> None:
    chosen = settings(activation_fn=activation, no_scale_embedding=not scaled)
    model: Any = build_model(chosen, weights(seed=seed))
    names = ["encoder_layers", "encoder_ffn_dim", "encoder_attention_heads", "d_model", "activation_function"]
    names += ["decoder_layers", "decoder_ffn_dim", "decoder_attention_heads", "scale_embedding"]
    same = {name: getattr(model.config, name) for name in names}
    config = FSMTConfig(langs=["fr", "en"], src_vocab_size=SOURCE, tgt_vocab_size=TARGET, **same)
    fsmt: Any = FSMTForConditionalGeneration(config)
    fsmt.eval()
    state = {name: tensor for name, tensor in model.state_dict().items() if "embed_positions" not in name}
    state["model.decoder.output_projection.weight"] = state.pop("lm_head.weight")
    missing, unexpected = fsmt.load_state_dict(state, strict=False)
    assert {name.rpartition("embed_positions.")[2] for name in missing} == {"weight"}  # its own sinusoids
    assert unexpected == ["final_logits_bias"]
    # Rounding of float32 through the layers, relative to logits of this scale.
    expected = logits(fsmt)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    results: list[Any] = [NormAttribution(one).maps(INPUTS).cross for one in (model, fsmt)]
    found, same_found = results
    real = TARGET_IDS.ne(1)  # FSMT has a mask of its own for targets, and no padding there to be told of
    for example, rows in enumerate(real):
        maps, same_maps = found[example][:, rows], same_found[example][:, rows]
        torch.testing.assert_close(maps, same_maps, rtol=0, atol=1e-5 * float(maps.max()))
        assert torch.equal(maps.argmax(-1), same_maps.argmax(-1))

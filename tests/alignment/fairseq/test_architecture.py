"""What settings and weights make of a configuration, and what is refused."""

from typing import Any

import pytest
import torch
from transformers import MarianMTModel, PegasusForConditionalGeneration

from alignment.fairseq.conversion import architecture
from captum_norm import InvalidInputError
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


def test_defaults_of_fairseq() -> None:
    few = {name: value for name, value in settings().items() if "attention_heads" in name}
    config: Any = architecture(few, weights()).config
    assert (config.activation_function, config.scale_embedding, config.max_position_embeddings) == ("relu", True, 1024)


def test_learned_positions_tell_their_number() -> None:
    found = weights(learned=True)
    found["decoder.embed_positions.weight"] = torch.zeros(32, WIDTH)
    config: Any = architecture(settings(max_target_positions=1024), found).config
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

"""Which model of transformers computes what a model of fairseq computes, and with which configuration."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import MarianConfig, MarianMTModel, PegasusConfig, PegasusForConditionalGeneration

from alignment.fairseq.dictionary import BOS, EOS, PAD
from captum_norm import InvalidInputError

TranslationModel = MarianMTModel | PegasusForConditionalGeneration
"""The classes that a checkpoint can become."""

_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "tanh": "tanh",
    "linear": "linear",
}
# Settings that change what is computed in ways that neither class knows; off unless they are set.
_UNKNOWN = (
    "adaptive_input",
    "adaptive_softmax_cutoff",
    "base_layers",
    "char_inputs",
    "cross_self_attention",
    "decoder_layers_to_keep",
    "decoder_xformers_att_config",
    "encoder_layers_to_keep",
    "encoder_xformers_att_config",
    "layernorm_embedding",
    "merge_src_tgt_embed",
    "no_cross_attention",
    "no_decoder_final_norm",
    "no_token_positional_embeddings",
    "quant_noise_pq",
    "quant_noise_scalar",
    "tie_adaptive_weights",
)
_POSITIONS = 1024
"""fairseq's default for the longest source and target."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model of transformers, without weights.

    Attributes:
        model_class: the class.
        config: its configuration.
        tied: whether the output projection is the decoder's embedding.
        shared: whether it is the encoder's embedding too.
    """

    model_class: type[TranslationModel]
    config: MarianConfig | PegasusConfig
    tied: bool
    shared: bool


def architecture(settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Architecture:
    """The architecture of a model of fairseq: the weights decide shapes and ties, the settings the rest.

    Args:
        settings: fairseq's settings, flat.
        weights: the model's weights under fairseq's current names.

    Raises:
        InvalidInputError: no class of transformers computes what the settings ask for, or a setting or weight that
            decides the shape is missing.
    """
    for name in _UNKNOWN:
        if settings.get(name):
            raise _unsupported(f"{name}={settings[name]!r}", "a plain Transformer")
    source, target = weight(weights, "encoder.embed_tokens.weight"), weight(weights, "decoder.embed_tokens.weight")
    width = source.shape[1]
    if target.shape[1] != width:
        raise _unsupported(f"an encoder of width {width} and a decoder of width {target.shape[1]}", "one width")
    before = {side: bool(settings.get(f"{side}_normalize_before")) for side in ("encoder", "decoder")}
    if before["encoder"] != before["decoder"]:
        named = " and ".join(f"{side}_normalize_before={value}" for side, value in before.items())
        raise _unsupported(named, "norms in the same place in both")
    activation = settings.get("activation_fn") or "relu"
    if activation not in _ACTIVATIONS:
        raise _unsupported(f"activation_fn={activation!r}", f"one of {', '.join(_ACTIVATIONS)}")
    tied = _same(weight(weights, "decoder.output_projection.weight"), target)
    shared = tied and _same(source, target)
    common: dict[str, Any] = {
        "d_model": width,
        "activation_function": _ACTIVATIONS[activation],
        "scale_embedding": not settings.get("no_scale_embedding"),
        "max_position_embeddings": min(position_count(side, settings, weights) for side in ("encoder", "decoder")),
        "bos_token_id": BOS,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": EOS,
        "forced_eos_token_id": None,
        **_side("encoder", settings, weights, width),
        **_side("decoder", settings, weights, width),
        **{name: float(settings.get(name) or 0) for name in ("dropout", "attention_dropout", "activation_dropout")},
    }
    # Both classes compute fairseq's layers as they are, and look positions up in tables that can hold any rows.
    # Pegasus knows one vocabulary: the larger part of its code, generation above all, means the target's.
    if before["encoder"]:
        pegasus = PegasusConfig(vocab_size=target.shape[0], tie_word_embeddings=shared, **common)
        return Architecture(PegasusForConditionalGeneration, pegasus, tied, shared)
    marian = MarianConfig(
        vocab_size=source.shape[0],
        decoder_vocab_size=target.shape[0],
        tie_word_embeddings=tied,
        share_encoder_decoder_embeddings=shared,
        **common,
    )
    return Architecture(MarianMTModel, marian, tied, shared)


def position_count(side: str, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
    """How many positions the encoder or decoder knows: as many as it learned, else as many as fairseq allows."""
    learned = weights.get(f"{side}.embed_positions.weight")
    if learned is not None:
        return learned.shape[0] - PAD - 1
    name = {"encoder": "max_source_positions", "decoder": "max_target_positions"}[side]
    return int(settings.get(name) or _POSITIONS)


def weight(weights: Mapping[str, Tensor], name: str) -> Tensor:
    """The weight of that name.

    Raises:
        InvalidInputError: there is none.
    """
    if name not in weights:
        raise InvalidInputError(f"the checkpoint lacks {name}; expected a Transformer of fairseq, encoder and decoder")
    return weights[name]


def _side(side: str, settings: Mapping[str, Any], weights: Mapping[str, Tensor], width: int) -> dict[str, int]:
    """Layers, heads and feed-forward width of the encoder or decoder, under transformers' names."""
    numbers = [int(match[1]) for name in weights if (match := re.match(rf"{side}\.layers\.(\d+)\.", name))]
    heads = settings.get(f"{side}_attention_heads")
    if not heads or width % int(heads):
        found = f"the setting {side}_attention_heads is {heads!r}"
        raise InvalidInputError(
            f"{found}, expected a divisor of the width {width}; no weight tells the number of heads"
        )
    return {
        f"{side}_layers": max(numbers, default=-1) + 1,
        f"{side}_attention_heads": int(heads),
        f"{side}_ffn_dim": weight(weights, f"{side}.layers.0.fc1.weight").shape[0],
    }


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def _unsupported(got: str, expected: str) -> InvalidInputError:
    return InvalidInputError(f"cannot represent a fairseq model with {got}; expected {expected}")

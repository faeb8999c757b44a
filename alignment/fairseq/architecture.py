"""Finds the transformers model class and configuration that are equivalent to a fairseq model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import MarianConfig, MarianMTModel, PegasusConfig, PegasusForConditionalGeneration

from alignment.fairseq.dictionary import BOS, EOS, PAD, SPECIAL
from captum_norm import InvalidInputError
from captum_norm.text.lines import quoted

TranslationModel = MarianMTModel | PegasusForConditionalGeneration
"""The classes that checkpoints are loaded as."""

_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "tanh": "tanh",
    "linear": "linear",
}
# Settings that neither class supports; off by default.
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
_MOST_POSITIONS = 65_536
_POSITIONS = 1024
"""fairseq's default for the longest source and target."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A transformers model without weights.

    Attributes:
        model_class: the class.
        config: its configuration.
        tied: whether output projection and decoder embedding are tied.
        shared: whether the encoder embedding is tied to them, too.
    """

    model_class: type[TranslationModel]
    config: MarianConfig | PegasusConfig
    tied: bool
    shared: bool


def architecture(settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Architecture:
    """The architecture of a fairseq model: shapes and ties from the weights, the rest from the settings.

    Args:
        settings: fairseq's settings, flat.
        weights: the model's weights under fairseq's current names.

    Raises:
        InvalidInputError: the settings have no equivalent in transformers, or a setting or weight that determines a
            shape is missing.
    """
    for name in _UNKNOWN:
        if settings.get(name):
            raise _unsupported(f"{name}={quoted(settings[name])}", "a plain Transformer")
    source, target = (weight(weights, f"{side}.embed_tokens.weight", 2) for side in ("encoder", "decoder"))
    width = source.shape[1]
    if width < 4:
        raise _unsupported(f"embeddings of width {width}", "at least 4")
    rows = min(len(source), len(target))
    if rows < len(SPECIAL):
        raise _unsupported(f"a dictionary of {rows} pieces", f"at least the symbols {' '.join(SPECIAL)}")
    if target.shape[1] != width:
        raise _unsupported(f"an encoder of width {width} and a decoder of width {target.shape[1]}", "one width")
    before = {side: bool(settings.get(f"{side}_normalize_before")) for side in ("encoder", "decoder")}
    if before["encoder"] != before["decoder"]:
        named = " and ".join(f"{side}_normalize_before={value}" for side, value in before.items())
        raise _unsupported(named, "the same in both")
    activation = settings.get("activation_fn") or "relu"
    if not (isinstance(activation, str) and activation in _ACTIVATIONS):
        raise _unsupported(f"activation_fn={quoted(activation)}", f"one of {', '.join(_ACTIVATIONS)}")
    tied = _same(weight(weights, "decoder.output_projection.weight", 2), target)
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
        **{name: _share(settings, name) for name in ("dropout", "attention_dropout", "activation_dropout")},
    }
    # Both classes compute fairseq's layers exactly, and look positions up in tables that can hold any rows.
    # Pegasus has one vocabulary size: most of its code, generation above all, takes it as the target's.
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
    """The number of positions of the encoder or decoder: learned ones, or as many as fairseq allows.

    At most 65,536 for sinusoidal positions, since settings may allow arbitrarily many.

    Raises:
        InvalidInputError: there are none, or the setting is not a number.
    """
    name = f"{side}.embed_positions.weight"
    if name in weights:
        count = len(weight(weights, name, 2)) - PAD - 1
        if count < 1:
            raise InvalidInputError(f"{name} has {count + PAD + 1} rows, expected more than {PAD + 1}")
        return count
    setting = {"encoder": "max_source_positions", "decoder": "max_target_positions"}[side]
    return min(_count(settings, setting) or _POSITIONS, _MOST_POSITIONS)


def weight(weights: Mapping[str, Tensor], name: str, axes: int) -> Tensor:
    """The named weight, checked for its number of axes.

    Raises:
        InvalidInputError: it is missing or has another number of axes.
    """
    if name not in weights:
        raise InvalidInputError(f"the checkpoint lacks {name}; expected a Transformer of fairseq, encoder and decoder")
    found = weights[name]
    if found.dim() != axes or not found.numel():
        raise InvalidInputError(f"{name} has the shape {tuple(found.shape)}, expected {axes} axes")
    return found


def _side(side: str, settings: Mapping[str, Any], weights: Mapping[str, Tensor], width: int) -> dict[str, int]:
    """Layers, heads and feed-forward width of the encoder or decoder, under transformers' names."""
    # Count the layers with weights: if numbers have gaps, weights will be reported as missing and left over.
    numbers = {match[1] for name in weights if (match := re.match(rf"{side}\.layers\.(\d+)\.", name))}
    heads = _count(settings, f"{side}_attention_heads")
    if not heads or width % heads:
        found = f"the setting {side}_attention_heads is {quoted(settings.get(f'{side}_attention_heads'))}"
        raise InvalidInputError(
            f"{found}, expected a divisor of the width {width}; the weights do not tell the number of heads"
        )
    return {
        f"{side}_layers": len(numbers),
        f"{side}_attention_heads": heads,
        f"{side}_ffn_dim": weight(weights, f"{side}.layers.0.fc1.weight", 2).shape[0],
    }


def _count(settings: Mapping[str, Any], name: str) -> int:
    """A setting that is a whole number; 0 if it is not set."""
    value = settings.get(name) or 0
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if number < 0:
        raise InvalidInputError(f"the setting {name} is {quoted(value)}, expected a whole number")
    return number


def _share(settings: Mapping[str, Any], name: str) -> float:
    """A setting from 0 to 1; 0 if it is not set."""
    value = settings.get(name) or 0
    try:
        share = float(value)
    except (TypeError, ValueError, OverflowError):
        share = -1.0
    if not 0 <= share <= 1:
        raise InvalidInputError(f"the setting {name} is {quoted(value)}, expected a number from 0 to 1")
    return share


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def _unsupported(got: str, expected: str) -> InvalidInputError:
    return InvalidInputError(f"cannot represent a fairseq model with {got}; expected {expected}")

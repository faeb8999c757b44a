"""Converts a fairseq model into the transformers model that computes the same."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, MarianConfig, MarianMTModel, PegasusConfig, PegasusForConditionalGeneration

from alignment.fairseq.tokenizer import BOS, EOS, PAD, SPECIAL
from captum_norm import InvalidInputError
from captum_norm.checks import quoted, quoted_name

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
    """A transformers model without weights."""

    model_class: type[TranslationModel]
    config: MarianConfig | PegasusConfig
    tied: bool
    shared: bool


def architecture(settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Architecture:
    """The architecture of a fairseq model: shapes and ties from the weights, the rest from the settings."""
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
        **{
            name: _number(settings, name, float, 1, "a number from 0 to 1")
            for name in ("dropout", "attention_dropout", "activation_dropout")
        },
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
    """The number of positions of the encoder or decoder: learned ones, or as many as fairseq allows."""
    name = f"{side}.embed_positions.weight"
    if name in weights:
        count = len(weight(weights, name, 2)) - PAD - 1
        if count < 1:
            raise InvalidInputError(f"{name} has {count + PAD + 1} rows, expected more than {PAD + 1}")
        return count
    setting = {"encoder": "max_source_positions", "decoder": "max_target_positions"}[side]
    return min(_count(settings, setting) or _POSITIONS, _MOST_POSITIONS)


def weight(weights: Mapping[str, Tensor], name: str, axes: int) -> Tensor:
    """The named weight, checked for its number of axes."""
    if name not in weights:
        raise InvalidInputError(f"the checkpoint lacks {name}; expected a Transformer of fairseq, encoder and decoder")
    tensor = weights[name]
    if tensor.dim() != axes or not tensor.numel():
        raise InvalidInputError(f"{name} has the shape {tuple(tensor.shape)}, expected {axes} axes")
    return tensor


def _side(side: str, settings: Mapping[str, Any], weights: Mapping[str, Tensor], width: int) -> dict[str, int]:
    """Layers, heads and feed-forward width of the encoder or decoder, under transformers' names."""
    # Count the layers with weights: if numbers have gaps, weights will be reported as missing and left over.
    numbers = {match[1] for name in weights if (match := re.match(rf"{side}\.layers\.(\d+)\.", name))}
    heads = _count(settings, f"{side}_attention_heads")
    if not heads or width % heads:
        message = f"the setting {side}_attention_heads is {quoted(settings.get(f'{side}_attention_heads'))}"
        raise InvalidInputError(
            f"{message}, expected a divisor of the width {width}; the weights do not tell the number of heads"
        )
    return {
        f"{side}_layers": len(numbers),
        f"{side}_attention_heads": heads,
        f"{side}_ffn_dim": weight(weights, f"{side}.layers.0.fc1.weight", 2).shape[0],
    }


def _count(settings: Mapping[str, Any], name: str) -> int:
    """A setting that is a whole number; 0 if it is not set."""
    number: int = _number(settings, name, int, math.inf, "a whole number")
    return number


def _number(settings: Mapping[str, Any], name: str, kind: Callable[[Any], Any], most: float, expected: str) -> Any:
    """A setting that is a number from 0; 0 if it is not set."""
    value = settings.get(name) or 0
    try:
        number = kind(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if not 0 <= number <= most:
        raise InvalidInputError(f"the setting {name} is {quoted(value)}, expected {expected}")
    return number


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and bool((first == second).all())


def _unsupported(got: str, expected: str) -> InvalidInputError:
    return InvalidInputError(f"cannot represent a fairseq model with {got}; expected {expected}")


# Counters and tables that fairseq computes, and copies of initial weights that 0.12.2 leaves behind.
_NOT_WEIGHTS = re.compile(
    r"(encoder|decoder)\.(version|embed_positions\.(_float_tensor|weights))"
    r"|encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)"
)
_JOINT_PROJECTION = re.compile(r"(.+_attn)\.in_proj_(weight|bias)")
_OLD_OUTPUT = "decoder.embed_out"
_OUTPUT = "decoder.output_projection.weight"
_SOURCE, _TARGET = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
# Names in transformers that are not fairseq's with the prefix "model.".
_RENAMED = {"lm_head.weight": _OUTPUT, "model.shared.weight": _SOURCE}
_LONGEST_TRANSLATION = 200


def build_model(settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TranslationModel:
    """Build the transformers model that is equivalent to a fairseq model."""
    weights = _current_names(settings, weights)
    plan = architecture(settings, weights)
    for side in ("encoder", "decoder"):
        name, count = f"{side}.embed_positions.weight", position_count(side, settings, weights)
        learned = weights.get(name)
        weights[name] = sinusoidal_positions(count, plan.config.d_model) if learned is None else learned[PAD + 1 :]
    with torch.device("meta"):  # no memory or random numbers for weights that are replaced
        model: Any = plan.model_class(plan.config)  # type: ignore[arg-type]
        _fit(model, weights)
    model.load_state_dict(_parameters(model, weights, plan), assign=True)
    # Marian does not save its position tables because it can compute them; it cannot compute these.
    model._keys_to_ignore_on_save = set()
    if hasattr(model.model, "shared") and not plan.shared:
        # Pegasus files have one vocabulary. With no tied weights declared, save_pretrained refuses.
        model._tied_weights_keys = model.model._tied_weights_keys = None
    model.generation_config = GenerationConfig.from_model_config(plan.config)
    model.generation_config.update(
        num_beams=5,
        early_stopping=True,
        suppress_tokens=[PAD],
        max_length=1 + min(_LONGEST_TRANSLATION, model.model.decoder.embed_positions.num_embeddings),
    )
    translation_model: TranslationModel = model.eval()
    return translation_model


def sinusoidal_positions(count: int, width: int) -> Tensor:
    """The sinusoidal positions of fairseq, (count, width), starting with the first token's row."""
    half = width // 2
    # All in float32, as in fairseq: the model was trained with rounded angles at late positions.
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(PAD + 1, PAD + 1 + count, dtype=torch.float32)[:, None] * frequencies
    return nn.functional.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width % 2))


def _current_names(settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights, without other tensors, under the names of fairseq 0.10 to 0.12."""
    current = dict[str, Tensor]()
    for name, tensor in weights.items():
        joint = _JOINT_PROJECTION.fullmatch(name)
        if _NOT_WEIGHTS.fullmatch(name):
            continue
        if not tensor.is_floating_point():
            raise InvalidInputError(f"{quoted(name)} has the dtype {tensor.dtype}, expected floating point")
        if joint:
            if not tensor.dim() or len(tensor) % 3:
                message = f"{quoted(name)} has the shape {tuple(tensor.shape)}"
                raise InvalidInputError(f"{message}, expected the rows of queries, keys and values")
            parts = zip("qkv", tensor.chunk(3), strict=True)
            current |= {f"{joint[1]}.{letter}_proj.{joint[2]}": part for letter, part in parts}
        else:
            current[_OUTPUT if name == _OLD_OUTPUT else name] = tensor
    if settings.get("share_decoder_input_output_embed") or settings.get("share_all_embeddings"):
        current.setdefault(_OUTPUT, weight(current, _TARGET, 2))
    return current


def _fit(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Resize tables whose lengths the configuration cannot express."""
    encoder = model.model.encoder
    rows, width = weights[_SOURCE].shape
    encoder.embed_tokens = nn.Embedding(rows, width, PAD)
    if hasattr(model.model, "shared"):
        # These are Pegasus's input embeddings, but the encoder uses its own.
        model.model.shared = encoder.embed_tokens
    for side, table in (("encoder", encoder.embed_positions), ("decoder", model.model.decoder.embed_positions)):
        shape = weights[f"{side}.embed_positions.weight"].shape
        table.num_embeddings = shape[0]
        table.weight = nn.Parameter(torch.empty(shape), requires_grad=False)


def _parameters(model: TranslationModel, weights: Mapping[str, Tensor], plan: Architecture) -> dict[str, Tensor]:
    """The model's state dict; tied names share a parameter."""
    buffers = {name: torch.zeros(buffer.shape) for name, buffer in model.named_buffers()}
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name not in buffers}
    origins = {name: _RENAMED.get(name, name.removeprefix("model.")) for name in shapes}
    _check(weights, {origin: shapes[name] for name, origin in origins.items()})
    tie = {_OUTPUT: _TARGET} if plan.tied else {}
    tie |= {_OUTPUT: _SOURCE, _TARGET: _SOURCE} if plan.shared else {}
    parameters = {
        origin: nn.Parameter(tensor.to(torch.float32, copy=True))
        for origin, tensor in weights.items()
        if origin not in tie
    }
    return buffers | {name: parameters[tie.get(origin, origin)] for name, origin in origins.items()}


def _check(weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Refuse weights that are left over, missing or misshapen."""
    problems = {
        "left over": sorted(weights.keys() - shapes.keys()),
        "missing": sorted(shapes.keys() - weights.keys()),
        "misshapen": sorted(name for name in shapes.keys() & weights.keys() if weights[name].shape != shapes[name]),
    }
    told = [
        f"{len(names)} {what} ({', '.join(map(quoted_name, names[:5]))}{', …' * (len(names) > 5)})"
        for what, names in problems.items()
        if names
    ]
    if told:
        message = "the checkpoint's weights are not those of a plain Transformer of its settings"
        raise InvalidInputError(f"{message}: {'; '.join(told)}")

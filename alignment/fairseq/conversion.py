"""Converts fairseq's weights into a transformers model."""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from alignment.fairseq.architecture import Architecture, TranslationModel, architecture, position_count, weight
from alignment.fairseq.dictionary import PAD
from captum_norm import InvalidInputError
from captum_norm.text.lines import named, quoted

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
    """Build the transformers model that is equivalent to a fairseq model.

    It is in ``eval()`` mode and float32. Positions count from the left edge, so pad on the right. ``generate()`` has
    the defaults of ``fairseq-generate``: a beam of 5, at most 200 pieces. The encoder multiplies the embeddings of
    ``input_ids`` by √D, but not ``inputs_embeds``.

    Args:
        settings: fairseq's settings, flat.
        weights: fairseq's weights, of any floating-point dtype; they are copied.

    Raises:
        InvalidInputError: there is no equivalent in transformers, or weights are missing, left over or misshapen.
    """
    weights = _current_names(settings, weights)
    found = architecture(settings, weights)
    weights |= {
        f"{side}.embed_positions.weight": _positions(side, settings, weights, found.config.d_model)
        for side in ("encoder", "decoder")
    }
    with torch.device("meta"):  # no memory or random numbers for weights that are replaced
        model: Any = found.model_class(found.config)  # type: ignore[arg-type]
        _fit(model, weights)
    model.load_state_dict(_parameters(model, weights, found), assign=True)
    # Marian does not save its position tables because it can compute them; it cannot compute these.
    model._keys_to_ignore_on_save = set()
    if hasattr(model.model, "shared") and not found.shared:
        # Pegasus files have one vocabulary. With no tied weights declared, save_pretrained refuses.
        model._tied_weights_keys = model.model._tied_weights_keys = None
    model.generation_config = GenerationConfig.from_model_config(found.config)
    model.generation_config.update(
        num_beams=5,
        early_stopping=True,
        suppress_tokens=[PAD],
        max_length=1 + min(_LONGEST_TRANSLATION, model.model.decoder.embed_positions.num_embeddings),
    )
    translation_model: TranslationModel = model.eval()
    return translation_model


def sinusoidal_positions(count: int, width: int) -> Tensor:
    """The sinusoidal positions of fairseq, (count, width), starting with the first token's row.

    >>> sinusoidal_positions(1, 4)  # sin 2, sin 0.0002, cos 2, cos 0.0002
    tensor([[ 9.0930e-01,  2.0000e-04, -4.1615e-01,  1.0000e+00]])
    """
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
                found = f"{quoted(name)} has the shape {tuple(tensor.shape)}"
                raise InvalidInputError(f"{found}, expected the rows of queries, keys and values")
            parts = zip("qkv", tensor.chunk(3), strict=True)
            current |= {f"{joint[1]}.{letter}_proj.{joint[2]}": part for letter, part in parts}
        else:
            current[_OUTPUT if name == _OLD_OUTPUT else name] = tensor
    if settings.get("share_decoder_input_output_embed") or settings.get("share_all_embeddings"):
        current.setdefault(_OUTPUT, weight(current, _TARGET, 2))
    return current


def _positions(side: str, settings: Mapping[str, Any], weights: Mapping[str, Tensor], width: int) -> Tensor:
    learned = weights.get(f"{side}.embed_positions.weight")
    if learned is not None:
        return learned[PAD + 1 :]
    return sinusoidal_positions(position_count(side, settings, weights), width)


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


def _parameters(model: TranslationModel, weights: Mapping[str, Tensor], found: Architecture) -> dict[str, Tensor]:
    """The model's state dict; tied names share a parameter."""
    buffers = {name: torch.zeros(buffer.shape) for name, buffer in model.named_buffers()}
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name not in buffers}
    origins = {name: _RENAMED.get(name, name.removeprefix("model.")) for name in shapes}
    _check(weights, {origin: shapes[name] for name, origin in origins.items()})
    tie = {_OUTPUT: _TARGET} if found.tied else {}
    tie |= {_OUTPUT: _SOURCE, _TARGET: _SOURCE} if found.shared else {}
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
    told = "; ".join(f"{len(names)} {what} ({_some(names)})" for what, names in problems.items() if names)
    if told:
        raise InvalidInputError(
            f"the checkpoint's weights are not those of a plain Transformer of its settings: {told}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(map(named, names[:5])) + ", …" * (len(names) > 5)

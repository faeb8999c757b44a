"""Tiny random encoder–decoder models, where a reader of their code finds the parts, and the direct way through them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.classifiers import randomized
from tests.families.family import TEXT, new
from tests.oracle import Layer, eager, plain_layer, watched
from tests.tiny import halves

VOCABULARY = 40
HEADS = 4
LAYERS = 2
BART = halves(LAYERS, LAYERS, 32, HEADS, 48) | {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
BART |= {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
FSMT: dict[str, Any] = {key: value for key, value in BART.items() if key != "vocab_size"} | {
    "langs": ["en", "de"],
    "src_vocab_size": VOCABULARY,
    "tgt_vocab_size": VOCABULARY,
}
MELS, FRAMES = 20, 18
PATCH = 12
"""Pixels of a patch of Pix2Struct."""
WHISPER = {key: value for key, value in BART.items() if key != "max_position_embeddings"}
WHISPER |= {"max_source_positions": FRAMES // 2, "max_target_positions": 32, "num_mel_bins": MELS, "bos_token_id": 2}
T5: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "num_layers": LAYERS, "num_heads": HEADS, "d_ff": 48}
T5 |= {"d_kv": 8, "pad_token_id": 1, "decoder_start_token_id": 1}
SWITCH = T5 | {"num_decoder_layers": LAYERS, "num_experts": 4, "experts_implementation": "eager"}
SWITCH |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}


@dataclass(frozen=True)
class Parts:
    """One stack of attention layers as in ``Family``, but for the module and end where the residual stream passes."""

    residual: tuple[str, str]
    value: str
    projection: str
    final_norm: str | None = None


@dataclass(frozen=True)
class EncoderDecoder:
    """One family, as in ``Family``.

    Attributes:
        features: the argument with the features that the encoder reads rather than token ids: of a sound, or patches.
        queries_first: whether layers receive and return (Q, B, D).
    """

    build: Callable[[], nn.Module]
    stacks: dict[str, Parts]
    scopes: tuple[Any, ...] = ("attn", "attn_res", "attn_res_ln", "atb")
    positions: str = "learned"
    special: tuple[str, ...] = ()
    single: bool = False
    features: str | None = None
    queries_first: bool = False
    narrow: bool = False

    @property
    def layout(self) -> str:
        """How its layers are arranged."""
        return "post-norm" if "attn_res_ln" in self.scopes else "pre-norm"


def _parts(
    layer: str,
    attention: str,
    value: str,
    projection: str,
    norm: str | None = None,
    residual: tuple[str, str] = ("", "input"),
) -> Parts:
    """Of names inside a layer; the residual stream passes where its name and this one say."""
    name = f"{layer}.{attention}"
    final_norm = None if norm is None else f"{layer}.{norm}"
    return Parts((layer + residual[0], residual[1]), f"{name}.{value}", f"{name}.{projection}", final_norm)


def _bart_parts(*, post_norm: bool, cross: str = "encoder_attn") -> dict[str, Parts]:
    def parts(half: str, attention: str, residual: tuple[str, str] = ("", "input")) -> Parts:
        norm = f"{attention}_layer_norm" if post_norm else None
        return _parts(f"model.{half}.layers.{{}}", attention, "v_proj", "out_proj", norm, residual)

    before_cross = (".self_attn_layer_norm", "output") if post_norm else (f".{cross}_layer_norm", "input")
    return {
        "encoder": parts("encoder", "self_attn"),
        "decoder": parts("decoder", "self_attn"),
        "cross": parts("decoder", cross, before_cross),
    }


POST, PRE = _bart_parts(post_norm=True), _bart_parts(post_norm=False)
T5_PARTS = {
    "encoder": _parts("encoder.block.{}.layer.0", "SelfAttention", "v", "o"),
    "decoder": _parts("decoder.block.{}.layer.0", "SelfAttention", "v", "o"),
    "cross": _parts("decoder.block.{}.layer.1", "EncDecAttention", "v", "o"),
}
PIX2STRUCT = {
    "encoder": _parts("encoder.encoder.layer.{}", "attention", "value", "output"),
    "decoder": _parts("decoder.layer.{}.self_attention", "attention", "value", "output"),
    "cross": _parts("decoder.layer.{}.encoder_decoder_attention", "attention", "value", "output"),
}
PRE_SCOPES = ("attn", "attn_res", "atb")
RELATIVE: dict[str, Any] = {"stacks": T5_PARTS, "scopes": PRE_SCOPES, "positions": "relative", "single": True}


def _bert_parts() -> dict[str, Parts]:
    def parts(half: str, attention: str, *residual: tuple[str, str]) -> Parts:
        norm = f"{attention}.output.LayerNorm"
        return _parts(f"{half}.encoder.layer.{{}}", attention, "self.value", "output.dense", norm, *residual)

    return {
        "encoder": parts("encoder", "attention"),
        "decoder": parts("decoder.bert", "attention"),
        "cross": parts("decoder.bert", "crossattention", (".attention.output.LayerNorm", "output")),
    }


def _berts() -> nn.Module:
    decoder = hf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    config = hf.EncoderDecoderConfig.from_encoder_decoder_configs(hf.BertConfig(**TEXT), decoder)
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    return hf.EncoderDecoderModel(config)


def _pix2struct() -> nn.Module:
    heads: dict[str, Any] = {"hidden_size": 32, "d_kv": 8, "d_ff": 48}
    text = heads | {"vocab_size": VOCABULARY, "num_layers": LAYERS, "num_heads": HEADS, "is_decoder": True}
    vision = heads | {"patch_embed_hidden_size": PATCH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    return hf.Pix2StructForConditionalGeneration(
        hf.Pix2StructConfig(text_config=text | {"decoder_start_token_id": 1}, vision_config=vision | {"seq_len": 16})
    )


ENCODER_DECODERS = {
    "marian": EncoderDecoder(new("MarianMTModel", **BART), POST, positions="sinusoidal"),
    "fsmt": EncoderDecoder(
        new("FSMTForConditionalGeneration", **FSMT), POST, positions="sinusoidal", queries_first=True, narrow=True
    ),
    "bart": EncoderDecoder(new("BartForConditionalGeneration", **BART), POST),
    "plbart": EncoderDecoder(new("PLBartForConditionalGeneration", **BART), POST),
    "mvp": EncoderDecoder(new("MvpForConditionalGeneration", **BART), POST),
    "blenderbot-small": EncoderDecoder(new("BlenderbotSmallForConditionalGeneration", **BART), POST),
    "blenderbot": EncoderDecoder(new("BlenderbotForConditionalGeneration", **BART), PRE, PRE_SCOPES),
    "whisper": EncoderDecoder(
        new("WhisperForConditionalGeneration", **WHISPER), PRE, PRE_SCOPES, features="input_features"
    ),
    "nllb-moe": EncoderDecoder(
        new("NllbMoeForConditionalGeneration", **BART, num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2),
        _bart_parts(post_norm=False, cross="cross_attention"),
        PRE_SCOPES,
        positions="sinusoidal",
        special=("mixture of experts",),
    ),
    "mbart": EncoderDecoder(new("MBartForConditionalGeneration", **BART), PRE, PRE_SCOPES),
    "m2m100": EncoderDecoder(new("M2M100ForConditionalGeneration", **BART), PRE, PRE_SCOPES, positions="sinusoidal"),
    "pegasus": EncoderDecoder(new("PegasusForConditionalGeneration", **BART), PRE, PRE_SCOPES, positions="sinusoidal"),
    "t5": EncoderDecoder(new("T5ForConditionalGeneration", **T5), **RELATIVE),
    "mt5": EncoderDecoder(new("MT5ForConditionalGeneration", **T5), **RELATIVE),
    "umt5": EncoderDecoder(new("UMT5ForConditionalGeneration", **T5), **RELATIVE),
    "bert2bert": EncoderDecoder(_berts, _bert_parts()),
    "pix2struct": EncoderDecoder(
        _pix2struct,
        PIX2STRUCT,
        PRE_SCOPES,
        positions="rows and columns, relative",
        single=True,
        features="flattened_patches",
    ),
    "switch-transformers": EncoderDecoder(
        new("SwitchTransformersForConditionalGeneration", **SWITCH), **RELATIVE, special=("mixture of experts",)
    ),
}


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose every parameter, biases and gains included, is away from its default."""
    torch.manual_seed(seed)
    return randomized(ENCODER_DECODERS[name].build(), seed, dtype, 0.1)


def inputs(
    name: str, seed: int = 0, batch: int = 2, source: int = 9, target: int = 6, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Ids for both sides, or the features of a sound and ids."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (batch, length), generator=generator)

    features = ENCODER_DECODERS[name].features
    if features == "flattened_patches":
        patches = torch.randn(batch, source, 2 + PATCH, generator=generator).to(dtype)
        # Where each patch stands in the image: its row and column.
        patches[..., 0], patches[..., 1] = torch.arange(source) // 3 + 1, torch.arange(source) % 3 + 1
        return {features: patches, "decoder_input_ids": ids(target)}
    if features is not None:
        sound = torch.randn(batch, MELS, FRAMES, generator=generator).to(dtype)
        return {features: sound, "decoder_input_ids": ids(target)}
    return {"input_ids": ids(source), "decoder_input_ids": ids(target)}


def masked_inputs(source: int = 6, target: int = 7) -> dict[str, Tensor]:
    """Ids for both sides; the second source ends two positions before the first."""
    found = inputs("bart", 0, 2, source, target)
    mask = torch.ones_like(found["input_ids"])
    mask[1, -2:] = 0
    return found | {"attention_mask": mask}


def oracle(name: str, model: Any, arguments: dict[str, Tensor]) -> dict[str, list[Layer]]:
    """Each stack's layers in float64, by the model's own eager attention."""
    family, places = ENCODER_DECODERS[name], {}
    for stack, parts in family.stacks.items():
        for index in range(LAYERS):
            places[stack, index, "residual"] = parts.residual[0].format(index), parts.residual[1]
            places[stack, index, "value"] = parts.value.format(index), "output"
    with watched(model, places) as notes, eager(model):
        output = model(**arguments, output_attentions=True, use_cache=False)
    seen = {key: tensor.transpose(0, 1) if family.queries_first else tensor for key, (tensor,) in notes.items()}
    attentions = {
        "encoder": output.encoder_attentions,
        "decoder": output.decoder_attentions,
        "cross": output.cross_attentions,
    }

    def layer(stack: str, index: int) -> Layer:
        parts = family.stacks[stack]
        projection = model.get_submodule(parts.projection.format(index))
        norm = None if parts.final_norm is None else model.get_submodule(parts.final_norm.format(index))
        values = seen[stack, index, "value"].unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return plain_layer(attentions[stack][index], values, projection, seen[stack, index, "residual"], norm)

    return {stack: [layer(stack, index) for index in range(LAYERS)] for stack in family.stacks}

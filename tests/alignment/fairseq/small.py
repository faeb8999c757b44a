"""A small model in fairseq's terms, made without fairseq."""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WIDTH, SOURCE, TARGET = 8, 16, 24
FFN = {"encoder": 12, "decoder": 20}
LAYERS = {"encoder": 1, "decoder": 2}


def settings(**changes: Any) -> dict[str, Any]:
    """The settings of a post-norm model with separate dictionaries, and whatever is changed in them."""
    return {
        "source_lang": "fr",
        "target_lang": "en",
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 4,
        "encoder_normalize_before": False,
        "decoder_normalize_before": False,
        "max_source_positions": 40,
        "max_target_positions": 40,
        "share_decoder_input_output_embed": True,
    } | changes


def weights(
    *, pre_norm: bool = False, learned: bool = False, shared: bool = False, tied: bool = True, seed: int = 0
) -> dict[str, Tensor]:
    """Random weights under fairseq's names."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, around: float = 0.0) -> Tensor:
        return around + 0.3 * torch.randn(*shape, generator=generator)

    source = draw(TARGET if shared else SOURCE, WIDTH)
    target = source if shared else draw(TARGET, WIDTH)
    found = {
        "encoder.version": torch.tensor([3.0]),
        "encoder.embed_tokens.weight": source,
        "decoder.embed_tokens.weight": target,
        "decoder.output_projection.weight": target if tied or shared else draw(TARGET, WIDTH),
    }
    for side, layers in LAYERS.items():
        attentions = ("self_attn", "encoder_attn") if side == "decoder" else ("self_attn",)
        norms = [f"layers.{i}.{name}_layer_norm" for i in range(layers) for name in (*attentions, "final")]
        for name in [*norms, "layer_norm"] if pre_norm else norms:
            found[f"{side}.{name}.weight"], found[f"{side}.{name}.bias"] = draw(WIDTH, around=1.0), draw(WIDTH)
        for i in range(layers):
            shapes = {
                f"{name}.{letter}_proj": (WIDTH, WIDTH) for name in attentions for letter in ("q", "k", "v", "out")
            }
            shapes |= {"fc1": (FFN[side], WIDTH), "fc2": (WIDTH, FFN[side])}
            for name, shape in shapes.items():
                found[f"{side}.layers.{i}.{name}.weight"] = draw(*shape)
                found[f"{side}.layers.{i}.{name}.bias"] = draw(shape[0])
        if learned:
            found[f"{side}.embed_positions.weight"] = draw(40 + 2, WIDTH)
    return found


def write_dictionary(path: Path, size: int) -> None:
    """A dictionary for an embedding of that many rows."""
    path.write_text("".join(f"word{index} {100 - index}\n" for index in range(4, size)), encoding="utf-8")


def save_checkpoint(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint with its dictionaries beside it."""
    state = {"model": weights(seed=seed), "args": argparse.Namespace(**settings(**changes))}
    torch.save(state, folder / "model.pt")
    write_dictionary(folder / "dict.fr.txt", SOURCE)
    write_dictionary(folder / "dict.en.txt", TARGET)
    return folder

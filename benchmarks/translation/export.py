"""A fairseq checkpoint made small: half-precision weights, and the settings that say how they are used.

```console
$ python -m benchmarks.translation.export --checkpoint build/fr-en/checkpoint_last.pt --out fr-en.safetensors
```

Tensors keep fairseq's names. Settings are text in the file's metadata. The optimizer's state and the paths of the
machine that trained the model stay behind.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SETTINGS = (
    "arch",
    "source_lang",
    "target_lang",
    "seed",
    "encoder_layers",
    "decoder_layers",
    "encoder_embed_dim",
    "decoder_embed_dim",
    "encoder_ffn_embed_dim",
    "decoder_ffn_embed_dim",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_normalize_before",
    "decoder_normalize_before",
    "encoder_learned_pos",
    "decoder_learned_pos",
    "activation_fn",
    "no_scale_embedding",
    "share_all_embeddings",
)
# Counters and markers that fairseq makes itself.
NOT_WEIGHTS = ("version", "_float_tensor")


def export(checkpoint: Path, out: Path) -> None:
    """Write the weights and settings of a checkpoint; of a tied weight the other names are noted in the metadata."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        state: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True)
    settings = vars(state["cfg"]["model"])
    metadata = {name: str(settings[name]) for name in SETTINGS}
    weights, seen = dict[str, torch.Tensor](), dict[int, str]()
    metadata["updates"] = str(state["optimizer_history"][-1]["num_updates"])
    for name, tensor in state["model"].items():
        if name.endswith(NOT_WEIGHTS):
            continue
        if tensor.data_ptr() in seen:
            metadata[f"tied.{name}"] = seen[tensor.data_ptr()]
            continue
        seen[tensor.data_ptr()] = name
        weights[name] = tensor.half().contiguous()
    partial = out.with_suffix(".partial")
    save_file(weights, partial, metadata)
    partial.replace(out)


def main() -> None:
    """Export one checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="a .pt file of fairseq-train")
    parser.add_argument("--out", type=Path, required=True, help="the .safetensors file to write")
    arguments = parser.parse_args()
    export(arguments.checkpoint, arguments.out)


if __name__ == "__main__":
    main()

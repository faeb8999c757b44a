"""One translation model, trained by fairseq on CPUs.

```console
$ python -m benchmarks.translation.train --data build/translation --out build/translation/fr-en --source fr --target en
```

An interrupted run resumes from its last checkpoint.
"""

import argparse
import os
import runpy
import shlex
import sys
from pathlib import Path

import torch

# What all models share; the data, the direction and the size are arguments.
RECIPE = shlex.split("""
    --task translation --arch transformer --share-all-embeddings
    --encoder-attention-heads 4 --decoder-attention-heads 4
    --activation-fn relu --dropout 0.1 --attention-dropout 0.0 --activation-dropout 0.0
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --optimizer adam --adam-betas (0.9,0.98) --weight-decay 0.0 --clip-norm 1.0
    --lr 0.001 --lr-scheduler inverse_sqrt --warmup-updates 800 --warmup-init-lr 1e-07
    --update-freq 1 --required-batch-size-multiple 1
""")

HOUSEKEEPING = shlex.split("""
    --cpu --num-workers 1 --log-format simple --log-interval 50 --no-epoch-checkpoints
    --save-interval-updates 250 --validate-interval-updates 250 --keep-interval-updates -1
""")


def main() -> None:
    """Train one direction; the log of losses goes to ``train.log`` beside the checkpoints."""
    arguments, others = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    # float32 matrices are multiplied in bfloat16 and summed in float32: much faster on CPUs that can do it.
    torch.set_float32_matmul_precision("medium")
    torch.set_flush_denormal(True)
    # On sentences, plain attention trains a third faster on a CPU than the fused kernel, most of all backwards.
    torch.backends.cuda.enable_flash_sdp(False)  # also governs the kernel for CPUs
    # fairseq keeps objects beside the tensors in its checkpoints; those that it goes on from are its own.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    command = ["fairseq-train", str(arguments.data / "binary")]
    command += [f"--source-lang={arguments.source}", f"--target-lang={arguments.target}"]
    for part in ("encoder", "decoder"):
        command += [f"--{part}-layers={arguments.layers}", f"--{part}-embed-dim={arguments.width}"]
        command += [f"--{part}-ffn-embed-dim={4 * arguments.width}"]
    command += [f"--seed={arguments.seed}", f"--max-update={arguments.updates}", f"--max-tokens={arguments.batch}"]
    command += [f"--save-dir={arguments.out}", f"--log-file={arguments.out / 'train.log'}"]
    sys.argv = [*command, *RECIPE, *HOUSEKEEPING, *others]
    runpy.run_module("fairseq_cli.train", run_name="__main__", alter_sys=False)


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    epilog = "Other options are fairseq-train's and replace those of the recipe."
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0], epilog=epilog)
    parser.add_argument("--data", type=Path, required=True, help="what benchmarks.translation.prepare wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the log")
    parser.add_argument("--source", required=True, help="en or fr; source of a joint model")
    parser.add_argument("--target", required=True, help="fr or en; target of a joint model")
    parser.add_argument("--updates", type=int, default=4000)
    parser.add_argument("--layers", type=int, default=3, help="of the encoder, and as many of the decoder")
    parser.add_argument("--width", type=int, default=256, help="of the model; feed-forward: 4 times")
    parser.add_argument("--batch", type=int, default=4096, help="pieces on the longer side of a batch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_known_args()


if __name__ == "__main__":
    main()

"""Small models of real fairseq: checkpoints in its formats, and what it computes with them.

Run by an interpreter that has fairseq, ``make_reference.py OUT``, it writes for each case the checkpoint
``OUT/CASE.pt``, the dictionaries ``OUT/CASE/dict.{fr,en}.txt`` and the arrays ``OUT/CASE.npz``. With a checkpoint,
``make_reference.py OUT NAME.pt``, it writes that one's arrays, ``OUT/NAME.npz``.
"""

import os
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

PAD, EOS = 1, 2
SOURCE_SYMBOLS, TARGET_SYMBOLS = 12, 20
"""Numbers of symbols of separate dictionaries, with the special ones but before padding to a multiple of 8."""


@dataclass(frozen=True)
class Case:
    """One model and the form of its checkpoint.

    Attributes:
        pre_norm: norms before the sublayers.
        learned: learned positions.
        embeddings: ``shared`` by source, target and output; ``tied``: target and output; or all ``separate``.
        form: of the checkpoint: ``namespace`` (0.12), ``mapping`` (hydra), ``omegaconf`` (0.10), ``args`` (0.9).
        activation: of the feed-forward network.
        scaled: whether embeddings are multiplied by √D.
        half: whether the checkpoint is in half precision.
        longest_target: positions of the decoder; the encoder has 30.
    """

    pre_norm: bool
    learned: bool
    embeddings: str
    form: str = "namespace"
    activation: str = "relu"
    scaled: bool = True
    half: bool = False
    longest_target: int = 30

    @property
    def name(self) -> str:
        """A short name."""
        return f"{'pre' if self.pre_norm else 'post'}-{'learned' if self.learned else 'sinusoidal'}-{self.embeddings}"

    @property
    def options(self) -> list[str]:
        """The options of fairseq-train."""
        options = ["--arch=transformer", "--source-lang=fr", "--target-lang=en", f"--activation-fn={self.activation}"]
        options += ["--encoder-layers=2", "--encoder-attention-heads=4", "--encoder-ffn-embed-dim=24"]
        options += ["--decoder-layers=3", "--decoder-attention-heads=2", "--decoder-ffn-embed-dim=40"]
        options += ["--encoder-embed-dim=16", "--decoder-embed-dim=16"]
        options += ["--max-source-positions=30", f"--max-target-positions={self.longest_target}"]
        options += ["--share-all-embeddings"] * (self.embeddings == "shared")
        options += ["--share-decoder-input-output-embed"] * (self.embeddings == "tied")
        options += ["--encoder-normalize-before", "--decoder-normalize-before"] * self.pre_norm
        options += ["--encoder-learned-pos", "--decoder-learned-pos"] * self.learned
        return options + ["--no-scale-embedding"] * (not self.scaled) + ["--cpu", "--optimizer=adam"]


VARIANTS: dict[tuple[bool, bool, str], dict[str, Any]] = {
    (False, False, "shared"): {"half": True},
    (False, False, "tied"): {"form": "args", "activation": "gelu_accurate"},
    (False, False, "separate"): {"form": "mapping", "scaled": False},
    (False, True, "shared"): {"form": "omegaconf", "activation": "gelu"},
    (False, True, "tied"): {"longest_target": 20},
    (False, True, "separate"): {"form": "args"},
    (True, False, "shared"): {"form": "args", "activation": "gelu"},
    (True, False, "tied"): {},
    (True, False, "separate"): {"activation": "gelu_fast"},
    (True, True, "shared"): {"form": "mapping", "activation": "tanh"},
    (True, True, "tied"): {"form": "omegaconf", "scaled": False},
    (True, True, "separate"): {"activation": "linear", "half": True},
}
CASES = [Case(*key, **more) for key, more in VARIANTS.items()]


def batch() -> tuple[Tensor, Tensor]:
    """Source ids, padded on the left as fairseq does, and the target ids that the decoder reads; (3, 7), (3, 6)."""
    sources = [[4, 9, 5, 11, 6, 7, EOS], [8, 3, 10, EOS], [7, EOS]]
    targets = [[EOS, 6, 4], [EOS, 19, 5, 12, 9, 4], [EOS, 3, 15, 8]]
    return (
        torch.tensor([[PAD] * (7 - len(ids)) + ids for ids in sources]),
        torch.tensor([ids + [PAD] * (6 - len(ids)) for ids in targets]),
    )


def make(case: Case, seed: int, out: Path) -> None:
    """Write the checkpoint, the dictionaries and the reference of one case."""
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.trainer import Trainer

    data, path = out / case.name, out / f"{case.name}.pt"
    _write_dictionaries(data, joint=case.embeddings == "shared")
    arguments = options.parse_args_and_arch(options.get_training_parser(), [str(data), *case.options])
    config = convert_namespace_to_omegaconf(arguments)
    task = tasks.setup_task(config.task)
    torch.manual_seed(seed)
    model = task.build_model(config.model)
    _randomize(model)
    trainer = Trainer(config, task, model, task.build_criterion(config.criterion))
    trainer.consolidate_optimizer()
    torch.save(_formed(trainer.state_dict(), case, arguments), path, _use_new_zipfile_serialization=case.form != "args")
    # The reference comes from the file: fairseq can read what is written here.
    write_reference(path, out)


def write_reference(path: Path, out: Path) -> None:
    """Write what fairseq computes with a checkpoint."""
    from fairseq import checkpoint_utils

    [loaded], _ = checkpoint_utils.load_model_ensemble([str(path)])
    arrays: dict[str, Any] = _reference(loaded.eval())
    np.savez(out / f"{path.stem}.npz", **arrays)


def _write_dictionaries(data: Path, *, joint: bool) -> None:
    from fairseq.data import Dictionary

    data.mkdir()
    for language, size in (("fr", TARGET_SYMBOLS if joint else SOURCE_SYMBOLS), ("en", TARGET_SYMBOLS)):
        dictionary = Dictionary()
        for index in range(len(dictionary), size):
            dictionary.add_symbol(f"word{index}", n=100 - index)
        dictionary.finalize()
        dictionary.save(str(data / f"dict.{language}.txt"))


def _randomize(model: torch.nn.Module) -> None:
    """Biases and norms away from their zeros and ones; the rest as fairseq draws it."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.3)


def _formed(state: dict[str, Any], case: Case, arguments: Namespace) -> dict[str, Any]:
    """A state of fairseq 0.12 in the form that is asked for."""
    from fairseq.meters import AverageMeter
    from omegaconf import OmegaConf

    weights = state["model"]
    if case.half:
        weights = state["model"] = {name: tensor.half() for name, tensor in weights.items()}
    if case.form == "mapping":
        state["cfg"]["model"] = vars(state["cfg"]["model"])
    if case.form == "omegaconf":
        state["cfg"] = OmegaConf.create(state["cfg"], flags={"allow_objects": True})
    if case.form == "args":
        del state["cfg"]
        state["args"], state["extra_state"]["train_meters"] = arguments, {"train_loss": AverageMeter()}
        output = weights.pop("decoder.output_projection.weight")
        if case.embeddings == "separate":
            weights["decoder.embed_out"] = output
        for side in ("encoder", "decoder"):
            if not case.learned:
                weights[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
    return state


@torch.no_grad()
def _reference(model: Any) -> dict[str, Any]:
    """Encoder output (B, S, D), logits (B, T, V) and cross-attention (B, L, H, T, S) of the batch."""
    source, target = batch()
    model.float()
    attention: list[Tensor] = []
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(_with_head_weights, with_kwargs=True)
        layer.register_forward_hook(lambda _module, _inputs, output: attention.append(output[1]))
    encoded = model.encoder(source, source.ne(PAD).sum(1))
    logits, _ = model.decoder(target, encoder_out=encoded)
    return {
        "encoder": encoded["encoder_out"][0].transpose(0, 1).numpy(),
        "logits": logits.numpy(),
        "cross": torch.stack(attention).permute(2, 0, 1, 3, 4).numpy(),
    }


def _with_head_weights(_module: object, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return inputs, options | {"need_attn": True, "need_head_weights": True}


def main() -> None:
    """Make all cases, or the reference of the checkpoints given."""
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # fairseq loads its own files without saying weights_only
    out, *checkpoints = map(Path, sys.argv[1:])
    for path in checkpoints:
        write_reference(path, out)
    for seed, case in enumerate(() if checkpoints else CASES):
        make(case, seed, out)


if __name__ == "__main__":
    main()

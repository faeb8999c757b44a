"""RelP beside the authors' released code, on a GPT-2 of random weights: ``python -m benchmarks.relp FOLDER``.

FOLDER is a copy of https://github.com/FarnoushRJ/RelP, whose TransformerLens is imported from there; it needs beartype
before 0.15, better_abc, datasets, einops, fancy_einsum, jaxtyping, typeguard and wandb. Both compute
⟨a(B) − a(A), ∂m/∂a⟩ of residual streams, heads and feed-forward networks for a difference of two logits, by the rules
that are the code's default. (The authors' notebook turns these on only when the model has chosen its activations.)
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from captum_norm import ComponentAttribution, Difference, RelP

TARGET, RIVAL = 5, 9


def released(folder: Path, model: GPT2LMHeadModel, ids: Tensor, other: Tensor) -> dict[str, Tensor]:
    """Compute the scores by the authors' code: (B, L, ..., S) by kind."""
    sys.path.insert(0, str(folder / "TransformerLens"))
    vars(sys.modules["transformers"])["TRANSFORMERS_CACHE"] = ""  # which it looks up in older versions
    lens: Any = import_module("transformer_lens")
    config = model.config
    made = lens.HookedTransformerConfig(
        n_layers=config.n_layer,
        d_model=config.n_embd,
        n_ctx=config.n_positions,
        d_head=config.n_embd // config.n_head,
        n_heads=config.n_head,
        d_mlp=4 * config.n_embd,
        d_vocab=config.vocab_size,
        act_fn="gelu_new",
        eps=config.layer_norm_epsilon,
        normalization_type="LN",
        dtype=torch.float64,
        use_lrp=True,
        device="cpu",
    )
    convert = import_module("transformer_lens.pretrained.weight_conversions.gpt2").convert_gpt2_weights
    theirs = lens.HookedTransformer(made)
    theirs.load_state_dict(convert(model, made), strict=False)
    names = {"residual": "hook_resid_pre", "heads": "attn.hook_z", "feed_forward": "hook_mlp_out"}
    places = {kind: [f"blocks.{layer}.{name}" for layer in range(config.n_layer)] for kind, name in names.items()}
    _, changed = theirs.run_with_cache(other)
    seen: dict[str, Tensor] = {}

    def keep(tensor: Tensor, hook: Any) -> None:
        tensor.retain_grad()
        seen[hook.name] = tensor

    hooks = [(name, keep) for layers in places.values() for name in layers]
    logits = theirs.run_with_hooks(ids, fwd_hooks=hooks)
    (logits[:, -1, TARGET] - logits[:, -1, RIVAL]).sum().backward()
    scores: dict[str, Tensor] = {}
    for kind, layers in places.items():
        parts = [((changed[name] - seen[name]) * seen[name].grad).sum(-1).detach() for name in layers]
        scores[kind] = torch.stack([part.transpose(1, 2) if kind == "heads" else part for part in parts], 1)
    return scores


def ours(model: GPT2LMHeadModel, ids: Tensor, other: Tensor) -> dict[str, Tensor]:
    """Compute the same on the unmodified model."""
    kinds: Any = ("residual", "heads", "feed_forward")
    found = ComponentAttribution(RelP(model)).attribute(
        ids, Difference(TARGET, RIVAL), components=kinds, counterfactual=other
    )
    parts = {kind: stacks["decoder"] for kind, stacks in found.parts.items()}
    return parts | {"residual": parts["residual"][:, :-1]}


def differences(folder: Path, seeds: int) -> Table:
    """Return a table with the largest differences, relative to the largest score of the kind."""
    table = Table(title="scores by captum-norm and by the authors' code, GPT-2 in float64")
    for column in ("seed", "residual", "heads", "feed_forward"):
        table.add_column(column, justify="right")
    for seed in range(seeds):
        torch.manual_seed(seed)
        sizes: Any = {"vocab_size": 100, "n_embd": 96, "n_layer": 6, "n_head": 6, "n_positions": 64}
        model: Any = GPT2LMHeadModel(GPT2Config(**sizes)).double()
        for parameter in model.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        ids, other = torch.randint(0, 100, (2, 3, 20))
        theirs = released(folder, model.eval(), ids, other)
        with_ours = ours(model, ids, other).items()
        errors = {kind: (part - theirs[kind]).abs().max() / theirs[kind].abs().max() for kind, part in with_ours}
        table.add_row(str(seed), *(f"{error:.1e}" for error in errors.values()))
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    Console(width=110).print(differences(arguments.folder, arguments.seeds))

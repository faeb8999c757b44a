"""Models run by hand, in which every input of a component is separate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_neox import modeling_gpt_neox

from tests import families

LENGTH, TARGET = 6, 5
FAMILIES = {"gpt2": 1e-10, "gpt-neox": 1e-10, "llama": 1e-5, "qwen3": 1e-5, "gemma2": 1e-5}
"""The tolerance: norms of the last three compute in float32."""
every_family = pytest.mark.parametrize("name", FAMILIES)
rotate: Any = modeling_gemma2.apply_rotary_pos_emb
rotate_part: Any = modeling_gpt_neox.apply_rotary_pos_emb


def inputs(name: str) -> tuple[Any, Tensor, Tensor]:
    ids, other = (families.inputs(name, seed, 2, LENGTH) for seed in range(2))
    return families.build(name, 0, torch.float64), ids, other


class ByHand:
    """A model whose components read inputs that ``read`` makes of the stream and what was written to it."""

    def __init__(self, name: str, model: Any) -> None:
        self.name, self.config = name, model.config
        body: Any = model.transformer if name == "gpt2" else model.gpt_neox if name == "gpt-neox" else model.model
        self.model, self.body = model, body
        self.layers = body.h if name == "gpt2" else body.layers
        self.heads = self.config.num_attention_heads

    def start(self, ids: Tensor) -> Any:
        if self.name == "gpt2":
            return self.body.wte(ids) + self.body.wpe(torch.arange(ids.shape[1]))
        return (self.body.embed_in if self.name == "gpt-neox" else self.body.embed_tokens)(ids)

    def heads_of(self, layer: Any, letter: str, x: Tensor) -> Any:
        """Queries, keys or values of all heads, (B, H, S, d), keys repeated."""
        if self.name == "gpt2":
            part = layer.attn.c_attn(layer.ln_1(x)).chunk(3, -1)["qkv".index(letter)]
            return part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        normed, places = layer.input_layernorm(x), torch.arange(x.shape[1])[None]
        if self.name == "gpt-neox":
            fused = layer.attention.query_key_value(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            part = fused.chunk(3, -1)["qkv".index(letter)]
            cos, sin = self.body.rotary_emb(x, places)
            return part if letter == "v" else rotate_part(part, part, cos, sin)[0]
        attention = layer.self_attn
        part = getattr(attention, f"{letter}_proj")(normed).unflatten(-1, (-1, attention.head_dim))
        if self.name == "qwen3" and letter != "v":
            part = getattr(attention, f"{letter}_norm")(part)
        part = part.transpose(1, 2)
        if letter != "v":
            part = rotate(part, part, *self.body.rotary_emb(x, places))[0]
        return part.repeat_interleave(self.heads // part.shape[1], 1)

    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor) -> Any:
        scale, cap = query.shape[-1] ** -0.5, getattr(self.config, "attn_logit_softcapping", None)
        if self.name == "gemma2":
            scale = self.config.query_pre_attn_scalar**-0.5
        scores = query @ key.mT * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        apart = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        seen = apart >= 0
        window = getattr(getattr(layer, "self_attn", None), "sliding_window", None)
        seen = seen if window is None else seen & (apart < window)
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value

    def run(self, stream: Tensor, read: Callable[[str, Tensor, dict[str, Tensor]], Any]) -> tuple[Tensor, Any]:
        """The number explained, (B,), and what each component wrote, (B, S, D)."""
        written, config = {"input": stream}, self.config
        for i, layer in enumerate(self.layers):
            parts = {}
            for letter in "qkv":
                each = [
                    self.heads_of(layer, letter, read(f"a{i}.h{h}<{letter}>", stream, written))[:, h]
                    for h in range(self.heads)
                ]
                parts[letter] = torch.stack(each, 1)
            network: Any = None
            if self.name == "gpt-neox":
                network = layer.mlp(layer.post_attention_layernorm(read(f"m{i}", stream, written)))
            mixed = self.attend(layer, parts["q"], parts["k"], parts["v"])
            names = {"gpt2": "attn.c_proj", "gpt-neox": "attention.dense"}
            out = layer.get_submodule(names.get(self.name, "self_attn.o_proj"))
            matrix = out.weight if self.name == "gpt2" else out.weight.T
            matrix = matrix.unflatten(0, (self.heads, -1))
            added = [mixed[:, h] @ matrix[h] for h in range(self.heads)]
            whole = sum(added) if out.bias is None else sum(added) + out.bias
            if self.name == "gemma2":
                norm = layer.post_attention_layernorm
                scale = torch.rsqrt(whole.square().mean(-1, keepdim=True) + norm.eps)
                added, whole = [part * scale * (1 + norm.weight) for part in added], norm(whole)
            written |= {f"a{i}.h{h}": part for h, part in enumerate(added)}
            stream = stream + whole
            if self.name == "gpt2":
                network = layer.mlp(layer.ln_2(read(f"m{i}", stream, written)))
            elif self.name == "gemma2":
                network = layer.mlp(layer.pre_feedforward_layernorm(read(f"m{i}", stream, written)))
                network = layer.post_feedforward_layernorm(network)
            elif network is None:
                network = layer.mlp(layer.post_attention_layernorm(read(f"m{i}", stream, written)))
            written[f"m{i}"], stream = network, stream + network
        end = read("logits", stream, written)
        norm = {"gpt2": "ln_f", "gpt-neox": "final_layer_norm"}.get(self.name, "norm")
        logits = self.model.get_output_embeddings()(self.body.get_submodule(norm)(end))
        cap = getattr(config, "final_logit_softcapping", None)
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return logits[:, -1, TARGET], written


def gradients(hand: ByHand, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """∂m/∂(v's input), (B, S, V, D), the sources, (B, S, U, D), and where there are edges, (U, V)."""
    targets: dict[str, list[str]] = {}  # with their sources

    def name(target: str, stream: Tensor, written: dict[str, Tensor]) -> Tensor:
        targets[target] = list(written)
        return stream

    hand.run(start, name)
    offsets = torch.zeros(len(targets), *start.shape, dtype=start.dtype, requires_grad=True)
    of = dict(zip(targets, offsets, strict=True))
    number, written = hand.run(start, lambda target, stream, _: stream + of[target])
    (found,) = torch.autograd.grad(number.sum(), offsets)
    edges = torch.tensor([[source in before for before in targets.values()] for source in written])
    return found.permute(1, 2, 0, 3), torch.stack([part.detach() for part in written.values()], 2), edges

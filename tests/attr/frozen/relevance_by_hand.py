"""Relevance by hand, in float64: single models' formulas of :mod:`tests.attr.frozen.relevance_rules`.

Nothing here uses the package's network.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attr.frozen.relevance_rules import Linear, Normed, Rules, Weighted, apply, soft_cap, turned


def heads(x: Tensor, count: int) -> Tensor:
    split: Tensor = x.unflatten(-1, (count, -1)).transpose(1, 2)
    return split


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def relevance(stream: Tensor, run: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Relevance of the positions of a stream, (B, S), for the numbers (B,) that ``run`` makes of it."""
    stream = stream.detach().requires_grad_()
    numbers = run(stream.clone())
    (found,) = torch.autograd.grad(numbers, stream, numbers.detach())
    return found.sum(-1), numbers.detach()


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def gpt2(model: Any, rules: Rules, ids: Tensor, target: int) -> tuple[Tensor, Tensor]:
    count, body = model.config.n_head, model.transformer
    start = body.wte(ids) + body.wpe(torch.arange(ids.shape[1]))

    def run(stream: Tensor) -> Tensor:
        for layer in body.h:
            stream = rules.note("residual", stream)
            read = rules.linear(rules.norm(stream, layer.ln_1), layer.attn.c_attn)
            q, k, v = (heads(part, count) for part in read.split(stream.shape[-1], -1))
            mixed = rules.attention(q, k, v, causal(ids.shape[1]), 1 / math.sqrt(q.shape[-1]))
            stream = rules.add(stream, rules.linear(merged(mixed), layer.attn.c_proj))
            inner = rules.linear(rules.norm(stream, layer.ln_2), layer.mlp.c_fc)
            hidden = rules.note("neurons", rules.active(inner, lambda z: F.gelu(z, approximate="tanh")))
            stream = rules.add(stream, rules.note("feed_forward", rules.linear(hidden, layer.mlp.c_proj)))
        return rules.linear(rules.norm(rules.note("residual", stream), body.ln_f), model.lm_head)[:, -1, target]

    return relevance(start, run)


def bert(model: Any, rules: Rules, ids: Tensor, target: int, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    count = model.config.num_attention_heads
    allowed = torch.ones(ids.shape, dtype=torch.bool) if real is None else real
    start = model.bert.embeddings(ids)

    def run(stream: Tensor) -> Tensor:
        for layer in model.bert.encoder.layer:
            stream = rules.note("residual", stream)
            names = ("query", "key", "value")
            q, k, v = (heads(rules.linear(stream, getattr(layer.attention.self, name)), count) for name in names)
            mixed = rules.attention(q, k, v, allowed[:, None, None], 1 / math.sqrt(q.shape[-1]))
            out = layer.attention.output
            stream = rules.norm(rules.add(rules.linear(merged(mixed), out.dense), stream), out.LayerNorm)
            hidden = rules.note("neurons", rules.active(rules.linear(stream, layer.intermediate.dense), F.gelu))
            written = rules.note("feed_forward", rules.linear(hidden, layer.output.dense))
            stream = rules.norm(rules.add(written, stream), layer.output.LayerNorm)
        stream = rules.note("residual", stream)
        pooled = rules.active(rules.linear(stream[:, 0], model.bert.pooler.dense), torch.tanh)
        return rules.linear(pooled, model.classifier)[:, target]

    return relevance(start, run)


class Llama(nn.Module):
    """Of LLaMA's kind, in float64 throughout: RMSNorm, rotary positions, grouped queries, biases, gated networks."""

    def __init__(self, product: str = "flash", width: int = 24, count: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, width), nn.Linear(width, 40)
        self.layers = nn.ModuleList(LlamaLayer(product, width, count, groups) for _ in range(2))
        self.norm, self.product = nn.RMSNorm(width, eps=1e-5), product

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        if self.product == "flash":
            return self.head(self.norm(x))  # type: ignore[no-any-return]
        # A product with a function of parameters, and a parameter in a sum.
        return self.norm(x) @ self.head.weight.T + self.head.bias  # type: ignore[no-any-return]


class LlamaAttention(nn.Module):
    def __init__(self, product: str, width: int, count: int, groups: int) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, width // count * groups) for _ in range(2))
        self.product, self.count, self.groups = product, count, groups

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            heads(part, count)
            for part, count in ((self.q(x), self.count), (self.k(x), self.groups), (self.v(x), self.groups))
        )
        q, k = turned(q), turned(k)
        if self.product == "flash":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = (part.repeat_interleave(self.count // self.groups, dim=1) for part in (k, v))
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            scores = soft_cap(scores) if self.product == "capped" else scores
            y = scores.masked_fill(~causal(x.shape[1]), float("-inf")).softmax(-1) @ v
        return self.o(merged(y))  # type: ignore[no-any-return]


class LlamaLayer(nn.Module):
    def __init__(self, product: str, width: int, count: int, groups: int) -> None:
        super().__init__()
        self.attn = LlamaAttention(product, width, count, groups)
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.gate, self.up, self.down = nn.Linear(width, 36), nn.Linear(width, 36), nn.Linear(36, width)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        read = self.norm2(x)
        return x + self.down(self.act(self.gate(read)) * self.up(read))  # type: ignore[no-any-return]


def llama(model: Llama, rules: Rules, ids: Tensor, target: int) -> tuple[Tensor, Tensor]:
    def run(stream: Tensor) -> Tensor:
        for layer in model.layers:
            stream, attn = rules.note("residual", stream), cast(Any, layer.attn)
            read = rules.norm(stream, layer.norm1)
            q, k, v = (
                heads(rules.linear(read, module), count)
                for module, count in ((attn.q, attn.count), (attn.k, attn.groups), (attn.v, attn.groups))
            )
            q, k = rules.rotary(q), rules.rotary(k)
            capped = attn.product == "capped"
            mixed = rules.attention(q, k, v, causal(ids.shape[1]), 1 / math.sqrt(q.shape[-1]), capped=capped)
            stream = rules.add(stream, rules.linear(merged(mixed), attn.o))
            read = rules.norm(stream, layer.norm2)
            hidden = rules.gated(rules.linear(read, layer.gate), rules.linear(read, layer.up), F.silu)
            written = rules.linear(rules.note("neurons", hidden), layer.down)
            stream = rules.add(stream, rules.note("feed_forward", written))
        return rules.linear(rules.norm(rules.note("residual", stream), model.norm), model.head)[:, -1, target]

    return relevance(model.embed(ids), run)


def mixtral(model: Any, rules: Rules, ids: Tensor, target: int) -> tuple[Tensor, Tensor]:
    config, body = model.config, model.model
    sizes = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads

    def norm(x: Tensor, module: Any) -> Tensor:
        return apply(Normed, x, module.weight.detach(), None, module.variance_epsilon)

    def mixture(read: Tensor, block: Any) -> Tensor:
        _, coefficients, chosen = block.gate(read.detach().flatten(0, 1))
        written, given = [], []
        for expert, (fused, down) in enumerate(zip(block.experts.gate_up_proj, block.experts.down_proj, strict=True)):
            gate, up = (apply(Linear, read, part.detach().T, None) for part in fused.chunk(2))
            written.append(apply(Linear, rules.gated(gate, up, F.silu), down.detach().T, None))
            given.append((coefficients * (chosen == expert)).sum(-1).reshape(*read.shape[:2], 1).detach())
        return apply(Weighted, rules.note("experts", torch.stack(written)), torch.stack(given).to(read))

    def run(stream: Tensor) -> Tensor:
        for layer in body.layers:
            stream = rules.note("residual", stream)
            read, attn = norm(stream, layer.input_layernorm), layer.self_attn
            modules = (attn.q_proj, attn.k_proj, attn.v_proj)
            q, k, v = (heads(rules.linear(read, module), size) for module, size in zip(modules, sizes, strict=True))
            base = config.rope_parameters["rope_theta"]
            q, k = rules.rotary(q, base), rules.rotary(k, base)
            mixed = rules.attention(q, k, v, causal(ids.shape[1]), 1 / math.sqrt(q.shape[-1]))
            stream = rules.add(stream, rules.linear(merged(mixed), attn.o_proj))
            written = mixture(norm(stream, layer.post_attention_layernorm), layer.mlp)
            stream = rules.add(stream, rules.note("feed_forward", written))
        head = model.get_output_embeddings()
        return rules.linear(norm(rules.note("residual", stream), body.norm), head)[:, -1, target]

    return relevance(body.embed_tokens(ids), run)

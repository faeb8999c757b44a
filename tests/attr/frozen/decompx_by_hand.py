"""DecompX by hand, in float64: vectors propagated through six models' formulas [Modarressi et al. 2023, eq. 3 to 16].

Parts are (R, K + 1, D) at R positions, what each of K tokens gives and last what the biases give.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests import oracle


def share(parts: Tensor, bias: Tensor | None, sharing: str) -> Tensor:
    """Parts with a bias added, (D,) or one for each position, (R, D)."""
    if bias is None or not bias.any():
        return parts
    parts, biases = parts.clone(), bias.expand(len(parts), -1)
    if sharing == "apart":
        parts[:, -1] += biases
        return parts
    for place, added in enumerate(biases):
        row = parts[place, :-1]
        lengths = row.norm(dim=-1)
        weights = {
            "absdot": (row * added).sum(-1).abs(),
            "abssim": ((row * added).sum(-1) / lengths.clamp(min=1e-300) / added.norm()).abs(),
            "norm": lengths,
            "equal": (lengths > 0).double(),
            "cls": torch.eye(len(row)).double()[0],
        }[sharing]
        parts[place, :-1] = row + (weights / weights.sum())[:, None] * added
    return parts


def matrix_of(module: Any) -> Tensor:
    """(inputs, outputs); GPT-2 keeps its matrices so."""
    matrix: Tensor = module.weight if type(module).__name__ == "Conv1D" else module.weight.T
    return matrix


class ByHand:
    """The steps of a layer on parts."""

    def __init__(self, sharing: str = "apart") -> None:
        self.sharing = sharing

    def affine(self, parts: Tensor, module: Any) -> Tensor:
        return share(parts @ matrix_of(module), module.bias, self.sharing)

    def norm(self, parts: Tensor, module: Any) -> Tensor:
        whole = parts.sum(1)
        if hasattr(module, "variance_epsilon"):
            sigma = ((whole**2).mean(-1) + module.variance_epsilon) ** 0.5
            return share(parts / sigma[:, None, None] * module.weight, None, self.sharing)
        sigma = (whole.var(-1, unbiased=False) + module.eps) ** 0.5
        centered = (parts - parts.mean(-1, keepdim=True)) / sigma[:, None, None] * module.weight
        return share(centered, module.bias, self.sharing)

    def activation(self, parts: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        whole = parts.sum(1)
        slope: Tensor = function(whole) / whole
        return parts * slope[:, None]

    def gated(self, gate: Tensor, other: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """∫₀¹ over the path t (u, w), the midpoints of many steps."""
        u, w, steps = gate.sum(1, keepdim=True), other.sum(1, keepdim=True), 4000
        total = torch.zeros_like(gate)
        for t in (torch.arange(steps).double() + 0.5) / steps:
            here = (t * u).detach().requires_grad_()
            with torch.enable_grad():
                value = function(here)
                (slope,) = torch.autograd.grad(value.sum(), here)
            total += (slope * t * w * gate + value.detach() * other) / steps
        return total

    def attention(
        self, parts: Tensor, weights: Tensor, value: Any, output: Any, columns: Tensor | slice = slice(None)
    ) -> Tensor:
        """Attention's output with its one bias shared, before the residual joins."""
        vectors, bias = attention_vectors(parts, weights, value, output, columns)
        return share(vectors, bias.sum(1) + (0 if output.bias is None else output.bias), self.sharing)


def attention_vectors(
    parts: Tensor, weights: Tensor, value: Any, output: Any, columns: Tensor | slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """Σ_h Σ_j α^h_ij x_{j←k} W_V^h W_O^h, (Q, K + 1, D), and Σ_h α^h_ij b_V^h W_O^h of each source j, (Q, S, D)."""
    matrix = matrix_of(value)[:, columns]
    bias = torch.zeros(matrix.shape[1]).to(matrix) if value.bias is None else value.bias[columns]
    heads = matrix_of(output).unflatten(0, (len(weights), -1))
    per_head, bias_per_head = (part.unflatten(-1, (-1, heads.shape[1])) for part in (matrix, bias))
    groups = len(weights) // len(bias_per_head)
    per_head, bias_per_head = (part.repeat_interleave(groups, dim=-2) for part in (per_head, bias_per_head))
    vectors = torch.einsum("hqs,skc,chd,hde->qke", weights, parts, per_head, heads)
    return vectors, torch.einsum("hqs,hd,hde->qse", weights, bias_per_head, heads)


def start(stream: Tensor, before: int = 0, behind: int = 0) -> Tensor:
    """(S, D) -> (S, K + 1, D), with tokens of another sequence before or behind these S."""
    places = torch.arange(len(stream))
    parts = torch.zeros(len(stream), before + len(stream) + behind + 1, stream.shape[1]).double()
    parts[places, before + places] = stream
    return parts


def eager(model: Any, inputs: Tensor | dict[str, Tensor]) -> Any:
    """The model's output with attention weights and hidden states."""
    inputs = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    with oracle.eager(model):
        return model(**inputs, output_attentions=True, output_hidden_states=True)


def bert_states(encoder: Any, output: Any, sharing: str, *, released: bool = False) -> list[Tensor]:
    """The parts of each layer's output, of one example.

    ``released`` is the order of the authors' code: the bias is shared after the residual joins, and in the first layer
    the value bias stays inside the vectors of the tokens that are attended to.
    """
    parts, states, step = start(output.hidden_states[0][0]), [], ByHand(sharing)
    for index, (layer, weights) in enumerate(zip(encoder.layer, output.attentions, strict=True)):
        value, dense = layer.attention.self.value, layer.attention.output.dense
        if released:
            vectors, by_source = attention_vectors(parts, weights[0], value, dense)
            if index == 0:
                vectors[:, :-1] += by_source
            bias = dense.bias if index == 0 else dense.bias + by_source.sum(1)
            total = share(vectors + parts, bias, sharing)
        else:
            total = step.attention(parts, weights[0], value, dense) + parts
        block = step.norm(total, layer.attention.output.LayerNorm)
        hidden = step.activation(step.affine(block, layer.intermediate.dense), F.gelu)
        parts = step.norm(step.affine(hidden, layer.output.dense) + block, layer.output.LayerNorm)
        states.append(parts)
    return states


def bert_by_hand(model: Any, ids: Tensor, sharing: str) -> tuple[list[Tensor], Tensor]:
    """The parts of each layer's output, and of the logits, (K + 1, C), of one example."""
    step = ByHand(sharing)
    states = bert_states(model.bert.encoder, eager(model, ids), sharing)
    pooled = step.activation(step.affine(states[-1][:1], model.bert.pooler.dense), torch.tanh)
    return states, step.affine(pooled, model.classifier)[0]


def gpt2_by_hand(model: Any, ids: Tensor, sharing: str) -> Tensor:
    """The parts of the last position's logits, (K + 1, V)."""
    output, step = eager(model, ids), ByHand(sharing)
    parts = start(output.hidden_states[0][0])
    for layer, weights in zip(model.transformer.h, output.attentions, strict=True):
        read, values = step.norm(parts, layer.ln_1), slice(2 * parts.shape[-1], None)
        parts = parts + step.attention(read, weights[0], layer.attn.c_attn, layer.attn.c_proj, values)
        inner = step.affine(step.norm(parts, layer.ln_2), layer.mlp.c_fc)
        tanh_gelu = step.activation(inner, lambda z: F.gelu(z, approximate="tanh"))
        parts = parts + step.affine(tanh_gelu, layer.mlp.c_proj)
    return step.affine(step.norm(parts, model.transformer.ln_f)[-1:], model.lm_head)[0]


def gpt_neox_by_hand(model: Any, ids: Tensor, sharing: str) -> Tensor:
    """The parts of the last position's logits, (K + 1, V), through parallel layers."""
    output, step = eager(model, ids), ByHand(sharing)
    parts = start(output.hidden_states[0][0])
    heads = model.config.num_attention_heads
    # Each head's query, key and value lie side by side.
    values = torch.arange(3 * parts.shape[-1]).unflatten(0, (heads, 3, -1))[:, 2].flatten()
    for layer, weights in zip(model.gpt_neox.layers, output.attentions, strict=True):
        read, attention = step.norm(parts, layer.input_layernorm), layer.attention
        written = step.attention(read, weights[0], attention.query_key_value, attention.dense, values)
        inner = step.affine(step.norm(parts, layer.post_attention_layernorm), layer.mlp.dense_h_to_4h)
        parts = parts + written + step.affine(step.activation(inner, F.gelu), layer.mlp.dense_4h_to_h)
    return step.affine(step.norm(parts, model.gpt_neox.final_layer_norm)[-1:], model.get_output_embeddings())[0]


def behind_attention(step: ByHand, layer: Any, parts: Tensor) -> Tensor:
    """The rest of a layer of LLaMA."""
    read = step.norm(parts, layer.post_attention_layernorm)
    gate, other = (step.affine(read, module) for module in (layer.mlp.gate_proj, layer.mlp.up_proj))
    return parts + step.affine(step.gated(gate, other, F.silu), layer.mlp.down_proj)


def llama_by_hand(model: Any, ids: Tensor, sharing: str) -> Tensor:
    """The parts of the last position's logits, (K + 1, V), with gated feed-forward networks."""
    output, step = eager(model, ids), ByHand(sharing)
    parts = start(output.hidden_states[0][0])
    for layer, weights in zip(model.model.layers, output.attentions, strict=True):
        read, attention = step.norm(parts, layer.input_layernorm), layer.self_attn
        written = step.attention(read, weights[0], attention.v_proj, attention.o_proj)
        parts = behind_attention(step, layer, parts + written)
    return step.affine(step.norm(parts, model.model.norm)[-1:], model.lm_head)[0]


def both_starts(output: Any) -> tuple[Tensor, Tensor]:
    """The parts of what enters an encoder, (S, S + T + 1, D), and a decoder, (T, S + T + 1, D)."""
    source, target = output.encoder_hidden_states[0][0], output.decoder_hidden_states[0][0]
    return start(source, behind=len(target)), start(target, before=len(source))


def bart_by_hand(model: Any, inputs: dict[str, Tensor], sharing: str) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The parts of each encoder and decoder layer's output, and of all logits, (T, K + 1, V), of one example."""
    output, step = eager(model, inputs), ByHand(sharing)

    def attended(read: Tensor, weights: Tensor, module: Any, stream: Tensor, norm: Any) -> Tensor:
        return step.norm(step.attention(read, weights[0], module.v_proj, module.out_proj) + stream, norm)

    def fed_forward(stream: Tensor, layer: Any) -> Tensor:
        inner = step.activation(step.affine(stream, layer.fc1), F.gelu)
        return step.norm(step.affine(inner, layer.fc2) + stream, layer.final_layer_norm)

    source, target = both_starts(output)
    encoded, decoded = [], []
    for layer, weights in zip(model.model.encoder.layers, output.encoder_attentions, strict=True):
        source = attended(source, weights, layer.self_attn, source, layer.self_attn_layer_norm)
        encoded.append(source := fed_forward(source, layer))
    both = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    for layer, (weights, across) in zip(model.model.decoder.layers, both, strict=True):
        target = attended(target, weights, layer.self_attn, target, layer.self_attn_layer_norm)
        target = attended(source, across, layer.encoder_attn, target, layer.encoder_attn_layer_norm)
        decoded.append(target := fed_forward(target, layer))
    return encoded, decoded, share(step.affine(target, model.lm_head), model.final_logits_bias[0], sharing)


def t5_by_hand(model: Any, inputs: dict[str, Tensor], sharing: str) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The parts of each encoder and decoder layer's output, and of all logits, (T, K + 1, V), of one example."""
    output, step = eager(model, inputs), ByHand(sharing)

    def fed_forward(stream: Tensor, layer: Any) -> Tensor:
        network = layer.DenseReluDense
        inner = step.activation(step.affine(step.norm(stream, layer.layer_norm), network.wi), torch.relu)
        return stream + step.affine(inner, network.wo)

    def attended(stream: Tensor, weights: Tensor, layer: Any) -> Tensor:
        attention = layer.SelfAttention
        return stream + step.attention(step.norm(stream, layer.layer_norm), weights[0], attention.v, attention.o)

    source, target = both_starts(output)
    encoded, decoded = [], []
    for block, weights in zip(model.encoder.block, output.encoder_attentions, strict=True):
        source = fed_forward(attended(source, weights, block.layer[0]), block.layer[1])
        encoded.append(source)
    source = step.norm(source, model.encoder.final_layer_norm)
    both = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    for block, (weights, across) in zip(model.decoder.block, both, strict=True):
        target, reader = attended(target, weights, block.layer[0]), block.layer[1].EncDecAttention
        target = target + step.attention(source, across[0], reader.v, reader.o)
        decoded.append(target := fed_forward(target, block.layer[2]))
    target = step.norm(target, model.decoder.final_layer_norm)
    scale = model.model_dim**-0.5 if model.config.scale_decoder_outputs else 1
    return encoded, decoded, step.affine(target * scale, model.lm_head)

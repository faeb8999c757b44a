"""Small Transformers of real fairseq, and the direct way through them; runs where fairseq can be imported."""

from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tests.oracle import Layer, plain_layer

PAD, EOS = 1, 2
SYMBOLS = {"source": 30, "target": 40}
HEADS = {"encoder": 4, "decoder": 2}
LAYERS = {"encoder": 2, "decoder": 3}


def build(
    *, pre_norm: bool = False, learned: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """A translation model whose every parameter is away from its default."""
    from fairseq.models.transformer import TransformerModel
    from fairseq.models.transformer.transformer_legacy import base_architecture

    arguments = Namespace(max_source_positions=30, max_target_positions=20, **options)
    for side, width in (("encoder", 24), ("decoder", 40)):
        for name, value in {
            "embed_dim": 16,
            "ffn_embed_dim": width,
            "layers": LAYERS[side],
            "attention_heads": HEADS[side],
            "normalize_before": pre_norm,
            "learned_pos": learned,
        }.items():
            setattr(arguments, f"{side}_{name}", value)
    base_architecture(arguments)
    torch.manual_seed(seed)
    model = TransformerModel.build_model(arguments, task())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def task() -> Any:
    """As much of a task as building a model takes."""
    from fairseq.data import Dictionary

    dictionaries = {side: Dictionary() for side in SYMBOLS}
    for side, dictionary in dictionaries.items():
        for index in range(len(dictionary), SYMBOLS[side]):
            dictionary.add_symbol(f"word{index}")
    return SimpleNamespace(source_dictionary=dictionaries["source"], target_dictionary=dictionaries["target"])


def inputs(seed: int = 0, lengths: tuple[tuple[int, int], ...] = ((9, 6), (9, 6)), side: str = "right") -> Any:
    """A batch of sentences of given lengths of source and target, padded on a side."""
    generator = torch.Generator().manual_seed(seed)

    def padded(which: int, symbols: int) -> Tensor:
        widest = max(both[which] for both in lengths)
        ids = torch.full((len(lengths), widest), PAD)
        for row, both in zip(ids, lengths, strict=True):
            filled = slice(0, both[which]) if side == "right" else slice(widest - both[which], widest)
            row[filled] = torch.randint(EOS, symbols, (both[which],), generator=generator)
        return ids

    source, target = padded(0, SYMBOLS["source"]), padded(1, SYMBOLS["target"])
    return {"src_tokens": source, "src_lengths": source.ne(PAD).sum(1), "prev_output_tokens": target}


def attentions(model: Any) -> dict[str, list[tuple[nn.Module, nn.Module, nn.Module]]]:
    """The attention modules of each stack, each with the norm and the layer that it belongs to."""
    return {
        "encoder": [(layer.self_attn, layer.self_attn_layer_norm, layer) for layer in model.encoder.layers],
        "decoder": [(layer.self_attn, layer.self_attn_layer_norm, layer) for layer in model.decoder.layers],
        "cross": [(layer.encoder_attn, layer.encoder_attn_layer_norm, layer) for layer in model.decoder.layers],
    }


@torch.no_grad()
def oracle(model: Any, batch: dict[str, Tensor]) -> dict[str, list[Layer]]:
    """Each stack's layers in float64, by the attention weights that fairseq's own modules return."""
    found = {stack: [_Watch(*parts) for parts in modules] for stack, modules in attentions(model).items()}
    watches = [watch for stack in found.values() for watch in stack]
    model(**batch)
    for watch in watches:
        watch.remove()
    return {stack: [watch.layer() for watch in layers] for stack, layers in found.items()}


class _Watch:
    """Sees one attention module's call and the residual stream beside it."""

    def __init__(self, attention: Any, norm: Any, layer: Any) -> None:
        self.attention, self.norm, self.pre_norm = attention, norm, layer.normalize_before
        before = layer.self_attn_layer_norm if attention.encoder_decoder_attention else None
        self.handles = [attention.register_forward_hook(self.at_attention, with_kwargs=True)]
        if self.pre_norm:
            self.handles.append(norm.register_forward_pre_hook(self.at_input))
        elif before is None:
            self.handles.append(layer.register_forward_pre_hook(self.at_input))
        else:
            self.handles.append(before.register_forward_hook(lambda _, __, output: self.at_input(_, (output,))))

    def at_input(self, _: Any, arguments: tuple[Any, ...]) -> None:
        self.residual = arguments[0].transpose(0, 1).double().clone()

    def at_attention(self, attention: Any, _: Any, given: dict[str, Any], __: Any) -> None:
        # Weights of single heads are returned on one of its two paths alone, where the softmax is one of float32.
        softmax: AbstractContextManager[Any] = nullcontext()
        if not given.get("static_kv"):
            softmax = patch("fairseq.utils.softmax", lambda scores, dim, onnx_trace: scores.softmax(dim))  # noqa: ARG005
        options = {"need_weights": True, "need_head_weights": True, "static_kv": True}
        with softmax:
            _, weights = attention.forward(**given | options)
        self.weights = weights.transpose(0, 1).double()
        values = attention.v_proj(given["value"]).double()
        self.values = values.unflatten(-1, (attention.num_heads, -1)).permute(1, 2, 0, 3)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def layer(self) -> Layer:
        norm = None if self.pre_norm else self.norm
        return plain_layer(self.weights, self.values, self.attention.out_proj, self.residual, norm)

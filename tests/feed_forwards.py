"""Where a reader of the models' code finds the feed-forward networks of the families, written down by hand."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from captum_norm.models.model import refusals
from tests import oracle
from tests.families import FAMILIES, Family

SCOPES: dict[str, tuple[Any, ...]] = {
    "post-norm": ("atb_ff", "atb_ff_res", "atb_ff_res_ln"),
    "pre-norm": ("atb_ln", "atb_ff", "atb_ff_res"),
    "parallel": ("atb_ff_res",),
    "sandwich": ("atb_ln", "atb_ff", "atb_ff_res"),
    "norm-on-output": ("atb_ff", "atb_ff_res"),
}


def tanh_gelu(z: Tensor) -> Tensor:
    return functional.gelu(z, approximate="tanh")


def clamped_swish(gate: Tensor) -> Tensor:
    gate = gate.clamp(max=LIMIT)
    return gate / (1 + (-1.702 * gate).exp())


def clamped_shifted(other: Tensor) -> Tensor:
    return other.clamp(-LIMIT, LIMIT) + 1


LIMIT = 7.0
"""Where GPT-OSS clamps both factors."""


@dataclass(frozen=True)
class Parts:
    """One family's feed-forward network; names are relative to the layer.

    Attributes:
        inner: the modules into the neurons, the gate's first; one whose output is ``halves`` of both.
        outer: the module out of them.
        activation: g, and ``factor`` h of the experts' other factor.
        norm: the norm before; ``branch_norm`` is the one behind, ``final_norm`` the one on the sum.
        router: the module that gives logits, coefficients and indices of the ``experts``; or, ``scaled``, the scores
            that multiply what each expert reads.
        branch_factor: what multiplies the output before the sum: a number or parameter inside the layer.
        layer: as ``centered`` and ``single`` in ``Family``, if not the family's.
    """

    inner: tuple[str, ...]
    outer: str
    activation: oracle.Elementwise
    norm: str | None = None
    branch_norm: str | None = None
    final_norm: str | None = None
    halves: bool = False
    layer: str | None = None
    experts: str | None = None
    router: str | None = None
    scaled: bool = False
    factor: oracle.Elementwise | None = None
    branch_factor: str | None = None
    centered: bool | None = None
    single: bool = False

    def of(self, family: Family) -> Family:
        """The family with this network's kind of norm and precision."""
        centered = family.centered if self.centered is None else self.centered
        return replace(family, centered=centered, single=family.single or self.single)


def shared(network: str) -> dict[str, Any]:
    """The expert that reads every position."""
    name = f"{network}.shared_expert"
    return {"inner": (f"{name}.gate_proj", f"{name}.up_proj"), "outer": f"{name}.down_proj"}


BERT = Parts(("intermediate.dense",), "output.dense", functional.gelu, final_norm="output.LayerNorm")
SWIGLU = Parts(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", functional.silu, "post_attention_layernorm")
NEOX = Parts(("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h", functional.gelu, "post_attention_layernorm")
OPT = Parts(("fc1",), "fc2", functional.relu, "final_layer_norm")
SANDWICH = replace(
    SWIGLU, activation=tanh_gelu, norm="pre_feedforward_layernorm", branch_norm="post_feedforward_layernorm"
)
VIT = Parts(("mlp.fc1",), "mlp.fc2", functional.gelu, "layernorm_after")
EXPERTS = Parts((), "", functional.silu, "post_attention_layernorm", experts="mlp.experts", router="mlp.gate")
PARTS = {
    "bert": BERT,
    "roberta": BERT,
    "electra": BERT,
    "albert": Parts(("ffn",), "ffn_output", tanh_gelu, final_norm="full_layer_layer_norm"),
    "distilbert": Parts(("ffn.lin1",), "ffn.lin2", functional.gelu, final_norm="output_layer_norm"),
    "modernbert": Parts(("mlp.Wi",), "mlp.Wo", functional.gelu, "mlp_norm", halves=True),
    "gpt2": Parts(("mlp.c_fc",), "mlp.c_proj", tanh_gelu, "ln_2"),
    "opt": OPT,
    "opt-350m": replace(OPT, norm=None, final_norm="final_layer_norm"),
    "gpt-neox": NEOX,
    "gpt-neox-sequential": NEOX,
    "llama": SWIGLU,
    "mistral": SWIGLU,
    "qwen2": SWIGLU,
    "qwen3": SWIGLU,
    "phi": Parts(("mlp.fc1",), "mlp.fc2", tanh_gelu, "input_layernorm", centered=True),
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "olmo2": replace(SWIGLU, norm=None, branch_norm="post_feedforward_layernorm"),
    "t5-encoder": Parts(
        ("DenseReluDense.wi",),
        "DenseReluDense.wo",
        functional.relu,
        "layer_norm",
        layer="encoder.block.{}.layer.1",
        centered=False,
        single=True,
    ),
    "vit": VIT,
    "beit": replace(VIT, branch_factor="lambda_2"),
    "dinov2": replace(VIT, norm="norm2", branch_factor="layer_scale2.lambda1"),
    "granite": replace(SWIGLU, branch_factor="residual_multiplier"),
    "phi3": Parts(("mlp.gate_up_proj",), "mlp.down_proj", functional.silu, "post_attention_layernorm", halves=True),
    "mixtral": EXPERTS,
    "qwen2-moe": replace(EXPERTS, **shared("mlp")),
    "llama4": replace(
        EXPERTS,
        **shared("feed_forward"),
        experts="feed_forward.experts",
        router="feed_forward.router",
        scaled=True,
    ),
    "gpt-oss": replace(EXPERTS, router="mlp.router", activation=clamped_swish, factor=clamped_shifted),
}


REASONS = {name: refusal["reason"] for refusal in refusals("without_feed_forward") for name in refusal["model_types"]}
NOT_UNDERSTOOD = {
    "xmod": REASONS["xmod"],
    "nllb-moe": REASONS["nllb-moe"],
    "switch-transformers": REASONS["switch_transformers"],
    "embedding-gemma2": REASONS["embedding_gemma2_text"],
    "openai-privacy-filter": REASONS["openai_privacy_filter"],
    "minimax-m3-text": REASONS["minimax_m3_vl_text"],
    "granite-moe-shared": REASONS["granitemoeshared"],
    "granite-moe-hybrid": REASONS["granitemoehybrid"],
    "bitnet": REASONS["bitnet"],
}
"""Families without scopes behind the feed-forward network, and why."""

EVERY = {name: parts.of(FAMILIES[name]) for name, parts in PARTS.items()}


def _affine(module: Any) -> tuple[Tensor, Tensor]:
    weight = module.weight.detach().double()
    # GPT-2 keeps its matrices as (inputs, outputs).
    weight = weight if type(module).__name__ == "Conv1D" else weight.T
    bias = getattr(module, "bias", None)
    return weight, torch.zeros(weight.shape[1]).double() if bias is None else bias.detach().double()


def _dense(parts: Parts, layer: nn.Module) -> oracle.DirectNetwork:
    inner = [_affine(layer.get_submodule(name)) for name in parts.inner]
    if parts.halves:
        ((weight, bias),) = inner
        inner = list(zip(weight.chunk(2, dim=1), bias.chunk(2), strict=True))
    activation = functional.silu if parts.experts else parts.activation
    return oracle.DirectNetwork(inner, _affine(layer.get_submodule(parts.outer)), activation)


def _experts(parts: Parts, layer: Any, read: Tensor) -> Iterator[tuple[oracle.DirectNetwork, Tensor]]:
    """Each expert with its coefficient at each position, (B, Q)."""
    module: Any = layer.get_submodule(parts.experts)
    router = layer.get_submodule(parts.router)
    with torch.no_grad():
        routed = router(read.flatten(0, 1).to(router.weight.dtype))
    for expert in range(len(module.down_proj)):
        weight, out = (stacked[expert].detach().double() for stacked in (module.gate_up_proj, module.down_proj))
        biases = torch.zeros(1).double(), torch.zeros(1).double()
        if parts.scaled:
            scale = routed[0][:, expert].double().reshape(read.shape[:2])
            inner = [(half, biases[0]) for half in weight.chunk(2, dim=1)]
            yield oracle.DirectNetwork(inner, (out, biases[1]), parts.activation, scale=scale), torch.ones_like(scale)
            continue
        if parts.factor is None:
            gate, up = weight.T.chunk(2, dim=1)
            inner, outer = [(gate, biases[0]), (up, biases[0])], (out.T, biases[1])
        else:
            bias = module.gate_up_proj_bias[expert].detach().double()
            inner = [(weight[:, first::2], bias[first::2]) for first in (0, 1)]
            outer = (out, module.down_proj_bias[expert].detach().double())
        _, coefficients, chosen = routed
        coefficient = (coefficients.double() * (chosen == expert)).sum(-1)
        yield oracle.DirectNetwork(inner, outer, parts.activation, parts.factor), coefficient.reshape(read.shape[:2])


def read_layers(family: Family, parts: Parts, model: Any, streams: list[Tensor]) -> list[oracle.FeedForwardLayer]:
    """The feed-forward layers of a float64 model, each where its stream is (B, Q, D)."""
    found = []
    for index, stream in enumerate(streams):
        layer = model.get_submodule((parts.layer or family.layer).format(index))
        norm = family.norm(layer, parts.norm)
        read = stream if norm is None else norm.whole(stream)
        networks = []
        if parts.outer:
            one = torch.ones(read.shape[:2], dtype=torch.float64)
            if parts.experts and not parts.scaled:
                gate = layer.get_submodule("mlp.shared_expert_gate").weight.detach().double()
                one = (read @ gate.T).sigmoid().squeeze(-1)
            networks.append((_dense(parts, layer), one))
        if parts.experts:
            networks += _experts(parts, layer, read)
        branch_norm, final_norm = (family.norm(layer, name) for name in (parts.branch_norm, parts.final_norm))
        factor = 1.0 if parts.branch_factor is None else attrgetter(parts.branch_factor)(layer)
        found.append(
            oracle.FeedForwardLayer(networks, norm, branch_norm, final_norm, torch.as_tensor(factor).detach().double())
        )
    return found


M2M100 = replace(OPT, layer="model.decoder.layers.{}")
CROSS = {
    "marian": replace(M2M100, activation=functional.gelu, norm=None, final_norm="final_layer_norm"),
    "mbart": replace(M2M100, activation=functional.gelu),
    "m2m100": M2M100,
    "t5": replace(PARTS["t5-encoder"], layer="decoder.block.{}.layer.2"),
}
"""The networks behind cross-attention in encoder–decoder models."""


def cross_vectors(name: str, model: Any, attention: list[oracle.Layer]) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """For each layer and scope the vectors of the encoder's positions and, as one more, that of the residual stream."""
    ends = [layer.across() for layer in attention]
    like = replace(FAMILIES["bert"], layer=CROSS[name].layer or "")
    streams = [parts.sum(2) + constant for parts, constant in ends]
    found = read_layers(CROSS[name].of(like), CROSS[name], model, streams)
    return [ff.scopes(*end) for ff, end in zip(found, ends, strict=True)]


def vectors(name: str, model: Any, inputs: Tensor, baseline: str = "zero") -> list[dict[str, tuple[Tensor, Tensor]]]:
    """For each layer and scope behind the attention block the vectors and what belongs to no key, the direct way."""
    family = EVERY[name]
    attention = oracle.layers(family, model, inputs)
    ends = [layer.vectors("atb") for layer in attention]
    if family.style == "parallel":
        found = read_layers(family, PARTS[name], model, [layer.residual for layer in attention])
        return [
            {"atb_ff_res": ff.parallel(*end, layer.residual, baseline)}
            for ff, end, layer in zip(found, ends, attention, strict=True)
        ]
    found = read_layers(family, PARTS[name], model, [parts.sum(2) + constant for parts, constant in ends])
    return [ff.scopes(*end, baseline) for ff, end in zip(found, ends, strict=True)]

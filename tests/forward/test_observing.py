"""The model is observed, with its users' hooks: what is explained is what it computes, and nothing of it changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import captum_norm as cn
from captum_norm.models.hooks import EXPLAINING
from captum_norm.models.inputs import bind_inputs
from tests import families, oracle
from tests.families import FAMILIES
from tests.families.family import new
from tests.families.images import VISION_LANGUAGE
from tests.fuzzing import at_line
from tests.padding import padded

TOP = 16


def sparse(implementation: str) -> Any:
    """A model whose attention keeps the 16 keys with the largest scores of an indexer."""
    sizes = {**families.GROUPED, "hidden_size": 64, "num_key_value_heads": 4, "v_head_dim": 16, "head_dim": 8}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    indexer = {"index_topk": TOP, "index_n_heads": 2, "index_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    more = {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "attn_implementation": implementation}
    make = new("DeepseekV32ForCausalLM", **sizes, **ranks, **indexer, **experts, **more)
    return families.randomized(make, 1, torch.float32)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("method", [cn.AttentionWeights, cn.NormAttribution, cn.ALTI])
def test_attention_to_some_keys_alone_has_those_keys(implementation: str, method: Callable[..., Any]) -> None:
    ids = families.inputs("llama", batch=1, length=40)
    maps = method(sparse(implementation)).maps(ids).decoder
    keys = (maps[0, :, -1] > 1e-9).sum(-1)
    assert (keys <= TOP + (method is cn.ALTI)).all()  # ALTI has the residual connection at the query's own
    assert keys.tolist() == [TOP] * 2 or method is cn.ALTI


def test_the_weights_of_sparse_attention_are_those_it_returns() -> None:
    model = sparse("eager")
    ids = torch.randint(3, families.VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = torch.stack(model(ids, output_attentions=True).attentions, 1)
    torch.testing.assert_close(cn.AttentionWeights(model).maps(ids, per_head=True).decoder, expected)


@pytest.mark.parametrize("name", ["llama", "qwen2", "llava"])
def test_positions_that_restart_are_two_sequences_where_the_plain_call_sees_them_so(name: str) -> None:
    """Transformers reads them as packed sequences, unless a cache is to be made."""
    model = families.randomized((FAMILIES | VISION_LANGUAGE)[name].build, 0, torch.float32)
    ids = families.inputs("llama", batch=1, length=12)
    assert bind_inputs(model, ids).arguments["use_cache"] is False  # of use to nobody here
    positions = torch.tensor([[*range(7), *range(5)]])
    for use_cache in (True, False):
        inputs = {"input_ids": ids, "position_ids": positions, "use_cache": use_cache}
        model.set_attn_implementation("eager")
        with torch.no_grad():
            expected = torch.stack(model(**inputs, output_attentions=True).attentions, 1).mean(2)
        model.set_attn_implementation("sdpa")
        maps = cn.AttentionWeights(model).maps(inputs).decoder
        torch.testing.assert_close(maps, expected, rtol=1e-5, atol=1e-6)
        packed = bool((expected[:, :, 7:, :7] == 0).all())
        assert packed == (not use_cache)
        if use_cache:  # what the model does by default
            default = cn.AttentionWeights(model).maps({"input_ids": ids, "position_ids": positions}).decoder
            assert torch.equal(default, maps)  # type: ignore[arg-type]


def test_an_attention_function_that_computes_something_else_is_refused_at_its_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond a length that no excerpt has."""
    model, own = families.build("bert"), ALL_ATTENTION_FUNCTIONS["sdpa"]

    def from_far(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *further: Any, **options: Any) -> Any:
        output, weights = own(module, query, key, value, *further, **options)
        return (output + (query.shape[2] > 20) * 0.01 * output.roll(1, 1)), weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", from_far)
    for method in (cn.AttentionWeights, cn.NormAttribution, cn.ALTI, cn.AttentionBlockAttribution):
        method(model).maps(families.inputs("bert", length=20))
        with pytest.raises(cn.UnsupportedModelError, match="weights of layer 0 of BertModel are not those of its own"):
            method(model).maps(families.inputs("bert", length=21))
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is from_far


def test_an_output_that_is_not_finite_somewhere_hides_no_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = families.build("bert"), ALL_ATTENTION_FUNCTIONS["sdpa"]

    def other(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        output, weights = own(module, *arguments, **options)
        if module is model.encoder.layer[1].attention.self:
            output = output + 0.01 * output.roll(1, 1)
            output[:, 0] = torch.nan
        return output, weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", other)
    with pytest.raises(cn.UnsupportedModelError, match="weights of layer 1 of BertModel are not those of its own"):
        cn.AttentionWeights(model).maps(families.inputs("bert"))


def on_padding(
    _: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Causal attention that reads which keys are padding, (B, K), as flash attention does, and never a mask."""
    assert padding is None or padding.dim() == 2
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    behind = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    hidden = (behind < 0) | (behind >= (sliding_window or key.shape[2]))
    if padding is not None:
        hidden = hidden | ~padding[:, None, None].bool()
    weights = (scaling * query @ key.mT).masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()
    return (weights @ value).transpose(1, 2), None


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_an_attention_function_that_sees_padding_alone(name: str, side: str) -> None:
    AttentionInterface.register("on padding", on_padding)
    AttentionMaskInterface.register("on padding", flash_attention_mask)
    model = families.build(name)
    ids, mask = padded([families.inputs(name, seed, 1, 11 - 4 * seed) for seed in (0, 1)], side)
    methods = (cn.AttentionWeights(model), cn.NormAttribution(model), cn.ALTI(model))
    expected = [method.maps(ids, mask).decoder for method in methods]
    model.set_attn_implementation("on padding")
    for method, maps in zip(methods, expected, strict=True):
        torch.testing.assert_close(method.maps(ids, mask).decoder, maps, rtol=1e-5, atol=1e-6)


def test_no_configuration_changes_while_a_model_is_explained() -> None:
    model, seen = families.build("llama"), list[str]()
    model.model.layers[1].register_forward_hook(lambda *_: seen.append(model.config._attn_implementation))
    cn.NormAttribution(model).maps(families.inputs("llama"))
    assert set(seen) == {"sdpa"}


def state(model: nn.Module) -> list[object]:
    """Whatever a call could leave behind: modes, hooks, attributes, registered functions, torch's modes, the lock."""
    registry, held = sorted(ALL_ATTENTION_FUNCTIONS._local_mapping), EXPLAINING._is_owned()  # type: ignore[attr-defined]
    return [families.state_of(model), registry, torch.is_grad_enabled(), torch._C._len_torch_function_stack(), held]


@pytest.mark.few
@pytest.mark.parametrize("method", [cn.NormAttribution, cn.ValueZeroing])
@pytest.mark.parametrize("name", ["bert", "gptj"])
def test_an_interrupt_anywhere_leaves_nothing(name: str, method: Callable[..., Any]) -> None:
    model, ids = families.build(name).train(), families.inputs(name, batch=1, length=4)
    explaining = method(model)
    explaining.maps(ids)
    before = state(model)
    roots = (str(Path(cn.__file__).parent),)
    lines = 10**9 - at_line(10**9, lambda: explaining.maps(ids), roots)[1]
    for step in torch.linspace(1, lines - 1, 30).long().tolist():
        assert at_line(step, lambda: explaining.maps(ids), roots)[0] == 130
        assert state(model) == before, step


VECTOR = torch.linspace(-1, 1, 32, dtype=torch.float64)
PLACES = {
    "block": "model.layers.1",
    "attention": "model.layers.1.self_attn",
    "projection": "model.layers.1.self_attn.o_proj",
    "values": "model.layers.1.self_attn.v_proj",
    "queries": "model.layers.1.self_attn.q_proj",
    "network": "model.layers.1.mlp",
    "norm": "model.layers.1.post_attention_layernorm",
    "embeddings": "model.embed_tokens",
}


def changed(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return (change(result[0]), *result[1:]) if isinstance(result, tuple) else change(result)


def steer(_: Any, __: Any, output: Any) -> Any:
    return changed(output, lambda stream: stream + VECTOR[: stream.shape[-1]])


def scale(_: Any, __: Any, output: Any) -> Any:
    return changed(output, lambda stream: stream * 0.5)


def look(*_: Any) -> None:
    """Change nothing."""


def ablate(_: Any, received: tuple[Tensor, ...]) -> Any:
    """Set the first head to zero."""
    return changed(received, lambda heads: torch.cat([torch.zeros_like(heads[..., :8]), heads[..., 8:]], -1))


def hook(model: Any, place: str, function: Callable[..., Any]) -> None:
    module = model.get_submodule(PLACES[place])
    (module.register_forward_pre_hook if function is ablate else module.register_forward_hook)(function)


EXPLAINED = {
    *((place, look) for place in PLACES),
    *((place, effect) for place in ("projection", "values", "queries", "embeddings") for effect in (steer, scale)),
    *(("network", effect) for effect in (steer, scale)),
    *(("norm", effect) for effect in (steer, scale)),
    ("values", ablate),
    ("queries", ablate),
    ("block", ablate),
    ("network", ablate),
}
CASES = [(place, effect) for place in PLACES for effect in (steer, scale, look, ablate)]
CASES = [case for case in CASES if case not in (("embeddings", ablate), ("attention", ablate))]


@pytest.mark.few
@pytest.mark.parametrize(("place", "effect"), CASES)
def test_hooks_are_part_of_the_model_or_named(place: str, effect: Callable[..., Any]) -> None:
    model, inputs = families.build("llama", dtype=torch.float64), families.inputs("llama", batch=1, length=12)
    hook(model, place, effect)
    named = rf'"{PLACES[place]}" \({effect.__name__}\)'
    model.set_attn_implementation("eager")
    with torch.no_grad(), oracle.watched(model, {"": ("model.layers.1.self_attn.v_proj", "output")}) as seen:
        plain = model(inputs, output_attentions=True)
    if (place, effect) not in EXPLAINED:
        with pytest.raises(cn.CaptumNormError, match=named):
            cn.NormAttribution(model).maps(inputs)
        return
    maps: Any = cn.NormAttribution(model).maps(inputs).decoder
    weight = model.model.layers[1].self_attn.o_proj.weight.detach().T.unflatten(0, (4, 8))
    heads = seen[""][0][0].unflatten(-1, (2, 8)).transpose(0, 1).repeat_interleave(2, 0)
    vectors = torch.einsum("hqk,hkd,hde->qke", plain.attentions[1][0].double(), heads, weight)
    factor = 0.5 if (place, effect) == ("projection", scale) else 1
    torch.testing.assert_close(maps[0, 1], factor * vectors.norm(dim=-1), rtol=1e-6, atol=1e-9)
    if place == "network" and effect is not look:
        with pytest.raises(cn.CaptumNormError, match=named):
            cn.NormMeter(model).measure(inputs, scopes=["atb_ff_res"])
    for method in (cn.DecompX, cn.AttnLRP, cn.CPLRP, cn.GIM):
        rules: Any = method(model)
        if place == "norm" and effect is not look:
            with pytest.raises(cn.CaptumNormError, match=named):
                rules.decompose(inputs, target=7)
        else:
            assert abs(float(rules.decompose(inputs, target=7).number) - float(plain.logits[0, -1, 7])) < 1e-6


def test_hooks_stay_and_are_called_once_for_each_forward_pass() -> None:
    model, inputs, calls = families.build("llama"), families.inputs("llama", batch=1), list[int]()
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda *_: calls.append(1))
    method = cn.NormAttribution(model)
    method.maps(inputs)
    calls.clear()
    method.maps(inputs)
    assert len(calls) == len(layer._forward_hooks) == 1

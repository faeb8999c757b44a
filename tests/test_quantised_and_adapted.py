"""Adapted and quantised models: every method gives what it gives for the merged or dequantised model."""

import copy
import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import captum_norm as cn
from tests.classifiers import randomized

peft = pytest.importorskip("peft", reason="adapters need PEFT")

SIZES: dict[str, Any] = {"vocab_size": 60, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
IDS = torch.tensor([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 9, 3]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def bert() -> Any:
    torch.manual_seed(0)
    config = hf.BertConfig(**SIZES, num_attention_heads=4)
    return randomized(hf.BertForSequenceClassification(config), 0, torch.float32)


def llama() -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    return randomized(hf.LlamaForCausalLM(config), 0, torch.float32)


MODELS = {"bert": bert, "llama": llama}
LINEAR = ["query", "value", "dense", "q_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]
OUTER = ["output.dense", "down_proj"]
ADAPTERS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=LINEAR, init_lora_weights=False),
    "LoRA with biases": lambda: peft.LoraConfig(r=4, target_modules=LINEAR, init_lora_weights=False, bias="all"),
    "rsLoRA": lambda: peft.LoraConfig(r=4, target_modules=LINEAR, init_lora_weights=False, use_rslora=True),
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=LINEAR, init_lora_weights=False, use_dora=True),
    "IA3": lambda: peft.IA3Config(target_modules=[*LINEAR, *OUTER], feedforward_modules=OUTER, init_ia3_weights=False),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=LINEAR, init_weights=False),
    "LoKr": lambda: peft.LoKrConfig(r=4, target_modules=LINEAR, init_weights=False),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["query", "value", "q_proj", "o_proj"], init_weights=False),
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=8, target_modules=LINEAR, init_weights=False),
}
METHODS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda model: cn.NormAttribution(model).maps(IDS, MASK),
    "norm, attn_res": lambda model: cn.NormAttribution(model, "attn_res").maps(IDS, MASK),
    "attention block": lambda model: cn.AttentionBlockAttribution(model).maps(IDS, MASK),
    "feed-forward": lambda model: cn.AttentionBlockAttribution(model, "atb_ff_res").maps(IDS, MASK),
    "rollout": lambda model: cn.AttentionRollout(model).attribute(IDS, additional_forward_args=MASK),
    "alti": lambda model: cn.ALTI(model).attribute(IDS, additional_forward_args=MASK),
    "value zeroing": lambda model: cn.ValueZeroing(model).maps(IDS, MASK),
    "attention × gradient": lambda model: cn.AttentionTimesGradient(model).attribute(IDS, 1, MASK),
    "decompx": lambda model: cn.DecompX(model).attribute(IDS, 1, MASK),
    "attnlrp": lambda model: cn.AttnLRP(model).attribute(IDS, 1, MASK),
    "decompx, propagated": lambda model: cn.DecompX(model).maps(IDS, MASK).self_attention,
}
"""Scores or maps of each method."""


def numbers(found: Any) -> Tensor:
    if isinstance(found, Tensor):
        return found
    (maps,) = (maps for maps in (found.encoder, found.decoder) if maps is not None)
    assert isinstance(maps, Tensor)
    return maps


def adapted(name: str, adapter: str) -> Any:
    """A model with an adapter all of whose parameters are drawn."""
    model = peft.get_peft_model(MODELS[name](), ADAPTERS[adapter]())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.requires_grad and "classifier" not in key:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def expect_same(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max() / expected.abs().max()) < tolerance


@pytest.mark.few
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", ["bert", pytest.param("llama", marks=pytest.mark.long)])
def test_unmerged_is_merged(name: str, adapter: str) -> None:
    model = adapted(name, adapter).double()  # in float32 the two models round differently themselves
    merged = copy.deepcopy(model).merge_and_unload().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        output = model(IDS, MASK).logits
        torch.testing.assert_close(output, merged(IDS, MASK).logits, rtol=1e-9, atol=1e-9)
    for method, run in METHODS.items():
        if adapter in ("LoRA", "DoRA") or method in ("norm", "feed-forward", "decompx", "attnlrp"):
            try:
                expected = numbers(run(merged))
            except cn.CaptumNormError as error:
                with pytest.raises(type(error)):
                    run(model)
                continue
            expect_same(numbers(run(model)), expected, 1e-9)
    with torch.no_grad():
        assert torch.equal(model(IDS, MASK).logits, output)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_adapters_are_followed_as_they_are_switched() -> None:
    model = adapted("bert", "LoRA")
    model.add_adapter("other", ADAPTERS["LoRA"]())
    method = cn.NormAttribution(model)

    def expect_merged(active: list[str]) -> Tensor:
        copied = copy.deepcopy(model)
        merged = copied.merge_and_unload(adapter_names=active) if active else copied.unload()
        expected = numbers(cn.NormAttribution(merged.eval()).maps(IDS, MASK))
        expect_same(found := numbers(method.maps(IDS, MASK)), expected, 1e-5)
        return found

    first = expect_merged(["default"])
    model.set_adapter("other")
    assert not torch.allclose(expect_merged(["other"]), first, rtol=1e-2)
    model.base_model.set_adapter(["default", "other"])
    assert not torch.allclose(expect_merged(["default", "other"]), first, rtol=1e-2)
    with model.disable_adapter():
        plain = expect_merged([])
    assert not torch.allclose(plain, first, rtol=1e-2)
    model.set_adapter("default")
    torch.testing.assert_close(expect_merged(["default"]), first)


def scaled_adapters(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(2)


def scaled_rows(model: Any) -> None:
    for layer in model.bert.encoder.layer:
        module = layer.attention.output.dense
        scales = module.weight.SCB if module.state.SCB is None else module.state.SCB
        scales.mul_(torch.linspace(0.9, 1.1, len(scales)))


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: adapted("bert", "LoRA"), scaled_adapters),
        (lambda: adapted("bert", "LoRA").bfloat16(), scaled_adapters),
        (lambda: with_bitsandbytes(bert(), 8, has_fp16_weights=False, threshold=6.0), scaled_rows),
    ],
    ids=["LoRA", "LoRA in bfloat16", "LLM.int8"],
)
def test_changes_that_leave_no_trace_are_followed(make: Callable[[], Any], change: Callable[[Any], None]) -> None:
    """Weights written through ``.data``, as an averaged model is swapped in, and tensors inside of objects."""
    model, fresh = make(), make()
    method = cn.NormAttribution(model)
    before = numbers(method.maps(IDS, MASK))
    change(model)
    change(fresh)
    after = numbers(method.maps(IDS, MASK))
    assert torch.equal(after, numbers(cn.NormAttribution(fresh).maps(IDS, MASK)))
    assert not torch.allclose(after, before, rtol=1e-2)


def replaced(model: Any, make: Callable[[nn.Linear], nn.Module]) -> Any:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and not name.endswith(("head", "classifier", "pooler.dense")):
            model.set_submodule(name, make(module))
    return model.eval()


class Packed(nn.Module):
    """A linear map whose matrix is kept in groups of integers, as GPTQ, AWQ and GGUF keep it."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        columns = module.weight.detach().T
        scales = columns.unflatten(0, (-1, 16)).abs().amax(1) / 7
        self.register_buffer("scales", scales)
        self.register_buffer("qweight", (columns.unflatten(0, (-1, 16)) / scales[:, None]).round().to(torch.int8))
        self.bias: nn.Parameter | None = module.bias

    def forward(self, inputs: Tensor) -> Tensor:
        matrix: Any = (self.qweight * self.scales[:, None]).flatten(0, 1).to(inputs)  # type: ignore[operator, index]
        products: Tensor = inputs @ matrix
        return products if self.bias is None else products + self.bias


def with_bitsandbytes(model: Any, bits: int, **options: Any) -> Any:
    kinds = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").nn

    def make(module: nn.Linear) -> nn.Module:
        kind = kinds.Linear8bitLt if bits == 8 else kinds.Linear4bit
        made = kind(module.in_features, module.out_features, bias=module.bias is not None, **options)
        made.load_state_dict(module.state_dict())
        quantised: nn.Module = made.to("cpu")
        return quantised

    return replaced(model, make)


def with_quanto(model: Any, weights: str) -> Any:
    quanto = pytest.importorskip("optimum.quanto", reason="needs optimum-quanto")
    # What it compiles at its first use in an environment, for 40 seconds.
    unpack = SimpleNamespace(unpack=lambda packed, _bits: torch.cat([packed & 15, packed >> 4]))
    importlib.import_module("optimum.quanto.library").get_extension("quanto_cpp")._lib = unpack
    quanto.quantize(model, weights=getattr(quanto, weights))
    quanto.freeze(model)
    return model.eval()


def with_torchao(model: Any, config: str, **options: Any) -> Any:
    torchao = pytest.importorskip("torchao.quantization", reason="needs torchao")
    torchao.quantize_(model, getattr(torchao, config)(**options))
    return model


def with_hqq(model: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(f"{sys.prefix}/hqq")  # where `make` installs it
        hqq = pytest.importorskip("hqq.core.quantize", reason="needs hqq")
    config = hqq.BaseQuantizeConfig(nbits=4, group_size=32)
    return replaced(model, lambda module: hqq.HQQLinear(module, config, compute_dtype=torch.float32, device="cpu"))


def dynamic(model: Any) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


# What rounds its inputs to eight bits, and what computes in bfloat16 on some processors, agrees with the dequantised
# model as far as that rounding allows.
EXACT, HALF, ROUNDED = 1e-5, 2e-2, 5e-2
QUANTISED: dict[str, tuple[Callable[[Any], Any], float]] = {
    "packed integers": (lambda model: replaced(model, Packed), EXACT),
    "HQQ": (with_hqq, EXACT),
    "quanto int8": (lambda model: with_quanto(model, "qint8"), EXACT),
    "quanto int4": (lambda model: with_quanto(model, "qint4"), EXACT),
    "quanto float8": (lambda model: with_quanto(model, "qfloat8"), EXACT),
    "torchao int8": (lambda model: with_torchao(model, "Int8WeightOnlyConfig"), EXACT),
    "torchao float8": (lambda model: with_torchao(model, "Float8WeightOnlyConfig"), EXACT),
    "NF4": (lambda model: with_bitsandbytes(model, 4, quant_type="nf4", compute_dtype=torch.float32), HALF),
    "FP4": (lambda model: with_bitsandbytes(model, 4, quant_type="fp4", compute_dtype=torch.float32), HALF),
    "LLM.int8": (lambda model: with_bitsandbytes(model, 8, has_fp16_weights=False, threshold=6.0), ROUNDED),
    "torchao dynamic int8": (lambda model: with_torchao(model, "Int8DynamicActivationInt8WeightConfig"), ROUNDED),
    "dynamic int8": (dynamic, ROUNDED),
}
kinds = pytest.mark.parametrize("kind", QUANTISED)


def dequantised(plain: Any, quantised: Any) -> Any:
    """The plain model with the matrices that the quantised one multiplies unit vectors with."""
    for name, module in plain.named_modules():
        other = quantised.get_submodule(name)
        if type(module) is nn.Linear:
            with torch.no_grad():
                units = torch.eye(module.in_features)[None]
                bias = other(0 * units[:, :2])[0, 0]
                module.weight.copy_((other(units)[0] - bias).T)
                if module.bias is not None:
                    module.bias.copy_(bias)
    return plain


@pytest.mark.few
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@kinds
@pytest.mark.parametrize("name", ["bert", pytest.param("llama", marks=pytest.mark.long)])
def test_quantised_is_dequantised(name: str, kind: str) -> None:
    quantise, tolerance = QUANTISED[kind]
    model = quantise(MODELS[name]())
    plain = dequantised(MODELS[name](), model)
    for method in ("norm", "norm, attn_res", "feed-forward", "rollout", "alti", "decompx, propagated"):
        if (kind, method) != ("dynamic int8", "decompx, propagated"):  # a row's rounding depends on the others
            expect_same(numbers(METHODS[method](model)), numbers(METHODS[method](plain)), tolerance)
    delta: Any = cn.AttentionBlockAttribution(model, "atb_ff_res").maps(IDS, MASK).convergence_delta
    # What rounding leaves is reported.
    assert delta.max() < 1e-5 if tolerance == EXACT else delta.max() > 1e-4 or tolerance == HALF


def test_an_adapter_on_quantised_weights() -> None:
    """QLoRA."""
    quantised = with_bitsandbytes(bert(), 4, quant_type="nf4", compute_dtype=torch.float32)
    model = peft.get_peft_model(quantised, ADAPTERS["LoRA"]()).eval()
    plain = dequantised(bert(), model.base_model.model)
    for method in ("norm", "feed-forward", "rollout"):
        expect_same(numbers(METHODS[method](model)), numbers(METHODS[method](plain)), HALF)


def contents(value: Any) -> Any:
    """What a value holds, to its last byte, but for the parts of modules and for what torch keeps of any module."""
    if isinstance(value, Tensor):
        flatten: Any = getattr(value, "__tensor_flatten__", lambda: ([], None))
        names = flatten()[0] if type(value).__module__.startswith(("torchao", "optimum")) else []
        parts: Any = [getattr(value, name) for name in names]
        data = parts or value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        return type(value), value.dtype, value.shape, contents(data), contents(vars(value))
    if isinstance(value, dict):
        return {key: contents(entry) for key, entry in value.items() if not str(key).startswith(("_forward", "_back"))}
    if isinstance(value, (list, tuple)):
        return [contents(entry) for entry in value]
    if type(value).__module__.startswith("bitsandbytes") and not isinstance(value, nn.Module):
        return contents(vars(value))
    return value if isinstance(value, (bytes, int, float, str, torch.dtype, type(None))) else type(value)


def state(model: nn.Module) -> Any:
    return {name: contents(vars(module) | {"_modules": None}) for name, module in model.named_modules()}


def gradients(model: Any) -> list[Tensor]:
    model.zero_grad()
    model(IDS, MASK).logits.square().mean().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert all(float(gradient.norm()) > 0 for name, gradient in found.items() if "lora_" in name)
    model.zero_grad()
    return list(found.values())


def test_training_goes_on_after_every_method() -> None:
    """In eval mode bitsandbytes packs weights of four bits for the CPU, for good, and then they pass no gradient on."""
    quantised = with_bitsandbytes(llama(), 4, quant_type="nf4", compute_dtype=torch.float32)
    model = peft.get_peft_model(quantised, ADAPTERS["LoRA"]()).train()
    expected, before = gradients(model), state(model)
    for run in METHODS.values():
        run(model)
        assert state(model) == before
        assert all(map(torch.equal, gradients(model), expected))
    handle = model.get_submodule("base_model.model.model.norm").register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        cn.NormAttribution(model).maps(IDS, MASK)
    handle.remove()
    assert state(model) == before
    assert all(map(torch.equal, gradients(model), expected))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@kinds
def test_a_quantised_model_that_has_never_run_is_left_as_it_was(kind: str) -> None:
    model = QUANTISED[kind][0](llama())
    before = state(model)
    cn.NormAttribution(model).maps(IDS, MASK)
    assert state(model) == before


def test_inputs_rounded_to_four_bits_are_refused_with_the_way_out() -> None:
    class Coarse(Packed):
        def forward(self, inputs: Tensor) -> Tensor:
            step = inputs.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7
            return super().forward((inputs / step).round() * step)

    with pytest.raises(cn.CaptumNormError, match=r"dequantize\(\)"):
        cn.NormAttribution(replaced(bert(), Coarse)).maps(IDS, MASK)

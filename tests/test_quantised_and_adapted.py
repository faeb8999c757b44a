"""Adapted and quantised models: every method gives what it gives for the merged or dequantised model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from captum_norm import (
    ALTI,
    AttentionBlockAttribution,
    AttentionRollout,
    AttentionTimesGradient,
    CaptumNormError,
    DecompX,
    NormAttribution,
    ValueZeroing,
)

peft = pytest.importorskip("peft", reason="adapters need PEFT")

SIZES = {"vocab_size": 60, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
IDS = torch.tensor([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 9, 3]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def randomized(model: Any) -> Any:
    """Draw parameters, biases and gains too, so that none is negligible."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            width = parameter.shape[-1] if parameter.dim() > 1 else 9
            parameter.add_(torch.randn(parameter.shape, generator=generator) / width**0.5)
    return model.eval()


def bert() -> Any:
    return randomized(hf.BertForSequenceClassification(hf.BertConfig(**SIZES, num_attention_heads=4)))


def llama() -> Any:
    config = hf.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    return randomized(hf.LlamaForCausalLM(config))


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
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=8, target_modules=LINEAR, init_weights=False),
}
METHODS: dict[str, Callable[[Any], Tensor]] = {
    "norm": lambda model: NormAttribution(model).maps(IDS, MASK),
    "norm, attn_res": lambda model: NormAttribution(model, "attn_res").maps(IDS, MASK),
    "attention block": lambda model: AttentionBlockAttribution(model).maps(IDS, MASK),
    "feed-forward": lambda model: AttentionBlockAttribution(model, "atb_ff_res").maps(IDS, MASK),
    "rollout": lambda model: AttentionRollout(model).attribute(IDS, additional_forward_args=MASK),
    "alti": lambda model: ALTI(model).attribute(IDS, additional_forward_args=MASK),
    "value zeroing": lambda model: ValueZeroing(model).maps(IDS, MASK),
    "attention × gradient": lambda model: AttentionTimesGradient(model).attribute(IDS, 1, MASK),
    "decompx": lambda model: DecompX(model).attribute(IDS, 1, MASK),
    "decompx, propagated": lambda model: DecompX(model).vectors(IDS, MASK).vectors,
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


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", MODELS)
def test_unmerged_is_merged(name: str, adapter: str) -> None:
    model = adapted(name, adapter)
    merged = copy.deepcopy(model).merge_and_unload().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        output = model(IDS, MASK).logits
        torch.testing.assert_close(output, merged(IDS, MASK).logits, rtol=1e-4, atol=1e-4)
    for method, run in METHODS.items():
        if adapter in ("LoRA", "DoRA") or method in ("norm", "feed-forward", "decompx"):
            try:
                expected = numbers(run(merged))
            except CaptumNormError as error:
                with pytest.raises(type(error)):
                    run(model)
                continue
            expect_same(numbers(run(model)), expected, 1e-5)
    with torch.no_grad():
        assert torch.equal(model(IDS, MASK).logits, output)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

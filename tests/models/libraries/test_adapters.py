"""DoRA's norms are taken once while a model is being understood; nothing else changes."""

import threading
from collections import Counter
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from captum_norm import NormAttribution
from captum_norm.models.libraries.adapters import norms_taken_once

peft = pytest.importorskip("peft", reason="adapters need PEFT")

IDS = torch.tensor([[3, 14, 15, 9, 26, 5]])
SIZES: dict[str, Any] = {"vocab_size": 60, "hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 4}


def adapted() -> Any:
    torch.manual_seed(0)
    targets = ["query", "value", "dense", "word_embeddings"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, use_dora=True)
    model = hf.BertModel(hf.BertConfig(**SIZES, num_hidden_layers=2))
    return peft.get_peft_model(model, config).eval()


def adapters(model: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in model.named_modules() if hasattr(module, "get_weight_norm")}


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> Counter[nn.Module]:
    """How often each adapter took its norm."""
    taken: Counter[nn.Module] = Counter()
    kind = peft.tuners.lora.dora.DoraLinearLayer
    own = kind.get_weight_norm

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        taken[self] += 1
        norm: Tensor = own(self, *args, **kwargs)
        return norm

    monkeypatch.setattr(kind, "get_weight_norm", counted)
    return taken


def test_outputs_are_the_same_and_norms_are_taken_once(norms: Counter[nn.Module]) -> None:
    model = adapted()
    with torch.no_grad():
        expected = model(IDS).last_hidden_state
        norms.clear()
        with norms_taken_once(model):
            outputs = [model(IDS).last_hidden_state for _ in range(3)]
    assert all(torch.equal(output, expected) for output in outputs)
    assert len(adapters(model)) == 2 * 5 + 2
    assert norms == dict.fromkeys(adapters(model), 1)
    assert not any("get_weight_norm" in vars(module) or "get_lora_weight" in vars(module) for module in adapters(model))


def test_changes_in_between_are_seen() -> None:
    model = adapted()
    with torch.no_grad():
        with norms_taken_once(model):
            before = model(IDS).last_hidden_state
        for parameter in model.parameters():
            parameter.data.mul_(1.1)
        expected = model(IDS).last_hidden_state
        with norms_taken_once(model):
            assert torch.equal(model(IDS).last_hidden_state, expected)
    assert not torch.allclose(before, expected)


def test_gradients_and_inference_mode_in_turns() -> None:
    model = adapted()
    model(IDS).last_hidden_state.square().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert any("magnitude" in name for name in expected)
    model.zero_grad()
    with norms_taken_once(model):
        with torch.inference_mode():
            model(IDS)
        with torch.no_grad():
            model(IDS)
        model(IDS).last_hidden_state.square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_another_thread_takes_its_own(norms: Counter[nn.Module]) -> None:
    model = adapted()
    module: Any = next(module for module in adapters(model) if type(module).__name__ == "DoraLinearLayer")
    base = nn.Linear(24, 24)
    down, up = nn.Linear(24, 4, bias=False), nn.Linear(4, 24, bias=False)

    def take() -> None:
        matrix = module.get_lora_weight(lora_A=down, lora_B=up, adapter_name="default")
        module.get_weight_norm(base.weight, matrix, 1.0, adapter_name="default")

    norms.clear()
    with torch.no_grad(), norms_taken_once(model):
        for _ in range(2):
            take()
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
    assert norms[module] == 2


@pytest.mark.parametrize("inference", [False, True])
def test_the_first_explanation_takes_each_norm_twice_and_later_ones_once(
    norms: Counter[nn.Module], inference: bool
) -> None:
    model = adapted()
    method = NormAttribution(model)
    norms.clear()
    with torch.inference_mode(inference):
        method.maps(IDS)
        # Once to see the model's first positions, and once to find its blocks.
        assert set(norms) == set(adapters(model))
        assert max(norms.values()) == 2
        norms.clear()
        method.maps(IDS)
    assert norms == dict.fromkeys(adapters(model), 1)

"""The cost of adapters and quantised weights: ``python -m benchmarks.ecosystem``.

Norms of all layers of a BERT-base-shaped encoder with random weights, for each of its forms. The first call understands
the model and measures its maps; warm calls follow. The targets are 3 times the first call of the plain model, and 1.05
times the warm call, each relative to the model's own forward pass. The forms are timed in turns with the plain model.

A model that is not understood is refused in at most two seconds more than its forward pass, at 64 layers.
"""

import argparse
import copy
import importlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from types import MethodType
from typing import Any

import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from captum_norm import NormAttribution, UnsupportedModelError

Form = Callable[[BertModel], nn.Module]
WARM = 5


def lora(model: Any, **options: Any) -> Any:
    """Adapt all linear maps."""
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False, **options))


def ia3(model: Any) -> Any:
    """Rescale values, and what the feed-forward networks' outer maps read."""
    targets = ["query", "value", "output.dense"]
    return get_peft_model(model, IA3Config(target_modules=targets, feedforward_modules=["output.dense"]))


def replaced(model: BertModel, make: Callable[[nn.Linear], nn.Module]) -> BertModel:
    """Replace the linear maps of a model."""
    for name, module in list(model.encoder.named_modules(prefix="encoder")):
        if type(module) is nn.Linear:
            model.set_submodule(name, make(module))
    return model


def bitsandbytes() -> Any:
    """Return its modules, which have no types."""
    return importlib.import_module("bitsandbytes.nn")


def eight_bits(module: nn.Linear) -> nn.Module:
    """Return a map of bitsandbytes, LLM.int8."""
    made = bitsandbytes().Linear8bitLt(module.in_features, module.out_features, has_fp16_weights=False, threshold=6.0)
    made.load_state_dict(module.state_dict())
    quantised: nn.Module = made.to("cpu")
    return quantised


def four_bits(module: nn.Linear) -> nn.Module:
    """Return a map of bitsandbytes, NF4."""
    made = bitsandbytes().Linear4bit(
        module.in_features, module.out_features, compute_dtype=torch.float32, quant_type="nf4"
    )
    made.load_state_dict(module.state_dict())
    quantised: nn.Module = made.to("cpu")
    return quantised


def weight_only(model: BertModel) -> BertModel:
    """Quantise with quanto, weights alone."""
    quanto: Any = importlib.import_module("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    return model


def dynamic(model: BertModel) -> nn.Module:
    """Quantise weights and inputs with torch."""
    quantized: nn.Module = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    return quantized


FORMS: dict[str, Form] = {
    "LoRA": lora,
    "DoRA": partial(lora, use_dora=True),
    "IA3": ia3,
    "LLM.int8 (bitsandbytes)": partial(replaced, make=eight_bits),
    "NF4 (bitsandbytes)": partial(replaced, make=four_bits),
    "int8 weights (quanto)": weight_only,
    "dynamic int8 (torch)": dynamic,
}


def seconds(run: Callable[[], object]) -> float:
    """Return the time of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def costs(model: nn.Module, ids: Tensor) -> tuple[float, Callable[[], float]]:
    """Return the first explanation ÷ the forward pass, and a function that returns this ratio of a warm one."""
    method = NormAttribution(model)

    def forward() -> object:
        with torch.no_grad():
            return model(input_ids=ids)

    def explained() -> object:
        return method.maps({"input_ids": ids})

    def warm() -> float:
        own = seconds(forward)
        return seconds(explained) / min(own, seconds(forward))

    forward()
    first = seconds(explained)
    return first, warm


def compare(length: int, forms: Sequence[str]) -> None:
    """Print the ratios of some forms to the plain model."""
    ids = torch.randint(0, 30_000, (1, length))
    plain: Any = BertModel(BertConfig())
    plain.eval()
    print(f"BERT-base shape, 1 × {length}: adapted or quantised ÷ plain\n")
    print("| form | first call (≤ 3) | warm calls (≤ 1.05) |\n|---|---|---|")
    for name, form in FORMS.items():
        if forms and name not in forms:
            continue
        adapted = form(copy.deepcopy(plain)).eval()
        other_first, other_warm = costs(adapted, ids)
        first, warm = costs(copy.deepcopy(plain), ids)
        ratio = median(other_warm() / warm() for _ in range(WARM))
        print(f"| {name} | {other_first / first:.2f} | {ratio:.2f} |", flush=True)


def refusal(layers: int) -> tuple[float, float]:
    """Return the time of a forward pass of a model that is not understood, and that of its refusal."""

    def squashed(layer: Any, hidden_states: Tensor, **options: Any) -> Tensor:
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
        hidden_states = hidden_states + attended.sin()
        fed: Tensor = layer.mlp(layer.post_attention_layernorm(hidden_states))
        return hidden_states + fed

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 100}
    model: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))
    model.eval()
    for layer in model.model.layers:
        layer.forward = MethodType(squashed, layer)
    ids = torch.randint(0, 100, (1, 16))

    def refused() -> None:
        try:
            NormAttribution(model).maps(ids)
        except UnsupportedModelError as error:
            if len(str(error)) > 400:
                raise AssertionError("the message has more than 400 characters") from error
        else:
            raise AssertionError("expected a refusal")

    model(ids)
    return seconds(lambda: model(ids)), seconds(refused)


def main() -> None:
    """Print the ratios and the time of a refusal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=64, help="of the model refused (default: %(default)s)")
    parser.add_argument("--forms", nargs="+", default=(), choices=FORMS, help="only these")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    compare(arguments.length, arguments.forms)
    own, taken = refusal(arguments.layers)
    print(f"\nrefusal at {arguments.layers} layers: {taken - own:.2f} s beyond the forward pass (to reach: ≤ 2)")


if __name__ == "__main__":
    main()

"""Readings of linear maps, norms and activations, also where what the modules were seen to compute is ambiguous."""

from types import MethodType
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from captum_norm import ALTILogit, AttentionBlockAttribution, AttnLRP, CaptumNormError, DecompX, NormMeter
from captum_norm.models.projections import NormReader, Projection, read_norm, read_projection, read_step
from tests import families, oracle

WIDTH = 32
Conv1D: Any = hf.pytorch_utils.Conv1D  # without type annotations
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class Rows(nn.Module):
    """Keeps its matrix as (inputs, outputs), as no class does that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight + self.bias


class Columns(Rows):
    """The other way round."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight.T + self.bias


class Turned(nn.Linear):
    """Derived from nn.Linear, and still the other way round."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight + self.bias


class Adapted(nn.Linear):
    """Computes more than its weight and bias say."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + 1e-9 * inputs.flip(-1)


def patched() -> nn.Module:
    """A linear map whose own forward function was exchanged."""
    module = nn.Linear(WIDTH, WIDTH)
    module.forward = MethodType(Turned.forward, module)  # type: ignore[method-assign]
    return module


MAPS: dict[str, tuple[Any, bool | None]] = {
    "Linear": (lambda: nn.Linear(WIDTH, WIDTH), True),
    "Conv1D": (lambda: Conv1D(WIDTH, WIDTH), False),
    "rows": (Rows, False),
    "columns": (Columns, True),
    "turned": (lambda: Turned(WIDTH, WIDTH), False),
    "patched": (patched, False),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), True),
    "adapted": (lambda: Adapted(WIDTH, WIDTH), None),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MAPS)
def test_the_orientation_of_a_square_matrix_far_smaller_than_its_bias(name: str, dtype: torch.dtype) -> None:
    build, transposed = MAPS[name]
    torch.manual_seed(0)
    module, inputs = build(), torch.randn(1, 5, WIDTH).to(dtype)
    attributes = set(vars(module))
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            parameter.copy_(torch.ones_like(parameter) if key == "bias" else 1e-6 * torch.randn_like(parameter))
        module = module.to(dtype)
        state = torch.random.get_rng_state()
        projection = read_projection(module, inputs, module(inputs))
    assert (None if projection is None else projection.transposed) == transposed
    assert torch.equal(torch.random.get_rng_state(), state)
    assert set(vars(module)) == attributes


class Gain(nn.Module):
    """An RMSNorm that multiplies by 1 + weight in the dtype that it is given."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.zeros(WIDTH)), eps

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (inputs.square().mean(-1, keepdim=True) + self.epsilon).rsqrt() * (1 + self.weight)


class Outside(Gain):
    """ε outside the root."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs / (inputs.square().mean(-1, keepdim=True).sqrt() + self.epsilon) * (1 + self.weight)


class Together(Gain):
    """Statistics of all positions together."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (inputs.square().mean() + self.epsilon).rsqrt() * (1 + self.weight)


class Plain(nn.Module):
    """LayerNorm without parameters, and with one that is added to its input: 0 as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.eps = nn.Parameter(torch.zeros(1)), 1e-5

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.layer_norm(inputs, (WIDTH,), eps=self.eps) + self.shift


NORMS: dict[str, tuple[Any, tuple[bool, float, float] | None]] = {
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), (True, 0, 1e-5)),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH, eps=1e-6), (False, 0, 1e-6)),
    "LlamaRMSNorm": (lambda: LlamaRMSNorm(WIDTH, 1e-6), (False, 0, 1e-6)),
    "Gemma2RMSNorm": (lambda: Gemma2RMSNorm(WIDTH, 1e-6), (False, 1, 1e-6)),
    "Nemotron": (lambda: hf.models.nemotron.modeling_nemotron.NemotronLayerNorm1P(WIDTH), (True, 1, 1e-5)),
    "gain": (lambda: Gain(1e-3), (False, 1, 1e-3)),
    "outside": (lambda: Outside(1e-6), None),
    "together": (lambda: Together(1e-9), None),
    "plain": (Plain, (True, 0, 1e-5)),
    "identity": (nn.Identity, None),
    "dropout": (lambda: nn.Dropout(0.1).train(mode=False), None),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_inputs_that_are_normalised_already(name: str, dtype: torch.dtype) -> None:
    """Mean 0 and variance 1: LayerNorm, RMSNorm and the identity are the same; so are γ and 1 + γ for a large γ."""
    build, expected = NORMS[name]
    torch.manual_seed(0)
    inputs = torch.randn(1, 1, WIDTH, dtype=torch.float64)
    inputs = nn.functional.layer_norm(inputs, (WIDTH,)).to(dtype)
    for gain in (0.0, 1.0, 1e3):
        module = build().to(dtype)
        with torch.no_grad():
            if hasattr(module, "weight"):
                module.weight.fill_(gain)
            reader = read_norm(module, inputs, module(inputs))
        if gain == 0 and expected is not None and expected[1] == 0 and hasattr(module, "weight"):
            continue  # what a norm with γ = 0 divides by is of no consequence
        assert (reader is None) == (expected is None)
        if expected is not None and reader is not None:
            assert (reader.centered, reader.gain_offset) == expected[:2]
            assert reader.read(torch.float64).eps == pytest.approx(expected[2], rel=1e-5)


class Custom(nn.Module):
    """A norm with parameters and code of its own: ``gain`` and ``center`` say what it multiplies and subtracts."""

    def __init__(self, gain: Any, center: Any = 0.0, eps: float = 1e-6, shift: Any = None) -> None:
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.gain, self.center, self.added, self.shift = gain, center, eps, shift

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs - self.center * inputs.mean(-1, keepdim=True)
        root = (inputs.square().mean(-1, keepdim=True) + self.added).sqrt()
        output: Tensor = inputs / root * self.gain(self.scale)
        return output if self.shift is None else output + self.shift(self)


class Grouped(Custom):
    def forward(self, inputs: Tensor) -> Tensor:
        groups = inputs.unflatten(-1, (4, -1))
        groups = groups * (groups.square().mean(-1, keepdim=True) + self.added).rsqrt()
        output: Tensor = groups.flatten(-2) * self.scale
        return output


class Functional(Custom):
    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.rms_norm(inputs, (WIDTH,), self.scale, self.added)


class Unit(Custom):
    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.normalize(inputs, dim=-1) * self.scale


class Tanh(Custom):
    def forward(self, inputs: Tensor) -> Tensor:
        return (0.5 * inputs).tanh() * self.scale


CUSTOM: dict[str, tuple[Any, Any]] = {  # the module, and centered, γ, β and ε
    "scale": (lambda: Custom(lambda s: s), lambda m: (False, m.scale, 0, 1e-6)),
    "1 + scale": (lambda: Custom(lambda s: 1 + s, eps=1e-3), lambda m: (False, 1 + m.scale, 0, 1e-3)),
    "log": (lambda: Custom(lambda s: s.exp(), 1.0, 1e-5), lambda m: (True, m.scale.exp(), 0, 1e-5)),
    "bias": (
        lambda: Custom(lambda s: s, 1.0, 1e-12, lambda m: 9 * m.offset),
        lambda m: (True, m.scale, 9 * m.offset, 1e-12),
    ),
    "functional": (lambda: Functional(None), lambda m: (False, m.scale, 0, 1e-6)),
    "L2": (lambda: Unit(None), lambda m: (False, m.scale / WIDTH**0.5, 0, 0)),
    "groups": (lambda: Grouped(None), None),
    "half of the mean": (lambda: Custom(lambda s: s, 0.5), None),
    "tanh": (lambda: Tanh(None), None),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CUSTOM)
@pytest.mark.parametrize("seed", range(3))
def test_norms_of_any_code_are_read_by_what_they_compute(name: str, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    build, expected = CUSTOM[name]
    module, inputs = build().to(dtype), (3 * torch.randn(2, 5, WIDTH) + 1).to(dtype)
    with torch.no_grad():
        reader: Any = read_norm(module, inputs, module(inputs))
        if expected is None:
            assert reader is None
            return
        for _ in range(2):
            norm = reader.read(torch.float64)
            centered, gain, bias, eps = expected(module)
            assert norm.centered == centered
            assert norm.eps == pytest.approx(eps, rel=1e-5)
            wide = module.double()
            centered, gain, bias, eps = expected(wide)
            torch.testing.assert_close(norm.gain, gain, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(norm.bias, 0 * gain + bias, rtol=1e-9, atol=1e-9)
            module.to(dtype)
            version = reader.version()
            module.scale.mul_(1.5)
            assert reader.version() != version


@pytest.mark.few
@pytest.mark.parametrize("name", ["scale", "1 + scale", "functional", "L2"])
def test_a_model_with_norms_of_its_own_code_is_that_with_rms_norms(name: str) -> None:
    model, plain = (families.build("llama", dtype=torch.float64) for _ in range(2))
    for key, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):
            other = CUSTOM[name][0]().double()
            _, gain, _, eps = CUSTOM[name][1](other)
            norm = nn.RMSNorm(WIDTH, eps=eps, dtype=torch.float64)
            norm.weight = nn.Parameter(gain.detach().clone())
            model.set_submodule(key, other)
            plain.set_submodule(key, norm)
    ids = families.inputs("llama")
    for scope in ("atb", "atb_ln", "atb_ff_res"):
        maps, expected = (AttentionBlockAttribution(each, scope).maps(ids).decoder for each in (model, plain))
        torch.testing.assert_close(maps, expected, rtol=1e-9, atol=1e-11)
    scores, expected = (DecompX(each).attribute(ids, 1) for each in (model, plain))
    torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", [DecompX, AttnLRP, ALTILogit])
def test_the_module_where_the_sum_breaks_first_is_named(method: Any) -> None:
    model, ids = families.build("llama", dtype=torch.float64), families.inputs("llama")
    for key in ("model.layers.1.input_layernorm", "model.layers.0.post_attention_layernorm"):
        model.set_submodule(key, Grouped(None).double())
    name = r'breaks first in "model.layers.0.post_attention_layernorm" \(Grouped\), which is neither'
    with pytest.raises(CaptumNormError, match="atb_ff_res" if method is ALTILogit else name):
        method(model).attribute(ids, 1)


def test_the_epsilon_that_torch_takes_without_one() -> None:
    for dtype in DTYPES:
        module, inputs = nn.RMSNorm(WIDTH).to(dtype), 1e-3 * torch.randn(1, 4, WIDTH)
        with torch.no_grad():
            reader: Any = read_norm(module, inputs.to(dtype), module(inputs.to(dtype)))
        computed = module(1e-3 * inputs.to(dtype)).double()
        norm = reader.read(torch.float64)
        scale = ((1e-3 * inputs.to(dtype)).double().square().mean(-1, keepdim=True) + norm.eps).rsqrt()
        expected = (1e-3 * inputs.to(dtype)).double() * scale
        assert (computed - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm() + 1e-6


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e-8), (torch.float64, 1e-17), (torch.bfloat16, 1e-2)])
def test_gpt2_whose_attention_is_small_beside_the_bias_of_its_projection(dtype: torch.dtype, size: float) -> None:
    """The matrix of its output projection is square, and the bias hides which way round it acts."""
    model, ids = families.build("gpt2", dtype=torch.float64), families.inputs("gpt2")
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight[:, -WIDTH:] *= size
            block.attn.c_attn.bias[-WIDTH:] *= size
            block.attn.c_proj.bias.fill_(1)
        model = model.to(dtype)
    measured = NormMeter(model).measure(ids, scopes=["attn"])["decoder"].norms["attn"]
    exact = oracle.layers(families.FAMILIES["gpt2"], model.double(), ids)
    expected = torch.stack([layer.vectors("attn")[0].norm(dim=-1) for layer in exact], 1)
    error = (measured.double() - expected).flatten(2).norm(dim=-1) / expected.flatten(2).norm(dim=-1)
    assert error.max() < {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 4e-2}[dtype]


def test_what_modules_note_is_not_what_they_are_probed_with() -> None:
    class Noting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.seen: list[torch.Size] = []

        def forward(self, inputs: Tensor) -> Tensor:
            self.seen.append(inputs.shape)
            return super().forward(inputs)

    module, inputs = Noting(), torch.randn(1, 5, WIDTH)
    assert read_projection(module, inputs, module(inputs)) is not None
    assert module.seen == [inputs.shape]


STEP_WIDTH = 6
STEPS: dict[str, tuple[Any, type | None]] = {
    "linear": (lambda: nn.Linear(STEP_WIDTH, 4), Projection),
    "square linear": (lambda: nn.Linear(STEP_WIDTH, STEP_WIDTH), Projection),
    "no bias": (lambda: nn.Linear(STEP_WIDTH, STEP_WIDTH, bias=False), None),
    "Conv1D": (lambda: Conv1D(4, STEP_WIDTH), Projection),
    "LayerNorm": (lambda: nn.LayerNorm(STEP_WIDTH), NormReader),
    "RMSNorm": (lambda: nn.RMSNorm(STEP_WIDTH), NormReader),
    "norm without parameters": (lambda: nn.LayerNorm(STEP_WIDTH, elementwise_affine=False), NormReader),
    "softmax": (lambda: nn.Softmax(dim=-1), None),
    "identity": (nn.Identity, None),
    "dropout": (lambda: nn.Dropout(0.5).train(mode=False), None),
    **{name: (lambda name=name: ACT2FN[name], MethodType) for name in ("gelu_new", "quick_gelu", "silu", "relu2")},
    "sigmoid": (nn.Sigmoid, MethodType),
    "PReLU": (nn.PReLU, MethodType),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("shape", [(2, 5, STEP_WIDTH), (1, STEP_WIDTH)])
def test_steps_are_told_apart(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    build, kind = STEPS[name]
    module, inputs = build(), torch.randn(shape)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        step = read_step(module, inputs, module(inputs))
    assert type(step) is (kind or type(None))
    if isinstance(step, MethodType):
        torch.testing.assert_close(step(inputs), module(inputs))

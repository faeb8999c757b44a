"""Affine maps measured on unit vectors: exact for whatever a module consists of, and refused if it is not affine."""

import copy
import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from captum_norm.models.hooks import evaluating
from captum_norm.models.precision import EIGHT_BITS
from captum_norm.models.probes import TOLERATED, affine_test
from captum_norm.models.projections import UNIT_VECTORS, Projection, affine_map, read_projection

IN, OUT = 24, 20


class LowRank(nn.Module):
    """A linear map with a low-rank addition, as LoRA makes it, for several names of which one is active."""

    def __init__(self, seed: int = 0, width: int = IN) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base: Any = nn.Linear(width, OUT)
        self.down: Any = nn.ModuleDict({name: nn.Linear(width, 3, bias=False) for name in ("one", "two")})
        self.up: Any = nn.ModuleDict({name: nn.Linear(3, OUT, bias=False) for name in ("one", "two")})
        self.active: str | None = "one"
        self.scaling = {"one": 0.5, "two": 2.0}

    def forward(self, inputs: Tensor) -> Tensor:
        base: Tensor = self.base(inputs)
        if self.active is None:
            return base
        added: Tensor = self.up[self.active](self.down[self.active](inputs))
        return base + self.scaling[self.active] * added

    def merged(self) -> Tensor:
        """The matrix, (inputs, outputs), in float64."""
        weight = self.base.weight.double()
        if self.active is not None:
            up, down = (maps[self.active].weight.double() for maps in (self.up, self.down))
            weight = weight + self.scaling[self.active] * up @ down
        matrix: Tensor = weight.T
        return matrix


def rounded(inputs: Tensor, levels: int, dim: int | None) -> Tensor:
    """Round to multiples of a step such that the largest entry (of each row if dim is -1) is ``levels`` steps."""
    largest = inputs.abs().max() if dim is None else inputs.abs().amax(dim, keepdim=True)
    step = largest.clamp(min=1e-30) / levels
    return (inputs / step).round() * step


def asymmetric(inputs: Tensor) -> Tensor:
    """Round to 256 levels between the smallest and the largest entry of the tensor."""
    low, high = inputs.min().clamp(max=0), inputs.max().clamp(min=0)
    step = ((high - low) / 255).clamp(min=1e-30)
    zero = (-low / step).round()
    return ((inputs / step + zero).round().clamp(0, 255) - zero) * step


class Rounding(nn.Module):
    """A linear map of rounded inputs."""

    def __init__(self, rounding: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.map, self.other, self.rounding = nn.Linear(IN, OUT), nn.Linear(IN, OUT), rounding

    def forward(self, inputs: Tensor) -> Tensor:
        return self.map(self.rounding(inputs))  # type: ignore[no-any-return]


def applied(function: Callable[[LowRank, Tensor], Tensor]) -> LowRank:
    """A module that computes ``function`` of a map and its input."""

    class Applied(LowRank):
        def forward(self, inputs: Tensor) -> Tensor:
            return function(self, inputs)

    return Applied()


def read(module: nn.Module, inputs: Tensor) -> Projection:
    with torch.no_grad():
        found = read_projection(module, inputs, module(inputs))
    assert found is not None
    assert found.transposed is None
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bias", [1.0, 1e4])
def test_the_matrix_is_the_merged_one(seed: int, bias: float) -> None:
    module = LowRank(seed, width=UNIT_VECTORS + 7)
    with torch.no_grad():
        module.base.bias.mul_(bias)
    found = read(module, torch.randn(2, 5, UNIT_VECTORS + 7))
    matrix = found.weight(torch.float64)
    assert (matrix - module.merged()).abs().max() < 1e-6 * module.merged().abs().max()
    assert torch.equal(found.bias(torch.float32), module.base.bias.detach())  # type: ignore[arg-type]
    assert (found.dtype, found.precision, found.outputs) == (torch.float32, torch.float32, OUT)


def runs_of(module: nn.Module) -> list[int]:
    """A list that gets the number of rows of each later run of a module."""
    counts: list[int] = []
    module.register_forward_hook(lambda _, inputs, __: counts.append(inputs[0].shape[1]))
    return counts


@torch.no_grad()
def test_a_module_runs_only_a_few_times() -> None:
    """Some adapters and quantised weights compute a whole matrix in each run."""
    module, inputs = LowRank(width=UNIT_VECTORS + 7), torch.randn(1, 5, UNIT_VECTORS + 7)
    counts = runs_of(module)
    found: Any = affine_map(module, inputs)
    assert len(counts) == 2
    assert sum(counts) < 40
    counts.clear()
    found.weight(torch.float32)
    found.bias(torch.float32)
    found.version()
    assert counts == [2, UNIT_VECTORS, 7]


class Bottleneck(LowRank):
    """An adapter with an activation, which adds nothing before it is trained."""

    def __init__(self, layer: int, gain: float) -> None:
        super().__init__()
        self.layer, self.place = layer, f"layers.{layer}.map"
        with torch.no_grad():
            self.up["one"].weight.mul_(gain)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.up["one"](self.down["one"](inputs).relu())  # type: ignore[no-any-return]


def test_an_untrained_adapter_does_not_speak_for_the_trained_ones() -> None:
    untrained, trained, later = Bottleneck(0, 0.0), Bottleneck(1, 1.0), Bottleneck(2, 1.0)
    is_affine, inputs = affine_test(), torch.randn(1, 5, IN)
    counts = runs_of(later)
    assert is_affine(untrained, inputs)
    assert not is_affine(trained, inputs)
    # One with the same parts is not run.
    assert not is_affine(later, inputs)
    assert not counts


@torch.no_grad()
def test_a_change_of_any_kind_is_seen_and_nothing_else_measures_again() -> None:
    module, inputs = LowRank(), torch.randn(1, 5, IN)
    found = read(module, inputs)
    calls: list[object] = []
    handle = module.register_forward_hook(lambda *seen: calls.append(seen))

    def expect(*, measured: bool) -> None:
        calls.clear()
        assert (found.weight(torch.float64) - module.merged()).abs().max() < 1e-6
        version = found.version()
        assert bool(calls) == measured
        calls.clear()
        assert (found.weight(torch.float64) - module.merged()).abs().max() < 1e-6
        assert found.version() is version
        assert not calls

    expect(measured=True)
    module.register_forward_pre_hook(lambda *_: None).remove()
    expect(measured=False)
    module.active = "two"
    expect(measured=True)
    module.scaling["two"] = 3.0
    expect(measured=True)
    module.active = None
    expect(measured=True)
    with torch.no_grad():
        module.base.weight.mul_(2)
    expect(measured=True)
    module.base = nn.Linear(IN, OUT)
    expect(measured=True)
    handle.remove()


def test_gradients_reach_the_parameters_where_they_are_enabled() -> None:
    module = LowRank()
    found = read(module, torch.randn(1, 5, IN))
    found.weight(torch.float32)
    with torch.enable_grad():
        found.weight(torch.float32).square().sum().backward()
    expected = copy.deepcopy(module)
    expected.zero_grad()
    up, down = expected.up["one"].weight, expected.down["one"].weight
    (expected.base.weight + 0.5 * up @ down).square().sum().backward()
    for name in ("base", "up.one", "down.one"):
        parts: list[Any] = [one.get_submodule(name) for one in (module, expected)]
        gradient, wanted = (part.weight.grad for part in parts)
        assert (gradient - wanted).abs().max() < 1e-4 * wanted.abs().max(), name


def test_a_measured_module_is_not_kept_alive() -> None:
    module = LowRank()
    read(module, torch.randn(1, 5, IN)).weight(torch.float32)
    watched = ref(module)
    del module
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        ("by row", lambda inputs: rounded(inputs, 127, -1)),
        ("by tensor", lambda inputs: rounded(inputs, 127, None)),
        ("asymmetric", asymmetric),
    ],
)
def test_inputs_rounded_to_eight_bits(name: str, rounding: Callable[[Tensor], Tensor]) -> None:
    module = Rounding(rounding)
    found = read(module, torch.randn(2, 5, IN))
    assert found.precision == EIGHT_BITS, name
    assert (found.weight(torch.float32) - module.map.weight.T).abs().max() < 1e-6
    assert (found.bias(torch.float32) - module.map.bias).abs().max() < 1e-7  # type: ignore[operator]
    # What is tolerated is not far above what such rounding makes.
    rows = torch.randn(64, IN)
    error = (module(rows) - module.map(rows)).norm(dim=-1) / (module.map(rows) - module.map.bias).norm(dim=-1)
    assert TOLERATED / 20 < error.max() < TOLERATED


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_products_in_half_precision_between_float32(bias: float) -> None:
    module = applied(lambda own, inputs: own.base(inputs.bfloat16()).float() + bias)
    module.base.bfloat16()
    torch.nn.init.zeros_(module.base.bias)
    found = read(module, torch.randn(2, 5, IN))
    assert (found.dtype, found.precision) == (torch.float32, torch.bfloat16)
    assert (found.weight(torch.float32) - module.base.weight.T.float()).abs().max() < 1e-6


REFUSED = {
    "four bits": Rounding(lambda inputs: rounded(inputs, 7, -1)),
    "activation": applied(lambda own, inputs: torch.relu(own.base(inputs))),
    "a weak nonlinearity": applied(lambda own, inputs: own.base(inputs) + 1e-3 * torch.tanh(own.base(inputs))),
    "a weak homogeneous one": applied(lambda own, inputs: own.base(inputs) + 1e-3 * torch.relu(own.base(inputs))),
    "a norm": applied(lambda own, inputs: own.base(nn.functional.rms_norm(inputs, (IN,)))),
    "mixed positions": applied(lambda own, inputs: own.base(inputs) + own.base(inputs).mean(1, keepdim=True)),
    "dropout": applied(lambda own, inputs: own.base(nn.functional.dropout(inputs, 0.1))),
    "a tuple": applied(lambda own, inputs: (own.base(inputs),)),  # type: ignore[arg-type, return-value]
    "an error": applied(lambda own, inputs: own.base(inputs[..., :3])),
    "element by element": applied(lambda _, inputs: 3 * inputs + 1),
    "NaN": applied(lambda own, inputs: own.base(inputs) * torch.nan),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_affine_is_refused(name: str) -> None:
    torch.manual_seed(0)
    assert affine_map(REFUSED[name], torch.randn(1, 5, IN)) is None


def test_outputs_that_depend_on_more_than_the_input_are_refused() -> None:
    module, inputs = LowRank(), torch.randn(2, 5, IN)
    with torch.no_grad():
        outputs = module(inputs)
        module.active = "two"
        # As with adapters chosen for each example of a batch.
        mixed = torch.cat([outputs[:1], module(inputs)[1:]])
        assert read_projection(module, inputs, mixed) is None
        assert read_projection(module, inputs, module(inputs)) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_and_double_precision(dtype: torch.dtype) -> None:
    module = LowRank().to(dtype)
    found = read(module, torch.randn(1, 5, IN, dtype=dtype))
    assert (found.dtype, found.precision) == (dtype, dtype)
    error = (found.weight(torch.float64) - module.merged()).abs().max() / module.merged().abs().max()
    assert error < 2 * torch.finfo(dtype).eps


@torch.no_grad()
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "eight bits"])
def test_a_change_without_a_trace_is_seen_where_the_sums_would_not_show_it(precision: str) -> None:
    module: Any = Rounding(lambda inputs: rounded(inputs, 127, -1)) if precision == "eight bits" else LowRank()
    weight = module.map.weight if precision == "eight bits" else module.base.weight
    module.to(torch.bfloat16 if precision == "bfloat16" else torch.float32).eval()
    inputs = torch.randn(1, 5, IN, dtype=weight.dtype)
    found = read(module, inputs)
    before, version = found.weight(torch.float32), found.version()
    counts = runs_of(module)
    assert torch.equal(found.weight(torch.float32), before)
    # In float32, sums that do not add up tell, and the map is read anew.
    assert counts == ([] if precision == "float32" else [2])
    counts.clear()
    with evaluating(module):
        assert torch.equal(found.weight(torch.float32), before)
        assert found.version() is version
        assert found.bias(torch.float32) is not None
    assert counts == ([] if precision == "float32" else [2])
    weight.data.mul_(1.01)
    if precision == "float32":
        found = read(module, inputs)
    after = found.weight(torch.float32)
    assert found.version() is not version
    added = 0.0 if precision == "eight bits" else 0.5 * (module.up["one"].weight @ module.down["one"].weight).float()
    assert (after - (weight.float() + added).T).abs().max() < 2 * torch.finfo(weight.dtype).eps


@torch.no_grad()
def test_a_module_is_left_as_it_was() -> None:
    class Observed(LowRank):
        """Notes what it is given, in place and in a new buffer, and writes into it."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.zeros(()))
            self.register_buffer("last", torch.zeros(()))

        def forward(self, inputs: Tensor) -> Tensor:
            largest: Any = self.largest
            largest.copy_(torch.maximum(largest, inputs.abs().max()))
            self.last = inputs.mean()
            output = super().forward(inputs)
            inputs.zero_()
            return output

    module: Any = Observed()
    inputs = torch.randn(2, 5, IN)
    outputs = module(inputs.clone())
    largest, kept, last = module.largest, module.largest.clone(), module.last
    given = inputs.clone()
    found: Any = read_projection(module, inputs, outputs)
    found.weight(torch.float32)
    assert torch.equal(inputs, given)
    assert module.largest is largest
    assert torch.equal(largest, kept)
    assert module.last is last

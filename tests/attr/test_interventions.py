"""Activation patching and ablation against hooks by hand on the models' own modules."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from captum_norm import ActivationPatching, ComponentAttribution, Difference
from captum_norm.attr.interventions import PatchedNetwork
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.results.components import Component, ComponentScores
from tests import encoder_decoders, families, torch_models
from tests.classifiers import classifier, randomized
from tests.padding import padded

KINDS: list[Component] = ["residual", "heads", "feed_forward", "neurons"]
Run = Callable[[], Tensor]
ROUNDING = 1e-13  # of outputs of about 1, whose differences are much smaller


def expect_equal(actual: Tensor, expected: Tensor, tolerance: float = ROUNDING) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


class Place(NamedTuple):
    """Where an activation is: what a module takes or returns."""

    kind: Component
    stack: str
    layer: int
    module: str
    end: str


def places(stack: str, layer: str, projection: str, network: str = "", layers: int = 2) -> Iterator[Place]:
    """Of a stack, by the names of a layer, of attention's output projection and of the down projection."""
    for index in range(layers):
        name = layer.format(index)
        yield Place("heads", stack, index, f"{name}.{projection}", "input")
        if network:
            yield Place("residual", stack, index, name, "input")
            yield Place("neurons", stack, index, f"{name}.{network}", "input")
            yield Place("feed_forward", stack, index, f"{name}.{network}", "output")
    if network:
        yield Place("residual", stack, layers, name, "output")


BART = "model.{}.layers.{{}}"
PLACES = {
    "gpt2": [*places("decoder", "transformer.h.{}", "attn.c_proj", "mlp.c_proj")],
    "llama": [*places("decoder", "model.layers.{}", "self_attn.o_proj", "mlp.down_proj")],
    "bert": [*places("encoder", "bert.encoder.layer.{}", "attention.output.dense", "output.dense")],
    "bart": [
        *places("encoder", BART.format("encoder"), "self_attn.out_proj", "fc2"),
        *places("decoder", BART.format("decoder"), "self_attn.out_proj", "fc2"),
        *places("cross", BART.format("decoder"), "encoder_attn.out_proj"),
    ],
}


def observed(model: Any, place: Place, run: Run, change: Callable[[Tensor], Tensor] = lambda x: x) -> tuple[Any, Any]:
    """What ``run`` returns if an activation is changed, and that activation as it was."""
    seen: list[Tensor] = []

    def changed(tensor: Tensor) -> Tensor:
        seen.append(tensor.detach().clone())
        return change(tensor)

    def at_input(_: nn.Module, args: Any) -> Any:
        return (changed(args[0]), *args[1:])

    def at_output(_: nn.Module, __: Any, output: Any) -> Any:
        return changed(output) if isinstance(output, Tensor) else (changed(output[0]), *output[1:])

    module = model.get_submodule(place.module)
    hook = at_input if place.end == "input" else at_output
    handle = (module.register_forward_pre_hook if place.end == "input" else module.register_forward_hook)(hook)
    number = run()
    handle.remove()
    return number, seen[0]


def replaced(place: Place, other: Tensor, unit: int, rows: Any, axis: int = 1, heads: int = 4) -> Any:
    """A change of a tensor: that of one component at some positions becomes another's, in the first example."""

    def change(tensor: Tensor) -> Tensor:
        new = tensor.clone().transpose(axis, 1)
        theirs = other.transpose(axis, 1)
        width = new.shape[-1]
        size = {"heads": width // heads, "neurons": 1}.get(place.kind, width)
        part = slice(unit * size, unit * size + size)
        new[:, rows, part] = theirs[:, rows, part]
        return new.transpose(axis, 1)

    return change


def expect_hooks(
    model: Any,
    found: ComponentScores,
    where: list[Place],
    numbers: Sequence[tuple[Run, Run]],
    tolerance: float = ROUNDING,
    axis: int = 1,
    other_of: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    """Changes of each example, whose output and that of its counterfactual two functions compute."""
    for example, (here, there) in enumerate(numbers):
        plain = here()
        for place in where:
            part = found.parts[place.kind][place.stack][example, place.layer]
            _, activation = observed(model, place, there)
            activation = other_of(activation)
            at_positions = part.dim() == 1 + (place.kind in ("heads", "neurons"))
            units = [0] if place.kind in ("residual", "feed_forward") else range(len(part))
            rows: list[Any] = [1, part.shape[-1] - 1] if at_positions else [slice(None)]
            for unit, row in product(units if place.kind != "neurons" else [0, 17], rows):
                number, _ = observed(model, place, here, replaced(place, activation, unit, row, axis))
                score = part[unit] if place.kind in ("heads", "neurons") else part
                expect_equal(score[row] if at_positions else score, number - plain, tolerance)


def case(name: str) -> tuple[Any, Any, Any, Any]:
    """A model, inputs and counterfactual of two examples, and what makes the number of one example of inputs."""
    here: Any
    there: Any
    if name == "bart":
        model = encoder_decoders.build("bart", 0, torch.float64)
        here, there = (encoder_decoders.inputs("bart", seed, 2, 4, 3) for seed in range(2))
        return (
            model,
            here,
            there,
            lambda inputs, row: model(**{k: v[row : row + 1] for k, v in inputs.items()}).logits[0, -1, 7],
        )
    model = classifier() if name == "bert" else randomized(families.build(name), 0)
    here, there = (families.inputs(name, seed, 2, 4) for seed in range(2))
    if name == "bert":
        return model, here, there, lambda ids, row: model(ids[row : row + 1]).logits[0, 2]
    return model, here, there, lambda ids, row: model(ids[row : row + 1]).logits[0, -1, 7]


def runs(number: Any, here: Any, there: Any) -> list[tuple[Run, Run]]:
    return [(lambda row=row: number(here, row), lambda row=row: number(there, row)) for row in range(2)]  # type: ignore[misc]


@pytest.mark.parametrize("name", list(PLACES))
@pytest.mark.parametrize("per_position", [True, False])
@torch.no_grad()
def test_patching_equals_hooks_by_hand(name: str, per_position: bool) -> None:
    model, here, there, number = case(name)
    target = 2 if name == "bert" else 7
    found = ActivationPatching(model, batch_size=7).attribute(
        here, target, components=KINDS, per_position=per_position, counterfactual=there
    )
    # LLaMA's file computes norms in float32.
    expect_hooks(model, found, PLACES[name], runs(number, here, there), 1e-8 if name == "llama" else ROUNDING)
    assert (found.unit, found.method) == ("change of the output", "activation-patching")
    assert [output.value for output in found.outputs] == pytest.approx([float(number(here, row)) for row in range(2)])


def test_the_last_stream_at_the_position_read_is_the_whole_change() -> None:
    model, here, there, _ = case("gpt2")
    target, places = Difference(7, 9), torch.tensor([3, 1])

    def m(ids: Tensor) -> Tensor:
        logits: Tensor = model(ids).logits[torch.arange(2), places]
        return (logits[:, 7] - logits[:, 9]).detach()

    found = ActivationPatching(model).attribute(
        here, target, position=places, components=["residual", "heads"], counterfactual=there
    )
    last = found.parts["residual"]["decoder"][:, -1]
    expect_equal(last[torch.arange(2), places], m(there) - m(here))
    assert last.count_nonzero() == 2
    # What comes behind a position that is read changes nothing at all.
    assert not found.parts["heads"]["decoder"][1, ..., 2:].any()
    assert found.parts["heads"]["decoder"][1, 0, :, :2].all()


def test_the_output_explained_is_the_one_predicted_before_a_patch() -> None:
    model, here, there, _ = case("gpt2")
    method = ActivationPatching(model, batch_size=3)
    predicted = model(here).logits[:, -1].argmax(1)
    assert not torch.equal(predicted, model(there).logits[:, -1].argmax(1))
    found = method.attribute(here, components="residual", counterfactual=there)
    assert [output.index for output in found.outputs] == predicted.tolist()
    assert torch.equal(
        found.scores, method.attribute(here, predicted, components="residual", counterfactual=there).scores
    )
    read = ActivationPatching(model, readout=lambda output, _: output.logits[:, -1, 7])
    by_target = method.attribute(here, 7, counterfactual=there)
    expect_equal(read.attribute(here, counterfactual=there).scores, by_target.scores)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_batching_change_nothing(name: str, side: str) -> None:
    model = classifier() if name == "bert" else randomized(families.build(name), 0)
    pairs = [
        [families.inputs(name, seed + 5 * other, 1, length) for seed, length in enumerate((6, 4))] for other in (0, 1)
    ]
    (here, mask), (there, _) = (padded(examples, side) for examples in pairs)
    for each in (True, False):
        kinds = KINDS[: 3 + (not each)]  # neurons at all positions together alone
        options: Any = {"components": kinds, "per_position": each}
        found = ActivationPatching(model, batch_size=5).attribute(here, 2, mask, counterfactual=there, **options)
        for row, (one, other) in enumerate(zip(*pairs, strict=True)):
            alone = ActivationPatching(model, batch_size=50).attribute(one, 2, counterfactual=other, **options)
            for kind in kinds:
                ((part,), (expected,)) = (scores.parts[kind].values() for scores in (found[row], alone))
                expect_equal(part, expected)
                assert expected.any()
    ((heads,), (real,)) = found.parts["heads"].values(), found.real.values()
    assert heads.shape == (2, 2, 4)
    assert torch.equal(real, mask.bool())


@torch.no_grad()
def test_ablation_equals_hooks_by_hand() -> None:
    model, here, _, number = case("gpt2")
    reference, mask = padded([families.inputs("gpt2", seed, 1, length) for seed, length in ((3, 6), (4, 3))], "right")
    expected: dict[str, Any] = {
        "zero": (torch.zeros_like, None),
        "mean": (
            lambda tensor: tensor[mask.bool()].mean(0).expand(1, 4, -1),
            lambda: model(reference, attention_mask=mask),
        ),
    }
    for ablation, (other_of, there) in expected.items():
        for each in (True, False):
            found = ActivationPatching(model).attribute(
                here,
                7,
                components=KINDS,
                per_position=each,
                ablation=ablation,
                reference=None if there is None else {"input_ids": reference, "attention_mask": mask},
            )
            of_examples = [(run, there or run) for run, _ in runs(number, here, here)]
            expect_hooks(model, found, PLACES["gpt2"], of_examples, other_of=other_of)
            assert found.method == f"{ablation}-ablation"


def test_resampling_draws_another_example_of_the_same_length() -> None:
    model, here, there, _ = case("gpt2")
    method = ActivationPatching(model)
    swapped = method.attribute(here, 7, counterfactual=here.flip(0)).scores
    assert torch.equal(method.attribute(here, 7, ablation="resample", reference=here).scores, swapped)

    every = [method.attribute(here[:1], 7, counterfactual=one).scores for one in there.split(1)]
    seen = set()
    for seed in range(8):
        torch.manual_seed(seed)
        drawn = method.attribute(here[:1], 7, ablation="resample", reference=torch.cat([there, here[:1]])).scores
        (which,) = [index for index, scores in enumerate(every) if torch.equal(scores, drawn)]
        torch.manual_seed(seed)
        again = method.attribute(here[:1], 7, ablation="resample", reference=torch.cat([there, here[:1]])).scores
        assert torch.equal(drawn, again)
        seen.add(which)
    assert seen == {0, 1}

    short, mask = padded([there[:1], there[1:, :3]], "right")
    only = method.attribute(
        here[:1], 7, ablation="resample", reference={"input_ids": short.flip(0), "attention_mask": mask.flip(0)}
    )
    assert torch.equal(only.scores, every[0])
    for reference in (here[:1], there[:, :3]):
        with pytest.raises(InvalidInputError, match="without another example of the length"):
            method.attribute(here[:1], 7, ablation="resample", reference=reference)


@torch.no_grad()
def test_a_counterfactual_of_another_length_is_aligned() -> None:
    model, here, _, number = case("gpt2")
    there, alignment = families.inputs("gpt2", 1, 2, 6), torch.tensor([[0, 1, 4, 5], [0, 2, 3, 5]])
    method = ActivationPatching(model)
    found = method.attribute(here, 7, components=KINDS, counterfactual=there, alignment=alignment)
    for row in range(2):
        expect_hooks(
            model,
            found[row],
            PLACES["gpt2"],
            [runs(number, here, there)[row]],
            other_of=lambda tensor, row=row: tensor[:, alignment[row]],  # type: ignore[misc]
        )
    mask = torch.ones_like(here)
    mask[1, 3:] = 0
    with pytest.raises(InvalidInputError, match=r"\(2, 6, .* for \(2, 4, .*alignment="):
        method.attribute(here, 7, counterfactual=there)
    with pytest.raises(InvalidInputError, match="or with other padding"):
        method.attribute(here, 7, counterfactual={"input_ids": here, "attention_mask": mask})


@torch.no_grad()
@pytest.mark.parametrize("length", [3, 5])  # as many positions as copies
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_layers_with_positions_first_are_patched(length: int) -> None:
    model = randomized(torch_models.Classifier(), 0)
    here, there = torch.randint(1, torch_models.VOCABULARY, (2, length, 2)).unbind(0)
    where = [place for place in places("encoder", "encoder.layers.{}", "self_attn", "linear2") if place.kind != "heads"]
    method = ActivationPatching(model, batch_size=length - 1)

    def number(ids: Tensor, row: int) -> Any:
        with torch.enable_grad():  # torch's fused layers, which call no modules, have no gradient
            return model(ids[:, row : row + 1])[0, 2].detach()

    for each in (True, False):
        found = method.attribute(here, 2, components=KINDS, per_position=each, counterfactual=there)
        expect_hooks(model, found, where, runs(number, here, there), axis=0)
        heads = found.parts["heads"]["encoder"]
        assert heads.shape == ((2, 2, 4, length) if each else (2, 2, 4))
        assert heads.all()


def test_images_are_patched() -> None:
    model = families.build("vit", 0, torch.float64)
    here, there = (families.inputs("vit", seed, 2, dtype=torch.float64) for seed in range(2))

    def readout(output: Any, _: Tensor) -> Tensor:
        return output[0][:, 0, :3]  # type: ignore[no-any-return]

    method = ActivationPatching(model, readout=readout)
    found = method.attribute(here, 1, components="residual", per_position=False, counterfactual=there)
    change = readout(model(there), here)[:, 1] - readout(model(here), here)[:, 1]
    expect_equal(found.scores, change.detach()[:, None].expand(-1, 3))


def test_a_small_change_is_what_attribution_patching_estimates() -> None:
    model = randomized(families.build("gpt2"), 0)
    torch.manual_seed(1)
    here, move = torch.randn(2, 1, 4, 32, dtype=torch.float64)
    errors = []
    for size in (1e-3, 1e-4):
        asked: Any = {"target": 7, "components": KINDS, "counterfactual": here + size * move, "per_position": True}
        estimated, measured = (
            method(model).attribute(here, **asked) for method in (ComponentAttribution, ActivationPatching)
        )
        assert estimated.parts.keys() == measured.parts.keys()
        parts = [(estimated.parts[kind]["decoder"], measured.parts[kind]["decoder"]) for kind in KINDS]
        errors.append([float((one - other).abs().max()) for one, other in parts])
        for one, other in parts:
            torch.testing.assert_close(one, other, rtol=0, atol=0.05 * float(other.abs().max()))
    for large, small in zip(*errors, strict=True):
        assert small == pytest.approx(large / 100, rel=0.2)


def test_the_model_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, here, there, _ = case("gpt2")
    before, logits, calls = families.state_of(model), model(here).logits, 0

    def interrupting(output: Any, _: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise KeyboardInterrupt
        return output.logits[:, -1]  # type: ignore[no-any-return]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    ActivationPatching(model).attribute(here, 7, components=KINDS, counterfactual=there)
    with pytest.raises(KeyboardInterrupt):
        ActivationPatching(model, readout=interrupting, batch_size=4).attribute(here, 7, counterfactual=there)
    assert calls == 4
    monkeypatch.setattr(PatchedNetwork, "tap", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ActivationPatching(model).attribute(here, 7, counterfactual=there)
    assert families.state_of(model) == before
    assert torch.equal(model(here).logits, logits)


def test_what_cannot_be_patched_is_refused() -> None:
    model, here, there, _ = case("gpt2")
    for options, named in (
        ({}, "nothing to patch in"),
        ({"counterfactual": there, "ablation": "zero"}, "counterfactual and ablation to patch in"),
        ({"ablation": "none"}, "expected one of zero, mean, resample"),
        ({"ablation": "mean"}, "and a reference"),
        ({"ablation": "resample"}, "and a reference"),
        ({"ablation": "zero", "reference": there}, "ablation and reference to patch in"),
        ({"ablation": "zero", "alignment": here}, "alignment and ablation to patch in"),
        ({"counterfactual": there, "components": "head"}, "heads"),
        ({"counterfactual": there, "components": ()}, "expected residual, heads, feed_forward or neurons"),
        ({"counterfactual": there, "components": "experts"}, "expected residual, heads, feed_forward or neurons"),
        ({"counterfactual": there, "position": [[1, 2], [1, 2]]}, "got 2 values of each example"),
    ):
        with pytest.raises(InvalidInputError, match=named):
            ActivationPatching(model).attribute(here, 7, **options)
    with pytest.raises(InvalidInputError, match="batch_size"):
        ActivationPatching(model, batch_size=0)
    with pytest.raises(UnsupportedModelError, match="experts that share a module"):
        ActivationPatching(families.build("mixtral")).attribute(here, 7, components="neurons", ablation="zero")


@pytest.mark.parametrize("name", families.tiers(kind=families.arrangement_of))
@torch.no_grad()
def test_a_whole_stream_is_the_whole_change(name: str) -> None:
    """Nothing else leads from the first layer's input to the output, nor from any later layer's."""
    model = families.build(name)
    here, there = (families.inputs(name, seed, 2, 5) for seed in range(2))

    def readout(output: Any, _: Tensor) -> Tensor:
        last: Tensor = output[0].reshape(len(output[0]), -1, output[0].shape[-1])[:, -1]
        return last @ torch.linspace(-1, 1, 3 * last.shape[-1]).reshape(-1, 3).to(last)

    method = ActivationPatching(model, readout=readout)
    found = method.attribute(here, 1, components=["residual", "heads"], per_position=False, counterfactual=there)
    change = (readout(model(there), here) - readout(model(here), here))[:, 1]
    for stream in next(iter(found.parts["residual"].values())).unbind(1):
        torch.testing.assert_close(stream, change, rtol=1e-5, atol=1e-5)
    assert all(part.all() for part in found.parts["heads"].values())

"""Models with several towers: every family with pictures × the properties that hold for all of them."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

from captum_norm import ALTI, CaptumNormError, DecompX, InvalidInputError, NormAttribution, NormMeter, ValueZeroing
from captum_norm.models import Scope
from tests import families, feed_forwards, oracle
from tests.families.family import Family
from tests.families.images import VISION_LANGUAGE
from tests.families.picture_inputs import IMAGE_TOKEN
from tests.padding import expect_alone
from tests.test_matrix import SCOPES, interrupt, relative
from tests.versions import older, since

Inputs = dict[str, Any]
MERGED = [name for name, family in VISION_LANGUAGE.items() if family.grids]


def kind_of(name: str) -> tuple[Any, ...]:
    """Arrangements of text and tower, direction, and how pictures come into the sequence."""
    family = VISION_LANGUAGE[name]
    return (family.text.style, family.tower.style, family.text.causal, family.layers, family.grids)


every_family = pytest.mark.parametrize("name", families.tiers(VISION_LANGUAGE, kind_of))
merged_families = pytest.mark.parametrize("name", families.tiers(MERGED, kind_of))


@cache
def model_of(name: str) -> Any:
    model = families.randomized(VISION_LANGUAGE[name].build, 0, torch.float64)
    if name == "paligemma":
        # Its scaled dot-product attention looks ahead where nothing is padded, and is explained so.
        model.set_attn_implementation("eager")
    return model


def inputs_of(name: str) -> Inputs:
    given = VISION_LANGUAGE[name].inputs()
    return {key: value.double() if value.is_floating_point() else value for key, value in given.items()}


def seen_layers(family: Family, indices: tuple[int, ...], model: Any, run: Callable[[], Any]) -> list[oracle.Layer]:
    """The layers of a stack, by their own eager attention, whose weights the attention modules return."""
    names = [family.layer.format(index) for index in indices]
    attentions = {name: f"{name}.{family.value.rpartition('.')[0]}" for name in names}
    places = {(name, "layer"): (name, "input") for name in names}
    places |= {(name, "value"): (f"{name}.{family.value}", "output") for name in names}
    places |= {(name, "attended"): (attention, "output") for name, attention in attentions.items()}
    options: dict[str, Any] = {}
    with ExitStack() as stack:
        for name, attention in attentions.items():

            def note(_: nn.Module, _args: Any, kwargs: dict[str, Any], name: str = name) -> None:
                options[name] = kwargs

            module = model.get_submodule(attention)
            stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        seen = stack.enter_context(oracle.watched(model, places))
        with oracle.eager(model):
            run()
    found = []
    for name in names:
        (attended,), (value,), (stream,) = (seen[name, what] for what in ("attended", "value", "layer"))
        layer = model.get_submodule(name)
        if isinstance(attended, tuple):
            weights = attended[1]
        else:  # Qwen's towers, which return no weights, and know no batch
            stream, value = stream[None], value[None]
            weights = packed_weights(value, **options[name])
        found.append(oracle.layer_of(family, layer, weights, value, stream))
    return found


def packed_weights(fused: Tensor, *, cu_seqlens: Tensor, position_embeddings: Any, **_: Any) -> Tensor:
    """Attention weights of packed chunks, (1, H, P, P), from queries, keys and values side by side, (1, P, 3·H·d)."""
    query, key, _ = fused[0].unflatten(-1, (3, 4, -1)).unbind(1)
    query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    chunk = torch.bucketize(torch.arange(len(query)), cu_seqlens, right=True)
    weights: Tensor = scores.masked_fill(chunk[:, None] != chunk, -torch.inf).softmax(-1)
    return weights[None]


def expect_norms(family: Family, layers: list[oracle.Layer], measured: Any, tolerance: float) -> None:
    for scope in SCOPES[family.style]:
        vectors = torch.stack([layer.vectors(scope)[0] for layer in layers], 1)
        real = measured.real
        exact = vectors.norm(dim=-1) * real[:, None, :, None] * real[:, None, None]
        assert relative(measured.norms[scope][:, : len(layers)], exact) < tolerance
        ratios = torch.stack([oracle.mixing_ratio(v) for v in vectors.unbind(1)], 1) * real[:, None]
        assert (measured.mixing_ratio[scope][:, : len(layers)] - ratios).abs().max() < tolerance
    weights = torch.stack([layer.weights for layer in layers], 1)
    weights = weights * real[:, None, None, :, None] * real[:, None, None, None]
    assert relative(measured.weights[:, : len(layers)], weights) < tolerance


@pytest.mark.few
@every_family
def test_norms_equal_the_oracle(name: str) -> None:
    """Over the merged sequence, and in the vision tower."""
    family, model, inputs = VISION_LANGUAGE[name], model_of(name), inputs_of(name)
    scopes: tuple[Scope, ...] = SCOPES[family.text.style]
    stacks = NormMeter(model).measure(inputs, scopes=scopes, weights=True, per_head=True, stacks=["text"])
    assert list(stacks) == ["decoder" if family.text.causal else "encoder"]
    (measured,) = stacks.values()
    assert torch.equal(measured.real, inputs["attention_mask"].bool())
    layers = seen_layers(family.text, family.layers, model, lambda: model(**inputs))
    expect_norms(family.text, layers, measured, 1e-6)  # their files take the softmax in float32
    scopes = SCOPES[family.tower.style]
    measured = NormMeter(model).measure(inputs, scopes=scopes, weights=True, per_head=True, stacks=["vision"])["vision"]
    layers = seen_layers(family.tower, (0, 1), model, lambda: model(**inputs))
    expect_norms(family.tower, layers, measured, 1e-6)
    maps = NormAttribution(model).maps(inputs, stacks=["text", "vision"])
    assert torch.equal(maps.towers["vision"], measured.norms["attn"])
    assert torch.equal(maps.real, inputs["attention_mask"].bool())


def merged_inputs(name: str, model: Any, inputs: Inputs) -> Tensor:
    """What the first layer of the text model reads, (B, S, D)."""
    first = VISION_LANGUAGE[name].text.layer.format(0)
    with torch.no_grad(), oracle.watched(model, {"": (first, "input")}) as seen:
        model(**inputs)
    return seen[""][0]  # type: ignore[no-any-return]


def with_patches_apart(name: str) -> Any:
    """A model in whose tower patches see only themselves."""
    family = VISION_LANGUAGE[name]
    model = families.randomized(family.build, 0, torch.float64)
    for index in range(2):
        projection = model.get_submodule(f"{family.tower.layer.format(index)}.{family.tower.projection}")
        nn.init.zeros_(projection.weight)
    return model


@pytest.mark.few
@every_family
@pytest.mark.parametrize("stack", ["text", "vision"])
def test_scopes_through_the_feed_forward_networks_are_complete(name: str, stack: str) -> None:
    family = VISION_LANGUAGE[name]
    style = (family.text if stack == "text" else family.tower).style
    if (name, stack) == ("blip", "text"):
        stack = "cross"  # behind which its network stands
    scopes: tuple[Scope, ...] = feed_forwards.SCOPES[style]
    measured = families.measured(model_of(name), inputs_of(name), scopes=scopes, stacks=[stack])
    assert list(measured.norms) == list(scopes)
    assert measured.convergence_delta.max() < 1e-6


def alone(name: str, example: int) -> Inputs:
    """One example of a family's batch, without padding, with its own pictures."""
    inputs = inputs_of(name)
    length = int(inputs["attention_mask"][example].sum())
    own = {}
    for key, value in inputs.items():
        if key in ("input_ids", "attention_mask", "mm_token_type_ids", "cross_attention_mask"):
            own[key] = value[example : example + 1, :length]
        elif len(value) == 2:  # one row for each example
            own[key] = value[example : example + 1]
        elif key == "pixel_values" and "image_grid_thw" in inputs:
            own[key] = value[:16] if example == 0 else value[16:]
        else:
            own[key] = value[:1] if example == 0 else value[1:]
    return own


@every_family
def test_a_batch_has_the_maps_of_each_example_alone(name: str) -> None:
    model, inputs = model_of(name), inputs_of(name)
    method = NormAttribution(model, "attn")
    batch = method.maps(inputs, stacks=["text"])
    for example in range(2):
        own = alone(name, example)
        length = own["input_ids"].shape[1]
        maps = method.maps(own, stacks=["text"])
        real = torch.arange(batch.self_attention.shape[-1]) < length
        expect_alone(batch, example, maps, {"self_attention": (real, real)}, 1e-6, 1e-9)
        if maps.modality is not None and batch.modality is not None:
            assert batch.modality[example][:length] == maps.modality[0]
            mine = [patches.positions for patches in batch.patches if patches.example == example]
            assert [grid.tolist() for grid in mine] == [patches.positions.tolist() for patches in maps.patches]


@pytest.mark.parametrize("name", ["llava", "gemma3-images", "qwen2.5-vl"])
def test_padding_on_the_left_shifts_the_maps_and_the_patches(name: str) -> None:
    model, inputs = model_of(name), inputs_of(name)
    right = NormAttribution(model).maps(inputs)
    counts = inputs["attention_mask"].sum(1).tolist()
    length = inputs["input_ids"].shape[1]
    left = dict(inputs)
    for key in ("input_ids", "attention_mask", "mm_token_type_ids"):
        if key in inputs:
            rows = zip(inputs[key], counts, strict=True)
            left[key] = torch.stack([row.roll(length - count) for row, count in rows])
    maps: Any = NormAttribution(model).maps(left)
    for example, count in enumerate(counts):
        places = slice(length - count, length)
        expected = right.self_attention[example, :, :count, :count]
        torch.testing.assert_close(maps.self_attention[example, :, places, places], expected, rtol=1e-6, atol=1e-9)
        images = [at for at, kind in enumerate(maps.modality[example]) if kind == "image"]
        assert images == (left["input_ids"][example] == IMAGE_TOKEN).nonzero().flatten().tolist()
        for patches, own in zip(maps.patches, right.patches, strict=True):
            if own.example == example:
                assert torch.equal(patches.positions, own.positions + length - count)


@merged_families
def test_a_patch_stands_where_its_pixels_are(name: str) -> None:
    """In a tower whose patches see only themselves, pixels change the embedding at the place of their patch alone."""
    model, inputs = with_patches_apart(name), inputs_of(name)
    maps = NormAttribution(model).maps(inputs)
    assert [tuple(patches.positions.shape) for patches in maps.patches] == list(VISION_LANGUAGE[name].grids)
    before = merged_inputs(name, model, inputs)
    for patches, (start, rows, columns) in zip(maps.patches, places_of_pixels(name), strict=True):
        for row, column in ((0, 0), (0, columns - 1), (rows - 1, 0)):
            changed = inputs_of(name)
            change_pixels(name, changed["pixel_values"], start, row, column)
            moved = (merged_inputs(name, model, changed) != before).any(-1).nonzero().tolist()
            assert [patches.example, int(patches.positions[row, column])] in moved
            kept = {tuple(place) for place in moved} - {(patches.example, int(patches.positions[row, column]))}
            inside = {(patches.example, place) for place in patches.positions.flatten().tolist()}
            assert not kept & inside


# Pixels of a place of pictures of several sizes.
SIZED = {"pixtral": 4, "mistral3": 8}


def places_of_pixels(name: str) -> list[tuple[Any, int, int]]:
    """Where each grid's pixels begin in the inputs, and its rows and columns."""
    grids = VISION_LANGUAGE[name].grids
    if name.startswith("qwen"):
        starts: list[Any] = [0, 16, 28]
    elif name in ("idefics3", "smolvlm"):
        starts = [(0, 0), (1, 0), (1, 1)]
    elif name in ("llava-next", "llava-onevision"):
        starts = [(0, 0), (0, None), (1, 0), (1, None)]
    else:
        starts = [(0,), (1,), (2,)]
    return [(start, rows, columns) for start, (rows, columns) in zip(starts, grids, strict=True)]


def change_pixels(name: str, pixels: Tensor, start: Any, row: int, column: int) -> None:
    """Change the pixels of one patch of a grid."""
    _, rows, columns = next(place for place in places_of_pixels(name) if place[0] == start)
    if name.startswith("qwen"):  # four rows of pixels, one after the other, are one place
        first = start + 4 * (row * columns + column)
        pixels[first : first + 4] += 1
        return
    if start[-1] is None:  # two tiles beside or above each other, after the whole
        tile = 1 + (column // 4 if columns == 8 else row // 4)
        pixels[start[0], tile, :, row % 4 * 4 : row % 4 * 4 + 4, column % 4 * 4 : column % 4 * 4 + 4] += 1
        return
    height, width = (SIZED[name],) * 2 if name in SIZED else (16 // rows, 16 // columns)
    pixels[start][:, row * height : (row + 1) * height, column * width : (column + 1) * width] += 1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=since("5.21", "Idefics 3 takes any pictures")) if name == "idefics3" else name
        for name in MERGED
    ],
)
def test_pictures_that_do_not_fit_the_text_are_refused_in_a_sentence(name: str) -> None:
    inputs = inputs_of(name)
    ids = inputs["input_ids"]
    ids[0, ids[0].eq(IMAGE_TOKEN).nonzero()[0]] = 7
    with pytest.raises(InvalidInputError) as caught:
        NormAttribution(model_of(name)).maps(inputs)
    assert len(str(caught.value)) <= 400


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl", "mllama", "blip-2", "clip"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    model, inputs = model_of(name), inputs_of(name)
    with torch.no_grad():
        before = model(**inputs)[0]
    state = families.state_of(model)  # the models hook their own layers in their first forward pass
    last = model.get_submodule(VISION_LANGUAGE[name].tower.layer.format(1))
    handle = last.register_forward_pre_hook(interrupt)
    for stacks in (["text"], ["vision"]):
        with pytest.raises(KeyboardInterrupt):
            NormAttribution(model).maps(inputs, stacks=stacks)
    handle.remove()
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], before)
    assert families.state_of(model) == state


@pytest.mark.few
@merged_families
@pytest.mark.parametrize("method", [ALTI, ValueZeroing, DecompX])
def test_methods_explain_pictures_and_text_together(name: str, method: Any) -> None:
    if method is ValueZeroing and name.startswith("qwen2") and older("5.17"):
        pytest.skip("its layers do not run alone on copies of an example")
    model, inputs = model_of(name), inputs_of(name)
    if method is DecompX and name == "qwen3-vl":
        # Its text model adds what the tower's layers computed between its own: nothing that a token brings.
        with pytest.raises(CaptumNormError, match="do not add up"):
            DecompX(model).attribute(inputs, target=3)
        return
    explain = method(model)
    chosen = {"target": 3} if method is DecompX else {}
    scores = explain.attribute(inputs, **chosen)
    maps = explain.maps(inputs, layers=[0])
    assert torch.equal(scores != 0, scores.ne(0) & maps.real)
    for example in range(2):
        own = explain.attribute(alone(name, example), **chosen)[0]
        torch.testing.assert_close(scores[example, : len(own)], own, rtol=1e-5, atol=1e-6)
    for patches in maps.patches:
        assert torch.equal(patches.scores(scores), scores[patches.example][patches.positions])

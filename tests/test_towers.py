"""What some models with several towers have of their own: cross-attention, query transformers, windows, videos."""

import copy
from typing import Any

import pytest
import torch

import captum_norm as cn
from captum_norm.forward.record import record
from captum_norm.forward.session import Session
from captum_norm.models.inputs import bind_inputs
from tests import oracle
from tests.families.picture_inputs import (
    END,
    IMAGE_TOKEN,
    QWEN_PATCH,
    START,
    VIDEO_TOKEN,
    pictures,
    pixels,
    sequences,
)
from tests.test_images import alone, inputs_of, merged_inputs, model_of, with_patches_apart
from tests.versions import since


def test_stacks_that_a_model_lacks_are_refused() -> None:
    model, inputs = model_of("llava"), inputs_of("llava")
    method = cn.NormAttribution(model)
    with pytest.raises(cn.InvalidInputError, match="expected some of text, encoder, decoder, cross, vision"):
        method.maps(inputs, stacks=["qformer"])
    words = {"input_ids": torch.tensor([[1, 7, 9]])}
    with pytest.raises(cn.UnsupportedModelError, match=r"no attention of vision was seen .* pass its inputs, too"):
        method.maps(words, stacks=["vision"])
    # Afterwards, the tower is seen.
    assert method.maps(inputs, stacks=["vision"]).towers["vision"].shape == (3, 2, 17, 17)
    with pytest.raises(cn.InvalidInputError, match=r"maps of vision alone; read \.towers"):
        method.scores(method.maps(inputs, stacks=["vision"]))
    with pytest.raises(cn.InvalidInputError, match="got the stack vision; ValueZeroing explains the text alone"):
        cn.ValueZeroing(model).maps(inputs, stacks=["vision"])


def test_text_alone_has_the_maps_of_the_text_model() -> None:
    model, ids = model_of("llava"), torch.tensor([[1, 7, 9, 3]])
    maps: Any = cn.NormAttribution(model).maps(ids)
    assert maps.modality[0] == ["text"] * 4
    assert not maps.patches
    alone = cn.NormAttribution(model.model.language_model).maps(ids)
    torch.testing.assert_close(maps.decoder, alone.decoder, rtol=1e-9, atol=1e-11)


def test_a_decoder_that_attends_to_pictures_has_maps_of_both() -> None:
    """Mllama: the norms in cross-attention, written out; aggregating the text's own layers must be asked for."""
    model, inputs = model_of("mllama"), inputs_of("mllama")
    method = cn.NormAttribution(model, "attn_res", aggregation="rollout")
    maps: Any = method.maps(inputs)
    assert maps.decoder.shape == (2, 2, 6, 6)
    assert maps.cross.shape == (2, 1, 6, 10)
    layer = model.model.language_model.layers[1].cross_attn
    name = "model.language_model.layers.1.cross_attn"
    places = {"v": (f"{name}.v_proj", "output"), "all": (name, "output")}
    with oracle.watched(model, places) as seen, oracle.eager(model):
        model(**inputs)
    (values,), ((_, weights),) = seen.values()
    heads = values.view(2, -1, 2, 8).transpose(1, 2).repeat_interleave(2, 1)
    matrix = layer.o_proj.weight.detach().T.reshape(4, 8, -1)
    gate = model.model.language_model.layers[1].cross_attn_attn_gate.detach().tanh().abs()
    vectors = oracle.vectors_per_head(weights, heads, matrix).sum(1).norm(dim=-1) * gate
    real = inputs["attention_mask"].bool()[..., None]
    torch.testing.assert_close(maps.cross[:, 0], vectors * real, rtol=1e-6, atol=1e-9)
    with pytest.raises(cn.InvalidInputError, match="maps of the stacks decoder, cross; expected"):
        method.attribute(inputs)
    own = method.scores(method.maps(inputs, stacks=["text"]))
    torch.testing.assert_close(own.sum(1), torch.ones(2, dtype=own.dtype))
    for refused in (cn.ValueZeroing, cn.DecompX):
        with pytest.raises(cn.UnsupportedModelError, match="attends to a tower's positions, too"):
            refused(model).attribute(inputs)
    with pytest.raises(cn.InvalidInputError, match="not rolled out together"):
        cn.AttentionRollout(model).attribute(inputs)


@since("5.13", "its query transformer is not watched")
def test_a_query_transformer_has_stacks_of_its_own() -> None:
    model, inputs = model_of("blip-2"), inputs_of("blip-2")
    maps: Any = cn.NormAttribution(model, "attn").maps(inputs, stacks=["qformer", "qformer cross"])
    shapes = {name: tuple(stack.shape) for name, stack in maps.towers.items()}
    assert shapes == {"qformer": (3, 2, 4, 4), "qformer cross": (3, 1, 4, 17)}
    # What stands in the sequence are its queries, not patches.
    assert maps.modality[0].count("image") == 4
    assert not maps.patches


def test_windows_and_pictures_do_not_attend_to_each_other() -> None:
    """Qwen2.5-VL packs pictures into a sequence and divides them into windows, in its first layer here."""
    model, inputs = model_of("qwen2.5-vl"), inputs_of("qwen2.5-vl")
    maps = cn.AttentionWeights(model).maps(inputs, stacks=["vision"]).towers["vision"]
    assert maps.shape == (1, 2, 36, 36)
    picture = torch.tensor([0] * 16 + [1] * 12 + [2] * 8)
    same = picture[:, None] == picture
    assert torch.equal(maps[0, 1] > 0, same)
    window = torch.arange(36) // 4
    assert torch.equal(maps[0, 0] > 0, window[:, None] == window)
    torch.testing.assert_close(maps.sum(-1), torch.ones(1, 2, 36).to(maps))


def test_gradients_of_packed_pictures_are_those_of_each_example_alone() -> None:
    name = "qwen2.5-vl"
    method = cn.AttentionTimesGradient(model_of(name))
    maps, *of_examples = (
        method.maps(given, stacks=["vision"], target=3).towers["vision"]
        for given in (inputs_of(name), alone(name, 0), alone(name, 1))
    )
    for found, expected in zip((maps[..., :16, :16], maps[..., 16:, 16:]), of_examples, strict=True):
        assert expected.abs().amax((0, 2, 3)).min() > 1e-3
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_pictures_are_padding_where_no_query_attends_to_them() -> None:
    """Half of SmolVLM's last picture is padding: its patches are 0 in the tower's maps."""
    model, inputs = model_of("smolvlm"), inputs_of("smolvlm")
    maps = cn.NormAttribution(model).maps(inputs, stacks=["vision"])
    real = torch.ones(3, 4, 4, dtype=torch.bool)
    real[2, :, 2:] = False
    assert torch.equal(maps.real, real.flatten(1))
    assert torch.equal(maps.towers["vision"].ne(0).any(-2)[:, 0], real.flatten(1))


def test_it_must_be_known_whose_pictures_are_whose() -> None:
    model = model_of("llava")
    found = sequences([1, -16, 7], [1, 5, -16]) | {"pixel_values": inputs_of("llava")["pixel_values"][:2]}
    call = bind_inputs(model, found)
    assert torch.equal(call.example(1).arguments["pixel_values"], found["pixel_values"][1:])
    repeated = bind_inputs(model, alone("llava", 1)).repeated(3)
    assert torch.equal(repeated.arguments["pixel_values"], alone("llava", 1)["pixel_values"].repeat(3, 1, 1, 1))
    three = pictures(16)()
    three["input_ids"], three["attention_mask"] = (three[key].flip(0) for key in ("input_ids", "attention_mask"))
    call = bind_inputs(model, three)
    assert torch.equal(call.example(1).arguments["pixel_values"], three["pixel_values"][2:])


def test_a_call_keeps_the_positions_that_its_own_pass_showed() -> None:
    """Another call of the same model, as by another thread, does not exchange them."""
    model = model_of("llava")
    session = Session(model)
    three, one = (session.bind(inputs, stacks=["vision"]) for inputs in (inputs_of("llava"), alone("llava", 1)))
    lengths = []
    for call in (three, one):
        record(call, lambda layer: layer.place, session.options)
        lengths.append(len(three.positions_of("vision")[1].real))  # type: ignore[arg-type]
    assert lengths == [3, 3]
    assert len(one.positions_of("vision")[1].real) == len(alone("llava", 1)["pixel_values"]) < 3  # type: ignore[arg-type]


def test_an_adapted_model_has_towers_too() -> None:
    """LoRA on every query and value map, of text and tower, unmerged: the maps of the merged model."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(model_of("llava")), config).eval()
    inputs = inputs_of("llava")
    found = cn.NormAttribution(adapted).maps(inputs, stacks=["text", "vision"])
    expected = cn.NormAttribution(adapted.merge_and_unload()).maps(inputs, stacks=["text", "vision"])
    torch.testing.assert_close(found.decoder, expected.decoder, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.towers["vision"], expected.towers["vision"], rtol=1e-5, atol=1e-7)
    assert [grid.positions.tolist() for grid in found.patches] == [grid.positions.tolist() for grid in expected.patches]


QWEN = pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
# Frames, rows and columns of patches of each video, in the order of the examples; every 2 × 2 take one place.
GRIDS = [[2, 4, 4], [3, 2, 4]]


def videos(name: str) -> dict[str, Any]:
    """A video of two frames; a picture, and a video of three. Qwen3-VL reads each frame between words of its own."""
    apart = name == "qwen3-vl"
    first = [START, VIDEO_TOKEN, *[VIDEO_TOKEN] * 3, END, 30] * 2 if apart else [START, *[VIDEO_TOKEN] * 8, END]
    second = [START, *[VIDEO_TOKEN] * 2, END, 31] * 3 if apart else [START, *[VIDEO_TOKEN] * 6, END]
    found = sequences([1, 7, *first, 9, 11], [1, START, -4, END, 5, *second, 8, 21])
    ids = found["input_ids"]
    kinds = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
    grid = torch.tensor(GRIDS)
    return found | {
        "pixel_values": pixels(16, QWEN_PATCH).double(),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "pixel_values_videos": pixels(int(grid.prod(1).sum()), QWEN_PATCH).double(),
        "video_grid_thw": grid,
        "mm_token_type_ids": kinds,
    }


def video_alone(name: str, example: int) -> dict[str, Any]:
    """One example without padding."""
    whole = videos(name)
    real = whole["attention_mask"][example].bool()
    found: dict[str, Any] = {
        key: whole[key][example : example + 1, real] for key in ("input_ids", "attention_mask", "mm_token_type_ids")
    }
    if example:
        found |= {key: whole[key] for key in ("pixel_values", "image_grid_thw")}
    start, end = (0, 32) if example == 0 else (32, 56)
    return found | {
        "pixel_values_videos": whole["pixel_values_videos"][start:end],
        "video_grid_thw": whole["video_grid_thw"][example : example + 1],
    }


@QWEN
def test_every_position_of_a_video_has_its_modality(name: str) -> None:
    model, inputs = model_of(name), videos(name)
    maps: Any = cn.NormAttribution(model).maps(inputs)
    kinds = {IMAGE_TOKEN: "image", VIDEO_TOKEN: "video"}
    for ids, modality in zip(inputs["input_ids"].tolist(), maps.modality, strict=True):
        assert list(modality) == [kinds.get(token, "text") for token in ids]
    for example in range(2):
        own = cn.NormAttribution(model).maps(video_alone(name, example))
        length = own.self_attention.shape[-1]
        inside = maps.self_attention[example, :, :length, :length]
        torch.testing.assert_close(inside, own.self_attention[0], rtol=1e-6, atol=1e-9)
        positions = [patches.positions.tolist() for patches in maps.patches if patches.example == example]
        assert positions == [patches.positions.tolist() for patches in own.patches]


@QWEN
def test_a_patch_of_a_frame_stands_where_its_pixels_go(name: str) -> None:
    model, inputs = with_patches_apart(name), videos(name)
    maps = cn.NormAttribution(model).maps(inputs)
    frames = [grid for grid in maps.patches if inputs["input_ids"][grid.example, grid.positions[0, 0]] == VIDEO_TOKEN]
    assert [tuple(grid.positions.shape) for grid in frames] == [(2, 2)] * 2 + [(1, 2)] * 3
    assert [grid.example for grid in frames] == [0] * 2 + [1] * 3
    before = merged_inputs(name, model, inputs)
    start = 0
    for grid in frames:
        rows, columns = grid.positions.shape
        for row, column in ((0, 0), (rows - 1, columns - 1)):
            changed = videos(name)
            first = start + 4 * (row * columns + column)
            changed["pixel_values_videos"][first : first + 4] += 1
            moved = (merged_inputs(name, model, changed) != before).any(-1).nonzero().tolist()
            assert moved == [[grid.example, int(grid.positions[row, column])]]
        start += 4 * rows * columns

"""Value zeroing against whole forward passes with a value projection's output set to zero."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm import UnsupportedModelError, ValueZeroing
from tests import encoder_decoders, families, oracle

# Where a reader of the code finds each layer, and which columns of the value module's output are values.
LAYERS = {
    "bert": "encoder.layer.{}",
    "deberta-v2": "encoder.layer.{}",
    "distilbert": "transformer.layer.{}",
    "modernbert": "layers.{}",
    "gpt2": "transformer.h.{}",
    "gpt-neox": "gpt_neox.layers.{}",
    "llama": "model.layers.{}",
    "gemma2": "model.layers.{}",
    "t5-encoder": "encoder.block.{}",
    "vit": "layers.{}",
}


def value_columns(name: str, width: int) -> Tensor:
    """Which columns are values, read off the family's own reading of numbered columns."""
    columns = families.FAMILIES[name].values(torch.arange(width).reshape(1, 1, width)).flatten()
    return torch.zeros(width, dtype=torch.bool).index_fill(0, columns, value=True)


def with_values_zeroed(
    run: Callable[[], Any], model: Any, layer: str, value: str, keys: int | None = None, columns: Any = slice
) -> Tensor:
    """A layer's distances, (B, Q, K), by whole passes in which a module's output for one key after the other is 0."""
    with oracle.watched(model, {layer: (layer, "first")}) as seen, torch.no_grad():
        run()
        for key in range(keys or seen[layer][0].shape[1]):

            def zero(_: Any, __: Any, output: Tensor, key: int = key) -> Tensor:
                output = output.clone()
                output[:, key, columns(output.shape[-1])] = 0
                return output

            changed = model.get_submodule(value).register_forward_hook(zero)
            run()
            changed.remove()
    before, *after = seen[layer]
    return 1 - torch.cosine_similarity(torch.stack(after, 2), before.unsqueeze(2), dim=-1)


def direct(name: str, model: Any, inputs: Tensor) -> Tensor:
    """(B, L, Q, K)."""
    family, run, columns = families.FAMILIES[name], partial(model, inputs), partial(value_columns, name)
    places = [
        (LAYERS[name].format(index), f"{family.layer.format(index)}.{family.value}")
        for index in range(model.config.num_hidden_layers)
    ]
    return torch.stack([with_values_zeroed(run, model, *both, columns=columns) for both in places], 1)


@pytest.mark.few
@pytest.mark.parametrize(("seed", "name"), list(enumerate(LAYERS)))
def test_maps_equal_whole_passes(seed: int, name: str) -> None:
    tolerance = 1e-6 if families.FAMILIES[name].single else 1e-11
    model, inputs = families.build(name, seed, torch.float64), families.inputs(name, seed, 2, 7, torch.float64)
    expected = direct(name, model, inputs)
    for memory_budget in (None, 1):
        maps = ValueZeroing(model, memory_budget=memory_budget).maps(inputs).self_attention
        assert (maps - expected).abs().max() < tolerance * expected.max()
    shares = expected / expected.sum(-1, keepdim=True)
    scores = ValueZeroing(model, "rollout").attribute(inputs, position=2)
    torch.testing.assert_close(scores, (shares[:, 1] @ shares[:, 0])[:, 2], rtol=1e-4, atol=1e-6)
    single = ValueZeroing(model.float()).maps(inputs.float() if inputs.is_floating_point() else inputs)
    assert (single.self_attention - expected).abs().max() < 1e-5 * expected.max()


def test_one_layer_alone_and_as_many_examples_as_positions() -> None:
    model, ids = families.build("bert"), families.inputs("bert", batch=families.HEADS, length=families.HEADS)
    method = ValueZeroing(model)
    maps = method.maps(ids).self_attention
    torch.testing.assert_close(method.attribute(ids, layer=-1, position=1), maps[:, 1, 1])
    torch.testing.assert_close(method.maps(ids[2:3]).self_attention[0], maps[2], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("batch", [2, families.HEADS])
def test_biases_of_as_many_heads_as_examples(batch: int) -> None:
    model, ids = families.build("mpt", dtype=torch.float64), families.inputs("mpt", batch=batch, length=6)
    method = ValueZeroing(model)
    maps = method.maps(ids).self_attention
    alone = torch.cat([method.maps(example[None]).self_attention for example in ids])
    torch.testing.assert_close(maps, alone, rtol=1e-8, atol=1e-12)


@pytest.mark.few
@pytest.mark.parametrize(("seed", "name"), list(enumerate(("bart", "m2m100", "t5", "whisper"))))
def test_all_stacks_of_an_encoder_decoder_equal_whole_passes(seed: int, name: str) -> None:
    family = encoder_decoders.ENCODER_DECODERS[name]
    tolerance = 1e-6 if family.single else 1e-11
    model = encoder_decoders.build(name, seed, torch.float64)
    inputs = encoder_decoders.inputs(name, seed, dtype=torch.float64)
    expected: dict[str, Tensor] = {}
    for stack, parts in family.stacks.items():
        half = "encoder" if stack == "encoder" else "decoder"
        layer = f"{half}.block.{{}}" if name == "t5" else f"model.{half}.layers.{{}}"
        names = [(layer.format(index), parts.value.format(index)) for index in range(2)]
        keys = 6 if stack == "decoder" else 9
        run = partial(model, **inputs)
        expected[stack] = torch.stack([with_values_zeroed(run, model, *both, keys) for both in names], 1)
    for memory_budget in (None, 1):
        maps = ValueZeroing(model, memory_budget=memory_budget).maps(inputs)
        for stack, distances in expected.items():
            assert (getattr(maps, stack) - distances).abs().max() < tolerance * distances.max()
    scores = ValueZeroing(model).attribute(inputs, position=3)
    for row in range(2):
        encoder, decoder, cross = (expected[stack][row] for stack in ("encoder", "decoder", "cross"))
        through = torch.eye(9).double()
        for layer_map in encoder:
            through = layer_map / layer_map.sum(-1, keepdim=True) @ through
        state = torch.cat([torch.zeros(6, 9), torch.eye(6)], 1).double()  # shares of sources and prefix
        for own, across in zip(decoder, cross, strict=True):
            total = own.sum(-1, keepdim=True) + across.sum(-1, keepdim=True)
            read = torch.cat([across @ through, torch.zeros(6, 6)], 1)
            state = (own @ state + read) / total
        torch.testing.assert_close(scores.source[row], state[3, :9], rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(scores.prefix[row], state[3, 9:], rtol=1e-5, atol=1e-9)
    chosen = ValueZeroing(model).maps(inputs, stacks=["cross"], layers=[-1])
    assert chosen.encoder is None
    torch.testing.assert_close(chosen.cross[:, 0], maps.cross[:, 1], rtol=1e-4, atol=1e-12)  # type: ignore[index]


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"receive \(positions, batch, width\); ValueZeroing supports only"):
        ValueZeroing(encoder_decoders.build("fsmt")).maps(encoder_decoders.inputs("fsmt"))
    with pytest.raises(UnsupportedModelError, match="does not run alone on copies of an example"):
        ValueZeroing(families.build("xmod")).maps(families.inputs("xmod"))
    model = families.build("bert")
    model.encoder.layer[0].register_forward_hook(lambda _, __, output: output + torch.rand_like(output))
    with pytest.raises(UnsupportedModelError, match="layer 0 of BertModel, run again, gives another output"):
        ValueZeroing(model).maps(families.inputs("bert", 0, 2, 7))

"""The numbers of layers: of every method's maps, and in whatever shows, selects, saves or joins them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save as save_tensors

import captum_norm as cn
from captum_norm.attr.measurements import Measurements
from captum_norm.explanation import Explanation
from captum_norm.methods import METHODS
from captum_norm.results.maps import numbered
from captum_norm.results.stacks import named_layers, place_of_layer
from tests import tiny
from tests.results.test_base import read_file
from tests.tiny import bert_config, tokenizer

TEXTS = ["a dog sees the cat", "the cat runs"]
MAPPED = [name for name, method in METHODS.items() if method.maps and method.load().mapped]


@pytest.fixture(scope="module")
def bert() -> Any:
    torch.manual_seed(0)
    config = bert_config()
    config.num_hidden_layers = 4
    return transformers.BertForSequenceClassification(config).train(False)


BOTH = {"input_ids": torch.tensor([[5, 6, 7]]), "decoder_input_ids": torch.tensor([[2, 9]])}


@pytest.mark.parametrize("name", MAPPED)
def test_maps_have_the_numbers_of_the_layers_requested(name: str, bert: Any) -> None:
    method = METHODS[name].load()(bert, tokenizer=tokenizer())
    whole = method.maps(TEXTS)
    assert whole.layers == {"encoder": (0, 1, 2, 3)}
    some = method.maps(TEXTS, layers=[-2, 1])
    assert some.layers == {"encoder": (2, 1)}
    for layer in (2, 1):
        expected = whole.encoder[:, layer, None]
        torch.testing.assert_close(some.layer(layer).encoder, expected)
        torch.testing.assert_close(whole.layer(layer).encoder, expected)
        assert some.layer(layer).layers == whole.layer(layer).layers == {"encoder": (layer,)}
    assert torch.equal(some.layer(-1).encoder, some.encoder[:, 1:])
    for missing in (0, 3, -3, 10**6):
        with pytest.raises(cn.InvalidInputError, match=rf"^got layer {missing}; the encoder maps are of layers 2, 1$"):
            some.layer(missing)


def test_each_stack_has_its_own_numbers() -> None:
    method = cn.NormAttribution(tiny.bart(layers=3))
    whole: Any = method.maps(BOTH)
    last = method.maps(BOTH, layers=[-1])
    assert whole.layers == {"encoder": (0, 1, 2), "decoder": (0, 1), "cross": (0, 1)}
    assert last.layers == {"encoder": (2,), "decoder": (1,), "cross": (1,)}
    chosen: Any = whole.layer(1)
    assert chosen.layers == {"encoder": (1,), "decoder": (1,), "cross": (1,)}
    # Of three encoder layers, then two of the decoder, then two of cross-attention.
    assert torch.equal(chosen.convergence_delta, whole.convergence_delta[:, [1, 4, 6]])
    with pytest.raises(cn.InvalidInputError, match=r"^got layer 2; the decoder maps are of layers 0, 1$"):
        whole.layer(2)
    with pytest.raises(cn.InvalidInputError, match=r"^got layer 1; the encoder maps are of layer 2$"):
        last.layer(1)
    frame = last.to_frame()
    assert {(row.stack, row.layer) for row in frame.itertuples()} == {("encoder", 2), ("decoder", 1), ("cross", 1)}


def test_a_layer_twice_is_found_once(bert: Any) -> None:
    twice = cn.NormAttribution(bert, tokenizer=tokenizer()).maps(TEXTS, layers=[3, 3])
    assert twice.layers == {"encoder": (3, 3)}
    assert twice.layer(3).layers == {"encoder": (3,)}
    (example, _) = twice.page().examples
    assert list(example.maps[0].layers) == [3]


def test_whatever_shows_layers_names_them_by_their_numbers(bert: Any) -> None:
    maps: Any = cn.NormAttribution(bert, tokenizer=tokenizer()).maps(TEXTS, layers=[3, 1])
    assert repr(maps) == (
        "AttributionMaps(encoder (2, 2, 7, 7) of layers 3, 1, mixing ratio (2, 2, 7), convergence delta "
        f"{maps.convergence_delta.max():.1e})"
    )
    entry = maps.top(1)[0]
    assert entry.key == maps[entry.example].tokens[0][entry.column]
    whole: Any = cn.NormAttribution(bert, tokenizer=tokenizer()).maps(TEXTS).encoder
    assert entry.value == pytest.approx(float(whole[entry.example, entry.layer, entry.row, entry.column]))
    frame = maps.to_frame()
    assert sorted(set(frame["layer"])) == [1, 3]
    row = frame[(frame["example"] == 0) & (frame["layer"] == 1)].set_index(["query", "key"])
    assert row.loc[(2, 4), "value"] == maps.encoder[0, 1, 2, 4]
    titles = [axes.get_title() for axes in maps[0].plot().axes]
    assert [title for title in titles if title] == ["layer 3", "layer 1"]
    shown = maps.page().examples[0].maps[0]
    assert list(shown.layers) == [1, 3]
    torch.testing.assert_close(torch.as_tensor(shown.values[0]), maps.encoder[0, 1])
    for part in (maps[1], maps.to(torch.float64), maps.cpu(), maps.words(), maps.with_tokens(maps.tokens or [])):
        assert part.layers == maps.layers


def test_measurements_have_numbers_too(bert: Any) -> None:
    meter = cn.NormMeter(bert, tokenizer=tokenizer())
    options: dict[str, Any] = {"scopes": ["attn", "atb"], "weights": True}
    whole = meter.measure(TEXTS, **options)["encoder"]
    some = meter.measure(TEXTS, **options, layers=[2, -1])["encoder"]
    assert (whole.layers, some.layers) == ((0, 1, 2, 3), (2, 3))
    assert some.layer(2) == whole.layer(2)
    assert some.layer(2).layer_names == (whole.layer_names[2],)
    assert repr(some).startswith("Measurements(weights (2, 2, 7, 7) of layers 2, 3, attn (2, 2, 7, 7) of layers 2, 3, ")
    assert {entry.layer for entry in some.top(1000)} == {2, 3}
    with pytest.raises(cn.InvalidInputError, match=r"^got layer 0; the measurements are of layers 2, 3$"):
        some.layer(0)
    alone = meter.measure(TEXTS, weights=False, head_norms=True, maps=False, layers=[1])["encoder"]
    assert alone.layers == (1,)


def test_an_explanation_has_the_numbers_of_its_maps(bert: Any) -> None:
    found = cn.explain(TEXTS, bert, tokenizer(), layer=2)
    assert (found.layer, found.layers) == (2, (2,))
    assert json.loads(found[0].file_bytes(".json"))["map"]["layers"] == [2]
    assert found[0].plot().axes[0].get_title() == "layer 2"
    assert cn.explain(TEXTS, bert, tokenizer(), method="integrated-gradients").layers == ()


def test_numbers_that_do_not_fit_are_refused(bert: Any) -> None:
    maps: Any = cn.NormAttribution(bert, tokenizer=tokenizer()).maps(TEXTS)
    assert cn.AttributionMaps(maps.encoder[:, 2:], None, None, None, None, maps.real).layers == {"encoder": (0, 1)}
    for layers in ([4, 5], [0, 1, 2, -1]):
        with pytest.raises(cn.InvalidInputError, match="encoder of 4 layers; expected a number from 0 for each"):
            replace(maps, layers={"encoder": layers})
    with pytest.raises(cn.InvalidInputError, match=r"^got layers 0–3 for encoder of 1 layers"):
        replace(maps, encoder=maps.encoder[:, :1])
    assert numbered("encoder", None, 2) == (0, 1)
    assert place_of_layer("maps", -1, (7, 5)) == 1
    assert named_layers((7, 5, 6, 9, 10, 11)) == "layers 7, 5, 6, 9–11"


def test_files_without_numbers_are_read(bert: Any, tmp_path: Path) -> None:
    """Files of version 1: their layers count from 0, but for explanations, which tell."""
    known, path = tokenizer(), tmp_path / "old.safetensors"
    maps = cn.NormAttribution(bert, tokenizer=known).maps(TEXTS, layers=[1, 3])
    _save_old(maps, path, "layers", "decoder_tokens")
    assert cn.AttributionMaps.load(path) == replace(maps, layers={})
    measured = cn.NormMeter(bert, tokenizer=known).measure(TEXTS, weights=True, layers=[1, 3])["encoder"]
    _save_old(measured, path, "layers", "query_tokens")
    assert Measurements.load(path) == replace(measured, layers=())
    for found in (
        cn.explain(TEXTS, bert, known, layer=2),
        cn.explain(TEXTS, bert, known, method="integrated-gradients"),
    ):
        _save_old(found, path, "graphs", layers=list(found.layers), graph=None, changes=None, head=None)
        assert Explanation.load(path) == found
    (graph,) = cn.InformationFlow(bert, tokenizer=known).graphs(TEXTS[0], position=1)
    followed = replace(found, graphs=[graph])
    followed.save(path)
    saved = saved_content(path)["graphs"][0]
    one = {name: saved[name] for name in ("nodes", "edges", "threshold", "tokens")} | {"output": saved["outputs"][0]}
    _save_old(followed, path, "graphs", layers=list(found.layers), graph=one)
    assert Explanation.load(path) == followed


def saved_content(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(read_file(path.read_bytes())[1]["content"])
    return content


def _save_old(result: Any, path: Path, *without: str, **more: Any) -> None:
    result.save(path)
    tensors, metadata = read_file(path.read_bytes())
    content = json.loads(metadata["content"]) | more
    for name in without:
        del content[name]
    if isinstance(content.get("maps"), dict):
        del content["maps"]["layers"], content["maps"]["decoder_tokens"]
    path.write_bytes(save_tensors(tensors, metadata | {"version": "1", "content": json.dumps(content)}))

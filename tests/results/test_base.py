"""Results: files that come back as they were, equality, moves, parts by example, layer and word; numbers of layers."""

import json
import struct
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load as load_tensors
from safetensors.torch import save
from safetensors.torch import save as save_tensors

import captum_norm as cn
from captum_norm.attr.measurements import Measurements
from captum_norm.explanation import Explanation
from captum_norm.generation import GenerationResult
from captum_norm.lab.comparison import Comparison
from captum_norm.loading import LANGUAGE_MODEL, load
from captum_norm.methods import METHODS
from captum_norm.results.base import Result
from captum_norm.results.maps import Patches, numbered
from captum_norm.results.stacks import named_layers, place_of_layer
from tests import tiny

TEXTS = ["a dog sees the cat", "the cat runs"]
bert = pytest.fixture(scope="module")(tiny.bert)


@pytest.fixture(scope="module")
def results(bert: Any) -> dict[type[Result], Result]:
    """One result of each kind, with as many fields as possible that are not their defaults."""
    known = tiny.tokenizer()
    maps = cn.NormAttribution(bert, tokenizer=known).maps(TEXTS, per_head=True)
    full = replace(
        maps,
        decoder=maps.encoder.double() if maps.encoder is not None else None,
        cross=torch.rand(2, 1, 7, 7).bfloat16(),
        decoder_real=maps.real.clone(),
        towers={"vision": torch.rand(3, 2, 4, 4), "audio": torch.rand(1, 2, 2, 2)},
        modality=[("text", "image", "text", "image", "text", "audio", "video")] * 2,
        patches=[Patches(0, 0, torch.tensor([[1, 2]])), Patches(1, 1, torch.tensor([[3], [4]]))],
        virtual=2,
        cached=3,
        segmented=True,
        decoder_tokens=[["▁le", "▁chien"], ["▁un"]],
        layers={"encoder": [3, 5], "cross": [7], "vision": [2, 4]},
    )
    measured = cn.NormMeter(bert, tokenizer=known).measure(
        TEXTS, scopes=["attn", "attn_res_ln", "atb_ff"], weights=True, head_norms=True
    )["encoder"]
    model, passages = load(LANGUAGE_MODEL)
    prompt = "Clara found a tiny ring.\nWhat did Clara find? Clara found"
    options: dict[str, Any] = {"segments": ["Clara found a tiny ring."], "outputs": (1, 3), "hops": 1}
    options["context"] = options["segments"]
    explanation = cn.explain(TEXTS, bert, known, method="decompx", layer=-1)
    graph = cn.InformationFlow(bert, tokenizer=known).graphs(TEXTS[0], position="first")[0]
    return {
        cn.AttributionMaps: full,
        Measurements: replace(measured, virtual=1, cached=2, modality=full.modality, patches=full.patches),
        Explanation: replace(explanation, graphs=[graph]),
        Comparison: cn.compare(bert, TEXTS, tokenizer=known, methods=["norm", "globenc", "gim"], steps=2),
        GenerationResult: cn.GenerationAttribution(cn.DecompX(model), passages).attribute(prompt, **options),
    }


KINDS = (cn.AttributionMaps, Measurements, Explanation, Comparison, GenerationResult)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_holds_every_field(kind: type[Result], results: dict[type[Result], Result], tmp_path: Path) -> None:
    result, path = results[kind], tmp_path / "result.safetensors"
    assert result.save(path) == path
    found = kind.load(path)
    assert found == result
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    found.save(path)  # an older file is replaced
    assert kind.load(path) == result


def test_maps_differ_in_any_field(results: dict[type[Result], Result]) -> None:
    """Each field counts: equality that forgot one would let a file lose it."""
    maps: Any = results[cn.AttributionMaps]
    others: dict[str, Any] = {"layers": maps.layers | {"encoder": (1, 4)}, "towers": {}, "virtual": 3, "cached": 4}
    for field in fields(cn.AttributionMaps):
        assert maps != replace(maps, **{field.name: others.get(field.name)}), field.name
    assert maps != replace(maps, encoder=maps.encoder + 1e-6)
    assert maps != replace(maps, encoder=maps.encoder.double())
    assert maps != replace(maps, patches=[replace(maps.patches[0], picture=5), maps.patches[1]])
    assert maps != "maps"
    nan = replace(maps, encoder=maps.encoder * torch.nan)
    assert nan == replace(maps, encoder=maps.encoder * torch.nan)


@pytest.mark.parametrize("kind", KINDS)
def test_moves_reach_every_tensor(kind: type[Result], results: dict[type[Result], Result]) -> None:
    result = results[kind]
    wide = result.to(torch.float64)
    assert wide.to(dtype=torch.float64) == wide
    dtypes = {tensor.dtype for tensor in _tensors(wide)}
    assert dtypes <= {torch.float64, torch.bool, torch.int64}
    assert torch.float64 in dtypes
    on_meta = result.to("meta")
    assert {tensor.device.type for tensor in _tensors(on_meta)} == {"meta"}
    assert result.cpu() == result
    with pytest.raises(cn.InvalidInputError, match=r"the dtype torch\.int32; expected one of floating-point numb"):
        result.to(torch.int32)


@pytest.mark.parametrize("odd", [[], "", None, 0.5, {}, "x", 10**30])
def test_odd_arguments_are_told_of(odd: Any, results: dict[type[Result], Result]) -> None:
    maps: Any = results[cn.AttributionMaps]
    calls: list[Any] = [lambda: maps.to(odd), lambda: maps.save(odd), lambda: cn.AttributionMaps.load(odd)]
    if odd is None:
        calls = calls[1:]
    for call in calls if not isinstance(odd, str) else calls[:1]:
        with pytest.raises(cn.InvalidInputError, match=r"^got the (path|device) .*; expected "):
            call()


def test_names_do_not_control_the_terminal(results: dict[type[Result], Result]) -> None:
    evil = "\x1b[31m\u202e"
    maps: Any = results[cn.AttributionMaps]
    changed: list[Any] = [
        replace(maps, towers={evil: torch.rand(2, 1, 2, 2)}, layers={}, tokens=[[evil] * 7] * 2),
        replace(results[Explanation], model=evil, tokens=[[evil] * 7] * 2),  # type: ignore[type-var]
        replace(results[Comparison], model=evil, explained=evil),  # type: ignore[type-var]
    ]
    for result in changed:
        assert repr(result).isprintable()
        assert str(cn.InvalidInputError(f"got {evil}")) == "got \\x1b[31m\\u202e"


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return _tensors(vars(value)) if hasattr(value, "__dict__") else []


def test_bad_files_are_one_sentence(
    results: dict[type[Result], Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    maps: Any = results[cn.AttributionMaps]
    path = Path("maps.safetensors")

    def fails(content: bytes | None = None) -> str:
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(cn.InvalidInputError) as caught:
            cn.AttributionMaps.load(path)
        assert len(str(caught.value)) <= 400
        assert str(caught.value).startswith(f"cannot load {path}: ")
        return str(caught.value).removeprefix(f"cannot load {path}: ")

    assert fails() == "No such file or directory"
    assert fails(b"").startswith("the file is damaged (")
    assert fails(b"\x80\x05pickle").startswith("the file is damaged (")
    assert fails(save({})) == "it is a safetensors file, but not of captum-norm"
    results[Measurements].save(path)
    assert fails() == "it holds Measurements; expected AttributionMaps: read it by Measurements.load"
    maps.save(path)
    tensors, metadata = read_file(path.read_bytes())
    content = json.loads(metadata["content"])
    newer = fails(save(tensors, metadata | {"version": "4"}))
    assert newer.startswith("it has version 4 of the format, expected 1 or 2 or 3; take the version of captum-norm")
    assert fails(save(tensors, metadata | {"version": "0"})).startswith("it has version 0 of the format")
    for name, value in (
        ("encoder", "text"),
        ("encoder", {"tensor": "no such"}),
        ("real", None),
        ("tokens", [["a"], [1]]),
        ("tokens", [["a"]]),
        ("virtual", 1.5),
        ("virtual", True),
        ("patches", [{"example": 0}]),
        ("patches", [{"example": 0, "picture": 0, "positions": "os.system"}]),
        ("modality", [["smell"]]),
        ("tokens", [[[]]]),
        ("segmented", 1),
        ("encoder", {"tensor": "real"}),
        ("layers", {"encoder": [1]}),
        ("layers", {"encoder": [-1, 1]}),
        ("layers", [[1, 2]]),
    ):
        text = json.dumps(content | {name: value})
        assert "the file is damaged (" in fails(save(tensors, metadata | {"content": text})), (name, value)
    del content["virtual"]
    assert "expected encoder, decoder" in fails(save(tensors, metadata | {"content": json.dumps(content)}))
    deep = "[" * 100_000
    assert "the file is damaged (" in fails(save(tensors, metadata | {"content": deep}))


def read_file(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a file."""
    (size,) = struct.unpack("<Q", data[:8])
    return load_tensors(data), json.loads(data[8 : 8 + size])["__metadata__"]


def test_a_file_is_written_whole_or_not_at_all(
    results: dict[type[Result], Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "maps.safetensors"
    path.write_bytes(b"old")
    monkeypatch.setattr("captum_norm.text.files.os.fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        results[cn.AttributionMaps].save(path)
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_words_of_an_explanation() -> None:
    explanation = cn.explain("Clara's ringing keys", LANGUAGE_MODEL)
    words = explanation.words()
    assert words.tokens[0] == ["<s>", "Clara's", "ringing", "keys"]
    numbers = explanation.words_of_tokens[0].numbers
    groups = [[i for i, number in enumerate(numbers) if number == word] for word in range(4)]
    assert words.scores[0].tolist() == pytest.approx([float(explanation.scores[0, group].sum()) for group in groups])
    assert words.words().scores.tolist() == words.scores.tolist()


def test_tables_hold_the_maps(bert: Any) -> None:
    maps: Any = cn.NormAttribution(bert, tokenizer=tiny.tokenizer()).maps(TEXTS, per_head=True)
    frame = maps.to_frame()
    assert len(frame) == 2 * 2 * (7 * 7 + 5 * 5)
    row = frame[(frame["example"] == 1) & (frame["layer"] == 1) & (frame["head"] == 0)].set_index(["query", "key"])
    assert row.loc[(2, 4), "value"] == maps.encoder[1, 1, 0, 2, 4]
    assert (row.loc[(2, 4), "query_token"], row.loc[(2, 4), "key_token"]) == ("cat", "[SEP]")


MAPPED = [name for name, method in METHODS.items() if method.maps and method.load().mapped]


@pytest.fixture(scope="module")
def deep() -> Any:
    torch.manual_seed(0)
    config = tiny.bert_config()
    config.num_hidden_layers = 4
    return transformers.BertForSequenceClassification(config).train(False)


BOTH = {"input_ids": torch.tensor([[5, 6, 7]]), "decoder_input_ids": torch.tensor([[2, 9]])}


@pytest.mark.parametrize("name", MAPPED)
def test_maps_have_the_numbers_of_the_layers_requested(name: str, deep: Any) -> None:
    method = METHODS[name].load()(deep, tokenizer=tiny.tokenizer())
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


def test_a_layer_twice_is_found_once(deep: Any) -> None:
    twice = cn.NormAttribution(deep, tokenizer=tiny.tokenizer()).maps(TEXTS, layers=[3, 3])
    assert twice.layers == {"encoder": (3, 3)}
    assert twice.layer(3).layers == {"encoder": (3,)}
    (example, _) = twice.page().examples
    assert list(example.maps[0].layers) == [3]


def test_whatever_shows_layers_names_them_by_their_numbers(deep: Any) -> None:
    maps: Any = cn.NormAttribution(deep, tokenizer=tiny.tokenizer()).maps(TEXTS, layers=[3, 1])
    assert repr(maps) == (
        "AttributionMaps(encoder (2, 2, 7, 7) of layers 3, 1, mixing ratio (2, 2, 7), convergence delta "
        f"{maps.convergence_delta.max():.1e})"
    )
    entry = maps.top(1)[0]
    assert entry.key == maps[entry.example].tokens[0][entry.column]
    whole: Any = cn.NormAttribution(deep, tokenizer=tiny.tokenizer()).maps(TEXTS).encoder
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


def test_measurements_have_numbers_too(deep: Any) -> None:
    meter = cn.NormMeter(deep, tokenizer=tiny.tokenizer())
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


def test_an_explanation_has_the_numbers_of_its_maps(deep: Any) -> None:
    found = cn.explain(TEXTS, deep, tiny.tokenizer(), layer=2)
    assert (found.layer, found.layers) == (2, (2,))
    assert json.loads(found[0].file_bytes(".json"))["map"]["layers"] == [2]
    assert found[0].plot().axes[0].get_title() == "layer 2"
    assert cn.explain(TEXTS, deep, tiny.tokenizer(), method="integrated-gradients").layers == ()


def test_numbers_that_do_not_fit_are_refused(deep: Any) -> None:
    maps: Any = cn.NormAttribution(deep, tokenizer=tiny.tokenizer()).maps(TEXTS)
    assert cn.AttributionMaps(maps.encoder[:, 2:], None, None, None, None, maps.real).layers == {"encoder": (0, 1)}
    for layers in ([4, 5], [0, 1, 2, -1]):
        with pytest.raises(cn.InvalidInputError, match="encoder of 4 layers; expected a number from 0 for each"):
            replace(maps, layers={"encoder": layers})
    with pytest.raises(cn.InvalidInputError, match=r"^got layers 0–3 for encoder of 1 layers"):
        replace(maps, encoder=maps.encoder[:, :1])
    assert numbered("encoder", None, 2) == (0, 1)
    assert place_of_layer("maps", -1, (7, 5)) == 1
    assert named_layers((7, 5, 6, 9, 10, 11)) == "layers 7, 5, 6, 9–11"


def test_files_without_numbers_are_read(deep: Any, tmp_path: Path) -> None:
    """Files of version 1: their layers count from 0, but for explanations, which tell."""
    known, path = tiny.tokenizer(), tmp_path / "old.safetensors"
    maps = cn.NormAttribution(deep, tokenizer=known).maps(TEXTS, layers=[1, 3])
    _save_old(maps, path, "layers", "decoder_tokens")
    assert cn.AttributionMaps.load(path) == replace(maps, layers={})
    measured = cn.NormMeter(deep, tokenizer=known).measure(TEXTS, weights=True, layers=[1, 3])["encoder"]
    _save_old(measured, path, "layers", "query_tokens")
    assert Measurements.load(path) == replace(measured, layers=())
    for found in (
        cn.explain(TEXTS, deep, known, layer=2),
        cn.explain(TEXTS, deep, known, method="integrated-gradients"),
    ):
        _save_old(found, path, "graphs", layers=list(found.layers), graph=None, changes=None, head=None)
        assert Explanation.load(path) == found
    (graph,) = cn.InformationFlow(deep, tokenizer=known).graphs(TEXTS[0], position=1)
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

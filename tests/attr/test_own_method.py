"""A method of one's own: one function, and all else comes by itself; mistakes are named, with what to do."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import BertModel

import captum_norm as cn
from captum_norm.errors import MethodError, NonFiniteError, NotEnoughMemoryError
from captum_norm.forward.record import Layer
from captum_norm.methods import METHODS, import_method
from captum_norm.models import Scope
from captum_norm.results.maps import MapUnits
from tests import classifiers, encoder_decoders, families, oracle, tiny
from tests.test_readme import blocks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "write-a-method.md"


def source() -> str:
    """The file that the page's first cell writes."""
    magic, _, file = blocks(PAGE, r"\{code-cell\}")[0].lstrip("\n").partition("\n")
    assert magic == "%%writefile projection.py"
    return file


def own_method() -> Any:
    """The class that the page defines."""
    names: dict[str, Any] = {"__name__": __name__}
    with mock.patch.dict("captum_norm.methods._methods"):
        exec(compile(source(), str(PAGE), "exec"), names)
    return names["Projection"]


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma2", "deberta-v2", "vit"])
@pytest.mark.parametrize("seed", range(2))
def test_the_map_is_what_the_page_says(name: str, seed: int) -> None:
    family = families.FAMILIES[name]
    model, inputs = families.build(name, seed, torch.float64), families.inputs(name, seed, dtype=torch.float64)
    maps: Any = own_method()(model).maps(inputs)
    for layer, found in zip(oracle.layers(family, model, inputs), maps.self_attention.unbind(1), strict=True):
        vectors, constant = layer.vectors("atb")
        output = vectors.sum(2) + constant
        along = torch.einsum("bqkd,bqd->bqk", vectors, output).clamp(min=0)
        torch.testing.assert_close(found, along / along.sum(-1, keepdim=True), rtol=1e-6, atol=1e-8)
    assert maps.convergence_delta.max() < (1e-6 if family.single else 1e-11)


@pytest.mark.parametrize("scope", ["attn", "attn_res", "atb"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "gemma2"])
def test_a_layer_has_the_vectors_of_every_scope(name: str, scope: Scope) -> None:
    family = families.FAMILIES[name]
    model, inputs = families.build(name, 0, torch.float64), families.inputs(name)

    class Vectors(cn.AttentionMapAttribution):
        name, units = "vectors", MapUnits("nothing")

        def layer_map(self, layer: Layer) -> Tensor:
            own = layer.at(scope)
            found.append((own.vectors(), own.own_vectors()))
            return layer.weights.mean(1)

    found: list[tuple[Tensor, Tensor]] = []
    Vectors(model).maps(inputs)
    for layer, (vectors, own) in zip(oracle.layers(family, model, inputs), found, strict=True):
        expected, _ = layer.vectors(scope)
        torch.testing.assert_close(vectors, expected, rtol=1e-6, atol=1e-6 if family.single else 1e-11)
        torch.testing.assert_close(own, expected.diagonal(dim1=1, dim2=2).mT, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_gradients_flow_through_the_map(name: str) -> None:
    model, ids = families.build(name, 0, torch.float64), families.inputs(name)[:1, :3]
    method = own_method()(model, differentiable=True)
    vectors = model.get_input_embeddings()(ids).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda inputs: method.maps(inputs).self_attention, vectors)


def test_vectors_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    method, ids = own_method()(families.build("bert")), families.inputs("bert")
    needed = 2 * ids.numel() * ids.shape[1] * method.model.config.hidden_size * 4
    monkeypatch.setattr("captum_norm.forward.record.free_bytes", lambda _: needed)
    method.maps(ids)
    monkeypatch.setattr("captum_norm.forward.record.free_bytes", lambda _: needed - 1)
    with pytest.raises(NotEnoughMemoryError, match="the vectors of a layer"):
        method.maps(ids)


def test_all_stacks_of_an_encoder_decoder() -> None:
    maps = own_method()(encoder_decoders.build("bart")).maps(encoder_decoders.inputs("bart"))
    for stack in (maps.encoder, maps.decoder, maps.cross):
        torch.testing.assert_close(stack.sum(-1), torch.ones_like(stack[..., 0]))


def test_comparisons_know_it_by_name() -> None:
    model = classifiers.classifier()
    ids, mask = classifiers.sentences([7, 6])
    with mock.patch.dict("captum_norm.methods._methods"):
        cn.register_method(own_method())
        inputs = {"input_ids": ids, "attention_mask": mask}
        comparison = cn.compare(model, inputs, methods=["projection", "norm"], tokenizer=classifiers.TOKENIZER)
    assert list(comparison.results) == ["projection", "norm"]
    assert "projection" not in METHODS


@pytest.mark.long
def test_the_command_line_imports_it(tmp_path: Path) -> None:
    file, folder = tmp_path / "projection.py", tmp_path / "model"
    file.write_text(source(), encoding="utf-8")
    folder.mkdir()
    tiny.save_tiny(BertModel(tiny.bert_config()), folder)
    command = "import sys; del sys.path[0]; from captum_norm.cli import main; sys.exit(main())"  # as the script runs
    words = ["explain", "a dog runs", "--model", str(folder), "--method", "projection:Projection", "--out", "page.html"]
    done = subprocess.run(
        [sys.executable, "-c", command, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "projection" in (tmp_path / "page.html").read_text(encoding="utf-8")


def method_of(function: Callable[[Layer], Any], **attributes: Any) -> Any:
    """A class whose map of a layer ``function`` makes."""

    def layer_map(_: object, layer: Layer) -> Any:
        return function(layer)

    layer_map.__qualname__ = "Own.layer_map"
    given = {"name": "own", "units": MapUnits("own"), "layer_map": layer_map}
    return type("Own", (cn.AttentionMapAttribution,), given | attributes)


class Nothing(cn.AttentionMapAttribution):
    """A class without a function and a name."""


def mean(layer: Layer) -> Tensor:
    return layer.weights.mean(1)


def divided(layer: Layer) -> Tensor:
    return layer.weights.mean(1) / 0


def written(layer: Layer) -> Tensor:
    layer.output.zero_()
    return mean(layer)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda layer: layer.vector(), r"Own\.layer_map failed in layer 0: AttributeError: 'Layer' object has no"),
        (lambda layer: layer.weights @ layer.values.mean(), r"Own\.layer_map failed in layer 0: RuntimeError: "),
        (lambda layer: vars(layer)["key"], r"Own\.layer_map failed in layer 0: KeyError: 'key'"),
        (lambda _: 1 / 0, r"Own\.layer_map failed in layer 0: ZeroDivisionError: division by zero"),
        (lambda _: None, r"Own\.layer_map returned NoneType for layer 0; expected a tensor of shape \(3, 11, 11\)"),
        (lambda layer: mean(layer).numpy(), r"Own\.layer_map returned ndarray for layer 0; expected a tensor"),
        (lambda layer: layer.weights, r"returned a tensor of shape \(3, 4, 11, 11\) for layer 0; expected"),
        (written, r"Own\.layer_map wrote into a tensor of layer 0; work on a copy: clone\(\)"),
    ],
)
def test_a_function_that_fails_is_named(function: Callable[[Layer], Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        method_of(function)(families.build("bert")).maps(families.inputs("bert"))


def test_writing_changes_nothing_in_inference_mode() -> None:
    model, ids = families.build("bert"), families.inputs("bert")
    with torch.inference_mode():
        expected = method_of(mean)(model).maps(ids).encoder
        assert torch.equal(method_of(written)(model).maps(ids).encoder, expected)


def test_a_map_that_is_not_finite_is_named() -> None:
    with pytest.raises(NonFiniteError, match=r"the map that Own\.layer_map returned for layer 0 contains NaN"):
        method_of(divided)(families.build("bert")).maps(families.inputs("bert"))


def test_padding_may_be_anything() -> None:
    model = classifiers.classifier()
    ids, mask = classifiers.sentences([7, 4])

    def odd(layer: Layer) -> Tensor:
        # Where the model sees padding: behind each example.
        return mean(layer).where((torch.arange(7) < mask.sum(1, keepdim=True))[:, :, None], torch.nan)

    maps = method_of(odd)(model).maps(ids, mask).self_attention
    torch.testing.assert_close(maps, method_of(mean)(model).maps(ids, mask).self_attention)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_maps_of_whole_numbers(dtype: torch.dtype) -> None:
    kind = method_of(lambda layer: (layer.weights.mean(1) > 0.1).to(dtype), decomposes=False)
    method = kind(families.build("bert"), "mean")
    maps = method.maps(families.inputs("bert")).encoder
    assert set(maps.unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(method.attribute(families.inputs("bert"), position=0), maps.mean(1)[:, 0])


def test_a_method_that_decomposes_nothing_has_no_delta() -> None:
    method, ids = method_of(mean, decomposes=False)(families.build("bert")), families.inputs("bert")
    assert method.maps(ids).convergence_delta is None
    with pytest.raises(cn.InvalidInputError, match="Own decomposes nothing, so it has no convergence delta"):
        method.compute_convergence_delta(method.attribute(ids), ids)


def test_one_map_is_not_those_of_single_heads() -> None:
    method = method_of(mean, single_heads=True)(families.build("bert"))
    with pytest.raises(cn.InvalidInputError, match=r"Own\.layer_map returns one map a layer.* override maps_of"):
        method.maps(families.inputs("bert"), per_head=True)
    with pytest.raises(MethodError, match="Nothing defines neither layer_map nor maps_of"):
        Nothing(method.model).maps(families.inputs("bert"))


def test_comparisons_name_what_they_expect() -> None:
    model = classifiers.classifier()
    ids, _ = classifiers.sentences([5, 5])
    with pytest.raises(cn.InvalidInputError, match=r'Own\(BertFor.*methods=\{"mine": \.\.\.\}'):
        cn.compare(model, ids, methods=[method_of(mean)(model), "norm"])


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (method_of(mean, name="z 4"), "name 'z 4'; expected lower-case letters, digits and hyphens"),
        (method_of(mean, name=""), "name ''; expected lower-case"),
        (method_of(mean, name="a,b"), "name 'a,b'; expected lower-case"),
        (method_of(mean, name="alti"), "there is a method called 'alti'; give Own another name"),
        (Nothing, "Nothing has no name"),
        (method_of(mean, units="share"), "units 'share'; expected MapUnits"),
        (method_of(mean, layer_map=cn.AttentionMapAttribution.layer_map), "Own defines neither layer_map nor maps_of"),
        (method_of(mean)(families.build("bert")), r"got Own\(BertModel\); expected a class derived"),
        (dict, "got dict; expected a class derived from AttentionMapAttribution"),
    ],
)
def test_what_cannot_be_registered(method: Any, message: str) -> None:
    with pytest.raises(cn.InvalidInputError, match=message):
        cn.register_method(method)
    assert "own" not in METHODS


@pytest.mark.parametrize(
    ("content", "path", "message"),
    [
        ("def broken(:", "broken_method:Own", "cannot import broken_method:Own: SyntaxError: "),
        ("missing_name", "broken_method:Own", "cannot import broken_method:Own: NameError: name 'missing_name'"),
        ("", "broken_method.py:Own", "cannot import broken_method.py:Own: No module"),
        ("import torch", "broken_method:Own", "module 'broken_method' has no attribute 'Own'"),
    ],
)
def test_files_that_cannot_be_imported(
    content: str, path: str, message: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_method.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with mock.patch.dict("sys.modules"), pytest.raises(cn.InvalidInputError, match=message):
        import_method(path)

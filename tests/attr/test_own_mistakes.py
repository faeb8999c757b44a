"""Mistakes in a method of one's own are named: the method, the layer and what to do."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import captum_norm as cn
from captum_norm.errors import MethodError, NonFiniteError
from captum_norm.forward.record import Layer
from captum_norm.methods import METHODS, import_method
from captum_norm.results.maps import MapUnits
from tests import classifiers, families


def own_method(function: Callable[[Layer], Any], **attributes: Any) -> Any:
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
        own_method(function)(families.build("bert")).maps(families.inputs("bert"))


def test_writing_changes_nothing_in_inference_mode() -> None:
    model, ids = families.build("bert"), families.inputs("bert")
    with torch.inference_mode():
        expected = own_method(mean)(model).maps(ids).encoder
        assert torch.equal(own_method(written)(model).maps(ids).encoder, expected)


def test_a_map_that_is_not_finite_is_named() -> None:
    with pytest.raises(NonFiniteError, match=r"the map that Own\.layer_map returned for layer 0 contains NaN"):
        own_method(divided)(families.build("bert")).maps(families.inputs("bert"))


def test_padding_may_be_anything() -> None:
    model = classifiers.classifier()
    ids, mask = classifiers.sentences([7, 4])

    def odd(layer: Layer) -> Tensor:
        # Where the model sees padding: behind each example.
        return mean(layer).where((torch.arange(7) < mask.sum(1, keepdim=True))[:, :, None], torch.nan)

    maps = own_method(odd)(model).maps(ids, mask).self_attention
    torch.testing.assert_close(maps, own_method(mean)(model).maps(ids, mask).self_attention)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_maps_of_whole_numbers(dtype: torch.dtype) -> None:
    kind = own_method(lambda layer: (layer.weights.mean(1) > 0.1).to(dtype), decomposes=False)
    method = kind(families.build("bert"), "mean")
    maps = method.maps(families.inputs("bert")).encoder
    assert set(maps.unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(method.attribute(families.inputs("bert"), position=0), maps.mean(1)[:, 0])


def test_a_method_that_decomposes_nothing_has_no_delta() -> None:
    method, ids = own_method(mean, decomposes=False)(families.build("bert")), families.inputs("bert")
    assert method.maps(ids).convergence_delta is None
    with pytest.raises(cn.InvalidInputError, match="Own decomposes nothing, so it has no convergence delta"):
        method.compute_convergence_delta(method.attribute(ids), ids)


def test_one_map_is_not_those_of_single_heads() -> None:
    method = own_method(mean, single_heads=True)(families.build("bert"))
    with pytest.raises(cn.InvalidInputError, match=r"Own\.layer_map returns one map a layer.* override maps_of"):
        method.maps(families.inputs("bert"), per_head=True)
    with pytest.raises(MethodError, match="Nothing defines neither layer_map nor maps_of"):
        Nothing(method.model).maps(families.inputs("bert"))


def test_comparisons_name_what_they_expect() -> None:
    model = classifiers.classifier()
    ids, _ = classifiers.sentences([5, 5])
    with pytest.raises(cn.InvalidInputError, match=r'Own\(BertFor.*methods=\{"mine": \.\.\.\}'):
        cn.compare(model, ids, methods=[own_method(mean)(model), "norm"])


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (own_method(mean, name="z 4"), "name 'z 4'; expected lower-case letters, digits and hyphens"),
        (own_method(mean, name=""), "name ''; expected lower-case"),
        (own_method(mean, name="a,b"), "name 'a,b'; expected lower-case"),
        (own_method(mean, name="alti"), "there is a method called 'alti'; give Own another name"),
        (Nothing, "Nothing has no name"),
        (own_method(mean, units="share"), "units 'share'; expected MapUnits"),
        (own_method(mean, layer_map=cn.AttentionMapAttribution.layer_map), "Own defines neither layer_map nor maps_of"),
        (own_method(mean)(families.build("bert")), r"got Own\(BertModel\); expected a class derived"),
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

"""A method of one's own, as the how-to writes it: one function, and all else comes by itself."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import BertModel

import captum_norm as cn
from captum_norm.errors import NotEnoughMemoryError
from captum_norm.forward.record import Layer
from captum_norm.methods import METHODS
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

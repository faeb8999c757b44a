"""Attention's affine map f against what the model's own modules make of what they receive."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from captum_norm.errors import UnsupportedModelError
from captum_norm.lab.analysis.corpus import Corpus
from captum_norm.lab.analysis.engine import analyze
from captum_norm.lab.analysis.layers import affine_maps
from tests import families, oracle
from tests.families import FAMILIES
from tests.lab.analysis.small import bert, tokenizer, write_texts


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["bert", "albert", "deberta", "deberta-v2", "gpt2", "gpt-neox", "llama"])
def test_all_heads_together_by_one_matrix(name: str, seed: int) -> None:
    family, model, ids = FAMILIES[name], families.build(name, seed, torch.float64), families.inputs(name, seed)
    received: list[Any] = []
    modules = [f"{family.layer.format(index)}.{family.value}" for index in range(model.config.num_hidden_layers)]
    handles = [
        model.get_submodule(module).register_forward_pre_hook(lambda _, args: received.append(args[0]))
        for module in dict.fromkeys(modules)  # ALBERT's layers share theirs
    ]
    layers = oracle.layers(family, model, ids)
    for handle in handles:
        handle.remove()
    found = [read() for read in affine_maps(model, {"input_ids": ids}, len(layers))]
    for layer, x, one in zip(layers, received, found, strict=True):
        expected = torch.einsum("bhkd,hde->bke", layer.values, layer.projection)
        np.testing.assert_allclose(x.numpy() @ one.weight + one.bias, expected.numpy(), atol=1e-10)
        assert (one.norm is None) == (layer.final is None)
        if one.norm is not None and layer.final is not None:
            vectors = torch.randn(5, len(one.norm), dtype=torch.float64)
            carried = layer.final.part(vectors, torch.ones(5))
            np.testing.assert_allclose(vectors.numpy() @ one.norm, carried.numpy(), atol=1e-10)


def test_values_that_no_linear_module_gives_are_refused_before_the_corpus_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = bert()
    model.encoder.layer[1].attention.self.value.register_forward_hook(lambda _, __, output: output.tanh())
    monkeypatch.setattr(Corpus, "blocks", lambda *_: pytest.fail("the corpus was read"))
    with pytest.raises(UnsupportedModelError, match="value projection of layer 1 was not found"):
        analyze("expansion-rate", model, tokenizer(), Corpus(write_texts(tmp_path / "text")))

"""Contextualisation change against scipy-free rank correlation written out, and what holds in every family."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from captum_norm import InvalidInputError, NormMeter
from captum_norm.errors import UnsupportedModelError, UnsupportedScopeError
from captum_norm.functional import centred_ranks, spearman
from captum_norm.lab.analysis import contextualization_change
from captum_norm.lab.analysis.corpus import Corpus
from captum_norm.lab.analysis.engine import analyze
from captum_norm.lab.analysis.layers import ExpansionRate
from tests import encoder_decoders, families, oracle
from tests.feed_forwards import EVERY, PARTS
from tests.lab.analysis.small import bert, tokenizer, write_texts

COMPONENTS = {
    "post-norm": ("RES", "LN", "FF", "RES", "LN"),
    "pre-norm": ("RES", "LN", "FF", "RES"),
    "parallel": ("RES", "FF"),
    "sandwich": ("LN, RES", "LN", "FF", "LN, RES"),
    "norm-on-output": ("LN, RES", "FF", "LN, RES"),
}


def slow_spearman(first: Tensor, second: Tensor) -> float:
    """Ranks by counting, then Pearson's correlation."""

    def ranks(values: Any) -> Any:
        less, same = values[None] < values[:, None], values[None] == values[:, None]
        return less.sum(1) + (same.sum(1) + 1) / 2

    return float(np.corrcoef(ranks(first.numpy()), ranks(second.numpy()))[0, 1])


@pytest.mark.parametrize("seed", range(5))
def test_rank_correlation_with_ties(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randint(0, 6, (40,), generator=generator).double() for _ in range(2))
    assert abs(float(spearman(first, second)) - slow_spearman(first, second)) < 1e-12
    assert abs(float(spearman(first, first.exp())) - 1) < 1e-12
    assert abs(float(spearman(first, -first)) + 1) < 1e-12


def test_ranks_by_hand_and_nothing_to_order() -> None:
    assert centred_ranks(torch.tensor([5.0, 1.0, 5.0, 2.0])).tolist() == [2, -3, 2, -1]  # of 3.5, 1, 3.5 and 2
    assert spearman(torch.ones(3), torch.arange(3)).isnan()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gpt-neox", "gemma2", "olmo2", "mixtral", "vit"])
def test_changes_are_those_of_the_maps(name: str) -> None:
    model, inputs = families.build(name), families.inputs(name)
    change = contextualization_change(model, inputs)
    assert change.components == COMPONENTS[EVERY[name].style]
    (measured,) = NormMeter(model).measure(inputs, scopes=change.scopes).values()
    size = measured.real.shape[1]
    pairs = torch.ones(size, size).tril().bool() if EVERY[name].causal else torch.ones(size, size).bool()
    for place in range(len(change.components)):
        before, after = (measured.norms[scope] for scope in change.scopes[place : place + 2])
        for layer in range(2):
            single = [1 - slow_spearman(before[b, layer][pairs], after[b, layer][pairs]) for b in range(len(inputs))]
            torch.testing.assert_close(change.per_example[:, layer, place], torch.tensor(single).double())
            torch.testing.assert_close(float(change.macro[layer, place]), float(np.mean(single)))
            pooled = 1 - slow_spearman(before[:, layer][:, pairs].flatten(), after[:, layer][:, pairs].flatten())
            torch.testing.assert_close(float(change.micro[layer, place]), pooled)


def test_padding_changes_nothing() -> None:
    model, ids = families.build("gpt2"), families.inputs("gpt2", batch=1)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones_like(ids)], 1)
    change = contextualization_change(model, padded, mask)
    torch.testing.assert_close(change.macro, contextualization_change(model, ids).macro)


def test_every_style_has_its_stages() -> None:
    assert {EVERY[name].style for name in PARTS} == set(COMPONENTS)


def test_what_cannot_be_compared_is_refused() -> None:
    model, inputs = encoder_decoders.build("marian"), encoder_decoders.inputs("marian")
    with pytest.raises(InvalidInputError, match=r"expected a model with one stack"):
        contextualization_change(model, inputs)
    assert contextualization_change(model.get_encoder(), inputs["input_ids"]).macro.shape == (2, 5)
    llama = families.build("llama")
    for layer in llama.model.layers:
        layer.mlp.act_fn.forward = partial(torch.softmax, dim=-1)
    with pytest.raises(UnsupportedScopeError, match="no feed-forward network was understood"):
        contextualization_change(llama, families.inputs("llama"))


def test_one_position_has_nothing_to_order() -> None:
    model = families.build("gpt2")
    change = contextualization_change(model, families.inputs("gpt2", length=1))
    assert change.per_example.isnan().all()
    assert change.macro.isnan().all()
    ids, mask = families.inputs("gpt2", length=7), torch.ones(3, 7, dtype=torch.long)
    mask[1, 1:] = 0
    change = contextualization_change(model, ids, mask)
    assert change.per_example[1].isnan().all()
    torch.testing.assert_close(change.macro, change.per_example[[0, 2]].mean(0))


@pytest.mark.few
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["bert", "albert", "deberta", "deberta-v2", "gpt2", "gpt-neox", "llama"])
def test_all_heads_together_by_one_matrix(name: str, seed: int) -> None:
    family, model, ids = families.FAMILIES[name], families.build(name, seed, torch.float64), families.inputs(name, seed)
    modules = [f"{family.layer.format(index)}.{family.value}" for index in range(model.config.num_hidden_layers)]
    with oracle.watched(model, {module: (module, "input") for module in modules}) as seen:
        layers = oracle.layers(family, model, ids)
    received = [x for notes in seen.values() for x in notes]  # ALBERT's layers share theirs
    context: Any = SimpleNamespace(model=model, inputs={"input_ids": ids}, layers=len(layers))
    found = [read() for read in ExpansionRate.prepare(context)]
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

"""Every number of the analyses, computed once more in plain loops from a model's hidden states and weights."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
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
from captum_norm.lab.analysis import corpus as reading
from captum_norm.lab.analysis.corpus import Corpus, Encoder, TokenSequence
from captum_norm.lab.analysis.engine import analyze
from captum_norm.lab.analysis.layers import ExpansionRate
from captum_norm.lab.analysis.norms import LENGTHS, WEIGHTS
from captum_norm.lab.analysis.results import AnalysisResult
from tests import encoder_decoders, families, oracle
from tests.families import FAMILIES
from tests.feed_forwards import EVERY, PARTS
from tests.lab.analysis.small import TEXTS, bert, gpt2, tokenizer, write_texts

CATEGORIES = Encoder(tokenizer(), 512).categories


@dataclass
class Layer:
    """One layer on one sequence: weights (H, S, S), f (H, S, D), x (S, D), LayerNorm's γ and σ of each position."""

    weights: Tensor
    f: Tensor
    x: Tensor
    gamma: Tensor
    sigma: Tensor

    def lengths(self) -> Tensor:
        lengths: Tensor = self.f.norm(dim=-1)
        return lengths

    def vectors(self, query: int, *, residual: bool, norm: bool) -> tuple[Tensor, Tensor]:
        """The query's own vector, and the sum of the others."""
        parts = torch.einsum("hk,hkd->kd", self.weights[:, query], self.f)
        own, others = parts[query], sum(part for key, part in enumerate(parts) if key != query)
        own = own + self.x[query] if residual else own
        if norm:
            own, others = ((part - part.mean()) * self.gamma / self.sigma[query] for part in (own, others))
        return own, torch.as_tensor(others)


def layers_of(model: Any, sequence: TokenSequence) -> list[Layer]:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(torch.tensor([sequence.ids]), output_attentions=True, output_hidden_states=True)
        found = []
        for index, weights in enumerate(output.attentions):
            module, x = model.encoder.layer[index].attention, output.hidden_states[index][0]
            values = module.self.value(x).unflatten(-1, (4, -1))
            slices = module.output.dense.weight.T.unflatten(0, (4, -1))
            f = torch.stack([values[:, head] @ slices[head] for head in range(4)])
            total = sum(weight @ own for weight, own in zip(weights[0], f, strict=True)) + module.output.dense.bias + x
            norm = module.output.LayerNorm
            sigma = (total.var(-1, unbiased=False) + norm.eps).sqrt()
            found.append(Layer(weights[0], f, x, norm.weight.detach(), sigma))
    return found


def encoded(**options: Any) -> list[TokenSequence]:
    return Encoder(tokenizer(), 512, **options).sequences(list(enumerate(TEXTS, 1)))


def category(token: int) -> str:
    return CATEGORIES.names[CATEGORIES.of_token[token]]


@pytest.fixture(params=[0, 1])
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def run(name: str, model: Any, tmp_path: Path, **options: Any) -> AnalysisResult:
    corpus = Corpus(write_texts(tmp_path / "text"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BLOCK_TEXTS", 4)
        return analyze(name, model, tokenizer(), corpus, **{"batch_tokens": 60, **options})


def rows(result: AnalysisResult, table: str) -> Iterator[dict[str, Any]]:
    found = result.table(table)
    for row in found.rows:
        yield dict(zip([column.name for column in found.columns], row, strict=True))


def test_dispersion(tmp_path: Path, seed: int) -> None:
    model = bert(seed)
    lengths, inputs = defaultdict[tuple[int, int], list[float]](list), defaultdict[int, list[float]](list)
    for sequence in encoded():
        for index, layer in enumerate(layers_of(model, sequence)):
            inputs[index] += [float(x.norm()) for x in layer.x]
            for head, own in enumerate(layer.lengths()):
                lengths[index, head] += own.tolist()
    result = run("dispersion", model, tmp_path)
    for row in rows(result, "heads"):
        values = np.array(lengths[row["layer"], row["head"]])
        expected = [values.mean(), values.std(), values.std() / values.mean(), values.min(), values.max()]
        assert [row[name] for name in ("mean", "sd", "cv", "min", "max")] == pytest.approx(expected, rel=1e-9)
    for row in rows(result, "layers"):
        if row["vector"] == "‖x‖":
            assert row["mean"] == pytest.approx(np.mean(inputs[row["layer"]]), rel=1e-9)
    overall = result.summary["mean ‖f(x)‖"]
    assert overall == pytest.approx(np.mean([np.mean(values) for values in lengths.values()]), rel=1e-9)


def test_special_tokens(tmp_path: Path, seed: int) -> None:
    model = bert(seed)
    means = defaultdict[tuple[int, int, str], list[list[float]]](list)
    pairs = defaultdict[str, list[tuple[float, float]]](list)
    for sequence in encoded():
        kinds = [category(token) for token in sequence.ids]
        for index, layer in enumerate(layers_of(model, sequence)):
            for head in range(4):
                alpha, f = layer.weights[head].numpy(), layer.lengths()[head].numpy()
                for kind in set(kinds):
                    keys = [place for place, other in enumerate(kinds) if other == kind]
                    products = [sum(alpha[query, key] * f[key] for key in keys) for query in range(len(kinds))]
                    weight = np.mean([sum(alpha[query, key] for key in keys) for query in range(len(kinds))])
                    means[index, head, kind].append([weight, np.mean(f[keys]), np.mean(products)])
                    pairs[kind] += [(alpha[query, key], f[key]) for query in range(len(kinds)) for key in keys]
    result = run("special-tokens", model, tmp_path)
    found = list(rows(result, "heads"))
    assert len(found) == len(means)
    for row in found:
        expected = np.mean(means[row["layer"], row["head"], row["category"]], axis=0)
        assert [row[name] for name in ("weight", "transformed", "product")] == pytest.approx(expected, rel=1e-9)
    for row in rows(result, "correlation"):
        weights, lengths = torch.tensor(pairs[row["category"]], dtype=torch.float64).T
        binned = spearman(WEIGHTS.places(weights), LENGTHS.places(lengths)).item()
        assert row["spearman"] == pytest.approx(binned, abs=1e-3)
        # [CLS] has few lengths here, many of them in one bin.
        assert row["spearman"] == pytest.approx(spearman(weights, lengths).item(), abs=0.02)


def test_special_tokens_of_a_causal_model_look_back(tmp_path: Path) -> None:
    model = gpt2()
    sequence = encoded()[0]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([sequence.ids]), output_attentions=True).attentions
    corpus = Corpus(write_texts(tmp_path / "text"), limit=1)
    result = analyze("special-tokens", model, tokenizer(), corpus, max_length=64)
    for row in rows(result, "layers"):
        keys = [place for place, token in enumerate(sequence.ids) if category(token) == row["category"]]
        expected = weights[row["layer"]][0, :, :, keys].sum(-1).mean().item()
        assert row["weight"] == pytest.approx(expected, rel=1e-9)


def variants(layer: Layer, query: int) -> dict[str, float]:
    mean = layer.weights.mean(0)[query]
    others = float(mean.sum() - mean[query])
    ratios = {"Attn-W": others, "AttnRes-W": others / 2}
    for name, residual, norm in (("Attn-N", False, False), ("AttnRes-N", True, False), ("AttnResLn-N", True, True)):
        own, rest = layer.vectors(query, residual=residual, norm=norm)
        ratios[name] = float(rest.norm() / (rest.norm() + own.norm()))
    return ratios


def test_mixing_ratio(tmp_path: Path, seed: int) -> None:
    model = bert(seed)
    sequences = encoded(mask_rate=0.12, seed=seed)
    ratios = defaultdict[tuple[int, str, str], list[float]](list)
    tokens, means = list[int](), defaultdict[str, list[float]](list)
    for sequence in sequences:
        layers = layers_of(model, sequence)
        for place, token in enumerate(sequence.ids):
            by_layer = [variants(layer, place) for layer in layers]
            for index, values in enumerate(by_layer):
                for name, value in values.items():
                    ratios[index, name, category(token)].append(value)
            if place not in sequence.masked:
                tokens.append(token)
                for name in by_layer[0]:
                    means[name].append(float(np.mean([values[name] for values in by_layer])))
    result = run("mixing-ratio", model, tmp_path, seed=seed)
    found = list(rows(result, "categories"))
    assert len(found) == len(ratios)
    assert "[MASK]" in {row["category"] for row in found}
    assert result.metadata["corpus"]["masked"] == sum(len(sequence.masked) for sequence in sequences)
    for row in found:
        cell = np.array(ratios[row["layer"], row["variant"], row["category"]])
        expected = [cell.mean(), cell.std(), cell.min(), cell.max(), len(cell)]
        assert [row[name] for name in ("mean", "sd", "min", "max", "tokens")] == pytest.approx(expected, rel=1e-6)
    counts = Counter(tokens)
    frequency = torch.tensor([-counts[token] for token in tokens])
    for row in rows(result, "variants"):
        exact = spearman(frequency, torch.tensor(means[row["variant"]], dtype=torch.float64)).item()
        assert row["frequency"] == pytest.approx(exact, abs=2e-3)
        every = [value for (_, name, _), values in ratios.items() if name == row["variant"] for value in values]
        assert row["mean"] == pytest.approx(np.mean(every), rel=1e-9)  # the layers have equally many tokens


def test_frequency(tmp_path: Path, seed: int) -> None:
    model = bert(seed)
    tokens, lengths, weights = list[int](), list[float](), list[float]()
    for sequence in encoded():
        layers = layers_of(model, sequence)
        tokens += sequence.ids
        lengths += torch.stack([layer.lengths() for layer in layers]).mean((0, 1)).tolist()
        weights += torch.stack([layer.weights for layer in layers]).mean((0, 1, 2)).tolist()
    counts = Counter(tokens)
    frequency = torch.tensor([-counts[token] for token in tokens])
    result = run("frequency", model, tmp_path)
    found = result.table("correlation").column("spearman")
    exact = [spearman(frequency, torch.tensor(values)).item() for values in (lengths, weights)]
    assert found == pytest.approx(exact, abs=5e-3)
    assert sum(row["tokens"] for row in rows(result, "bands")) == len(tokens)


def test_expansion_rate(tmp_path: Path, seed: int) -> None:
    model = bert(seed)
    scales = defaultdict[int, list[float]](list)
    for sequence in encoded():
        for index, layer in enumerate(layers_of(model, sequence)):
            scales[index] += (1 / layer.sigma).tolist()
    for row in rows(run("expansion-rate", model, tmp_path), "layers"):
        module: Any = model.encoder.layer[row["layer"]].attention
        output = module.output.dense.weight.detach().T
        weight, bias = module.self.value.weight.detach().T @ output, module.self.value.bias.detach() @ output
        corner = torch.zeros(25, 25, dtype=torch.float64)
        corner[:24, :24], corner[24, :24], corner[24, 24] = weight, bias, 1
        values = torch.linalg.svdvals(corner)
        expected = [float(corner.norm() / 25**0.5), float(values.max()), float(values.min())]
        assert [row[name] for name in ("rate", "max", "min")] == pytest.approx(expected, rel=1e-6)
        centring = torch.eye(24, dtype=torch.float64) - 1 / 24
        norm = centring @ torch.diag(module.output.LayerNorm.weight.detach())
        rate = float(norm.norm() / 24**0.5) * np.mean(scales[row["layer"]])
        assert row["norm_rate"] == pytest.approx(rate, rel=1e-6)


@pytest.mark.parametrize("make", [bert, gpt2])
def test_contextualization_change(tmp_path: Path, make: Any) -> None:
    model = make()
    result = run("contextualization-change", model, tmp_path, max_length=64)
    sequences = [sequence for sequence in encoded() if len(sequence.ids) > 1]
    assert [(plot.name, plot.error) for plot in result.plots] == [("change", None), ("change-by-layer", "sd")]
    changes = [contextualization_change(model, torch.tensor([sequence.ids])) for sequence in sequences]
    macro = torch.stack([change.macro for change in changes]).mean(0)  # (L, C)
    for row in rows(result, "layers"):
        component = int(row["component"].partition(".")[0]) - 1
        assert row["macro"] == pytest.approx(macro[row["layer"], component].item(), rel=1e-6, abs=1e-9)
    longest = max(len(sequence.ids) for sequence in sequences)
    padded = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros_like(padded)
    for place, sequence in enumerate(sequences):
        padded[place, : len(sequence.ids)], mask[place, : len(sequence.ids)] = torch.tensor(sequence.ids), 1
    micro = contextualization_change(model, {"input_ids": padded, "attention_mask": mask}).micro
    for row in rows(result, "layers"):
        component = int(row["component"].partition(".")[0]) - 1
        assert row["micro"] == pytest.approx(micro[row["layer"], component].item(), abs=3e-3)


@pytest.mark.few
@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
@pytest.mark.parametrize("name", ["contextualization-change", "special-tokens", "frequency"])
def test_correlations_do_not_depend_on_the_size_of_the_vectors(tmp_path: Path, name: str, scale: float) -> None:
    """All that is written into the residual stream is scaled, which the norms take back before anything reads it."""
    model: Any = gpt2()
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 0.0
    before = run(name, model, tmp_path, max_length=64)
    with torch.no_grad():
        for parameter, tensor in model.named_parameters():
            if parameter.startswith(("wte", "wpe")) or "c_proj" in parameter:
                tensor.mul_(scale)
    after = run(name, model, tmp_path, max_length=64)
    measure, table = ("micro", "layers") if name == "contextualization-change" else ("spearman", "correlation")
    found, expected = (result.table(table).column(measure) for result in (after, before))
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["dispersion", "special-tokens", "frequency", "mixing-ratio"])
def test_batches_do_not_matter(tmp_path: Path, name: str) -> None:
    one, other = (run(name, bert(), tmp_path, batch_tokens=size) for size in (1, 4096))
    for table, again in zip(one.tables, other.tables, strict=True):
        for row, same in zip(table.rows, again.rows, strict=True):
            for cell, twin in zip(row, same, strict=True):
                # A value on the edge of a bin may fall on either side.
                near = pytest.approx(twin, rel=1e-6, abs=1e-4) if isinstance(twin, float) else twin
                assert cell == near


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
    family, model, ids = FAMILIES[name], families.build(name, seed, torch.float64), families.inputs(name, seed)
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

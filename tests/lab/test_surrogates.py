"""Surrogates of answers: features by vectors formed one by one, regressions by their optimality, planted heads."""

import json
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_norm.errors import InvalidInputError
from captum_norm.generation.ablations import SourceAblations
from captum_norm.lab import surrogates
from captum_norm.lab.prompts import evidence_prompts
from captum_norm.lab.surrogates import ContextCite, HeadFeatures, HeadWeighted, lasso, ridge
from tests import oracle
from tests.families import EVERY
from tests.families.family import new
from tests.generation.test_ablations import ANSWER, PASSAGES, PROMPT, alone, double
from tests.generation.texts import gpt2, tokenizer

FEATURES: tuple[HeadFeatures, ...] = ("weights", "norms", "updates")


def ablated(model: Any) -> SourceAblations:
    return SourceAblations(model, tokenizer(), PROMPT, ANSWER, segments=PASSAGES)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("penalty", [0.0, 0.01, 0.3])
def test_lasso_is_optimal(seed: int, penalty: float) -> None:
    """At the minimum no weight's gradient exceeds the penalty, and that of a weight that is not 0 equals it."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.rand(40, 6, generator=draw, dtype=torch.float64) < 0.5
    inputs[:, 3] = True
    outputs = torch.randn(40, generator=draw, dtype=torch.float64) + 2 * inputs[:, 0] + 7
    found = lasso(inputs, outputs, penalty)
    deviations = [float(column.double().std(correction=0)) for column in inputs.T]
    predicted = inputs.double() @ found
    rest = (outputs - outputs.mean()) - (predicted - predicted.mean())
    for source, deviation in enumerate(deviations):
        if source == 3:
            assert found[source] == 0
            continue
        pull = sum(float(x) * float(r) for x, r in zip(inputs[:, source], rest, strict=True)) / 40 / deviation
        if found[source] == 0:
            assert abs(pull) <= penalty + 1e-9
        else:
            assert pull == pytest.approx(math.copysign(penalty, float(found[source])), abs=1e-8)
    if penalty == 0.3:
        assert (found == 0).sum() > 1


def test_context_cite_is_the_lasso_of_each_text_alone() -> None:
    model = double("llama")
    result = ContextCite(model, tokenizer(), 12, seed=4).attribute(PROMPT, ANSWER, segments=PASSAGES)
    kept = torch.rand(12, len(PASSAGES), generator=torch.Generator().manual_seed(4)) < 0.5
    odds = []
    for row in kept:
        texts = [text for text, stays in zip(PASSAGES, row, strict=True) if stays]
        chance = math.exp(alone(model, "\n".join([*texts, PROMPT.splitlines()[-1]]), ANSWER).sum())
        odds.append(math.log(chance / (1 - chance)))
    count = len(result.output_tokens)
    expected = lasso(kept, torch.tensor(odds, dtype=torch.float64) / count, 0.01) * count
    scores: Any = result.segment_attr
    assert torch.allclose(scores, expected, rtol=0, atol=1e-8)
    assert scores.abs().max() > 1e-3
    assert result.segments == tuple(PASSAGES)
    assert float(result.seq_attr.sum()) == pytest.approx(float(scores.sum()))
    assert "".join(result.output_tokens) == result.explained.answer
    whole = math.exp(alone(model, PROMPT, ANSWER).sum())
    assert result.probability == pytest.approx(whole, rel=1e-5)
    assert "Anna" in result.page()._repr_html_()


def expected_features(model: Any, name: str, features: HeadFeatures) -> Tensor:
    """Of each layer, head and source, by loops over positions that read and keys, from the model's own weights."""
    before, ids = (tokenizer()(text, return_tensors="pt")["input_ids"] for text in (PROMPT, PROMPT + ANSWER))
    answer, inputs = ids[0, before.shape[1] :], ids[:, :-1]
    layers, first = oracle.layers(EVERY[name], model, inputs), before.shape[1] - 1
    texts = tokenizer()(PROMPT, return_offsets_mapping=True)["offset_mapping"]
    ends = [PROMPT.index(text) + len(text) + 1 for text in PASSAGES]
    source_of = [next((s for s, end in enumerate(ends) if a < end), -1) if a < b else -1 for a, b in texts]
    directions = read_by(model, inputs, answer, first) if features == "updates" else None
    found = torch.zeros(len(layers), layers[0].weights.shape[1], len(PASSAGES), dtype=torch.float64)
    for number, layer in enumerate(layers):
        for head in range(found.shape[1]):
            for step in range(len(answer)):
                sums = torch.zeros(len(PASSAGES), layer.projection.shape[2], dtype=torch.float64)
                for key, source in enumerate(source_of):
                    weight = layer.weights[0, head, first + step, key]
                    if source >= 0 and features == "weights":
                        found[number, head, source] += weight
                    elif source >= 0:
                        sums[source] += weight * (layer.values[0, head, key] @ layer.projection[head])
                if features == "norms":
                    found[number, head] += sums.norm(dim=1)
                elif directions is not None:
                    found[number, head] += sums @ directions[step]
    return found / len(answer)


def read_by(model: Any, inputs: Tensor, answer: Tensor, first: int) -> list[Tensor]:
    """The direction in which each token's logit reads the stream, with the last norm's statistics as they are."""
    norm, head = (
        (model.model.norm, model.lm_head) if hasattr(model, "model") else (model.transformer.ln_f, model.lm_head)
    )
    seen: list[Tensor] = []
    hook = norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model(inputs)
    hook.remove()
    found = []
    for step, token in enumerate(answer.tolist()):
        state, row = seen[0][0, first + step].double(), head.weight[token].detach().double() * norm.weight.detach()
        if hasattr(model, "model"):
            found.append(row / (state.square().mean() + norm.variance_epsilon).sqrt())
        else:
            found.append((row - row.mean()) / (state.var(correction=0) + norm.eps).sqrt())
    return found


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_features_are_those_of_vectors_one_by_one(name: str, features: HeadFeatures) -> None:
    model = double(name)
    found = HeadWeighted(model, tokenizer(), features).features_of(ablated(model))
    expected = expected_features(model, name, features)
    assert found.shape == (2, 4, 4)
    assert expected.abs().max() > 1e-2
    # The model itself computes in float64; attention's softmax of LLaMA is in float32.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("features", FEATURES)
def test_features_of_a_translation_model_are_of_its_source(features: HeadFeatures) -> None:
    model = double("t5")
    method, one = HeadWeighted(model, tokenizer(), features), ablated(model)
    found = method.features_of(one)
    assert found.shape == (2, 4, 4)
    assert found.abs().min() > 0
    method.coefficients = torch.full((2, 4), 0.125, dtype=torch.float64)
    scores: Any = method.explain(one).segment_attr
    torch.testing.assert_close(scores, found.mean((0, 1)))


@pytest.mark.parametrize("seed", range(3))
def test_ridge_is_optimal(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of one weight, in either direction, lowers what is minimised; a group that does not vary is left out."""
    monkeypatch.setattr(surrogates, "PENALTIES", (0.3,))
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(5, 12, 4, generator=draw, dtype=torch.float64) * torch.tensor([1.0, 10.0, 0.1, 1.0])
    outputs = torch.randn(5, 12, generator=draw, dtype=torch.float64) + inputs[..., 1]
    outputs[2] = 3.0
    found = ridge(inputs, outputs)
    assert float(found.abs().sum()) == pytest.approx(1)
    groups = [0, 1, 3, 4]
    centred = [inputs[g] - inputs[g].mean(0) for g in groups]
    scales = torch.cat(centred).square().mean(0).sqrt()
    targets = [(outputs[g] - outputs[g].mean()) / outputs[g].std(correction=0) for g in groups]

    def minimised(weights: Tensor) -> float:
        errors = [float((y - x / scales @ weights).square().sum()) for x, y in zip(centred, targets, strict=True)]
        return sum(errors) + 0.3 * 4 * 12 * float(weights.square().sum())

    # Its length is lost when absolute weights are made to add up to 1: the best one is that of a parabola.
    direction = found * scales
    low, middle, high = (minimised(step * direction) for step in (-1, 0, 1))
    best = direction * (low - high) / (2 * (low + high - 2 * middle))
    for place in range(4):
        for step in (-1e-4, 1e-4):
            moved = best.clone()
            moved[place] += step
            assert minimised(moved) > minimised(best)


@cache
def prompts() -> list[str]:
    return [prompt.text.replace("?", "") for prompt in evidence_prompts("needle", 6, passages=5)]


@pytest.mark.parametrize("planted", [(0, 1), (1, 3)])
def test_a_head_that_decides_is_found(planted: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-odds that are what one head gives the kept sources, and little noise; others read other sources alike."""
    torch.manual_seed(3)
    model = new("LlamaForCausalLM", vocab_size=len(tokenizer()), hidden_size=24, num_attention_heads=4,
                intermediate_size=32, max_position_embeddings=300, num_hidden_layers=2)()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    method = HeadWeighted(model.train(False), tokenizer(), "norms")
    draw = torch.Generator().manual_seed(9)

    def planted_odds(ablations: SourceAblations, count: int, _: torch.Generator) -> tuple[Tensor, Tensor]:
        kept = torch.rand(count, len(ablations.sources), generator=draw) < 0.5
        odds = kept.double() @ method.features_of(ablations)[planted]
        return kept, odds + 0.02 * odds.std() * torch.randn(count, generator=draw, dtype=torch.float64)

    monkeypatch.setattr(surrogates, "drawn", planted_odds)
    learned: Any = method.fit(prompts(), gen_args={"max_new_tokens": 2}).coefficients
    assert divmod(int(learned.abs().argmax()), 4) == planted
    others = learned.abs().flatten().sort().values[:-1]
    assert learned[planted] > 3 * others[-1]


def test_what_is_learned_is_saved(tmp_path: Path) -> None:
    fit = partial(HeadWeighted(gpt2(), tokenizer(), "weights").fit, [PROMPT], gen_args={"max_new_tokens": 3})
    method = fit(ablations=9)
    learned: Any = method.coefficients
    for seed, same in ((0, True), (1, False)):
        again: Any = fit(ablations=9, seed=seed).coefficients
        assert torch.equal(learned, again) == same
    method.coefficients = learned
    method.save(tmp_path / "heads.json")
    loaded = HeadWeighted.load(tmp_path / "heads.json", gpt2(), tokenizer())
    first, second = (one.attribute(PROMPT, ANSWER, segments="line") for one in (method, loaded))
    assert loaded.features == "weights"
    assert first == second
    other = HeadWeighted.load(tmp_path / "heads.json", double("gpt2"), tokenizer())
    with pytest.raises(InvalidInputError, match="weights of 3 × 4 heads, but GPT2LMHeadModel has 2 × 4"):
        other.attribute(PROMPT, ANSWER, segments="line")


def test_what_is_refused(tmp_path: Path) -> None:
    model, words = gpt2(), tokenizer()
    method = HeadWeighted(model, words)
    calls: list[tuple[Any, str]] = [
        (lambda: ContextCite(model, words, 0), "ablations=0"),
        (lambda: ContextCite(model, words).attribute(PROMPT, ANSWER, segments=["not there"]), "not in the prompt"),
        (lambda: HeadWeighted(model, words, "norm"), "norms"),  # type: ignore[arg-type]
        (lambda: method.attribute(PROMPT, ANSWER, segments="line"), "no weights yet"),
        (lambda: method.save(tmp_path / "x.json"), "no weights yet"),
        (lambda: method.fit([]), "no prompts"),
        (lambda: method.fit([PROMPT], ablations=1), "no ablation changes"),
        (lambda: HeadWeighted.load(tmp_path / "none.json", model, words), "cannot read"),
    ]
    for call, message in calls:
        with pytest.raises(InvalidInputError, match=message):
            call()
    sound = {"format": surrogates.FORMAT, "features": "norms", "coefficients": [[1.0]]}
    damages: list[Any] = [[], "", sound | {"format": "x"}, sound | {"features": "x"}, sound | {"coefficients": [1.0]}]
    for damaged in [*damages, sound | {"coefficients": [[math.nan]]}, sound | {"coefficients": [["a"]]}]:
        (tmp_path / "damaged.json").write_text(json.dumps(damaged))
        with pytest.raises(InvalidInputError, match=r"expected a file that HeadWeighted\.save wrote"):
            HeadWeighted.load(tmp_path / "damaged.json", model, words)
    method.coefficients = torch.ones(3, 4)
    with pytest.raises(InvalidInputError, match="cannot write"):
        method.save(tmp_path / "no" / "folder.json")

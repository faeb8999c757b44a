"""Captum's methods through the wrapper, against Captum called by hand and their definitions; what is refused."""

import random
from collections.abc import Callable
from functools import partial
from itertools import combinations
from math import factorial
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from captum import attr
from torch import Tensor, nn

from captum_norm import DecompX, Difference, InvalidInputError, TokenAttribution, UnsupportedModelError
from captum_norm.errors import NonFiniteError
from tests import encoder_decoders, families, torch_models
from tests.classifiers import MASK, TOKENIZER, alone, classifier, randomized, sentences

WARNS = pytest.mark.filterwarnings("ignore:Setting forward, backward hooks")
assert_equal = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)


class OnEmbeddings(nn.Module):
    """What one writes for Captum by hand: embeddings to logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, embeddings: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs_embeds=embeddings).logits
        return logits if logits.dim() == 2 else logits[:, -1]


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - Captum's GradientSHAP draws from it
    random.seed(seed)


@WARNS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("method", "options", "compares"),
    [
        (attr.Saliency, {}, False),
        (attr.InputXGradient, {}, False),
        (attr.GuidedBackprop, {}, False),
        (attr.IntegratedGradients, {"n_steps": 7}, True),
        (attr.IntegratedGradients, {"n_steps": 4, "method": "riemann_trapezoid"}, True),
        (attr.DeepLift, {}, True),
        (attr.GradientShap, {"n_samples": 3}, True),
    ],
)
@pytest.mark.parametrize("reduction", ["sum", "l2"])
@pytest.mark.filterwarnings("ignore:Setting backward hooks on ReLU")
def test_gradient_methods_are_captums(
    method: Any, options: dict[str, Any], compares: bool, causal: bool, reduction: Any
) -> None:
    model = families.build("gpt2", dtype=torch.float64) if causal else classifier()
    ids, mask = sentences([9, 6, 7])
    target = [2, 0, 1]
    wrapped = TokenAttribution(model, method, tokenizer=TOKENIZER, reduction=reduction, **options)
    delta = wrapped.has_convergence_delta()
    assert delta == ("n_samples" in options or compares)
    seeded(0)
    scores = wrapped.attribute(ids, target, mask, return_convergence_delta=delta)
    scores, errors = scores if delta else (scores, None)
    assert scores[mask == 0].abs().max() == 0
    table = model.get_input_embeddings().weight.detach()
    seeded(0)
    for row in range(3):
        embeddings = table[alone(ids, mask, row)].clone().requires_grad_()
        arguments = options | ({"baselines": table[MASK].expand_as(embeddings)} if compares else {})
        expected = method(OnEmbeddings(model)).attribute(embeddings, target=target[row], **arguments)
        reduced = expected.sum(-1) if reduction == "sum" else expected.norm(dim=-1)
        assert_equal(alone(scores, mask, row), reduced.detach())
        if errors is not None and method is not attr.GradientShap:
            with torch.no_grad():
                whole, base = OnEmbeddings(model)(torch.cat([embeddings, arguments["baselines"]]))[:, target[row]]
            torch.testing.assert_close(errors[row], expected.sum().detach() - (whole - base), rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (attr.FeatureAblation, {}),
        (attr.Occlusion, {}),
        (attr.ShapleyValueSampling, {"n_samples": 3}),
        (attr.KernelShap, {"n_samples": 20}),
    ],
)
def test_perturbation_methods_are_captums_with_one_feature_for_each_token(
    method: Any, options: dict[str, Any], causal: bool
) -> None:
    if method is attr.KernelShap:
        pytest.importorskip("sklearn", reason="Captum's KernelSHAP needs scikit-learn")
    model = families.build("gpt2", dtype=torch.float64) if causal else classifier()
    ids, mask = sentences([7, 4, 5])
    target = [2, 0, 1]
    wrapped = TokenAttribution(model, method, tokenizer=TOKENIZER, **options)
    assert not wrapped.has_convergence_delta()
    seeded(1)
    scores = wrapped.attribute(ids, target, mask)
    assert scores[mask == 0].abs().max() == 0
    table = model.get_input_embeddings().weight.detach()
    seeded(1)
    for row in range(3):
        embeddings = table[alone(ids, mask, row)]
        features = torch.arange(embeddings.shape[1])[None, :, None].expand_as(embeddings).contiguous()
        shape = {"sliding_window_shapes": (1, 32)} if method is attr.Occlusion else {"feature_mask": features}
        expected = method(OnEmbeddings(model)).attribute(
            embeddings, target=target[row], baselines=table[MASK].expand_as(embeddings).contiguous(), **options, **shape
        )
        # Captum adds Shapley values up in float32; KernelSHAP's least squares give two rows a weight of 10⁶.
        tolerance = 1e-12 if method in (attr.FeatureAblation, attr.Occlusion) else 1e-6
        assert (alone(scores, mask, row) - expected[..., 0]).abs().max() < tolerance


def test_shapley_values_follow_their_definition() -> None:
    model, (ids, mask) = classifier(), sentences([5, 4])
    for keep_special in (False, True):
        method = TokenAttribution(model, attr.ShapleyValues, tokenizer=TOKENIZER, keep_special=keep_special)
        scores = method.attribute(ids, [2, 1], mask)
        for row, target in enumerate([2, 1]):
            tokens = alone(ids, mask, row)[0]
            players = set(range(len(tokens))) - ({0, len(tokens) - 1} if keep_special else set())

            def f(present: Any, tokens: Tensor = tokens, target: int = target, players: Any = players) -> float:
                changed = [MASK if token in players - present else int(tokens[token]) for token in range(len(tokens))]
                with torch.no_grad():
                    return float(model(torch.tensor([changed])).logits[0, target])

            expected = torch.zeros(len(tokens), dtype=torch.float64)
            for player in players:
                others = players - {player}
                for size in range(len(others) + 1):
                    weight = factorial(size) * factorial(len(others) - size) / factorial(len(players))
                    for chosen in map(frozenset, combinations(others, size)):
                        expected[player] += weight * (f(chosen | {player}) - f(chosen))
            # Captum adds Shapley values up in float32.
            assert (alone(scores, mask, row)[0] - expected).abs().max() < 1e-6 * expected.abs().max()


def test_integrated_gradients_add_up_and_keep_special_tokens() -> None:
    model, (ids, mask) = classifier(), sentences([8, 5])
    method = TokenAttribution(model, attr.IntegratedGradients, tokenizer=TOKENIZER, keep_special=True, n_steps=64)
    scores, delta = method.attribute(ids, 2, mask, return_convergence_delta=True)
    assert delta.abs().max() < 1e-9
    for row in range(2):
        tokens = alone(ids, mask, row)
        base = tokens.clone()
        base[:, 1:-1] = MASK
        with torch.no_grad():
            difference = model(tokens).logits[0, 2] - model(base).logits[0, 2]
        assert abs(float(scores[row].sum() - difference)) < 1e-9
        assert alone(scores, mask, row)[0, [0, -1]].abs().max() == 0


def test_tokens_that_stay_are_no_features() -> None:
    model, (ids, mask) = classifier(), sentences([8, 5])
    runs: list[int] = []
    hook = model.bert.register_forward_hook(lambda *call: runs.append(len(call[2][0])))
    for keep_special, features in ((True, 6 + 3), (False, 8 + 5)):
        runs.clear()
        method = TokenAttribution(model, attr.FeatureAblation, tokenizer=TOKENIZER, keep_special=keep_special)
        method.attribute(ids, 1, mask)
        assert sum(runs) == 2 + 2 + features  # to see what is predicted, the whole inputs, one without each token
    hook.remove()


def test_what_is_predicted_is_explained_by_default() -> None:
    model, (ids, mask) = classifier(), sentences([8, 5])
    method = TokenAttribution(model, attr.InputXGradient)
    predicted = torch.cat([model(alone(ids, mask, row)).logits for row in range(2)]).argmax(1)
    assert torch.equal(method.attribute(ids, None, mask), method.attribute(ids, predicted, mask))
    for other in ((predicted + 1) % 3).tolist():
        assert not torch.equal(method.attribute(ids, None, mask), method.attribute(ids, other, mask))


def test_positions_choose_the_logits_that_are_read() -> None:
    model = randomized(hf.BertForMaskedLM(hf.BertConfig(**families.TEXT)), 0)
    ids, mask = sentences([8, 5])
    for method in (attr.InputXGradient, attr.FeatureAblation):
        scores = TokenAttribution(model, method).attribute(ids, [7, 9], mask, position=[2, -3])
        for row, (target, place) in enumerate([(7, 2), (9, 2)]):
            tokens = alone(ids, mask, row)
            readout: Callable[..., Tensor] = lambda output, _, place=place: output.logits[:, place]  # noqa: E731
            expected = TokenAttribution(model, method, readout=readout).attribute(tokens, target)
            assert_equal(alone(scores, mask, row), expected)
    causal = TokenAttribution(families.build("gpt2"), attr.Saliency)
    assert torch.equal(causal.attribute(ids, 7, mask, position=-1), causal.attribute(ids, 7, mask))
    assert causal.attribute(ids, 7, mask, position=[3, 5])[0, 4:].abs().max() == 0


def test_embeddings_tuples_and_mappings() -> None:
    model, (ids, mask) = classifier(), sentences([8, 5])
    embeddings = model.get_input_embeddings()(ids).detach()
    for wrapped in (
        TokenAttribution(model, attr.IntegratedGradients, n_steps=5),
        TokenAttribution(model, attr.FeatureAblation),
    ):
        scores = wrapped.attribute(ids, 1, mask)
        assert_equal(wrapped.attribute(embeddings, 1, mask), scores)
        assert_equal(wrapped.attribute({"inputs_embeds": embeddings, "attention_mask": mask}, 1), scores)
        (in_tuple,) = wrapped.attribute((ids, mask), 1)
        assert torch.equal(in_tuple, scores)


def test_signature_says_what_changes_scores() -> None:
    model = classifier()
    signatures = {
        TokenAttribution(model, method, baseline=baseline, tokenizer=TOKENIZER, keep_special=special).signature
        for method in (attr.IntegratedGradients, attr.FeatureAblation)
        for baseline in ("mask", "pad", "mean", "zero", 17, torch.zeros(32))
        for special in (True, False)
    }
    assert len(signatures) == 24
    method = TokenAttribution(model, attr.IntegratedGradients, baseline=17, reduction="l2", n_steps=9)
    assert method.signature == "attribution:IntegratedGradients|n_steps:9|baseline:id:17|special:replaced|reduction:l2"
    assert TokenAttribution(model, attr.Saliency).baseline is None
    assert TokenAttribution(model, attr.Saliency).signature == "attribution:Saliency|reduction:l2"
    ablation = TokenAttribution(model, attr.FeatureAblation, tokenizer=TOKENIZER, keep_special=True)
    assert ablation.signature == f"attribution:FeatureAblation|baseline:mask:{MASK}|special:kept"


@pytest.mark.parametrize("baseline", ["mask", "pad", "mean", 17])
def test_the_baseline_is_what_the_model_embeds_now(baseline: Any) -> None:
    model, (ids, mask) = classifier(), sentences([7, 5])

    def methods() -> list[TokenAttribution]:
        kinds: list[Any] = [(attr.IntegratedGradients, {"n_steps": 4}), (attr.FeatureAblation, {})]
        return [TokenAttribution(model, kind, baseline=baseline, tokenizer=TOKENIZER, **more) for kind, more in kinds]

    before = methods()
    model.get_input_embeddings().weight.data.mul_(2)
    for old, new in zip(before, methods(), strict=True):
        assert torch.equal(old.attribute(ids, 1, mask), new.attribute(ids, 1, mask))


@WARNS
def test_an_example_sees_no_other_ones_baselines() -> None:
    model, (ids, mask) = classifier(), sentences([7, 4, 6])
    method = TokenAttribution(model, attr.DeepLiftShap, tokenizer=TOKENIZER, keep_special=True)
    same = TokenAttribution(model, attr.DeepLift, tokenizer=TOKENIZER, keep_special=True).attribute(ids, 1, mask)
    together = method.attribute(ids, 1, mask)
    assert_equal(together, same)  # one baseline for each example
    for row in range(3):
        alone = method.attribute(ids[row : row + 1], 1, mask[row : row + 1])
        assert_equal(together[row : row + 1], alone)


@WARNS
@pytest.mark.parametrize("target", [None, [1, 0], torch.tensor([1, 0]), Difference(0, 1)])
@pytest.mark.parametrize("method", [attr.Saliency, attr.InputXGradient, attr.DeepLift, attr.Occlusion])
def test_inference_mode_changes_nothing(method: Any, target: Any) -> None:
    model, (ids, mask) = classifier(), sentences([7, 5])
    wrapped = TokenAttribution(model, method)
    expected = wrapped.attribute(ids, target, mask)
    with torch.inference_mode():
        given = target.clone() if isinstance(target, Tensor) else target
        assert torch.equal(wrapped.attribute(ids.clone(), given, mask.clone()), expected)
        decomposed = DecompX(model).attribute(ids.clone(), given if given is not None else 0, mask.clone())
    assert torch.equal(decomposed, DecompX(model).attribute(ids, target if target is not None else 0, mask))


def test_what_captums_methods_do_not_take_is_said() -> None:
    method = TokenAttribution(classifier(), attr.KernelShap, tokenizer=TOKENIZER, keep_special=True)
    with pytest.raises(InvalidInputError, match="KernelShap of Captum does not take these inputs: "):
        method.attribute(sentences([3])[0], 1)


@WARNS
@pytest.mark.parametrize("method", [attr.IntegratedGradients, attr.DeepLift, attr.FeatureAblation])
def test_the_model_is_left_as_it_was_also_when_it_raises(method: Any) -> None:
    model, (ids, mask) = classifier().train(), sentences([7, 5])
    model.bert.eval()
    before = families.state_of(model)
    wrapped = TokenAttribution(model, method)
    first = wrapped.attribute(ids, 1, mask)
    assert families.state_of(model) == before
    calls = 0

    def refuse(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:  # once the method itself runs the model
            raise ValueError("no")

    hook = model.bert.encoder.register_forward_hook(refuse)
    with pytest.raises(ValueError, match="no"):
        wrapped.attribute(ids, 1, mask)
    hook.remove()
    assert families.state_of(model) == before
    with torch.inference_mode():
        assert torch.equal(wrapped.attribute(ids, 1, mask), first)


def test_half_precision_is_reduced_in_single() -> None:
    model, (ids, mask) = classifier(dtype=torch.bfloat16), sentences([7, 5])
    for method in (attr.InputXGradient, attr.FeatureAblation):
        scores = TokenAttribution(model, method).attribute(ids, 1, mask)
        exact = TokenAttribution(classifier(dtype=torch.bfloat16).double(), method).attribute(ids, 1, mask)
        assert scores.dtype == torch.float32
        assert (scores - exact).norm() < 0.1 * exact.norm()  # logits of order 1 are rounded to 2⁻⁸, differences more


def test_options_that_are_ours_are_refused() -> None:
    for name in ("target", "baselines"):
        given: dict[str, Any] = {name: 1}
        with pytest.raises(InvalidInputError, match=f"IntegratedGradients.attribute has no further argument '{name}'"):
            TokenAttribution(classifier(), attr.IntegratedGradients, **given)
    with pytest.raises(InvalidInputError, match="got batch_size=0; expected at least 1"):
        TokenAttribution(classifier(), attr.IntegratedGradients, batch_size=0)


def test_bad_input_is_refused() -> None:
    model, (ids, mask) = classifier(), sentences([7, 5])
    method = TokenAttribution(model, attr.Saliency)

    def refused(message: str) -> Any:
        return pytest.raises(InvalidInputError, match=message)

    with refused("expected a torch.nn.Module"):
        TokenAttribution("bert", attr.Saliency)
    with refused("got reduction='max'; expected one of l2, sum"):
        TokenAttribution(model, attr.Saliency, reduction="max")  # type: ignore[arg-type]
    with refused("keep_special=True without a tokenizer"):
        TokenAttribution(model, attr.Saliency, keep_special=True)
    with refused("Saliency.attribute has no further argument 'n_steps'"):
        TokenAttribution(model, attr.Saliency, n_steps=3)
    with refused("FeaturePermutation takes no baseline"):
        TokenAttribution(model, attr.FeaturePermutation)
    with refused("no mask token is known"):
        TokenAttribution(model, attr.IntegratedGradients, baseline="mask")
    with refused("Saliency has no convergence delta"):
        method.attribute(ids, 1, mask, return_convergence_delta=True)
    with refused("position 0, which is padding in example 0"):
        TokenAttribution(families.build("gpt2"), attr.Saliency).attribute(ids, 3, mask.flip(0), position=0)
    with refused("got embeddings and keep_special=True"):
        kept = TokenAttribution(model, attr.FeatureAblation, tokenizer=TOKENIZER, keep_special=True)
        kept.attribute(torch.zeros(1, 4, 32, dtype=torch.float64), 1)
    with refused(r"inputs of shape \(2, 3, 16, 16\); expected token ids"):
        vit = families.build("vit")
        TokenAttribution(vit, attr.Saliency).attribute(torch.zeros(2, 3, 16, 16))
    with pytest.raises(NonFiniteError, match="Saliency of BertForSequenceClassification gives NaN"):
        TokenAttribution(model, attr.Saliency, readout=lambda output, _: output.logits / 0).attribute(ids, 1)
    stranger, named = classifier(), nn.Embedding(60, 32)  # which is not what it embeds by
    stranger.get_input_embeddings = lambda: named
    with pytest.raises(UnsupportedModelError, match=r"BertFor\w+ looked up embeddings in Embedding 0 times"):
        TokenAttribution(stranger, attr.Saliency).attribute(ids, 1)
    with pytest.raises(UnsupportedModelError, match="BertModel returns no logits"):
        TokenAttribution(model.bert, attr.Saliency).attribute(ids, 1)
    with pytest.raises(UnsupportedModelError, match="MarianMTModel is an encoder–decoder model"):
        TokenAttribution(encoder_decoders.build("marian"), attr.Saliency)
    with pytest.raises(UnsupportedModelError, match="Linear has no known module that embeds its tokens"):
        TokenAttribution(nn.Linear(3, 4), attr.Saliency)
    with pytest.raises(UnsupportedModelError, match=r"Classifier has no known module .*; take DecompX, AttnLRP or"):
        TokenAttribution(torch_models.Classifier(batch_first=True), attr.Saliency)


class Ordered(nn.Module):
    """Embeds positions first, or examples first; attends positions first in both cases."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(60, 8), nn.Linear(8, 3)
        self.projections = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.first = first

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded = self.table(input_ids.T.contiguous()) if self.first else self.table(input_ids).transpose(0, 1)
        return self.output(embedded)

    def output(self, embedded: Tensor) -> Tensor:
        """From (S, B, D)."""
        query, key, value = (projection(embedded) for projection in self.projections)
        weights = (torch.einsum("bd,jbd->jb", query[0], key) / 8**0.5).softmax(0)
        logits: Tensor = self.head((weights[..., None] * value).sum(0) + embedded[-1].tanh())
        return logits


@WARNS
@pytest.mark.parametrize("shape", [(1, 5), (3, 5), (4, 4), (2, 2)])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("method", [attr.InputXGradient, attr.IntegratedGradients, attr.FeatureAblation])
def test_the_axis_of_positions_is_never_guessed(method: Any, first: bool, shape: tuple[int, int]) -> None:
    """A gradient or a replacement at the wrong axis would be that of another example's token."""
    torch.manual_seed(0)
    model = Ordered(first).double()
    ids = torch.randint(1, 60, shape)
    ids[1:, 0] = ids[0, 1 : len(ids)]  # as good as symmetric
    scores = TokenAttribution(model, method, baseline="zero").attribute(ids, 1)
    for row in range(len(ids)):
        embedded = model.table(ids[row])[:, None].detach()

        def explained(vectors: Tensor) -> Tensor:
            return model.output(vectors.transpose(0, 1))

        if method is attr.FeatureAblation:
            kept = 1 - torch.eye(len(embedded), dtype=torch.float64)[..., None, None]
            expected = torch.stack([(model.output(embedded) - model.output(embedded * part))[0, 1] for part in kept])
        else:
            expected = method(explained).attribute(embedded.transpose(0, 1).requires_grad_(), target=1)[0].sum(-1)
        assert_equal(scores[row], expected.detach())


@WARNS
@pytest.mark.parametrize("method", [attr.Saliency, attr.InputXGradient, attr.FeatureAblation])
def test_xlnet_embeds_positions_first(method: Any) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 60, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 32}
    model = randomized(hf.XLNetForSequenceClassification(hf.XLNetConfig(**sizes)).train(False).double())
    ids = torch.randint(5, 60, (6, 6))
    wrapped = TokenAttribution(model, method, baseline="zero" if method is attr.FeatureAblation else None)
    together = wrapped.attribute(ids, 1)
    for row in range(6):
        assert_equal(together[row : row + 1], wrapped.attribute(ids[row : row + 1], 1))
    if method is attr.InputXGradient:
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        number = model(inputs_embeds=embedded).logits[:, 1].sum()
        assert_equal(together, (torch.autograd.grad(number, embedded)[0] * embedded).sum(-1).detach())

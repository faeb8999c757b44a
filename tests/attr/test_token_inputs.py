"""What :class:`TokenAttribution` takes and refuses, and how it leaves the model."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from captum import attr
from torch import Tensor, nn

from captum_norm import DecompX, Difference, InvalidInputError, NonFiniteError, TokenAttribution, UnsupportedModelError
from tests import families
from tests.classifiers import TOKENIZER, classifier, sentences, state

WARNS = pytest.mark.filterwarnings("ignore:Setting forward, backward hooks")
assert_equal = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)


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


def test_how_many_inputs_are_run_at_a_time_changes_nothing() -> None:
    model, (ids, mask) = classifier(), sentences([8, 5])
    runs: list[tuple[Any, dict[str, Any]]] = [(attr.IntegratedGradients, {"n_steps": 9}), (attr.FeatureAblation, {})]
    for method, options in runs:
        few, many = (
            TokenAttribution(model, method, batch_size=size, **options).attribute(ids, 0, mask) for size in (2, 100)
        )
        assert_equal(few, many)


@WARNS
@pytest.mark.parametrize("method", [attr.IntegratedGradients, attr.DeepLift, attr.FeatureAblation])
def test_the_model_is_left_as_it_was_also_when_it_raises(method: Any) -> None:
    model, (ids, mask) = classifier().train(), sentences([7, 5])
    model.bert.eval()
    before, weights = state(model), {name: value.clone() for name, value in model.state_dict().items()}
    wrapped = TokenAttribution(model, method)
    first = wrapped.attribute(ids, 1, mask)
    assert state(model) == before
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
    assert state(model) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
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
    given: dict[str, Any]
    for given, place in (({"target": 1}, r"an argument of attribute\(\)"), ({"baselines": 5.0}, "baseline=")):
        with pytest.raises(InvalidInputError, match=f"got the option '{min(given)}'; expected it as {place}"):
            TokenAttribution(classifier(), attr.IntegratedGradients, **given)
    with pytest.raises(InvalidInputError, match="got batch_size=0; expected at least 1"):
        TokenAttribution(classifier(), attr.IntegratedGradients, batch_size=0)


class Stranger(nn.Module):
    """Embeds tokens, but not by the module that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.named, self.used = nn.Embedding(60, 4), nn.Embedding(60, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.named

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.used(input_ids)
        return embedded.mean(1)


def test_bad_input_is_refused() -> None:
    model, (ids, mask) = classifier(), sentences([7, 5])
    method = TokenAttribution(model, attr.Saliency)

    def refused(message: str) -> Any:
        return pytest.raises(InvalidInputError, match=message)

    with refused("expected a torch.nn.Module"):
        TokenAttribution("bert", attr.Saliency)  # type: ignore[arg-type]
    with refused("got reduction='max'; expected one of l2, sum"):
        TokenAttribution(model, attr.Saliency, reduction="max")  # type: ignore[arg-type]
    with refused("keep_special=True without a tokenizer"):
        TokenAttribution(model, attr.Saliency, keep_special=True)
    with refused("Saliency.attribute has no argument 'n_steps'"):
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
    with pytest.raises(UnsupportedModelError, match="Stranger looked up embeddings in Embedding 0 times"):
        TokenAttribution(Stranger(), attr.Saliency).attribute(ids, 1)
    with pytest.raises(UnsupportedModelError, match="BertModel returns no logits"):
        TokenAttribution(model.bert, attr.Saliency).attribute(ids, 1)
    marian = hf.MarianMTModel(
        hf.MarianConfig(
            vocab_size=60,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            pad_token_id=0,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            decoder_start_token_id=0,
        )
    )
    with pytest.raises(UnsupportedModelError, match="MarianMTModel is an encoder–decoder model"):
        TokenAttribution(marian, attr.Saliency)
    with pytest.raises(UnsupportedModelError, match="Linear has no known module that embeds its tokens"):
        TokenAttribution(nn.Linear(3, 4), attr.Saliency)

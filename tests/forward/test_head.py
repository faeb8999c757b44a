"""The default position is what the model's head reads, whatever is around the head."""

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import transformers as hf
from captum.attr import FeatureAblation
from torch import Tensor, nn

import captum_norm as cn
from captum_norm.forward.head import seen_position
from captum_norm.models.call import ModelCall
from captum_norm.models.inputs import bind_inputs
from captum_norm.models.outputs import read_position
from tests import families
from tests.classifiers import classifier, randomized
from tests.families import FAMILIES, tiers
from tests.models.test_outputs import build, classifiers
from tests.tiny import marian_config

IDS = torch.tensor([[1, 7, 9, 5, 2], [1, 8, 2, 0, 0]])
MASK = (IDS > 0).long()
BATCH = {"input_ids": IDS, "attention_mask": MASK}


class Around(nn.Module):
    """A user's own module around a model; ``read`` makes the output of the hidden states or of what it returned."""

    def __init__(self, model: Any, read: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.inside, self.read = model, read

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self.read(self.inside(input_ids, attention_mask=mask), mask[..., None])


def expected(model: Any, position: Any) -> Tensor:
    """Of the classifier itself, at a position that is named."""
    scores: Tensor = cn.NormAttribution(model).attribute(BATCH, position=position)
    return scores


def test_a_users_module_around_a_classifier() -> None:
    model = classifier()
    reads: list[Callable[[Any, Tensor], Any]] = [
        lambda output, _: output.logits,
        lambda output, _: {"scores": output.logits.softmax(-1)},
        lambda output, _: (output.logits[:, 1] - output.logits[:, 0],),
    ]
    for read in reads:
        for wrapper in (Around(model, read), nn.DataParallel(Around(Around(model, lambda output, _: output), read))):
            torch.testing.assert_close(cn.NormAttribution(wrapper).attribute(BATCH), expected(model, "first"))


Pool = Callable[[nn.Linear, Tensor, Tensor], Tensor]
WIDTH = families.TEXT["hidden_size"]
NORM = nn.LayerNorm(WIDTH, dtype=torch.float64)


def attended(linear: nn.Linear, h: Tensor, m: Tensor) -> Tensor:
    shares: Tensor = linear(h).masked_fill(m == 0, -math.inf).softmax(1)
    return (shares[..., None] * h[..., None, :]).sum((1, 3))


# Users' own heads: how hidden states (B, S, D) and where they are real (B, S, 1) become numbers.
POOLS: dict[str, Pool] = {
    "first": lambda linear, h, _: linear(h[:, 0]),
    "last": lambda linear, h, m: linear(h[torch.arange(len(h)), m.sum(1)[:, 0] - 1]),
    "mean of real": lambda linear, h, m: linear((h * m).sum(1) / m.sum(1)),
    "normed mean": lambda linear, h, m: linear((NORM(h) * m).sum(1) / m.sum(1)),
    "mean of all": lambda linear, h, _: linear(h.mean(1)),
    "each": lambda linear, h, _: linear(h),
    "largest": lambda linear, h, m: linear(h.masked_fill(m == 0, -math.inf).amax(1)),
    "first and mean": lambda linear, h, m: linear(h[:, 0]) + linear((h * m).sum(1) / m.sum(1)),
    "first and normed mean": lambda linear, h, _: linear(h[:, 0]) + linear(NORM(h).mean(1)),
    "attended": attended,
    "second": lambda linear, h, _: linear(h[:, 1]),
    "without the first": lambda linear, h, _: linear(h[:, 1:].mean(1)),
    "without gradient": lambda linear, h, _: linear(h.detach()[:, 0]),
    "predicted": lambda linear, h, _: linear(h[:, 0]).argmax(-1),
}


class Head(nn.Module):
    """A model of a user's own class."""

    def __init__(self, model: Any, pool: str) -> None:
        super().__init__()
        self.inside, self.pool = model, POOLS[pool]
        self.linear, self.norm = nn.Linear(WIDTH, 5, dtype=torch.float64), NORM

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden = self.inside(input_ids, attention_mask=mask).last_hidden_state
        return self.pool(self.linear, hidden, mask[..., None])


BERT = hf.BertConfig(**families.TEXT)
GPT2 = hf.GPT2Config(vocab_size=50, n_embd=WIDTH, n_layer=2, n_head=4)
Position = Literal["first", "last", "mean"]
READ: dict[str, Position] = {"first": "first", "last": "last"}
READ |= dict.fromkeys(("mean of real", "normed mean", "mean of all"), "mean")


@pytest.mark.few
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("make", [lambda: hf.BertModel(BERT), lambda: hf.GPT2Model(GPT2)], ids=["BERT", "GPT-2"])
def test_users_own_heads(make: Callable[[], Any], pool: str) -> None:
    model = randomized(Head(make(), pool), 0)
    causal = isinstance(model.inside, hf.GPT2Model)
    position = ("last" if causal else "mean") if pool == "each" else READ.get(pool)
    method = cn.AttentionBlockAttribution(model, "atb")
    if position is None:
        for explain in (method.attribute, lambda inputs: method.scores(method.maps(inputs))):
            with pytest.raises(cn.InvalidInputError, match="the head of Head reads neither the first") as caught:
                explain(BATCH)
            assert "\n" not in str(caught.value)
        assert method.attribute(BATCH, position="last").isfinite().all()
        return
    scores = method.attribute(BATCH)
    torch.testing.assert_close(scores, method.attribute(BATCH, position=position))
    other: Position
    for other in ("first", "last", "mean"):  # is another thing, so that the test can fail
        assert (other == position) == torch.allclose(scores, method.attribute(BATCH, position=other))
    torch.testing.assert_close(method.scores(method.maps(BATCH)), scores)
    # Which example comes first does not matter, nor does a mode without gradients.
    swapped = cn.AttentionBlockAttribution(model, "atb")
    with torch.inference_mode():
        short_first = swapped.attribute({name: tensor.flip(0) for name, tensor in BATCH.items()})
    torch.testing.assert_close(short_first.flip(0), scores)


def test_a_head_that_is_exchanged_is_seen_again_and_one_that_is_known_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def see(call: ModelCall) -> Literal["first"]:
        seen.append(type(call.model).__name__)
        return "first"

    monkeypatch.setattr("captum_norm.attr.base.seen_position", see)
    own = randomized(Head(hf.BertModel(BERT), "first"), 0)
    for model, count in ((classifier(), 0), (own, 1)):
        method = cn.AttentionWeights(model)
        for _ in range(3):
            method.attribute(BATCH)
        method.maps(BATCH)
        assert len(seen) == count
    own.linear = nn.Linear(WIDTH, 2, dtype=torch.float64)
    method.attribute(BATCH)
    assert seen == ["Head", "Head"]


def test_single_positions_need_no_head() -> None:
    method = cn.AttentionWeights(randomized(Head(hf.BertModel(BERT), "largest"), 0))
    torch.testing.assert_close(method.attribute(torch.tensor([[3], [4]])), torch.ones(2, 1).double())
    with pytest.raises(cn.InvalidInputError, match="reads neither"):
        method.attribute(BATCH)


@pytest.mark.parametrize("name", tiers())
def test_what_is_known_of_models_without_heads_is_what_is_seen(name: str) -> None:
    model, inputs = families.build(name), families.inputs(name)
    assert seen_position(bind_inputs(model, inputs)) == "each"
    assert read_position(model, causal=FAMILIES[name].causal) == ("last" if FAMILIES[name].causal else "mean")


@pytest.mark.parametrize(("name", "class_name"), list(classifiers()))
def test_what_is_known_of_heads_is_what_is_seen(name: str, class_name: str) -> None:
    model, inputs = build(name, class_name), families.inputs(name)
    known = read_position(model, causal=name in FAMILIES and FAMILIES[name].causal)
    patches = known in ("patches", "first and patches")
    assert seen_position(bind_inputs(model, inputs)) == (None if patches else known)


def test_wrappers_change_nothing_that_is_known_of_the_model() -> None:
    model = classifier()
    model.config.mask_token_id = 3
    wrapper = nn.DataParallel(model)
    plain, wrapped = (cn.TokenAttribution(m, FeatureAblation, batch_size=4) for m in (model, wrapper))
    assert wrapped.signature == plain.signature
    assert "mask:3" in plain.signature
    torch.testing.assert_close(wrapped.attribute(BATCH, 1), plain.attribute(BATCH, 1))
    translator = randomized(hf.MarianMTModel(marian_config(50)), 0)
    pair = BATCH | {"decoder_input_ids": IDS, "decoder_attention_mask": MASK}
    for name in ("encoder", "decoder", "cross"):
        maps = [getattr(cn.NormAttribution(m).maps(pair), name) for m in (translator, nn.DataParallel(translator))]
        assert torch.equal(*maps)


def test_taggers_inside_other_modules_need_a_position() -> None:
    tagger = randomized(hf.BertForTokenClassification(BERT), 0)
    for model in (nn.DataParallel(tagger), Around(tagger, lambda output, _: output.logits)):
        with pytest.raises(cn.InvalidInputError, match="has logits for every position; pass the position to read"):
            cn.AttentionTimesGradient(model).attribute(BATCH, 1)
        scores = cn.AttentionTimesGradient(model).attribute(BATCH, 1, position="first")
        torch.testing.assert_close(scores, cn.AttentionTimesGradient(tagger).attribute(BATCH, 1, position="first"))

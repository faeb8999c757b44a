"""torch.nn's seam: what it leaves behind, what it refuses, what it says."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_norm import AttentionWeights, InvalidInputError, NormAttribution, NormMeter, UnsupportedModelError
from captum_norm.errors import UnsupportedScopeError
from captum_norm.models import Layout, Site, register_layout
from captum_norm.models.libraries.torch_nn import sequences
from tests import families, torch_models
from tests.models.libraries.test_fairseq import expect_the_same_in_threads
from tests.test_encoder_decoder import assert_near
from tests.torch_models import (
    HEADS,
    HIDDEN,
    QUIET,
    WIDTH,
    Classifier,
    Translator,
    Vision,
    VisionBlock,
    causal,
    ids,
    padding,
    randomized,
)

pytestmark = QUIET

LENGTHS = (9, 6, 2)


def test_a_hint_is_followed_where_torch_follows_it() -> None:
    """Without weights and padding torch takes is_causal for the mask, whatever the mask is."""
    layer = randomized(nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN), dtype=torch.float64)
    stream, mask = torch.randn(5, 2, WIDTH, dtype=torch.float64), torch.zeros(5, 5)
    hinted: Any = NormAttribution(layer).maps({"src": stream, "src_mask": mask, "is_causal": True})
    masked: Any = NormAttribution(layer).maps({"src": stream, "src_mask": causal(5)})
    assert torch.equal(hinted.decoder, masked.decoder)


def _state(model: nn.Module) -> list[Any]:
    return [
        {name: id(value) for name, value in vars(module).items()} | {"hooks": len(module._forward_hooks)}
        for module in model.modules()
    ]


@pytest.mark.parametrize("mode", [True, False], ids=["training", "fused"])
def test_the_model_is_left_as_it_was(mode: bool) -> None:
    model, mask = randomized(Classifier(batch_first=True, dropout=0.0)).train(mode), padding(*LENGTHS)
    tokens = ids(3, 9)
    with torch.no_grad():
        before, state = model(tokens, mask), _state(model)
        weights: Any = AttentionWeights(model).maps((tokens, mask)).encoder
        NormAttribution(model).maps((tokens, mask))
        for wrong in ({"ids": tokens + 40}, {"mask": causal(8)}, {"padding_mask": mask.int()}):
            with pytest.raises(InvalidInputError):
                NormAttribution(model).maps({"ids": tokens, "padding_mask": mask} | wrong)
        assert _state(model) == state
        assert torch.equal(model(tokens, mask), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    exact = torch_models.oracle(model.eval(), tokens, mask)["encoder"]
    expected = torch.stack([layer.weights.mean(1) for layer in exact], 1)
    assert_near(weights, expected * (~mask)[:, None, :, None], 1e-5)


def test_a_model_in_training_learns_nothing() -> None:
    model, pixels = randomized(Vision()).train(), torch.randn(4, 3, 8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    NormAttribution(model).maps(pixels)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_the_fused_operations_of_torch_were_in_the_way() -> None:
    """Guards the test above: in this model attention modules are not called at all."""
    model, mask = randomized(Classifier(batch_first=True)), padding(*LENGTHS)
    calls: list[int] = []
    for layer in model.encoder.layers:
        layer.self_attn.forward = lambda *_, **__: calls.append(1)
    with torch.no_grad():
        model(ids(3, 9), mask)
    assert calls == []


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_weights_are_returned_where_the_model_asks_for_them(batch_first: bool, average: bool) -> None:
    attention = randomized(nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, bias=False))
    returned: list[Tensor] = []
    attention.register_forward_hook(lambda _, __, output: returned.append(output[1]))
    stream, mask = torch.randn(3, 3, WIDTH), causal(3)
    options = {"attn_mask": mask, "average_attn_weights": average}
    with torch.no_grad():
        attention(stream, stream, stream, **options)
    AttentionWeights(attention).maps({"query": stream, "key": stream, "value": stream} | options)
    torch.testing.assert_close(returned[-1], returned[0])


class Gated(VisionBlock):
    """Halves the feed-forward output, which no module returns then."""

    def forward(self, stream: Tensor) -> Tensor:
        x = self.ln_1(stream)
        stream = stream + self.self_attention(x, x, x)[0]
        return stream + 0.5 * self.mlp(self.ln_2(stream))  # type: ignore[no-any-return]


def test_a_layer_that_is_not_understood_is_told_how_to_be_declared() -> None:
    model, pixels = randomized(Vision(Gated)), torch.randn(2, 3, 8, 8)
    message = r'"layers\.0\.self_attention" attends.*captum_norm\.models\.register_layout'
    with pytest.raises(UnsupportedModelError, match=message):
        NormAttribution(model).maps(pixels)
    weights = AttentionWeights(model).maps(pixels).encoder
    register_layout(
        "Gated",
        Layout(
            attention="self_attention",
            projection="self_attention.out_proj",
            residual=Site.parse("input"),
            total=Site.parse("ln_2.input"),
            normed_input=True,
        ),
    )
    exact = torch_models.oracle(model, pixels)["encoder"]
    measured = NormMeter(model).measure(pixels, scopes=["atb"], weights=True)["encoder"]
    assert torch.equal(measured.weights, weights)  # type: ignore[arg-type]
    expected = torch.stack([layer.vectors("atb")[0] for layer in exact], 1).norm(dim=-1)
    assert_near(measured.norms["atb"], expected, 1e-5)
    with pytest.raises(UnsupportedScopeError, match="are pre-norm, which have the scopes attn, attn_res, atb"):
        NormAttribution(model, "attn_res_ln").maps(pixels)


class Other(nn.MultiheadAttention):
    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(query, *args, **kwargs)


class Sharper(nn.MultiheadAttention):
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        return super().forward(2 * query, key, value, *options)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True), "an additional key .*add_bias_kv"),
        (nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True), "an additional key .*add_zero_attn"),
    ],
    ids=["bias", "zero"],
)
def test_another_attention_is_refused(attention: nn.MultiheadAttention, message: str) -> None:
    model = randomized(nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN))
    model.self_attn = randomized(attention)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=message):
            NormAttribution(model).maps(torch.randn(5, 2, WIDTH))


@pytest.mark.parametrize("kind", [Sharper, Other])
def test_derived_attention_is_explained_as_it_runs(kind: type[nn.MultiheadAttention]) -> None:
    model, stream = randomized(nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN)), torch.randn(5, 2, WIDTH)
    model.self_attn = randomized(kind(WIDTH, HEADS))
    measured = families.measured(model, stream, scopes=["attn"], weights=True)
    with torch.no_grad():
        _, weights = model.self_attn(stream, stream, stream)
    torch.testing.assert_close(measured.weights, weights[:, None])
    assert measured.convergence_delta.max() < 1e-5


class Crossing(VisionBlock):
    """Reads a sequence of its own making."""

    def forward(self, stream: Tensor) -> Tensor:
        queries, keys = self.ln_1(stream), self.ln_2(stream)
        return stream + self.self_attention(queries, keys, keys)[0]  # type: ignore[no-any-return]


class Windows(VisionBlock):
    """Attends inside of windows, as if they were examples."""

    def forward(self, stream: Tensor) -> Tensor:
        return super().forward(stream.reshape(-1, 1, WIDTH)).reshape(stream.shape)


class Unbatched(VisionBlock):
    """Attends to one example at a time."""

    def forward(self, stream: Tensor) -> Tensor:
        return torch.stack([self.self_attention(x, x, x)[0] for x in stream])


class Nested(VisionBlock):
    """Attends to sequences of several lengths."""

    def forward(self, stream: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor(list(stream))
        return self.self_attention(nested, nested, nested)[0].to_padded_tensor(0.0)  # type: ignore[no-any-return]


def test_what_is_not_one_sequence_for_each_example_is_refused() -> None:
    pixels = torch.randn(2, 3, 8, 8)
    with pytest.raises(UnsupportedModelError, match="another tensor as keys than as queries; that is supported only"):
        AttentionWeights(Vision(Crossing)).maps(pixels)
    with pytest.raises(
        UnsupportedModelError, match=r"attention in Vision receives 10 examples for inputs of shape \(2,"
    ):
        AttentionWeights(Vision(Windows)).maps(pixels)
    with pytest.raises(InvalidInputError, match=r"given a sequence of shape \(5, 16\); expected a batch of sequences"):
        AttentionWeights(Vision(Unbatched)).maps(pixels)
    with pytest.raises(InvalidInputError, match=r"given a nested tensor; expected a batch of sequences"):
        AttentionWeights(Vision(Nested)).maps(pixels)


def test_bad_input_is_said_in_one_sentence() -> None:
    model, translator = randomized(Classifier(batch_first=True)), randomized(Translator(batch_first=True))
    tokens = ids(3, 9)
    for given, message in (
        ({"ids": tokens + 40}, "forward pass of Classifier does not accept these inputs: index out of range"),
        ({"ids": tokens[0]}, r"got token ids of shape \(9,\)"),
        ({"ids": tokens[:, :0]}, r"empty inputs of shape \(3, 0\)"),
        ({"ids": tokens, "mask": causal(8)}, r"2D attn_mask is torch\.Size\(\[8, 8\]\), but should be \(9, 9\)"),
        ({"ids": tokens, "padding_mask": padding(8, 3, 2)}, "Mask size should match input size"),
        ({"ids": tokens, "padding_mask": padding(9, 0, 2)}, "the padding mask leaves no position of example 1"),
        ({"ids": tokens, "is_causal": True}, "attn_mask if specifying the is_causal hint"),
        ({"tokens": tokens}, r"keys \['tokens'\]; expected src as a tensor"),
    ):
        with pytest.raises(InvalidInputError, match=message) as caught:
            NormAttribution(model).maps(given)
        assert "\n" not in str(caught.value)
    with pytest.raises(InvalidInputError, match=r"missing.*'trg' \(if the decoder's sequence is missing, pass"):
        NormAttribution(translator).maps(tokens)
    with pytest.raises(InvalidInputError, match="NormAttribution does not chain its three stacks"):
        NormAttribution(translator, aggregation="rollout").attribute((tokens, tokens))
    attention = nn.MultiheadAttention(WIDTH, HEADS)
    with pytest.raises(InvalidInputError, match="only bool and floating types of key_padding_mask are supported"):
        AttentionWeights(attention).maps((torch.randn(5, 2, WIDTH),) * 3, torch.zeros(2, 5).long())


def test_threads() -> None:
    expect_the_same_in_threads(randomized(Classifier(batch_first=True)), ids(3, 9), 20)


def test_another_threads_forward_pass_is_not_looked_at() -> None:
    model, tokens = randomized(Classifier(batch_first=True)), ids(3, 9)
    with ThreadPoolExecutor(1) as pool:
        assert sequences(model, lambda: pool.submit(model, tokens).result()) == (None, None)

"""Models of torch.nn's attention: all stacks against the direct way, under masks and padding of all kinds."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_norm import AttentionWeights, NormAttribution, NormMeter, UnsupportedModelError
from captum_norm.models import Scope
from tests import families, torch_models
from tests.padding import expect_alone
from tests.test_encoder_decoder import expect_stack
from tests.torch_models import (
    HEADS,
    HIDDEN,
    PAD,
    QUIET,
    WIDTH,
    Classifier,
    CrossBlock,
    PlacedBlock,
    Translator,
    Vision,
    causal,
    ids,
    padding,
    randomized,
    unfused,
)

pytestmark = QUIET

PRE_NORM: tuple[Scope, ...] = ("attn", "attn_res", "atb")
POST_NORM: tuple[Scope, ...] = ("attn", "attn_res", "attn_res_ln", "atb")
LENGTHS = (9, 6, 2)

both_orders = pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "sequence first"])
both_styles = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
both_dtypes = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])


def assert_equal_the_oracle(
    model: Any,
    arguments: dict[str, Any],
    tolerance: float,
    real: dict[str, tuple[Tensor, Tensor]] | None = None,
    *,
    looks_back: bool = False,
) -> None:
    """Every scope, mixing ratio and head of every stack; ``real`` says of a stack which queries and keys are."""
    dtype = next(model.parameters()).dtype
    # The oracle sees the same parameters in float64: what a float32 model rounds is part of the deviation.
    wide = {name: _cast(value, torch.float64) for name, value in arguments.items()}
    exact = torch_models.oracle(model.double(), **wide)
    model.to(dtype)
    if looks_back:
        exact = {"decoder": exact["encoder"]}
    scopes = POST_NORM if next(iter(exact.values()))[0].final else PRE_NORM
    measured: Any = NormMeter(model).measure(arguments, scopes=scopes, weights=True, per_head=True, head_norms=True)
    assert list(measured) == list(exact)
    for stack, layers in exact.items():
        expect_stack(measured[stack], stack, layers, scopes, tolerance, real and real[stack])
        if real:
            assert torch.equal(measured[stack].real, real[stack][0])


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@pytest.mark.few
@both_orders
@both_styles
@both_dtypes
def test_norms_of_all_stacks_equal_the_oracle(
    batch_first: bool, norm_first: bool, dtype: torch.dtype, tolerance: float
) -> None:
    model = randomized(Translator(batch_first=batch_first, norm_first=norm_first, bias=not norm_first), 3, dtype)
    source, target = padding(*LENGTHS), padding(4, 1, 7)
    arguments = {
        "src": ids(3, 9) if batch_first else ids(9, 3),
        "trg": ids(3, 7) if batch_first else ids(7, 3),
        "tgt_mask": causal(7),
        "src_padding_mask": source,
        "tgt_padding_mask": target,
    }
    real = {"encoder": (~source, ~source), "decoder": (~target, ~target), "cross": (~target, ~source)}
    assert_equal_the_oracle(model, arguments, tolerance, real)
    maps: Any = NormAttribution(model).maps(arguments)
    assert torch.equal(maps.real, ~source)
    assert torch.equal(maps.decoder_real, ~target)


SLOPE = -0.3 * (torch.arange(9)[:, None] - torch.arange(9)).abs().float()
EACH_HEAD = torch.randn(3 * HEADS, 9, 9, generator=torch.Generator().manual_seed(0))
PADDED = padding(*LENGTHS)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"mask": causal(9)},
    "causal by hint": {"mask": nn.Transformer.generate_square_subsequent_mask(9), "is_causal": True},
    "summand": {"mask": SLOPE},
    "a summand for each head": {"mask": EACH_HEAD},
    "causal for each head": {"mask": causal(9).expand(3 * HEADS, 9, 9)},
    "padding": {"padding_mask": PADDED},
    "padding as a summand": {"padding_mask": torch.zeros(3, 9).masked_fill(PADDED, -math.inf)},
    "summand over keys": {"padding_mask": SLOPE[:3]},
    "causal and padding": {"mask": causal(9), "padding_mask": PADDED, "is_causal": True},
    "summand and padding": {"mask": SLOPE, "padding_mask": torch.zeros(3, 9).masked_fill(PADDED, -math.inf)},
}
# Torch's fused operations take such a summand for a mask that hides.
FUSED_OTHERWISE = ("summand", "summand over keys", "summand and padding")
CAUSAL = ("causal", "causal by hint", "causal for each head", "causal and padding")


@both_orders
@pytest.mark.parametrize("masks", MASKS)
def test_norms_under_masks_of_all_kinds_equal_the_oracle(masks: str, batch_first: bool) -> None:
    model = randomized(Classifier(batch_first=batch_first), dtype=torch.float64)
    given = {name: _cast(value, torch.float64) for name, value in MASKS[masks].items()}
    arguments = {"ids": ids(3, 9) if batch_first else ids(9, 3)} | given
    real = ~PADDED if "padding" in masks else torch.ones_like(PADDED)
    looks_back = masks in CAUSAL
    real_positions = {"decoder" if looks_back else "encoder": (real, real)}
    otherwise = batch_first and masks in FUSED_OTHERWISE
    if otherwise:
        with pytest.raises(UnsupportedModelError, match="set_fastpath_enabled"):
            NormAttribution(model).maps(arguments)
    with unfused() if otherwise else nullcontext():
        assert_equal_the_oracle(model, arguments, 1e-11, real_positions, looks_back=looks_back)


@both_dtypes
def test_a_layer_that_calls_attention_itself_equals_the_oracle(dtype: torch.dtype, tolerance: float) -> None:
    pixels = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    for seed in range(2):
        assert_equal_the_oracle(randomized(Vision(), seed, dtype), {"pixels": pixels}, tolerance)
    stream = torch.randn(7, 3, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_equal_the_oracle(
        randomized(nn.Sequential(PlacedBlock(), PlacedBlock()), 0, dtype), {"input": stream}, tolerance
    )


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CrossBlock(6, 10) for _ in range(2))

    def forward(self, stream: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        for layer in self.layers:
            stream = layer(stream, keys, values)
        return stream


@both_dtypes
def test_a_decoder_that_reads_keys_and_values_of_other_widths_equals_the_oracle(
    dtype: torch.dtype, tolerance: float
) -> None:
    model = randomized(Reader(), dtype=dtype)
    widths = {"stream": (3, 4, WIDTH), "keys": (3, 7, 6), "values": (3, 7, 10)}
    arguments = {name: torch.randn(shape).to(dtype) for name, shape in widths.items()}
    assert_equal_the_oracle(model, arguments, tolerance)
    maps: Any = NormAttribution(model).maps(tuple(arguments.values()))
    alone: Any = NormAttribution(model).maps(arguments, stacks=["cross"])
    assert maps.encoder is alone.decoder is None
    assert torch.equal(alone.cross, maps.cross)


@both_orders
def test_torchs_own_modules_are_models_too(batch_first: bool) -> None:
    def stream(length: int) -> Tensor:
        return torch.randn((2, length, WIDTH) if batch_first else (length, 2, WIDTH), dtype=torch.float64)

    source, target, memory_mask = stream(5), stream(2), padding(5, 3)
    options: dict[str, Any] = {"batch_first": batch_first, "norm_first": True}
    encoder_layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, **options)
    decoder_layer = nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, **options)
    encoder = nn.TransformerEncoder(encoder_layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
    model: nn.Module
    for model in (encoder_layer, encoder):
        randomized(model, dtype=torch.float64)
        assert_equal_the_oracle(model, {"src": source}, 1e-11)
        assert torch.equal(NormAttribution(model).maps(source).real, torch.ones(2, 5).bool())
    real = {"decoder": (torch.ones(2, 2).bool(),) * 2, "cross": (torch.ones(2, 2).bool(), ~memory_mask)}
    for model in (decoder_layer, nn.TransformerDecoder(decoder_layer, 2, nn.LayerNorm(WIDTH))):
        randomized(model, dtype=torch.float64)
        arguments = {"tgt": target, "memory": source, "memory_key_padding_mask": memory_mask}
        assert_equal_the_oracle(model, arguments, 1e-11, real)
    whole = randomized(nn.Transformer(WIDTH, HEADS, 1, 2, HIDDEN, batch_first=batch_first), dtype=torch.float64)
    assert_equal_the_oracle(whole, {"src": source, "tgt": target}, 1e-11)
    attention = randomized(nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first), dtype=torch.float64)
    maps = AttentionWeights(attention).maps((source,) * 3, per_head=True)
    with torch.no_grad():
        expected = attention(source, source, source, average_attn_weights=False)[1]
    torch.testing.assert_close(maps.self_attention[:, 0], expected, rtol=1e-11, atol=1e-13)


class SelfMasking(Classifier):
    """Finds the padding by itself, as many tutorials do."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.encoder(self.embed(tokens), src_key_padding_mask=tokens == PAD)
        pooled: Tensor = hidden.mean(1)
        return pooled


def test_padding_that_the_model_finds_itself_is_known() -> None:
    model, mask = randomized(SelfMasking(batch_first=True)), padding(*LENGTHS)
    tokens = ids(3, 9).masked_fill(mask, PAD)
    method = NormAttribution(model, "attn_res_ln")
    maps = method.maps(tokens)
    assert torch.equal(maps.real, ~mask)
    for row, length in enumerate(LENGTHS):
        expect_alone(maps, row, method.maps(tokens[row : row + 1, :length]), {"self_attention": (~mask[row],) * 2})


@both_orders
def test_a_batch_gives_what_its_examples_alone_give(batch_first: bool) -> None:
    model, mask = randomized(Translator(batch_first=batch_first), 1), padding(*LENGTHS)
    target_mask = padding(3, 5, 5)
    source, target = ids(3, 9), ids(3, 5, seed=1)

    def ordered(tokens: Tensor) -> Tensor:
        return tokens if batch_first else tokens.T

    method = NormAttribution(model, "attn_res")
    maps: Any = method.maps((ordered(source), ordered(target)), (None, causal(5), mask, target_mask))
    for row, (given, wanted) in enumerate(zip(LENGTHS, (3, 5, 5), strict=True)):
        one = (ordered(source[row : row + 1, :given]), ordered(target[row : row + 1, :wanted]))
        sources, targets = torch.arange(9) < given, torch.arange(5) < wanted
        real = {"encoder": (sources, sources), "decoder": (targets, targets), "cross": (targets, sources)}
        expect_alone(maps, row, method.maps(one, (None, causal(wanted))), real)


def test_left_padding_under_a_causal_mask_leaves_queries_without_keys() -> None:
    model, mask = randomized(nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN), 2)), padding(6, 4)
    stream = torch.randn(6, 2, WIDTH)
    stream[:, 1] = stream[:, 1].roll(2, 0)
    maps = NormAttribution(model, "attn_res_ln").maps((stream, causal(6), mask.flip(1)))
    alone = NormAttribution(model, "attn_res_ln").maps((stream[2:, 1:], causal(4)))
    assert torch.equal(maps.real, ~mask.flip(1))
    found, expected = maps.self_attention[1, :, 2:, 2:], alone.self_attention[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_rows_explained_are_what_the_head_reads_or_without_a_head_the_last_of_a_causal_model() -> None:
    model, mask = randomized(Classifier(batch_first=True)), padding(*LENGTHS)
    method, tokens = NormAttribution(model), ids(3, 9)
    real = (~mask).float()

    def mean_and_last(rows: Any) -> tuple[Tensor, Tensor]:
        last = rows[torch.arange(3), 1, torch.tensor(LENGTHS) - 1]
        return torch.einsum("bq,bqk->bk", real / real.sum(1, keepdim=True), rows[:, 1]), last

    mean, _ = mean_and_last(method.maps((tokens, mask)).encoder)
    torch.testing.assert_close(method.attribute(tokens, additional_forward_args=mask, layer=1), mean)
    mean, last = mean_and_last(method.maps((tokens, mask, causal(9))).decoder)
    scores = method.attribute(tokens, additional_forward_args=(mask, causal(9)), layer=1)
    torch.testing.assert_close(scores, mean)
    bare = NormAttribution(model.encoder)
    arguments = {"src": model.embed(tokens).detach(), "src_key_padding_mask": mask}
    torch.testing.assert_close(bare.attribute(arguments | {"mask": causal(9)}, layer=1), last)
    mean, _ = mean_and_last(bare.maps(arguments).encoder)
    torch.testing.assert_close(bare.attribute(arguments, layer=1), mean)


def test_gradients_flow_through_the_maps() -> None:
    model, tokens = randomized(Classifier(batch_first=True), dtype=torch.float64), ids(3, 9)
    maps = NormAttribution(model, "attn_res_ln", differentiable=True).maps(tokens).self_attention
    weight = model.encoder.layers[0].self_attn.in_proj_weight
    [gradient] = torch.autograd.grad(maps.square().sum(), [weight])
    step = 1e-6 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).double()
    sums = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(sign * step)
            sums.append(NormAttribution(model, "attn_res_ln").maps(tokens).self_attention.square().sum())
            weight.sub_(sign * step)
    torch.testing.assert_close((gradient * step).sum(), (sums[0] - sums[1]) / 2, rtol=1e-5, atol=0)


@pytest.mark.few
@both_styles
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_vectors_through_the_feed_forward_network_add_up(norm_first: bool, activation: str) -> None:
    model = randomized(Classifier(activation=activation, batch_first=True, norm_first=norm_first), dtype=torch.float64)
    scope: Scope = "atb_ff_res" if norm_first else "atb_ff_res_ln"
    assert families.measured(model, ids(3, 9), scopes=[scope]).convergence_delta.max() < 1e-11

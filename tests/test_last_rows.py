"""Maps of the last positions alone: the last rows of whole maps, from passes that make no other weights."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from captum_norm import (
    ALTI,
    AttentionBlockAttribution,
    AttentionMapAttribution,
    AttentionRollout,
    AttentionTimesGradient,
    AttentionWeights,
    DecompX,
    GlobEnc,
    InvalidInputError,
    NormAttribution,
    NormMeter,
    SourceAndPrefix,
    ValueZeroing,
)
from captum_norm.functional.vectors import CACHED_ELEMENTS
from tests import encoder_decoders, families
from tests.encoder_decoders import ENCODER_DECODERS
from tests.families import randomized
from tests.test_caches import DYNAMIC, assert_last_rows, continued
from tests.test_hand_written import IDS, NanoGPT
from tests.test_images import alone, model_of
from tests.test_virtual_tokens import tuned

LENGTH = 11


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_rows_of_every_method(implementation: str) -> None:
    model, ids = families.build("llama", dtype=torch.float64), families.inputs("llama", batch=2, length=LENGTH)
    model.set_attn_implementation(implementation)
    before = model(ids).logits
    methods = [AttentionWeights(model, "attn_res"), ALTI(model), ValueZeroing(model), AttentionTimesGradient(model)]
    for method in [*methods, AttentionRollout(model)]:
        options: Any = {"target": 5} if method.target == "always" else {}
        whole, rows = (method.maps(ids, last=last, **options) for last in (None, 3))
        assert_last_rows(rows.decoder, whole.decoder, 3, 1e-6)
        assert rows.cached == LENGTH - 3
    for chosen in ({"per_head": True}, {"layers": [-1]}):
        whole, rows = (NormAttribution(model).maps(ids, last=last, **chosen) for last in (None, 3))
        assert_last_rows(rows.decoder, whole.decoder, 3, 1e-6)
    bert = families.build("bert", dtype=torch.float64)
    rows, whole = (GlobEnc(bert).maps(ids, last=last) for last in (3, None))
    assert_last_rows(rows.encoder, whole.encoder, 3, 1e-11)
    assert torch.equal(model(ids).logits, before)
    assert model.config._attn_implementation == implementation


def test_measurements_of_the_last_positions() -> None:
    model, ids = families.build("llama", dtype=torch.float64), families.inputs("llama", batch=2, length=LENGTH)
    options: Any = {"scopes": ["attn", "atb", "atb_ff_res"], "weights": True, "head_norms": True}
    meter = NormMeter(model)
    whole, rows = (meter.measure(ids, last=last, **options)["decoder"] for last in (None, 3))
    assert_last_rows(rows.weights, whole.weights, 3, 1e-6)
    assert_last_rows(rows.head_norms, whole.head_norms, 3, 1e-6)
    torch.testing.assert_close(rows.transformed_norms, whole.transformed_norms)
    for scope, maps in whole.norms.items():
        assert_last_rows(rows.norms[scope], maps, 3, 1e-6)
    for name, ratio in whole.mixing_ratio.items():
        assert_last_rows(rows.mixing_ratio[name], ratio, 3, 1e-6, axis=-1)
    for found, expected in ((rows.residual_norm, whole.residual_norm), (rows.norm_scale, whole.norm_scale)):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert_last_rows(found, expected, 3, 1e-6, axis=-1)
    assert rows.residual_norm is not None
    assert (rows.real.shape, rows.cached) == ((2, 3), LENGTH - 3)


@pytest.mark.parametrize("product", ["flash", "matmul"])
def test_a_model_that_calls_attention_itself(product: str) -> None:
    torch.manual_seed(0)
    model = NanoGPT(product).double().train(False)
    for method in (NormAttribution(model), AttentionBlockAttribution(model, "atb_ff_res"), ALTI(model)):
        whole, rows = (method.maps(IDS, last=last) for last in (None, 2))
        assert_last_rows(rows.decoder, whole.decoder, 2, 1e-10)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_an_encoder_decoder_model_has_all_rows_of_its_encoder(name: str) -> None:
    model, inputs = randomized(ENCODER_DECODERS[name].build, 0, torch.float64), encoder_decoders.masked_inputs()
    atol = 1e-6 if ENCODER_DECODERS[name].single else 1e-11
    for method in (NormAttribution(model), AttentionRollout(model), ALTI(model), ValueZeroing(model)):
        whole, rows = (method.maps(inputs, last=last) for last in (None, 3))
        assert_last_rows(rows.encoder, whole.encoder, 6, atol)
        assert_last_rows(rows.decoder, whole.decoder, 3, atol)
        assert_last_rows(rows.cross, whole.cross, 3, atol)
        assert rows.real.shape == (2, 6)
        assert rows.decoder_real is not None
        assert (rows.decoder_real.shape, rows.cached) == ((2, 3), 4)
    alone = NormAttribution(model).maps(inputs, last=2, stacks=["decoder"])
    assert_last_rows(alone.decoder, NormAttribution(model).maps(inputs).decoder, 2, atol)
    assert alone.real.shape == (2, 2)


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_rows_behind_virtual_tokens(kind: str) -> None:
    model, ids = tuned("gpt2", kind), families.inputs("gpt2", batch=2, length=LENGTH)
    whole, rows = (NormAttribution(model, aggregation="mean").maps(ids, last=last) for last in (None, 3))
    assert_last_rows(rows.decoder, whole.decoder, 3, 1e-10)
    assert (rows.virtual, rows.cached) == (whole.virtual, LENGTH - 3)
    method = NormAttribution(model, aggregation="mean")
    torch.testing.assert_close(method.scores(rows, -2), method.scores(whole, -2), rtol=0, atol=1e-10)
    scores, _ = method.scores_of_last(ids, 3)
    assert isinstance(scores, Tensor)
    torch.testing.assert_close(scores[:, 1], method.attribute(ids, position=-2), rtol=0, atol=1e-10)


def test_rows_behind_a_cache() -> None:
    model, ids = families.build("llama", dtype=torch.float64), families.inputs("llama", batch=2, length=LENGTH)
    whole = NormAttribution(model).maps(ids)
    rows = NormAttribution(model).maps(continued(model, ids, 5, DYNAMIC), last=2)
    assert_last_rows(rows.decoder, whole.decoder, 2, 1e-5)
    assert rows.cached == LENGTH - 2


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


@pytest.mark.parametrize("kind", [NormAttribution, ALTI, AttentionWeights])
def test_the_weights_of_other_rows_are_never_made(kind: Any) -> None:
    length, last, width, heads = 2048, 4, 32, 4
    config: dict[str, Any] = {"hidden_size": width, "intermediate_size": width, "num_attention_heads": heads}
    layer = hf.LlamaConfig(vocab_size=40, num_hidden_layers=1, max_position_embeddings=length, **config)
    model = randomized(lambda: hf.LlamaForCausalLM(layer), 0, torch.float32)
    ids = torch.randint(3, 40, (1, length), generator=torch.Generator().manual_seed(0))
    method = kind(model, aggregation="mean")
    method.maps(ids[:, :20], last=last)  # understands the model
    with Largest() as largest, torch.no_grad():  # type: ignore[no-untyped-call]
        model.model(ids, use_cache=False)
    forward = largest.elements
    with Largest() as largest:  # type: ignore[no-untyped-call]
        rows = method.maps(ids, last=last)
    assert largest.elements <= max(forward, CACHED_ELEMENTS) < length**2 // 8, "no mask, no head's weights"
    assert_last_rows(rows.decoder, method.maps(ids).decoder, last, 1e-4)


def test_what_is_refused() -> None:
    model, ids = families.build("gpt2"), families.inputs("gpt2", batch=2, length=LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    method = NormAttribution(model)
    for last in (12, 0, -1, 2.5, True):
        with pytest.raises(InvalidInputError, match="last"):
            method.maps(ids, last=last)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="got last=3 and padding, with which positions differ"):
        method.maps({"input_ids": ids, "attention_mask": mask}, last=3)
    with pytest.raises(InvalidInputError, match="DecompX carries what every position receives"):
        DecompX(model).maps(ids, last=3)
    with pytest.raises(InvalidInputError, match=r"without rows of the first 8 positions \(past_key_values, or last=\)"):
        method.scores(method.maps(ids, last=3))
    with pytest.raises(InvalidInputError, match="no sequence of tokens"):
        NormAttribution(families.build("vit")).maps(families.inputs("vit"), last=3)


def test_scores_of_last_are_those_of_each_position() -> None:
    model, ids = families.build("llama", dtype=torch.float64), families.inputs("llama", batch=2, length=LENGTH)
    # The second is rolled out with half identities.
    methods: list[AttentionMapAttribution] = [
        NormAttribution(model, aggregation="mean"),
        NormAttribution(model, "attn"),
    ]
    for method in (*methods, AttentionRollout(model), ALTI(model, "product")):
        scores, delta = method.scores_of_last(ids, 3)
        assert isinstance(scores, Tensor)
        assert (delta is not None) == method.decomposes
        for row, position in enumerate((-3, -2, -1)):
            expected = method.attribute(ids, position=position)
            torch.testing.assert_close(scores[:, row], expected, rtol=0, atol=1e-6 * float(expected.max()))


def test_scores_of_the_last_positions_of_a_decoder() -> None:
    model = randomized(ENCODER_DECODERS["bart"].build, 0, torch.float64)
    inputs = encoder_decoders.inputs("bart", source=6, target=7)
    for method in (ALTI(model), NormAttribution(model, aggregation="mean"), AttentionRollout(model)):
        scores, _ = method.scores_of_last(inputs, 2)
        assert isinstance(scores, SourceAndPrefix)
        for row, position in enumerate((5, 6)):
            for found, expected in zip(scores, method.attribute(inputs, position=position), strict=True):
                torch.testing.assert_close(found[:, row], expected, rtol=0, atol=1e-10)


def test_rows_of_a_text_beside_pictures() -> None:
    model, inputs = model_of("llava"), alone("llava", 0)
    for stacks in (None, ["text", "vision"]):
        whole, rows = (NormAttribution(model).maps(inputs, last=last, stacks=stacks) for last in (None, 2))
        assert_last_rows(rows.decoder, whole.decoder, 2, 1e-5)
        for name, tower in whole.towers.items():
            torch.testing.assert_close(rows.towers[name], tower)

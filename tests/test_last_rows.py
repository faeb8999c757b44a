"""Maps of the last positions alone: the last rows of those of all positions."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import captum_norm as cn
from captum_norm.functional.vectors import CACHED_ELEMENTS
from captum_norm.results.maps import SourceAndPrefix
from tests import encoder_decoders, families
from tests.encoder_decoders import ENCODER_DECODERS
from tests.families import FAMILIES, randomized
from tests.forward.test_room import Made
from tests.test_hand_written import IDS, NanoGPT
from tests.test_images import alone, model_of
from tests.test_virtual_tokens import tuned

LENGTH = 11


def assert_last_rows(found: Any, whole: Any, new: int, atol: float, *, axis: int = -2) -> None:
    rows = whole.narrow(axis, whole.shape[axis] - new, new)
    assert rows.abs().max() > 1e-3, "zeros would show nothing"
    torch.testing.assert_close(found, rows, rtol=0, atol=atol * float(rows.abs().max()))


def assert_last_measured(rows: Any, whole: Any, new: int, atol: float) -> None:
    """Whatever was measured of the last positions is in the rows of what was measured of all."""
    maps = [(getattr(rows, name), getattr(whole, name)) for name in ("weights", "head_norms")]
    maps += [(rows.norms[scope], norms) for scope, norms in whole.norms.items()]
    numbers = [(getattr(rows, name), getattr(whole, name)) for name in ("residual_norm", "norm_scale")]
    numbers += [(rows.mixing_ratio[name], ratio) for name, ratio in whole.mixing_ratio.items()]
    for axis, pairs in ((-2, maps), (-1, numbers)):
        for found, expected in pairs:
            assert (found is None) == (expected is None)
            if expected is not None:
                assert_last_rows(found, expected, new, atol, axis=axis)
    assert rows.residual_norm is not None


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "new"),
    [("gpt2", 3), ("llama", 1), ("mistral", 3), ("gemma2", 1), ("bloom", 2), ("falcon", 2), ("gpt-oss", 2)],
)
def test_what_is_measured_of_the_last_positions(name: str, new: int) -> None:
    model, ids = families.build(name, dtype=torch.float64), families.inputs(name, batch=2, length=LENGTH)
    scopes: Any = ["attn", "atb", "atb_ff_res"]
    for options in ({"per_head": True}, {"head_norms": True}):
        meter, asked = cn.NormMeter(model), dict[str, Any](scopes=scopes, weights=True, **options)
        whole, rows = (meter.measure(ids, last=last, **asked)["decoder"] for last in (None, new))
        # Softmax, norms or rotations in float32 round otherwise.
        assert_last_measured(rows, whole, new, 1e-5 if FAMILIES[name].single else 1e-6)
        torch.testing.assert_close(rows.transformed_norms, whole.transformed_norms)
        assert (rows.real.shape, rows.cached) == ((2, new), LENGTH - new)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_rows_of_every_method(implementation: str) -> None:
    model, ids = families.build("llama", dtype=torch.float64), families.inputs("llama", batch=2, length=LENGTH)
    model.set_attn_implementation(implementation)
    before = model(ids).logits
    others = (cn.ALTI, cn.ValueZeroing, cn.AttentionTimesGradient, cn.AttentionRollout)
    for method in (cn.AttentionWeights(model, "attn_res"), *(kind(model) for kind in others)):
        options: Any = {"target": 5} if method.target == "always" else {}
        whole, rows = (method.maps(ids, last=last, **options) for last in (None, 3))
        assert_last_rows(rows.decoder, whole.decoder, 3, 1e-6)
        assert rows.cached == LENGTH - 3
    for chosen in ({"per_head": True}, {"layers": [-1]}):
        whole, rows = (cn.NormAttribution(model).maps(ids, last=last, **chosen) for last in (None, 3))
        assert_last_rows(rows.decoder, whole.decoder, 3, 1e-6)
    bert = families.build("bert", dtype=torch.float64)
    rows, whole = (cn.GlobEnc(bert).maps(ids, last=last) for last in (3, None))
    assert_last_rows(rows.encoder, whole.encoder, 3, 1e-11)
    assert torch.equal(model(ids).logits, before)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("product", ["flash", "matmul"])
def test_a_model_that_calls_attention_itself(product: str) -> None:
    torch.manual_seed(0)
    model = NanoGPT(product).double().train(False)
    for method in (cn.NormAttribution(model), cn.AttentionBlockAttribution(model, "atb_ff_res"), cn.ALTI(model)):
        whole, rows = (method.maps(IDS, last=last) for last in (None, 2))
        assert_last_rows(rows.decoder, whole.decoder, 2, 1e-10)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_an_encoder_decoder_model_has_all_rows_of_its_encoder(name: str) -> None:
    model, inputs = randomized(ENCODER_DECODERS[name].build, 0, torch.float64), encoder_decoders.masked_inputs()
    atol = 1e-6 if ENCODER_DECODERS[name].single else 1e-11
    for method in (cn.NormAttribution(model), cn.AttentionRollout(model), cn.ALTI(model), cn.ValueZeroing(model)):
        whole, rows = (method.maps(inputs, last=last) for last in (None, 3))
        assert_last_rows(rows.encoder, whole.encoder, 6, atol)
        assert_last_rows(rows.decoder, whole.decoder, 3, atol)
        assert_last_rows(rows.cross, whole.cross, 3, atol)
        assert rows.real.shape == (2, 6)
        assert (rows.decoder_real.shape, rows.cached) == ((2, 3), 4)  # type: ignore[union-attr]
    alone = cn.NormAttribution(model).maps(inputs, last=2, stacks=["decoder"])
    assert_last_rows(alone.decoder, cn.NormAttribution(model).maps(inputs).decoder, 2, atol)
    assert alone.real.shape == (2, 2)


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_rows_behind_virtual_tokens(kind: str) -> None:
    model, ids = tuned("gpt2", kind), families.inputs("gpt2", batch=2, length=LENGTH)
    whole, rows = (cn.NormAttribution(model, aggregation="mean").maps(ids, last=last) for last in (None, 3))
    assert_last_rows(rows.decoder, whole.decoder, 3, 1e-10)
    assert (rows.virtual, rows.cached) == (whole.virtual, LENGTH - 3)
    method = cn.NormAttribution(model, aggregation="mean")
    torch.testing.assert_close(method.scores(rows, -2), method.scores(whole, -2), rtol=0, atol=1e-10)
    scores, _ = method.scores_of_last(ids, 3)
    assert isinstance(scores, Tensor)
    torch.testing.assert_close(scores[:, 1], method.attribute(ids, position=-2), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", [cn.NormAttribution, cn.ALTI, cn.AttentionWeights])
def test_the_weights_of_other_rows_are_never_made(kind: Any) -> None:
    length, last, width, heads = 2048, 4, 32, 4
    config: dict[str, Any] = {"hidden_size": width, "intermediate_size": width, "num_attention_heads": heads}
    layer = hf.LlamaConfig(vocab_size=40, num_hidden_layers=1, max_position_embeddings=length, **config)
    model = randomized(lambda: hf.LlamaForCausalLM(layer), 0, torch.float32)
    ids = torch.randint(3, 40, (1, length), generator=torch.Generator().manual_seed(0))
    method = kind(model, aggregation="mean")
    method.maps(ids[:, :20], last=last)  # understands the model
    with Made() as forward, torch.no_grad():
        model.model(ids, use_cache=False)
    with Made() as explained:
        rows = method.maps(ids, last=last)
    assert max(explained.elements) <= max(*forward.elements, CACHED_ELEMENTS) < length**2 // 8, (
        "no mask, no head's weights"
    )
    assert_last_rows(rows.decoder, method.maps(ids).decoder, last, 1e-4)


def test_what_is_refused() -> None:
    model, ids = families.build("gpt2"), families.inputs("gpt2", batch=2, length=LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    method = cn.NormAttribution(model, aggregation="rollout")
    for last in (12, 0, -1, 2.5, True):
        with pytest.raises(cn.InvalidInputError, match="last"):
            method.maps(ids, last=last)  # type: ignore[arg-type]
    with pytest.raises(cn.InvalidInputError, match="got last=3 and padding, with which positions differ"):
        method.maps({"input_ids": ids, "attention_mask": mask}, last=3)
    with pytest.raises(cn.InvalidInputError, match="DecompX carries what every position receives"):
        cn.DecompX(model).maps(ids, last=3)
    with pytest.raises(cn.InvalidInputError, match=r"rows of the first 8 positions \(last=\)"):
        method.scores(method.maps(ids, last=3))
    with pytest.raises(cn.InvalidInputError, match="no sequence of tokens"):
        cn.NormAttribution(families.build("vit")).maps(families.inputs("vit"), last=3)


def test_scores_of_last_are_those_of_each_position() -> None:
    model, ids = families.build("llama", dtype=torch.float64), families.inputs("llama", batch=2, length=LENGTH)
    # The second is rolled out with half identities.
    norms = cn.NormAttribution(model), cn.NormAttribution(model, "attn", "rollout")
    for method in (*norms, cn.AttentionRollout(model), cn.ALTI(model, "product")):
        scores, delta = method.scores_of_last(ids, 3)
        assert isinstance(scores, Tensor)
        assert (delta is not None) == method.decomposes
        for row, position in enumerate((-3, -2, -1)):
            expected = method.attribute(ids, position=position)
            torch.testing.assert_close(scores[:, row], expected, rtol=0, atol=1e-6 * float(expected.max()))


def test_scores_of_the_last_positions_of_a_decoder() -> None:
    model = randomized(ENCODER_DECODERS["bart"].build, 0, torch.float64)
    inputs = encoder_decoders.inputs("bart", source=6, target=7)
    for method in (cn.ALTI(model), cn.NormAttribution(model, aggregation="mean"), cn.AttentionRollout(model)):
        scores, _ = method.scores_of_last(inputs, 2)
        assert isinstance(scores, SourceAndPrefix)
        for row, position in enumerate((5, 6)):
            for found, expected in zip(scores, method.attribute(inputs, position=position), strict=True):
                torch.testing.assert_close(found[:, row], expected, rtol=0, atol=1e-10)


def test_rows_of_a_text_beside_pictures() -> None:
    model, inputs = model_of("llava"), alone("llava", 0)
    for stacks in (None, ["text", "vision"]):
        whole, rows = (cn.NormAttribution(model).maps(inputs, last=last, stacks=stacks) for last in (None, 2))
        assert_last_rows(rows.decoder, whole.decoder, 2, 1e-5)
        for name, tower in whole.towers.items():
            torch.testing.assert_close(rows.towers[name], tower)

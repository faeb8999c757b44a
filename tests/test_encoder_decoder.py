"""Encoder–decoder models: all three stacks against the direct way, and what holds for every family."""

from typing import Any, Literal

import pytest
import torch
import transformers as hf
from torch import Tensor

import captum_norm as cn
from captum_norm.errors import UnsupportedScopeError
from tests import encoder_decoders, families, feed_forwards, oracle
from tests.classifiers import randomized
from tests.encoder_decoders import ENCODER_DECODERS, EncoderDecoder
from tests.families.family import new
from tests.padding import expect_alone, padded


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert (actual.double() - expected).abs().max() <= tolerance * expected.abs().max()


def kind_of(name: str) -> tuple[Any, ...]:
    """What the library's code depends on."""
    family = ENCODER_DECODERS[name]
    return (family.scopes, family.positions, family.single, family.special, family.features, family.narrow)


@pytest.mark.few
@pytest.mark.parametrize("name", families.tiers(ENCODER_DECODERS, kind_of))
def test_a_family(name: str) -> None:
    family = ENCODER_DECODERS[name]
    model, inputs = encoder_decoders.build(name, 1), encoder_decoders.inputs(name, 1)
    asked: Any = {"scopes": family.scopes, "weights": True, "per_head": True, "head_norms": True}
    tolerance = 1e-6 if family.single else 1e-11
    if family.narrow:
        exact, tolerance = encoder_decoders.oracle(name, model, inputs), 1e-5
    else:
        single = cn.NormMeter(model).measure(inputs, **asked)
        inputs = encoder_decoders.inputs(name, 1, dtype=torch.float64)
        exact = encoder_decoders.oracle(name, model.double(), inputs)
        expect_norms(family, exact, single, 1e-5)
    with torch.no_grad():
        before = model(**inputs).logits
    state = families.state_of(model)
    measured = cn.NormMeter(model).measure(inputs, **asked)
    expect_norms(family, exact, measured, tolerance)
    expect_maps_of_all_stacks(model, inputs, measured)
    expect_scopes_behind_the_network(name, model, inputs)
    expect_the_same_in_pieces(model, inputs, measured, 1e-5 if family.narrow else 1e-11)
    if not family.features:
        for side in ("left", "right"):
            expect_the_same_if_padded(name, model, side)

    def refuse(*_: Any) -> None:
        raise ValueError

    last = model.get_submodule(family.stacks["cross"].projection.format(1))
    handle = last.register_forward_hook(refuse)
    with pytest.raises(cn.InvalidInputError, match="does not accept these inputs"):
        cn.NormAttribution(model).maps(inputs)
    handle.remove()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, before)
    assert families.state_of(model) == state


def expect_norms(family: EncoderDecoder, exact: dict[str, list[oracle.Layer]], measured: Any, tolerance: float) -> None:
    assert list(measured) == ["encoder", "decoder", "cross"]
    for stack, layers in exact.items():
        expect_stack(measured[stack], stack, layers, family.scopes, tolerance)


def expect_stack(
    results: Any, stack: str, layers: list[oracle.Layer], scopes: Any, tolerance: float, real: Any = None
) -> None:
    """Weights, norms and ratios of a stack; ``real`` says which queries and keys are."""
    batch, _, queries, keys = layers[0].weights.shape
    rows, columns = real or (torch.ones(batch, queries).bool(), torch.ones(batch, keys).bool())
    pairs = (rows[:, :, None] & columns[:, None])[:, None]
    assert results.convergence_delta.max() < tolerance
    assert_near(results.weights, torch.stack([layer.weights for layer in layers], 1) * pairs[:, None], tolerance)
    heads = [oracle.vectors_per_head(layer.weights, layer.values, layer.projection) for layer in layers]
    assert_near(results.head_norms, torch.stack(heads, 1).norm(dim=-1) * pairs[:, None], tolerance)
    for scope in scopes:
        if stack == "cross":
            norm = scope in ("attn_res_ln", "atb")
            parts = torch.stack([layer.across(residual=scope != "attn", norm=norm)[0] for layer in layers], 1)
            vectors, own = parts[:, :, :, :-1], parts[:, :, :, -1].norm(dim=-1)
            others = vectors.sum(3).norm(dim=-1)
            ratios = others / (others + own)
        else:
            vectors = torch.stack([layer.vectors(scope)[0] for layer in layers], 1)
            ratios = torch.stack([oracle.mixing_ratio(layer.vectors(scope)[0]) for layer in layers], 1)
        assert_near(results.norms[scope], vectors.norm(dim=-1) * pairs, tolerance)
        assert_near(results.mixing_ratio[scope], ratios * rows[:, None], tolerance)


def expect_maps_of_all_stacks(model: Any, inputs: Any, measured: Any) -> None:
    scope: Literal["attn_res", "atb"]
    for scope in ("attn_res", "atb"):
        method = (cn.NormAttribution if scope == "attn_res" else cn.AttentionBlockAttribution)(model, scope)  # type: ignore[arg-type]
        maps: Any = method.maps(inputs)
        for stack in ("encoder", "decoder", "cross"):
            torch.testing.assert_close(getattr(maps, stack), measured[stack].norms[scope])
        assert maps.convergence_delta.shape[1] == sum(stack.convergence_delta.shape[1] for stack in measured.values())
        assert maps.mixing_ratio is None
    weights: Any = cn.AttentionWeights(model).maps(inputs)
    halved: Any = cn.AttentionWeights(model, "attn_res").maps(inputs)
    torch.testing.assert_close(weights.cross.sum(-1), torch.ones(2, 2, 6).to(weights.cross))
    torch.testing.assert_close(halved.cross, weights.cross / 2)
    torch.testing.assert_close(halved.encoder, (weights.encoder + torch.eye(9).to(weights.encoder)) / 2)


def expect_scopes_behind_the_network(name: str, model: Any, inputs: Any) -> None:
    """Vectors add up to what the model computed; behind a decoder's own attention there is no feed-forward network."""
    family, meter = ENCODER_DECODERS[name], cn.NormMeter(model)
    behind = feed_forwards.SCOPES[family.layout]
    for stack in ("encoder", "cross"):
        if name in feed_forwards.NOT_UNDERSTOOD:
            with pytest.raises(UnsupportedScopeError) as refusal:
                meter.measure(inputs, scopes=["atb_ff_res"], stacks=[stack])
            assert f"network was understood: {feed_forwards.NOT_UNDERSTOOD[name]}. " in str(refusal.value)
            assert len(str(refusal.value)) <= 400
            continue
        measured: Any = meter.measure(inputs, scopes=behind, stacks=[stack])[stack]
        assert set(measured.layer_scopes) == {(*family.scopes, *behind)}
        assert measured.convergence_delta.max() < (1e-6 if family.single or family.narrow else 1e-11)
    with pytest.raises(UnsupportedScopeError, match="cross-attention follows, not a feed-forward network"):
        meter.measure(inputs, scopes=["atb_ff_res"], stacks=["decoder"])


def expect_the_same_in_pieces(model: Any, inputs: Any, whole: Any, tolerance: float) -> None:
    close: Any = {"rtol": tolerance, "atol": tolerance / 100}
    for memory_budget in (1, 10_000) if isinstance(model, hf.MarianMTModel) else (10_000,):
        for stack, pieces in cn.NormMeter(model, memory_budget=memory_budget).measure(inputs, scopes=["attn"]).items():
            torch.testing.assert_close(pieces.norms["attn"], whole[stack].norms["attn"], **close)
    cross = cn.NormMeter(model).measure(inputs, scopes=["attn"], layers=[-1], stacks=["cross"])
    assert list(cross) == ["cross"]
    torch.testing.assert_close(cross["cross"].norms["attn"][:, 0], whole["cross"].norms["attn"][:, -1], **close)


def expect_the_same_if_padded(name: str, model: Any, side: str) -> None:
    """Sources and targets of one padded length, so that nothing can be told by its shape."""
    examples = [encoder_decoders.inputs(name, row, 1, *lengths) for row, lengths in enumerate([(9, 4), (5, 9), (3, 1)])]
    method, batch = cn.NormAttribution(model, "attn_res"), {}
    for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        batch[ids], batch[mask] = padded([example[ids] for example in examples], side, 1)
    maps: Any = method.maps(batch)
    assert torch.equal(maps.real, batch["attention_mask"].bool())
    assert torch.equal(maps.decoder_real, batch["decoder_attention_mask"].bool())
    for row, example in enumerate(examples):
        source, target = maps.real[row], maps.decoder_real[row]
        real = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
        expect_alone(maps, row, method.maps(example), real)


def test_scores_of_both_sequences_from_single_layers_and_their_mean() -> None:
    model, inputs = encoder_decoders.build("marian"), encoder_decoders.inputs("marian")
    for method in (cn.NormAttribution(model), cn.AttentionBlockAttribution(model), cn.AttentionWeights(model)):
        maps: Any = method.maps(inputs)
        stacks = (maps.cross, maps.decoder)
        for found, stack in zip(method.attribute(inputs, layer=1, position=2), stacks, strict=True):
            assert torch.equal(found, stack[:, 1, 2])
        method.aggregation = "mean"
        scores = method.attribute(inputs)
        assert torch.equal(scores.source, maps.cross.mean(1)[:, -1])
        assert torch.equal(scores.prefix, maps.decoder.mean(1)[:, -1])
        # As many inputs as attributions, as Captum's tools expect; the mask lies between them in the model's arguments.
        named = tuple(inputs[name] for name in ("input_ids", "decoder_input_ids"))
        mask = torch.ones_like(named[0])
        assert torch.equal(method.attribute((named[0], mask, named[1]))[1], scores.prefix)


def test_stacks_that_a_method_does_not_chain_are_refused() -> None:
    model, inputs = encoder_decoders.build("marian"), encoder_decoders.inputs("marian")
    norms = cn.NormAttribution(model, aggregation="rollout")
    methods = (norms, cn.AttentionWeights(model, aggregation="rollout"), cn.ALTI(model, "product"))
    for method in methods:
        with pytest.raises(cn.InvalidInputError, match="does not chain its three stacks: pass layer=") as refusal:
            method.attribute(inputs)
        assert len(str(refusal.value)) <= 400
    with pytest.raises(cn.InvalidInputError, match="got maps of the stacks decoder, cross; expected encoder"):
        cn.ALTI(model).scores(cn.ALTI(model).maps(inputs, stacks=["decoder", "cross"]))
    encoder = cn.NormAttribution(model.get_encoder()).attribute(inputs["input_ids"])
    torch.testing.assert_close(encoder.sum(-1), torch.ones(2))


LED = encoder_decoders.BART | {"max_encoder_position_embeddings": 64, "attention_window": 4}
BART_PARTS = "decoder.layers.{}.encoder_attn.v_proj", "decoder.layers.{}.encoder_attn.out_proj"
T5_PARTS = "decoder.block.{}.layer.1.EncDecAttention.v", "decoder.block.{}.layer.1.EncDecAttention.o"
WINDOWS: dict[str, tuple[Any, tuple[str, str]]] = {
    "led": (lambda: hf.LEDModel(hf.LEDConfig(**LED)), BART_PARTS),
    "longt5": (lambda: hf.LongT5Model(hf.LongT5Config(**encoder_decoders.T5, local_radius=3)), T5_PARTS),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_cross_attention_is_explained_where_the_encoder_attends_in_windows(name: str) -> None:
    build, (value, projection) = WINDOWS[name]
    torch.manual_seed(0)
    model = randomized(build(), noise=0.2)
    inputs = encoder_decoders.inputs("marian", source=13)
    found: Any = cn.NormAttribution(model).maps(inputs, stacks=["cross"]).cross
    places = {layer: (value.format(layer), "output") for layer in range(2)}
    with oracle.watched(model, places) as values, oracle.eager(model):
        weights = model(**inputs, output_attentions=True, use_cache=False).cross_attentions
    for layer in range(2):
        heads = values[layer][0].unflatten(-1, (4, -1)).transpose(1, 2)
        matrix = model.get_submodule(projection.format(layer)).weight.detach().T
        vectors = oracle.vectors_per_head(weights[layer], heads, matrix.unflatten(0, (4, -1))).sum(1)
        assert_near(found[:, layer], vectors.norm(dim=-1), 1e-11)
    with pytest.raises(cn.UnsupportedModelError, match=r"encoder .*stacks=\[.decoder., .cross.\]"):
        cn.NormAttribution(model).maps(inputs)


def test_bad_input_is_said_in_one_sentence() -> None:
    model, inputs = encoder_decoders.build("marian"), encoder_decoders.inputs("marian")
    method, meter = cn.NormAttribution(model), cn.NormMeter(model)
    with pytest.raises(cn.InvalidInputError, match="got MarianMTModel without its decoder's inputs; pass decoder_inp"):
        method.maps(inputs["input_ids"])
    with pytest.raises(cn.InvalidInputError, match="got 2 examples for the encoder and 1 for the decoder"):
        method.maps(inputs | {"decoder_input_ids": inputs["decoder_input_ids"][:1]})
    with pytest.raises(cn.InvalidInputError, match=r"mask of shape \(2, 5\) for inputs of shape \(2, 6\)"):
        method.maps(inputs | {"decoder_attention_mask": torch.ones(2, 5)})
    with pytest.raises(cn.InvalidInputError, match="token id 40"):
        method.maps(inputs | {"decoder_input_ids": torch.full((2, 4), 40)})
    with pytest.raises(cn.InvalidInputError, match="expected some of encoder, decoder, cross"):
        meter.measure(inputs, weights=True, stacks=["crossed"])
    with pytest.raises(cn.InvalidInputError, match="MarianEncoder is no encoder–decoder model"):
        cn.NormMeter(model.get_encoder()).measure(inputs["input_ids"], weights=True, stacks=["cross"])


def test_a_decoder_that_reads_another_sequence_without_its_encoder_is_refused() -> None:
    config = hf.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True)
    model, ids = hf.GPT2Model(config), torch.tensor([[3, 4, 5]])
    alone = {"input_ids": ids}
    assert cn.NormAttribution(model).maps(alone).decoder.shape == (1, 2, 3, 3)  # type: ignore[union-attr]
    # As many positions as the decoder has: only the call itself tells that they are others.
    with pytest.raises(cn.UnsupportedModelError, match="from 3 to 3 positions of another sequence"):
        cn.NormAttribution(model).maps(alone | {"encoder_hidden_states": torch.randn(1, 3, 32)})


@pytest.mark.parametrize("method", [cn.NormAttribution, cn.AttentionBlockAttribution, cn.ALTI, cn.ValueZeroing])
@pytest.mark.parametrize("as_tuple", [False, True])
def test_the_output_of_an_encoder_that_has_run(method: Any, as_tuple: bool) -> None:
    """Of several examples, whose calls are cut and repeated; the encoder's own layers are then unknown."""
    model, whole = encoder_decoders.build("bart", dtype=torch.float64), encoder_decoders.inputs("bart")
    with torch.no_grad():
        encoded: Any = model.get_encoder()(
            whole["input_ids"], whole.get("attention_mask"), output_hidden_states=True, return_dict=True
        )
    given = {name: value for name, value in whole.items() if name != "input_ids"}
    given["encoder_outputs"] = encoded.to_tuple() if as_tuple else encoded
    found, expected = (method(model).maps(inputs, stacks=["decoder", "cross"]) for inputs in (given, whole))
    for stack in ("decoder", "cross"):
        assert_near(getattr(found, stack), getattr(expected, stack), 1e-11)
    with pytest.raises(cn.UnsupportedModelError, match=r"no attention of the stack encoder .*stacks=\['decoder'"):
        method(model).maps(given)


def test_one_softmax_over_both_sequences_is_no_stack() -> None:
    """T5Gemma 2's decoder attends to its own positions and to the encoder's at once."""
    text = {**families.GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "layer_types": ["full_attention"] * 2}
    pictures = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    tokens = {"image_token_index": 59, "boi_token_index": 57, "eoi_token_index": 58, "mm_tokens_per_image": 4}
    encoder = {"text_config": text, "vision_config": pictures | {"image_size": 16, "patch_size": 8}, **tokens}
    build = new("T5Gemma2ForConditionalGeneration", encoder=encoder, decoder=text, image_token_index=59)
    model: Any = families.randomized(build, 0, torch.float32)
    inputs = {"input_ids": torch.randint(3, 50, (1, 10)), "decoder_input_ids": torch.randint(3, 50, (1, 6))}
    for method in (cn.NormAttribution, cn.AttentionWeights):
        for stacks in (None, ["encoder", "cross"], ["cross"]):
            with pytest.raises(cn.UnsupportedModelError, match=r"10 positions of the encoder and .* one softmax"):
                method(model).maps(inputs, stacks=stacks)
        assert method(model).maps(inputs, stacks=["encoder"]).encoder.shape == (1, 2, 10, 10)  # type: ignore[union-attr]
    with torch.no_grad():
        number = model(**inputs).logits[0, -1, 7]
    assert abs(float(cn.DecompX(model).decompose(inputs, target=7, position=-1).number) - float(number)) < 1e-5

"""Calls with past_key_values: the maps are the last rows of those without a cache, and the cache stays as it is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from captum.attr import FeatureAblation, InputXGradient, IntegratedGradients
from torch import Tensor

import captum_norm as cn
from captum_norm.functional.vectors import CACHED_ELEMENTS
from captum_norm.results.maps import SourceAndPrefix
from tests import encoder_decoders, families
from tests.encoder_decoders import ENCODER_DECODERS
from tests.families import FAMILIES, randomized
from tests.families.family import GROUPED
from tests.forward.test_room import Made
from tests.test_hand_written import IDS, NanoGPT
from tests.test_images import alone, model_of
from tests.test_virtual_tokens import tuned
from tests.tiny import tokenizer

LENGTH, ROOM = 11, 20

DYNAMIC, STATIC = "dynamic", "static"

# Windows of four positions: with a cache of eight, their layers have dropped some.
CASES = [
    *(("gpt2", DYNAMIC, 3), ("gpt2", STATIC, 1), ("llama", DYNAMIC, 1), ("llama", STATIC, 3)),
    *(("mistral", DYNAMIC, 3), ("mistral", STATIC, 1), ("gemma2", DYNAMIC, 1), ("gemma2", STATIC, 3)),
    *(("bloom", DYNAMIC, 2), ("falcon", DYNAMIC, 2), ("gpt-oss", DYNAMIC, 2)),
]


def tolerance(single: bool) -> float:
    """Softmax, norms or rotations in float32 round otherwise if there are more masked keys."""
    return 1e-5 if single else 1e-11


def empty_cache(model: Any, kind: str) -> Any:
    config = model.config
    return hf.DynamicCache(config=config) if kind == DYNAMIC else hf.StaticCache(config=config, max_cache_len=ROOM)


def continued(model: Any, ids: Tensor, new: int, kind: str = DYNAMIC, **arguments: Tensor) -> dict[str, Any]:
    """The last positions as inputs, behind a cache of the others; the arguments are masks, and positions' numbers."""
    cache, past = empty_cache(model, kind), ids.shape[1] - new
    with torch.no_grad():
        first = {name: value[:, :past] for name, value in arguments.items()}
        model(input_ids=ids[:, :past], past_key_values=cache, use_cache=True, **first)
    rest = {name: value if "mask" in name else value[:, past:] for name, value in arguments.items()}
    return {"input_ids": ids[:, past:], "past_key_values": cache, **rest}


def tensors_of(cache: Any) -> Iterator[Tensor]:
    parts = [cache.self_attention_cache, cache.cross_attention_cache] if hasattr(cache, "is_updated") else [cache]
    for layer in (layer for part in parts for layer in part.layers):
        yield from (value for value in vars(layer).values() if isinstance(value, Tensor))
        yield torch.tensor(int(layer.get_seq_length()))


@contextmanager
def unchanged(cache: Any) -> Iterator[None]:
    """Check at the end that a cache is bit by bit what it was."""
    values = [tensor.clone() for tensor in tensors_of(cache)]
    yield
    after = list(tensors_of(cache))
    assert len(after) == len(values)
    assert all(map(torch.equal, after, values))


def assert_last_rows(cached: Any, whole: Any, new: int, atol: float, *, axis: int = -2) -> None:
    rows = whole.narrow(axis, whole.shape[axis] - new, new)
    assert rows.abs().max() > 1e-3, "zeros would show nothing"
    torch.testing.assert_close(cached, rows, rtol=0, atol=atol * float(rows.abs().max()))


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
@pytest.mark.parametrize(("name", "kind", "new"), CASES)
def test_maps_are_the_last_rows_of_those_without_a_cache(name: str, kind: str, new: int) -> None:
    model, ids = families.build(name, dtype=torch.float64), families.inputs(name, batch=2, length=LENGTH)
    inputs, atol = continued(model, ids, new, kind), tolerance(FAMILIES[name].single)
    scopes: Any = ["attn", "atb", "atb_ff_res"]
    with unchanged(inputs["past_key_values"]):
        for options in ({"per_head": True}, {"head_norms": True}):
            meter, asked = cn.NormMeter(model), dict[str, Any](scopes=scopes, weights=True, **options)
            whole, cached = (meter.measure(given, **asked)["decoder"] for given in (ids, inputs))
            rows = meter.measure(ids, last=new, **asked)["decoder"]
            assert_last_measured(cached, whole, new, atol)
            assert_last_measured(rows, whole, new, max(atol, 1e-6))
        torch.testing.assert_close(rows.transformed_norms, whole.transformed_norms)
        assert (rows.real.shape, rows.cached) == ((2, new), LENGTH - new)
        if name in ("gpt2", "mistral", "llama"):
            for method in (cn.AttentionWeights(model, "attn_res"), cn.ALTI(model), cn.ValueZeroing(model)):
                assert_last_rows(method.maps(inputs).decoder, method.maps(ids).decoder, new, atol)
            relevance, of_new = (
                cn.AttentionTimesGradient(model).maps(each, target=5).decoder for each in (ids, inputs)
            )
            assert_last_rows(of_new, relevance, new, atol)
        maps = cn.NormAttribution(model).maps(inputs)
    assert (maps.cached, maps.virtual) == (LENGTH - new, 0)
    assert maps.encoder is None, "a single query does not show that the model is causal"
    assert maps.real.shape == (2, new)


@pytest.mark.parametrize(("kind", "new"), [(DYNAMIC, 3), (STATIC, 3), (DYNAMIC, 1)])
def test_masks_span_cached_and_new_positions(kind: str, new: int) -> None:
    """Left-padded examples, as in generation; what the padding is does not matter."""
    model, ids = families.build("gpt2", dtype=torch.float64), families.inputs("gpt2", batch=3, length=LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :2], mask[2, :9] = 0, 0
    if new > 1:
        mask[0, -1] = 0  # padded new positions, too
    places = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = continued(model, ids, new, kind, attention_mask=mask, position_ids=places)
    with unchanged(inputs["past_key_values"]):
        for method in (cn.NormAttribution(model, "attn_res"), cn.ALTI(model), cn.ValueZeroing(model)):
            whole = method.maps({"input_ids": ids, "attention_mask": mask})
            cached = method.maps(inputs)
            assert_last_rows(cached.decoder, whole.decoder, new, 1e-11)
            assert torch.equal(cached.real, mask.bool()[:, -new:])
            for example in range(3):
                assert (cached.self_attention[example].sum((0, 1))[~mask[example].bool()] == 0).all()
    alone = {"input_ids": ids[1:2, 2:], "position_ids": places[1:2, 2:]}
    expected = cn.NormAttribution(model).maps(alone["input_ids"]).decoder
    assert_last_rows(cn.NormAttribution(model).maps(inputs).self_attention[1:2, ..., 2:], expected, new, 1e-11)


@pytest.mark.parametrize("name", ["bart", "t5"])
@pytest.mark.parametrize("given", ["input_ids", "encoder_outputs"])
def test_an_encoder_decoder_model_goes_on(name: str, given: str) -> None:
    model, atol = randomized(ENCODER_DECODERS[name].build, 0, torch.float64), tolerance(ENCODER_DECODERS[name].single)
    everything = encoder_decoders.masked_inputs()
    target, mask = everything["decoder_input_ids"], everything["attention_mask"]
    with torch.no_grad():
        first = model(**everything | {"decoder_input_ids": target[:, :4]}, use_cache=True)
    inputs = {"attention_mask": mask, "decoder_input_ids": target[:, 4:], "past_key_values": first.past_key_values}
    inputs["decoder_attention_mask"] = torch.ones_like(target)
    inputs[given] = everything[given] if given == "input_ids" else (first.encoder_last_hidden_state,)
    relevance = cn.AttentionTimesGradient(model)
    methods = [cn.NormAttribution(model, "attn"), cn.AttentionWeights(model, "attn_res"), cn.ALTI(model)]
    if given == "input_ids":
        methods += [cn.ValueZeroing(model), relevance]
    with unchanged(first.past_key_values):
        for method in methods:
            options: Any = {"stacks": ["decoder", "cross"]} | ({"target": 3} if method is relevance else {})
            whole, cached = (method.maps(one, **options) for one in (everything, inputs))
            assert cached.cached == 4
            assert_last_rows(cached.decoder, whole.decoder, 3, atol)
            assert_last_rows(cached.cross, whole.cross, 3, atol)
        if given != "input_ids":
            return
        source, prefix = cn.AttentionWeights(model).attribute(inputs)  # the mean of the layers
        expected_source, expected_prefix = cn.AttentionWeights(model).attribute(everything)
        torch.testing.assert_close(source, expected_source, rtol=0, atol=atol)
        torch.testing.assert_close(prefix, expected_prefix[:, 4:], rtol=0, atol=atol)
        with pytest.raises(cn.InvalidInputError, match="without rows of the first 4 positions"):
            cn.ALTI(model).attribute(inputs)
        with pytest.raises(cn.UnsupportedModelError, match="the cache holds what it reads of the encoder"):
            relevance.maps(inputs, target=3)


def test_scores_are_of_the_new_positions_and_scores_of_maps_of_all() -> None:
    model, ids = families.build("gpt2", dtype=torch.float64), families.inputs("gpt2", batch=2, length=LENGTH)
    inputs = continued(model, ids, 3)
    mean = cn.NormAttribution(model, aggregation="mean")
    whole = mean.attribute(ids, position=9)
    torch.testing.assert_close(mean.attribute(inputs, position=1), whole[:, 8:], rtol=0, atol=1e-12)
    torch.testing.assert_close(mean.scores(mean.maps(inputs), position=1), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(mean.scores(mean.maps(inputs)), mean.attribute(ids), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        *(partial(kind, aggregation="rollout") for kind in (cn.NormAttribution, cn.ALTI, cn.ValueZeroing)),
        cn.AttentionRollout,
        cn.AttentionTimesGradient,
        cn.DecompX,
    ],
)
def test_what_needs_the_missing_rows_is_refused_in_a_sentence(make: Callable[[Any], Any]) -> None:
    model, ids = families.build("gpt2"), families.inputs("gpt2")
    inputs, method = continued(model, ids, 3), make(model)
    options = {} if method.target == "never" else {"target": 4}
    message = r"got .*8 .*positions.*the whole sequence without a cache"
    with unchanged(inputs["past_key_values"]), pytest.raises(cn.InvalidInputError, match=message):
        method.attribute(inputs, **options)


def test_gradients_and_perturbations_explain_the_new_positions() -> None:
    """Against autograd and against deletion by hand, with the cache given as a constant."""
    model, ids = families.build("gpt2", dtype=torch.float64), families.inputs("gpt2", batch=2, length=LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = continued(model, ids, 3, attention_mask=mask, position_ids=places)
    table = model.get_input_embeddings().weight.detach()
    embedded = table[inputs["input_ids"]]

    def number(embeddings: Tensor) -> Tensor:
        rest = {name: value for name, value in inputs.items() if name not in ("input_ids", "past_key_values")}
        output = model(inputs_embeds=embeddings, past_key_values=deepcopy(inputs["past_key_values"]), **rest)
        logits: Tensor = output.logits[:, -1]
        return logits[:, 7] - logits[:, 2]

    leaf = embedded.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(number(leaf).sum(), leaf)
    target = cn.Difference(7, 2)
    with unchanged(inputs["past_key_values"]):
        scores = cn.TokenAttribution(model, InputXGradient).attribute(inputs, target)
        torch.testing.assert_close(scores, (gradient * embedded).sum(-1), rtol=1e-9, atol=1e-12)
        ablation = cn.TokenAttribution(model, FeatureAblation, baseline="zero").attribute(inputs, target)
        integrated = cn.TokenAttribution(model, IntegratedGradients, baseline="zero", n_steps=64, batch_size=9)
        _, delta = integrated.attribute(inputs, target, return_convergence_delta=True)
    assert delta.abs().max() < 1e-3
    with torch.no_grad():
        for position in range(3):
            without = embedded.clone()
            without[:, position] = 0
            torch.testing.assert_close(ablation[:, position], number(embedded) - number(without), rtol=0, atol=1e-10)


def test_a_cache_stays_as_it_is_when_a_call_raises() -> None:
    model, ids = families.build("llama"), families.inputs("llama")
    for kind in (DYNAMIC, STATIC):
        inputs = continued(model, ids, 3, kind)

        def fail(*_: object) -> None:
            raise RuntimeError("in the last layer")

        handle = model.model.layers[-1].mlp.register_forward_hook(fail)
        with unchanged(inputs["past_key_values"]):
            for method in (cn.NormAttribution(model), cn.ValueZeroing(model), cn.AttentionTimesGradient(model)):
                with pytest.raises((cn.CaptumNormError, RuntimeError), match="in the last layer"):
                    method.maps(inputs)
        handle.remove()
        expected = model(**deepcopy(inputs) | {"use_cache": True}).logits
        cn.NormAttribution(model).maps(inputs)
        assert torch.equal(model(**inputs).logits, expected), "the next step goes on from the same state"


def test_caches_made_with_gradients_or_in_inference_mode() -> None:
    model, ids = families.build("llama"), families.inputs("llama")
    expected = cn.NormAttribution(model).maps(ids).decoder
    recorded = model(ids[:, :8], use_cache=True).past_key_values
    with torch.inference_mode():
        inferred = model(ids[:, :8], use_cache=True).past_key_values
    for cache in (recorded, inferred):
        inputs = {"input_ids": ids[:, 8:], "past_key_values": cache}
        with unchanged(cache):
            assert_last_rows(cn.NormAttribution(model).maps(inputs).decoder, expected, 3, 1e-5)
            cn.AttentionTimesGradient(model).maps(inputs, target=3)
    assert recorded.layers[0].keys.grad_fn is not None


def test_a_model_first_seen_with_a_cache() -> None:
    """Its structure is found on the new positions alone; one of them suffices."""
    ids = families.inputs("mistral", batch=2, length=LENGTH)
    for new in (1, 4):
        model = families.build("mistral", dtype=torch.float64)
        expected = cn.NormAttribution(families.build("mistral", dtype=torch.float64)).maps(ids).decoder
        assert_last_rows(cn.NormAttribution(model).maps(continued(model, ids, new)).decoder, expected, new, 1e-5)


def test_invalid_caches_are_refused_in_a_sentence() -> None:
    model, ids = families.build("gpt2"), families.inputs("gpt2")
    method, inputs = cn.NormAttribution(model), continued(model, ids, 3)
    cache = inputs["past_key_values"]
    legacy = tuple((layer.keys, layer.values) for layer in cache.layers)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"past_key_values": legacy}, r"of type tuple; .* transformers.DynamicCache\(past_key_values\)"),
        ({"past_key_values": 3}, "past_key_values of type int; expected a cache of transformers"),
        ({"input_ids": ids[:2, 8:]}, "past_key_values of 3 examples for inputs of 2"),
        ({"attention_mask": torch.ones(3, 3)}, r"shape \(3, 3\) for 8 cached and 3 new positions; expected \(3, 11\)"),
        ({"input_ids": ids.repeat(1, 6)}, "a sequence of 66 positions after 8 others; GPT2LMHeadModel allows at most"),
    ]
    for changes, message in wrong:
        with unchanged(cache), pytest.raises(cn.InvalidInputError, match=message):
            method.maps(inputs | changes)


def test_tokens_name_cached_positions() -> None:
    model = randomized(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED | {"vocab_size": 400})), 0, torch.float32)
    encoded = tokenizer()(["a b"], return_tensors="pt")
    cache = model(torch.tensor([[5, 6]]), use_cache=True).past_key_values
    encoded["past_key_values"] = cache
    encoded.pop("attention_mask"), encoded.pop("token_type_ids", None)
    maps = cn.NormAttribution(model).maps(encoded)
    (texts,) = maps.tokens or []
    assert list(texts[:2]) == ["[cached 1]", "[cached 2]"]
    assert len(texts) == maps.self_attention.shape[-1]


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


def test_rows_behind_a_cache() -> None:
    model, ids = families.build("llama", dtype=torch.float64), families.inputs("llama", batch=2, length=LENGTH)
    whole = cn.NormAttribution(model).maps(ids)
    rows = cn.NormAttribution(model).maps(continued(model, ids, 5, DYNAMIC), last=2)
    assert_last_rows(rows.decoder, whole.decoder, 2, 1e-5)
    assert rows.cached == LENGTH - 2


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
    with pytest.raises(cn.InvalidInputError, match=r"rows of the first 8 positions \(past_key_values, or last=\)"):
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

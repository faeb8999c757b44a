"""What users give: every accepted form means the same, everything else gets one sentence."""

import math
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import captum_norm as cn
from captum_norm.errors import NonFiniteError, UnsupportedScopeError
from tests import families
from tests.classifiers import classifier


@pytest.fixture
def bert() -> Any:
    return families.build("bert")


@pytest.fixture
def ids() -> Tensor:
    return families.inputs("bert")


def test_all_forms_of_one_input_give_the_same(bert: Any, ids: Tensor) -> None:
    method = cn.NormAttribution(bert)
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    kinds = torch.randint(0, 2, ids.shape)
    expected: Any = method.maps({"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds}).encoder
    embeddings = bert.get_input_embeddings()(ids).detach()
    same = [
        method.maps(ids, (mask, kinds)),
        method.maps((ids, mask, kinds)),
        method.maps((ids, mask), kinds),
        method.maps({"inputs_embeds": embeddings, "attention_mask": mask, "token_type_ids": kinds}),
        method.maps(embeddings, (mask, kinds)),
        method.maps(ids, (mask.bool(), kinds)),
        method.maps(ids, (mask.float(), kinds)),
    ]
    for maps in same:
        torch.testing.assert_close(maps.encoder, expected, rtol=1e-5, atol=1e-6)
    (scores,) = method.attribute((ids,))
    assert torch.equal(scores, method.attribute(ids))


def test_a_mask_that_the_cache_stands_before_still_comes_first() -> None:
    model, ids = families.build("gpt2"), families.inputs("gpt2")
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    named: Any = cn.NormAttribution(model).maps({"input_ids": ids, "attention_mask": mask}).decoder
    positional: Any = cn.NormAttribution(model).maps(ids, mask).decoder
    assert torch.equal(named, positional)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda ids: {"inputs": ids[:, :0]}, r"empty inputs of shape \(3, 0\)"),
        (lambda ids: {"inputs": ids[0]}, r"token ids of shape \(11,\); expected \(batch, sequence\)"),
        (lambda ids: {"inputs": ids.float()}, r"inputs of shape \(3, 11\) and dtype torch.float32; expected token ids"),
        (lambda ids: {"inputs": ids + 55}, r"the token id \d+; BertModel knows the ids 0 to 59"),
        (lambda ids: {"inputs": ids.repeat(1, 6)}, "a sequence of 66 positions; BertModel allows at most 64"),
        (lambda _: {"inputs": "text"}, r"got the text .text. and no tokenizer; create the method with the mod"),
        (lambda _: {"inputs": None}, "inputs of type NoneType"),
        (lambda _: {"inputs": ()}, "got an empty tuple"),
        (lambda ids: {"inputs": ids.numpy()}, "got inputs of type ndarray; expected a tensor"),
        (
            lambda ids: {"inputs": {"input_ids": ids, "past_key_values": 3}},
            "past_key_values of type int; expected a cache",
        ),
        (lambda ids: {"inputs": {"ids": ids}}, r"the keys \['ids'\]; expected input_ids"),
        (
            lambda ids: {"inputs": {"input_ids": ids, "token_type_ids": ids[:, :3]}},
            "the forward pass of BertModel does not accept these inputs: ",
        ),
        (lambda ids: {"inputs": {"input_ids": ids}, "additional_forward_args": ids}, "beside a mapping"),
        (lambda ids: {"inputs": ids, "additional_forward_args": (ids,) * 20}, "21 positional arguments, but"),
        (lambda ids: {"inputs": ids, "additional_forward_args": ids[:, :5]}, r"mask of shape \(3, 5\) for inputs"),
        (lambda ids: {"inputs": ids, "additional_forward_args": -1.0 * ids}, "other values than 1"),
        (lambda ids: {"inputs": ids, "additional_forward_args": [1]}, "mask of type list; expected a tensor"),
        (lambda ids: {"inputs": ids * 1j}, "dtype torch.complex64; expected token ids"),
        (lambda ids: {"inputs": ids, "additional_forward_args": 0 * ids}, "leaves no position of example 0"),
        (lambda ids: {"inputs": ids, "position": 11}, "position 11; the sequence has 11 positions, 0 to 10"),
        (lambda ids: {"inputs": ids, "position": [1, 2]}, "2 positions for 3 examples"),
        (lambda ids: {"inputs": ids, "position": "middle"}, 'the position "middle"; expected an index, "first"'),
        (lambda ids: {"inputs": ids, "position": 1.5}, "position 1.5; expected an integer"),
        (lambda ids: {"inputs": ids, "position": torch.tensor([True] * 3)}, "position True; expected an integer"),
        (lambda ids: {"inputs": ids, "layer": 1.0}, "layer 1.0; expected its number: 0 for the first"),
        (lambda ids: {"inputs": ids, "target": 0 * ids}, r"target of shape \(3, 11\), .*; pass an attention mask by"),
        (
            lambda ids: {"inputs": ids, "layer": "last"},
            "layer 'last'; expected its number: 0 for the first, -1",
        ),
        (lambda ids: {"inputs": {"input_ids": ids.tolist()}}, 'as a tensor: tokenizer.*return_tensors="pt"'),
        (lambda ids: {"inputs": ids, "layer": 2}, "layer 2; the model has 2: 0 to 1, or -2 to -1"),
    ],
)
def test_bad_input_gets_one_sentence(bert: Any, ids: Tensor, arguments: Any, message: str) -> None:
    with pytest.raises(cn.InvalidInputError, match=message) as caught:
        cn.NormAttribution(bert).attribute(**arguments(ids))
    assert "\n" not in str(caught.value)


def test_a_position_in_the_padding_is_refused(bert: Any, ids: Tensor) -> None:
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with pytest.raises(cn.InvalidInputError, match="position 2, which is padding in example 1"):
        cn.NormAttribution(bert).attribute(ids, additional_forward_args=mask, position=2)
    cn.NormAttribution(bert).attribute(ids, additional_forward_args=mask, position=[0, 3, 0])


NORM: Any = cn.NormAttribution
ODD: Any = math.nan
OPTIONS: list[tuple[Any, str]] = [
    (lambda model, _: cn.NormAttribution(model, aggregation="max"), "got aggregation='max'; expected one of rollout"),
    (lambda _, __: cn.NormAttribution({}), r"type dict; expected a torch\.nn\.Module"),
    (lambda model, ids: cn.NormMeter(model).measure(ids), "nothing to measure"),
    (lambda model, ids: cn.NormMeter(model).measure(ids, weights=True, head_norms=True), "nothing to measure"),
    (lambda model, ids: cn.NormMeter(model).measure(ids, scopes=["attn"], per_head=True), "got per_head=True"),
    (
        lambda model, ids: cn.NormMeter(model).measure(ids, scopes="attn"),  # type: ignore[arg-type]
        r'"attn"; expected a sequence, such as \["attn"\]',
    ),
    (lambda model, ids: cn.NormMeter(model).measure(ids, weights=True, layers=[]), "empty selection of layers"),
    (lambda model, _: cn.NormMeter(model, memory_budget=-5), "memory_budget=-5; expected at least 1"),
    (
        lambda model, _: cn.NormMeter(model, accumulate=torch.int8),
        r"torch\.int8; expected one of torch\.float32, torch",
    ),
    (lambda model, ids: cn.NormAttribution(model, "attn_res").maps(ids, per_head=True), "per_head=True"),
    (lambda model, ids: cn.AttentionWeights(model, "attn_res").maps(ids, per_head=True), "per_head=True"),
    (lambda model, ids: cn.AttentionRollout(model).maps(ids, per_head=True), "per_head=True"),
    (lambda model, ids: cn.AttentionWeights(model).attribute(ids, return_convergence_delta=True), "decomposes nothing"),
    (lambda model, ids: cn.ALTI(model).maps(ids, target=1), "the maps of ALTI depend on no output"),
    (lambda model, ids: cn.ALTI(model).maps(ids, position=1), "the maps of ALTI depend on no output"),
    (lambda model, ids: NORM(model).maps(ids, stacks=3), "^got stacks 3; expected a sequence of names"),
    (
        lambda model, ids: NORM(model).maps(ids, layers=3),
        r"^got layers 3; expected a sequence of integers, such as \[0, 1\]",
    ),
    (
        lambda _, ids: NORM(families.family.new("ViTModel", hidden_size=12)()).attribute(ids),
        r"^got inputs of shape \(3, 11\) for ViTModel, which reads pictures; expected pixel_values \(batch",
    ),
    (lambda model, ids: NORM(model).attribute(ids, position=2**70), f"^got position {2**70}; expected an integer"),
    (
        lambda model, ids: NORM(model).attribute(ids.to(torch.uint16)),
        r"^got inputs of dtype torch\.uint16; expected toke",
    ),
    (
        lambda model, ids: NORM(model).maps(ids, per_head=torch.ones(2)),
        r"^got per_head=tensor.*; expected True or False",
    ),
    (lambda model, _: NORM(model).scores(3), r"^got maps 3; expected what NormAttribution\.maps\(\) returns"),
    (lambda model, _: NORM(model, baseline=3), "^got baseline=3; expected one of zero, bias"),
    (
        lambda _, ids: cn.compare(classifier(), ids, methods=["weights"], target=ODD, keep_special=False),
        "^got target=nan for 3 examples; expected an integer",
    ),
]


@pytest.mark.parametrize(("call", "message"), OPTIONS, ids=range(len(OPTIONS)))
def test_options_that_do_not_exist_are_refused(bert: Any, ids: Tensor, call: Any, message: str) -> None:
    with pytest.raises(cn.InvalidInputError, match=message):
        call(bert, ids)


def test_scopes_and_arguments_that_do_not_exist_are_refused(bert: Any) -> None:
    with pytest.raises(UnsupportedScopeError, match='"ff"; NormAttribution has the scopes attn, attn_res'):
        cn.NormAttribution(bert, "ff")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="chunk_byte"):
        cn.NormAttribution(bert, chunk_byte=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named(bert: Any, ids: Tensor, bad: float) -> None:
    with torch.no_grad():
        bert.encoder.layer[1].attention.self.value.weight[3, 2] = bad
    with pytest.raises(NonFiniteError, match=r'"encoder\.layer\.1\.attention\.self\.value\.weight" of BertModel'):
        cn.NormAttribution(bert).maps(ids)
    with torch.no_grad():
        bert.encoder.layer[1].attention.self.query.weight[3, 2] = bad
    with pytest.raises(NonFiniteError, match="contains NaN or infinity"):
        cn.AttentionWeights(bert).maps(ids)


@pytest.mark.parametrize("method", [cn.NormAttribution, cn.AttentionWeights])
def test_a_causal_model_that_is_not_finite_is_not_taken_for_two_stacks(method: Any) -> None:
    model = families.build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[1, 1] = torch.nan
    with pytest.raises(NonFiniteError, match=r'"model\.layers\.0\.mlp\.down_proj\.weight" of LlamaForCausalLM'):
        method(model).maps(families.inputs("llama"))


@pytest.mark.parametrize("memory_budget", [1, 8192, None])
def test_one_short_example_does_not_make_a_model_causal(bert: Any, ids: Tensor, memory_budget: int | None) -> None:
    mask = torch.ones_like(ids)
    mask[0, 1:], mask[1, :5] = 0, 0
    maps: Any = cn.NormAttribution(bert, memory_budget=memory_budget).maps(ids, mask)
    whole: Any = cn.NormAttribution(bert).maps(ids, mask)
    torch.testing.assert_close(maps.encoder, whole.encoder, rtol=1e-4, atol=1e-6)


def test_a_fault_of_ours_is_not_blamed_on_the_inputs(bert: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("captum_norm.forward.record.ACCUMULATED_BYTES", None)
    with pytest.raises(TypeError, match="not supported between"):
        cn.AttentionWeights(bert).maps(ids)


def test_an_empty_cache_is_of_no_account_and_stays_empty() -> None:
    model, ids = families.build("llama", dtype=torch.float32), families.inputs("llama")
    method, cache = cn.NormAttribution(model), hf.DynamicCache(config=model.config)
    maps = method.maps({"input_ids": ids, "past_key_values": cache, "use_cache": True})
    torch.testing.assert_close(maps.decoder, method.maps(ids).decoder)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", ["bert", "llama", "mixtral"])
def test_the_default_device_is_of_no_account(name: str) -> None:
    model, ids = families.build(name, dtype=torch.float32), families.inputs(name)
    with torch.device("meta"):
        scores = [
            method(model).attribute(ids) for method in (cn.NormAttribution, cn.ALTI, cn.AttentionRollout, cn.DecompX)
        ]
    assert all(score.isfinite().all() for score in scores)

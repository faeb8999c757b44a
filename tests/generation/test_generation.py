"""Answers are explained as each token alone is explained, by a pass over what comes before it."""

import copy
import csv
import json
import re
from collections.abc import Callable
from typing import Any, Never

import numpy as np
import pytest
import torch
from captum.attr import FeatureAblation, InputXGradient, LLMAttributionResult
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

import captum_norm as cn
from captum_norm.generation import handed_on
from captum_norm.generation.prompts import Prompt, Segmentation, read_prompt, segments_of
from captum_norm.text.words import token_texts
from tests.families import state_of
from tests.generation.texts import ANSWER, PROMPT, TEXT, encoded, gpt2, llama, tokenizer, tokens_of_answer

OF_STATES: dict[str, Callable[[Any], Any]] = {
    "norm": lambda model: cn.NormAttribution(model, aggregation="rollout"),
    "norm, mean": lambda model: cn.NormAttribution(model, aggregation="mean"),
    "norm, attn_res": lambda model: cn.NormAttribution(model, "attn_res", "mean"),
    "attention-block": lambda model: cn.AttentionBlockAttribution(model, "atb_ff_res"),
    "alti": cn.ALTI,
    "weights": cn.AttentionWeights,
    "information-flow": cn.InformationFlow,
    "rollout": cn.AttentionRollout,
    "value-zeroing": cn.ValueZeroing,
}

OF_OUTPUTS: dict[str, Callable[[Any], Any]] = {
    "decompx": cn.DecompX,
    "decompx, absdot": lambda model: cn.DecompX(model, "absdot"),
    "attention-gradient": cn.AttentionTimesGradient,
    "attnlrp": cn.AttnLRP,
    "cp-lrp": cn.CPLRP,
    "gim": cn.GIM,
    "alti-logit": cn.ALTILogit,
    "input × gradient": lambda model: cn.TokenAttribution(model, InputXGradient),
    "ablation": lambda model: cn.TokenAttribution(model, FeatureAblation, baseline="mean"),
}


def t5() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    sizes |= {"decoder_start_token_id": 1, "pad_token_id": 1}
    model = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer()), **sizes))
    model.train(False)
    return model


def generation_of(method: Any) -> Any:
    return cn.GenerationAttribution(method, tokenizer())


@pytest.mark.parametrize("model", [gpt2, llama])
@pytest.mark.parametrize("name", [*OF_STATES, *OF_OUTPUTS])
def test_rows_are_those_of_single_tokens(model: Any, name: str) -> None:
    method = (OF_STATES | OF_OUTPUTS)[name](model())
    result = generation_of(method).attribute(PROMPT, ANSWER)
    whole, count, answer = encoded(PROMPT + ANSWER), encoded(PROMPT).shape[1], tokens_of_answer()
    assert len(result.token_attr) == len(answer) == len(result.output_tokens)
    for row, token in enumerate(answer):
        target = None if name in OF_STATES else token
        alone = method.attribute(whole[:, : count + row], target, position=-1)[0]
        expected = torch.nn.functional.pad(alone, (0, len(answer) - 1 - row))
        assert torch.allclose(result.token_attr[row], expected, rtol=1e-4, atol=1e-5 * float(alone.abs().max()))
    assert torch.equal(result.seq_attr, result.token_attr.sum(0))
    assert "".join(result.input_tokens[1:]) == PROMPT + "".join(result.output_tokens[:-1])
    assert (result.convergence_delta is not None) == method.has_convergence_delta()


@pytest.mark.parametrize("outputs", [None, (1, 3)])
@pytest.mark.parametrize("model", [gpt2, llama, t5])
def test_the_routes_of_a_graph_add_up_to_the_scores(model: Any, outputs: Any) -> None:
    attribution = generation_of(cn.InformationFlow(model()))
    result = attribution.attribute(PROMPT, ANSWER, outputs=outputs, graph_threshold=0.0)
    (example,) = result.page().examples
    shown, rows = example.graph, result.token_attr
    assert [row for row, _ in shown.outputs] == list(range(len(rows)))
    assert ("encoder" in {stack for stack, *_ in shown.nodes}) == (model is t5)
    for row, output in shown.outputs:
        # Edges come from the outputs down.
        reach = dict.fromkeys(range(len(shown.nodes)), 0.0) | {output: 1.0}
        for source, target, _, _, importance in shown.edges:
            reach[source] += reach[target] * importance
        found = torch.zeros(len(result.input_tokens))
        for index, (_, _, block, position) in enumerate(shown.nodes):
            if block == "input":
                found[position] += reach[index]
        torch.testing.assert_close(found, rows[row].float(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["norm, mean", "decompx", "alti-logit"])
def test_rows_of_an_adapted_model_in_half_precision(name: str) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(llama()), adapter).bfloat16().train(False)
    method, answer = (OF_STATES | OF_OUTPUTS)[name](model), tokens_of_answer()[:3]
    result = generation_of(method).attribute(PROMPT, answer)
    text = torch.cat([encoded(PROMPT), torch.tensor([answer[:2]])], 1)
    alone = method.attribute({"input_ids": text}, None if name in OF_STATES else answer[2], position=-1)[0]
    assert (result.token_attr[2] - alone).norm() < 0.02 * alone.norm()


@pytest.mark.parametrize("name", ["norm", "decompx", "attnlrp", "alti-logit"])
def test_virtual_tokens_of_a_prompt_move_nothing(name: str) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(0)
    model = peft.get_peft_model(copy.deepcopy(gpt2()), peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=3))
    method = (OF_STATES | OF_OUTPUTS)[name](model)
    result = generation_of(method).attribute(PROMPT, ANSWER)
    before, answer = encoded(PROMPT), tokens_of_answer()
    alone = method.attribute({"input_ids": before}, None if name == "norm" else answer[0], position=-1)[0]
    assert torch.allclose(result.token_attr[0, : len(alone)], alone, rtol=1e-4, atol=1e-5 * float(alone.abs().max()))
    assert not result.token_attr[0, len(alone) :].any()


@pytest.mark.parametrize("name", ["decompx", "attnlrp", "alti-logit", "input × gradient", "norm"])
def test_the_whole_is_the_sum_of_its_tokens(name: str) -> None:
    generation = generation_of((OF_STATES | OF_OUTPUTS)[name](llama()))
    each = generation.attribute(PROMPT, ANSWER, outputs=(1, 5))
    whole = generation.attribute(PROMPT, ANSWER, outputs=(1, 5), per_token=False)
    assert whole.token_attr is None
    assert torch.allclose(whole.seq_attr, each.seq_attr, rtol=1e-4, atol=1e-5 * float(each.seq_attr.abs().max()))


@pytest.mark.parametrize("kind", [cn.NormAttribution, cn.ALTI])
def test_a_span_has_the_vectors_of_its_tokens_added(kind: Any) -> None:
    method = kind(llama(), aggregation="mean")
    generation = generation_of(method)
    found = generation.attribute(PROMPT, ANSWER, outputs=(1, 4), per_token=False)
    read, answer = encoded(PROMPT), tokens_of_answer()
    ids = torch.cat([read, torch.tensor([answer[:3]])], 1)
    each = torch.arange(ids.shape[1]).unsqueeze(0)
    expected = method.maps(ids, last=3, segments=each, together=True).decoder.mean(1)[0, 0]
    assert torch.allclose(found.seq_attr, expected, rtol=1e-5)
    rows = generation.attribute(PROMPT, ANSWER, outputs=(1, 4))
    assert not torch.allclose(rows.seq_attr, expected, rtol=1e-2), "norms of single tokens are no norm of their sum"
    handed = generation.attribute(PROMPT, ANSWER, outputs=(1, 4), per_token=False, hops=1).seq_attr
    before = generation.attribute(PROMPT, ANSWER, outputs=(0, 1)).seq_attr
    before = torch.nn.functional.pad(before, (0, len(expected) - len(before)))
    assert torch.allclose(handed, handed_on(expected, before[None], read.shape[1], 1), rtol=1e-5)


def test_a_span_of_a_translation_has_source_and_prefix() -> None:
    method = cn.NormAttribution(t5(), aggregation="mean")
    answer = tokens_of_answer()
    generation = generation_of(method)
    one, same = (generation.attribute(PROMPT, answer, outputs=(2, 3), per_token=each) for each in (True, False))
    assert torch.allclose(one.seq_attr, same.seq_attr, rtol=1e-4)
    two = generation.attribute(PROMPT, answer, outputs=(1, 3), per_token=False).seq_attr
    rows = generation.attribute(PROMPT, answer, outputs=(1, 3)).seq_attr
    assert two.shape == rows.shape
    assert bool((two <= rows * (1 + 1e-5)).all()), "a sum is no longer than its parts together"
    assert not torch.allclose(two, rows, rtol=1e-2)


def test_a_part_is_explained_without_what_comes_after_it() -> None:
    generation = generation_of(cn.DecompX(gpt2()))
    whole, part = (generation.attribute(PROMPT, ANSWER, outputs=outputs) for outputs in (None, "old ring"))
    assert part.output_tokens == [" old", " ring"]
    assert part.input_tokens == whole.input_tokens[: len(part.input_tokens)]
    assert part.explained.outputs == (1, 3)
    columns = len(part.input_tokens)
    assert torch.allclose(part.token_attr, whole.token_attr[1:3, :columns], rtol=1e-4, atol=1e-5)
    assert not whole.token_attr[1:3, columns:].any()


def test_a_contrast_is_the_difference_of_the_first_tokens_that_differ() -> None:
    method = cn.DecompX(gpt2())
    result = generation_of(method).attribute(PROMPT, " an old ring", contrast=" an old boat here")
    before = encoded(PROMPT + " an old")
    ring, boat = (int(encoded(word)[0, 1]) for word in (" ring", " boat"))
    expected = method.attribute(before, cn.Difference(ring, boat))[0]
    assert result.output_tokens == [" ring"]
    assert result.explained.contrast == " boat"
    assert torch.allclose(result.seq_attr, expected, rtol=1e-4, atol=1e-5)


def test_importance_is_handed_on_through_the_answer_before() -> None:
    generation = generation_of(cn.ALTI(gpt2()))
    every: Any = generation.attribute(PROMPT, ANSWER)
    part = generation.attribute(PROMPT, ANSWER, outputs="garden.", hops=2)
    start, end = part.explained.outputs
    columns, first = len(part.input_tokens), encoded(PROMPT).shape[1]
    importance = every.token_attr[start:end, :columns].sum(0)
    expected = handed_on(importance, every.token_attr[:start, :columns], first, 2)
    assert torch.allclose(part.seq_attr, expected, atol=1e-6)
    assert part.seq_attr[first : first + start].sum() < importance[first : first + start].sum()
    assert torch.allclose(part.seq_attr.sum(), torch.tensor(float(end - start)), atol=1e-4)


def test_a_contrast_does_not_change_what_is_handed_on() -> None:
    generation = generation_of(cn.DecompX(gpt2()))
    options: dict[str, Any] = {"contrast": " an old boat", "outputs": " ring"}
    direct = generation.attribute(PROMPT, " an old ring", **options)
    handed = generation.attribute(PROMPT, " an old ring", **options, hops=1)
    rows: Any = generation.attribute(PROMPT, " an old ring").token_attr
    count, first = len(handed.input_tokens), encoded(PROMPT).shape[1]
    expected = handed_on(direct.seq_attr.clamp(min=0), rows[:2, :count].clamp(min=0), first, 1)
    assert torch.allclose(handed.seq_attr, expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(handed.token_attr, direct.token_attr, rtol=1e-4, atol=1e-5)


def test_segments_add_up_what_their_tokens_have() -> None:
    result = generation_of(cn.DecompX(gpt2())).attribute(PROMPT, ANSWER, segments="sentence")
    assert result.segments == ("Anna owns a red boat.", "Paul found")
    first = len(encoded("Anna owns a red boat.")[0])
    expected = [result.seq_attr[1:first].sum(), result.seq_attr[first : result.prompt_length].sum()]
    assert torch.allclose(result.segment_attr, torch.stack(expected), rtol=1e-5)
    assert result.top(1)[0][0] == result.segments[int(result.segment_attr.argmax())]


def test_what_a_template_adds_has_no_score() -> None:
    generation = generation_of(cn.NormAttribution(gpt2()))
    result = generation.attribute([{"role": "user", "content": "What does Anna own?"}], "Anna owns a boat.")
    template = torch.tensor(result.template)
    assert template.any()
    assert not result.seq_attr[template].any()
    assert result.seq_attr[~template].all()


@pytest.mark.few
@pytest.mark.parametrize("name", ["weights", "alti", "decompx", "alti-logit"])
def test_an_encoder_decoder_rests_on_its_source_and_its_own_prefix(name: str) -> None:
    model = t5()
    method = (
        cn.AttentionWeights(model, aggregation="mean") if name == "weights" else (OF_STATES | OF_OUTPUTS)[name](model)
    )
    answer = tokens_of_answer()
    result = generation_of(method).attribute(PROMPT, torch.tensor(answer))
    source = encoded(PROMPT)
    assert result.token_attr.shape == (len(answer), source.shape[1] + len(answer))
    for row, token in enumerate(answer):
        inputs = {"input_ids": source, "decoder_input_ids": torch.tensor([[1, *answer[:row]]])}
        alone = method.attribute(inputs, None if name in OF_STATES else token, position=-1)
        expected = torch.cat([*alone], 1)[0]
        found = result.token_attr[row, : len(expected)]
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
        assert not result.token_attr[row, len(expected) :].any()
    assert result.input_tokens[source.shape[1]] == "</s>", "the decoder's start"


def test_the_result_is_captums() -> None:
    result = generation_of(cn.DecompX(gpt2())).attribute(PROMPT, ANSWER, segments="word")
    assert issubclass(type(result), LLMAttributionResult)
    for drawn in (result.plot_token_attr(), result.plot_seq_attr()):
        figure, axes = drawn
        assert len(axes.get_xticks()) == len(result.input_tokens)
        figure.clear()
    assert "rest on" in repr(result)


@pytest.mark.parametrize("per_token", [True, False])
def test_words_of_an_answer_have_what_their_tokens_have_together(per_token: bool) -> None:
    model, words = gpt2(), [" an", " ancient", " ring", "."]
    pieces = [tokenizer()(word, add_special_tokens=False)["input_ids"] for word in words]
    assert len(pieces[1]) > 2
    answer = [token for piece in pieces for token in piece]
    ids = torch.cat([encoded(PROMPT), torch.tensor([answer])], 1)
    logits = model(ids).logits[0, -len(answer) - 1 : -1].detach().double()
    chosen = torch.arange(len(answer)), torch.tensor(answer)
    result = generation_of(cn.DecompX(model)).attribute(PROMPT, answer, per_token=per_token)
    by_word = result.words()
    assert [output.strip() for output in by_word.output_tokens] == [word.strip() for word in words]
    for place, (values, chances) in enumerate(
        zip(*(numbers[chosen].split([*map(len, pieces)]) for numbers in (logits, logits.softmax(-1))), strict=True)
    ):
        output = by_word.outputs[place]
        assert output.value == pytest.approx(float(values.sum()), rel=1e-5)
        assert output.probability == pytest.approx(float(chances.log().sum().exp()), rel=1e-5)
        assert output.explained
        if per_token:
            assert by_word[place].outputs == (output,)
            assert by_word[place].probability == pytest.approx(output.probability)
    assert by_word.outputs[0] == result.outputs[0]
    assert (by_word.outputs[1].name, by_word.outputs[1].top) == (by_word.output_tokens[1], ())


@pytest.mark.parametrize("per_token", [True, False])
def test_results_are_shown(per_token: bool) -> None:
    generation = generation_of(cn.DecompX(gpt2()))
    result = generation.attribute(PROMPT, ANSWER, segments="word", per_token=per_token)
    (image,) = result.plot().axes[0].images
    rows = result.seq_attr[None] if result.token_attr is None else result.token_attr
    assert torch.allclose(torch.tensor(np.asarray(image.get_array())).float(), rows, atol=1e-6)
    content = json.loads(result.file_bytes(".json"))
    assert content["scores"] == result.seq_attr.tolist()
    assert content["token_scores"] == (rows.tolist() if per_token else None)
    table = list(csv.DictReader(result.file_bytes(".csv").decode().splitlines()))
    count = len(result.input_tokens)
    assert [float(row["score"]) for row in table[:count]] == pytest.approx(result.seq_attr.tolist())
    assert len(table) == count * (1 + len(rows) * per_token)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": ANSWER, "gen_args": {}}, "not generated"),
        ({"prompt": "Anna owns a red boat. " * 20}, "takes at most 64; shorten the prompt or answer"),
        ({"prompt": torch.tensor([5, 9999])}, "the model's own tokenizer"),
        ({"gen_args": 0}, "got gen_args=0; expected a mapping"),
        ({"gen_args": {"max_new_tokens": "9"}}, "got max_new_tokens '9'; expected an integer"),
        ({"gen_args": {"max_new_tokens": 0}}, "got max_new_tokens=0; expected at least 1"),
        ({"gen_args": {"max_new": 9}}, r"generate\(\) of GPT2LMHeadModel refuses gen_args={'max_new': 9}: .*max_new"),
        ({"prompt": ""}, "got the prompt ''; expected some words"),
        ({"target": ""}, "got the answer '', which has no tokens; give a text, or None to generate"),
        ({"segments": "sentences"}, "or a list of their texts; did you mean sentence"),
        ({"segments": "message"}, r"and no conversation; pass messages, \["),
        ({"target": ANSWER, "segments": 3.5}, "got the segments 3.5; expected a sequence"),
        ({"target": ANSWER, "segments": np.array([1, 2])}, "the segment 1 is not in the prompt"),
        ({"target": ANSWER, "outputs": "green"}, "0 times in the answer"),
        ({"target": ANSWER, "hops": 1}, "hops=1"),
        ({"target": ANSWER, "outputs": "ring", "hops": -1}, "hops=-1"),
        ({"target": ANSWER, "contrast": " an old boat"}, "explains no logit"),
        ({"target": ANSWER, "segments": "chapter"}, "expected word"),
        ({"target": [3, 9999]}, "the model's own tokenizer"),
        ({"target": [5] * 80}, "shorten the prompt"),
        ({"target": ANSWER, "per_token": "yes"}, "per_token"),
        ({"target": ANSWER, "graph_threshold": 0.1}, "got graph_threshold=, but NormAttribution follows no routes"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(cn.InvalidInputError, match=message):
        generation_of(cn.NormAttribution(gpt2())).attribute(**{"prompt": PROMPT, **options})


def test_equal_answers_have_no_contrast() -> None:
    with pytest.raises(cn.InvalidInputError, match="does not differ"):
        generation_of(cn.DecompX(gpt2())).attribute(PROMPT, ANSWER, contrast=ANSWER)


def test_methods_tokenizers_and_models_of_hugging_face_are_needed() -> None:
    layer = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
    with pytest.raises(cn.UnsupportedModelError, match="no Hugging Face model"):
        generation_of(cn.NormAttribution(layer))
    with pytest.raises(cn.InvalidInputError, match="no tokenizer"):
        cn.GenerationAttribution(cn.NormAttribution(gpt2()))
    with pytest.raises(cn.InvalidInputError, match="got the tokenizer 'gpt2'; pass the model's"):
        cn.GenerationAttribution(cn.NormAttribution(gpt2()), "gpt2")
    with pytest.raises(cn.InvalidInputError, match="got the method a GPT2LMHeadModel; expected one of captum_norm"):
        generation_of(gpt2())
    with pytest.raises(cn.UnsupportedModelError, match="GPT2Model cannot generate; take a language model"):
        generation_of(cn.NormAttribution(gpt2().transformer)).attribute(PROMPT)
    own = cn.TokenAttribution(gpt2(), InputXGradient, tokenizer=tokenizer())
    assert cn.GenerationAttribution(own).tokenizer is tokenizer()


def test_a_page_shows_segments_of_the_same_words_apart() -> None:
    generation = generation_of(cn.DecompX(gpt2()))
    result: Any = generation.attribute("Anna owns Anna", " owns", segments="word")
    (table,) = result.page().tables
    scores = enumerate(zip(("Anna", "owns", "Anna"), result.segment_attr.tolist(), strict=True))
    shown = [[number, word, score] for number, word, _, score in table.rows]
    assert shown == [[number, word, score] for number, (word, score) in scores]


def test_a_page_has_the_row_of_each_token_of_the_answer() -> None:
    result = generation_of(cn.DecompX(gpt2())).attribute(PROMPT, ANSWER)
    (example,) = result.page().examples
    assert "".join(example.outputs.word_texts or ()) == ANSWER.replace(" ", "")
    first, (name, probability) = example.outputs.likely[0], result.outputs[0].top[0]
    assert first.startswith(f"“{name.strip()}” {100 * probability:.1f} %, “")
    assert len(example.outputs.likely) == len(result.outputs) == len(example.outputs)
    assert (example.maps[0].values[0] == result.token_attr.numpy()).all()
    assert (example.scores[0].values == result.seq_attr.numpy()).all()
    assert example.maps[0].signed is bool((result.token_attr < 0).any()) is True


@pytest.mark.parametrize("scope", ["attn", "attn_res"])
def test_vectors_of_a_segment_and_of_all_outputs_are_added_before_the_norm(scope: Any) -> None:
    method = cn.NormAttribution(gpt2(), scope, "mean")
    result = generation_of(method).attribute(PROMPT, ANSWER, outputs=(1, 4), segments="sentence")
    ids = encoded(PROMPT + ANSWER)[:, : encoded(PROMPT).shape[1] + 3]
    first, count = encoded("Anna owns a red boat.").shape[1], encoded(PROMPT).shape[1]
    numbers = torch.tensor([[-1, *[0] * (first - 1), *[1] * (count - first), *[-1] * 3]])
    maps: Any = method.maps(ids, last=3, segments=numbers, together=True).decoder
    assert torch.equal(result.segment_attr, maps[0, :, 0].mean(0))
    added = torch.stack([result.seq_attr[1:first].sum(), result.seq_attr[first:count].sum()])
    assert (result.segment_attr < added).all(), "the norm of a sum is less than the sum of norms"


def test_segments_of_a_source() -> None:
    model, answer = t5(), tokens_of_answer()
    method = cn.NormAttribution(model, aggregation="mean")
    result = generation_of(method).attribute(PROMPT, torch.tensor(answer), segments="sentence")
    source = encoded(PROMPT)
    first = encoded("Anna owns a red boat.").shape[1]
    numbers = torch.tensor([[-1, *[0] * (first - 1), *[1] * (source.shape[1] - first)]])
    inputs = {"input_ids": source, "decoder_input_ids": torch.tensor([[1, *answer[:-1]]])}
    cross: Any = method.maps(inputs, stacks=["cross"], segments=numbers, together=True).cross
    assert torch.allclose(result.segment_attr, cross[0, :, 0].mean(0), rtol=1e-5)


@pytest.mark.parametrize(("aggregation", "unit"), [("mean", "mean norm"), ("rollout", "share of rollout")])
def test_scores_are_named_by_what_puts_layers_together(aggregation: Any, unit: str) -> None:
    generation = generation_of(cn.NormAttribution(gpt2(), aggregation=aggregation))
    assert generation.attribute("Anna owns", " a boat.").explained.unit == unit


def test_generated_answers_are_the_models_own() -> None:
    model, before = gpt2(), state_of(gpt2())
    settings, ids = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}, encoded(PROMPT)
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :]
    result = generation_of(cn.NormAttribution(model)).attribute(PROMPT, gen_args=settings)
    assert result.explained.answer == tokenizer().decode(generated)
    given = generation_of(cn.NormAttribution(model)).attribute(PROMPT, generated)
    assert torch.equal(result.seq_attr, given.seq_attr)
    assert state_of(model) == before


def test_an_error_of_generate_without_arguments_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Never:
        raise TypeError("a fault of the model's")

    monkeypatch.setattr(gpt2(), "generate", fail)
    with pytest.raises(TypeError, match=r"^a fault of the model's$"):
        generation_of(cn.NormAttribution(gpt2())).attribute(PROMPT)


def test_a_model_in_training_answers_without_dropout() -> None:
    settings, model = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}, copy.deepcopy(gpt2())
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.9
    expected, found = (
        generation_of(cn.NormAttribution(model.train(training))).attribute(PROMPT, gen_args=settings)
        for training in (False, True)
    )
    assert found.explained.answer == expected.explained.answer
    assert torch.equal(found.seq_attr, expected.seq_attr)
    assert all(module.training for module in model.modules())


def test_sampling_stays_the_users() -> None:
    settings = {"max_new_tokens": 5, "do_sample": True, "temperature": 3.0, "eos_token_id": None}
    generation, ids = generation_of(cn.NormAttribution(gpt2())), encoded(PROMPT)
    torch.manual_seed(3)
    expected = gpt2().generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :]
    torch.manual_seed(3)
    assert generation.attribute(PROMPT, gen_args=settings).explained.answer == tokenizer().decode(expected)


def test_the_end_of_an_answer_is_no_token_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = generation_of(cn.NormAttribution(gpt2()))

    def generate(answer: list[int]) -> Callable[..., Tensor]:
        return lambda input_ids, **_: torch.cat([input_ids, torch.tensor([answer])], 1)

    monkeypatch.setattr(gpt2(), "generate", generate([*tokens_of_answer(), 1, 1]))
    assert generation.attribute(PROMPT).explained.answer == ANSWER
    monkeypatch.setattr(gpt2(), "generate", generate([1]))
    with pytest.raises(cn.InvalidInputError, match="nothing but the end"):
        generation.attribute(PROMPT)


@pytest.mark.parametrize("length", [62, 64])
def test_an_answer_ends_with_the_models_last_position(length: int) -> None:
    generation = generation_of(cn.NormAttribution(gpt2(), aggregation="mean"))
    result = generation.attribute(torch.full((length,), 7), gen_args={"max_new_tokens": 9, "eos_token_id": None})
    assert len(result.output_tokens) == 65 - length
    assert result.explained.answer == generation.attribute(torch.full((length,), 7)).explained.answer


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("hops", [0, 1, 2, 5])
def test_importance_takes_all_walks(seed: int, hops: int) -> None:
    torch.manual_seed(seed)
    first, count, size = 3, 4, 8
    rows = torch.rand(count, size, dtype=torch.float64).tril(first - 1)
    importance = torch.rand(size, dtype=torch.float64)
    step = torch.eye(size, dtype=torch.float64)
    step[first : first + count] = rows / rows.sum(1, keepdim=True)
    expected, before = importance @ torch.linalg.matrix_power(step, hops), importance.clone()
    found = handed_on(importance, rows, first, hops)
    assert torch.equal(importance, before)
    assert torch.allclose(found, expected, rtol=1e-12)
    assert torch.allclose(found.sum(), importance.sum(), rtol=1e-12)
    if hops > count:
        assert not found[first : first + count].any(), "a chain of four tokens has been walked to its beginning"


def test_a_token_that_rests_on_nothing_keeps_what_it_has() -> None:
    rows = torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    found = handed_on(torch.tensor([0.0, 0.4, 0.6]), rows, 1, 1)
    assert torch.allclose(found, torch.tensor([0.3, 0.7, 0.0]))


SENTENCES = [
    "Anna owns a red boat.", "Paul found an old ring in the garden.", "What does Anna own?", "Anna owns a red boat.",
]  # fmt: skip


def grouped(prompt: Prompt, segmentation: Segmentation) -> list[str]:
    """The texts of each segment's tokens, joined."""
    names, numbers = segments_of(prompt, segmentation)
    texts = token_texts(prompt.ids, tokenizer())
    pairs = list(zip(numbers, texts, strict=True))
    return ["".join(text for number, text in pairs if number == index).strip() for index in range(len(names))]


@pytest.mark.parametrize(
    ("segmentation", "expected"),
    [
        ("sentence", SENTENCES),
        ("line", [" ".join(SENTENCES[:2]), " ".join(SENTENCES[2:])]),
        ("paragraph", [TEXT]),
        ("word", re.findall(r"\w+|[.?]", TEXT)),
        (SENTENCES[1:3], SENTENCES[1:3]),
    ],
    ids=str,
)
def test_segments_hold_their_tokens(segmentation: Segmentation, expected: list[str]) -> None:
    prompt = read_prompt(TEXT, tokenizer())
    assert grouped(prompt, segmentation) == expected
    names, numbers = segments_of(prompt, segmentation)
    assert list(names) == expected
    assert numbers[0] == -1, "the start token belongs to no text"


def test_turns_of_a_conversation() -> None:
    turns = [{"role": "system", "content": SENTENCES[0]}, {"role": "user", "content": "\n".join(SENTENCES[1:3])}]
    prompt = read_prompt(turns, tokenizer())
    assert segments_of(prompt, "message")[0] == ["system", "user"]
    assert grouped(prompt, "message") == [SENTENCES[0], "\n".join(SENTENCES[1:3])]
    assert grouped(prompt, "sentence") == SENTENCES[:3], "what the template adds belongs to no sentence"


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        ("chapter", "expected word, sentence"),
        ("message", "no conversation"),
        (["green"], "not in the prompt"),
        ([SENTENCES[2], SENTENCES[1]], "not in the prompt, or not behind"),
        ([""], "not in the prompt"),
        (["A", "nna"], "no token of its own"),
    ],
)
def test_segments_that_are_refused(segmentation: Segmentation, message: str) -> None:
    with pytest.raises(cn.InvalidInputError, match=message):
        segments_of(read_prompt(TEXT, tokenizer()), segmentation)


def test_segments_of_white_space_ids_and_chinese() -> None:
    text = "Anna  owns\n\nPaul found"
    prompt = Prompt([3] * 7, text, offsets=[(0, 4), (4, 5), (5, 10), (10, 11), (11, 12), (12, 16), (16, 22)])
    assert segments_of(prompt, "paragraph")[1] == [0, 0, 0, -1, -1, 1, 1]
    assert segments_of(prompt, [" owns"])[1] == [-1, -1, 0, -1, -1, -1, -1]
    with pytest.raises(cn.InvalidInputError, match="pass the prompt as a text"):
        segments_of(Prompt([3, 4]), "sentence")
    prompt = read_prompt("你好。再见。", tokenizer())
    assert list(segments_of(prompt, "sentence")[0]) == ["你好。", "再见。"]

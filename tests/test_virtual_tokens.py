"""Prompt-learning adapters of PEFT: virtual tokens are positions of the maps, and scores are of the inputs."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from captum.attr import InputXGradient
from torch import Tensor

import captum_norm as cn
from captum_norm.lab.analysis import Corpus, analyze
from captum_norm.lab.analysis.corpus import SAMPLE
from captum_norm.results.aggregation import encoder_decoder_relevance, encoder_decoder_rollout
from tests import encoder_decoders, families
from tests.classifiers import classifier
from tests.commands.calls import TEXT, TOKENS, explain, written
from tests.tiny import WORDS, save_tiny, tokenizer

peft = pytest.importorskip("peft", reason="PEFT is not installed")

COUNT, LENGTH = 3, 6


def settings(kind: str, task: str = "CAUSAL_LM") -> Any:
    made = {
        "prompt": lambda: peft.PromptTuningConfig(task_type=task, num_virtual_tokens=COUNT),
        "p-tuning": lambda: peft.PromptEncoderConfig(task_type=task, num_virtual_tokens=COUNT, encoder_hidden_size=8),
        "prefix": lambda: peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=COUNT),
        "projected": lambda: peft.PrefixTuningConfig(
            task_type=task, num_virtual_tokens=COUNT, prefix_projection=True, encoder_hidden_size=8
        ),
    }
    return made[kind]()


def tuned(name: str, kind: str) -> Any:
    model = peft.get_peft_model(families.build(name), settings(kind)).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.prompt_encoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def gpt2(vocabulary: int) -> Any:
    config = hf.GPT2Config(vocab_size=vocabulary, n_embd=24, n_layer=2, n_head=4)
    return families.randomized(lambda: hf.GPT2LMHeadModel(config), 0, torch.float32)


def padded(ids: Tensor) -> dict[str, Tensor]:
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def plain(model: Any, ids: Tensor) -> tuple[Any, dict[str, Any]]:
    """The model inside, and what PEFT gives it for unpadded inputs: embeddings, or a cache of the prefix."""
    base, batch = model.get_base_model(), len(ids)
    with torch.no_grad():
        prompt = model.get_prompt(batch)
        if isinstance(prompt, Tensor):
            return base, {"inputs_embeds": torch.cat([prompt, base.get_input_embeddings()(ids)], 1)}
    return base, {"input_ids": ids, "past_key_values": prompt}


@pytest.mark.few
@pytest.mark.parametrize("name", ["gpt2", "opt"])
@pytest.mark.parametrize("kind", ["prompt", "p-tuning", "prefix", "projected"])
def test_maps_are_those_of_the_model_inside(name: str, kind: str) -> None:
    model, ids = tuned(name, kind), families.inputs(name, batch=2, length=LENGTH)
    base, inputs = plain(model, ids)
    before = model(ids).logits
    rows = LENGTH if "prefix" in kind or kind == "projected" else COUNT + LENGTH
    for make in (cn.NormAttribution, cn.ALTI, cn.ValueZeroing, cn.AttentionTimesGradient):
        options: Any = {"target": 5} if make.target == "always" else {}
        expected = make(base).maps(inputs, **options).self_attention
        maps = make(model).maps(ids, **options)
        assert maps.self_attention.shape == (2, 2, rows, COUNT + LENGTH)
        assert expected[..., :COUNT].abs().max() > 1e-3
        torch.testing.assert_close(maps.decoder, expected, rtol=0, atol=1e-11)
        assert (maps.virtual, maps.cached, maps.real.shape) == (COUNT, 0, (2, rows))
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_virtual_tokens_have_their_part_in_the_updates_of_a_logit(kind: str) -> None:
    model, ids = tuned("gpt2", kind), families.inputs("gpt2", batch=2, length=LENGTH)
    method, tokens = cn.ALTILogit(model), [[5, 7], [5, 7]]
    parts = method.decompose(padded(ids), tokens, position=[[2, 5], [3, 5]])
    assert parts.scores.shape == (2, 2, COUNT + LENGTH)
    assert (parts.scores.sum(-1) + parts.bias - parts.number).abs().max() < 1e-9
    assert parts.scores[..., :COUNT].abs().amin() > 0
    alone = method.decompose(ids[1:, 2:], [[5, 7]], position=[[1, 3]])
    with torch.no_grad():
        logits = model(ids[1:, 2:]).logits[:, -LENGTH + 2 :]
    torch.testing.assert_close(alone.number, logits[:, [1, 3], [5, 7]])
    real = torch.ones(COUNT + LENGTH, dtype=torch.bool)
    real[COUNT : COUNT + 2] = False
    torch.testing.assert_close(parts.scores[1:, :, real], alone.scores, rtol=0, atol=1e-10)
    assert not parts.scores[1:, :, ~real].any()
    torch.testing.assert_close(method.attribute(padded(ids), 7, position=5), parts.scores[:, 1, COUNT:])
    with pytest.raises(cn.InvalidInputError, match="got virtual tokens or cached positions"):
        cn.InformationFlow(model).graphs(ids)


@pytest.mark.parametrize("kind", ["prompt", "p-tuning", "prefix"])
def test_padding_moves_the_inputs_behind_the_virtual_tokens(kind: str) -> None:
    model, ids = tuned("gpt2", kind), families.inputs("gpt2", batch=2, length=LENGTH)
    for method in (cn.NormAttribution(model), cn.ALTI(model), cn.ValueZeroing(model)):
        batch, alone = method.maps(padded(ids)), method.maps(ids[1:, 2:])
        real = torch.ones(COUNT + LENGTH, dtype=torch.bool)
        real[COUNT : COUNT + 2] = False
        found = batch.self_attention[1:]
        rows = real[-found.shape[2] :]
        torch.testing.assert_close(found[:, :, rows][..., real], alone.decoder, rtol=0, atol=1e-11)
        assert (found[..., ~real] == 0).all()
        assert (found[:, :, ~rows] == 0).all()
        scores, expected = method.attribute(padded(ids))[1:], method.attribute(ids[1:, 2:])
        torch.testing.assert_close(scores[:, 2:], expected, rtol=0, atol=1e-11)
        assert (scores[:, :2] == 0).all()


def test_a_rollout_goes_on_to_a_prefix_in_every_layer() -> None:
    """A_2 A_1 with the prefix's rows: what a layer takes from it is not passed on further."""
    model, ids = tuned("gpt2", "prefix"), families.inputs("gpt2", batch=2, length=LENGTH)
    maps = cn.AttentionWeights(model, "attn_res").maps(ids).self_attention
    first, second = maps.unbind(1)
    shares = second[..., COUNT:] @ first
    shares[..., :COUNT] += second[..., :COUNT]
    rolled = cn.AttentionRollout(model).maps(ids).self_attention
    torch.testing.assert_close(rolled[:, 1], shares, rtol=0, atol=1e-12)
    torch.testing.assert_close(rolled.sum(-1), torch.ones(2, 2, LENGTH, dtype=torch.float64), rtol=0, atol=1e-12)
    for method in (cn.AttentionRollout(model), cn.AttentionWeights(model, "attn_res", "rollout")):
        scores = method.scores(method.maps(ids))
        torch.testing.assert_close(scores, shares[:, -1], rtol=0, atol=1e-12)
        torch.testing.assert_close(method.attribute(ids, position=-1), shares[:, -1, COUNT:], rtol=0, atol=1e-12)


def test_relevance_of_a_prefix_is_what_each_layer_adds() -> None:
    """(I + Ā_2)(I + Ā_1), where the prefix's own rows of Ā are 0."""
    model, ids = tuned("gpt2", "prefix"), families.inputs("gpt2", batch=1, length=LENGTH)
    method = cn.AttentionTimesGradient(model)
    maps = method.maps(ids, target=4)
    square = torch.zeros(2, COUNT + LENGTH, COUNT + LENGTH, dtype=torch.float64)
    square[:, COUNT:] = maps.self_attention[0]
    identity = torch.eye(COUNT + LENGTH, dtype=torch.float64)
    expected = ((identity + square[1]) @ (identity + square[0]))[-1]
    torch.testing.assert_close(method.scores(maps)[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["prompt", "p-tuning"])
def test_parts_of_an_output_are_those_of_virtual_tokens_and_inputs(kind: str) -> None:
    model, ids = tuned("gpt2", kind), families.inputs("gpt2", batch=2, length=LENGTH)
    inputs = padded(ids)
    with torch.no_grad():
        number = model(**inputs).logits[0, -1, 7]
    method = cn.DecompX(model)
    parts = method.decompose(inputs, 7)
    assert parts.scores.shape == (2, COUNT + LENGTH)
    assert parts.scores[:, :COUNT].abs().min() > 0
    torch.testing.assert_close(parts.scores.sum(1) + parts.bias, parts.number, rtol=0, atol=1e-11)
    torch.testing.assert_close(parts.number[0], number, rtol=0, atol=1e-11)
    scores = method.attribute(inputs, 7)
    assert torch.equal(scores, parts.scores[:, COUNT:])
    propagated = cn.DecompX(model, propagate=True).decompose(inputs, 7)
    torch.testing.assert_close(propagated.scores, parts.scores, rtol=0, atol=1e-11)
    base, plainly = plain(model, ids[:1])
    torch.testing.assert_close(cn.DecompX(base).decompose(plainly, 7).scores, parts.scores[:1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_positions_count_from_the_first_input(kind: str) -> None:
    model, ids = tuned("gpt2", kind), families.inputs("gpt2", batch=2, length=LENGTH)
    method = cn.NormAttribution(model, aggregation="mean")
    maps = method.maps(ids)
    mean = maps.self_attention.mean(1)[:, -LENGTH:]
    for position in (0, 2, -1):
        assert torch.equal(method.scores(maps, position), mean[:, position])
        assert torch.equal(method.attribute(ids, position=position), mean[:, position, COUNT:])
    torch.testing.assert_close(method.attribute(ids, position="mean"), mean.mean(1)[:, COUNT:], rtol=1e-6, atol=0)
    assert torch.equal(method.attribute(ids), mean[:, -1, COUNT:])
    with pytest.raises(cn.InvalidInputError, match=f"the sequence has {LENGTH} positions"):
        method.attribute(ids, position=LENGTH)


def test_gradients_are_of_the_inputs_embeddings() -> None:
    for kind in ("prompt", "prefix"):
        model, ids = tuned("gpt2", kind), families.inputs("gpt2", batch=2, length=LENGTH)
        table = model.get_base_model().get_input_embeddings().weight.detach()
        leaf = table[ids].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(inputs_embeds=leaf).logits[:, -3, 7].sum(), leaf)
        scores = cn.TokenAttribution(model, InputXGradient).attribute(ids, 7, position=-3)
        torch.testing.assert_close(scores, (gradient * table[ids]).sum(-1), rtol=1e-9, atol=1e-12)


def test_the_head_of_a_classifier_reads_the_first_virtual_token() -> None:
    """PEFT puts the prompt before [CLS], and BERT's pooler reads what comes first."""
    model = peft.get_peft_model(classifier(dtype=torch.float32), settings("prompt", "SEQ_CLS")).double().eval()
    ids = families.inputs("bert", batch=2, length=LENGTH)
    method = cn.NormAttribution(model, aggregation="mean")
    maps = method.maps(ids)
    mean = maps.self_attention.mean(1)
    torch.testing.assert_close(method.scores(maps), mean[:, 0])
    torch.testing.assert_close(method.attribute(ids), mean[:, 0, COUNT:])
    torch.testing.assert_close(method.attribute(ids, position="first"), mean[:, COUNT, COUNT:])


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_an_encoder_decoder_model(kind: str) -> None:
    bart = families.randomized(encoder_decoders.ENCODER_DECODERS["bart"].build, 0, torch.float32)
    model = peft.get_peft_model(bart, settings(kind, "SEQ_2_SEQ_LM")).double().eval()
    inputs = encoder_decoders.masked_inputs(target=5)
    source, target = inputs["input_ids"], inputs["decoder_input_ids"]
    before, beside = (COUNT, 0) if kind == "prompt" else (0, COUNT)
    for method in (cn.NormAttribution(model, "attn"), cn.AttentionWeights(model), cn.ALTI(model)):
        maps = method.maps(inputs)
        shapes = [stack.shape[2:] for stack in maps.of_three_stacks]
        assert shapes == [(before + 6, before + 6), (5, beside + 5), (5, before + 6)]
        alone = method.maps({"input_ids": source[1:, :4], "decoder_input_ids": target[1:]})
        for stack, expected in zip(maps.of_three_stacks, alone.of_three_stacks, strict=True):
            rows, columns = expected.shape[2:]
            torch.testing.assert_close(stack[1:, :, :rows, :columns], expected, rtol=0, atol=1e-11)
    shares = cn.ALTI(model).chain(cn.ALTI(model).maps(inputs))
    total = shares.source.sum(-1) + shares.prefix.sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-11)
    source_scores, prefix_scores = cn.ALTI(model).attribute(inputs)
    torch.testing.assert_close(source_scores, shares.source[:, -1, before:], rtol=0, atol=1e-12)
    torch.testing.assert_close(prefix_scores, shares.prefix[:, -1, beside:], rtol=0, atol=1e-12)
    parts: Any = cn.ALTILogit(model).decompose(inputs, [[3], [3]], position=[[4], [4]])
    total = sum(scores.sum(-1) for scores in parts.scores) + parts.bias
    torch.testing.assert_close(total, parts.number, rtol=0, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(parts.number[:, 0], model(**inputs).logits[:, -1, 3])


def test_chains_of_three_stacks_with_a_prefix_are_those_of_square_maps() -> None:
    """With rows for the prefix: its own share in self-attention, none in cross-attention."""
    generator = torch.Generator().manual_seed(2)
    encoder, decoder, cross = (
        torch.rand(2, 3, *shape, generator=generator, dtype=torch.float64) for shape in ((4, 4), (3, 5), (3, 4))
    )
    cross = cross / 5
    for chain, own in ((encoder_decoder_rollout, 1.0), (encoder_decoder_relevance, 0.0)):
        square, wide = torch.zeros(2, 3, 5, 5, dtype=torch.float64), torch.zeros(2, 3, 5, 4, dtype=torch.float64)
        square[:, :, 2:], wide[:, :, 2:] = decoder, cross
        square[:, :, [0, 1], [0, 1]] = own
        expected = [scores[:, 2:] for scores in chain(encoder, square, wide)]
        for found, wanted in zip(chain(encoder, decoder, cross), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


def test_tokens_name_virtual_tokens() -> None:
    encoded = tokenizer()(["a b"], return_tensors="pt")
    encoded.pop("token_type_ids", None)
    for kind in ("prompt", "prefix"):
        model = peft.get_peft_model(gpt2(400), settings(kind)).eval()
        maps = cn.NormAttribution(model).maps(encoded)
        (texts,) = maps.tokens or []
        assert list(texts) == ["[virtual 1]", "[virtual 2]", "[virtual 3]", *encoded.encodings[0].tokens]
        assert len(texts) == maps.self_attention.shape[-1]
        measured = cn.NormMeter(model).measure(encoded, scopes=["attn"])["decoder"]
        assert (measured.tokens, measured.virtual) == (maps.tokens, COUNT)


def test_other_states_of_an_adapter() -> None:
    """Disabled, and enabled again; a LoRA adapter has no virtual tokens."""
    model, ids = tuned("gpt2", "prompt"), families.inputs("gpt2", batch=2, length=LENGTH)
    method, base = cn.NormAttribution(model), cn.NormAttribution(deepcopy(model.get_base_model()))
    with model.disable_adapter():
        maps = method.maps({"input_ids": ids})
    assert (maps.virtual, maps.self_attention.shape[-1]) == (0, LENGTH)
    torch.testing.assert_close(maps.decoder, base.maps(ids).decoder, rtol=0, atol=1e-12)
    assert method.maps(ids).self_attention.shape[-1] == COUNT + LENGTH


def test_what_is_refused() -> None:
    model, ids = tuned("gpt2", "prefix"), families.inputs("gpt2", batch=2, length=LENGTH)
    with pytest.raises(cn.InvalidInputError, match="got 3 virtual tokens of a tuned prefix"):
        cn.DecompX(model).attribute(ids, target=3)
    # PEFT would put its virtual tokens behind a cache, or replace it.
    cache: Any = model.get_base_model()(ids[:, :4], use_cache=True).past_key_values
    with pytest.raises(cn.InvalidInputError, match="puts its virtual tokens before the inputs of every call"):
        cn.NormAttribution(model).maps({"input_ids": ids[:, 4:], "past_key_values": cache})
    assert cache.get_seq_length() == 4
    with pytest.raises(cn.InvalidInputError, match=r"a sequence of 62 positions after 3 others; .* allows at most 64"):
        cn.NormAttribution(tuned("gpt2", "prompt")).maps(torch.ones(1, 62, dtype=torch.long))


def test_the_command_shows_virtual_tokens(tmp_path: Path) -> None:
    base = hf.GPT2LMHeadModel.from_pretrained(save_tiny(gpt2(len(WORDS)), tmp_path / "base"))
    model = peft.get_peft_model(base, settings("prefix")).eval()
    model.save_pretrained(str(tmp_path / "adapter"))
    out = tmp_path / "explained.json"
    assert explain("--model", str(tmp_path / "adapter"), "--out", str(out), "--out", str(tmp_path / "map.png")) == 0
    content = written(out)
    assert content["tokens"] == ["[virtual 1]", "[virtual 2]", "[virtual 3]", *TOKENS]
    method, inputs = cn.NormAttribution(model), tokenizer()(TEXT, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    maps = method.maps(inputs)
    torch.testing.assert_close(torch.tensor(content["scores"]), method.scores(maps)[0], rtol=1e-5, atol=1e-7)
    values = torch.tensor(content["map"]["values"])[:, COUNT:]
    torch.testing.assert_close(values, maps.self_attention[0], rtol=1e-5, atol=1e-7)
    with pytest.raises(cn.UnsupportedModelError, match="virtual tokens, which stand for no text of the corpus"):
        analyze("special-tokens", model, tokenizer(), Corpus(SAMPLE, limit=4))

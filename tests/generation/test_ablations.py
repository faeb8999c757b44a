"""Log-probabilities of an answer without sources are those of each shorter prompt alone."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tokenizers import processors
from torch import Tensor

from captum_norm.errors import InvalidInputError
from captum_norm.generation import SegmentKind
from captum_norm.generation.ablations import SourceAblations
from tests.families.family import new
from tests.generation.texts import gpt2, llama, tokenizer
from tests.versions import older

PASSAGES = ["Anna owns a red boat.", "Paul found an old ring in the garden.", "Anna found a boat.", "Paul owns a ring."]
QUESTION, ANSWER = "What does Anna own? Anna owns", " a red boat."
PROMPT = "\n".join([*PASSAGES, QUESTION])

SIZES = {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 32, "max_position_embeddings": 90}
LAYERS = SIZES | {"num_hidden_layers": 2, "pad_token_id": 1}
# Other frequencies behind 30 tokens, which some ablated prompts have.
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 30, "factor": 3.0,
    "short_factor": [1.0] * 3, "long_factor": [4.0] * 3,
}  # fmt: skip
HALVES = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 1, "pad_token_id": 1}
MODELS: dict[str, Callable[[int], Any]] = {
    "gpt2": lambda words: new("GPT2LMHeadModel", vocab_size=words, n_positions=90, n_embd=24, n_layer=2, n_head=4)(),
    "llama": lambda words: new("LlamaForCausalLM", vocab_size=words, num_key_value_heads=2, **LAYERS)(),
    "longrope": lambda words: new("LlamaForCausalLM", vocab_size=words, rope_parameters=LONGROPE, **LAYERS)(),
    "gemma2": lambda words: new("Gemma2ForCausalLM", vocab_size=words, sliding_window=9, head_dim=6, **LAYERS)(),
    "bloom": lambda words: new("BloomForCausalLM", vocab_size=words, hidden_size=24, n_layer=2, n_head=4)(),
    "opt": lambda words: new("OPTForCausalLM", vocab_size=words, ffn_dim=32, word_embed_proj_dim=24, **LAYERS)(),
    "mamba": lambda words: new("MambaForCausalLM", vocab_size=words, hidden_size=24, num_hidden_layers=2)(),
    "t5": lambda words: new(
        "T5ForConditionalGeneration", vocab_size=words, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4,
        decoder_start_token_id=1, pad_token_id=1,
    )(),
    "bart": lambda words: new(
        "BartForConditionalGeneration", vocab_size=words, max_position_embeddings=90, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, **HALVES,
    )(),
}  # fmt: skip

# Mamba's scan, BLOOM's position biases and Gemma's softmax are in float32, as T5's before transformers 5.15.
TOLERANCES = {"mamba": 1e-6, "bloom": 1e-8, "gemma2": 1e-6, "t5": 1e-6 if older("5.15") else 1e-11}


def double(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name](len(tokenizer())).double().train(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@torch.no_grad()
def alone(model: Any, text: str, answer: str) -> Tensor:
    """The log-probability of each token of an answer after a text, in a call without other texts."""
    encode = partial(tokenizer(), return_tensors="pt")
    if model.config.is_encoder_decoder:
        target = encode(text_target=answer)["input_ids"]
        begin = torch.full((1, 1), model.config.decoder_start_token_id)
        logits = model(encode(text)["input_ids"], decoder_input_ids=torch.cat([begin, target], 1)).logits[0]
        found: Tensor = logits[: target.shape[1]].log_softmax(-1).gather(1, target[0, :, None])[:, 0]
        return found
    before, whole = encode(text)["input_ids"].shape[1], encode(text + answer)["input_ids"]
    rows: Tensor = model(whole).logits[0].log_softmax(-1)[:-1].gather(1, whole[0, 1:, None])[:, 0]
    return rows[before - 1 :]


def random_kept(count: int, sources: int) -> Tensor:
    kept = torch.rand(count, sources, generator=torch.Generator().manual_seed(count)) < 0.5
    kept[0], kept[1] = True, False
    kept[-1] = kept[2]
    return kept


@pytest.mark.parametrize("batch_tokens", [1, 130, 10_000])
@pytest.mark.parametrize("name", MODELS)
def test_probabilities_are_those_of_each_text_alone(name: str, batch_tokens: int) -> None:
    model = double(name)
    ablations = SourceAblations(model, tokenizer(), PROMPT, ANSWER, segments=PASSAGES, batch_tokens=batch_tokens)
    kept = random_kept(9, len(PASSAGES))
    found = ablations.log_probabilities(kept)
    for row, stays in zip(found, kept, strict=True):
        text = "\n".join([*(text for text, stay in zip(PASSAGES, stays, strict=True) if stay), QUESTION])
        assert torch.allclose(row, alone(model, text, ANSWER).double(), rtol=0, atol=TOLERANCES.get(name, 1e-11))
    assert ablations.sources == tuple(PASSAGES)
    assert ablations.answer_text.endswith(ANSWER)


@pytest.mark.parametrize(("name", "shares"), [("llama", True), ("gemma2", False)])
def test_what_texts_begin_with_is_run_once_where_the_cache_has_all_of_it(name: str, shares: bool) -> None:
    model, seen = double(name), list[tuple[int, ...]]()
    model.register_forward_pre_hook(
        lambda _, args, given: seen.append(tuple((args[0] if args else given["input_ids"]).shape)), with_kwargs=True
    )
    ablations = SourceAblations(model, tokenizer(), PROMPT, ANSWER, segments=PASSAGES)
    # Both texts begin with <s> and the first two passages, and lack the third one or the fourth.
    ablations.log_probabilities(~torch.eye(4, dtype=torch.bool)[2:])
    begin = 1 + sum(map(ablations.numbers.count, (0, 1)))
    rest = max(map(ablations.numbers.count, (2, 3))) + len(tokenizer()(QUESTION + ANSWER)["input_ids"]) - 2
    assert seen[-1] == (2, rest if shares else begin + rest)
    assert seen[:-1] == [(1, begin)]


@pytest.mark.parametrize(("segments", "removed"), [("word", 6), ("sentence", 1)])
def test_words_and_sentences(segments: SegmentKind, removed: int) -> None:
    text = f"{PASSAGES[0]} {PASSAGES[1]}\n{QUESTION}"
    ablations = SourceAblations(gpt2(), tokenizer(), text, ANSWER, segments=segments)
    kept = torch.ones(1, len(ablations.sources), dtype=torch.bool)
    kept[0, :removed] = False
    assert "".join(ablations.sources[:removed]) == PASSAGES[0].replace(" ", "" if removed > 1 else " ")
    shorter = alone(gpt2(), f" {PASSAGES[1]}\n{QUESTION}", ANSWER)
    assert torch.allclose(ablations.log_probabilities(kept)[0], shorter.double(), atol=1e-4)


def test_a_chat_template_stays() -> None:
    messages = [{"role": "system", "content": PASSAGES[0]}, {"role": "user", "content": QUESTION}]
    ablations = SourceAblations(llama(), tokenizer(), messages, "Anna", segments="message")
    found = ablations.log_probabilities(torch.tensor([[True, True], [False, True]]))
    rendered = "<|system|>\n{}\n<|user|>\n" + QUESTION + "\n<|assistant|>\n"
    ids = [tokenizer()(rendered.format(said), add_special_tokens=False)["input_ids"] for said in (PASSAGES[0], "")]
    answer = tokenizer()("Anna", add_special_tokens=False)["input_ids"]
    for row, prompt in zip(found, ids, strict=True):
        with torch.no_grad():
            logits = llama()(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)
        expected = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert torch.allclose(row, expected.double(), atol=1e-4)


def test_an_answer_is_generated() -> None:
    ablations = SourceAblations(
        gpt2(), tokenizer(), PASSAGES[0] + "\n" + QUESTION, segments=PASSAGES[:1], gen_args={"max_new_tokens": 4}
    )
    found = ablations.log_probabilities(torch.ones(1, 1, dtype=torch.bool))
    assert len(ablations.answer) == found.shape[1] <= 4


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (torch.ones(2, 3, dtype=torch.bool), r"got kept \(2, 3\), torch.bool; expected True or False .* \(N, 4\)"),
        (torch.ones(2, 4), "torch.float32"),
        ([[True] * 4], "got kept list"),
    ],
)
def test_other_masks_are_refused(kept: Any, message: str) -> None:
    ablations = SourceAblations(double("gpt2"), tokenizer(), PROMPT, ANSWER, segments=PASSAGES)
    with pytest.raises(InvalidInputError, match=message):
        ablations.log_probabilities(kept)


def test_something_must_stay() -> None:
    ids = tokenizer()(PASSAGES[0])["input_ids"]
    plain = copy.deepcopy(tokenizer())
    plain.backend_tokenizer.post_processor = processors.ByteLevel()  # begins no text with <s>
    none = torch.zeros(1, 1, dtype=torch.bool)
    with_start, without = (
        SourceAblations(gpt2(), each, PASSAGES[0], " Paul", segments="line") for each in (tokenizer(), plain)
    )
    with torch.no_grad():
        first = gpt2()(torch.tensor([ids[:1]])).logits[0, -1].log_softmax(-1)[with_start.answer[0]]
    assert torch.allclose(with_start.log_probabilities(none)[0, 0], first.double())
    with pytest.raises(InvalidInputError, match="no token is left in the prompt; leave some text"):
        without.log_probabilities(none)

"""How much each token of an answer depends on its context is what two plain forward passes say."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import InputXGradient
from torch import Tensor, nn

import captum_norm as cn
from captum_norm.generation import GenerationResult
from captum_norm.generation.prompts import read_prompt, without_context
from tests.generation.test_generation import generation_of, t5
from tests.generation.texts import ANSWER, PROMPT, encoded, gpt2, llama, tokenizer, tokens_of_answer

CONTEXT = "Anna owns a red boat."
REST = " Paul found"
TURNS = [{"role": "system", "content": CONTEXT}, {"role": "user", "content": f"Paul?\n{CONTEXT}\n\nAnna?"}]


def without() -> Tensor:
    """The prompt's tokens without the context's; the start token stays."""
    rest = tokenizer()(REST, add_special_tokens=False)["input_ids"]
    return torch.cat([encoded("")[:, :1], torch.tensor([rest])], 1)


def probabilities(model: Any, prompt: Tensor, answer: list[int]) -> Tensor:
    """What the model predicts at each token of the answer, (R, V), by one plain pass."""
    if model.config.is_encoder_decoder:
        begun = torch.tensor([[model.config.decoder_start_token_id, *answer[:-1]]])
        logits = model(input_ids=prompt, decoder_input_ids=begun).logits[0]
    else:
        logits = model(torch.cat([prompt, torch.tensor([answer[:-1]])], 1)).logits[0, prompt.shape[1] - 1 :]
    found: Tensor = logits.detach().softmax(-1)
    return found


@pytest.mark.parametrize("outputs", [None, (1, 4)])
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("make", [gpt2, llama, lambda _: t5()], ids=["gpt2", "llama", "t5"])
def test_dependence_is_that_of_two_passes(make: Any, seed: int, outputs: Any) -> None:
    model, answer, rows = copy.deepcopy(make(seed)).double(), tokens_of_answer(), slice(*(outputs or (0, None)))
    known, other = (probabilities(model, prompt, answer)[rows] for prompt in (encoded(PROMPT), without()))
    chosen = torch.arange(len(known)), torch.tensor(answer)[rows]
    found: Any = generation_of(cn.ALTI(model)).attribute(PROMPT, answer, outputs=outputs, context=CONTEXT)
    torch.testing.assert_close(found.pcxmi, (known / other)[chosen].log(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found.kl, (known * (known / other).log()).sum(1), rtol=1e-11, atol=1e-11)
    assert found.dependent == (found.kl >= 0.1).tolist()
    assert found.explained.context == [CONTEXT]
    plain: Any = generation_of(cn.ALTI(model)).attribute(PROMPT, answer, outputs=outputs)
    assert torch.equal(found.token_attr, plain.token_attr)
    assert (plain.pcxmi, plain.kl, plain.dependent) == (None, None, None)


def test_what_a_model_never_says_adds_nothing() -> None:
    model = copy.deepcopy(gpt2())
    never = torch.zeros(len(tokenizer()))
    never[7] = -torch.inf
    model.lm_head = nn.Linear(24, len(tokenizer()))
    model.lm_head.weight, model.lm_head.bias = model.transformer.wte.weight, nn.Parameter(never)
    found: Any = generation_of(cn.NormAttribution(model)).attribute(PROMPT, ANSWER, context=CONTEXT)
    known, other = (probabilities(model, prompt, tokens_of_answer()) for prompt in (encoded(PROMPT), without()))
    divergence = torch.nn.functional.kl_div(other.log(), known, reduction="none")
    kept = torch.arange(len(never)) != 7
    torch.testing.assert_close(found.kl, divergence[:, kept].sum(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "context", "left"),
    [
        (PROMPT, CONTEXT, f"<s>{REST}"),
        (PROMPT, ["Anna", "boat"], f"<s> owns a red.{REST}"),
        ("Anna owns.\n\nPaul found.\n\nWhat", ["Anna owns.", "Paul found."], "<s>What"),
        ("What\n Paul \n\n own", "Paul", "<s>What\n own"),
        (TURNS, [CONTEXT], f"<|system|>\n\n<|user|>\nPaul?\n{CONTEXT}\n\nAnna?\n<|assistant|>\n"),
        (TURNS, [CONTEXT, CONTEXT], "<|system|>\n\n<|user|>\nPaul?\nAnna?\n<|assistant|>\n"),
    ],
)
def test_the_rest_of_a_prompt(prompt: Any, context: Any, left: str) -> None:
    assert tokenizer().decode(without_context(read_prompt(prompt, tokenizer()), context)) == left


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        cn.DecompX,
        lambda model: cn.TokenAttribution(model, InputXGradient),
        lambda model: cn.NormAttribution(model, aggregation="rollout"),
    ],
    ids=["one pass", "a pass each", "states"],
)
def test_outputs_below_the_threshold_are_not_explained(make: Any, per_token: bool) -> None:
    generation, options = generation_of(make(llama())), {"context": CONTEXT, "segments": "word"}
    every: Any = generation.attribute(PROMPT, ANSWER, context=CONTEXT)
    least = float(every.kl.median())
    few: Any = generation.attribute(PROMPT, ANSWER, per_token=per_token, context_threshold=least, **options)
    kept = every.kl >= least
    assert few.dependent == kept.tolist()
    assert 0 < sum(few.dependent) < len(few)
    scale = float(every.token_attr.abs().max())
    rows = every.token_attr * kept[:, None]
    assert torch.allclose(few.seq_attr, rows.sum(0), rtol=1e-4, atol=1e-5 * scale)
    if per_token:
        assert torch.allclose(few.token_attr, rows, rtol=1e-4, atol=1e-6 * scale)
        assert not few.token_attr[~kept].any()
    if few.segment_attr is not None:
        assert float(few.segment_attr.sum()) == pytest.approx(
            float(few.seq_attr[1 : few.prompt_length].sum()), rel=1e-4
        )
    none: Any = generation.attribute(PROMPT, ANSWER, per_token=per_token, context_threshold=1e9, context=CONTEXT)
    assert not none.seq_attr.any()
    assert (none.token_attr is None) is not per_token
    assert none.convergence_delta is None
    assert none.facts()["depend on the context"] == "none"
    assert len(none.outputs) == len(none)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": "green"}, r"^the context 'green' is not in the prompt, or not behind the one before it; give"),
        ({"context": ["Paul", "Anna"]}, "the context 'Anna' is not in the prompt, or not behind"),
        ({"context": " "}, "the context ' ' is not in the prompt"),
        ({"context": 5}, "^got the context 5; expected a sequence of their texts"),
        ({"context": PROMPT}, "which is all or nothing of the prompt; pass a part of it$"),
        ({"context": []}, r"^got the context \[\], which is all or nothing of the prompt"),
        ({"context": "nna"}, "the context 'nna' has no token of its own"),
        ({"prompt": [TURNS[0]], "context": CONTEXT}, "which is all or nothing of the prompt"),
        ({"prompt": torch.tensor([[5, 6]]), "context": "A"}, "^got context=, but .*: pass the prompt as a text"),
        ({"context_threshold": 0.1}, "^got context_threshold=, which needs context="),
        ({"context": CONTEXT, "context_threshold": "low"}, "^got context_threshold 'low'; expected a number"),
        ({"context": CONTEXT, "context_threshold": 0.1, "per_token": False}, "does not add the vectors of all outputs"),
        ({"context": CONTEXT, "context_threshold": 0.1, "segments": "word"}, "does not add the vectors of all outputs"),
    ],
)
def test_contexts_that_are_refused(options: dict[str, Any], message: str) -> None:
    generation = generation_of(cn.NormAttribution(gpt2(), aggregation="mean"))
    with pytest.raises(cn.InvalidInputError, match=message):
        generation.attribute(**{"prompt": PROMPT, "target": tokens_of_answer(), **options})


def test_a_model_without_a_head_predicts_nothing() -> None:
    with pytest.raises(cn.UnsupportedModelError, match="got context=, but GPT2Model returns no logits; take a model"):
        generation_of(cn.NormAttribution(gpt2().transformer)).attribute(PROMPT, ANSWER, context=CONTEXT)


@pytest.fixture(scope="module")
def result() -> Any:
    answer = [*tokens_of_answer(), *tokenizer()(" ancient", add_special_tokens=False)["input_ids"]]
    generation, options = generation_of(cn.DecompX(gpt2())), {"context": CONTEXT}
    least = float(generation.attribute(PROMPT, answer, **options).kl.median())
    return generation.attribute(PROMPT, answer, **options, context_threshold=least)


def test_results_keep_the_dependence_of_each_token(result: Any) -> None:
    first, last = result[0], result[-1]
    assert (first.pcxmi, first.kl) == (result.pcxmi[:1], result.kl[:1])
    assert last.dependent == result.dependent[-1:]
    words = result.words()
    pieces = slice(len(tokens_of_answer()), None)
    assert words.output_tokens[-1].strip() == "ancient"
    assert float(words.pcxmi[-1]) == pytest.approx(float(result.pcxmi[pieces].sum()))
    assert words.kl[-1] == result.kl[pieces].max()
    assert len(words.dependent) == len(words)
    rows = [row for row in result.records() if row["index"] == 0]
    assert rows[0]["pcxmi"] == pytest.approx(float(result.pcxmi.sum()))
    assert [row["kl"] for row in rows[1:]] == result.kl.tolist()
    content = json.loads(result.file_bytes(".json"))
    assert (content["pcxmi"], content["kl"]) == (result.pcxmi.tolist(), result.kl.tolist())
    assert (content["context"], content["context_threshold"]) == ([CONTEXT], float(result.kl.median()))
    shown = [f"“{text}”" for text, depends in zip(result.output_tokens, result.dependent, strict=True) if depends]
    assert result.facts()["depend on the context"] == ", ".join(shown)


@pytest.mark.parametrize("version", ["1", "2", "3"])
def test_files_without_a_context_are_read(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from captum_norm.results import base

    whole = generation_of(cn.DecompX(gpt2())).attribute(PROMPT, ANSWER)
    encode = base._encoded_fields

    def earlier(result: Any) -> Any:
        content, tensors = encode(result)
        explained = {name: value for name, value in content["explained"].items() if not name.startswith("context")}
        return {name: content[name] for name in content if name not in ("pcxmi", "kl")} | {
            "explained": explained
        }, tensors

    monkeypatch.setattr(base, "_encoded_fields", earlier)
    monkeypatch.setattr(base, "VERSION", int(version))
    path = whole.save(tmp_path / "answer.safetensors")
    monkeypatch.undo()
    found = GenerationResult.load(path)
    assert found == whole
    assert (found.pcxmi, found.kl, found.explained.context) == (None, None, [])


def test_the_page_greys_what_owes_the_context_nothing(result: Any) -> None:
    page = result.page()
    assert page.examples[0].dependent == result.dependent
    assert page.lead.endswith(f"predicts the same there (KL below {float(result.kl.median()):g} nats).")
    gain, kl = (f"{float(numbers[0]):.2f}".replace("-", "−") for numbers in (result.pcxmi, result.kl))
    assert re.search(rf" %; P-CXMI {gain}, KL {kl} nats$", page.examples[0].outputs.likely[0])
    plain = generation_of(cn.DecompX(gpt2())).attribute(PROMPT, ANSWER).page()
    assert (plain.lead, plain.examples[0].dependent) == ("", None)

"""Answers of servers are restored token by token, compared with the model, and refused where they do not fit it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import captum_norm as cn
from captum_norm import InvalidInputError
from captum_norm.generation import read_response
from captum_norm.generation.prompts import segments_of
from captum_norm.loading import LANGUAGE_MODEL, load
from tests.generation.servers import OF_MESSAGES, OF_TEXTS, Said, chat, completions, llama_cpp, text_alone
from tests.generation.texts import ANSWER, PROMPT, gpt2, llama, tokenizer

TURNS = [{"role": "system", "content": "Anna owns a boat."}, {"role": "user", "content": "What does Anna own?"}]
CALL = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"who": "Anna", "what": "boat"}'}}
CALLING = [
    {"role": "user", "content": [{"type": "text", "text": "What does Anna own?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "a red boat"},
]
CALLS = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] %}<call>{{ call.function | tojson }}</call>{% endfor %}\n{% endfor %}"
)


def said_of_text(model: Any = None) -> Said:
    ids = tokenizer()(PROMPT)["input_ids"]
    answer = tokenizer()(ANSWER, add_special_tokens=False)["input_ids"]
    return Said(model or gpt2(), tokenizer(), ids, answer, tokenizer().eos_token_id, text=PROMPT)


def said_of_messages(model: Any = None, turns: Any = TURNS) -> Said:
    text = tokenizer().apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    return replace(said_of_text(model), prompt=ids, text=None, messages=turns)


def read(record: Any, **options: Any) -> Any:
    return read_response(json.loads(json.dumps(record)), tokenizer(), **options)


def explained(response: Any, model: Any = None) -> Any:
    return cn.GenerationAttribution(cn.DecompX(model or gpt2()), tokenizer()).attribute(
        response.prompt, response.answer
    )


@pytest.mark.parametrize("shape", OF_TEXTS)
def test_completions_are_restored(shape: str) -> None:
    said = said_of_text()
    response = read(OF_TEXTS[shape](said))
    assert response.prompt.ids == said.prompt
    assert response.answer == said.answer
    assert response.prompt.offsets is not None  # segments can be found
    result = explained(response)
    direct = cn.GenerationAttribution(cn.DecompX(gpt2()), tokenizer()).attribute(torch.tensor(said.prompt), said.answer)
    assert torch.equal(result.token_attr, direct.token_attr)
    result = response.checked(result)
    gap = result.explained.gap
    if shape == "text":
        assert gap is None
        assert result.explained.note.endswith("no log-probability of the server to compare with the model's own.")
    else:
        assert response.log_probabilities == said.log_probabilities()[:-1]
        assert gap[0] <= gap[1] < 1e-5  # float32 here and there
        assert f"differ by {gap[0]:.2g} nats on average, by {gap[1]:.2g} at most." in result.explained.note


@pytest.mark.parametrize("shape", OF_MESSAGES)
@pytest.mark.parametrize("model", [gpt2, llama])
def test_chats_are_restored_with_their_turns(shape: str, model: Callable[[], Any]) -> None:
    said = said_of_messages(model())
    response = read(OF_MESSAGES[shape](said))
    assert (response.prompt.ids, response.answer) == (said.prompt, said.answer)
    assert response.prompt.roles == ["system", "user"]
    assert response.checked(explained(response, model())).explained.gap[1] < 1e-5


def test_the_shipped_model_answers(tmp_path: Path) -> None:
    model, words = load(LANGUAGE_MODEL)
    text = "Clara found a tiny silver ring in the garden. Nobody knows why.\nWhat did Clara find? Clara found"
    generation = cn.GenerationAttribution(cn.DecompX(model), words)
    parts = (text, generation.attribute(text).explained.answer, "\n")
    ids, answer, end = (words(part, add_special_tokens=False)["input_ids"] for part in parts)
    ids = [words.bos_token_id, *ids]
    said = Said(model, words, ids, answer, end[0], text=text)  # it ends with a line, not with a token of its own
    for name, shape in OF_TEXTS.items():
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(shape(said)))
        response = read_response(file, words)
        assert (response.prompt.ids, response.answer) == (ids, answer), name
        gap = response.checked(generation.attribute(response.prompt, response.answer)).explained.gap
        assert gap is None or gap[1] < 1e-4, name


def test_tool_calls_are_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer(), "chat_template", CALLS)
    message = {"role": "assistant", "content": "a red boat"}
    response = read({"request": {"messages": CALLING}, "response": {"choices": [{"message": message}]}})
    call = '<call>{"name": "find", "arguments": {"who": "Anna", "what": "boat"}}</call>'
    assert response.prompt.text == f"<|user|>\nWhat does Anna own?<|assistant|>\n{call}<|tool|>\na red boat"
    assert response.prompt.roles == ["user", "call of find", "tool"]
    parts = [response.prompt.text[start:end] for start, end in response.prompt.messages]
    assert parts == ["What does Anna own?", 'find", "arguments": {"who": "Anna", "what": "boat', "a red boat"]
    names, numbers = segments_of(response.prompt, "message")
    assert names == response.prompt.roles
    assert set(numbers) == {-1, 0, 1, 2}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({}, "tool_calls"),
        ({"function": {"name": "find", "arguments": "{"}}, "arguments"),
        ({"function": {"name": "find", "arguments": "{}"}, "id": 3}, "leaves out the call of 'find'"),
    ],
)
def test_tool_calls_that_are_refused(call: Any, message: str) -> None:
    turns = [CALLING[0], {"role": "assistant", "content": None, "tool_calls": [call]}, CALLING[2]]
    with pytest.raises(InvalidInputError, match=message):
        read({"request": {"messages": turns}, "response": {"choices": [{"text": " a"}]}})


def test_a_prompt_of_the_servers_own_is_taken_as_it_is() -> None:
    """Its template may have a date in it: the ids count, and text and segments come from them."""
    said = replace(said_of_messages(), prompt=tokenizer()("Anna owns a boat. Paul found")["input_ids"])
    response = read(chat(said))
    assert response.prompt.ids == said.prompt
    assert response.prompt.messages == ()
    assert "Anna owns a boat." in response.prompt.text
    generation = cn.GenerationAttribution(cn.DecompX(gpt2()), tokenizer())
    assert (
        generation.attribute(response.prompt, response.answer, segments=["Anna owns a boat."]).segment_attr is not None
    )


def test_one_of_several_answers() -> None:
    said = said_of_text()
    other = replace(said, answer=said.answer[:3])
    record = completions(said)
    record["response"]["choices"] += completions(other)["response"]["choices"]
    assert read(record).answer == said.answer
    assert read(record, choice=1).answer == other.answer
    assert (
        read({"request": {"prompt": PROMPT}, "response": [llama_cpp(said), llama_cpp(other)]}, choice=1).answer
        == other.answer
    )
    with pytest.raises(InvalidInputError, match="got choice 2 of a response that has 2"):
        read(record, choice=2)


def test_another_model_is_refused_with_the_number() -> None:
    said = said_of_text()
    response = read(completions(said))
    other = gpt2(2)
    result = explained(response, other)
    mean, largest = response.checked(result, max_gap=100).explained.gap
    theirs, ours = said.log_probabilities()[:-1], replace(said, model=other).log_probabilities()[:-1]
    differences = [abs(a - b) for a, b in zip(theirs, ours, strict=True)]
    assert mean == pytest.approx(sum(differences) / len(differences), rel=1e-4)
    assert largest == pytest.approx(max(differences), rel=1e-4)
    with pytest.raises(InvalidInputError, match=f"of GPT2LMHeadModel differ by {mean:.2g} nats on average"):
        response.checked(result)
    assert response.checked(result, max_gap=mean).explained.note
    with pytest.raises(InvalidInputError, match="max_gap"):
        response.checked(result, max_gap=float("nan"))


def changed(record: Any, *path: Any, value: Any) -> Any:
    """A copy of a record with one entry replaced."""
    copied = json.loads(json.dumps(record))
    place = copied
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return copied


TEXTS, CHAT = completions(said_of_text(), ids=False), chat(said_of_messages(), ids=False)
FIRST = ("response", "choices", 0)
REFUSED: list[tuple[Any, str]] = [
    ([], "got choice 0 of a response that has 0"),
    ({}, "expected an object with the server's answer"),
    ({"response": 7}, "expected an object with the server's answer"),
    ({"response": {"error": {"message": "no"}}}, "expected an object with the server's answer"),
    ({"response": {"choices": []}}, "got choice 0 of a response that has 0"),
    ({"response": "{"}, "got the response '{'; expected an object with the server's answer"),
    (changed(TEXTS, "request", value=3), "got request=3 in a request or response; expected an object"),
    (changed(TEXTS, "request", value={}), "without its prompt"),
    (changed(TEXTS, "request", "prompt", value=["a", "b"]), "expected token ids"),
    (changed(TEXTS, "request", "prompt", value=PROMPT + " an"), "prompt has 9 tokens, the tokenizer's 10"),
    (changed(TEXTS, *FIRST, "text", value=None), "an answer without text"),
    (changed(TEXTS, *FIRST, "text", value=3), "got text=3 in a request or response; expected a text"),
    (changed(TEXTS, *FIRST, "token_ids", value=["a"]), "expected token ids"),
    (changed(TEXTS, *FIRST, "token_ids", value=[2**40]), "expected token ids"),
    (changed(TEXTS, *FIRST, "token_ids", value=[7, 8]), "token 0 of the answer is ' an' for the server"),
    (
        changed(TEXTS, *FIRST, "logprobs", "tokens", value=[" a"] * 9),
        "token 0 of the answer is ' a' for the server, but 'an'",
    ),
    (changed(TEXTS, *FIRST, "logprobs", "token_logprobs", value=["a"] * 9), "as a token of a response"),
    (changed(TEXTS, *FIRST, "logprobs", value=[]), "expected an object"),
    (
        changed(CHAT, "request", "messages", 1, "role", value="usr"),
        "got the role 'usr'; expected .* did you mean user",
    ),
    (
        changed(CHAT, "request", "messages", 1, "content", value=[{"type": "image_url"}]),
        "expected a content that is a text",
    ),
    (changed(CHAT, "request", "messages", 1, value=3), "expected an object"),
    (changed(CHAT, "request", "chat_template", value="{{ x }}"), "chat template of its own"),
    (changed(CHAT, *FIRST, "message", "tool_calls", value=[CALL]), "tool calls or reasoning cut out of it"),
    (changed(text_alone(said_of_text()), *FIRST, "token_ids", value=[300, 301]), "the server answered ' an old ring"),
]


@pytest.mark.parametrize(("record", "message"), REFUSED)
def test_what_does_not_fit_is_refused(record: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_response(record, tokenizer())


def test_a_prompt_beyond_the_context_is_refused() -> None:
    said = replace(said_of_text(), prompt=said_of_text().prompt * 10)
    response = read_response(completions(replace(said, model=llama())), tokenizer())
    with pytest.raises(InvalidInputError, match="takes at most"):
        explained(response)

"""Prompts and answers in tokens: what follows what, what a chat template adds, and what is refused."""

from typing import Any

import pytest
import torch

from captum_norm.errors import InvalidInputError
from captum_norm.generation.prompts import Prompt, read_answer, read_prompt, span_of
from captum_norm.text.words import token_texts
from tests.generation.texts import tokenizer

TURNS = [{"role": "system", "content": "Anna owns a boat."}, {"role": "user", "content": " What does Anna own? "}]


def texts_of(prompt: Prompt, marks: list[bool]) -> str:
    return "".join(text for text, mark in zip(token_texts(prompt.ids, tokenizer()), marks, strict=True) if mark)


def test_prompts_and_answers_are_one_text_or_ids() -> None:
    prompt = read_prompt("What does Anna own? Anna owns", tokenizer())
    answer = read_answer(" a red boat.", prompt, tokenizer())
    assert prompt.ids + answer == tokenizer()("What does Anna own? Anna owns a red boat.")["input_ids"]
    assert read_answer(torch.tensor(answer), prompt, tokenizer()) == read_answer(answer, prompt, tokenizer()) == answer
    ids = tokenizer()("Anna owns", return_tensors="pt")["input_ids"]
    assert read_prompt(ids, tokenizer()).ids == read_prompt(ids[0], tokenizer()).ids == ids[0].tolist()


def test_a_prompt_that_goes_on_has_no_closing_token() -> None:
    closing = tokenizer().backend_tokenizer.post_processor
    try:
        from tokenizers.processors import TemplateProcessing

        special = [("<s>", 0), ("</s>", 1)]
        tokenizer().backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
        prompt = read_prompt("Anna owns", tokenizer())
        assert prompt.ids[0] == 0
        assert prompt.ids[-1] != 1
        answer = read_answer(" a red boat.", prompt, tokenizer())
        assert tokenizer().decode(answer) == " a red boat."
        assert read_prompt("Anna owns", tokenizer(), continued=False).ids[-1] == 1
    finally:
        tokenizer().backend_tokenizer.post_processor = closing


def test_a_special_token_that_ends_a_text_is_part_of_it() -> None:
    prompt = read_prompt("<|user|>\nAnna owns<|assistant|>", tokenizer())
    assert tokenizer().convert_ids_to_tokens(prompt.ids)[-1] == "<|assistant|>"
    answer = read_answer(" a red boat.", prompt, tokenizer())
    assert tokenizer().decode(answer) == " a red boat."


def test_texts_of_tokens_take_a_few_tokens_of_context_each() -> None:
    class Counting:
        decoded = 0

        def decode(self, ids: list[int], **options: Any) -> str:
            self.decoded += len(ids)
            return str(tokenizer().decode(ids, **options))

    ids, counting = tokenizer()("Anna owns é→ a red boat. " * 30)["input_ids"], Counting()
    assert "".join(token_texts(ids, counting)) == tokenizer().decode(ids, clean_up_tokenization_spaces=False)
    assert counting.decoded < 12 * len(ids)


def test_a_chat_template_marks_what_it_adds() -> None:
    prompt: Any = read_prompt(TURNS, tokenizer())
    assert prompt.text.endswith("<|assistant|>\n")
    content = [not added for added in prompt.template]
    assert texts_of(prompt, content) == "Anna owns a boat.What does Anna own?"
    assert [prompt.text[start:end] for start, end in prompt.messages] == ["Anna owns a boat.", "What does Anna own?"]
    assert prompt.roles == ["system", "user"]
    answer = read_answer("Anna owns a boat.", prompt, tokenizer())
    assert tokenizer().decode(prompt.ids + answer) == prompt.text + "Anna owns a boat."


def test_turns_with_the_same_words_are_found_in_order() -> None:
    same = [{"role": role, "content": "Anna"} for role in ("user", "assistant", "user")]
    prompt = read_prompt(same, tokenizer())
    assert len(set(prompt.messages)) == 3
    assert texts_of(prompt, [not added for added in prompt.template]) == "AnnaAnnaAnna"


def test_words_of_the_template_are_found_where_the_user_says_them() -> None:
    said = ["user", "|", "<|assistant|>\n", "s"]
    turns = [{"role": role, "content": content} for role, content in zip(["user", "assistant"] * 2, said, strict=True)]
    prompt: Any = read_prompt(turns, tokenizer())
    begins = [prompt.text.index("<|user|>\nuser\n") + 9, prompt.text.index("\n|\n") + 1]
    begins += [prompt.text.index("<|user|>\n<|assistant|>") + 9, prompt.text.index("\ns\n") + 1]
    assert prompt.messages == [(begin, begin + len(word.strip())) for begin, word in zip(begins, said, strict=True)]
    assert texts_of(prompt, [not added for added in prompt.template]) == "user|<|assistant|>s"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("  ", "expected some words"),
        ("", "expected some words"),
        ([], "messages"),
        ([{"role": "user"}], "messages"),
        (7, "messages"),
        (torch.ones(2, 3).long(), "of one text"),
        (torch.ones(3), "of one text"),
        ([{"role": "user", "content": " "}], "is empty"),
    ],
)
def test_prompts_that_are_refused(prompt: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_prompt(prompt, tokenizer())


def test_a_template_that_changes_the_words_is_refused() -> None:
    template = tokenizer().chat_template
    try:
        tokenizer().chat_template = "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}"
        with pytest.raises(InvalidInputError, match="template changes it"):
            read_prompt(TURNS, tokenizer())
        for template_of_others in (
            "{{ messages[1]['content'] }}",
            "{{ messages[1]['content'] + messages[0]['content'] }}",
        ):
            tokenizer().chat_template = template_of_others
            with pytest.raises(InvalidInputError, match="template changes it"):
                read_prompt(TURNS, tokenizer())
        tokenizer().chat_template = "{{ raise_exception('no system turn') }}"
        with pytest.raises(InvalidInputError, match="refuses the conversation: no system turn"):
            read_prompt(TURNS, tokenizer())
        tokenizer().chat_template = None
        with pytest.raises(InvalidInputError, match="no chat template"):
            read_prompt([{"role": "user", "content": "Anna"}], tokenizer())
    finally:
        tokenizer().chat_template = template


@pytest.mark.parametrize("answer", ["", [], torch.ones(0).long()])
def test_empty_answers_are_refused(answer: object) -> None:
    with pytest.raises(InvalidInputError, match="no tokens"):
        read_answer(answer, read_prompt("Anna", tokenizer()), tokenizer())


@pytest.mark.parametrize("answer", [3, torch.ones(1, 2).long(), torch.ones(2), ["a"]])
def test_what_is_no_answer_is_refused(answer: object) -> None:
    with pytest.raises(InvalidInputError, match="expected a text, or its token ids"):
        read_answer(answer, read_prompt("Anna", tokenizer()), tokenizer())


def test_an_answer_that_merges_with_the_prompt_is_refused() -> None:
    prompt = read_prompt("What does Anna own? Anna own", tokenizer())
    with pytest.raises(InvalidInputError, match="merges with the prompt's last token"):
        read_answer("s a red boat.", prompt, tokenizer())


def test_characters_of_several_tokens_appear_with_their_last() -> None:
    ids = tokenizer()("a é→ b", add_special_tokens=False)["input_ids"]
    texts = token_texts(ids, tokenizer())
    assert "".join(texts) == "a é→ b"
    assert len(texts) == len(ids)
    assert not any("�" in text for text in texts)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [(None, (0, 4)), ((1, 3), (1, 3)), ("red", (2, 3)), (" a red", (1, 3)), ("ed bo", (2, 4)), ("owns", (0, 1))],
)
def test_parts_of_an_answer(outputs: object, expected: tuple[int, int]) -> None:
    assert span_of(outputs, [" owns", " a", " red", " boat"], " owns a red boat") == expected


@pytest.mark.parametrize("outputs", ["green", "", "a", (1, 1), (-1, 2), (0, 5), (0, 1, 2), 3, ("a", "b")])
def test_parts_that_are_not_there_are_refused(outputs: object) -> None:
    with pytest.raises(InvalidInputError, match="outputs="):
        span_of(outputs, [" owns", " a", " red", " boat"], " owns a red boat")

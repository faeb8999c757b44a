"""Segments of prompts: each token belongs to the piece of text that has its first character."""

import re

import pytest

from captum_norm.errors import InvalidInputError
from captum_norm.generation.prompts import Prompt, Segmentation, read_prompt, segments_of
from captum_norm.text.words import token_texts
from tests.generation.texts import TEXT, tokenizer

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
    with pytest.raises(InvalidInputError, match=message):
        segments_of(read_prompt(TEXT, tokenizer()), segmentation)


def test_white_space_between_segments_is_in_none() -> None:
    text = "Anna  owns\n\nPaul found"
    prompt = Prompt([3] * 7, text, offsets=[(0, 4), (4, 5), (5, 10), (10, 11), (11, 12), (12, 16), (16, 22)])
    assert segments_of(prompt, "paragraph")[1] == [0, 0, 0, -1, -1, 1, 1]
    assert segments_of(prompt, [" owns"])[1] == [-1, -1, 0, -1, -1, -1, -1]


def test_ids_have_no_text() -> None:
    with pytest.raises(InvalidInputError, match="pass the prompt as a text"):
        segments_of(Prompt([3, 4]), "sentence")


def test_chinese_sentences_end_without_a_space() -> None:
    prompt = read_prompt("你好。再见。", tokenizer())
    assert list(segments_of(prompt, "sentence")[0]) == ["你好。", "再见。"]

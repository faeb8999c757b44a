"""Generated prompts: their evidence tells the answer, and nothing else does."""

import re

import pytest

from captum_norm.errors import InvalidInputError
from captum_norm.lab.prompts import KINDS, EvidencePrompt, PromptKind, evidence_prompts


def read(prompt: EvidencePrompt) -> str:
    """Answer a question as a reader would who knows what each kind means."""
    (name,) = re.findall(r"(?:did|of|does) (\w+)(?: find|\?| live| own| do)", prompt.question)
    told = "\n".join(prompt.passages)

    def search(pattern: str) -> str:
        (found,) = re.findall(pattern, told)
        return str(found)

    if prompt.kind == "needle":
        what = prompt.question.partition(" find ")[2].partition("?")[0]
        return search(rf"{name} found {what} in the (.+)")
    if prompt.kind == "tracking":
        code = name
        while not code.isdigit():
            code = search(rf"The code of {code} is (?:that of )?(\w+)\.")
        return f"{code}."
    if prompt.kind == "conflict":
        return search(rf"Correction: {name} lives in the (.+)")
    if prompt.kind == "injection":
        return search(rf"what {name} owns must be told: a (.+)")
    return search(rf"The (.+) is called {name}\.") + "."


@pytest.mark.parametrize("kind", KINDS)
def test_the_passages_tell_the_answer(kind: PromptKind) -> None:
    for prompt in evidence_prompts(kind, 200, seed=3, passages=12):
        assert len(prompt.passages) == len(set(prompt.passages)) == 12
        assert f" {read(prompt)}" == prompt.answer
        evidence = [prompt.passages[index] for index in prompt.evidence]
        assert any(prompt.answer.strip(" .") in passage for passage in evidence)
        if kind == "tracking":
            others = [text for index, text in enumerate(prompt.passages) if index not in prompt.evidence]
            assert not any(prompt.answer in text for text in others)
            assert len(evidence) > 1
        else:
            assert len(evidence) == 1


def test_seeds_and_lengths() -> None:
    first, second = (list(evidence_prompts("needle", 3, seed, passages=40)) for seed in (0, 1))
    assert first == list(evidence_prompts("needle", 3, 0, passages=40))
    assert not {prompt.text for prompt in first} & {prompt.text for prompt in second}
    assert first[0].text.count("\n") == 40


def test_evidence_is_anywhere() -> None:
    prompts = evidence_prompts("paraphrase", 300, passages=5)
    assert {prompt.evidence[0] for prompt in prompts} == set(range(5))


def test_bad_requests_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="needel"):
        next(evidence_prompts("needel", 1))  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="at least 5"):
        next(evidence_prompts("needle", 1, passages=4))

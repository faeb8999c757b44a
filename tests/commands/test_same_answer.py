"""The same question has the same answer in Python and on the command line: file by file, with the same defaults."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import captum_norm as cn
from captum_norm.loading import LANGUAGE_MODEL, load
from tests.commands.calls import TEXT
from tests.tiny import classifier, gpt2, save_tiny, t5, tokenizer

pytestmark = pytest.mark.usefixtures("wide_terminal")

SUFFIXES = (".html", ".csv", ".json", ".png")


def files_of(*words: str) -> dict[str, bytes]:
    """What the command writes."""
    outs = [word for suffix in SUFFIXES for word in ("--out", f"answer{suffix}")]
    assert cn.cli.main(["explain", *words, *outs]) == 0
    return {suffix: Path(f"answer{suffix}").read_bytes() for suffix in SUFFIXES}


@pytest.mark.parametrize("make", [classifier, gpt2])
@pytest.mark.parametrize(("method", "target"), [("norm", None), ("decompx", None), ("decompx", "1"), ("weights", None)])
def test_a_text(make: Any, method: str, target: str | None) -> None:
    model = make()
    folder = str(save_tiny(model, Path("model")))
    given = () if target is None else ("--target", target)
    written = files_of(TEXT, "--model", folder, "--method", method, *given)
    for subject in ((folder,), (model, tokenizer())):
        found = cn.explain(TEXT, *subject, method=method, target=target, name=folder)
        for suffix, content in written.items():
            assert content == found.file_bytes(suffix), suffix
    assert found.outputs[0].explained == (method == "decompx")
    assert found.aggregation == {"decompx": "propagated", "weights": "mean"}.get(
        method, "rollout" if make is classifier else "mean"
    )
    assert {maps.method for maps in found.page().examples[0].maps} >= {"weights"}


@pytest.mark.parametrize("method", [cn.NormAttribution, cn.ALTI, cn.DecompX])
@pytest.mark.parametrize(
    ("subject", "prompt", "target"),
    [
        (LANGUAGE_MODEL, "Clara found", None),
        (LANGUAGE_MODEL, "Clara found", " a tiny"),
        ("t5", "a cat runs", "the dog"),
    ],
)
def test_an_answer(subject: str, prompt: str, target: str | None, method: Any) -> None:
    if subject == "t5":
        save_tiny(t5(), Path(subject))
    given = ("--generate", "3") if target is None else ("--target", target)
    written = files_of(prompt, "--model", subject, "--method", method.name, *given)
    arguments = {"max_new_tokens": 3, "do_sample": False} if target is None else None
    model, words = load(subject)
    found = cn.GenerationAttribution(method(model), words).attribute(prompt, target, gen_args=arguments)
    found.explained = replace(found.explained, model=subject)
    for suffix, content in written.items():
        assert content == found.file_bytes(suffix), suffix

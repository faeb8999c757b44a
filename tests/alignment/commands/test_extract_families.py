"""Every family of translation models by the command, from a folder that ``save_pretrained`` wrote."""

from pathlib import Path

import pytest

from alignment import HuggingFaceTokenizer, WordAligner, cli, format_pharaoh
from tests.alignment.commands.texts import write
from tests.alignment.translation_models import FAMILIES, SOURCES, TARGETS, random_model


@pytest.mark.parametrize("name", FAMILIES)
def test_links_are_those_of_the_api(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    family = FAMILIES[name]
    tokenizer = family.tokenizer(tmp_path)
    model = random_model(family, tokenizer)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    aligner = WordAligner(model, HuggingFaceTokenizer(tokenizer, **family.options), layer=-1, head=1, recipe="product")
    sources, targets = ([sentence.split() for sentence in side] for side in (SOURCES, TARGETS))
    expected = list(map(format_pharaoh, aligner.align(sources, targets)))
    assert all(expected)
    write("pairs", [f"{source} ||| {target}" for source, target in zip(SOURCES, TARGETS, strict=True)])
    words = ["extract", "pairs", "--model=model", "--layer=-1", "--head=1", "--recipe=product", "--quiet"]
    words += ["--reverse-model=none", *(f"--{key.replace('_', '-')}={text}" for key, text in family.options.items())]
    assert cli.main(words) == 0
    assert capsys.readouterr().out.splitlines() == expected

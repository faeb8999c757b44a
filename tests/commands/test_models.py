"""``captum-norm models``."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from captum_norm.cli import main
from captum_norm.commands.models import supported_models
from captum_norm.loading import load_model
from tests import encoder_decoders, families
from tests.commands.calls import refused
from tests.tiny import bert_config, save_tiny

STACKS = ("encoder", "decoder", "cross")


def test_the_supported_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    out = Path("models.json")
    assert main(["models", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for model in supported_models():
        assert f"  {model['model_type']} " in printed
    assert "gpt_oss" in printed
    assert "attention sinks" in printed
    assert json.loads(out.read_text())["models"] == supported_models()


def test_a_check_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny(hf.BertModel(bert_config()), tmp_path)
    assert main(["models", "--check", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert f"model: {folder} (bert, BertModel, float32)" in printed
    for line in ("encoder  0      encoder.layer.0.attention  post-norm  attn, attn_res, attn_res_ln, atb", "1e-05"):
        assert line in printed


@pytest.mark.few
@pytest.mark.parametrize(
    ("model", "inputs", "layout", "layers"),
    [
        (lambda: families.build("gpt-oss"), "12 random tokens", "pre-norm", {"decoder": 2}),
        (lambda: families.build("gptj"), "12 random tokens", "parallel", {"decoder": 2}),
        (lambda: families.build("dinov2"), "random pixels", "pre-norm", {"encoder": 2}),
        (lambda: encoder_decoders.build("whisper"), "features of a sound", "pre-norm", dict.fromkeys(STACKS, 2)),
        (lambda: encoder_decoders.build("bart"), "12 random tokens", "post-norm", dict.fromkeys(STACKS, 2)),
    ],
    ids=["gpt-oss", "gptj", "dinov2", "whisper", "bart"],
)
def test_a_model_without_a_tokenizer_is_checked_with_what_it_reads(
    model: Any, inputs: str, layout: str, layers: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    model().save_pretrained("model")
    out = Path("check.json")
    assert main(["models", "--check", "model", "--out", str(out)]) == 0
    assert inputs in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert {stack: len([x for x in found["layers"] if x["stack"] == stack]) for stack in layers} == layers
    for layer in found["layers"]:
        assert layer["layout"] == layout
        assert 0 < layer["error"] < found["tolerance"] == 1e-5
        # What decoder self-attention gives goes on into cross-attention.
        assert ("atb_ff_res" in layer["scopes"]) == (len(layers) == 1 or layer["stack"] != "decoder")
    assert [reason.split(":")[0] for reason in found["without_feed_forward"]] == ["decoder"] * (len(layers) > 1)


def test_a_model_that_is_refused_is_refused_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = hf.GPTNeoXJapaneseConfig(**families.TEXT)
    hf.GPTNeoXJapaneseForCausalLM(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["gpt_neox_japanese.layers.1.attention.dense_bias"] += 1
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    told = refused(capsys, "models", "--check", str(tmp_path))
    assert "GPTNeoXJapaneseForCausalLM is not supported: its last layer adds a bias behind" in told


def test_a_model_for_which_no_example_can_be_made_up_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = hf.ASTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, num_mel_bins=16, max_length=32
    )
    hf.ASTModel(config).save_pretrained(tmp_path)
    told = refused(capsys, "models", "--check", str(tmp_path))
    assert "cannot create an example of input_values for ASTModel" in told


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_a_model_is_checked_in_few_bits(quantization: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config = hf.BertConfig.from_dict({**bert_config().to_dict(), "hidden_size": 64, "intermediate_size": 128})
    folder = save_tiny(hf.BertForSequenceClassification(config), Path("model"))
    out = Path("check.json")
    assert main(["models", "--check", str(folder), "--quantize", quantization, "--out", str(out)]) == 0
    check = json.loads(out.read_text(encoding="utf-8"))
    assert "accepted" in capsys.readouterr().out
    assert [layer["layout"] for layer in check["layers"]] == ["post-norm"] * 2
    model = load_model(str(folder), quantization)  # type: ignore[arg-type]
    # Some processors take four bits for multiples of 32 rows alone, which heads rarely have.
    assert type(model.get_submodule("classifier")) is torch.nn.Linear
    linear = model.get_submodule("bert.encoder.layer.0.attention.self.value")
    assert type(linear).__name__ == {"nf4": "Linear4bit", "int8": "Linear8bitLt"}[quantization]
    whole = load_model(str(folder)).get_parameter("bert.encoder.layer.0.attention.self.value.weight")
    inputs = torch.randn(5, 64)
    with torch.no_grad():
        error = (linear(inputs) - linear.bias - inputs @ whole.T).norm() / (inputs @ whole.T).norm()
    assert 1e-4 < error < 0.15

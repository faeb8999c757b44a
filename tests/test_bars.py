"""Progress: none unless asked for, none of what is over soon, and to the end."""

import gzip
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm
from transformers import BertModel

from alignment.pipeline.extraction import line_bar
from captum_norm import ActivationPatching, NormAttribution, NormMeter, progress
from captum_norm.attr.feed_forward import feed_forward_norms
from captum_norm.bars import DISPLAY, advance, bar, count_lines, to_stderr
from captum_norm.cli import main
from captum_norm.forward.record import Layer
from captum_norm.models import Scope
from tests import encoder_decoders, families, tiny


def explain(name: str = "bert") -> None:
    NormAttribution(families.build(name), memory_budget=1).maps(families.inputs(name))


@pytest.fixture(name="finished")
def finished_bars(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float | None]]:
    """What was counted, and the total, of each bar that was closed."""
    finished: list[tuple[float, float | None]] = []
    close = tqdm.close

    def closing(bar: "tqdm[object]") -> None:
        finished.append((bar.n, bar.total))
        close(bar)

    monkeypatch.setattr(tqdm, "close", closing)
    return finished


def test_a_library_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    explain()
    assert capsys.readouterr().err == ""


def test_a_bar_counts_patches(capsys: pytest.CaptureFixture[str], finished: list[object]) -> None:
    inputs = families.inputs("gpt2", 0, 2, 4)
    with progress(delay=0):
        found = ActivationPatching(families.build("gpt2"), batch_size=10).attribute(inputs, 7, ablation="zero")
    assert found.scores.numel() == 64
    assert (64, 64) in finished
    shown = capsys.readouterr().err  # whose bar has the width that tqdm gives it
    assert re.search(r"patches of GPT2LMHeadModel:   0%\| +\| 0.00/64.0 patches", shown)


@pytest.mark.parametrize("name", ["bert", "albert"])  # ALBERT's layers are one module
def test_a_bar_counts_the_queries_of_all_layers(
    name: str, capsys: pytest.CaptureFixture[str], finished: list[object]
) -> None:
    with progress(delay=0):
        explain(name)
    queries = 2 * 3 * 11  # layers, examples, positions
    assert (queries, queries) in finished
    shown = capsys.readouterr().err
    assert re.match(r"\r\w+Model:   0%\| +\| 0\.00/66\.0 ", shown), shown
    assert shown.endswith("\r")  # cleared


def test_bars_of_an_encoder_decoder_and_of_the_last_rows(finished: list[object]) -> None:
    model, inputs = encoder_decoders.build("bart"), encoder_decoders.inputs("bart", batch=2, source=9, target=6)
    with progress(delay=0):
        NormAttribution(model).maps(inputs)
    queries = 2 * 2 * (9 + 6 + 6)  # examples, layers, positions of encoder, decoder, and decoder to encoder
    assert (queries, queries) in finished
    model, ids = families.build("llama"), families.inputs("llama", batch=2)
    with progress(delay=0):
        NormAttribution(model).maps(ids, last=3)
    assert finished.count((12, 12)) == 2, "layers, examples, rows; closed twice"


@pytest.mark.parametrize("layers", [None, [1], [-1]])
def test_a_bar_moves_while_the_vectors_of_a_layer_are_formed(
    layers: list[int] | None, monkeypatch: pytest.MonkeyPatch, finished: list[object]
) -> None:
    ids = families.inputs("bert")
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0  # of padded queries no vectors are formed, but they are done with
    forming: list[list[int]] = []
    update, measure = tqdm.update, feed_forward_norms

    def updating(bar: "tqdm[object]", count: float = 1) -> bool | None:
        if forming:
            forming[-1].append(int(count))
        return update(bar, count)

    def measuring(layer: Layer, scopes: Sequence[Scope]) -> Any:
        forming.append([])
        return measure(layer, scopes)

    monkeypatch.setattr(tqdm, "update", updating)
    monkeypatch.setattr("captum_norm.attr.norms.feed_forward_norms", measuring)
    with progress(delay=0):
        meter = NormMeter(families.build("bert"), memory_budget=1)
        meter.measure({"input_ids": ids, "attention_mask": mask}, scopes=["atb_ff"], layers=layers)
    queries, measured = 3 * 11, 2 if layers is None else 1
    assert (queries * measured,) * 2 in finished
    assert len(forming) == measured
    for steps in forming:
        assert steps.count(1) >= queries - 4, steps


def test_no_bar_goes_into_a_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with progress(delay=0, terminal_only=True):
        explain()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress(delay=0, terminal_only=True):
        explain()
    assert capsys.readouterr().err != ""


def test_the_command_line_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.save_tiny(BertModel(tiny.bert_config()), tmp_path)
    asked = []

    def noting(*arguments: Any) -> Any:
        asked.append(DISPLAY.get() is not None)
        return bar(*arguments)

    monkeypatch.setattr("captum_norm.forward.session.bar", noting)
    assert main(["explain", "a dog runs", "--model", str(folder)]) == 0
    assert asked == [True]


def test_a_bar_of_expected_seconds_shows_only_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(delay=0), bar("comparing", 4.5, "") as shown:
        shown.update(1.5)
        shown.refresh()
    lines = capsys.readouterr().err.split("\r")
    assert re.fullmatch(r"comparing: +33%\|.*\| 00:00 left *", lines[2]), lines


@pytest.mark.parametrize(("content", "lines"), [(b"", 0), (b"a\nb", 2), (b"a\n\n", 2), (b"a b\n" * 600_000, 600_000)])
def test_lines_of_a_plain_file_are_counted(tmp_path: Path, content: bytes, lines: int) -> None:
    (tmp_path / "text").write_bytes(content)
    assert count_lines(tmp_path / "text") == lines
    (tmp_path / "text.gz").write_bytes(gzip.compress(content))
    assert count_lines(tmp_path / "text.gz") is None
    assert count_lines(io.BytesIO(content)) is None


def test_messages_stay_above_a_bar_of_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text"
    path.write_text("a\n" * 10)
    with line_bar("aligning", path, shown=True) as done:
        done(4, 1)
        done(2, 2)
        to_stderr("line 3")
        assert DISPLAY.get() is None  # the model's runs show no bars of their own
    out, err = capsys.readouterr()
    assert out == ""
    assert "line 3\n" in err
    assert re.search(r"line 3\n.*aligning:  60%\S* +\S* 6.00/10.0 lines, \S+ left, bad=3", err), err
    with progress(delay=0), line_bar("aligning", io.BytesIO(), shown=False) as done:
        done(4, 1)
    assert capsys.readouterr() == ("", "")


def test_what_was_finished_before_is_no_speed() -> None:
    with progress(delay=0), bar("aligning", None, "lines") as shown:
        advance(shown, 1_000_000_000, fresh=False)
        assert "?" in str(shown)

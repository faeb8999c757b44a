"""``captum-norm doctor`` and ``captum-norm models --verify`` say what holds, and notice whatever does not."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from captum_norm.cli import main
from captum_norm.commands import promises
from captum_norm.commands.models import supported_models, verification
from captum_norm.commands.promises import Subject
from captum_norm.errors import IncompleteDecompositionError
from captum_norm.loading import DEFAULT_MODEL, LANGUAGE_MODEL
from captum_norm.results.maps import AttributionMaps
from captum_norm.runs import Job
from tests.tiny import bert_config, marian_config, save_tiny

ROOT = Path(__file__).parents[2]
NAMES = ("exact", "fast", "untouched", "safe", "resumable", "deterministic")
VERIFIED = supported_models("verified.json")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    return str(save_tiny(hf.BertModel(bert_config()), tmp_path_factory.mktemp("bert")))


def verdicts(output: str) -> dict[str, str]:
    return dict(re.findall(r"^  (\w+) +(holds|FAILS)  ", output, re.MULTILINE))


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder", pytest.param("shipped", marks=pytest.mark.long)])
def test_every_promise_holds(kind: str, bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    words = {"encoder": [bert], "encoder-decoder": [str(tmp_path)], "shipped": []}[kind]
    if kind == "encoder-decoder":
        save_tiny(hf.MarianMTModel(marian_config()), tmp_path)
    assert main(["doctor", *words]) == 0
    assert verdicts(capsys.readouterr().out) == dict.fromkeys(NAMES, "holds")


def noisy(maps: Callable[..., AttributionMaps]) -> Callable[..., AttributionMaps]:
    def other(subject: Subject, *arguments: Any, **options: Any) -> AttributionMaps:
        found = maps(subject, *arguments, **options)
        assert found.encoder is not None
        return replace(found, encoder=found.encoder + torch.rand(()))

    return other


def leave(maps: Callable[..., AttributionMaps]) -> Callable[..., AttributionMaps]:
    def other(subject: Subject, *arguments: Any, **options: Any) -> AttributionMaps:
        setattr(subject.model, f"left{len(vars(subject.model))}", True)
        return maps(subject, *arguments, **options)

    return other


def incomplete(_: object) -> None:
    raise IncompleteDecompositionError("the vectors do not add up")


def unsafe(folder: str) -> None:
    torch.load(Path(folder, "pytorch_model.bin"), weights_only=False)


BROKEN: dict[str, tuple[object, str, Any, set[str]]] = {
    "vectors": (promises, "NormAttribution", incomplete, {"exact", "fast", "untouched", "resumable", "deterministic"}),
    "output": (Subject, "output", lambda *_: torch.rand(3), {"exact", "untouched"}),
    "numbers": (Subject, "maps", noisy(Subject.maps), {"exact", "resumable", "deterministic"}),
    "time": (promises, "_OVERHEAD", -60.0, {"fast"}),
    "traces": (Subject, "maps", leave(Subject.maps), {"untouched"}),
    "code": (promises, "load_model", unsafe, {"safe"}),
    "beginnings": (Job, "redo", lambda *_: True, {"resumable"}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_whatever_is_broken_is_noticed(
    name: str, bert: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner, attribute, value, broken = BROKEN[name]
    monkeypatch.setattr(owner, attribute, value)
    assert main(["doctor", bert]) == 2
    output, error = capsys.readouterr()
    assert {promise for promise, verdict in verdicts(output).items() if verdict == "FAILS"} == broken
    listed = ", ".join(f"{promise} ({bert})" for promise in NAMES if promise in broken)
    assert error == f"captum-norm: error: what is promised does not hold here: {listed}\n"


def test_a_verification_is_a_file_with_all_that_it_says(
    bert: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(promises, "load_model", unsafe)
    out = Path("report.json")
    assert main(["models", "--verify", bert, "--out", str(out)]) == 2
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report.keys() == VERIFIED[0].keys() - {"by"}
    assert {promise: found["held"] for promise, found in report["promises"].items()} == {
        promise: promise != "safe" for promise in NAMES
    }
    assert (report["length"], len(report["layers"])) == (12, 2)
    assert (
        f"{bert} is not among the verified checkpoints: captum-norm models --verify {bert}" in capsys.readouterr().out
    )


def test_verified_checkpoints_hold_every_promise_and_are_told_of() -> None:
    assert [report["model"] for report in VERIFIED] == [DEFAULT_MODEL, LANGUAGE_MODEL, "fr-en", "en-fr"]
    for report in VERIFIED:
        assert all(report["promises"][promise]["held"] for promise in NAMES)
        assert max(layer["error"] for layer in report["layers"]) < report["tolerance"]
        assert report["by"]
    assert verification(LANGUAGE_MODEL).startswith(
        f"{LANGUAGE_MODEL} was verified in float32 up to 512 positions by captum-norm contributors, 2026-"
    )


def test_the_page_of_promises_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) >= 10
    for path, test in named:
        assert re.search(rf"^def {test}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), test
    assert [promise for promise in NAMES if f"`{promise}`" not in text] == []


def test_explain_says_of_a_model_of_ones_own_what_was_verified(bert: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "a dog sees the cat", "--model", bert]) == 0
    assert capsys.readouterr().err.endswith(f"{verification(bert)}\n")

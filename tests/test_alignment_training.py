"""The page of alignment error rates during training: what is measured, what is kept, and the page itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from alignment import AER, WordAligner, load_alibi
from alignment.aligner import without_head
from alignment.corpora import ParallelGold
from benchmarks import checkpoints
from benchmarks.alignment_training import against_rows, page, since
from benchmarks.checkpoints import MODELS, READ, SHIPPED, Measurement, Rate, Source, Trained
from captum_norm import AttentionWeights, NormAttribution
from tests.test_readme import save_checkpoint

DOCS = Path(__file__).parents[1] / "docs"
METHODS: dict[str, Any] = {"norms": NormAttribution, "weights": AttentionWeights}


def corpus(sentences: slice, name: str = "a story") -> ParallelGold:
    """Some sentences of a story."""
    story = load_alibi("master-cat")
    parts = (story.sources[sentences], story.targets[sentences], story.gold[sentences])
    return ParallelGold(name, story.source_language, story.target_language, *parts)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "fr-en-noise"
    folder.mkdir()
    for updates in (500, 250):
        save_checkpoint(folder / f"checkpoint_1_{updates}.pt", updates)
    (folder / "checkpoint_best.pt").write_bytes(b"not read")
    return folder


@pytest.fixture(autouse=True)
def _one_shipped_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "shipped_models", lambda: ["en-fr"])


@pytest.mark.long
def test_rates_are_those_of_the_aligner(training: Path, tmp_path: Path) -> None:
    given = corpus(slice(0, 12))
    found = checkpoints.completed(tmp_path / "kept.json", [training], [given])
    assert [(one.model.training, one.model.updates, one.recipe) for one in found] == [
        (name, updates, recipe)
        for name, updates in ((training.name, 250), (training.name, 500), (SHIPPED, 4000))
        for recipe in sorted(READ)
    ]
    for one in found:
        shipped = one.model.training == SHIPPED
        file = MODELS / "en-fr" / "model.safetensors" if shipped else training / f"checkpoint_1_{one.model.updates}.pt"
        model, tokenizer = Source(one.model.training, file, 0).load()
        assert (one.model.direction, one.model.layers, one.model.width) == ("en-fr" if shipped else "fr-en", 3, 256)
        turned = given.swapped() if shipped else given
        for name, method in METHODS.items():
            head: Literal["auto", "all"] = "auto" if one.recipe == "hmm" else "all"
            aligner = WordAligner(
                model, tokenizer, method(without_head(model)), setting="auto", head=head, recipe=one.recipe
            )
            score = AER([turned.gold]).corpus_score(aligner.align(turned.sources, turned.targets), None, 1000)
            rate: Rate = getattr(one, name)
            assert rate.place == str(aligner.choice)
            assert (rate.aer, rate.interval) == pytest.approx((score.aer, score.interval), abs=6e-4)


def measurement(updates: int, norms: float, weights: float, p: float, place: str = "AWI layer 0") -> Measurement:
    model = Trained("run", "fr-en", 3, 256, 1000, updates, "")
    return Measurement(model, "text", "paper", Rate(place, norms, 1.0), Rate(place, weights, 1.0), p)


def test_counts_by_hand() -> None:
    found = [
        measurement(250, 50.0, 40.0, 0.001),
        measurement(500, 30.0, 32.0, 0.3),
        measurement(750, 30.0, 30.0, 1.0),
        measurement(1000, 20.0, 24.0, 0.01),
    ]
    turned = [replace(one, recipe="hmm", model=replace(one.model, direction="en-fr")) for one in found[:1]]
    assert list(against_rows(found + turned)) == [
        ["fr-en", "paper", "4", "2", "1", "1", "1", "+1.0"],
        ["en-fr", "hmm", "1", "0", "0", "1", "1", "+10.0"],
    ]


@pytest.mark.parametrize(
    ("places", "expected"), [("abbb", "500"), ("abab", "1,000"), ("aaaa", "250"), ("abba", "1,000"), ("a", "")]
)
def test_since_when_a_place_is_chosen(places: str, expected: str) -> None:
    history = [measurement(250 * (index + 1), 0, 0, 1, place) for index, place in enumerate(places)]
    assert since(history) == expected


def test_the_page_is_that_of_its_measurements() -> None:
    kept = DOCS / "_static" / "alignment-training.json"
    text = (DOCS / "alignment-training.md").read_text(encoding="utf-8")
    assert text == page("alignment-training", checkpoints.read_measurements(kept))

"""``norm-align sweep``: what it prints and writes, which way round it reads a corpus, and what it refuses."""

import csv
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import alignment.gradients
from alignment import cli
from alignment.commands import sweep as command
from alignment.corpora import ParallelGold, read_wpt03
from alignment.fairseq.loading import load_shipped_model
from alignment.normalization import Language, NormalizedWords
from alignment.sweep import records, sweep
from tests.alignment.commands.conftest import Refused
from tests.alignment.commands.texts import write

WPT03 = {
    "test.src-tgt": "The debate is closed . ||| Le débat est clos .\nThank you . ||| Merci .\n",
    "test.enfr.talp": "1-1 2-2 3-3 4-4 5-5\n1-1 2p1 3-2\n",
}
RWTH = {"test.de": "das Haus\n", "test.en": "the house\n", "alignment.talp": "1-1 2-2\n"}

TEXTS = [line.replace(" ||| ", "\t") for line in WPT03["test.src-tgt"].splitlines()]

Run = Callable[..., str]


@pytest.fixture(autouse=True)
def _files() -> None:
    wrong, empty = WPT03 | {"test.enfr.talp": "1-1\n9-1\n"}, dict.fromkeys(RWTH, "")
    for folder, files in {"wpt03": WPT03, "rwth": RWTH, "wrong": wrong, "empty": empty}.items():
        Path(folder).mkdir()
        for name, content in files.items():
            Path(folder, name).write_text(content, encoding="utf-8")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``sweep`` without gradients and resamples, and hands over what it printed."""

    def swept(*words: str, gradients: bool = False, warned: str = "") -> str:
        options = () if gradients else ("--no-gradients", "--bootstrap=0")
        assert cli.main(["sweep", *options, *words]) == 0
        output, error = capsys.readouterr()
        assert error == warned
        return output

    return swept


def written() -> list[dict[str, str]]:
    with Path("out/sweep.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def in_csv(corpus: ParallelGold, model: str, **options: Any) -> list[dict[str, str]]:
    """The records of a sweep by a shipped model, as a CSV file has them."""
    plain, tokenizer = load_shipped_model(model)
    source, target = model.split("-")
    languages: tuple[Any, Any] = source, target
    swept = sweep(plain, NormalizedWords(tokenizer, *languages), corpus, **options)
    named = ({"model": model, **record} for record in records(swept))
    return [{k: "" if v is None else str(v) for k, v in record.items()} for record in named]


@pytest.mark.long
def test_the_stories_are_swept_by_default(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert [found.name for found in command.corpora("alibi")] == ["Blue Beard", "The Master Cat", "The Last Lesson"]
    monkeypatch.setattr(command, "ALIBI_STORIES", ("master-cat", "last-lesson"))  # the longest one takes its time
    lines = run("--out=out").splitlines()
    assert not any("…" in line for line in lines)
    printed = [" ".join(line.split()) for line in lines]
    assert [line for line in printed if "; AER in %" in line] == [
        "The Master Cat fr–en, 52 sentence pairs; AER in %; layers and heads from 0",
        "The Last Lesson fr–en, 92 sentence pairs; AER in %; layers and heads from 0",
        "2 corpora fr–en; AER in %",
    ]
    assert printed.count("AER by setting and layer, the paper's recipe") == 2
    assert "auto AWI layer 0 32.1" in printed
    assert any(line.startswith("norms ") and line.split()[4] == "32.1" for line in printed)
    assert any(line.startswith("weights ") and line.split()[4] == "34.7" for line in printed)
    assert sorted(path.name for path in Path("out").glob("*.html")) == ["the-last-lesson.html", "the-master-cat.html"]
    found = written()
    # 3 layers and 4 heads in each, 2 settings, 2 methods; 5 more recipes, at 2 places; 2 stories.
    assert len(found) == 2 * (2 * 2 * 3 * (1 + 4) + 5 * 2 * 2)
    names = ("corpus", "method", "setting", "layer", "head", "recipe")
    rates = {tuple(row[name] for name in names): float(row["aer"]) for row in found}
    assert len(rates) == len(found)

    recipes = ("paper", "product", "hmm")

    def of(story: str) -> str:
        """Norms and weights, by recipe: all heads together, then head 2."""
        choices = product(("", "2"), recipes, ("norm", "weights"))
        return " ".join(f"{rates[story, method, 'AWI', '0', head, recipe]:.1f}" for head, recipe, method in choices)

    assert of("The Last Lesson") == "32.1 34.7 15.3 17.6 10.9 14.1 33.0 32.5 13.7 13.7 9.9 9.6"
    assert of("The Master Cat") == "39.3 40.6 20.3 24.1 15.9 19.3 40.0 39.5 18.8 18.6 12.7 13.0"
    means = printed[printed.index("2 corpora fr–en; AER in %") :]
    for recipe, head in product(recipes, ("", "2")):
        both = [
            [rates[f"The {story}", method, "AWI", "0", head, recipe] for story in ("Master Cat", "Last Lesson")]
            for method in ("norm", "weights")
        ]
        shown = [" ".join(f"{rate:.1f}" for rate in (*two, fmean(two))) for two in both]
        assert f"{recipe} norms {shown[0]}" in means
        assert any(line.startswith(f"{recipe} weights {shown[1]} 0.") for line in means)


def test_all_options(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(_: Any, inputs: Any, labels: Any, *, kind: str) -> Any:
        return (inputs["input_ids"][:, None, :] * (3 + len(kind)) + labels[:, :, None]) % 7

    monkeypatch.setattr(alignment.gradients, "source_gradients", gradients)
    output = run("--corpus=wpt03=wpt03", "--bootstrap=20", "--max-tokens=30", "--out=out", gradients=True)
    assert output.startswith("WPT03 fr–en, 2 sentence pairs; ")
    assert "gradient × input" in output
    assert written() == in_csv(read_wpt03("wpt03"), "fr-en", n_bootstrap=20)


OTHER_LANGUAGES = "the model translates fr–en, RWTH is read as {}; --swapped exchanges source and target\n"


def test_several_corpora(run: Run) -> None:
    warned = OTHER_LANGUAGES.format("de–en")
    output = run("--corpus", "rwth=rwth", "--corpus", "wpt03=wpt03", "--out", "out", warned=warned)
    assert output.index("RWTH de–en, 1 sentence pairs") < output.index("WPT03 fr–en, 2 sentence pairs")
    found = written()
    assert [row["corpus"] for row in found] == ["RWTH"] * (len(found) // 2) + ["WPT03"] * (len(found) // 2)
    assert [row["direction"] for row in found] == ["de-en"] * (len(found) // 2) + ["fr-en"] * (len(found) // 2)
    assert len(list(Path("out").glob("*.html"))) == 2
    output = run("--corpus=rwth=rwth", "--swapped", warned=OTHER_LANGUAGES.format("en–de"))
    assert output.startswith("RWTH en–de, ")


@pytest.mark.parametrize(("model", "source", "target"), [("fr-en", "fr", "en"), ("en-fr", "en", "fr")])
def test_the_corpus_is_turned_the_models_way(run: Run, model: str, source: Language, target: Language) -> None:
    output = run("--corpus=wpt03=wpt03", "--model", model, "--out=out")
    assert output.startswith(f"WPT03 {source}–{target}, ")
    corpus = read_wpt03("wpt03")
    found = written()
    assert {row["direction"] for row in found} == {model}
    turned = corpus if source == "fr" else corpus.swapped()
    assert found == in_csv(turned, model, gradients=False, n_bootstrap=1)
    # A corpus the wrong way round would be read as well, but not as well.
    assert min(float(row["aer"]) for row in found if row["recipe"] == "paper") < 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out=nowhere/out"], "argument --out: cannot make the folder nowhere/out: there is no folder nowhere"),
        (["--corpus=wpt"], "got the corpus 'wpt'; expected alibi, alibi=blue-beard, alibi=master-cat, alibi=last-"),
        (["--corpus=rwth="], "got the corpus 'rwth='; expected alibi, alibi=blue-beard"),
        (["--corpus=rwth=no-such"], "cannot read no-such/test.de: there is no such file"),
        (["--corpus=wpt03=wrong"], "wrong/test.enfr.talp, line 2: got source index 9, expected 1 to 3"),
        (["--corpus=rwth=empty"], "got the corpus RWTH without a sentence pair"),
        (["--corpus=alibi", "--corpus=alibi=master-cat"], "got the corpora Blue Beard, The Master Cat, The Last Lesso"),
        (["--source=fr"], "got --source or --target without --gold; give the gold alignments of these sentences"),
        (["--gold=gold", "--gold-base=1"], "got --gold without both sides; give --source and --target"),
        (["--gold=gold", "--gold-format=tsv", "--source=en"], "the sentences are in a tsv file; leave out --source an"),
        (["--gold=gold", "--corpus=alibi"], "got --gold and --corpus; give one of them"),
        (["--gold=gold", "--source=en", "--target=en"], "talp files count from 0 or from 1"),
        (["--gold=gold", "--gold-base=1", "--source=en", "--target=en"], "gold, line 1: got "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused_is_one_sentence(refused: Refused, words: list[str], message: str) -> None:
    write("gold", ["1-9"])
    write("en", ["a b"])
    refused(message, "sweep", *words)


TALP = ["0-0 1-1 2-2 3-3 4-4", "0-0 1p0 2-1"]


@pytest.mark.parametrize(
    ("words", "links"),
    [
        (["--gold-base=0", "--gold-swapped", "--source=en", "--target=fr"], ["0-0 1-1 2-2 3-3 4-4", "0-0 0p1 1-2"]),
        (["--gold-format=tsv"], [f"{text}\t{line}" for text, line in zip(TEXTS, TALP, strict=True)]),
    ],
)
def test_gold_of_ones_own(words: list[str], links: list[str], run: Run) -> None:
    pairs = [text.split("\t") for text in TEXTS]
    for name, lines in {"en": [one for one, _ in pairs], "fr": [other for _, other in pairs], "gold": links}.items():
        write(name, lines)
    printed = run("--gold=gold", *words, "--model=en-fr")
    named = run("--corpus=wpt03=wpt03", "--model=en-fr")
    assert printed.partition("\n")[2] == named.partition("\n")[2]
    assert printed.startswith("gold source–target, 2 sentence pairs; AER in %")

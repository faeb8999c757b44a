"""``norm-align evaluate``: rates worked by hand, published rows, every way to write a file, and what is refused."""

import csv
import io
import json
import sys
from pathlib import Path

import pytest

import captum_norm
from alignment import AER, cli
from alignment.aer import paired_significance
from alignment.formats import parse_pharaoh, parse_talp
from tests.alignment.commands.conftest import FILES, FORWARD, PERFECT, Refused, Run, rates, systems
from tests.alignment.data import DATA, needs

pytestmark = pytest.mark.usefixtures("files")

GOLD = [parse_talp("0-0 1-1 2p2"), parse_talp("0-1")]


def test_json_has_rates_and_what_they_are_made_of(run: Run) -> None:
    report = json.loads(run("a=forward", "perfect", "--json", "--bootstrap=0", "--paired=none"))
    assert report["gold"] == {"sentence_pairs": 2, "sure_links": 3, "possible_links": 4}
    assert report["paired"] is None
    assert report["version"] == captum_norm.__version__
    assert report["signature"].startswith("nrefs:1|version:")
    forward, perfect = report["systems"]
    assert list(forward.values()) == [
        "a", 100 * (1 - 5 / 7), None, None, 75, 100 * 2 / 3, pytest.approx(1200 / 17), 4, 2, 3, None, None,
    ]  # fmt: skip
    assert perfect == {
        "system": "perfect", "aer": 0, "aer_mean": None, "aer_interval": None, "precision": 100, "recall": 100,
        "f1": 100, "links": 3, "sure_hits": 3, "possible_hits": 3, "p_value": None, "identical": None,
    }  # fmt: skip


def test_intervals_and_significance_are_those_of_the_api(run: Run) -> None:
    report = json.loads(run("forward", "perfect", "reverse", "--json", "--bootstrap=50"))
    alignments = [list(map(parse_pharaoh, FILES[name].splitlines())) for name in ("forward", "perfect", "reverse")]
    for record, system in zip(report["systems"], alignments, strict=True):
        score = AER().corpus_score(system, [GOLD], n_bootstrap=50)
        assert (record["aer"], record["aer_mean"], record["aer_interval"]) == (score.aer, score._mean, score._ci)
    found = paired_significance(alignments[0], alignments[1:], GOLD)
    assert [record["p_value"] for record in report["systems"]] == [None, *found.p_values]
    assert report["signature"].startswith("nrefs:1|bs:50|seed:12345|version:")
    assert report["paired"] == {"test": "ar", "baseline": "forward", "signature": found.signature}
    assert found.signature.startswith("nrefs:1|ar:10000|seed:12345|version:")
    report = json.loads(run("forward", "perfect", "--json", "--paired=bs"))
    found = paired_significance(alignments[0], alignments[1:2], GOLD, test="bs")
    assert report["systems"][1]["p_value"] == found.p_values[0]
    assert report["paired"]["signature"] == found.signature


def test_csv_has_the_same_numbers(run: Run) -> None:
    words = ["forward", "perfect", "--bootstrap=20"]
    rows = list(csv.DictReader(io.StringIO(run(*words, "--csv"))))
    expected = [
        {key: "" if value is None else str(value) for key, value in record.items()}
        for record in systems(run(*words, "--json"))
    ]
    assert rows == expected


def test_table_rounds_as_the_literature_does(run: Run) -> None:
    lines = run("name=forward", "name=forward", "perfect", "--bootstrap=100").splitlines()
    interval = f"{AER().corpus_score(FILES['forward'].splitlines(), [GOLD], 100)._ci:.1f}"
    assert [line.split() for line in lines[:4]] == [
        ["system", "AER", "95", "%", "precision", "recall", "F1", "links", "p"],
        ["name", "28.6", "±", interval, "75.0", "66.7", "70.6", "4", "baseline"],
        ["name", "28.6", "±", interval, "75.0", "66.7", "70.6", "4", "1", "(identical)"],
        ["perfect", "0.0", "±", "0.0", "100.0", "100.0", "100.0", "3", "1"],
    ]
    assert lines[4] == ""
    assert lines[5].startswith("AER|nrefs:1|bs:100|seed:12345|version:")
    assert lines[6].startswith("p|nrefs:1|ar:10000|seed:12345|version:")
    assert len(lines) == 7


def test_table_has_only_what_was_asked_for(run: Run) -> None:
    lines = run("forward", "--bootstrap=0").splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["system", "AER", "precision", "recall", "F1", "links"],
        ["forward", "28.6", "75.0", "66.7", "70.6", "4"],
    ]
    assert len(lines) == 4
    assert lines[3].startswith("AER|nrefs:1|version:")
    assert "baseline" not in run("forward", "perfect", "--paired=none")


def test_tables_keep_long_names_and_small_p_values(run: Run) -> None:
    name = "[bold]" + "long" * 60
    assert run(f"{name}=perfect").splitlines()[1].startswith(f"{name}  0.0")
    for name in ("gold", "forward", "perfect"):
        Path(name).write_text(FILES[name] * 40, encoding="utf-8")
    assert run("forward", "perfect", "--bootstrap=0").splitlines()[2].split()[-1] == "0.0001"


@pytest.mark.parametrize(
    ("content", "system"),
    [
        ("1-1 3-3 2-1\n1-2\n", "file:base1"),
        ("0-0 2-2 0-1\n1-0\n", "file:swapped"),
        ("1-1 3-3 1-2\n2-1\n", "a b=file:swapped:base1"),
    ],
)
def test_files_say_how_they_are_written(run: Run, content: str, system: str) -> None:
    Path("file").write_text(content, encoding="utf-8")
    assert rates(run(system, "forward", "--json", "--source=source", "--target=target")) == [FORWARD, FORWARD]


@pytest.mark.parametrize(
    ("file", "system", "name"),
    [
        ("a=b", "./a=b", "./a=b"),
        ("a=b", "c=a=b", "c"),
        ("a:b", "a:b", "a:b"),
        ("a:b", "x:y=a:b", "x:y"),
        ("a:swappedly", "a:swappedly", "a:swappedly"),
    ],
)
def test_names_of_files_may_hold_anything(run: Run, file: str, system: str, name: str) -> None:
    Path(file).write_text(FILES["perfect"], encoding="utf-8")
    assert [record["system"] for record in systems(run(system, "--json"))] == [name]


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ("0-0 1-1 2p2\n0-1\n", ["--gold-base=0"]),
        ("1-1 2-2 3p3\n2-1\n", ["--gold-base=1", "--gold-swapped"]),
        ("1 1 1 S\n1 2 2 S\n1 3 3 P\n2 1 2 S\n", ["--gold-format=naacl"]),
        ("s1\t0-0 1-1 2p2\ns2\t0-1\n", ["--gold-format=alibi"]),
    ],
)
def test_gold_in_every_notation(run: Run, content: str, options: list[str]) -> None:
    Path("other").write_text(content, encoding="utf-8")
    assert rates(run("forward", "perfect", "--json", gold=("other", *options))) == [FORWARD, PERFECT]


@pytest.mark.parametrize("place", ["gold", "system", "source"])
def test_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    content = FILES["forward" if place == "system" else place]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    gold = ("-" if place == "gold" else "gold", "--gold-base=1")
    system = "-" if place == "system" else "forward"
    source = "-" if place == "source" else "source"
    assert rates(run(system, "--json", f"--source={source}", "--target=target", gold=gold)) == [FORWARD]


BROKEN = {
    "short": "0-0\n",
    "long": "0-0\n\n\n",
    "empty": "",
    "linkless": "\n \n",
    "words": "0-0\n0-0 the\n",
    "possible": "0-0\n0-1 0p0\n",
    "beyond": "0-0\n1-0\n",
    "naacl": "1 1 1\n",
}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gold"], "the following arguments are required: SYSTEM"),
        (["gold", "forward"], "talp files count from 0 or from 1; give --gold-base 0 or --gold-base 1"),
        (["no-such", "forward", "--gold-base=1"], "cannot read no-such: there is no such file"),
        (["gold", "x=no-such:swapped", "--gold-base=1"], "cannot read no-such: there is no such file"),
        (["gold", "", "--gold-base=1"], "argument SYSTEM: got no file name"),
        (["gold", "short", "--gold-base=1"], "short: got 1 alignments, expected 2, one for each gold alignment"),
        (["gold", "forward", "--gold-base=1", "--source=long"], "gold: got 2 alignments, expected 3, as many as sourc"),
        (["empty", "empty", "--gold-base=1"], "empty: got no line, expected gold alignments"),
        (["linkless", "linkless", "--gold-base=1"], "linkless: got no link in 2 lines, expected gold alignments"),
        (["naacl", "forward", "--gold-format=naacl"], "forward: got 2 alignments, expected 1"),
        (["gold", "words", "--gold-base=1"], "words, line 2: got 'the', expected i-j"),
        (["gold", "possible", "--gold-base=1"], "possible, line 2: got possible links (ipj), expected i-j"),
        (["gold", "beyond", "--gold-base=1", "--source=source"], "beyond, line 2: got source index 1, expected 0 to 0"),
        (["gold", "forward:base1", "--gold-base=1"], "forward, line 1: got source index 0, expected at least 1"),
        (["gold", "forward", "--gold-base=0", "--source=source"], "gold, line 1: got source index 3, expected 0 to 2"),
        (["gold", "-", "x=-", "--gold-base=1"], "got - more than once; standard input can be read only once"),
        (["gold", "forward", "--gold-base=1", "--bootstrap=1"], "argument --bootstrap: got 1; expected 0 for none"),
        (["gold", "forward", "--gold-base=1", "--json", "--csv"], "argument --csv: not allowed with argument --json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused_is_one_sentence(refused: Refused, words: list[str], message: str) -> None:
    for name, content in BROKEN.items():
        Path(name).write_text(content, encoding="utf-8")
    refused(message, "evaluate", *words)


def test_a_byte_order_mark_is_no_part_of_a_link(run: Run) -> None:
    for name in ("gold", "forward", "source"):
        Path(name).write_text(f"\ufeff{FILES[name]}", encoding="utf-8")
    assert rates(run("forward", "--json", "--source=source", "--target=target")) == [FORWARD]


def test_gold_of_tsv_has_the_sentences(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    Path("tsv").write_text("a b c\tx y z\t0-0 1-1 2p2\na\tx y\t0-1\t\t\n", encoding="utf-8")
    gold = ("tsv", "--gold-format=tsv")
    assert rates(run("forward", "perfect", "--json", gold=gold)) == [FORWARD, PERFECT]
    Path("beyond").write_text("0-0\n1-0\n", encoding="utf-8")
    assert cli.main(["evaluate", *gold, "beyond"]) == 2
    assert "beyond, line 2: got source index 1, expected 0 to 0, counted from 0; check" in capsys.readouterr().err
    Path("one").write_text("1-1 3-3\n1-2\n", encoding="utf-8")
    for system, hint in (("beyond", "beyond:swapped"), ("one", "one:base1"), ("one:swapped", "one:base1")):
        assert cli.main(["evaluate", *gold, system]) == 2
        assert capsys.readouterr().err.endswith(f"; as {hint} all its links would lie inside the sentences\n")


RWTH = DATA / "rwth-de-en"
FAR = "with {} its links would fit the gold far better (AER {});"
EXCHANGED = f"{FAR.format('the sides exchanged', '{}')} if it has the {{}}, else check --gold-swapped"
SWAPPED = "target first, write {path}:swapped"
BASE = f"{FAR.format('indices one more', '28.5 instead of 64.7')} if the gold counts from 1, write --gold-base 1"


@needs("rwth-de-en")
@pytest.mark.parametrize(
    ("system", "options", "told"),
    [
        ("", "--gold-base=1", ""),
        ("reverse.:swapped", "--gold-base=1", ""),
        ("intersection.", "--gold-base=1", ""),
        ("", "--gold-base=1 --source --target", ""),
        ("reverse.", "--gold-base=1", EXCHANGED.format("32.0 instead of 82.0", SWAPPED)),
        (":swapped", "--gold-base=1", EXCHANGED.format("28.5 instead of 81.5", "source first, write {path}")),
        ("", "--gold-base=1 --gold-swapped", EXCHANGED.format("28.5 instead of 81.5", SWAPPED)),
        ("", "--gold-base=0", BASE),
    ],
)
def test_a_wrong_base_or_orientation_is_told_of(
    capsys: pytest.CaptureFixture[str], system: str, options: str, told: str
) -> None:
    name, _, settings = system.partition(":")
    path = f"{RWTH}/fastalign.test.deen.{name}talp"
    sides = {"--source": f"--source={RWTH}/test.de", "--target": f"--target={RWTH}/test.en"}
    words = [sides.get(option, option) for option in options.split()]
    file = f"{path}:{settings}" if settings else path
    assert cli.main(["evaluate", f"{RWTH}/alignment.talp", file, *words, "--csv", "--bootstrap=0"]) == 0
    output, error = capsys.readouterr()
    assert len(output.splitlines()) == 2
    assert error.splitlines() == ([f"norm-align: warning: {path}: {told.format(path=path)}"] if told else [])


@pytest.mark.parametrize(
    ("shift", "system", "change", "advice"),
    [(1, "far", "less", "counts from 1, write far:base1"), (0, "far:base1", "more", "counts from 0, write far")],
)
def test_another_base_is_told_of(
    capsys: pytest.CaptureFixture[str], shift: int, system: str, change: str, advice: str
) -> None:
    lines = [[(source, source * factor % 11) for source in range(1, 11)] for factor in range(2, 11) for _ in range(3)]
    for name, more in (("pairs", 0), ("far", shift)):
        text = "\n".join(" ".join(f"{i + more}-{j + more}" for i, j in links) for links in lines)
        Path(name).write_text(text, encoding="utf-8")
    assert cli.main(["evaluate", "pairs", system, "--gold-base=0", "--bootstrap=0"]) == 0
    told = f"{FAR.format(f'indices one {change}', '0.0 instead of 100.0')} if it {advice}, else check --gold-base"
    assert capsys.readouterr().err == f"norm-align: warning: far: {told}\n"


@needs("rwth-de-en")
def test_published_rows_of_fast_align(run: Run) -> None:
    """The rows of fastalign.deen-results.txt as rounded there, but for one recall, which is of another run (65.5)."""
    files = ["forward=", "reverse=reverse.", "intersection=intersection.", "gdf=grow-diagonal-final."]
    names = [f"{name}={RWTH}/fastalign.test.deen.{file}talp" for name, file in (file.split("=") for file in files)]
    names[1] += ":swapped"
    gold = (f"{RWTH}/alignment.talp", "--gold-base=1", f"--source={RWTH}/test.de", f"--target={RWTH}/test.en")
    lines = run(*names, "--bootstrap=0", "--paired=none", gold=gold).splitlines()
    assert [line.split() for line in lines[1:5]] == [
        ["forward", "28.5", "71.3", "71.8", "71.5", "9931"],
        ["reverse", "32.0", "69.7", "66.4", "68.0", "9416"],
        ["intersection", "28.0", "87.1", "61.3", "71.9", "6863"],
        ["gdf", "27.7", "80.6", "65.4", "72.2", "7963"],
    ]

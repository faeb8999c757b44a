"""The files that are scored: invalid lines, doubts about how a file is read, and published rates."""

from pathlib import Path

import pytest

from alignment import cli
from tests.alignment.commands.conftest import FILES, FORWARD, PERFECT, Run, rates
from tests.alignment.data import DATA, needs

pytestmark = pytest.mark.usefixtures("files")


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


@needs("rwth-de-en")
@pytest.mark.parametrize(
    ("system", "options", "told"),
    [
        ("", ["--gold-base=1"], ""),
        ("reverse.:swapped", ["--gold-base=1"], ""),
        ("intersection.", ["--gold-base=1"], ""),
        ("", ["--gold-base=1", "--source", "--target"], ""),
        (
            "reverse.",
            ["--gold-base=1"],
            EXCHANGED.format("32.0 instead of 82.0", "target first, write {path}:swapped"),
        ),
        (
            ":swapped",
            ["--gold-base=1"],
            EXCHANGED.format("28.5 instead of 81.5", "source first, write {path}"),
        ),
        (
            "",
            ["--gold-base=1", "--gold-swapped"],
            EXCHANGED.format("28.5 instead of 81.5", "target first, write {path}:swapped"),
        ),
        (
            "",
            ["--gold-base=0"],
            f"{FAR.format('indices one more', '28.5 instead of 64.7')} if the gold counts from 1, write --gold-base 1",
        ),
    ],
)
def test_a_wrong_base_or_orientation_is_told_of(
    capsys: pytest.CaptureFixture[str], system: str, options: list[str], told: str
) -> None:
    name, _, settings = system.partition(":")
    path = f"{RWTH}/fastalign.test.deen.{name}talp"
    sides = {"--source": f"--source={RWTH}/test.de", "--target": f"--target={RWTH}/test.en"}
    words = [sides.get(option, option) for option in options]
    file = f"{path}:{settings}" if settings else path
    assert cli.main(["evaluate", f"{RWTH}/alignment.talp", file, *words, "--csv", "--bootstrap=0"]) == 0
    output, error = capsys.readouterr()
    assert len(output.splitlines()) == 2
    assert error.splitlines() == ([f"norm-align: warning: {path}: {told.format(path=path)}"] if told else [])


@needs("rwth-de-en")
def test_published_rows_of_fast_align(run: Run) -> None:
    """The rows of fastalign.deen-results.txt as rounded there, but for one recall, which is of another run (65.5)."""
    folder = DATA / "rwth-de-en"
    files = ["forward=", "reverse=reverse.", "intersection=intersection.", "gdf=grow-diagonal-final."]
    names = [f"{name}={folder}/fastalign.test.deen.{file}talp" for name, file in (file.split("=") for file in files)]
    names[1] += ":swapped"
    gold = (f"{folder}/alignment.talp", "--gold-base=1", f"--source={folder}/test.de", f"--target={folder}/test.en")
    lines = run(*names, "--bootstrap=0", "--paired=none", gold=gold).splitlines()
    assert [line.split() for line in lines[1:5]] == [
        ["forward", "28.5", "71.3", "71.8", "71.5", "9931"],
        ["reverse", "32.0", "69.7", "66.4", "68.0", "9416"],
        ["intersection", "28.0", "87.1", "61.3", "71.9", "6863"],
        ["gdf", "27.7", "80.6", "65.4", "72.2", "7963"],
    ]

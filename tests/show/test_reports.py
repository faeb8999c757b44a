"""Reports of analyses: all numbers, nothing from elsewhere, whole or not there."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis import read_result
from captum_norm.lab.analysis.results import AnalysisResult, Column, Table
from captum_norm.show import write_report
from captum_norm.show.pages import analysis_page
from tests.lab.analysis.results import LAYERS, RESULT, WORDS
from tests.pages import content


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("result") / "new" / "folder"
    write_report(RESULT, directory)
    return directory


def test_files_have_the_names_of_tables_and_plots(folder: Path) -> None:
    plots = {f"{plot.name}.{suffix}" for plot in RESULT.plots for suffix in ("png", "pdf")}
    assert {path.name for path in folder.iterdir()} == plots | {
        "layers.csv",
        "words.csv",
        "results.json",
        "report.html",
    }


def test_json_has_everything(folder: Path) -> None:
    assert read_result(folder) == RESULT
    told = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert told["metadata"] == RESULT.metadata
    assert told["summary"] == RESULT.summary
    assert told["tables"]["layers"]["rows"][3] == [2, "$x$", 1 / 3, 0.25, 0.25]
    assert told["tables"]["layers"]["columns"][2] == {"name": "norm", "label": "‖f(x)‖"}


@pytest.mark.parametrize("table", [LAYERS, WORDS], ids=lambda table: table.name)
def test_csv_has_the_values_in_full(folder: Path, table: Table) -> None:
    header, *rows = csv.reader(io.StringIO((folder / f"{table.name}.csv").read_bytes().decode(), newline=""))
    assert header == [column.name for column in table.columns]
    assert rows == [["" if cell is None else str(cell) for cell in row] for row in table.rows]


def test_page_has_the_numbers_and_spells_out_the_words() -> None:
    page = analysis_page(RESULT)
    assert (page.title, page.lead) == ("special-tokens: tiny", "What <special> tokens give.")
    assert [list(row) for row in page.tables[0].rows] == [
        ["mean of ‖f(x)‖", "2.68"], ["tokens", "251,234"], ["undefined", None], ["ρ", "−0.500"],
    ]  # fmt: skip
    assert page.facts == {
        "model": "tiny",
        "corpus name": "text & more",
        "corpus sha256": "ab",
        "corpus lines": "2",
        "seed": "0",
        "settings layers": "1, 2",
        "settings limit": "–",
        "command": "captum-norm analyze special-tokens --corpus 'text'",
    }
    layers, words = page.tables[1:]
    assert [(column.name, column.kind) for column in layers.columns] == [
        (column.label, "text" if column.name == "category" else "number") for column in LAYERS.columns
    ]
    assert [tuple(row) for row in layers.rows] == LAYERS.rows
    assert [list(row) for row in words.rows] == [['a, "b"', 12], ["ÿ\\x0az", 3]]


def test_page_shows_every_plot(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert [figure["title"] for figure in content(page)["figures"]] == [plot.title for plot in RESULT.plots]
    assert "<category>" not in page


def test_long_tables_are_folded_and_cut_on_the_page_alone(tmp_path: Path) -> None:
    def table(name: str, rows: int) -> Table:
        return Table(name, name, (Column("n", "n"),), [(index,) for index in range(rows)])

    result = AnalysisResult("a", "d", {}, [table("short", 30), table("long", 31), table("huge", 1001)])
    shown = analysis_page(result).tables
    assert [(one.folded, len(one.rows), one.note) for one in shown] == [
        (False, 30, ""),
        (True, 31, ""),
        (True, 1000, "The first 1000 of 1001 rows; huge.csv has all."),
    ]
    write_report(result, tmp_path)
    assert (tmp_path / "huge.csv").read_text(encoding="utf-8").endswith("\n999\n1000\n")


def test_same_result_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    for path in write_report(RESULT, tmp_path):
        assert path.read_bytes() == (folder / path.name).read_bytes(), path.name


def test_nothing_is_written_if_a_table_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="got the table layers; the result of special-tokens has words"):
        write_report(replace(RESULT, tables=[WORDS]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_results_come_last_and_no_file_is_ever_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = replace(RESULT, plots=[])  # figures take time
    write_report(plain, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(path: Path, _target: Path) -> None:
        if ".report.html." in path.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_report(replace(plain, summary={"new": 1.0}), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("content", [None, "", "{}", '{"tables": {}, "plots": [], "other": 1}'])
def test_folder_without_a_result_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"there is no results\.json in|is not the result of an analysis"):
        read_result(tmp_path)

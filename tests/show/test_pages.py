"""Pages of results: the numbers of explanations, patches and comparisons, under their names."""

import base64
import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch import nn

from captum_norm import AttributionMaps, InformationFlow, InvalidInputError, explain
from captum_norm.lab.analysis import read_result
from captum_norm.lab.analysis.results import AnalysisResult, Column, Table
from captum_norm.lab.comparison import MEASURES, Comparison
from captum_norm.loading import load
from captum_norm.methods import METHODS
from captum_norm.results.aggregation import add_half_identity, rollout
from captum_norm.results.maps import Patches
from captum_norm.show import explanation_page, patches_page, render_page, write_report
from captum_norm.show.pages import analysis_page, comparison_page, flow_graph
from captum_norm.show.text import decimal
from tests import tiny
from tests.lab.analysis.results import LAYERS, RESULT, WORD_TABLE
from tests.lab.comparison.examples import HOSTILE, TEXTS, comparison
from tests.pages import content, decoded

SENTENCES = ["a dog sees the cat", "the cat runs"]
bert = pytest.fixture(scope="module")(tiny.bert)


def test_each_text_has_its_scores_and_maps_without_padding(bert: Any) -> None:
    norms = explain(SENTENCES, bert, tiny.tokenizer(), page=False)
    heads = explain(SENTENCES, bert, tiny.tokenizer(), per_head=True)
    weights = explain(SENTENCES, bert, tiny.tokenizer(), method="weights")
    page = explanation_page(norms, weights, heads)
    assert [example.title for example in page.examples] == SENTENCES
    for number, example in enumerate(page.examples):
        assert list(example.inputs.texts) == norms[number].tokens[0]
        assert [scores.method for scores in example.scores] == ["norm", "weights"]
        for scores, expected in zip(example.scores, (norms, weights), strict=True):
            np.testing.assert_array_equal(scores.values, expected[number].scores[0])
        assert [maps.method for maps in example.maps] == ["norm", "weights", "norm"]
        for maps, expected in zip(example.maps, (norms, weights, heads), strict=True):
            squares: Any = expected[number].squares
            np.testing.assert_array_equal(maps.values, squares[0])
            assert (list(maps.layers), maps.stack, maps.signed) == ([0, 1], "encoder", False)


def test_methods_of_several_scopes_are_told_apart(bert: Any) -> None:
    scopes = ("attn", "attn_res_ln")
    both = [explain(SENTENCES[0], bert, tiny.tokenizer(), scope=scope, page=False) for scope in scopes]
    (example,) = explanation_page(*both).examples
    assert [scores.method for scores in example.scores] == ["norm (attn)", "norm (attn_res_ln)"]


@pytest.mark.parametrize(("position", "row"), [(0, 0), (-1, 6), (2, 2), ("first", 0), ("last", 6), ("mean", None)])
def test_the_explained_row_is_marked(bert: Any, position: Any, row: int | None) -> None:
    (example,) = explanation_page(explain(SENTENCES[0], bert, tiny.tokenizer(), position=position)).examples
    assert example.row == row


def test_negative_scores_of_causal_models_diverge() -> None:
    model = tiny.gpt2()
    options: dict[str, Any] = {"method": "decompx", "target": 5, "page": False}
    (example,) = explanation_page(explain(SENTENCES[0], model, tiny.tokenizer(), **options)).examples
    assert example.scores[0].signed
    assert [maps.stack for maps in example.maps] == ["decoder"]


def test_only_explanations_of_the_same_texts_go_together(bert: Any) -> None:
    one, other = (explain(text, bert, tiny.tokenizer()) for text in SENTENCES)
    with pytest.raises(InvalidInputError, match="different texts"):
        explanation_page(one, other)


MAPPED = [name for name, method in METHODS.items() if method.maps]


@pytest.fixture(scope="module")
def model() -> tuple[nn.Module, Any]:
    return load()


@pytest.mark.few
@pytest.mark.parametrize("method", MAPPED)
def test_the_rollout_that_a_page_draws_is_that_of_the_scores(method: str, model: tuple[nn.Module, Any]) -> None:
    explanation = explain("So it goes.", *model, method=method, position=2, page=False)
    (example,) = explanation_page(explanation).examples
    drawn = [maps for maps in example.maps if maps.residual is not None]
    if not drawn:
        assert explanation.aggregation != "rollout" or method in ("attention-gradient", "rollout")
        return
    # The weights' own score is their mean.
    expected = explain("So it goes.", *model, method="rollout", position=2) if method == "weights" else explanation
    stack = torch.from_numpy(drawn[0].values).double()[None]
    if not drawn[0].residual:
        stack = add_half_identity(stack / stack.sum(-1, keepdim=True))
    torch.testing.assert_close(rollout(stack)[0, -1, 2], expected.scores[0].double(), rtol=1e-4, atol=1e-6)


def test_edges_and_nodes_are_those_of_the_graph(model: tuple[nn.Module, Any]) -> None:
    inputs = model[1]("So it goes.", return_tensors="pt")
    (graph,) = InformationFlow(model[0]).graphs(inputs, position=1, threshold=0.05)
    shown = flow_graph(graph, "information-flow")
    assert [tuple(node) for node in graph.nodes] == list(shown.nodes)
    assert [(row, graph.nodes[index]) for row, index in shown.outputs] == [(1, graph.outputs[0])]
    assert len(graph.edges) == len(shown.edges) > 10
    for edge, (source, target, part, head, importance) in zip(graph.edges, shown.edges, strict=True):
        assert (graph.nodes[source], graph.nodes[target]) == (edge.source, edge.target)
        assert (part, head) == (edge.part, edge.head)
        assert importance == pytest.approx(edge.importance, rel=1e-5)


PICTURES = [np.full((4, 6, 3), shade) for shade in (0.25, 0.5, 1.0)]

PATCHES = [
    Patches(0, 0, torch.tensor([[1, 2, 3], [4, 5, 6]])),
    Patches(1, 1, torch.tensor([[2], [3]])),
    Patches(1, 2, torch.tensor([[5, 4]])),
]

SCORES = torch.arange(14.0).reshape(2, 7) - 9

TOKENS = [["[CLS]", *"------"], ["a", "b", *"----", "c"]]


def page(**changes: Any) -> Any:
    stack = torch.rand(2, 3, 7, 7)
    maps = AttributionMaps(None, stack, None, None, None, torch.ones(2, 7, dtype=torch.bool), TOKENS)
    options: dict[str, Any] = {"pictures": PICTURES, "scores": SCORES, "patches": PATCHES, "maps": maps}
    return maps, content(render_page(patches_page(**options | changes)))["examples"]


def test_patches_and_words_have_their_scores_names_and_maps() -> None:
    maps, (first, second) = page()
    assert first["inputs"]["texts"] == [
        "[CLS]", *(f"patch {row}, {column}" for row in (1, 2) for column in (1, 2, 3))
    ]  # fmt: skip
    assert second["inputs"]["texts"] == [
        "a", "b", "picture 1, patch 1, 1", "picture 1, patch 2, 1", "picture 2, patch 1, 2", "picture 2, patch 1, 1",
        "c",
    ]  # fmt: skip
    for number, example in enumerate((first, second)):
        np.testing.assert_array_equal(decoded(example["scores"][0]["values"]), SCORES[number])
        np.testing.assert_array_equal(decoded(example["maps"][0]["values"]), maps.decoder[number])
        assert example["scores"][0]["signed"] == bool((SCORES[number] < 0).any())
    assert [picture["positions"] for picture in second["pictures"]] == [[[2], [3]], [[5, 4]]]


def pixels(picture: Any) -> Any:
    return imread(io.BytesIO(base64.b64decode(picture["png"])))


def test_each_picture_is_its_own_and_scores_alone_have_numbers() -> None:
    _, examples = page()
    shades = [pixels(picture)[0, 0, 0] for example in examples for picture in example["pictures"]]
    np.testing.assert_allclose(shades, [0.25, 0.5, 1.0], atol=0.005)
    _, large = page(pictures=[np.zeros((1601, 90, 3), np.uint8), *PICTURES[1:]])
    assert pixels(large[0]["pictures"][0]).shape[:2] == (534, 30)
    _, examples = page(maps=None)
    assert (examples[1]["maps"], examples[1]["inputs"]["texts"][:2]) == ([], ["token 0", "token 1"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pictures": PICTURES[:2]}, "got 2 pictures and the patches of 3"),
        ({"patches": []}, "got 3 pictures and the patches of 0"),
        ({"scores": SCORES[:, :4]}, r"got scores of shape \(2, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        page(**changes)


def test_equal_pictures_give_equal_bytes() -> None:
    one, other = (render_page(patches_page(PICTURES, SCORES, PATCHES)) for _ in range(2))
    assert one == other


@pytest.fixture(params=["classifier", "causal"], name="found", scope="module")
def either(request: pytest.FixtureRequest) -> Comparison:
    return comparison(request.param)


def test_the_table_has_every_number_and_marks_the_best(found: Comparison) -> None:
    table, means = comparison_page(found).tables[0], found.means()
    shown = [measure for measure in MEASURES if found.explained != "logit" or measure.name != "log_odds"]
    assert [column.name for column in table.columns[1:-2]] == [f"{one.title} {one.arrow}" for one in shown]
    for name, row in zip(found.ranking, table.rows, strict=True):
        result = found.results[name]
        expected = [means[name][one.name] for one in shown]
        assert row == [name, *expected, result.seconds, result.forward_ratio]
    for at, measure in enumerate(shown, 1):
        marked = [found.ranking[row] for row, where in table.strong if where == at]
        assert set(marked) == found.best()[measure.name]


def test_agreement_refusals_and_signatures_are_tables_and_curves_figures(found: Comparison) -> None:
    page = comparison_page(found)
    gains = {name: float(found.results[name].faithfulness.relevance_gain.mean()) for name in found.ranking}
    assert [one.title for one in page.figures] == [f"{name}: gain {decimal(gains[name])}" for name in found.ranking]
    tables = {table.title: table for table in page.tables}
    order = [list(found.results).index(name) for name in found.ranking]
    values = [row[1:] for row in tables["Agreement"].rows]
    np.testing.assert_array_equal(np.array(values, dtype=float), found.agreement.numpy()[order][:, order])
    assert [column.meaning for column in tables["Agreement"].columns[1:]] == found.ranking
    numbered = [f"{column.name} {column.meaning}" for column in tables["Agreement"].columns[1:]]
    assert [row[0] for row in tables["Agreement"].rows] == numbered
    assert {row[0]: row[1] for row in tables["Signatures"].rows} == {
        name: one.signature for name, one in found.results.items()
    }
    refused = tables.get("Methods that were refused")
    assert {row[0]: row[1] for row in (refused.rows if refused else [])} == dict(found.refused)


def test_texts_have_every_method_and_only_removable_tokens_count(found: Comparison) -> None:
    page = comparison_page(found)
    for index, example in enumerate(page.examples):
        real = found.real[index]
        assert list(example.inputs.texts) == [
            text for text, one in zip(TEXTS[index], real.tolist(), strict=True) if one
        ]
        assert example.counted == found.removable[index][real].tolist()
        assert [scores.method for scores in example.scores] == found.ranking
        for name, scores in zip(found.ranking, example.scores, strict=True):
            np.testing.assert_allclose(scores.values, found.results[name].scores[index][real], rtol=1e-6)
            assert scores.signed == (scores.values < 0).any()


def test_everything_given_is_escaped() -> None:
    page = render_page(comparison().page())
    assert HOSTILE not in page
    assert len(re.findall("<script", page)) == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("result") / "new" / "folder"
    write_report(RESULT, directory)
    return directory


def test_files_have_the_names_of_tables_and_plots(folder: Path) -> None:
    files = {f"{plot.name}.{suffix}" for plot in RESULT.plots for suffix in ("png", "pdf")}
    files |= {"layers.csv", "words.csv", "results.json", "report.html"}
    assert {path.name for path in folder.iterdir()} == files


def test_json_has_everything(folder: Path, tmp_path: Path) -> None:
    assert read_result(folder) == RESULT
    told = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    older = told | {"plots": [plot | {"log_x": False} for plot in told["plots"]]}  # of version 0.2.0
    (tmp_path / "results.json").write_text(json.dumps(older), encoding="utf-8")
    assert read_result(tmp_path) == RESULT
    assert told["metadata"] == RESULT.metadata
    assert told["summary"] == RESULT.summary
    assert told["tables"]["layers"]["rows"][3] == [2, "$x$", 1 / 3, 0.25, 0.25]
    assert told["tables"]["layers"]["columns"][2] == {"name": "norm", "label": "‖f(x)‖"}


@pytest.mark.parametrize("table", [LAYERS, WORD_TABLE], ids=lambda table: table.name)
def test_csv_has_the_values_in_full(folder: Path, table: Table) -> None:
    header, *rows = csv.reader(io.StringIO((folder / f"{table.name}.csv").read_bytes().decode(), newline=""))
    assert header == [column.name for column in table.columns]
    assert rows == [["" if cell is None else str(cell) for cell in row] for row in table.rows]


def test_page_has_the_numbers_and_spells_out_the_words() -> None:
    page = analysis_page(RESULT)
    assert (page.title, page.lead) == ("What does special-tokens find in tiny?", "What <special> tokens give.")
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
        write_report(replace(RESULT, tables=[WORD_TABLE]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_results_come_last_and_no_file_is_ever_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = replace(RESULT, plots=[])  # figures take time
    write_report(plain, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    replaces = Path.replace

    def full(path: Path, target: Path) -> None:
        if ".report.html." in path.name:
            raise OSError(28, "No space left on device")
        replaces(path, target)

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

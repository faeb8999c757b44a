"""Pages of alignments: links, gold links and maps in the places where the model has them."""

from typing import Any

import numpy as np
import pytest

from alignment import Alignment, GoldAlignment, WordAligner, alignment_error_rate
from alignment.corpora import load_alibi
from alignment.fairseq.loading import load_shipped_model
from alignment.links import ScoredAlignment
from alignment.pages import aligner_page, alignment_page, sweep_page
from alignment.selection import Choice
from alignment.sweep import AUTO, Reading, Sweep, sweep
from captum_norm import InvalidInputError

SOURCE, TARGET = ["la", "maison", "bleue"], ["the", "blue", "house"]
FOUND = Alignment([(0, 0), (1, 2), (2, 0)])
GOLD = GoldAlignment(Alignment([(1, 2)]), Alignment([(2, 1)]))


@pytest.fixture(scope="module")
def swept() -> Sweep:
    story = load_alibi("last-lesson")
    few: Any = {name: getattr(story, name)[10:22] for name in ("sources", "targets", "gold")}
    corpus = type(story)(story.name, story.source_language, story.target_language, **few)
    return sweep(*load_shipped_model("fr-en"), corpus, gradients=False, n_bootstrap=1)


def test_links_have_the_target_first_and_the_gold_links_beside_them() -> None:
    page = alignment_page([SOURCE], [TARGET], [FOUND], gold=[GOLD])
    (example,) = page.examples
    (links,) = example.links
    assert example.outputs is not None
    assert [(example.outputs.texts[i], example.inputs.texts[j]) for i, j, _ in links.links] == [
        ("the", "la"), ("house", "maison"), ("the", "bleue"),
    ]  # fmt: skip
    assert links.sure == [(2, 1)]
    assert sorted(links.possible or ()) == [(1, 2), (2, 1)]


def test_no_gold_links_are_none_and_not_an_empty_gold_alignment() -> None:
    def gold_of(**given: Any) -> Any:
        links = alignment_page([SOURCE], [TARGET], [FOUND], **given).examples[0].links[0]
        return links.sure, links.possible

    assert gold_of() == (None, None)
    assert gold_of(gold=[GoldAlignment(Alignment())]) == ([], [])


def test_an_aligners_page_has_the_maps_and_probabilities_that_it_reads() -> None:
    model, tokenizer = load_shipped_model("fr-en")
    story = load_alibi("last-lesson")
    pairs = [*zip(story.sources[3:6], story.targets[3:6], strict=True), (["la"] * 3000, ["the"])]
    aligner = WordAligner(model, tokenizer, layer=0, head=2, recipe="hmm")
    examples = aligner_page(aligner, pairs).examples
    assert len(examples) == 3
    maps: Any = dict(aligner.map_each(pairs[:3]))
    answers = dict(aligner.read_each(pairs[:3]))
    for index, example in enumerate(examples):
        found = answers[index]
        assert isinstance(found, ScoredAlignment)
        assert list[object](example.links[0].links) == [
            (j, i, pytest.approx(score)) for (i, j), score in found.scored_links()
        ]
        np.testing.assert_allclose(example.maps[0].values[0], maps[index], rtol=1e-3, atol=1e-6)
    counting = WordAligner(model, tokenizer, layer=0, head=2, count_text=True)
    examples = aligner_page(counting, pairs).examples
    shown = [{(i, j) for j, i, _ in example.links[0].links} for example in examples]
    assert shown == [set(links) for links in counting.align(story.sources[3:6], story.targets[3:6])]


@pytest.mark.parametrize("null", [False, True])
def test_maps_are_those_of_the_words_without_the_null_column(null: bool) -> None:
    word_map = np.arange(9 + 3 * null).reshape(3, 3 + null)
    (maps,) = alignment_page([SOURCE], [TARGET], [FOUND], maps=[word_map]).examples[0].maps
    np.testing.assert_array_equal(maps.values, word_map[None, :, :3])
    assert maps.stack == "links"
    assert alignment_page([SOURCE], [TARGET], [FOUND], maps=[None]).examples[0].maps == []


def test_unequal_numbers_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="got 1 source sentences, 1 target sentences, 1 alignments, 2 gold"):
        alignment_page([SOURCE], [TARGET], [FOUND], gold=[GOLD, GOLD])


def test_a_sweep_shows_the_worst_pairs_first_with_every_heads_maps(swept: Sweep) -> None:
    page, chosen = sweep_page(swept, "fr-en"), swept.chosen[AUTO]
    read = swept.results[Reading("norm", chosen)].alignments
    rates = [alignment_error_rate([one], [gold]).aer for one, gold in zip(read, swept.corpus.gold, strict=True)]
    shown = [int(example.facts["pair"]) for example in page.examples]
    assert [rates[index] for index in shown] == sorted(rates, reverse=True)[:8]
    for index, example in zip(shown, page.examples, strict=True):
        source = swept.corpus.sources[index]
        assert (list(example.inputs.texts), example.facts["AER"]) == (source, f"{rates[index]:.1f}")
        heads, together = (maps.values for maps in example.maps if maps.method == f"norms, {chosen.setting}")
        for layer in range(swept.layers):
            for head, shape in ((None, together[layer]), (2, heads[layer, 2])):
                expected = swept.maps["norm", Choice(chosen.setting, layer, head)][index][:, : len(source)]
                np.testing.assert_allclose(shape, expected, rtol=1e-3, atol=1e-6)
        own = next(links for links in example.links if links.method == f"norms, {chosen.setting}")
        assert {(source, target) for target, source, _ in own.links} == read[index].links
        assert own.sure == [(target, source) for source, target in swept.corpus.gold[index].sure]


def test_the_tables_of_a_sweep_have_the_rates_and_the_best_of_each_row_bold(swept: Sweep) -> None:
    table = next(table for table in sweep_page(swept, "fr-en").tables if table.title.startswith("AER by setting"))
    names = [column.name for column in table.columns]
    assert (names[0], len(names)) == ("method", 1 + 2 * swept.layers)
    for place, (row, method) in enumerate(zip(table.rows, ("norm", "weights"), strict=True)):
        for name, cell in zip(names[1:], row[1:], strict=True):
            setting, layer = name.split()
            reading = Reading(method, Choice(setting, int(layer)))  # type: ignore[arg-type]
            assert cell == f"{swept.results[reading].score.aer:.1f}"
        best = min(float(str(cell)) for cell in row[1:])
        assert [at for line, at in table.strong if line == place] == [
            at for at, cell in enumerate(row) if at and float(str(cell)) == best
        ]

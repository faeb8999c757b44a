"""Comparisons on answers: scores, measures and refusals by direct computation."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import Attribution
from torch import Tensor

import captum_norm as cn
from captum_norm.errors import InvalidInputError
from captum_norm.generation.ablations import SourceAblations
from captum_norm.lab.answers import ANSWER_MEASURES, AnswerComparison, SourcePrompt, compare_answers, read_prompts
from captum_norm.lab.prompts import evidence_prompts
from captum_norm.lab.surrogates import ContextCite, HeadWeighted
from tests.generation.test_ablations import ANSWER, PASSAGES, QUESTION
from tests.generation.texts import gpt2, llama, tokenizer
from tests.lab.answers.test_measures import spearman_by_hand

WORDS = ["red", "old", "ring", "boat"]
PROMPTS = [
    SourcePrompt("\n".join([*PASSAGES[:3], QUESTION]), PASSAGES[:3], ANSWER, (0,)),
    SourcePrompt("\n".join([*PASSAGES, QUESTION]), PASSAGES, ANSWER, (0, 2)),
    SourcePrompt("\n".join([*PASSAGES[1:3], QUESTION]), PASSAGES[1:3], ANSWER, (1,)),
]


class Picky(Attribution):
    """Scores tokens by their ids, but refuses inputs of the first prompt's length."""

    def __init__(self, model: Any, refused: int) -> None:
        super().__init__(model)
        self.model, self.refused = model, refused

    def attribute(self, inputs: Any, target: Any = None, position: Any = None) -> Tensor:  # noqa: ARG002
        ids: Tensor = inputs["input_ids"]
        if ids.shape[1] == self.refused:
            raise InvalidInputError("this length\nis refused")
        return ids.double()


def compared(**options: Any) -> AnswerComparison:
    settings: dict[str, Any] = {"methods": ["decompx", "weights"], "ablations": 12, "tokenizer": tokenizer()}
    return compare_answers(llama(), PROMPTS, **settings | options)


def test_scores_and_measures_are_those_computed_directly() -> None:
    found = compared()
    assert list(found.results) == ["random", "leave one out", "decompx", "weights"]
    assert found.answers == [ANSWER] * 3
    assert [tuple(texts) for texts in found.sources] == [tuple(prompt.segments or ()) for prompt in PROMPTS]
    for number, prompt in enumerate(PROMPTS):
        ablations = SourceAblations(llama(), tokenizer(), prompt.prompt, ANSWER, segments=prompt.segments or "line")
        count = len(ablations.sources)

        def log_p(kept: Tensor, ablations: SourceAblations = ablations) -> Tensor:
            return ablations.log_probabilities(kept).sum(1)

        whole, none = log_p(torch.tensor([[True] * count, [False] * count])).tolist()
        assert found.log_probabilities[number].tolist() == pytest.approx([whole, none])
        falls = [whole - float(log_p(torch.arange(count)[None] != source)) for source in range(count)]
        attribution = cn.GenerationAttribution(cn.DecompX(llama()), tokenizer())
        decomposed = attribution.attribute(prompt.prompt, ANSWER, segments=prompt.segments, per_token=False)
        for name, expected in {"leave one out": falls, "decompx": decomposed.segment_attr.tolist()}.items():
            result = found.results[name]
            assert result.scores[number, :count].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
            assert result.scores[number, count:].isnan().all()
            order = sorted(range(count), key=lambda source: -expected[source])
            best = torch.tensor([source != order[0] for source in range(count)])
            drop = whole - float(log_p(best[None]))
            assert float(result.measures["drop"][number]) == pytest.approx(drop, abs=1e-4)
            among = {*order[: len(prompt.evidence)]} & {*prompt.evidence}
            assert float(result.measures["precision"][number]) == len(among) / len(prompt.evidence)
            assert float(result.measures["recovery"][number]) == (order[0] in prompt.evidence) / len(prompt.evidence)


def test_methods_of_sources_are_rows() -> None:
    cite = ContextCite(llama(), tokenizer(), 8, seed=3)
    found = compared(methods={"cite": cite, "heads": HeadWeighted(llama(), tokenizer())})
    for number, prompt in enumerate(PROMPTS):
        expected: Any = cite.attribute(prompt.prompt, ANSWER, segments=prompt.segments or "line").segment_attr
        torch.testing.assert_close(found.results["cite"].scores[number, : len(expected)], expected)
    assert found.results["cite"].signature == "attribution:ContextCite|ablations:8|seed:3"
    assert ["no weights yet" in why for why in found.results["heads"].refused] == [True] * 3


def test_lds_is_over_the_random_ablations() -> None:
    found = compared(ablations=20, seed=5)
    torch.manual_seed(5)  # the first prompt's draws: random scores, then what is kept
    scores = torch.rand(3, dtype=torch.float64)
    kept = torch.rand(20, 3) < 0.5
    assert torch.equal(found.results["random"].scores[0, :3], scores)
    ablations = SourceAblations(llama(), tokenizer(), PROMPTS[0].prompt, ANSWER, segments=PASSAGES[:3])
    p = ablations.log_probabilities(kept).sum(1).exp()
    expected = spearman_by_hand((kept * scores).sum(1).tolist(), (p / (1 - p)).log().tolist())
    assert float(found.results["random"].measures["lds"][0]) == pytest.approx(expected, abs=1e-12)


def test_what_a_method_refuses_is_counted() -> None:
    length = tokenizer()(f"{PROMPTS[0].prompt}{ANSWER}", return_tensors="pt")["input_ids"].shape[1] - 1
    found = compared(methods={"picky": Picky(llama(), length), "weights": "weights"})
    picky = found.results["picky"]
    assert list(picky.refused) == ["this length is refused", "", ""]
    assert picky.scores[0].isnan().all()
    assert [bool(column[0].isnan()) for column in picky.measures.values()] == [True] * len(ANSWER_MEASURES)
    assert not picky.measures["drop"][1:].isnan().any()
    (row,) = (row for row in found.records() if row["method"] == "picky")
    assert (row["refused"], row["drop"]) == (1, float(picky.measures["drop"][1:].mean()))
    assert found.facts()["picky refuses 1"] == "answer 0: this length is refused"


def test_prompts_that_do_not_fit_are_left_out() -> None:
    long = SourcePrompt(" ".join(WORDS * 40), "word", ANSWER)
    found = compare_answers(
        gpt2(), [long, "Anna owns a boat.\nPaul"], methods=["weights"], ablations=4, tokenizer=tokenizer(),
        gen_args={"max_new_tokens": 3},
    )  # fmt: skip
    assert len(found) == 1
    assert found.skipped[0].startswith("prompt 0: got ")
    assert list(found.sources[0]) == ["Anna owns a boat.", "Paul"]
    assert found.columns("recovery")["weights"].isnan().all()
    with pytest.raises(InvalidInputError, match="no prompt fits the model; prompt 0: got "):
        compare_answers(gpt2(), [long], methods=["weights"], ablations=4, tokenizer=tokenizer())


def test_records_have_intervals_and_paired_significance() -> None:
    found = compared(baseline="weights")
    rows = {row["method"]: row for row in found.records()}
    ours, theirs = (found.results[name].measures["drop"] for name in ("decompx", "weights"))
    differences = (ours - theirs).tolist()
    means = [sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in product((1, -1), repeat=3)]
    expected = sum(abs(mean) >= abs(means[0]) - 1e-12 for mean in means) / len(means)
    assert rows["decompx"]["drop_p"] == pytest.approx(expected)
    assert rows["weights"]["drop_p"] == 1
    assert rows["decompx"]["drop_low"] <= rows["decompx"]["drop"] <= rows["decompx"]["drop_high"]
    assert float(ours.min()) - 1e-9 <= rows["decompx"]["drop_low"]
    assert rows["decompx"]["forward_ratio"] > 0
    order = [row["lds"] for row in found.records()]
    assert order == sorted(order, reverse=True)


def test_results_are_saved_and_joined(tmp_path: Path) -> None:
    whole = compared()
    assert AnswerComparison.load(whole.save(tmp_path / "found.safetensors")) == whole
    parts = [
        compare_answers(
            llama(), [prompt], methods=["decompx", "weights"], ablations=12, tokenizer=tokenizer(), seed=seed
        )
        for seed, prompt in enumerate(PROMPTS)
    ]
    joined = AnswerComparison.concatenate(parts)
    for name in ("random", "decompx"):
        assert torch.equal(joined.results[name].scores.isnan(), whole.results[name].scores.isnan())
        for measure, column in whole.results[name].measures.items():
            assert torch.allclose(joined.results[name].measures[measure], column, equal_nan=True, atol=1e-6)
    content = json.loads(whole.save(tmp_path / "found.json").read_text())
    assert content == json.loads(json.dumps(whole.records()))
    assert whole.save(tmp_path / "found.csv").read_text().startswith("method,lds,")


def test_a_page_and_a_figure_have_the_numbers() -> None:
    length = tokenizer()(f"{PROMPTS[0].prompt}{ANSWER}", return_tensors="pt")["input_ids"].shape[1] - 1
    found = compared(methods={"picky": Picky(llama(), length), "weights": "weights"}, baseline="weights")
    page, rows = found.page(), found.records()
    (table,) = page.tables
    titles = [column.name.split()[0] for column in table.columns]
    assert titles == ["method", *(measure.title for measure in ANSWER_MEASURES), "p", "×"]
    for row, cells in zip(rows, table.rows, strict=True):
        means = [float(str(cell).split(" ± ")[0]) for cell in cells[1 : 1 + len(ANSWER_MEASURES)]]
        assert means == pytest.approx([row[measure.name] for measure in ANSWER_MEASURES], abs=5e-3)
        assert cells[-2:] == [row["lds_p"], row["forward_ratio"]]
    for at, measure in enumerate(ANSWER_MEASURES, 1):
        assert {rows[place]["method"] for place, column in table.strong if column == at} == found.best()[measure.name]
    assert f"By LDS, {rows[0]['method']} ({rows[0]['lds']:.3f})" in page.answer
    for number, (example, prompt) in enumerate(zip(page.examples, PROMPTS, strict=True)):
        assert list(example.inputs.texts) == list(prompt.segments or ())
        assert example.facts["evidence"] == " ".join((prompt.segments or ())[place] for place in prompt.evidence)
        scores = {one.method: one.values for one in example.scores}
        assert ("picky" in scores) == (number > 0)
        for name, values in scores.items():
            assert list(values) == pytest.approx(found.results[name].scores[number, : len(example.inputs)].tolist())
    axes: Any = found.plot().axes[0]
    assert [label.get_text().rpartition(" (")[0] for label in axes.get_yticklabels()] == [row["method"] for row in rows]
    assert [bar.get_width() for bar in axes.patches] == [row["lds"] for row in rows]


def test_generated_prompts_and_their_evidence() -> None:
    (prompt,) = evidence_prompts("conflict", 1, passages=5)
    found = compare_answers(_roomy(), [prompt], methods=["weights"], ablations=4, tokenizer=tokenizer())
    assert list(found.sources[0]) == list(prompt.passages)
    assert list(found.evidence[0]) == list(prompt.evidence)


def _roomy() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer()), intermediate_size=32, **sizes)).train(False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "norm"}, "baseline"),
        ({"ablations": 0}, "ablations"),
        ({"methods": ["no"]}, "got the method 'no'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        compared(**options)


def test_no_prompts() -> None:
    empty: list[str] = []
    for prompts in (empty, "Anna owns"):
        with pytest.raises(InvalidInputError, match="got no list of prompts"):
            compare_answers(gpt2(), prompts, tokenizer=tokenizer())


def test_lines_are_read() -> None:
    lines = [
        '{"passages": ["One.", "Two."], "question": "Which?", "answer": " Two.", "evidence": [1]}',
        "",
        '{"prompt": "One. Two."}',
        '{"prompt": [{"role": "user", "content": "One."}], "passages": ["One."], "evidence": []}',
    ]
    assert read_prompts(lines) == [
        SourcePrompt("One.\nTwo.\nWhich?", ["One.", "Two."], " Two.", (1,)),
        SourcePrompt("One. Two."),
        SourcePrompt([{"role": "user", "content": "One."}], ["One."], None, ()),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        "{}",
        '{"prompt": "a", "question": "b", "passages": ["a"]}',
        '{"question": "b"}',
        '{"passages": ["a"]}',
        '{"passages": "a", "question": "b"}',
        '{"passages": [1], "question": "b"}',
        '{"passages": ["a"], "question": 2}',
        '{"passages": ["a"], "question": "b", "evidence": [1]}',
        '{"passages": ["a"], "question": "b", "evidence": [true]}',
        '{"passages": ["a"], "question": "b", "evidence": 0}',
        '{"prompt": "a", "answer": 3}',
        '{"prompt": "a", "evidence": [0]}',
        '{"prompt": "a", "typo": 3}',
    ],
)
def test_a_bad_line_is_named(line: str) -> None:
    with pytest.raises(InvalidInputError, match="line 2 of the prompts cannot be read; expected ") as caught:
        read_prompts(['{"prompt": "a"}', line])
    assert "\n" not in str(caught.value)

"""Pages of explained texts: the explanations' numbers, under the methods' names, text by text."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from captum_norm import InvalidInputError, explain
from captum_norm.show.pages import explanation_page
from tests.tiny import WORDS, bert_config, tokenizer

TEXTS = ["a dog sees the cat", "the cat runs"]


@pytest.fixture(scope="module")
def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(bert_config()).eval()  # type: ignore[no-untyped-call]


def test_each_text_has_its_scores_and_maps_without_padding(bert: Any) -> None:
    norms = explain(TEXTS, bert, tokenizer())
    heads = explain(TEXTS, bert, tokenizer(), per_head=True)
    weights = explain(TEXTS, bert, tokenizer(), method="weights")
    page = explanation_page(norms, [weights, heads])
    assert [example.title for example in page.examples] == TEXTS
    for number, example in enumerate(page.examples):
        assert list(example.inputs.texts) == norms[number].tokens[0]
        assert [scores.method for scores in example.scores] == ["norm", "weights"]
        for scores, expected in zip(example.scores, (norms, weights), strict=True):
            np.testing.assert_array_equal(scores.values, expected[number].scores[0])
        assert [maps.method for maps in example.maps] == ["norm", "weights", "norm"]
        for maps, expected in zip(example.maps, (norms, weights, heads), strict=True):
            squares = expected[number].squares
            assert squares is not None
            np.testing.assert_array_equal(maps.values, squares[0])
            assert (list(maps.layers), maps.stack, maps.signed) == ([0, 1], "encoder", False)


def test_methods_of_several_scopes_are_told_apart(bert: Any) -> None:
    both = [explain(TEXTS[0], bert, tokenizer(), scope=scope) for scope in ("attn", "attn_res_ln")]
    (example,) = explanation_page(both[0], both[1:]).examples
    assert [scores.method for scores in example.scores] == ["norm (attn)", "norm (attn_res_ln)"]


@pytest.mark.parametrize(("position", "row"), [(0, 0), (-1, 6), (2, 2), ("first", 0), ("last", 6), ("mean", None)])
def test_the_explained_row_is_marked(bert: Any, position: Any, row: int | None) -> None:
    (example,) = explanation_page(explain(TEXTS[0], bert, tokenizer(), position=position)).examples
    assert example.row == row


def test_negative_scores_of_causal_models_diverge() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=len(WORDS), n_embd=8, n_layer=2, n_head=2, n_positions=12)
    model = transformers.GPT2LMHeadModel(config).eval()  # type: ignore[no-untyped-call]
    (example,) = explanation_page(explain(TEXTS[0], model, tokenizer(), method="decompx", target=5)).examples
    assert example.scores[0].signed
    assert [maps.stack for maps in example.maps] == ["decoder"]


def test_only_explanations_of_the_same_texts_go_together(bert: Any) -> None:
    one, other = (explain(text, bert, tokenizer()) for text in TEXTS)
    with pytest.raises(InvalidInputError, match="different texts"):
        explanation_page(one, [other])

"""Words of maps with two sides, of segments, of the last rows, and of measurements, against plain sums and means."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from captum_norm import AttentionWeights, AttributionMaps, InvalidInputError, NormAttribution, NormMeter
from captum_norm.attr.measurements import Measurements
from captum_norm.text.words import Words, words_of_tokens
from tests import tiny

VOCABULARY = ["<pad>", "</s>", "▁le", "▁chat", "s", "▁chien", "▁the", "▁c", "at", "▁dog", "▁run", "▁r", "uns"]
SOURCES = [["▁le", "▁chat", "s", "</s>"], ["▁le", "▁chien", "</s>"]]
TARGETS = [["▁the", "▁c", "at", "s", "▁run"], ["▁the", "▁dog", "▁r", "uns"]]
SOURCE_GROUPS = [[[0], [1, 2], [3]], [[0], [1], [2]]]
TARGET_GROUPS = [[[0], [1, 2, 3], [4]], [[0], [1], [2, 3]]]
HOW: Any = {"sum": np.sum, "mean": np.mean, "max": np.max}


class Tokenizer:
    """Names the ids."""

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [VOCABULARY[index] for index in ids]


def ids_of(rows: Sequence[Sequence[str]], side: str = "right", prefix: str = "") -> dict[str, torch.Tensor]:
    """Ids and mask, padded on a side."""
    size = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), size, dtype=torch.long), torch.zeros(len(rows), size, dtype=torch.long)
    for row, tokens in enumerate(rows):
        places = slice(0, len(tokens)) if side == "right" else slice(size - len(tokens), size)
        ids[row, places], mask[row, places] = torch.tensor([VOCABULARY.index(token) for token in tokens]), 1
    return {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}


def both(side: str = "right") -> dict[str, torch.Tensor]:
    return ids_of(SOURCES, side) | ids_of(TARGETS, side, "decoder_")


def by_words(maps: Any, rows: list[list[int]] | None, columns: list[list[int]] | None, score: str = "sum") -> Any:
    """Maps (..., Q, K) by words: columns combined, then rows averaged."""
    found = np.asarray(maps, dtype=np.float64)
    if columns is not None:
        found = np.stack([HOW[score](found[..., group], axis=-1) for group in columns], -1)
    if rows is not None:
        found = np.stack([found[..., group, :].mean(-2) for group in rows], -2)
    return found


@pytest.fixture(scope="module")
def bart() -> Any:
    return tiny.bart(len(VOCABULARY), pad_token_id=0)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("score", ["sum", "mean", "max"])
@pytest.mark.parametrize("per_head", [False, True])
def test_each_side_has_its_own_words(bart: Any, side: str, score: Any, per_head: bool) -> None:
    maps = NormAttribution(bart, tokenizer=Tokenizer()).maps(both(side), per_head=per_head)
    assert [[token for token in row if token != "<pad>"] for row in maps.tokens or []] == SOURCES
    words = maps.words(score)
    assert words.tokens == [["le", "chats", "</s>"], ["le", "chien", "</s>"]]
    assert words.decoder_tokens == [["the", "cats", "run"], ["the", "dog", "runs"]]
    assert torch.equal(words.real, torch.ones(2, 3, dtype=torch.bool))
    assert words.convergence_delta is not None
    for example, (source, target) in enumerate(zip(SOURCE_GROUPS, TARGET_GROUPS, strict=True)):
        one, found = maps[example], words[example]
        sides = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
        for name, (rows, columns) in sides.items():
            expected = by_words(getattr(one, name)[0], rows, columns, score)
            np.testing.assert_allclose(getattr(found, name)[0], expected, rtol=1e-5, atol=1e-9)
    cross = next(stack for stack in words.stacks() if stack.name == "cross")
    assert (cross.rows(0), cross.columns(1)) == (["the", "cats", "run"], ["le", "chien", "</s>"])
    assert words.words(score) == words


def test_sides_of_different_length_are_padded(bart: Any) -> None:
    """Words of one example are fewer than those of the other, on one side alone."""
    given = [words_of_tokens(["▁le", "▁chats", "▁x", "▁</s>"]), words_of_tokens(["▁le", "chien", "</s>"])]
    maps = NormAttribution(bart, tokenizer=Tokenizer()).maps(both())
    words: Any = maps.words(words=given)
    assert (words.tokens, words.real.tolist()) == (
        [["le", "chats", "x", "</s>"], ["lechien", "</s>", "", ""]],
        [[True] * 4, [True, True, False, False]],
    )
    assert words.cross.shape == (2, 2, 3, 4)
    assert not words.cross[1, ..., 2:].any()
    expected = by_words(maps[1].cross[0], TARGET_GROUPS[1], [[0, 1], [2]])  # type: ignore[index]
    np.testing.assert_allclose(words[1].cross[0], expected, rtol=1e-5)


@pytest.mark.parametrize("stacks", [["encoder"], ["decoder"], ["cross"], ["decoder", "cross"]])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("of", [NormAttribution, AttentionWeights])
def test_some_stacks_know_whose_positions_theirs_are(bart: Any, stacks: list[str], side: str, of: Any) -> None:
    """The decoder alone has its own padding and tokens, cross-attention alone those of both sides."""
    method = of(bart, tokenizer=Tokenizer())
    inputs = both(side)
    whole, some = method.maps(inputs), method.maps(inputs, stacks=stacks)
    own = "decoder_attention_mask" if stacks == ["decoder"] else "attention_mask"
    assert torch.equal(some.real, inputs[own].bool())
    two = len({*stacks} & {"decoder", "cross"}) > 0 and stacks != ["decoder"]
    if two:
        assert torch.equal(some.decoder_real, inputs["decoder_attention_mask"].bool())
    else:
        assert some.decoder_real is some.decoder_tokens is None
    names = {stack.name: (stack.rows(1), stack.columns(1)) for stack in some.stacks()}
    assert names == {stack.name: (stack.rows(1), stack.columns(1)) for stack in whole.stacks() if stack.name in stacks}
    assert whole.stacks()[2].columns(1) == SOURCES[1]
    assert whole.stacks()[2].rows(1) == TARGETS[1]
    by_word, expected = some.words(), whole.words()
    for name in stacks:
        torch.testing.assert_close(getattr(by_word, name), getattr(expected, name))
        torch.testing.assert_close(getattr(some[1], name), getattr(whole[1], name))


@pytest.mark.few
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("stack", ["encoder", "decoder", "cross"])
def test_maps_and_mixing_ratios_of_an_example_are_those_of_it_alone(bart: Any, stack: str, side: str) -> None:
    method, inputs = NormAttribution(bart, tokenizer=Tokenizer()), both(side)
    single = {name: tensor[1:] for name, tensor in inputs.items()}
    for prefix in ("", "decoder_"):
        mask = inputs[f"{prefix}attention_mask"][1].bool()
        for name in (f"{prefix}input_ids", f"{prefix}attention_mask"):
            single[name] = inputs[name][1:, mask]
    for per_head in (False, True):
        part: Any = method.maps(inputs, stacks=[stack], per_head=per_head)[1]
        alone = method.maps(single, stacks=[stack], per_head=per_head)
        torch.testing.assert_close(getattr(part, stack), getattr(alone, stack), rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(part.mixing_ratio, alone.mixing_ratio)
        assert (part.tokens, part.real.tolist()) == (alone.tokens, alone.real.tolist())
    options: dict[str, Any] = {"scopes": ["attn"], "weights": True, "head_norms": True, "stacks": [stack]}
    measured, expected = (NormMeter(bart).measure(given, **options)[stack] for given in (inputs, single))
    for name in ("weights", "head_norms", "transformed_norms", "residual_norm"):
        torch.testing.assert_close(getattr(measured[1], name), getattr(expected, name), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(measured[1].norms["attn"], expected.norms["attn"], rtol=1e-4, atol=1e-6)


def test_tokens_can_be_given(bart: Any) -> None:
    maps = NormAttribution(bart).maps(both())
    with pytest.raises(InvalidInputError, match=r"^got maps without tokens; give them by with_tokens"):
        maps.words()
    padded = [[*row, *["<pad>"] * (size - len(row))] for rows, size in ((SOURCES, 4), (TARGETS, 5)) for row in rows]
    with pytest.raises(InvalidInputError, match=r"^got maps of a decoder without tokens; give them by with_tokens"):
        maps.with_tokens(padded[:2]).words()
    given = maps.with_tokens(padded[:2], padded[2:])
    assert given.words() == NormAttribution(bart, tokenizer=Tokenizer()).maps(both()).words()
    own = [[words_of_tokens(row) for row in rows] for rows in (SOURCES, TARGETS)]
    assert maps.words(words=own[0], decoder_words=own[1]) == given.words()
    with pytest.raises(InvalidInputError, match=r"^got words of 1 examples for maps of a decoder of 2"):
        maps.words(words=own[0], decoder_words=own[1][:1])
    with pytest.raises(InvalidInputError, match=r"^got the words of 5 tokens for maps of 4 keys; expected as many$"):
        maps.words(words=own[1], decoder_words=own[1])
    odd: Any
    for odd in (0.5, "ab", [0.5, 0.5], [["a"], ["b"]]):
        with pytest.raises(InvalidInputError, match=r"^got words .*; expected a sequence of Words"):
            maps.words("sum", odd)


def test_the_last_rows_are_those_of_whole_maps(bart: Any) -> None:
    """Words that begin before the first row have one, of their tokens that have."""
    method = NormAttribution(bart, tokenizer=Tokenizer())
    first = {name: tensor[:1] for name, tensor in both().items() if "mask" not in name}
    whole, last = method.maps(first), method.maps(first, last=3)
    words = last.words()
    assert words.cached == 1
    assert (words.decoder_tokens, words.decoder_real.tolist()) == ([["the", "cats", "run"]], [[True, True]])  # type: ignore[union-attr]
    for name, columns in (("cross", SOURCE_GROUPS[0]), ("decoder", TARGET_GROUPS[0])):
        expected = by_words(getattr(whole, name)[0][:, -3:], [[0, 1], [2]], columns)
        np.testing.assert_allclose(getattr(words, name)[0], expected, rtol=1e-5, atol=1e-9)
    assert next(stack for stack in words.stacks() if stack.name == "cross").rows(0) == ["cats", "run"]
    assert words[0] == words


def test_examples_whose_rows_begin_at_different_words_are_taken_one_by_one() -> None:
    torch.manual_seed(0)
    model = transformers.GPT2Model(
        transformers.GPT2Config(vocab_size=len(VOCABULARY), n_embd=8, n_layer=2, n_head=2, n_positions=8)
    ).train(False)
    rows = [["▁le", "▁chat", "s", "▁run"], ["▁r", "uns", "s", "▁dog"]]
    maps: Any = NormAttribution(model).maps(ids_of(rows)["input_ids"], last=2).with_tokens(rows)
    with pytest.raises(InvalidInputError, match=r"^got examples with 0 and 1 words before the first row; take one at"):
        maps.words()
    words = maps[0].words()
    assert (words.tokens, words.cached, words.real.shape) == ([["le", "chats", "run"]], 1, (1, 2))
    expected = by_words(maps.decoder[0], [[0], [1]], [[0], [1, 2], [3]])
    np.testing.assert_allclose(words.decoder[0], expected, rtol=1e-5)
    assert maps[1].words().tokens == [["runss", "dog"]]


def test_rows_of_segments_are_words_and_columns_stay(bart: Any) -> None:
    method = NormAttribution(bart, tokenizer=Tokenizer())
    first = {name: tensor[:1] for name, tensor in both().items() if "mask" not in name}
    for stack, groups in (("cross", [0, 1, 1, 0]), ("decoder", [0, 0, 1, 1, 1])):
        segments = torch.tensor([groups])
        maps = method.maps(first, stacks=[stack], segments=segments)
        words = maps.words()
        expected = by_words(getattr(maps, stack)[0], TARGET_GROUPS[0], None)
        np.testing.assert_allclose(getattr(words, stack)[0], expected, rtol=1e-5)
        (shown,) = words.stacks()
        assert (shown.rows(0), shown.columns(0)) == (["the", "cats", "run"], ["0", "1"])
        together = method.maps(first, stacks=[stack], segments=segments, together=True)
        found = together.words()
        assert torch.equal(getattr(found, stack), getattr(together, stack))
        (shown,) = found.stacks()
        assert (shown.rows(0), shown.columns(0)) == (["0"], ["0", "1"])


def test_towers_have_no_words() -> None:
    maps = AttributionMaps(
        None, None, None, None, None, torch.ones(1, 2, dtype=torch.bool), [["a", "b"]],
        towers={"vision": torch.rand(1, 1, 2, 2)},
    )  # fmt: skip
    with pytest.raises(InvalidInputError, match=r"^got maps of vision alone, whose positions have no words$"):
        maps.words()


@pytest.mark.parametrize("score", ["sum", "mean", "max"])
def test_measurements_of_words(bart: Any, score: Any) -> None:
    meter = NormMeter(bart, tokenizer=Tokenizer())
    options: dict[str, Any] = {"scopes": ["attn", "attn_res"], "weights": True, "head_norms": True}
    for name, measured in meter.measure(both(), **options).items():
        words = measured.words(score)
        rows = TARGET_GROUPS if name != "encoder" else SOURCE_GROUPS
        columns = TARGET_GROUPS if name == "decoder" else SOURCE_GROUPS
        for example, groups in enumerate(zip(rows, columns, strict=True)):
            one, found = measured[example], words[example]
            for own, expected in (
                (found.weights, one.weights),
                (found.norms["attn_res"], one.norms["attn_res"]),
                (found.head_norms, one.head_norms),
            ):
                np.testing.assert_allclose(own[0], by_words(expected[0], *groups, score), rtol=1e-5, atol=1e-9)  # type: ignore[index]
            for own, expected in (
                (found.mixing_ratio["attn"], one.mixing_ratio["attn"]),
                (found.residual_norm, one.residual_norm),
            ):
                average = by_words(expected[0, ..., None], groups[0], None)[..., 0]  # type: ignore[index]
                np.testing.assert_allclose(own[0], average, rtol=1e-5)  # type: ignore[index]
            by_key = by_words(one.transformed_norms[0, ..., None, :], None, groups[1], score)[..., 0, :]  # type: ignore[index]
            np.testing.assert_allclose(found.transformed_norms[0], by_key, rtol=1e-5)  # type: ignore[index]
        assert (words.layers, words.layer_names) == (measured.layers, measured.layer_names)
        assert torch.equal(words.convergence_delta, measured.convergence_delta)  # type: ignore[arg-type]
        assert words.top(1)[0].key in {"le", "chats", "chien", "</s>", "the", "cats", "run", "dog", "runs"}
        for stack in measured.stacks():
            assert stack.rows(1) == (TARGETS if name != "encoder" else SOURCES)[1]
            assert stack.columns(1) == (TARGETS if name == "decoder" else SOURCES)[1]
            assert stack.unit == ("attention weight" if stack.name == "weights" else "norm")
        assert words.words() == words
    with pytest.raises(InvalidInputError, match=r"^got measurements without tokens"):
        replace(measured, tokens=None).words()
    with pytest.raises(InvalidInputError, match=r"^got the queries without tokens"):
        replace(measured, query_tokens=None).words()


def test_measurements_of_different_numbers_of_words_are_padded() -> None:
    rows = [["▁le", "▁chat", "▁dog", "▁run"], ["▁r", "uns", "s", "▁dog"]]
    measured: Any = NormMeter(tiny.bert()).measure(ids_of(rows)["input_ids"], weights=True)["encoder"]
    named: Measurements = replace(measured, tokens=rows)
    words: Any = named.words()
    assert words.real.tolist() == [[True] * 4, [True, True, False, False]]
    assert torch.equal(words.real_keys, words.real)
    expected = by_words(measured.weights[1], [[0, 1, 2], [3]], [[0, 1, 2], [3]])
    np.testing.assert_allclose(words[1].weights[0], expected, rtol=1e-5)
    assert not words.weights[1, :, 2:].any()
    given = [Words(("x", "y"), (0, 0, 1, 1), tuple(row)) for row in rows]
    assert named.words(words=given).tokens == [["x", "y"], ["x", "y"]]

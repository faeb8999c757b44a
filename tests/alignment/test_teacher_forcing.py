"""Batches of every family: decoder inputs, order, size, padding, and what is refused."""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from alignment.huggingface import HuggingFaceTokenizer
from alignment.teacher_forcing import teacher_forced_batches
from alignment.tokenization import EncodedSentence
from captum_norm import InvalidInputError, UnsupportedModelError
from tests.alignment.translation_models import FAMILIES, PAIRS, random_model


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random model of a family, and its tokenizer."""
    family = FAMILIES[request.param]
    tokenizer = family.tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return SimpleNamespace(
        name=request.param,
        start=tokenizer.convert_tokens_to_ids(family.start),
        model=random_model(family, tokenizer),
        tokenizer=HuggingFaceTokenizer(tokenizer, **family.options),
    )


@torch.no_grad()
def logits(model: Any, inputs: dict[str, Any]) -> Tensor:
    result: Tensor = model(**inputs).logits
    return result


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal but for float32's rounding, which is as large as the largest logit makes it; FSMT's runs in no other."""
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_logits_are_those_of_the_models_own_labels(made: Any) -> None:
    (batch,) = teacher_forced_batches(made.model, made.tokenizer, PAIRS)
    inputs = {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}
    if made.name == "FSMT":  # its forward function shifts no labels, but its training does
        own = {"decoder_input_ids": made.model.prepare_decoder_input_ids_from_labels(batch.labels.clone())}
    else:
        own = {"labels": batch.labels}
    expected = logits(made.model, inputs | own | {"use_cache": False})
    real = batch.labels != -100
    assert_same(logits(made.model, batch.inputs)[real], expected[real])
    assert expected[real].std() > 0.1


def test_padding_changes_nothing(made: Any) -> None:
    (batch,) = teacher_forced_batches(made.model, made.tokenizer, PAIRS)
    together = logits(made.model, batch.inputs)
    assert len({len(sentence.ids) for sentence in batch.source}) > 1
    for row, index in enumerate(batch.indices):
        (alone,) = teacher_forced_batches(made.model, made.tokenizer, [PAIRS[index]])
        assert [alone.source, alone.target] == [[batch.source[row]], [batch.target[row]]]
        assert alone.inputs["attention_mask"].all()
        expected = logits(made.model, alone.inputs)[0]
        assert_same(together[row, : len(expected)], expected)


def filling(encode: Callable[[Sequence[Sequence[str]]], list[EncodedSentence]], longest: int) -> list[str]:
    """As many words as have room in so many pieces."""
    words = ["a"]
    while len(encode([[*words, "a"]])[0].ids) <= longest:
        words.append("a")
    return words


def test_the_model_is_left_as_it_was(made: Any) -> None:
    before = {name: value.clone() for name, value in (*made.model.named_parameters(), *made.model.named_buffers())}
    longest = getattr(made.model.config, "max_position_embeddings", 128)
    sides = [filling(encode, longest) for encode in (made.tokenizer.encode_source, made.tokenizer.encode_target)]
    (batch,) = teacher_forced_batches(made.model, made.tokenizer, [(sides[0], sides[1])])
    assert longest - 3 <= batch.labels.shape[1] <= longest
    assert logits(made.model, batch.inputs).isfinite().all()
    after = dict((*made.model.named_parameters(), *made.model.named_buffers()))
    assert all(torch.equal(after.pop(name), value) for name, value in before.items())
    assert not after


class Words:
    """A tokenizer whose words are numbers: of one piece each, or as many as they say."""

    def __init__(self, end: int = 2) -> None:
        self.end = end

    def encode_source(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        if any("bad" in words for words in sentences):
            raise InvalidInputError("got a bad word")
        ids = [[4 + int(word) for word in words] for words in sentences]
        return [EncodedSentence([*row, self.end], [*range(len(row)), None]) for row in ids]

    encode_target = encode_source

    def decode_target(self, ids: Sequence[int]) -> list[str]:
        return [str(index - 4) for index in ids if index != self.end]


class Fairseq(nn.Module):
    """What fairseq's models take, and what they know of their lengths."""

    def __init__(self, longest: tuple[int, int] = (50, 40)) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(40, 4, padding_idx=1)
        self.longest = longest

    def max_positions(self) -> tuple[int, int]:
        return self.longest

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor, prev_output_tokens: Tensor, return_all_hiddens: bool = True
    ) -> Tensor:
        raise NotImplementedError


def numbers(count: int) -> list[str]:
    return [str(index % 30) for index in range(count)]


def test_fairseq_inputs_by_hand() -> None:
    pairs = [(["1"], ["2", "3", "4"]), (["5", "6"], ["7"])]
    (batch,) = teacher_forced_batches(Fairseq(), Words(), pairs)
    assert {name: value.tolist() for name, value in batch.inputs.items()} == {
        "src_tokens": [[5, 2, 1], [9, 10, 2]],
        "src_lengths": [2, 3],
        "prev_output_tokens": [[2, 6, 7, 8], [2, 11, 1, 1]],
    }
    assert batch.labels.tolist() == [[6, 7, 8, 2], [11, 2, -100, -100]]
    assert batch.indices == [0, 1]
    assert batch.source == Words().encode_source([["1"], ["5", "6"]])


@pytest.mark.parametrize("max_tokens", [1, 60, 200, 100_000])
@pytest.mark.parametrize("seed", range(3))
def test_every_pair_is_in_one_batch_within_the_budget(seed: int, max_tokens: int) -> None:
    generator = random.Random(seed)
    pairs = [(numbers(generator.randint(1, 40)), numbers(generator.randint(1, 35))) for _ in range(70)]
    batches = list(teacher_forced_batches(Fairseq(), Words(), pairs, max_tokens=max_tokens))
    assert sorted(index for batch in batches for index in batch.indices) == list(range(70))
    for batch in batches:
        sizes = batch.inputs["src_tokens"].shape, batch.labels.shape
        tokens = sizes[0].numel() + sizes[1].numel()
        assert tokens <= max_tokens or len(batch.indices) == 1
        for row, index in enumerate(batch.indices):
            assert (len(batch.source[row].ids), len(batch.target[row].ids)) == tuple(len(x) + 1 for x in pairs[index])
        longest = [max(len(x) + 1 for index in batch.indices for x in pairs[index][side : side + 1]) for side in (0, 1)]
        assert [size[1] for size in sizes] == longest
    if max_tokens == 200:
        real = sum(len(source) + len(target) + 2 for source, target in pairs)
        padded = sum(batch.inputs["src_tokens"].numel() + batch.labels.numel() for batch in batches)
        assert real / padded > 0.7  # 0.53 to 0.6 in the order given


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_batches_of_an_offloaded_model_are_where_it_runs(device: str) -> None:
    """The weights are on no device between calls; ``meta`` stands in for an accelerator here."""
    model: Any = Fairseq().to("meta")
    model.embeddings._hf_hook = SimpleNamespace(execution_device=device)
    (batch,) = teacher_forced_batches(model, Words(), [(["1"], ["2"])])
    assert {value.device.type for value in (batch.labels, *batch.inputs.values())} == {device}


MIXED = [
    (["1"], ["2"]),
    ([], ["2"]),
    (["1"], []),
    (["1", "bad"], ["2"]),
    (["1"], ["bad"]),
    (numbers(50), ["2"]),
    (numbers(49), numbers(39)),
    (["1"], numbers(40)),
    (["1" * 801], ["2"]),
]
PROBLEMS = {
    1: "got a source side without a word, expected at least one that the tokenizer keeps",
    2: "got a target side without a word, expected at least one that the tokenizer keeps",
    3: "got a bad word",
    4: "got a bad word",
    5: "got a source side of 51 pieces, expected at most 50, the number of positions that the model has",
    7: "got a target side of 41 pieces, expected at most 40, the number of positions that the model has",
    8: "got a source side of 801 letters, expected at most 800",
}


def test_pairs_that_cannot_be_used_are_told_and_left_out() -> None:
    told: dict[int, str] = {}
    batches = teacher_forced_batches(
        Fairseq(), Words(), MIXED, on_error=lambda index, error: told.update({index: str(error)})
    )
    assert told == PROBLEMS
    assert sorted(index for batch in batches for index in batch.indices) == [0, 6]


@pytest.mark.parametrize("index", PROBLEMS)
def test_pairs_that_cannot_be_used_are_refused(index: int) -> None:
    with pytest.raises(InvalidInputError, match=f"^pair 1: {PROBLEMS[index]}"):
        teacher_forced_batches(Fairseq(), Words(), [MIXED[0], MIXED[index]])


def test_models_with_a_table_of_positions_refuse_longer_pairs(made: Any) -> None:
    limit = getattr(made.model.config, "max_position_embeddings", None)
    pair = (["a"] * 200, ["a"])
    if limit is None:  # T5's positions are relative
        (batch,) = teacher_forced_batches(made.model, made.tokenizer, [pair])
        assert batch.inputs["input_ids"].shape[1] > 200
        for word in ("ab" * 10_000, "a" * 10**7):
            with pytest.raises(InvalidInputError, match=r"got a target side of \d+ (pieces|letters), expected at most"):
                teacher_forced_batches(made.model, made.tokenizer, [(["a"], [word])])
    else:
        with pytest.raises(InvalidInputError, match=rf"^pair 0: .* side of \d+ pieces, expected at most {limit}"):
            teacher_forced_batches(made.model, made.tokenizer, [pair])


Break = Callable[[Any], Any]


def without(name: str) -> Break:
    def broken(model: Any) -> Any:
        setattr(model.config, name, None)
        return model

    return broken


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("M2M100", without("decoder_start_token_id"), "got a M2M100ForConditionalGeneration without decoder_start_tok"),
        ("BART", without("pad_token_id"), "got a BartForConditionalGeneration without pad_token_id; set model.config"),
    ],
)
def test_configurations_that_lack_a_token_are_refused(name: str, change: Break, message: str, tmp_path: Any) -> None:
    tokenizer = FAMILIES[name].tokenizer(tmp_path)
    model = change(random_model(FAMILIES[name], tokenizer))
    with pytest.raises(InvalidInputError, match=message):
        list(teacher_forced_batches(model, Words(), [(["1"], ["2"])]))


def test_other_models_and_budgets_are_refused() -> None:
    message = r"the forward function of Linear takes input, expected input_ids, .* or src_tokens, src_lengths, prev_"
    with pytest.raises(UnsupportedModelError, match=message):
        teacher_forced_batches(nn.Linear(2, 2), Words(), [])
    with pytest.raises(InvalidInputError, match="got max_tokens=0, expected at least 1"):
        teacher_forced_batches(Fairseq(), Words(), [], max_tokens=0)

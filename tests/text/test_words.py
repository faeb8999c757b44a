"""Words of tokens, for tokenizers of every kind; scores of words against those added token by token."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, BertTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from captum_norm import InvalidInputError
from captum_norm.loading import DEFAULT_MODEL, LANGUAGE_MODEL
from captum_norm.loading.files import model_location
from captum_norm.text.words import WordScore, joined_spans, word_spans, words_of, words_of_tokens
from tests.alignment.translation_models import fsmt_tokenizer, m2m100_tokenizer, marian_tokenizer

# The words of a text, and the white space before each.
WORDS = [
    ("", "Don't"), ("  ", "stop"), ("", "—"), ("", "keys"), (" ", "&"), (" ", "naïve"), (" ", "cafe\u0301"),
    (" ", "🙂"), ("", "👩‍👩‍👧"), ("", "!!"), (" ", "日"), ("", "本"), ("", "語"), (" ", "שלום"), ("", ","),
    (" ", "mother-in-law"), (" ", "("), ("", "3.14"), ("", ")"), (" ", "किताब"),
    (" ", "한국어"), (" ", "a_b"), ("", "..."),
]  # fmt: skip
TEXT = "".join(space + word for space, word in WORDS)


def _backend(core: Tokenizer, **special: str) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)  # type: ignore[no-untyped-call]


def _bytes(*, trim: bool, size: int = 290) -> Any:
    """Byte-level BPE; GPT-2's and RoBERTa's offsets leave the space before a word out, those of others do not."""
    core = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(" ?[^\\s\\p{L}\\p{M}]| ?[\\p{L}\\p{M}]+|\\s", "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    core.train_from_iterator(["stop keys naïve mother in law"] * 3, trainer)
    return _backend(core, bos_token="<s>")


def _unigram(*, fallback: bool) -> Any:
    """SentencePiece's Unigram with Metaspace; unknown characters are bytes, or the unknown token."""
    scores = {"▁": -2, "▁stop": -1, "key": -2, "s": -3, "日": -4, "本": -4, "語": -4, "D": -3, "on": -3}
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((piece, float(score)) for piece, score in scores.items())]
    if fallback:
        pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    core = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=fallback))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return _backend(core, unk_token="<unk>", eos_token="</s>")


def _characters() -> Any:
    """CJK characters and WordPiece pieces, as BERT cuts them, in lower case and without accents."""
    special, pieces = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"], ["don", "'", "t", "sto", "##p", "日", "本"]
    vocabulary = [*special, *pieces, "keys", "naive"]
    return BertTokenizer(vocab={token: index for index, token in enumerate(vocabulary)})


def _read(name: str) -> Any:
    return AutoTokenizer.from_pretrained(model_location(name))


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "MiniLM": lambda: _read(DEFAULT_MODEL),
    "GPT-2": lambda: _read(LANGUAGE_MODEL),
    "bytes": lambda: _bytes(trim=False),
    "bytes trimmed": lambda: _bytes(trim=True),
    "fallback": lambda: _unigram(fallback=True),
    "WordPiece": _characters,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


def ordinary(words: Any, tokenizer: Any, ids: list[int]) -> list[str]:
    """The words that no special token is."""
    special = {
        words.numbers[at] for at, i in enumerate(ids) if i in tokenizer.all_special_ids and i != tokenizer.unk_token_id
    }
    return [text for number, text in enumerate(words.texts) if number not in special]


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


def test_words_are_those_of_the_text(tokenizer: Any) -> None:
    ids = tokenizer(TEXT)["input_ids"]
    words = words_of(tokenizer, ids, TEXT)
    found = ordinary(words, tokenizer, ids)
    # Tokenizers that make one unknown token of several words leave them one word.
    assert found == [word for _, word in WORDS] or "[UNK]" in words.pieces
    assert "".join(found) == "".join(TEXT.split())
    assert all(right - left in (0, 1) for left, right in pairwise(words.numbers))
    assert set(words.numbers) == set(range(len(words.texts)))
    assert len(words.pieces) == len(ids)
    assert not any(mark in piece for piece in words.pieces for mark in ("Ġ", "▁", "##", "<0x"))


def test_words_without_the_text_are_those_of_the_decoded_tokens(tokenizer: Any) -> None:
    """With the marks alone, too; WordPiece cannot tell what stood close together."""
    ids = tokenizer(TEXT)["input_ids"]
    expected = [word for _, word in WORDS]
    for words in (words_of(tokenizer, ids), words_of_tokens(tokenizer.convert_ids_to_tokens(ids))):
        found = ordinary(words, tokenizer, ids)
        if isinstance(tokenizer, BertTokenizer):
            assert found[:3] == ["don", "'", "t"]
        else:
            assert found == expected


def test_offsets_tell_what_stood_close_together() -> None:
    tokenizer = _read(DEFAULT_MODEL)
    found = tokenizer("Don't e.g. stop!")
    encoding = found.encodings[0]
    words = words_of_tokens(encoding.tokens, encoding.special_tokens_mask, encoding.offsets)
    assert words.texts == ("[CLS]", "don't", "e.g", ".", "stop", "!", "[SEP]")
    assert words_of_tokens(["some", "where", "else"], None, [(0, 4), (4, 9), (10, 14)]).texts == ("somewhere", "else")


@pytest.mark.parametrize("seed", range(8))
def test_any_text(tokenizer: Any, seed: int) -> None:
    """No character of a text is lost or doubled, no word is divided where its tokens are not."""
    generator = random.Random(seed)
    alphabet = ["a", "keys", "'", "-", ".", "é", "é", "日", "ー", "🙂", "👩\u200d👧", "ש", "กิ", "9", "_", "▁"]
    alphabet += [" ", "  ", "\n", "\t"]
    text = "x" + "".join(generator.choice(alphabet) for _ in range(30)) + "x"
    ids = tokenizer(text)["input_ids"]
    words = words_of(tokenizer, ids, text)
    found = "".join(ordinary(words, tokenizer, ids)).replace("↵", "")
    if "[UNK]" not in words.pieces and "▁" not in text:
        assert "".join(found.split()) == "".join(text.split())
    if tokenizer.convert_tokens_to_ids("<0xE2>") == tokenizer.unk_token_id:  # whose offsets are those of runs of bytes
        offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        for span in word_spans(text):
            assert len({words.numbers[at] for at, one in enumerate(offsets) if overlap(span, one)}) <= 1
    assert all(right - left in (0, 1) for left, right in pairwise(words.numbers))


def test_an_emoji_of_bytes_and_a_token_of_two_words() -> None:
    found = words_of_tokens(["Ġ", "ðŁ", "ĻĤ", "!", "Ċ", "a"])
    assert (found.texts, found.numbers) == (("🙂", "!", "↵", "a"), (0, 0, 0, 1, 2, 3))
    assert found.pieces == ("␣", "\\xf0\\x9f", "\\x99\\x82", "!", "↵", "a")
    joined = words_of_tokens(["▁in▁spite", "▁of.", "</s>"])
    assert (joined.texts, joined.numbers) == (("in spite", "of.", "</s>"), (0, 1, 2))


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        (["ab@@", "c", "d@@"], ("abc", "d")),
        (["ab", "c</w>", "d</w>"], ("abc", "d")),
        (["<s>", "<0xE2>", "<0x98>", "<0x83>", "▁a", "</s>"], ("<s>", "☃", "a", "</s>")),
        (
            ["<｜begin▁of▁sentence｜>", "Hi", "Ġyou", "<|im_end|>"],
            ("<｜begin▁of▁sentence｜>", "Hi", "you", "<|im_end|>"),
        ),
        (["##", "ĠTitle"], ("##", "Title")),
        (["[virtual 1]", "a", "##b"], ("[virtual 1]", "ab")),
        (["Ã©", "tÃ©"], ("été",)),
        (["a", "[UNK]", "é"], ("a", "[UNK]", "é")),
        (["Ġ", "Ġ"], ("␣", "␣")),
        ([], ()),
    ],
)
def test_marks(tokens: list[str], texts: tuple[str, ...]) -> None:
    assert words_of_tokens(tokens).texts == texts


def test_slow_tokenizers(tmp_path: Any) -> None:
    for make, text in ((marian_tokenizer, "das Haus"), (m2m100_tokenizer, "das Haus ,"), (fsmt_tokenizer, "the house")):
        folder = tmp_path / make.__name__
        folder.mkdir()
        tokenizer = make(folder)
        ids_of = {token: index for index, token in getattr(tokenizer, "decoder", {}).items()}  # FSMT's target language
        pieces = tokenizer.tokenize(text)
        ids = [ids_of[piece] for piece in pieces] if ids_of else tokenizer.convert_tokens_to_ids(pieces)
        assert not tokenizer.is_fast
        assert words_of(tokenizer, ids, text).texts == tuple(text.split())
    tokenizer = ByT5Tokenizer()
    ids = tokenizer("naïve 日本")["input_ids"]
    assert words_of(tokenizer, ids, "naïve 日本").texts == ("naïve", "日", "本", "</s>")


def test_pairs_of_texts_and_special_tokens_in_a_text() -> None:
    tokenizer = _read(DEFAULT_MODEL)
    ids = tokenizer("Don't", "e.g. [SEP]s")["input_ids"]
    assert words_of(tokenizer, ids, ("Don't", "e.g. [SEP]s")).texts == (
        "[CLS]", "Don't", "[SEP]", "e.g", ".", "[SEP]", "s", "[SEP]",
    )  # fmt: skip
    padded = words_of(tokenizer, [*ids, 0, 0], ("Don't", "e.g. [SEP]s"))
    assert padded.texts[-2:] == ("[PAD]", "[PAD]")


def test_spans() -> None:
    text = "l’homme's www.a.org 12:30 1,000 a,b x--y 'q' 3-4 and/or «a» snake_case ２０２４年 กา"
    assert [text[slice(*span)] for span in word_spans(text)] == [
        "l’homme's", "www.a.org", "12:30", "1,000", "a", ",", "b", "x", "--", "y", "'", "q", "'", "3-4", "and", "/",
        "or", "«", "a", "»", "snake_case", "２０２４", "年", "ก", "า",
    ]  # fmt: skip
    assert joined_spans([(0, 1), (1, 2), (3, 4)], [(0, 2), (2, 4)]) == [(0, 2), (3, 4)]
    assert joined_spans([], [(0, 2)]) == []


@pytest.mark.parametrize("score", ["sum", "mean", "max"])
@pytest.mark.parametrize("seed", [0, 1])
def test_scores_are_those_added_token_by_token(score: WordScore, seed: int) -> None:
    tokenizer = _read(DEFAULT_MODEL)
    ids = tokenizer("Unbelievably, don't antidisestablish!")["input_ids"]
    words = words_of(tokenizer, ids, "Unbelievably, don't antidisestablish!")
    scores = torch.randn(2, 3, len(ids), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    found = words.scores(scores, score)
    assert found.shape == (2, 3, len(words.texts)) != scores.shape
    for number in range(len(words.texts)):
        own = [scores[..., index] for index, one in enumerate(words.numbers) if one == number]
        stack = torch.stack(own)
        sign = stack.gather(0, stack.abs().argmax(0)[None])[0]
        expected = {"sum": sum(own), "mean": sum(own) / len(own), "max": sign}[score]
        torch.testing.assert_close(found[..., number], expected, rtol=0, atol=1e-12)
    if score == "sum":
        torch.testing.assert_close(found.sum(-1), scores.sum(-1))


def test_maps_and_further_positions() -> None:
    words = words_of_tokens(["a", "##b", "c"])
    maps = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.0, 0.75], [0.0, 0.5, 0.5]])
    assert words.maps(maps).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert words.maps(maps, "max").tolist() == [[0.375, 0.5], [0.5, 0.5]]
    behind = words.behind(["[virtual 1]"])
    assert (behind.numbers, behind.texts) == ((0, 1, 1, 2), ("[virtual 1]", "ab", "c"))


@pytest.mark.parametrize(
    ("scores", "score", "message"),
    [(torch.ones(4), "sum", "for 3 tokens"), (torch.ones(3), "median", "expected sum, mean or max")],
)
def test_scores_that_are_refused(scores: torch.Tensor, score: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        words_of_tokens(["a", "##b", "c"]).scores(scores, score)

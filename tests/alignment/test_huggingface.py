"""Tokenizers of every family: encodings against the tokenizer's own, word ids by hand and word by word."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

from alignment.huggingface import HuggingFaceTokenizer
from captum_norm import InvalidInputError
from tests.alignment.translation_models import (
    FAIRSEQ,
    FAMILIES,
    fsmt_tokenizer,
    m2m100_tokenizer,
    marian_tokenizer,
    mbart_tokenizer,
    nllb_tokenizer,
    sentence_pieces,
    t5_tokenizer,
    vocabulary,
)

SOURCES = [
    ["das", "Haus", "steht", "am", "See", ",", "nicht", "am", "Meer", "!"],
    ["übermorgen", "sieht", "der", "Mann", "die", "großen", "Häuser", "."],
    ["das", "☃", "a☃☃b", "☃", "ist", "☃."],
    ["日本語は", "ä", "語語"],
    ["ﬁn", "½", "1\u00a0000", "…"],
    ["Haus"],
]
TARGETS = [
    ["the", "house", "stands", "by", "the", "lake", ",", "not", "by", "the", "sea", "!"],
    ["a", "man", "sees", "the", "houses"],
]


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A family, its tokenizer, and a second one of the same that is told its languages."""
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer, told = family.tokenizer(folder), family.tokenizer(folder)
    for name, attribute in (("source_language", "src_lang"), ("target_language", "tgt_lang")):
        if name in family.options:
            setattr(told, attribute, family.options[name])
    return SimpleNamespace(
        name=request.param,
        family=family,
        tokenizer=tokenizer,
        told=told,
        aligner=HuggingFaceTokenizer(tokenizer, **family.options),
    )


def test_encodings_are_the_tokenizers_own(made: Any) -> None:
    prefix = made.family.options.get("source_prefix", "")
    texts = [" ".join([*prefix.split(), *words]) for words in SOURCES]
    assert [sentence.ids for sentence in made.aligner.encode_source(SOURCES)] == made.told(texts)["input_ids"]
    own = made.told(text_target=[" ".join(words) for words in TARGETS])["input_ids"]
    if made.name == "FSMT":  # its own encodes targets with the source's vocabulary
        vocabulary = json.loads(Path(made.told.tgt_vocab_file).read_text(encoding="utf-8"))
        pieces = [made.told.tokenize(" ".join(words)) for words in TARGETS]
        expected = [[*(vocabulary[piece] for piece in row), 2] for row in pieces]
        assert own != expected
        own = expected
    assert [sentence.ids for sentence in made.aligner.encode_target(TARGETS)] == own


def test_word_ids_are_those_of_the_words_encoded_alone(made: Any) -> None:
    def pieces(word: str, first: bool) -> int:
        return len(made.told.tokenize(word)) if first else len(made.told.tokenize(f"a {word}")) - before

    before = len(made.told.tokenize("a"))
    several = 0
    for words, sentence in zip(SOURCES, made.aligner.encode_source(SOURCES), strict=True):
        counts = [pieces(word, index == 0) for index, word in enumerate(words)]
        expected = [index for index, count in enumerate(counts) for _ in range(count)]
        assert [index for index in sentence.word_ids if index is not None] == expected
        several += sum(count > 1 for count in counts)
    assert several > 8


def test_words_come_back_whole_and_one_by_one(made: Any) -> None:
    for words, sentence in zip(TARGETS, made.aligner.encode_target(TARGETS), strict=True):
        groups = [
            [piece for piece, word in zip(sentence.ids, sentence.word_ids, strict=True) if word == index]
            for index in range(len(words))
        ]
        assert [made.aligner.decode_target(group) for group in groups] == [[word] for word in words]
        joined = made.aligner.decode_target(sentence.ids)
        # FSMT's detokenises as Moses does, which takes punctuation to the word before.
        text = " ".join(words)
        assert joined == (text.replace(" ,", ",").replace(" !", "!") if made.name == "FSMT" else text).split()


def test_nothing_to_encode(made: Any) -> None:
    assert made.aligner.encode_source([]) == made.aligner.encode_target([]) == []
    (empty,) = made.aligner.encode_target([[]])
    assert empty.word_ids == [None] * len(empty.ids)
    assert made.aligner.decode_target(empty.ids) == []


def state(tokenizer: Any) -> tuple[dict[str, Any], Any]:
    attributes = {name: value for name, value in vars(tokenizer).items() if "cache" not in name}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return attributes, backend and (backend.to_str(), backend.encode_special_tokens)


def test_the_tokenizer_is_left_as_it_was(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state(made.tokenizer)
    ids = [made.aligner.encode_source(SOURCES), made.aligner.encode_target(TARGETS)][1][0].ids
    made.aligner.decode_target(ids)
    assert state(made.tokenizer) == before
    with monkeypatch.context() as patch:
        patch.setattr("alignment.huggingface.word_ids_from_offsets", None)
        patch.setattr("alignment.huggingface.word_ids_from_pieces", None)
        with pytest.raises(TypeError):
            made.aligner.encode_target(TARGETS)
    assert state(made.tokenizer) == before


def test_special_tokens_are_not_read_from_the_text(made: Any) -> None:
    words = ["house", "</s>", "<pad>", "a</s>b"]
    if isinstance(getattr(made.tokenizer, "backend_tokenizer", Tokenizer(models.BPE())).model, models.Unigram):
        # These have the special tokens among their pieces.
        with pytest.raises(InvalidInputError, match=r"got 'house </s> <pad> a</s>b', which contains the padding token"):
            made.aligner.encode_target([words])
        return
    plain, marked = made.aligner.encode_target([words[:1], words])
    outside = [index for index, word in zip(plain.ids, plain.word_ids, strict=True) if word is None]
    inside = [index for index, word in zip(marked.ids, marked.word_ids, strict=True) if word is not None]
    assert not {*outside, made.tokenizer.pad_token_id} & set(inside)
    assert sorted(set(marked.word_ids) - {None}) == [0, 1, 2, 3]


def test_the_end_of_a_sentence_may_be_the_padding_token(tmp_path: Path) -> None:
    tokenizer = t5_tokenizer(tmp_path)
    expected = HuggingFaceTokenizer(tokenizer).encode_source(SOURCES)
    tokenizer.pad_token = tokenizer.eos_token
    assert HuggingFaceTokenizer(tokenizer).encode_source(SOURCES) == expected


def test_nothing_is_truncated(tmp_path: Path) -> None:
    tokenizer: Any = t5_tokenizer(tmp_path)
    aligner = HuggingFaceTokenizer(tokenizer)
    (whole,) = aligner.encode_source([SOURCES[0]])
    tokenizer.model_max_length = 4
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(5)
    backend.enable_padding(length=60)
    backend.encode_special_tokens = True
    before = state(tokenizer)
    assert aligner.encode_source([SOURCES[0]]) == [whole]
    assert len(whole.ids) > 10
    assert state(tokenizer) == before
    assert backend.truncation["max_length"] == 5
    assert backend.padding["length"] == 60

    slow = m2m100_tokenizer(tmp_path)
    slow.model_max_length = 4
    (long,) = HuggingFaceTokenizer(slow, source_language="de", target_language="en").encode_target([SOURCES[0]])
    assert max(index for index in long.word_ids if index is not None) == len(SOURCES[0]) - 1


# Character models, so that the pieces of each word can be counted by hand.
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, None]),
        ({"add_dummy_prefix": False}, [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, None]),
    ],
)
def test_sentencepiece_by_hand(tmp_path: Path, options: dict[str, Any], expected: list[int | None]) -> None:
    aligner = HuggingFaceTokenizer(marian_tokenizer(tmp_path, model_type="char", **options))
    # ▁das ▁See ▁. ▁日本語 (one unknown piece) ▁a☃ (two pieces) ▁!
    (sentence,) = aligner.encode_source([["das", "See", ".", "日本語", "a☃", "!"]])
    assert sentence.word_ids == expected


def test_moses_by_hand(tmp_path: Path) -> None:
    aligner = HuggingFaceTokenizer(fsmt_tokenizer(tmp_path))
    (sentence,) = aligner.encode_source([["das", "Haus.", "the", '"a"', "☃☃", "das-das"]])
    # das | Ha us . | the | &quot; a &quot;, letter by letter | ☃ ☃ | das @ - @ das
    assert sentence.word_ids == [0, *[1] * 3, 2, *[3] * 13, *[4] * 2, *[5] * 5, None]


def test_moses_knows_the_language_of_the_target(tmp_path: Path) -> None:
    fsmt_tokenizer(tmp_path)
    tokenizer = hf.FSMTTokenizer.from_pretrained(tmp_path, langs=["de", "fr"])
    aligner = HuggingFaceTokenizer(tokenizer)
    (source,), (target,) = aligner.encode_source([["l'an"]]), aligner.encode_target([["l'an"]])
    # German: l &apos; an. French: l&apos; an.
    assert source.ids[0] == tokenizer.encoder["l</w>"]
    assert tokenizer.decoder[target.ids[0]] == "l"


def test_prefix_is_of_no_word(tmp_path: Path) -> None:
    tokenizer: Any = t5_tokenizer(tmp_path)
    prefix = "translate German to English: "
    aligner = HuggingFaceTokenizer(tokenizer, source_prefix=prefix)
    (sentence,) = aligner.encode_source([["das", "Haus"]])
    (bare,) = HuggingFaceTokenizer(tokenizer).encode_source([["das", "Haus"]])
    assert sentence.ids == tokenizer(f"{prefix}das Haus")["input_ids"]
    extra = len(sentence.ids) - len(bare.ids)
    assert extra > 5
    assert sentence.word_ids == [None] * extra + bare.word_ids
    assert aligner.encode_target([["das"]]) == HuggingFaceTokenizer(tokenizer).encode_target([["das"]])


def test_languages_that_the_tokenizer_was_loaded_with(tmp_path: Path) -> None:
    m2m100_tokenizer(tmp_path)
    loaded = hf.M2M100Tokenizer.from_pretrained(tmp_path, src_lang="fr", tgt_lang="sv")
    other = HuggingFaceTokenizer(loaded, target_language="da")
    sides = (other.encode_source([["a"]])[0].ids[0], other.encode_target([["a"]])[0].ids[0])
    assert sides == (loaded.get_lang_id("fr"), loaded.get_lang_id("da"))
    loaded.src_lang = "it"
    assert HuggingFaceTokenizer(loaded).encode_source([["a"]])[0].ids[0] == loaded.get_lang_id("it")
    assert loaded.tgt_lang == "sv"


Make = Callable[[Path], Any]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (t5_tokenizer, {"source_language": "de"}, "got the language 'de' for a T5Tokenizer, which has no choice"),
        (fsmt_tokenizer, {"target_language": "fr"}, "got the language 'fr' for a FSMTTokenizer, which has no"),
        (m2m100_tokenizer, {}, "got no source language for a M2M100Tokenizer, expected a code such as 'en'"),
        (nllb_tokenizer, {"source_language": "deu_Latn"}, "got no target language .* give target_language"),
        (m2m100_tokenizer, {"source_language": "xx"}, "got the source language 'xx', which this M2M100Tokenizer does"),
        (mbart_tokenizer, {"target_language": "fr"}, "got the target language 'fr', .* such as 'de_DE'"),
        (
            nllb_tokenizer,
            {"source_language": "deu_Latn", "target_language": "fra_Latn"},
            "got the target language 'fra_Latn', which this NllbTokenizer does not know",
        ),
        (  # made from a SentencePiece model alone, it has no language codes
            lambda folder: nllb_tokenizer(folder) and hf.NllbTokenizer.from_pretrained(folder),
            {"source_language": "deu_Latn", "target_language": "eng_Latn"},
            "got the source language 'deu_Latn', which this NllbTokenizer does not know",
        ),
        (lambda _: hf.ByT5Tokenizer(), {}, "got the slow ByT5Tokenizer, expected a fast tokenizer or one of Marian"),
        (
            lambda folder: marian_tokenizer(folder, codes=(">>eng<<", ">>fra<<")),
            {"source_prefix": "eng"},
            "got the source_prefix 'eng' for a tokenizer of 2 target languages, expected one of >>eng<<, >>fra<<",
        ),
        (lambda folder: marian_tokenizer(folder, codes=(">>eng<<", ">>fra<<")), {}, "got the source_prefix '' for a t"),
    ],
)
def test_what_cannot_be_used_is_refused(make: Make, options: dict[str, str], message: str, tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    with pytest.raises(InvalidInputError, match=message):
        HuggingFaceTokenizer(tokenizer, **options)


def test_pieces_of_two_words_are_an_error(tmp_path: Path) -> None:
    sentence_pieces(
        tmp_path / "sentencepiece.bpe.model", ["aa bb"], vocab_size=12, model_type="bpe", split_by_whitespace=False
    )
    vocabulary(tmp_path / "vocab.json", FAIRSEQ)
    slow = hf.M2M100Tokenizer.from_pretrained(tmp_path, src_lang="de", tgt_lang="en")
    assert slow.tokenize("aa bb") == ["▁aa▁bb"]
    with pytest.raises(InvalidInputError, match=r"got the piece '▁aa▁bb', expected 'aa' of word 0"):
        HuggingFaceTokenizer(slow).encode_source([["aa", "bb"]])

    core = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a▁b", -1.0), ("▁", -2.0)], unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")  # type: ignore[no-untyped-call]
    with pytest.raises(InvalidInputError, match="got the piece 'a b', which spans words 0 to 1"):
        HuggingFaceTokenizer(fast).encode_target([["a", "b"]])

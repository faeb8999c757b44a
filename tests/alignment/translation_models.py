"""Tiny tokenizers and random models of the translation families, made on the spot."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import transformers as hf
from tokenizers import ByteLevelBPETokenizer

from alignment.huggingface import HuggingFaceTokenizer
from tests.tiny import halves

SOURCES = [
    "das Haus ist klein .",
    "das kleine Haus steht am See , nicht am Meer !",
    "ein Mann sieht die großen Häuser",
    "die Straße führt nach Hause",
    "übermorgen fährt der Mann zum See",
]
TARGETS = [
    "the house is small .",
    "the small house stands by the lake , not by the sea !",
    "a man sees the big houses",
    "the road leads home",
    "the man drives to the lake the day after tomorrow",
]
PAIRS = [(source.split(), target.split()) for source, target in zip(SOURCES, TARGETS, strict=True)]
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        tokenizer: makes a tokenizer, with the files that it needs in a folder.
        model: a tokenizer -> a model of its vocabulary, not yet random.
        source: the special tokens around a source, with ``*`` for the text.
        target: likewise, around the labels.
        start: what the decoder reads first.
        options: what HuggingFaceTokenizer is told.
    """

    tokenizer: Callable[[Path], Any]
    model: Callable[[Any], hf.PreTrainedModel]
    source: str
    target: str
    start: str
    options: Mapping[str, str] = field(default_factory=dict)


def sentence_pieces(
    path: Path, sentences: Iterable[str], *, vocab_size: int = 70, **options: Any
) -> sentencepiece.SentencePieceProcessor:
    """Trains a SentencePiece model into a file."""
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(list(sentences) * 3),
            model_writer=file,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def vocabulary(path: Path, *parts: Iterable[str]) -> None:
    """Numbers the pieces into a JSON file."""
    pieces = dict.fromkeys(piece for part in parts for piece in part)
    path.write_text(json.dumps({piece: index for index, piece in enumerate(pieces)}), encoding="utf-8")


def pieces_of(model: sentencepiece.SentencePieceProcessor) -> list[str]:
    """Its pieces without <unk>, <s> and </s>."""
    return [model.id_to_piece(index) for index in range(3, model.get_piece_size())]


def marian_tokenizer(folder: Path, *, separate: bool = False, codes: tuple[str, ...] = (), **options: Any) -> Any:
    """Marian's: two SentencePiece models, and a vocabulary of both or one for each."""
    source = pieces_of(sentence_pieces(folder / "source.spm", SOURCES, **options))
    target = pieces_of(sentence_pieces(folder / "target.spm", TARGETS, **options))
    head, tail = ("</s>", "<unk>"), (*codes, "<pad>")
    if not separate:
        vocabulary(folder / "vocab.json", head, source, target, tail)
        return hf.MarianTokenizer.from_pretrained(folder)
    vocabulary(folder / "vocab.json", head, source, tail)
    # Marian's padding has one id on both sides.
    room = [f"unused{index}" for index in range(len(source) - len(target))]
    vocabulary(folder / "target_vocab.json", head, target, room, tail)
    return hf.MarianTokenizer.from_pretrained(folder, separate_vocabs=True)


def m2m100_tokenizer(folder: Path, **options: Any) -> Any:
    """M2M100's, with byte fallback, which its own models do not have."""
    options = {"vocab_size": 330, "byte_fallback": True} | options
    pieces = pieces_of(sentence_pieces(folder / "sentencepiece.bpe.model", SOURCES + TARGETS, **options))
    vocabulary(folder / "vocab.json", FAIRSEQ, pieces)
    return hf.M2M100Tokenizer.from_pretrained(folder)


def nllb_tokenizer(folder: Path) -> Any:
    """The tokenizer of NLLB."""
    sentence_pieces(folder / "sentencepiece.bpe.model", SOURCES + TARGETS, model_type="bpe", vocab_size=120)
    return hf.NllbTokenizer.from_pretrained(folder, extra_special_tokens=["deu_Latn", "eng_Latn"])


def mbart_tokenizer(folder: Path) -> Any:
    """The tokenizer of mBART."""
    sentence_pieces(folder / "sentencepiece.bpe.model", SOURCES + TARGETS)
    return hf.MBartTokenizer.from_pretrained(folder, src_lang="de_DE", tgt_lang="en_XX")


def mbart50_tokenizer(folder: Path) -> Any:
    """The tokenizer of mBART-50."""
    sentence_pieces(folder / "sentencepiece.bpe.model", SOURCES + TARGETS)
    return hf.MBart50Tokenizer.from_pretrained(folder)


def bart_tokenizer(folder: Path) -> Any:
    """BART's byte-level BPE."""
    core = ByteLevelBPETokenizer()
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    core.train_from_iterator(SOURCES + TARGETS, vocab_size=320, show_progress=False, special_tokens=specials)
    core.save_model(str(folder))
    return hf.BartTokenizer.from_pretrained(folder)


def led_tokenizer(folder: Path) -> Any:
    """LED's, which is BART's."""
    bart_tokenizer(folder)
    led: Any = hf
    return led.LEDTokenizer.from_pretrained(folder)


def t5_tokenizer(folder: Path) -> Any:
    """T5's and mT5's."""
    sentence_pieces(folder / "spiece.model", SOURCES + TARGETS, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    return hf.T5Tokenizer.from_pretrained(folder, extra_ids=2)


MERGES = ("d a", "da s</w>", "h e</w>", "t he</w>", "i s", "o u", "H a", "u s")


def fsmt_tokenizer(folder: Path) -> Any:
    """FSMT's: the same merges, but a vocabulary for each side."""
    for name, sentences in (("vocab-src.json", SOURCES), ("vocab-tgt.json", TARGETS)):
        letters = sorted({letter for sentence in sentences for letter in sentence if letter != " "})
        merged = [merge.replace(" ", "") for merge in MERGES]
        vocabulary(folder / name, FAIRSEQ, letters, [f"{letter}</w>" for letter in letters], merged)
    (folder / "merges.txt").write_text("".join(f"{merge} 1\n" for merge in MERGES), encoding="utf-8")
    return hf.FSMTTokenizer.from_pretrained(folder, langs=["de", "en"])


SIZES = halves(2, 2, 16, 2, 24) | {"max_position_embeddings": 128}
T5_SIZES: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
T5_SIZES |= {"decoder_start_token_id": 0}
LED_SIZES = {name: size for name, size in SIZES.items() if name != "max_position_embeddings"}
LED_SIZES |= {f"max_{half}_position_embeddings": 128 for half in ("encoder", "decoder")} | {"attention_window": [8, 8]}


def _ids(tokenizer: Any) -> dict[str, Any]:
    """The special ids that a configuration names."""
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return {name: index for name, index in ids.items() if index is not None}


def marian(tokenizer: Any) -> hf.PreTrainedModel:
    """A Marian model."""
    target_size = len(tokenizer.target_encoder) if tokenizer.separate_vocabs else len(tokenizer.encoder)
    config = hf.MarianConfig(
        vocab_size=len(tokenizer.encoder),
        decoder_vocab_size=target_size,
        share_encoder_decoder_embeddings=not tokenizer.separate_vocabs,
        tie_word_embeddings=not tokenizer.separate_vocabs,
        decoder_start_token_id=tokenizer.pad_token_id,
        **SIZES,
        **_ids(tokenizer),
    )
    return hf.MarianMTModel(config)


def model(name: str, sizes: dict[str, Any] = SIZES, further: int = 0) -> Callable[[Any], hf.PreTrainedModel]:
    """Makes a model of transformers by its name, of a tokenizer's vocabulary and ``further`` pieces."""

    def make(tokenizer: Any) -> Any:
        kind = getattr(hf, f"{name}ForConditionalGeneration")
        ids = {} if sizes is T5_SIZES else _ids(tokenizer)
        return kind(kind.config_class(vocab_size=len(tokenizer) + further, **sizes, **ids))

    return make


def fsmt(tokenizer: Any) -> hf.PreTrainedModel:
    """An FSMT model."""
    config = hf.FSMTConfig(
        langs=["de", "en"],
        src_vocab_size=tokenizer.src_vocab_size,
        tgt_vocab_size=tokenizer.tgt_vocab_size,
        **SIZES,
    )
    return hf.FSMTForConditionalGeneration(config)


def random_model(family: Family, tokenizer: Any, seed: int = 0) -> hf.PreTrainedModel:
    """A model whose every weight, gain and bias is random and large enough to matter."""
    torch.manual_seed(seed)
    model = family.model(tokenizer)
    model.eval()  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def languages(source: str, target: str) -> dict[str, str]:
    return {"source_language": source, "target_language": target}


# M2M100's language codes come after its vocabulary, and are not counted.
M2M100 = model("M2M100", further=110)
MBART = model("MBart")
FAMILIES = {
    "Marian": Family(marian_tokenizer, marian, "* </s>", "* </s>", "<pad>"),
    "Marian, two vocabularies": Family(
        lambda folder: marian_tokenizer(folder, separate=True), marian, "* </s>", "* </s>", "<pad>"
    ),
    "Marian, several languages": Family(
        lambda folder: marian_tokenizer(folder, codes=(">>eng<<", ">>fra<<"), add_dummy_prefix=False),
        marian,
        ">>eng<< * </s>",
        "* </s>",
        "<pad>",
        {"source_prefix": ">>eng<<"},
    ),
    "M2M100": Family(m2m100_tokenizer, M2M100, "__de__ * </s>", "__en__ * </s>", "</s>", languages("de", "en")),
    "NLLB": Family(
        nllb_tokenizer, M2M100, "deu_Latn * </s>", "eng_Latn * </s>", "</s>", languages("deu_Latn", "eng_Latn")
    ),
    "mBART": Family(mbart_tokenizer, MBART, "* </s> de_DE", "* </s> en_XX", "en_XX"),
    "mBART-50": Family(mbart50_tokenizer, MBART, "de_DE * </s>", "en_XX * </s>", "</s>", languages("de_DE", "en_XX")),
    "BART": Family(bart_tokenizer, model("Bart"), "<s> * </s>", "<s> * </s>", "</s>"),
    "LED": Family(led_tokenizer, model("LED", LED_SIZES), "<s> * </s>", "<s> * </s>", "</s>"),
    "T5": Family(t5_tokenizer, model("T5", T5_SIZES), "* </s>", "* </s>", "<pad>"),
    "mT5": Family(t5_tokenizer, model("MT5", T5_SIZES), "* </s>", "* </s>", "<pad>"),
    "FSMT": Family(fsmt_tokenizer, fsmt, "* </s>", "* </s>", "</s>"),
}


def made(name: str, folder: Path, seed: int = 0) -> tuple[Any, HuggingFaceTokenizer]:
    """A random model of a family, and its tokenizer."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer(folder)
    return random_model(family, tokenizer, seed), HuggingFaceTokenizer(tokenizer, **family.options)

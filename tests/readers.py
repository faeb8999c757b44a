"""Every reader of a file, with contents that it reads."""

import argparse
import gzip
import io
import lzma
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
from sentencepiece import SentencePieceTrainer
from subword_nmt.learn_bpe import learn_bpe
from transformers import BertModel

from alignment import GoldAlignment, Lexicon, read_gold, read_parallel, read_pharaoh
from alignment.fairseq.checkpoint import Checkpoint, read_checkpoint
from alignment.fairseq.tokenizer import SPECIAL, BPESegmenter, Dictionary, SentencePieceSegmenter, read_dictionary
from alignment.formats import GoldFormat, format_pharaoh
from captum_norm import AttributionMaps, InvalidInputError, loading
from captum_norm.lab.analysis import read_result
from captum_norm.lab.analysis.corpus import Corpus
from captum_norm.lab.analysis.results import number_files
from captum_norm.loading.files import read_config
from captum_norm.results.base import Result
from captum_norm.results.maps import Patches
from tests.alignment.fairseq.small import settings, weights
from tests.lab.analysis.results import RESULT
from tests.tiny import bert_config, save_tiny

COUNT = 250
"""How many damaged files of a kind are read."""

TEXT = "Das Haus , 1\u00a0000 m² groß .\nEs ist klein\u2028und alt .\n\nJa !\n"
PAIRS = "das Haus ||| the house\nja ||| yes\n , ||| ,\n"
LINKS = ["0-0 1-2 2-1\n\n3-3\n0-0 12-7\n"]
TALP = ["0-0 1p2 2-1\n\n3-3\n", "1-1 2-1\n7p3\n"]
WORDS = ["la", "séance", "½", "…", "e\u0301", "\u200b", "est", "x" * 40]


class Reader(NamedTuple):
    """A file's name, valid contents, what reads it and writes it again, and how many damaged ones to read."""

    name: str
    files: Sequence[bytes]
    read: Callable[[Path], Any]
    written: Callable[[Any], bytes] | None = None
    cases: int = COUNT


def texts(*contents: str) -> list[bytes]:
    return [content.encode() for content in contents]


def joined(lines: Sequence[str]) -> bytes:
    """A file of lines, which may begin with a byte order mark and end with carriage returns of their own."""
    return "".join(["\ufeff", *(f"{line}\r\n" for line in lines)]).encode()


def talp(gold: GoldAlignment) -> str:
    return " ".join(f"{i}{'-' if (i, j) in gold.sure else 'p'}{j}" for i, j in gold.possible)


def gold(
    format: GoldFormat,  # noqa: A002
    *contents: str,
    written: Callable[[list[GoldAlignment]], bytes] | None,
    base: Literal[0, 1] | None = None,
) -> Reader:
    return Reader(f"gold.{format}", texts(*contents), partial(read_gold, format=format, base=base), written)


def naacl(pairs: list[GoldAlignment]) -> bytes:
    """The last sentence has no line if it has no link: then there is none to write."""
    kinds = ((number, pair, link) for number, pair in enumerate(pairs, 1) for link in pair.possible)
    return joined([f"{number} {i + 1} {j + 1} {'S' if (i, j) in pair.sure else 'P'}" for number, pair, (i, j) in kinds])


def dictionary(path: Path) -> Dictionary:
    # Of a checkpoint that has as many rows as the file has lines, or 7 more.
    return read_dictionary(path, len(SPECIAL) + 4)


def dictionary_file(found: Dictionary) -> bytes:
    return joined([f"{symbol} 1 #fairseq:overwrite" for symbol in found.symbols[len(SPECIAL) :]])


@cache
def checkpoints(old: bool) -> list[bytes]:
    model = {name: tensor for name, tensor in weights().items() if "layers" not in name}
    args = argparse.Namespace(**settings(extra=[1, (2.5, None, "ß")], more={"a": True}))
    contents = []
    for state in ({"args": args, "model": model}, {"cfg": {"model": args}, "model": model, "extra": [b"x"]}):
        stream = io.BytesIO()
        torch.save(state, stream, _use_new_zipfile_serialization=not old)
        contents.append(stream.getvalue())
    return contents


def compared(checkpoint: Checkpoint) -> object:
    """NaN is the same as NaN."""
    tensors = {name: (tensor.dtype, tensor.shape, repr(tensor.tolist())) for name, tensor in checkpoint.weights.items()}
    return repr(dict(checkpoint.settings)), tensors


def checkpoint_file(found: Checkpoint) -> bytes:
    stream = io.BytesIO()
    torch.save({"args": dict(found.settings), "model": dict(found.weights)}, stream)
    return stream.getvalue()


@cache
def codes() -> list[bytes]:
    learned = io.StringIO()
    learn_bpe(io.StringIO(TEXT * 20), learned, 10)
    return [learned.getvalue().encode(), *texts("#version: 0.1\ne s\nes </w>\n", "a b\nab </w>\n")]


def cut(kind: type[BPESegmenter] | type[SentencePieceSegmenter], path: Path) -> list[str]:
    segmenter = kind(path)
    try:
        pieces, owners = segmenter.cut(WORDS)
    except InvalidInputError as error:  # the model is fine, but of another kind
        return [str(error)]
    assert len(pieces) == len(owners)
    return segmenter.join(pieces)


def pieces_models(folder: Path) -> list[bytes]:
    contents = []
    chosen: dict[str, Any] = {"model_type": "bpe", "vocab_size": 40, "minloglevel": 2}
    for more in ({}, {"byte_fallback": True, "vocab_size": 310}, {"add_dummy_prefix": False}):
        options = chosen | more | {"normalization_rule_name": "identity", "model_prefix": str(folder / "pieces")}
        SentencePieceTrainer.train(sentence_iterator=iter(TEXT.split("\n") * 20), **options)
        contents.append((folder / "pieces.model").read_bytes())
    return contents


def model_file(folder: Path, name: str, load: Callable[[str], Any]) -> Reader:
    """A file of a model's folder, the others beside it."""
    torch.manual_seed(0)
    save_tiny(BertModel(bert_config()), folder)
    # Weights are read by building a model, which takes ten times as long as anything else here.
    cases = COUNT // 5 if load is loading.load_model else COUNT
    return Reader(name, [(folder / name).read_bytes()], lambda path: load(str(path.parent)), cases=cases)


@cache
def result_files() -> list[bytes]:
    """Saved maps of two examples, with as many kinds of fields as possible."""
    patches = [Patches(0, 0, torch.tensor([[1, 2]]))]
    maps = AttributionMaps(
        torch.rand(2, 1, 3, 3), None, None, None, torch.rand(2, 1), torch.ones(2, 3, dtype=torch.bool),
        [["a", "b", "c"]] * 2, towers={"vision": torch.rand(2, 1, 2, 2)}, patches=patches, layers={"encoder": [4]},
    )  # fmt: skip
    return [saved_result(maps), saved_result(maps.to(torch.float16))]


def saved_result(result: Result) -> bytes:
    with TemporaryDirectory() as folder:
        return result.save(Path(folder) / "maps.safetensors").read_bytes()


def lexicon_file(folder: Path) -> Reader:
    """The files of lexicons, which are the same if they count the same pairs alike."""

    def content(lexicon: Lexicon) -> bytes:
        lexicon.save(folder / "saved")
        return (folder / "saved").read_bytes()

    full = Lexicon(languages=("fr", "en"))
    for words in (WORDS, WORDS[::-1], ["e\u0301\ud800", '"']):
        full.count(words, words, torch.eye(len(words)).numpy())
    return Reader("lexicon.npz", list(map(content, (Lexicon(), full))), lambda path: content(Lexicon.load(path)), bytes)


READERS: Mapping[str, Callable[[Path], Reader]] = {
    "pharaoh": lambda _: Reader(
        "links",
        texts(*LINKS),
        lambda path: list(read_pharaoh(path)),
        lambda found: joined(list(map(format_pharaoh, found))),
    ),
    "talp": lambda _: gold("talp", *TALP, base=0, written=lambda found: joined(list(map(talp, found)))),
    "naacl": lambda _: gold("naacl", "1 1 1 S\n1 2 3 P 0.5\n3 1 1\n", "0002 10 7\n0001 1 1 S 1.0\n", written=naacl),
    "alibi": lambda _: gold(
        "alibi",
        "s1 0-0 1p2\ns2\t\ns3 3-3\n",
        written=lambda found: joined([f"id{number} {talp(pair)}" for number, pair in enumerate(found)]),
    ),
    "tsv": lambda _: gold(
        "tsv",
        "a b c\tx y z\t0-0 1p2\t\t\nd\tz\t\n",
        written=lambda found: joined([f"{'a ' * 9999}\t{'b ' * 9999}\t{talp(pair)}" for pair in found]),
    ),
    "parallel": lambda _: Reader(
        "text.both",
        texts(PAIRS),
        lambda path: list(read_parallel(path)),
        lambda found: joined([" ||| ".join(pair) for pair in found]),
    ),
    "corpus": lambda _: Reader(
        "text.txt",
        texts(TEXT),
        lambda path: [text for _, text in Corpus(path).texts()] and Corpus(path).digest(),
    ),
    "gz": lambda _: Reader("text.gz", [gzip.compress(TEXT.encode() * 20)], lambda path: Corpus(path).digest()),
    "xz": lambda _: Reader("text.xz", [lzma.compress(TEXT.encode() * 20)], lambda path: Corpus(path).digest()),
    "dictionary": lambda _: Reader(
        "dict.fr.txt",
        texts("le 3\nla@@ 2\né 1\n▁a 1\n", "a 1\nb 1\na 2 #fairseq:overwrite\nc 9\n"),
        dictionary,
        dictionary_file,
    ),
    "checkpoint": lambda _: Reader("model.pt", checkpoints(False), read_checkpoint, checkpoint_file),
    "old checkpoint": lambda _: Reader("model.pt", checkpoints(True), read_checkpoint, checkpoint_file),
    "bpe": lambda _: Reader("codes", codes(), partial(cut, BPESegmenter)),
    "fastbpe": lambda _: Reader("bpecodes", texts("e s 120\nes t</w> 90\nl a</w> 7\n"), partial(cut, BPESegmenter)),
    "sentencepiece": lambda folder: Reader("pieces.model", pieces_models(folder), partial(cut, SentencePieceSegmenter)),
    "result": lambda _: Reader("maps.safetensors", result_files(), AttributionMaps.load, saved_result),
    "lexicon": lexicon_file,
    "config": lambda folder: model_file(folder, "config.json", read_config),
    "tokenizer": lambda folder: model_file(folder, "tokenizer.json", loading.load_tokenizer),
    "safetensors": lambda folder: model_file(folder, "model.safetensors", loading.load_model),
    "results": lambda _: Reader(
        "results.json", list(number_files(RESULT).values())[-1:], lambda path: read_result(path.parent)
    ),
}

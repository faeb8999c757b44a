"""Every reader of a file, on thousands of damaged ones: it reads, or says in one sentence what is wrong.

No other exception, no end of the process, no wait, no memory beyond measure; and what was read can be written and is
read the same.
"""

import argparse
import bz2
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from sentencepiece import SentencePieceTrainer
from subword_nmt.learn_bpe import learn_bpe
from torch import Tensor
from transformers import BertModel

from alignment import GoldAlignment, GoldFormat, read_gold, read_identified, read_parallel, read_pharaoh
from alignment.fairseq.checkpoint import Checkpoint, read_checkpoint
from alignment.fairseq.conversion import build_model
from alignment.fairseq.dictionary import SPECIAL, Dictionary, read_dictionary
from alignment.fairseq.segmentation import BPESegmenter, SentencePieceSegmenter
from alignment.formats import format_pharaoh
from captum_norm import InvalidInputError, loading
from captum_norm.analysis import read_result
from captum_norm.analysis.corpus import Corpus
from captum_norm.analysis.frequencies import read_ranks
from captum_norm.analysis.results import AnalysisResult, Column, Plot, Table
from captum_norm.models import register_layouts, registered_feed_forwards, registered_layouts
from tests.alignment.fairseq.small import settings, weights
from tests.fuzzing import FACTOR, bounded, damaged, limited, put
from tests.tiny import bert_config, save_tiny

pytestmark = pytest.mark.fuzz

COUNT = 2000
LONGEST_MESSAGE = 1000

TEXT = "Das Haus , 1\u00a0000 m² groß .\nEs ist klein\u2028und alt .\n\nJa !\n"
PAIRS = "das Haus ||| the house\nja ||| yes\n , ||| ,\n"
LINKS = ["0-0 1-2 2-1\n\n3-3\n0-0 12-7\n"]
TALP = ["0-0 1p2 2-1\n\n3-3\n", "1-1 2-1\n7p3\n"]
WORDS = ["la", "séance", "½", "…", "e\u0301", "\u200b", "est", "x" * 40]


class Reader(NamedTuple):
    """How a kind of file is read.

    Attributes:
        name: of the file.
        files: contents that are right.
        read: reads a file.
        written: contents that are read as the same thing; None where nothing is written in this form.
        cases: how many damaged ones are read.
    """

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
    for state in (
        {"args": args, "model": model},
        {"cfg": {"model": args, "task": {}}, "model": model, "extra": [b"x"]},
    ):
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
    kinds: dict[str, dict[str, Any]] = {
        "bpe": {},
        "bytes": {"byte_fallback": True, "vocab_size": 310},
        "first": {"add_dummy_prefix": False},
    }
    for name, more in kinds.items():
        chosen: dict[str, Any] = {
            "model_type": "bpe",
            "vocab_size": 40,
            "normalization_rule_name": "identity",
            "minloglevel": 2,
        }
        SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT.split("\n") * 20), model_prefix=str(folder / name), **(chosen | more)
        )
        contents.append((folder / f"{name}.model").read_bytes())
    return contents


LAYOUT = """
[FuzzedLayer]
attention = "attention"
projection = "attention.out"
residual = "input"
total = "norm.input"
final_norm = "norm"
normed_input = false

[FuzzedLayer.feed_forward]
inner = ["up", "gate"]
outer = "down"
total = "last_norm.input"
"""


def layouts(path: Path) -> object:
    before = dict(registered_layouts()), dict(registered_feed_forwards())
    try:
        names = register_layouts(path)
    except InvalidInputError:
        assert (dict(registered_layouts()), dict(registered_feed_forwards())) == before, "something was declared"
        raise
    return [(name, registered_layouts().get(name), registered_feed_forwards().get(name)) for name in names]


def result(path: Path) -> AnalysisResult:
    return read_result(path.parent)


def result_file(found: AnalysisResult) -> bytes:
    tables = {
        table.name: {"title": table.title, "columns": [asdict(column) for column in table.columns], "rows": table.rows}
        for table in found.tables
    }
    return json.dumps({**asdict(found), "tables": tables}, allow_nan=False).encode()


RESULT = AnalysisResult(
    "dispersion",
    "How norms differ.",
    {"mean": 2.25, "none": None},
    [
        Table(
            "layers", "Norms", (Column("layer", "layer"), Column("norm", "‖f(x)‖")), [(1, 2.5), (2, None), ("a", -1.0)]
        )
    ],
    [Plot("by-layer", "line", "Norms", "layers", "layer", "norm")],
    {"model": "m", "seed": 0, "corpus": {"lines": 3}},
)


def model_file(folder: Path, name: str, load: Callable[[str], Any]) -> Reader:
    """A file of a model's folder, the others beside it."""
    torch.manual_seed(0)
    save_tiny(BertModel(bert_config()), folder)
    # Weights are read by building a model, which takes ten times as long as anything else here.
    cases = COUNT // 5 if load is loading.load_model else COUNT
    return Reader(name, [(folder / name).read_bytes()], lambda path: load(str(path.parent)), cases=cases)


VOCABULARY = {"the": 0, "house": 1, "\u2028": 2}

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
    "identified": lambda _: Reader(
        "sents.txt",
        texts("0\tLe chat .\n1\tIl dort .\n", "a\tx\n"),
        read_identified,
        lambda found: joined([f"{number}\t{text}" for number, (text,) in enumerate(found)]),
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
        lambda path: [text for _, text in Corpus(path).texts()] and Corpus(path, "documents").facts(),
    ),
    "gz": lambda _: Reader("text.gz", [gzip.compress(TEXT.encode() * 20)], lambda path: Corpus(path).facts()),
    "xz": lambda _: Reader("text.xz", [lzma.compress(TEXT.encode() * 20)], lambda path: Corpus(path).facts()),
    "bz2": lambda _: Reader("text.bz2", [bz2.compress(TEXT.encode() * 20)], lambda path: Corpus(path).facts()),
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
    "layouts": lambda _: Reader("layers.toml", texts(LAYOUT), layouts),
    "ranks": lambda _: Reader(
        "ranks.txt", texts("the\t100\nof\t90\nhouse\n\u2028\n"), lambda path: read_ranks(path, VOCABULARY)
    ),
    "config": lambda folder: model_file(folder, "config.json", loading._config),
    "tokenizer": lambda folder: model_file(folder, "tokenizer.json", loading.load_tokenizer),
    "safetensors": lambda folder: model_file(folder, "model.safetensors", loading.load_model),
    "results": lambda _: Reader("results.json", [result_file(RESULT)], result, result_file),
}


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("layouts", "feed_forward"):
        monkeypatch.setattr(f"captum_norm.models.{module}._registered", {})


@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_file_is_read_or_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    reader = READERS[kind](tmp_path)
    path, again = tmp_path / reader.name, tmp_path / "again" / reader.name
    again.parent.mkdir()
    same = compared if "checkpoint" in kind else lambda found: found
    read = refused = 0
    for content in reader.files:
        path.write_bytes(content)
        reader.read(path)
    with bounded():
        for content in damaged(reader.files, reader.cases):
            put(path, content)
            with noted(content):
                try:
                    with limited():
                        found = reader.read(path)
                except InvalidInputError as error:
                    refused += 1
                    check(str(error), path)
                    continue
                read += 1
                if reader.written is not None:
                    put(again, reader.written(found))
                    assert same(reader.read(again)) == same(found)
    assert read + refused == reader.cases * FACTOR
    assert min(read, refused) >= reader.cases * FACTOR // 100, (read, refused)


@contextmanager
def noted(content: bytes) -> Iterator[None]:
    """Adds to what fails what was read."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"reading {content[:3000]!r}")
        raise


def check(message: str, path: Path | None = None) -> None:
    """A message is one line of printable characters that names the file, and not longer than can be read."""
    assert path is None or path.name in message or str(path.parent) in message, message
    assert message.isprintable(), message
    assert len(message) <= LONGEST_MESSAGE, message


ODD: list[Any] = [
    None, True, -1, 0, 3, 10**30, 0.5, float("nan"), float("inf"), "", "x", "4", "9" * 5000, "a/b", "\0", "\x1b[31m",
    [], [1], {}, {"a": 1}, "x" * 300,
]  # fmt: skip


def odd_tensor(draw: random.Random, tensor: Tensor) -> Tensor:
    match draw.randrange(6):
        case 0:
            return tensor.flatten()
        case 1:
            return tensor[:0]
        case 2:
            return torch.tensor(1.0)
        case 3:
            return tensor.long()
        case 4:
            return tensor[:1]
        case _:
            return tensor.to(torch.complex64)


def test_odd_settings_and_weights_make_a_model_or_are_refused_in_one_sentence() -> None:
    """What a checkpoint says is free of damage to its bytes, but of no model that fairseq made."""
    draw = random.Random(0)
    right, tensors = settings(), {pre_norm: weights(pre_norm=pre_norm) for pre_norm in (False, True)}
    learned = weights(learned=True)
    names = [*right, "dropout", "activation_fn", "activation_dropout", "max_source_positions", "no_scale_embedding"]
    made = refused = 0
    with bounded():
        for _ in range(COUNT * FACTOR // 10):
            chosen = right | {name: draw.choice(ODD) for name in draw.sample(names, draw.choice((0, 1, 1, 2)))}
            model = dict(draw.choice([*tensors.values(), learned]))
            for name in draw.sample(sorted(model), draw.choice((0, 0, 1, 2))):
                model[name] = odd_tensor(draw, model[name])
            if draw.random() < 0.2:
                model[f"encoder.layers.{draw.choice((3, 999999999, '9' * 5000))}.fc1.weight"] = torch.zeros(2, 2)
            try:
                with limited():
                    build_model(chosen, model)
                made += 1
            except InvalidInputError as error:
                refused += 1
                check(str(error))
    assert min(made, refused) > 10, (made, refused)


@pytest.mark.parametrize("kind", READERS)
def test_a_file_that_is_not_there_and_a_folder_are_refused(kind: str, tmp_path: Path) -> None:
    reader = READERS[kind](tmp_path)
    path = tmp_path / "place" / reader.name
    path.parent.mkdir()
    with pytest.raises(InvalidInputError) as missing:
        reader.read(path)
    check(str(missing.value), path)
    path.mkdir()
    with pytest.raises(InvalidInputError) as folder:
        reader.read(path)
    check(str(folder.value), path)

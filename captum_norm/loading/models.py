"""Loads models, adapted or not, and their tokenizers."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from captum_norm.checks import one_of
from captum_norm.errors import InvalidInputError
from captum_norm.loading.adapters import Adapter, adapter_at, in_base, number_of_labels
from captum_norm.loading.configurations import check_room, class_of, empty_model, read_config
from captum_norm.loading.places import DEFAULT_MODEL, file_at, place_of, quiet, said_plainly
from captum_norm.loading.quantization import Quantization, quantized

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Model = TypeVar("Model", bound="nn.Module")

Precision = Literal["float32", "float64", "bfloat16", "float16"]
"""The dtype of a model's weights and of what it computes."""


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
        read_config(name_or_path)
    else:
        with _of_adapter(name_or_path):
            read_config(adapter.base)
    tokenizer = _tokenizer_of(name_or_path, adapter)
    return _model_of(name_or_path, adapter, quantization), tokenizer


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
    folder = place_of(name_or_path)
    import transformers

    with quiet(), said_plainly(f"cannot load a tokenizer for {name_or_path}"):
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
    with said_plainly(f"cannot load the adapter {name_or_path}"), quiet():
        weights = adapter.weights()
    with _of_adapter(name_or_path):
        model, lacking = _pretrained(adapter.base, quantization, adapter, weights)
        _refuse_lacking(adapter.base, model, {name for name in lacking if in_base(name) not in weights})
    with quiet(), said_plainly(f"cannot load the adapter {name_or_path}"):
        adapted = adapter.put_on(model, weights)
    return adapted.eval()  # type: ignore[no-any-return]


def _pretrained(
    name_or_path: str,
    quantization: Quantization | None,
    adapter: Adapter | None = None,
    weights: "Mapping[str, Tensor] | None" = None,
) -> tuple[Any, set[str]]:
    """Load a model, for an adapter with these weights if given, and name what its files lack."""
    config = read_config(name_or_path)
    import torch

    # Missing weights are random but reproducible, so a resumed run has the same weights.
    with torch.random.fork_rng(devices=[]), quiet(), said_plainly(f"cannot load the weights of {name_or_path}"):
        torch.default_generator.manual_seed(0)
        kind = class_of(config, adapter)
        check_room(config, kind, Path(place_of(name_or_path)))
        if weights is not None:
            config.num_labels = number_of_labels(empty_model(config, kind), weights)
        model, report = kind.from_pretrained(
            place_of(name_or_path),
            quantization_config=None if quantization is None else quantized(quantization, empty_model(config, kind)),
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            revision=(adapter and adapter.revision) or "main",
        )
    # transformers initialises these randomly, and their explanation would look like any other. Only the pooler, which
    # many checkpoints lack, does not matter: no attention block reads it.
    unusable = {str(key[0] if isinstance(key, tuple) else key) for key in report["mismatched_keys"]}
    return model, unusable | {key for key in report["missing_keys"] if "pooler" not in key.split(".")}


def _refuse_lacking(name_or_path: str, model: "PreTrainedModel", lacking: Collection[str]) -> None:
    if lacking:
        raise InvalidInputError(
            f"cannot load the weights of {name_or_path}: {len(lacking)} tensors of {type(model).__name__} are missing "
            f"or of another shape, {min(lacking)} for one"
        )


def _adapter(name_or_path: str) -> Adapter | None:
    folder = place_of(name_or_path)
    with quiet(), said_plainly(f"cannot load the adapter {name_or_path}"):
        return adapter_at(folder)


@contextmanager
def _of_adapter(name_or_path: str) -> Iterator[None]:
    """Say that an error is about the base model of an adapter."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(f"{name_or_path} is an adapter: {error}") from error


def on_device(model: Model, device: str, dtype: Precision | None = None) -> Model:
    """Move a model to a device, and convert it to a dtype.

    Args:
        model: the model.
        device: such as ``cpu`` or ``cuda:1``.
        dtype: the dtype's name; None for the model's own.

    Raises:
        InvalidInputError: there is no such device or dtype.
    """
    import torch

    if dtype is not None:
        model = model.to(getattr(torch, one_of("dtype", dtype, get_args(Precision))))
    try:
        return model.to(torch.device(device))
    # AssertionError: torch was built without the device; ValueError: quantised models stay where they are.
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InvalidInputError(f"cannot put the model on the device {device}: {reason}") from error

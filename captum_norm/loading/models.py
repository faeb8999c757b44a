"""Loads models, adapted or quantised or neither, their tokenizers, and sentence encoders."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from captum_norm.checks import check_choice, quoted
from captum_norm.errors import InvalidInputError
from captum_norm.loading.files import DEFAULT_MODEL, as_input_error, file_at, model_location, quiet, read_config
from captum_norm.loading.limits import check_adapter, check_config, check_files, check_size, read_json

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Model = TypeVar("Model", bound="nn.Module")

Precision = Literal["float32", "float64", "bfloat16", "float16"]
"""The dtype of a model's weights and of what it computes."""

Quantization = Literal["int8", "nf4", "fp4"]
"""How bitsandbytes stores the weights of linear maps: in 8 bits (LLM.int8), or in 4 of one of two kinds."""

# Kernels of bitsandbytes for processors take 4-bit weights of so many rows at a time, and no fewer.
_ROWS = 32
_ADAPTER = "adapter_config.json"
# The prefix of the base model's own names in an adapter.
_PREFIX = "base_model.model."
# The classes that load the base model, by the adapter's task.
_TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "FEATURE_EXTRACTION": "AutoModel",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}
# Those that leave the base model as it is; PiSSA and OLoRA subtract the adapter's first weights from it.
_INITIAL_WEIGHTS = (None, True, False, "gaussian", "eva", "orthogonal")
_MODULES = "modules.json"
_OLDEST_SENTENCE_TRANSFORMERS = 6
# How older versions of sentence-transformers write them.
_OLD_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


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
    adapter = _adapter_at(name_or_path)
    # For an unknown name, complain about the model rather than the tokenizer.
    with _of_adapter(name_or_path, adapter):
        read_config(name_or_path if adapter is None else adapter.base)
    tokenizer = load_tokenizer(name_or_path)
    return load_model(name_or_path, quantization), tokenizer


def load_tokenizer(name_or_path: str) -> "PreTrainedTokenizerBase":
    """Load only the tokenizer; see :func:`load`."""
    adapter = _adapter_at(name_or_path)
    if adapter is not None and file_at(adapter.place, "tokenizer_config.json") is None:
        with _of_adapter(name_or_path, adapter):
            return load_tokenizer(adapter.base)
    folder = model_location(name_or_path)
    import transformers

    with quiet(), as_input_error(f"cannot load a tokenizer for {name_or_path}"):
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
    adapter = _adapter_at(name_or_path)
    if adapter is None:
        model, lacking = _pretrained(name_or_path, quantization)
        _refuse_lacking(name_or_path, model, lacking)
        return model.eval()  # type: ignore[no-any-return]
    with quiet(), as_input_error(f"cannot load the adapter {name_or_path}"):
        weights = adapter.weights()
    with _of_adapter(name_or_path, adapter):
        model, lacking = _pretrained(adapter.base, quantization, adapter, weights)
        _refuse_lacking(adapter.base, model, {name for name in lacking if _PREFIX + name not in weights})
    with quiet(), as_input_error(f"cannot load the adapter {name_or_path}"):
        return adapter.put_on(model, weights).eval()  # type: ignore[no-any-return]


def on_device(model: Model, device: str, dtype: Precision | None = None) -> Model:
    """Move a model to a device such as ``cuda:1``, and convert it to a dtype by its name unless None."""
    import torch

    if dtype is not None:
        model = model.to(getattr(torch, check_choice("dtype", dtype, get_args(Precision))))
    try:
        return model.to(torch.device(device))
    # AssertionError: torch was built without the device; ValueError: quantised models stay where they are.
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        if reason.startswith("Expected one of cpu"):  # and twenty others
            reason = "expected cpu, cuda, or one of several such as cuda:1"
        raise InvalidInputError(f"cannot put the model on the device {device}: {reason}") from error


def load_sentence_transformer(name_or_path: str = DEFAULT_MODEL, quantization: Quantization | None = None) -> Any:
    """Load a SentenceTransformer on the CPU, in ``eval()`` mode; None if it is another model."""
    place = model_location(name_or_path)
    with quiet(), as_input_error(f"cannot load the sentence encoder {name_or_path}"):
        modules = _modules_at(place)
        if modules is None:
            return None
        try:
            from sentence_transformers import SentenceTransformer, __version__
        except ModuleNotFoundError as error:
            needed = "sentence-transformers: pip install sentence-transformers"
            raise InvalidInputError(f"{name_or_path} is a sentence encoder, which needs {needed}") from error
        if int(__version__.partition(".")[0]) < _OLDEST_SENTENCE_TRANSFORMERS:
            # Earlier ones run code that is named deeper in a folder, such as by a router.
            raise ValueError(
                f"got sentence-transformers {__version__}; expected {_OLDEST_SENTENCE_TRANSFORMERS} or later: "
                "pip install -U sentence-transformers"
            )
        for folder in {module["path"] for module in modules}:
            if (Path(place) / folder).is_dir():
                check_files(Path(place) / folder)
            if (file := file_at(place, f"{folder}/config.json".lstrip("/"))) is not None:
                check_config(read_json(file))
        options = {} if quantization is None else {"quantization_config": _quantized(quantization)}
        model: Any = SentenceTransformer(place, device="cpu", trust_remote_code=False, model_kwargs=options)
    return model.eval()


def load_poolings(name_or_path: str = DEFAULT_MODEL) -> list[str]:
    """Load the names of a SentenceTransformer's poolings, such as ``mean``; none if it is another model."""
    place = model_location(name_or_path)
    poolings: list[str] = []
    with quiet(), as_input_error(f"cannot load the sentence encoder {name_or_path}"):
        modules = _modules_at(place) or []
        for folder in (module["path"] for module in modules if module["type"].endswith(".Pooling")):
            file = file_at(place, f"{folder}/config.json")
            config = {} if file is None else read_json(file)
            modes = config.get("pooling_mode") or [_OLD_POOLINGS[name] for name in _OLD_POOLINGS if config.get(name)]
            poolings += [modes] if isinstance(modes, str) else modes
    return poolings


def _modules_at(place: str) -> list[dict[str, str]] | None:
    """The modules of a SentenceTransformer, which are its own alone; None if it is another model."""
    file = file_at(place, _MODULES)
    if file is None:
        return None
    modules: list[dict[str, str]] = read_json(file)
    for module in modules:
        if not re.fullmatch(r"sentence_transformers(\.\w+)+", module["type"]):
            raise ValueError(
                f"its {_MODULES} names {quoted(module['type'])}, which is no part of sentence-transformers and could "
                "run code; nothing was loaded"
            )
    return modules


@dataclass(frozen=True)
class _Adapter:
    """A PEFT adapter: its place and settings, the model that it adapts and, if named, that model's class."""

    place: str
    settings: Mapping[str, Any]
    base: str
    model_class: str | None

    def weights(self) -> "dict[str, Tensor]":
        """Read its tensors."""
        try:
            from peft import load_peft_weights
        except ModuleNotFoundError as error:
            raise InvalidInputError(f"{self.place} is an adapter, which needs PEFT: pip install peft") from error
        weights: dict[str, Tensor] = load_peft_weights(self.place, device="cpu")
        return weights

    def put_on(self, model: "PreTrainedModel", weights: "Mapping[str, Tensor]") -> Any:
        """Put it onto the model, which becomes part of what is returned."""
        from peft import PeftModel, get_peft_model_state_dict

        check_adapter(self.settings, model, weights)
        # Nothing is initialised that the adapter's file then replaces, unless the base model changes with it.
        empty = self.settings.get("init_lora_weights") in _INITIAL_WEIGHTS
        adapted = PeftModel.from_pretrained(model, self.place, low_cpu_mem_usage=empty)
        needed, possible = (
            get_peft_model_state_dict(adapted, save_embedding_layers=embeddings).keys() for embeddings in (False, True)
        )
        for names, problem in ((needed - weights.keys(), "missing"), (weights.keys() - possible, "unknown")):
            if names:
                raise ValueError(f"{len(names)} tensors are {problem} in {type(model).__name__}, {min(names)} for one")
        return adapted


def _adapter_at(name_or_path: str) -> _Adapter | None:
    """The adapter in a folder or on the hub; None if there is none."""
    place = model_location(name_or_path)
    with quiet(), as_input_error(f"cannot load the adapter {name_or_path}"):
        file = file_at(place, _ADAPTER)
        if file is None:
            return None
        content = read_json(file)
        base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
        if not isinstance(base, str) or not base:
            raise ValueError(f"its {_ADAPTER} names no base model")
        if not Path(base).is_dir() and (Path(place) / base).is_dir():
            base = str(Path(place) / base)
        mapping = content.get("auto_mapping")
        model_class = mapping.get("base_model_class") if isinstance(mapping, dict) else None
        return _Adapter(place, content, base, model_class or _TASKS.get(str(content.get("task_type"))))


@contextmanager
def _of_adapter(name_or_path: str, adapter: _Adapter | None) -> Iterator[None]:
    """Say that an error is about the base model of an adapter, if there is one."""
    try:
        yield
    except InvalidInputError as error:
        if adapter is None:
            raise
        raise InvalidInputError(f"{name_or_path} is an adapter: {error}") from error


def _pretrained(
    name_or_path: str,
    quantization: Quantization | None,
    adapter: _Adapter | None = None,
    weights: "Mapping[str, Tensor] | None" = None,
) -> tuple[Any, set[str]]:
    """Load a model, for an adapter with these weights if given, and name what its files lack."""
    config = read_config(name_or_path)
    import torch

    # Missing weights are random but reproducible, so a resumed run has the same weights.
    with torch.random.fork_rng(devices=[]), quiet(), as_input_error(f"cannot load the weights of {name_or_path}"):
        torch.default_generator.manual_seed(0)
        kind = _class_of(config, adapter)
        empty = _empty(config, kind)
        revision = (adapter and adapter.settings.get("revision")) or "main"
        check_size(empty, _stored_bytes(model_location(name_or_path), revision))
        if weights is not None:
            config.num_labels = _number_of_labels(empty, weights)
        model, report = kind.from_pretrained(
            model_location(name_or_path),
            quantization_config=None if quantization is None else _quantized(quantization, _empty(config, kind)),
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            revision=revision,
        )
    # transformers initialises these randomly, and their explanation would look like any other. Only the pooler, which
    # many checkpoints lack, does not matter: no attention block reads it.
    unusable = {str(key[0] if isinstance(key, tuple) else key) for key in report["mismatched_keys"]}
    return model, unusable | {key for key in report["missing_keys"] if "pooler" not in key.split(".")}


def _refuse_lacking(name_or_path: str, model: "PreTrainedModel", lacking: Collection[str]) -> None:
    if lacking:
        raise InvalidInputError(
            f"cannot load the weights of {name_or_path}: {len(lacking)} tensors of {type(model).__name__} are missing "
            f"or of another shape, {min(lacking)} for one; save the whole model by save_pretrained"
        )


def _class_of(config: Any, adapter: _Adapter | None) -> Any:
    """The class of a model: the one that its adapter names, or its configuration; ``AutoModel`` if neither does."""
    import transformers

    names = config.architectures or []
    if adapter is not None and adapter.model_class is not None:
        if adapter.model_class in _TASKS.values():
            return getattr(transformers, adapter.model_class)
        names = [adapter.model_class]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"got {quoted(names)} for the architectures in its configuration, expected their names")
    for name in names:
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
        if kind is not None:
            raise ValueError(f"its configuration names the architecture {name}, which is no model")
    return transformers.AutoModel


def _empty(config: Any, kind: Any) -> "PreTrainedModel":
    """The model of a configuration, without memory for its weights."""
    import torch

    with torch.device("meta"):
        model: PreTrainedModel = getattr(kind, "from_config", kind)(config)  # AutoModel's
    return model


def _stored_bytes(place: str, revision: str) -> int:
    """The size of a model's files of weights, all of which are loaded."""
    files = []
    for name in ("model.safetensors", "pytorch_model.bin"):
        names = [name]
        if (index := file_at(place, f"{name}.index.json", revision)) is not None:
            names += set(read_json(index)["weight_map"].values())
        files += [file_at(place, part, revision) for part in names]
    return sum(Path(file).stat().st_size for file in files if file is not None)


def _number_of_labels(empty: "PreTrainedModel", weights: "Mapping[str, Tensor]") -> int:
    """The number of labels of the head that an adapter has, which its configuration does not tell."""
    number = empty.config.num_labels or 0
    for name, tensor in empty.state_dict().items():
        saved = weights.get(_PREFIX + name)
        if saved is not None and len(tensor) == number and tensor.shape[1:] == saved.shape[1:]:
            return len(saved)
    return number


def _quantized(quantization: Quantization, empty: "PreTrainedModel | None" = None) -> Any:
    """The configuration of transformers for a quantisation that leaves the head of a model as it is, if it is given."""
    from torch.nn import Linear
    from transformers import BitsAndBytesConfig

    check_choice("quantization", quantization, get_args(Quantization))
    options: dict[str, Any] = {}
    if empty is not None:
        last = empty.get_output_embeddings()  # type: ignore[no-untyped-call]
        options["llm_int8_skip_modules"] = [
            name
            for name, module in empty.named_modules()
            if module is last or (isinstance(module, Linear) and module.out_features % _ROWS)
        ]
    kind = {"load_in_8bit": True} if quantization == "int8" else {"bnb_4bit_quant_type": quantization}
    return BitsAndBytesConfig(load_in_4bit=quantization != "int8", **kind, **options)  # type: ignore[no-untyped-call]

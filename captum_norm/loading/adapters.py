"""Reads what a PEFT adapter is an adapter of, and puts it onto that model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from captum_norm.errors import InvalidInputError
from captum_norm.loading.places import file_at

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_FILE = "adapter_config.json"
# The prefix of the base model's own names in an adapter.
_PREFIX = "base_model.model."
TASKS: Mapping[object, str] = MappingProxyType(
    {
        "CAUSAL_LM": "AutoModelForCausalLM",
        "FEATURE_EXTRACTION": "AutoModel",
        "QUESTION_ANS": "AutoModelForQuestionAnswering",
        "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
        "SEQ_CLS": "AutoModelForSequenceClassification",
        "TOKEN_CLS": "AutoModelForTokenClassification",
    }
)
"""The classes that load the base model, by the adapter's task."""


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter.

    Attributes:
        place: its folder or its name on the hub.
        base: the folder or name of the model that it adapts.
        revision: the version of that model on the hub; None for the newest.
        model_class: the name of the class of that model, in transformers; None for the one that its configuration
            names.
    """

    place: str
    base: str
    revision: str | None
    model_class: str | None

    def weights(self) -> "dict[str, Tensor]":
        """Read its tensors.

        Raises:
            InvalidInputError: PEFT is not installed.
        """
        try:
            from peft import load_peft_weights
        except ModuleNotFoundError as error:
            raise InvalidInputError(f"{self.place} is an adapter, which needs PEFT: pip install peft") from error
        found: dict[str, Tensor] = load_peft_weights(self.place, device="cpu")
        return found

    def put_on(self, model: "PreTrainedModel", weights: "Mapping[str, Tensor]") -> Any:
        """Put it onto the model, which becomes part of what is returned.

        Raises:
            ValueError: some of its tensors are missing, or do not belong to this model.
        """
        from peft import PeftModel, get_peft_model_state_dict

        adapted = PeftModel.from_pretrained(model, self.place)
        needed, possible = (
            get_peft_model_state_dict(adapted, save_embedding_layers=embeddings).keys() for embeddings in (False, True)
        )
        for names, problem in ((needed - weights.keys(), "missing"), (weights.keys() - possible, "unknown")):
            if names:
                raise ValueError(f"{len(names)} tensors are {problem} in {type(model).__name__}, {min(names)} for one")
        return adapted


def adapter_at(place: str) -> Adapter | None:
    """Return the adapter in a folder or on the hub; None if there is none.

    Raises:
        ValueError: its configuration is damaged.
    """
    file = file_at(place, _FILE)
    if file is None:
        return None
    content = json.loads(Path(file).read_bytes())
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    if not isinstance(base, str) or not base:
        raise ValueError(f"its {_FILE} names no base model")
    if not Path(base).is_dir() and (Path(place) / base).is_dir():
        base = str(Path(place) / base)
    mapping = content.get("auto_mapping")
    named = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    return Adapter(place, base, content.get("revision"), named or TASKS.get(content.get("task_type")))


def in_base(name: str) -> str:
    """The name in an adapter of a tensor of the base model, such as a head's."""
    return f"{_PREFIX}{name}"


def number_of_labels(empty: "PreTrainedModel", weights: "Mapping[str, Tensor]") -> int:
    """The number of labels of the head that an adapter has, which its configuration does not tell.

    Args:
        empty: the base model, of as many labels as its configuration has.
        weights: the adapter's tensors.
    """
    number = empty.config.num_labels or 0
    for name, own in empty.state_dict().items():
        saved = weights.get(in_base(name))
        if saved is not None and len(own) == number and own.shape[1:] == saved.shape[1:]:
            return len(saved)
    return number

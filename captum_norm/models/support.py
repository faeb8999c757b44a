"""Lists the architectures that the tests hold to be right, as the test matrix has them."""

import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class SupportedModel:
    """One architecture that the tests cover.

    Attributes:
        kind: encoders, decoders, encoder–decoders or vision.
        model_type: what transformers calls it in a configuration.
        model_class: the class that was tested; others around the same layers differ in their heads alone.
        layout: how its layers are arranged; see :attr:`captum_norm.models.Layout.style`.
        positions: how positions are encoded.
        special: what else is special, and active in the tests.
        scopes: the scopes of its layers.
    """

    kind: str
    model_type: str
    model_class: str
    layout: str
    positions: str
    special: tuple[str, ...]
    scopes: tuple[str, ...]


def supported_models() -> tuple[SupportedModel, ...]:
    """The architectures that the tests cover, by kind. Others are found by their structure, or refused.

    Example:
        >>> {model.model_type: model.layout for model in supported_models()}["gemma2"]
        'sandwich'
    """
    text = resources.files("captum_norm.models").joinpath("supported.json").read_text(encoding="utf-8")
    return tuple(
        SupportedModel(**entry | {"special": tuple(entry["special"]), "scopes": tuple(entry["scopes"])})
        for entry in json.loads(text)
    )

"""Lists the model architectures that the tests cover."""

import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class SupportedModel:
    """A model architecture that the tests cover.

    Attributes:
        kind: encoders, decoders, encoder–decoders, vision, audio, or images and text.
        model_type: ``model_type`` of its configuration.
        model_class: the tested class; others with the same layers differ only in their heads.
        layout: arrangement of its layers; see :attr:`captum_norm.models.Layout.style`.
        positions: how positions are encoded.
        special: further features, active in the tests.
        scopes: scopes of its layers.
    """

    kind: str
    model_type: str
    model_class: str
    layout: str
    positions: str
    special: tuple[str, ...]
    scopes: tuple[str, ...]


def supported_models() -> tuple[SupportedModel, ...]:
    """Model architectures that the tests cover, by kind. Others are recognised by structure, or refused.

    Example:
        >>> {model.model_type: model.layout for model in supported_models()}["gemma2"]
        'sandwich'
    """
    text = resources.files("captum_norm.models").joinpath("supported.json").read_text(encoding="utf-8")
    return tuple(
        SupportedModel(**entry | {"special": tuple(entry["special"]), "scopes": tuple(entry["scopes"])})
        for entry in json.loads(text)
    )

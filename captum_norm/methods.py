"""Lists the methods by name: what commands and comparisons call them, and how they are made."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal


@dataclass(frozen=True)
class MapUnits:
    """What the numbers are of a method that has maps.

    Attributes:
        entry: what an entry of its maps is.
        together: what a score of all layers together is; None for what the aggregation makes of an entry.
        aggregation: how it makes one score of all layers, where that is no choice.
        target: what a score is if a number of the output is named.
    """

    entry: str
    together: str | None = None
    aggregation: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class NamedMethod:
    """A method that can be asked for by name.

    Attributes:
        title: what tables call it.
        class_name: its class in ``package``.
        package: where the class is; those of ``captum.attr`` become methods by :class:`captum_norm.TokenAttribution`.
        units: of its maps; None if it has none.
        target: whether it explains a number of the output: never, if one is named, or always, by default the one that
            the model predicts.
        options: named arguments of a method of ``captum.attr``, for its ``attribute``.
        requires: another package that it needs.
    """

    title: str
    class_name: str
    package: str = "captum_norm.attr"
    units: MapUnits | None = None
    target: Literal["never", "optional", "always"] = "never"
    options: Mapping[str, Any] | None = None
    requires: str | None = None


def _captum(title: str, class_name: str, *, requires: str | None = None, **options: Any) -> NamedMethod:
    return NamedMethod(
        title, class_name, "captum.attr", target="always", options=MappingProxyType(options), requires=requires
    )


METHODS: Mapping[str, NamedMethod] = MappingProxyType(
    {
        "norm": NamedMethod("norms of attention", "NormAttribution", units=MapUnits("norm")),
        "attention-block": NamedMethod(
            "norms of the attention block", "AttentionBlockAttribution", units=MapUnits("norm")
        ),
        "globenc": NamedMethod("GlobEnc", "GlobEnc", units=MapUnits("norm")),
        "alti": NamedMethod("ALTI", "ALTI", units=MapUnits("contribution")),
        "value-zeroing": NamedMethod("value zeroing", "ValueZeroing", units=MapUnits("cosine distance")),
        "decompx": NamedMethod(
            "DecompX",
            "DecompX",
            units=MapUnits("norm", "norm", aggregation="propagated", target="part of the output"),
            target="optional",
        ),
        "attention-gradient": NamedMethod(
            "attention × gradient",
            "AttentionTimesGradient",
            units=MapUnits("weight × gradient", "relevance"),
            target="always",
        ),
        "weights": NamedMethod("attention weights", "AttentionWeights", units=MapUnits("attention weight")),
        "rollout": NamedMethod("attention rollout", "AttentionRollout", units=MapUnits("share of rollout")),
        "saliency": _captum("gradient norm", "Saliency"),
        "input-gradient": _captum("input × gradient", "InputXGradient"),
        "integrated-gradients": _captum("integrated gradients", "IntegratedGradients", n_steps=30),
        "deeplift": _captum("DeepLIFT", "DeepLift"),
        "gradient-shap": _captum("GradientSHAP", "GradientShap", n_samples=20),
        "occlusion": _captum("occlusion", "Occlusion"),
        "shapley": _captum("Shapley value sampling", "ShapleyValueSampling", n_samples=5),
        "lime": _captum("LIME", "Lime", n_samples=100, requires="sklearn"),
        "random": NamedMethod("random scores", "RandomScores", "captum_norm.comparison"),
    }
)
"""All of them."""

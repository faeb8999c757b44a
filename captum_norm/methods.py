"""Lists the methods by name, for commands and comparisons; what else there is to know of one stands on its class."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from captum_norm.errors import InvalidInputError

if TYPE_CHECKING:
    from captum_norm.attr.base import AttentionMapAttribution

    Method = TypeVar("Method", bound=type[AttentionMapAttribution])


@dataclass(frozen=True)
class NamedMethod:
    """A method that can be asked for by name.

    Attributes:
        class_name: its class in ``package``, which is loaded on use.
        package: where the class is; those of ``captum.attr`` become methods by :class:`captum_norm.TokenAttribution`.
        maps: whether it is one with a map of each layer, see :class:`captum_norm.AttentionMapAttribution`.
        own_title: what tables call it, where its class does not say that.
        options: named arguments of a method of ``captum.attr``, for its ``attribute``.
        requires: another package that it needs.
        kind: the class, where it is loaded already.
    """

    class_name: str
    package: str = "captum_norm.attr"
    maps: bool = True
    own_title: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    requires: str | None = None
    kind: Any = None

    def load(self) -> Any:
        """The class."""
        return self.kind or getattr(import_module(self.package), self.class_name)

    @property
    def title(self) -> str:
        """What tables call the method."""
        return self.own_title or str(self.load().title)

    @property
    def target(self) -> str:
        """Whether it explains a number of the output, ``never``, ``optional`` (if one is named) or ``always``."""
        return str(self.load().target) if self.maps else "always" if self.package == "captum.attr" else "never"


def _captum(title: str, class_name: str, *, requires: str | None = None, **options: Any) -> NamedMethod:
    return NamedMethod(class_name, "captum.attr", False, title, MappingProxyType(options), requires)


_methods = {
    "norm": NamedMethod("NormAttribution"),
    "attention-block": NamedMethod("AttentionBlockAttribution"),
    "globenc": NamedMethod("GlobEnc"),
    "alti": NamedMethod("ALTI"),
    "value-zeroing": NamedMethod("ValueZeroing"),
    "decompx": NamedMethod("DecompX"),
    "attention-gradient": NamedMethod("AttentionTimesGradient"),
    "weights": NamedMethod("AttentionWeights"),
    "rollout": NamedMethod("AttentionRollout"),
    "saliency": _captum("gradient norm", "Saliency"),
    "input-gradient": _captum("input × gradient", "InputXGradient"),
    "integrated-gradients": _captum("integrated gradients", "IntegratedGradients", n_steps=30),
    "deeplift": _captum("DeepLIFT", "DeepLift"),
    "gradient-shap": _captum("GradientSHAP", "GradientShap", n_samples=20),
    "occlusion": _captum("occlusion", "Occlusion"),
    "shapley": _captum("Shapley value sampling", "ShapleyValueSampling", n_samples=5),
    "lime": _captum("LIME", "Lime", n_samples=100, requires="sklearn"),
    "random": NamedMethod("RandomScores", "captum_norm.comparison", False, "random scores"),
}
METHODS: Mapping[str, NamedMethod] = MappingProxyType(_methods)
"""All of them, those of :func:`register_method` included."""


def register_method(method: "Method") -> "Method":
    """Let commands and comparisons know a method of one's own by its ``name``; a class decorator, too.

    Args:
        method: a class derived from :class:`captum_norm.AttentionMapAttribution`, with ``name``, ``title`` and
            ``units``.

    Returns:
        the class.

    Raises:
        InvalidInputError: it lacks one of these, or another method has its name.

    Example:
        >>> from captum_norm import ALTI
        >>> class Interactions(ALTI):
        ...     title = "interactions"
        >>> register_method(Interactions)
        Traceback (most recent call last):
        captum_norm.errors.InvalidInputError: there is a method called 'alti'; give Interactions another name
    """
    missing = [attribute for attribute in ("name", "title", "units") if not hasattr(method, attribute)]
    if missing:
        raise InvalidInputError(f"{method.__name__} has no {missing[0]}; a method has name, title and units")
    named = NamedMethod(method.__name__, method.__module__, kind=method)
    known = _methods.setdefault(method.name, named)
    # A cell of a notebook may run again.
    if (known.class_name, known.package) != (named.class_name, named.package):
        raise InvalidInputError(f"there is a method called {method.name!r}; give {method.__name__} another name")
    _methods[method.name] = named
    return method

"""Registers the methods by name, for commands and comparisons."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from captum_norm.checks import quoted_name
from captum_norm.errors import CaptumNormError, InvalidInputError

if TYPE_CHECKING:
    from captum_norm.attr.base import AttentionMapAttribution

    Method = TypeVar("Method", bound=type[AttentionMapAttribution])


@dataclass(frozen=True)
class NamedMethod:
    """A method by name: a class, imported on use."""

    class_name: str
    package: str = "captum_norm"  # TokenAttribution wraps the methods of captum.attr
    maps: bool = True  # it derives from AttentionMapAttribution
    options: Mapping[str, Any] = field(default_factory=dict)  # of attribute, for methods of captum.attr
    requires: str | None = None  # another package
    kind: Any = None  # the class, if it is imported already

    def load(self) -> Any:
        """Import the class."""
        return self.kind or getattr(import_module(self.package), self.class_name)

    @property
    def target(self) -> str:
        """Whether it explains a number of the output, ``never``, ``optional`` (if one is named) or ``always``."""
        return str(self.load().target) if self.maps else "always" if self.package == "captum.attr" else "never"


def _captum(class_name: str, *, requires: str | None = None, **options: Any) -> NamedMethod:
    return NamedMethod(class_name, "captum.attr", False, MappingProxyType(options), requires)


_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

_methods = {
    "norm": NamedMethod("NormAttribution"),
    "attention-block": NamedMethod("AttentionBlockAttribution"),
    "globenc": NamedMethod("GlobEnc"),
    "alti": NamedMethod("ALTI"),
    "alti-logit": NamedMethod("ALTILogit"),
    "information-flow": NamedMethod("InformationFlow"),
    "value-zeroing": NamedMethod("ValueZeroing"),
    "decompx": NamedMethod("DecompX"),
    "cp-lrp": NamedMethod("CPLRP"),
    "attnlrp": NamedMethod("AttnLRP"),
    "gim": NamedMethod("GIM"),
    "relp": NamedMethod("RelP"),
    "attention-gradient": NamedMethod("AttentionTimesGradient"),
    "weights": NamedMethod("AttentionWeights"),
    "rollout": NamedMethod("AttentionRollout"),
    "saliency": _captum("Saliency"),
    "input-gradient": _captum("InputXGradient"),
    "integrated-gradients": _captum("IntegratedGradients", n_steps=30),
    "deeplift": _captum("DeepLift"),
    "gradient-shap": _captum("GradientShap", n_samples=20),
    "occlusion": _captum("Occlusion"),
    "shapley": _captum("ShapleyValueSampling", n_samples=5),
    "lime": _captum("Lime", n_samples=100, requires="sklearn"),
    "random": NamedMethod("RandomScores", "captum_norm.lab.comparison", False),
}
METHODS: Mapping[str, NamedMethod] = MappingProxyType(_methods)
"""All methods by name, those of :func:`register_method` included."""


def register_method(method: "Method") -> "Method":
    """Register your own method by its ``name``, for commands and comparisons; also a class decorator.

    Args:
        method: a class derived from :class:`captum_norm.AttentionMapAttribution`, with ``name`` and ``units``.

    Returns:
        the class.

    Raises:
        InvalidInputError: one of these is missing or invalid, or another method has the name.
    """
    from captum_norm.attr.base import AttentionMapAttribution as Base
    from captum_norm.results.maps import MapUnits

    argument: Any = method
    if not (isinstance(argument, type) and issubclass(argument, Base)):
        got = getattr(argument, "__name__", argument)
        raise InvalidInputError(f"got {got}; expected a class derived from AttentionMapAttribution")
    missing = [attribute for attribute in ("name", "units") if not hasattr(method, attribute)]
    if missing:
        raise InvalidInputError(f"{method.__name__} has no {missing[0]}; a method has name and units")
    if not _NAME.fullmatch(method.name):
        raise InvalidInputError(f"got the name {method.name!r}; expected lower-case letters, digits and hyphens")
    if not isinstance(method.units, MapUnits):
        raise InvalidInputError(f"got the units {method.units!r}; expected MapUnits")
    if (method.layer_map, method.maps_of) == (Base.layer_map, Base.maps_of):
        raise InvalidInputError(f"{method.__name__} defines neither layer_map nor maps_of")
    entry = NamedMethod(method.__name__, method.__module__, kind=method)
    known = _methods.setdefault(method.name, entry)
    # Running a notebook's cell again defines the class again.
    if (known.class_name, known.package) != (entry.class_name, entry.package):
        raise InvalidInputError(f"there is a method called {method.name!r}; give {method.__name__} another name")
    _methods[method.name] = entry
    return method


def import_method(path: str) -> str:
    """Import and register a method of one's own, ``"package.module:Class"``; return its name."""
    module, _, class_name = path.partition(":")
    try:
        method: Any = getattr(import_module(module), class_name)
    except CaptumNormError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, ImportError | ValueError) else f"{type(error).__name__}: {error}"
        raise InvalidInputError(f"cannot import {quoted_name(path)}: {reason}") from error
    return str(register_method(method).name)

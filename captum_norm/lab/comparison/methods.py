"""Creates methods by name, and formats their signatures."""

import inspect
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Literal

import torch
from captum.attr import Attribution
from captum.log import log_usage
from torch import Tensor, nn

from captum_norm.attr import TokenAttribution
from captum_norm.errors import InvalidInputError
from captum_norm.methods import METHODS
from captum_norm.models.embeddings import StandIn
from captum_norm.models.inputs import Inputs, bind_inputs
from captum_norm.models.outputs import Readout, real_positions
from captum_norm.models.wrappers import explained_module

_CAPTUM = "captum.attr"
COLUMNS = {"method", "example", "position", "token", "removable"}
"""The other columns of tables that have a column for each method."""


class RandomScores(Attribution):
    """Random scores from torch's global generator, as a baseline."""

    unit = "random number"

    def __init__(self, model: nn.Module) -> None:
        self.model = explained_module(model)
        super().__init__(self.model)

    @log_usage()  # type: ignore[untyped-decorator]
    def attribute(
        self,
        inputs: Inputs,
        target: Any = None,  # noqa: ARG002
        additional_forward_args: Any = None,
        *,
        position: Any = None,  # noqa: ARG002
    ) -> Tensor:
        """Draw scores uniformly from 0 to 1 at real positions, (B, S)."""
        call = bind_inputs(self.model, inputs, additional_forward_args)
        real = real_positions(call)
        return call.positions.shift_back(torch.rand(real.shape, device=real.device) * real, 1)


def make_method(
    name: str,
    model: nn.Module,
    *,
    removal: StandIn | Literal["delete"] | int | Tensor | None,
    tokenizer: Any,
    keep_special: bool,
    readout: Readout | None,
    batch_size: int,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Attribution:
    """Create a method of :data:`captum_norm.methods.METHODS` for a model.

    Args:
        name: the method's name.
        model: the model.
        removal: the baseline of Captum's methods, unless it is ``"delete"``; None for their default.
        tokenizer: knows mask, padding and special tokens.
        keep_special: whether special tokens stay in that baseline.
        readout: the output to explain instead of logits.
        batch_size: the number of inputs in one forward pass.
        options: further arguments of the method.

    Raises:
        InvalidInputError: it needs a package that is not installed.
        CaptumNormError: it does not support the model.
    """
    method = METHODS[name]
    if method.requires is not None and find_spec(method.requires) is None:
        raise InvalidInputError(f"needs the package {method.requires}, which is not installed")
    kind = method.load()
    if method.package == _CAPTUM:
        return TokenAttribution(
            model,
            kind,
            baseline=None if isinstance(removal, str) and removal == "delete" else removal,
            tokenizer=tokenizer,
            keep_special=keep_special,
            readout=readout,
            batch_size=batch_size,
            **{**method.options, **options},
        )
    made: Attribution = kind(model, **({} if method.target == "never" else {"readout": readout}), **options)
    return made


def chosen_methods(wanted: Sequence[str] | Mapping[str, str | Attribution] | None) -> dict[str, str | Attribution]:
    """Check the choice of methods; returns methods or their names, by their names in the results.

    Raises:
        InvalidInputError: a name is unknown, or there are no methods.
    """
    if isinstance(wanted, str):
        raise InvalidInputError(f"got methods={wanted!r}; expected a list of names, or a mapping")
    if wanted is None:
        wanted = tuple(METHODS)
    unnamed = [] if isinstance(wanted, Mapping) else [method for method in wanted if isinstance(method, Attribution)]
    if unnamed:
        kind = type(unnamed[0]).__name__
        raise InvalidInputError(
            f'got a list with a method of type {kind}; expected names, or a mapping: methods={{"{kind.lower()}": ...}}'
        )
    methods: dict[str, str | Attribution] = {}
    methods.update(wanted if isinstance(wanted, Mapping) else {name: name for name in wanted})
    if not methods:
        raise InvalidInputError(f"got no methods; expected some of {', '.join(METHODS)}")
    for taken in methods.keys() & COLUMNS:
        raise InvalidInputError(
            f"got a method called {taken!r}, which is a column of the tables; call it something else"
        )
    for method in methods.values():
        if not isinstance(method, Attribution) and method not in METHODS:
            raise InvalidInputError(
                f"got the method {method!r}; expected a method of Captum or one of {', '.join(METHODS)}"
            )
    return methods


def signature_of(method: Attribution) -> str:
    """Format the class of a method and its choices, like a signature of sacrebleu."""
    given: str | None = getattr(method, "signature", None)
    if given is not None:
        return given
    choices = ((name, getattr(method, name, None)) for name in inspect.signature(type(method)).parameters)
    shown = {name: value for name, value in choices if isinstance(value, (str, int, float))}
    return "|".join([f"attribution:{type(method).__name__}", *(f"{name}:{value}" for name, value in shown.items())])

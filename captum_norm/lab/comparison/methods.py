"""Creates methods by name, and runs them with fixed seeds, timed."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from time import perf_counter
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from captum.attr import Attribution
from captum.log import log_usage
from torch import Tensor, nn

from captum_norm.attr import TokenAttribution
from captum_norm.checks import check_index
from captum_norm.errors import InvalidInputError, NonFiniteError
from captum_norm.methods import METHODS
from captum_norm.models import Inputs, TokenInputs, bind_tokens, explained_module
from captum_norm.models.embeddings import StandIn
from captum_norm.models.outputs import Readout, Target

T = TypeVar("T")

COLUMNS = {"method", "example", "position", "token", "removable"}
"""The other columns of tables that have a column for each method."""

_SEEDS = 2**32


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
        bound = bind_tokens(self.model, inputs, additional_forward_args)
        return bound.to_user(torch.rand(bound.real.shape, device=bound.real.device) * bound.real)


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
    """Create a method of :data:`captum_norm.methods.METHODS` for a model."""
    method = METHODS[name]
    if method.requires is not None and find_spec(method.requires) is None:
        raise InvalidInputError(f"needs the package {method.requires}, which is not installed")
    kind = method.load()
    if method.package == "captum.attr":
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


def chosen_methods(names: Sequence[str] | Mapping[str, str | Attribution] | None) -> dict[str, str | Attribution]:
    """Check the choice of methods; returns methods or their names, by their names in the results."""
    if isinstance(names, str):
        raise InvalidInputError(f"got methods={names!r}; expected a list of names, or a mapping")
    if names is None:
        names = tuple(METHODS)
    if not isinstance(names, Mapping):
        kind = next((type(method).__name__ for method in names if isinstance(method, Attribution)), None)
        if kind is not None:
            raise InvalidInputError(
                f"got a list with a method of type {kind}; expected names, or a mapping: "
                f'methods={{"{kind.lower()}": ...}}'
            )
        names = dict(zip(names, names, strict=True))
    methods = dict(names)
    if not methods:
        raise InvalidInputError(f"got no methods; expected some of {', '.join(METHODS)}")
    for name, method in methods.items():
        if name in COLUMNS:
            raise InvalidInputError(
                f"got a method called {name!r}, which is a column of the tables; call it something else"
            )
        if not isinstance(method, Attribution) and method not in METHODS:
            raise InvalidInputError(
                f"got the method {method!r}; expected a method of Captum or one of {', '.join(METHODS)}"
            )
    return methods


def signature_of(method: Attribution) -> str:
    """Format the class of a method and its choices, like a signature of sacrebleu."""
    signature: str | None = getattr(method, "signature", None)
    if signature is not None:
        return signature
    choices = ((name, getattr(method, name, None)) for name in inspect.signature(type(method)).parameters)
    shown = {name: value for name, value in choices if isinstance(value, (str, int, float))}
    return "|".join([f"attribution:{type(method).__name__}", *(f"{name}:{value}" for name, value in shown.items())])


def seeded_scores(method: Attribution, inputs: TokenInputs, target: Target, seed: int, *, mean: bool) -> Tensor:
    """Compute a method's scores for the tokens of N examples, (N, S), with the global generators seeded."""
    where: dict[str, Any] = {} if inputs.read is None else {"position": inputs.read.long().argmax(1)}
    if mean and hasattr(method, "maps"):
        where = {"position": "mean"}
    with seeded(inputs.model, seed), warnings.catch_warnings():
        # Captum's DeepLIFT warns at every call that it sets hooks.
        warnings.filterwarnings("ignore", r"\s*Setting forward, backward hooks", UserWarning)
        result = method.attribute(inputs.arguments, target=target, **where)
    scores: Any = result[0] if isinstance(result, tuple) else result
    real = inputs.real
    if not isinstance(scores, Tensor) or scores.shape != real.shape:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise InvalidInputError(
            f"{type(method).__name__} gives {got}; expected a score for each token, {tuple(real.shape)}"
        )
    scores = scores.detach().to(real.device, torch.promote_types(scores.dtype, torch.float32))
    if not scores[real].isfinite().all():
        raise NonFiniteError(f"{type(method).__name__} gives NaN or infinity for these inputs")
    masked: Tensor = scores.masked_fill(~real, 0)
    return masked


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of some work, and the seconds it takes on any device."""
    _wait()
    start = perf_counter()
    result = work()
    _wait()
    return result, perf_counter() - start


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def checked_seed(seed: int) -> int:
    """Check a seed for torch and numpy."""
    number = check_index("the seed", seed)
    if not 0 <= number < _SEEDS:
        raise InvalidInputError(f"got the seed {number}; expected 0 to {_SEEDS - 1}")
    return number


@contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """Seed torch's and numpy's global generators, of the model's devices too, inside the context, then restore them.

    Example:
        >>> with seeded(nn.Linear(1, 1), 0):
        ...     first = torch.rand(1)
        >>> with seeded(nn.Linear(1, 1), 0):
        ...     bool(torch.rand(1) == first)
        True
    """
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    # Captum's GradientSHAP draws from numpy's global generator.
    state = np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(state)  # noqa: NPY002

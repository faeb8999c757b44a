"""Runs methods on all examples, batch by batch, and times them."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch
from captum.attr import Attribution
from torch import Tensor, nn

from captum_norm.bars import bar
from captum_norm.errors import CaptumNormError, InvalidInputError, NonFiniteError
from captum_norm.lab.comparison.examples import Batch
from captum_norm.lab.comparison.methods import signature_of
from captum_norm.lab.comparison.seeding import seeded
from captum_norm.models.hooks import evaluating
from captum_norm.models.outputs import real_positions

T = TypeVar("T")

_FORWARD_PASSES = 3


@dataclass(frozen=True, eq=False)
class Scored:
    """One method's scores for the tokens of every batch, (N, S) each."""

    signature: str
    scores: Sequence[Tensor]
    seconds: float


@dataclass(frozen=True, eq=False)
class Prepared:
    """A method that has explained one example.

    Attributes:
        signature: the method and its choices.
        explain: computes its scores for a batch.
        seconds: how long the example took.
    """

    signature: str
    explain: Callable[[Batch], Tensor]
    seconds: float


def prepared(
    methods: Mapping[str, str | Attribution],
    make: Callable[[str], Attribution],
    model: nn.Module,
    batches: Sequence[Batch],
    seed: int,
    *,
    mean: bool,
) -> tuple[dict[str, Prepared], dict[str, str]]:
    """Run every method on one example: a warm-up, which shows who supports the model and what methods cost.

    Args:
        methods: methods or their names, by their names in the results.
        make: creates a method by name.
        model: the model.
        batches: all examples.
        seed: the seed of the global generators, for each batch.
        mean: see :func:`token_scores`.

    Returns:
        the methods, and the reasons of refused ones.
    """
    ready, refused = {}, {}
    with bar("preparing", len(methods), "methods") as progress:
        for name, wanted in methods.items():
            try:
                method = make(wanted) if isinstance(wanted, str) else wanted
                explain = partial(_explain, method, model, seed, mean=mean)
                seconds = timed(partial(explain, batches[0].first()))[1]
                ready[name] = Prepared(signature_of(method), explain, seconds)
            except CaptumNormError as error:
                refused[name] = " ".join(str(error).split())
            progress.update()
    return ready, refused


def run_methods(
    methods: Mapping[str, Prepared], batches: Sequence[Batch], done: Callable[[float], object]
) -> tuple[dict[str, Scored], dict[str, str]]:
    """Run methods on all examples.

    Args:
        methods: the methods.
        batches: all examples.
        done: is told of the seconds that finished work was expected to take.

    Returns:
        the scores by method, and the reasons of refused methods.
    """
    scored, refused = {}, {}
    for name, method in methods.items():
        parts, seconds = [], 0.0
        try:
            for batch in batches:
                scores, taken = timed(partial(method.explain, batch))
                parts.append(scores)
                seconds += taken
                done(method.seconds * len(batch.index))
            scored[name] = Scored(method.signature, parts, seconds)
        except CaptumNormError as error:
            refused[name] = " ".join(str(error).split())
    return scored, refused


def forward_seconds(batches: Sequence[Batch]) -> float:
    """Time the plain forward pass of all examples: the fastest of a few runs for each batch."""
    total = 0.0
    for batch in batches:
        with torch.no_grad(), evaluating(batch.call.model):
            batch.call.run()
            total += min(timed(batch.call.run)[1] for _ in range(_FORWARD_PASSES))
    return total


def _explain(method: Attribution, model: nn.Module, seed: int, batch: Batch, *, mean: bool) -> Tensor:
    with seeded(model, seed), warnings.catch_warnings():
        # Captum's DeepLIFT warns at every call that it sets hooks.
        warnings.filterwarnings("ignore", r"\s*Setting forward, backward hooks", UserWarning)
        return token_scores(method, batch, mean=mean)


def token_scores(method: Attribution, batch: Batch, *, mean: bool) -> Tensor:
    """Compute a method's scores for the tokens of a batch, (N, S).

    Args:
        method: the method.
        batch: the examples.
        mean: explain the mean over positions, for methods with maps.

    Raises:
        InvalidInputError: the method returns something else.
        NonFiniteError: the method returns NaN or infinity.
        CaptumNormError: the method raises it.
    """
    where: dict[str, Any] = {} if batch.position is None else {"position": batch.position}
    if mean and hasattr(method, "maps"):
        where = {"position": "mean"}
    result = method.attribute(batch.inputs, target=batch.target, **where)
    scores: Any = result[0] if isinstance(result, tuple) else result
    real = real_positions(batch.call)
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

"""Methods on trial: their scores and what they cost, batch by batch."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from captum.attr import Attribution
from torch import Tensor, nn

from captum_norm.bars import bar
from captum_norm.comparison.examples import Batch
from captum_norm.comparison.scores import Maker, signature_of, timed, token_scores
from captum_norm.comparison.seeding import seeded
from captum_norm.errors import CaptumNormError
from captum_norm.models.hooks import evaluating

_FORWARD_PASSES = 3


@dataclass(frozen=True, eq=False)
class Scored:
    """One method's scores for the tokens of every batch, (N, S) each."""

    signature: str
    scores: Sequence[Tensor]
    seconds: float


def run_methods(
    methods: Mapping[str, str | Attribution],
    maker: Maker,
    batches: Sequence[Batch],
    seed: int,
    *,
    mean: bool,
) -> tuple[dict[str, Scored], dict[str, str]]:
    """Run every method on all examples, after a warm-up on one of them that is not counted.

    Args:
        methods: methods, or names of them, by what the results call them.
        maker: makes those that have a name.
        batches: all examples.
        seed: of the global generators, for each batch.
        mean: see :func:`captum_norm.comparison.scores.token_scores`.

    Returns:
        what they found, and why others were refused.
    """
    scored, refused = {}, {}
    examples = sum(len(batch.index) for batch in batches)
    with bar("comparing", len(methods) * examples, "explanations") as progress:
        for place, (name, wanted) in enumerate(methods.items(), 1):
            try:
                method = maker.make(wanted) if isinstance(wanted, str) else wanted
                explain = partial(_explain, method, maker.model, seed, mean=mean)
                explain(batches[0].first())
                scored[name] = _timed(method, explain, batches, progress.update)
            except CaptumNormError as error:
                refused[name] = " ".join(str(error).split())
            progress.update(place * examples - progress.n)
    return scored, refused


def forward_seconds(batches: Sequence[Batch]) -> float:
    """The plain forward pass of all examples: for each batch the quickest of a few."""
    total = 0.0
    for batch in batches:
        with torch.no_grad(), evaluating(batch.call.model):
            batch.call.run()
            total += min(timed(batch.call.run)[1] for _ in range(_FORWARD_PASSES))
    return total


def _timed(
    method: Attribution, explain: Callable[[Batch], Tensor], batches: Sequence[Batch], done: Callable[[int], object]
) -> Scored:
    parts, seconds = [], 0.0
    for batch in batches:
        scores, taken = timed(partial(explain, batch))
        parts.append(scores)
        seconds += taken
        done(len(batch.index))
    return Scored(signature_of(method), parts, seconds)


def _explain(method: Attribution, model: nn.Module, seed: int, batch: Batch, *, mean: bool) -> Tensor:
    with seeded(model, seed), warnings.catch_warnings():
        # Captum's DeepLIFT says at every call that it sets hooks and removes them.
        warnings.filterwarnings("ignore", r"\s*Setting forward, backward hooks", UserWarning)
        return token_scores(method, batch, mean=mean)

"""Measures how faithful token scores are: how the model's output changes when tokens are removed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil
from types import MappingProxyType
from typing import Any, Literal, overload

import torch
from torch import Tensor

from captum_norm.checks import check_choice, check_count, check_entries, quoted
from captum_norm.errors import InvalidInputError
from captum_norm.functional import centred_ranks
from captum_norm.lab.evaluation.perturbation import MOST, Perturbation, PerturbedInputs
from captum_norm.models import Inputs, Position
from captum_norm.models.outputs import Target

Coefficient = Literal["spearman", "kendall"]
"""Spearman's ρ, or Kendall's τ_b."""

ERASER_BINS = (0.01, 0.05, 0.1, 0.2, 0.5)
"""Shares of tokens [DeYoung et al. 2020]."""

# 0.07 · 100 is a little more than 7 in floating point.
_SLACK = 1e-9


@dataclass(frozen=True, eq=False)
class FaithfulnessScores:
    """Scores of one method on B examples, in the unit of the observed output.

    Attributes:
        aopc: mean drop over the steps of the MoRF curve, (B,); higher is better.
        comprehensiveness: mean drop without the highest-ranked tokens of each bin, (B,); higher is better.
        sufficiency: mean drop with only these tokens, (B,); lower is better.
        log_odds: mean of log p − log p(whole) without them, (B,); lower is better. NaN for logits.
        relevance_gain: area between LeRF and MoRF, (B,); higher is better.
        spearman: Spearman's ρ with leave-one-out scores, (B,); NaN if either has no order.
        kendall: Kendall's τ_b with leave-one-out scores, (B,).
        morf: the output at steps + 1 shares of removed tokens from 0 to 1, most relevant first, (B, steps + 1).
        lerf: the same with the least relevant first.
    """

    aopc: Tensor
    comprehensiveness: Tensor
    sufficiency: Tensor
    log_odds: Tensor
    relevance_gain: Tensor
    spearman: Tensor
    kendall: Tensor
    morf: Tensor
    lerf: Tensor

    def means(self) -> dict[str, float]:
        """Average every score over examples, without undefined correlations."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: float(column.nanmean()) for name, column in columns.items() if column.dim() == 1}

    def __getitem__(self, examples: slice | Tensor) -> "FaithfulnessScores":
        """Return the scores of some examples, on the CPU."""
        return FaithfulnessScores(**{field.name: getattr(self, field.name).cpu()[examples] for field in fields(self)})

    @classmethod
    def concatenate(cls, parts: Sequence["FaithfulnessScores"]) -> "FaithfulnessScores":
        """Concatenate the scores of several batches."""
        if not parts:
            raise InvalidInputError("got no scores; expected those of at least one batch")
        return cls(**{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)})


class Faithfulness:
    """Scores token attributions of any method by how the model's output changes when tokens are removed.

    Tokens are ranked by descending score, equal scores from the left; a share q of n tokens is ⌈qn⌉ of them.

    Args:
        perturbation: how tokens are removed, and which output is observed.
        bins: shares of tokens for comprehensiveness, sufficiency and log-odds.
        steps: the number of steps of the curves and of AOPC.

    Raises:
        InvalidInputError: a bin is not in (0, 1], or there are no steps.

    Example:
        >>> from types import SimpleNamespace
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)
        >>> model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes))
        >>> tokenizer = SimpleNamespace(mask_token_id=4, pad_token_id=0, all_special_ids=[0, 2, 3, 4])
        >>> faithfulness = Faithfulness(Perturbation(model, "mask", tokenizer=tokenizer))
        >>> faithfulness.signature
        'removal:mask:4|special:kept|output:probability|bins:0.01,0.05,0.1,0.2,0.5|steps:10'
        >>> ids = torch.tensor([[2, 7, 9, 8, 3]])
        >>> faithfulness.evaluate(ids, torch.tensor([[0.0, 0.5, 0.1, 0.4, 0.0]])).aopc.shape
        torch.Size([1])
    """

    def __init__(self, perturbation: Perturbation, *, bins: Sequence[float] = ERASER_BINS, steps: int = 10) -> None:
        if not isinstance(perturbation, Perturbation):
            raise InvalidInputError(f"got {quoted(perturbation)}; expected a Perturbation")
        self.perturbation = perturbation
        self.bins = tuple(check_entries("bins", bins, "shares of tokens"))
        if not self.bins or not all(isinstance(share, (int, float)) and 0 < share <= 1 for share in self.bins):
            raise InvalidInputError(f"got the bins {quoted(self.bins)}; expected shares of tokens above 0, at most 1")
        self.steps = check_count("steps", steps, MOST)

    @property
    def signature(self) -> str:
        """Every choice that changes scores, in the manner of sacrebleu."""
        return f"{self.perturbation.signature}|bins:{','.join(map(str, self.bins))}|steps:{self.steps}"

    @property
    def passes(self) -> int:
        """The largest number of inputs, for one example and one method, that the model is run on."""
        return 2 * (len(self.bins) + self.steps)

    @overload
    def evaluate(
        self,
        inputs: Inputs,
        scores: Tensor,
        target: Target = None,
        additional_forward_args: Any = None,
        *,
        position: Position = None,
    ) -> FaithfulnessScores: ...

    @overload
    def evaluate(
        self,
        inputs: Inputs,
        scores: Mapping[str, Tensor],
        target: Target = None,
        additional_forward_args: Any = None,
        *,
        position: Position = None,
    ) -> dict[str, FaithfulnessScores]: ...

    def evaluate(
        self,
        inputs: Inputs,
        scores: Tensor | Mapping[str, Tensor],
        target: Target = None,
        additional_forward_args: Any = None,
        *,
        position: Position = None,
    ) -> FaithfulnessScores | dict[str, FaithfulnessScores]:
        """Score one method, or several, which run the inputs they share only once.

        Args:
            inputs: see :meth:`Perturbation.bind`.
            scores: a number for each token, (B, S), or those of several methods by name. Higher is more relevant;
                scores of tokens that are not removable are ignored.
            target: the class or next token that the scores explain; None for the model's prediction.
            additional_forward_args: see :meth:`Perturbation.bind`.
            position: see :meth:`Perturbation.bind`.

        Returns:
            the scores, by name for several methods.

        Raises:
            InvalidInputError: the scores do not have the shape of the inputs or are not finite, an example has no token
                to remove, or see :meth:`Perturbation.bind` and :meth:`PerturbedInputs.outputs`.
        """
        bound = self.perturbation.bind(inputs, additional_forward_args, target=target, position=position)
        removable, methods = bound.removable, dict(scores) if isinstance(scores, Mapping) else {"": scores}
        for values in methods.values():
            bound.check(values)
            if not values.detach().to(removable.device)[removable].isfinite().all():
                raise InvalidInputError("the scores contain NaN or infinity")
        empty = (~removable.any(1)).nonzero()
        if len(empty):
            raise InvalidInputError(f"example {int(empty[0])} has no token that may be removed")
        kept = [self._kept(values.detach().to(removable.device), removable) for values in methods.values()]
        outputs = bound.outputs(torch.cat([bound.all_but_one(), *kept], 1))
        alone, *parts = outputs.split([removable.shape[1], *(part.shape[1] for part in kept)], 1)
        omitted = bound.drops(alone)
        results = {
            name: self._scores(bound, values, part, omitted)
            for (name, values), part in zip(methods.items(), parts, strict=True)
        }
        return results if isinstance(scores, Mapping) else results[""]

    def _kept(self, scores: Tensor, removable: Tensor) -> Tensor:
        """The tokens kept without each bin, with each bin alone, and along the two curves, (B, K, S)."""
        places = ranks(scores, removable)[:, None]  # (B, 1, S)
        bins, steps = (
            token_counts(shares, removable)[..., None]
            for shares in (self.bins, [step / self.steps for step in range(1, self.steps + 1)])
        )
        least_first = (places >= removable.sum(1)[:, None, None] - steps) & removable[:, None]
        return ~torch.cat([places < bins, places >= bins, places < steps, least_first], 1)

    def _scores(self, bound: PerturbedInputs, scores: Tensor, outputs: Tensor, omitted: Tensor) -> FaithfulnessScores:
        bins, steps = len(self.bins), self.steps
        without, _, morf, _ = outputs.split([bins, bins, steps, steps], 1)
        log_odds = -mean_drop(bound.whole, without)
        if self.perturbation.output == "logit":
            log_odds = torch.full_like(log_odds, torch.nan)
        whole, values = bound.values(bound.whole), bound.values(outputs)
        without, alone, morf, lerf = values.split([bins, bins, steps, steps], 1)
        morf, lerf = (torch.cat([whole[:, None], curve], 1) for curve in (morf, lerf))
        scores = scores.to(omitted.device)
        return FaithfulnessScores(
            aopc=mean_drop(whole, morf[:, 1:]),
            comprehensiveness=mean_drop(whole, without),
            sufficiency=mean_drop(whole, alone),
            log_odds=log_odds,
            relevance_gain=relevance_gain(morf, lerf),
            spearman=spearman(scores, omitted, bound.removable),
            kendall=kendall(scores, omitted, bound.removable),
            morf=morf,
            lerf=lerf,
        )


def ranks(scores: Tensor, removable: Tensor) -> Tensor:
    """Rank tokens by descending score; equal scores from the left.

    Args:
        scores: (B, S).
        removable: True at the tokens to rank, (B, S).

    Returns:
        ranks from 0, (B, S); S at all other tokens.

    >>> ranks(torch.tensor([[0.1, 0.9, 5.0, 0.1]]), torch.tensor([[True, True, False, True]]))
    tensor([[1, 0, 4, 2]])
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, (~removable).gather(1, order).to(torch.int8).argsort(dim=1, stable=True))
    places = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places).masked_fill(~removable, scores.shape[1])


def token_counts(fractions: Sequence[float], removable: Tensor) -> Tensor:
    """Convert fractions q of n tokens to counts ⌈qn⌉, at least one for any q > 0.

    Args:
        fractions: K numbers from 0 to 1.
        removable: the tokens to count, (B, S).

    Returns:
        (B, K).

    >>> token_counts([0.0, 0.01, 0.5, 1.0], torch.ones(1, 7, dtype=torch.bool))
    tensor([[0, 1, 4, 7]])
    """
    rows = [[ceil(fraction * count - _SLACK) for fraction in fractions] for count in removable.sum(1).tolist()]
    return torch.tensor(rows, device=removable.device)


def mean_drop(whole: Tensor, perturbed: Tensor) -> Tensor:
    """1/K Σ_k f(x) − f(x_k): area over the perturbation curve, comprehensiveness or sufficiency, depending on x_k.

    Args:
        whole: f(x), (B,).
        perturbed: f(x_k), (B, K).

    Returns:
        (B,).

    >>> mean_drop(torch.tensor([0.75]), torch.tensor([[0.5, 0.25]]))
    tensor([0.3750])
    """
    return (whole[:, None] - perturbed).mean(1)


def area(curve: Tensor) -> Tensor:
    """∫₀¹ of a curve at equal steps, by the trapezoidal rule: (B, K + 1) -> (B,)."""
    return torch.trapezoid(curve, dx=1 / (curve.shape[1] - 1), dim=1)


def relevance_gain(most_relevant_first: Tensor, least_relevant_first: Tensor) -> Tensor:
    """Area between the two perturbation curves, LeRF minus MoRF [Blücher et al. 2024]: (B, K + 1) twice -> (B,).

    >>> relevance_gain(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]]))
    tensor([0.5000])
    """
    return area(least_relevant_first) - area(most_relevant_first)


def spearman(first: Tensor, second: Tensor, compared: Tensor) -> Tensor:
    """Spearman's ρ of two scores in each example: Pearson's correlation of the ranks, with equal scores sharing a rank.

    Args:
        first: (B, S).
        second: (B, S).
        compared: the tokens to compare, (B, S).

    Returns:
        (B,), float64; NaN if all scores of one are equal, or for fewer than two tokens.

    >>> spearman(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 3.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool))
    tensor([0.5000], dtype=torch.float64)
    """
    return _tables([first, second], compared, "spearman")[:, 0, 1]


def kendall(first: Tensor, second: Tensor, compared: Tensor) -> Tensor:
    """Kendall's τ_b of two scores in each example.

    The number of pairs in the same order minus those in opposite order, divided by √(pairs that the first orders ·
    pairs that the second orders).

    Args:
        first: (B, S).
        second: (B, S).
        compared: the tokens to compare, (B, S).

    Returns:
        (B,), float64; NaN if all scores of one are equal, or for fewer than two tokens.

    >>> kendall(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 3.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool))
    tensor([0.3333], dtype=torch.float64)
    """
    return _tables([first, second], compared, "kendall")[:, 0, 1]


def agreement(scores: Mapping[str, Tensor], compared: Tensor, coefficient: Coefficient = "spearman") -> Tensor:
    """Rank correlation of each pair of methods, averaged over examples.

    Args:
        scores: (B, S) for each of M methods, by name.
        compared: the tokens to compare, (B, S).
        coefficient: ``"spearman"`` or ``"kendall"``.

    Returns:
        (M, M), float64, in the order of ``scores``; the mean leaves out examples with NaN.

    Raises:
        InvalidInputError: there are no scores, the shapes differ, or the coefficient is unknown.
    """
    check_choice("coefficient", coefficient, _FEATURES)
    given: object = scores
    if not isinstance(given, Mapping) or not given:
        raise InvalidInputError(f"got scores {quoted(scores)}; expected a mapping from methods to tensors (B, S)")
    return _tables(list(scores.values()), compared, coefficient).nanmean(0)


def _ranks(values: Tensor) -> Tensor:
    """(M, n) -> (M, n)."""
    return torch.stack([centred_ranks(row) for row in values])


def _signs(values: Tensor) -> Tensor:
    """sign(x_i − x_j): (M, n) -> (M, n²)."""
    later, earlier = values[:, :, None], values[:, None]
    return ((later > earlier).double() - (later < earlier).double()).flatten(1)


# Each coefficient is the cosine of two scores' features.
_FEATURES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"spearman": _ranks, "kendall": _signs})


def _tables(scores: list[Tensor], compared: Tensor, coefficient: Coefficient) -> Tensor:
    """The coefficient of each pair of scores in each example: (B, S) each -> (B, M, M)."""
    tensors = (*scores, compared)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InvalidInputError(f"got {quoted(tensor)}; expected a tensor (B, S)")
    if len({tensor.shape for tensor in tensors}) != 1 or compared.dim() != 2:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise InvalidInputError(f"got tensors of shapes {shapes}; expected (B, S) for all")
    tables = []
    for values, chosen in zip(torch.stack(scores, 1), compared, strict=True):
        features = _FEATURES[coefficient](values[:, chosen])
        products = features @ features.T
        squares = products.diagonal()
        tables.append(products / (squares[:, None] * squares).sqrt())
    return torch.stack(tables)

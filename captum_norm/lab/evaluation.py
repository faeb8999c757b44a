"""Measures how faithful token scores are, whatever method gave them: how the output changes when tokens are removed."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from captum_norm import models
from captum_norm.checks import check_bool, check_choice, check_count, check_entries, quoted
from captum_norm.errors import InvalidInputError, NonFiniteError
from captum_norm.functional import centred_ranks
from captum_norm.models.embeddings import Replacement, StandIn
from captum_norm.models.outputs import Readout, Target

__all__ = ["ERASER_BINS", "Faithfulness", "FaithfulnessScores", "Perturbation", "PerturbedInputs", "agreement"]

Output = Literal["probability", "logit"]
"""The output of a class: its probability, or its logit (or the number that a readout returns)."""

Coefficient = Literal["spearman", "kendall"]
"""Spearman's ρ, or Kendall's τ_b."""

ERASER_BINS = (0.01, 0.05, 0.1, 0.2, 0.5)
"""Shares of tokens [DeYoung et al. 2020]."""

_MOST_STEPS = 10**6  # more would not fit into memory
_SLACK = 1e-9  # 0.07 · 100 is a little more than 7 in floating point


class Perturbation:
    """How tokens are removed, and which output of the model is observed.

    Args:
        model: a classifier or causal language model of Hugging Face, or any other model with ``readout``; not changed.
        removal: how to remove a token: ``"delete"`` deletes it from the sequence; anything else replaces its embedding,
            by that of the ``"mask"`` or ``"pad"`` token, the ``"mean"`` of all tokens' embeddings, ``"zero"``, a
            token's id or an embedding (D,). None: the mask token, or else the padding token, or else the mean.
        tokenizer: tokenizes texts, and knows mask, padding and special tokens; None for that of a pipeline or a
            SentenceTransformer.
        keep_special: never remove nor count special tokens such as [CLS]. Needs the tokenizer.
        output: ``"probability"``, for mutually exclusive classes, or ``"logit"``.
        readout: the output to observe instead of logits, see :data:`captum_norm.models.outputs.Readout`.
        batch_size: the number of perturbed inputs in one forward pass.

    Raises:
        InvalidInputError: an option is invalid, or the replacing token is unknown.
        UnsupportedModelError: the model is an encoder–decoder, or does not name its embedding module.
    """

    def __init__(
        self,
        model: models.Explainable,
        removal: StandIn | Literal["delete"] | int | Tensor | None = "mask",
        *,
        tokenizer: Any = None,
        keep_special: bool = True,
        output: Output = "probability",
        readout: Readout | None = None,
        batch_size: int = 64,
    ) -> None:
        model, tokenizer = models.opened(model, tokenizer)
        check_choice("output", output, get_args(Output))
        if output == "probability" and readout is None and models.probability_kind(model, 2) == "sigmoid":
            raise InvalidInputError(
                f"{type(model).__name__} is a multi-label classifier, whose probability is the sigmoid of one logit, "
                "not a share of all; watch the logit"
            )
        if check_bool("keep_special", keep_special) and tokenizer is None:
            raise InvalidInputError(
                "got keep_special=True without a tokenizer, which knows the special tokens; pass one, or "
                "keep_special=False"
            )
        self.replacement: Replacement | None = None
        if isinstance(removal, str) and removal == "delete":
            models.replacement(model, "zero", tokenizer)  # refuses models that do not name their embedding module
            if "attention_mask" not in inspect.signature(model.forward).parameters:
                raise InvalidInputError(f"{type(model).__name__} takes no attention mask, so no token can be deleted")
        else:
            self.replacement = models.replacement(model, removal, tokenizer)
        self.model, self.tokenizer = model, tokenizer
        self.special_ids = tuple(tokenizer.all_special_ids) if keep_special and tokenizer is not None else ()
        self.keep_special = keep_special
        self.output = output
        self.readout = readout
        self.batch_size = check_count("batch_size", batch_size)

    @property
    def signature(self) -> str:
        """All choices that change scores, like a signature of sacrebleu."""
        removal = "delete" if self.replacement is None else self.replacement.name
        return f"removal:{removal}|special:{'kept' if self.keep_special else 'removed'}|output:{self.output}"

    def bind(
        self,
        inputs: models.Inputs,
        additional_forward_args: Any = None,
        *,
        target: Target = None,
        position: models.Position = None,
    ) -> "PerturbedInputs":
        """Prepare inputs for perturbation, which runs the model on them once.

        Args:
            inputs: token ids (B, S), embeddings (B, S, D), a tuple of tensors, or a mapping such as a tokenizer's
                output.
            additional_forward_args: the model's further positional arguments (attention mask first).
            target: the class or next token to observe: an integer, one for each example, or for logits a
                :class:`captum_norm.Difference`. None: the model's prediction for the whole input.
            position: where to read the logits if every position has some; its token is never removed. None: the last
                real position, where a causal model predicts the next token.

        Raises:
            InvalidInputError: the inputs, target or position do not fit the model.
            UnsupportedModelError: the model returns no logits, or does not use its embedding module once.
        """
        if self.output == "probability" and isinstance(target, models.Difference):
            raise InvalidInputError('got a difference of two outputs, which has no probability; pass output="logit"')
        options: dict[str, Any] = {"tokenizer": self.tokenizer, "position": position, "readout": self.readout}
        return PerturbedInputs(self, models.bind_tokens(self.model, inputs, additional_forward_args, **options), target)


class PerturbedInputs:
    """Inputs whose tokens can be removed, as :meth:`Perturbation.bind` returns them.

    Positions are those of the user's inputs, with padding on either side. Outputs are log-probabilities or logits,
    depending on the perturbation's ``output``, in single precision or better.

    Attributes:
        removable: True at the tokens that may be removed, (B, S).
        target: the class of each example, (B,), or both classes of a difference, (B, 2); None if the output is one
            number.
        whole: the output for the whole inputs, (B,).
        named: the same as :class:`captum_norm.results.outputs.NamedOutput`, one for each example.
    """

    def __init__(self, perturbation: Perturbation, inputs: models.TokenInputs, target: Target) -> None:
        # Private positions are those of the model.
        self._perturbation, self._inputs = perturbation, inputs
        removable = inputs.ordinary(perturbation.special_ids)
        self._removable = removable if inputs.read is None else removable & ~inputs.read
        self._stand_in = None if perturbation.replacement is None else perturbation.replacement.vector
        scores = self._run(torch.arange(len(inputs), device=inputs.real.device), inputs.real)
        if perturbation.output == "probability" and (scores.dim() == 1 or scores.shape[1] < 2):
            raise InvalidInputError('the output is one number, which has no probability; pass output="logit"')
        self.target = models.chosen_target(target, scores)
        self.whole = self._select(scores, self.target)
        model, tokenizer, readout = inputs.model, perturbation.tokenizer, perturbation.readout
        self.named = models.name_outputs(model, scores, self.target, tokenizer, readout=readout is not None)
        self.removable = inputs.to_user(self._removable)

    def outputs(self, kept: Tensor) -> Tensor:
        """Compute the output with some tokens removed; tokens that are not removable stay.

        Duplicate inputs are run once.

        Args:
            kept: True at the tokens to keep, (B, K, S).

        Returns:
            (B, K).

        Raises:
            InvalidInputError: ``kept`` has another shape, or deletion leaves no token.
        """
        batch, length = self.removable.shape
        if kept.dim() != 3 or (kept.shape[0], kept.shape[2]) != (batch, length) or kept.dtype != torch.bool:
            got = f"{kept.dtype} of shape {tuple(kept.shape)}"
            raise InvalidInputError(f"got kept tokens as {got}; expected torch.bool of shape ({batch}, K, {length})")
        kept = self._inputs.to_model(kept.to(self._removable.device).transpose(1, 2)).transpose(1, 2)
        rows = ((kept | ~self._removable[:, None]) & self._inputs.real[:, None]).flatten(0, 1)
        examples = torch.arange(batch, device=rows.device).repeat_interleave(kept.shape[1])
        different, places = torch.cat([examples[:, None], rows.long()], 1).unique(dim=0, return_inverse=True)
        examples, rows = different[:, 0], different[:, 1:].bool()
        scores = self._run(examples, rows, None if self.target is None else self.target[examples])
        return scores[places].reshape(batch, -1).to(self.whole)

    def values(self, outputs: Tensor) -> Tensor:
        """Convert log-probabilities to probabilities; logits stay as they are."""
        return outputs.exp() if self._perturbation.output == "probability" else outputs

    def leave_one_out(self) -> Tensor:
        """Compute the whole output minus that without each token, (B, S); 0 at tokens that are never removed."""
        return self.drops(self.outputs(self.all_but_one()))

    def all_but_one(self) -> Tensor:
        """Return which tokens are kept when each one is removed alone, (B, S, S)."""
        batch, length = self.removable.shape
        return ~torch.eye(length, dtype=torch.bool, device=self.removable.device).expand(batch, -1, -1)

    def drops(self, outputs: Tensor) -> Tensor:
        """Compute leave-one-out scores from the outputs for :meth:`all_but_one`, (B, S)."""
        return (self.whole[:, None] - outputs) * self.removable

    def _run(self, examples: Tensor, kept: Tensor, target: Tensor | None = None) -> Tensor:
        """Run examples (N,) with the tokens to keep (N, S): outputs (N,), or without a target scores (N, C) or (N,)."""
        real = self._inputs.real
        # Up to the last token that is real, unless tokens are deleted.
        ends = (real * torch.arange(1, real.shape[1] + 1, device=real.device)).amax(1)
        lengths = kept.sum(1) if self._stand_in is None else ends[examples]
        if not lengths.all():
            empty = int(examples[lengths.argmin()])
            advice = "" if self._perturbation.keep_special else "keep special tokens, or "
            raise InvalidInputError(
                f"deletion leaves no token of example {empty}; {advice}choose another removal, such as mean"
            )
        # Batches of similar lengths need little padding.
        order = lengths.argsort(stable=True)
        results = []
        for chunk in order.split(self._perturbation.batch_size):
            scores = self._forward(examples[chunk], kept[chunk], lengths[chunk])
            results.append(scores if target is None else self._select(scores, target[chunk]))
        # A model spread over devices may return outputs on another device than the inputs.
        outputs = torch.cat(results).to(order.device)[order.argsort()]
        if target is not None and not outputs.isfinite().all():
            name = type(self._inputs.model).__name__
            raise NonFiniteError(f"the output of {name} for inputs without some tokens contains NaN or infinity")
        return outputs

    def _forward(self, examples: Tensor, kept: Tensor, lengths: Tensor) -> Tensor:
        stand_in = self._stand_in
        places = torch.arange(int(lengths.max()), device=kept.device).expand(len(examples), -1)
        if stand_in is None:
            first = (~kept).to(torch.int8).argsort(dim=1, stable=True)[:, : places.shape[1]]
            inputs = self._inputs.take(examples, first, places < lengths[:, None])
            return inputs.scores(inputs.run())
        inputs = self._inputs.take(examples, places)
        hole = (inputs.real & ~kept[:, : places.shape[1]])[..., None]
        return inputs.scores(inputs.run(lambda embedded: torch.where(hole, stand_in.to(embedded), embedded)))

    def _select(self, scores: Tensor, target: Tensor | None) -> Tensor:
        """Log-probabilities or logits of the targets, (N,)."""
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if target is not None and self._perturbation.output == "probability":
            scores = scores.log_softmax(1)
        return models.explained_number(scores, target)


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
        >>> scores = {"mine": torch.tensor([[0.0, 0.5, 0.1, 0.4, 0.0]])}
        >>> faithfulness.evaluate(ids, scores)["mine"].aopc.shape
        torch.Size([1])
    """

    def __init__(self, perturbation: Perturbation, *, bins: Sequence[float] = ERASER_BINS, steps: int = 10) -> None:
        if not isinstance(perturbation, Perturbation):
            raise InvalidInputError(f"got {quoted(perturbation)}; expected a Perturbation")
        self.perturbation = perturbation
        self.bins = tuple(check_entries("bins", bins, "shares of tokens"))
        if not self.bins or not all(isinstance(share, (int, float)) and 0 < share <= 1 for share in self.bins):
            raise InvalidInputError(f"got the bins {quoted(self.bins)}; expected shares of tokens above 0, at most 1")
        self.steps = check_count("steps", steps, _MOST_STEPS)

    @property
    def signature(self) -> str:
        """Every choice that changes scores, in the manner of sacrebleu."""
        return f"{self.perturbation.signature}|bins:{','.join(map(str, self.bins))}|steps:{self.steps}"

    def evaluate(
        self,
        inputs: models.Inputs,
        scores: Mapping[str, Tensor],
        target: Target = None,
        additional_forward_args: Any = None,
        *,
        position: models.Position = None,
    ) -> dict[str, FaithfulnessScores]:
        """Score methods, which run the inputs they share only once.

        Args:
            inputs: see :meth:`Perturbation.bind`.
            scores: a number for each token, (B, S), by the name of the method. Higher is more relevant; scores of
                tokens that are not removable are ignored.
            target: the class or next token that the scores explain; None for the model's prediction.
            additional_forward_args: see :meth:`Perturbation.bind`.
            position: see :meth:`Perturbation.bind`.

        Returns:
            the scores by name.

        Raises:
            InvalidInputError: the scores do not have the shape of the inputs or are not finite, an example has no token
                to remove, or see :meth:`Perturbation.bind` and :meth:`PerturbedInputs.outputs`.
        """
        bound = self.perturbation.bind(inputs, additional_forward_args, target=target, position=position)
        removable = bound.removable
        methods = {name: _check_scores(values, removable) for name, values in _check_methods(scores).items()}
        empty = (~removable.any(1)).nonzero()
        if len(empty):
            raise InvalidInputError(f"example {int(empty[0])} has no token that may be removed")
        kept = [self._kept_tokens(values, removable) for values in methods.values()]
        outputs = bound.outputs(torch.cat([bound.all_but_one(), *kept], 1))
        alone, *parts = outputs.split([removable.shape[1], *(part.shape[1] for part in kept)], 1)
        omitted = bound.drops(alone)
        return {
            name: self._scores(bound, values, part, omitted)
            for (name, values), part in zip(methods.items(), parts, strict=True)
        }

    def _kept_tokens(self, scores: Tensor, removable: Tensor) -> Tensor:
        """The tokens kept without each bin, with each bin alone, and along the two curves, (B, K, S)."""
        ranks = _ranks(scores, removable)[:, None]  # (B, 1, S)
        bins = _token_counts(self.bins, removable)[..., None]
        steps = _token_counts([step / self.steps for step in range(1, self.steps + 1)], removable)[..., None]
        least_first = (ranks >= removable.sum(1)[:, None, None] - steps) & removable[:, None]
        return ~torch.cat([ranks < bins, ranks >= bins, ranks < steps, least_first], 1)

    def _scores(self, bound: PerturbedInputs, scores: Tensor, outputs: Tensor, omitted: Tensor) -> FaithfulnessScores:
        sizes = [len(self.bins), len(self.bins), self.steps, self.steps]
        log_odds = -_mean_drop(bound.whole, outputs[:, : len(self.bins)])
        if self.perturbation.output == "logit":
            log_odds = torch.full_like(log_odds, torch.nan)
        whole, values = bound.values(bound.whole), bound.values(outputs)
        without, alone, morf, lerf = values.split(sizes, 1)
        morf, lerf = (torch.cat([whole[:, None], curve], 1) for curve in (morf, lerf))
        pair = [scores.to(omitted.device), omitted]
        return FaithfulnessScores(
            aopc=_mean_drop(whole, morf[:, 1:]),
            comprehensiveness=_mean_drop(whole, without),
            sufficiency=_mean_drop(whole, alone),
            log_odds=log_odds,
            relevance_gain=_area(lerf) - _area(morf),
            spearman=_correlations(pair, bound.removable, "spearman")[:, 0, 1],
            kendall=_correlations(pair, bound.removable, "kendall")[:, 0, 1],
            morf=morf,
            lerf=lerf,
        )


def agreement(scores: Mapping[str, Tensor], compared: Tensor, coefficient: Coefficient = "spearman") -> Tensor:
    """Rank correlation of each pair of methods, averaged over examples; equal scores share a rank.

    Args:
        scores: (B, S) for each of M methods, by name.
        compared: the tokens to compare, (B, S).
        coefficient: ``"spearman"``, or ``"kendall"`` for Kendall's τ_b.

    Returns:
        (M, M), float64, in the order of ``scores``; the mean leaves out examples with fewer than two tokens, or where
        all scores of a method are equal.

    Raises:
        InvalidInputError: there are no scores, the shapes differ, or the coefficient is unknown.

    Example:
        >>> scores = {"one": torch.tensor([[1.0, 2.0, 3.0]]), "other": torch.tensor([[1.0, 3.0, 2.0]])}
        >>> agreement(scores, torch.ones(1, 3, dtype=torch.bool))[0]
        tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    check_choice("coefficient", coefficient, get_args(Coefficient))
    tensors = (*_check_methods(scores).values(), compared)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InvalidInputError(f"got {quoted(tensor)}; expected a tensor (B, S)")
    if len({tensor.shape for tensor in tensors}) != 1 or compared.dim() != 2:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise InvalidInputError(f"got tensors of shapes {shapes}; expected (B, S) for all")
    return _correlations(list(scores.values()), compared, coefficient).nanmean(0)


def _check_methods(scores: object) -> Mapping[str, Any]:
    """Return scores by the names of methods."""
    if not isinstance(scores, Mapping) or not scores:
        raise InvalidInputError(f"got scores {quoted(scores)}; expected a mapping from methods to tensors (B, S)")
    return scores


def _check_scores(scores: object, removable: Tensor) -> Tensor:
    """Return scores with a finite number for each removable token, (B, S), on the device of ``removable``."""
    if not isinstance(scores, Tensor) or scores.is_nested or scores.is_meta:
        raise InvalidInputError(f"got scores {quoted(scores)}; expected a tensor with their numbers")
    if scores.shape != removable.shape:
        raise InvalidInputError(f"got scores of shape {tuple(scores.shape)}; expected {tuple(removable.shape)}")
    scores = scores.detach().to(removable.device)
    if not scores[removable].isfinite().all():
        raise InvalidInputError("the scores contain NaN or infinity")
    return scores


def _ranks(scores: Tensor, removable: Tensor) -> Tensor:
    """Rank removable tokens from 0 by descending score, equal scores from the left, (B, S); S at all other tokens."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, (~removable).gather(1, order).to(torch.int8).argsort(dim=1, stable=True))
    places = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places).masked_fill(~removable, scores.shape[1])


def _token_counts(shares: Sequence[float], removable: Tensor) -> Tensor:
    """Convert K shares q of the n removable tokens to counts ⌈qn⌉, (B, K)."""
    rows = [[ceil(share * count - _SLACK) for share in shares] for count in removable.sum(1).tolist()]
    return torch.tensor(rows, device=removable.device)


def _mean_drop(whole: Tensor, perturbed: Tensor) -> Tensor:
    """1/K Σ_k f(x) − f(x_k): (B,) and (B, K) -> (B,)."""
    return (whole[:, None] - perturbed).mean(1)


def _area(curve: Tensor) -> Tensor:
    """∫₀¹ of a curve at equal steps, by the trapezoidal rule: (B, K + 1) -> (B,)."""
    return torch.trapezoid(curve, dx=1 / (curve.shape[1] - 1), dim=1)


def _correlations(scores: Sequence[Tensor], compared: Tensor, coefficient: Coefficient) -> Tensor:
    """The coefficient of each pair of scores in each example: (B, S) each -> (B, M, M), float64."""
    tables = []
    for rows, chosen in zip(torch.stack(list(scores), 1), compared, strict=True):
        values = rows[:, chosen]
        if coefficient == "spearman":
            features = torch.stack([centred_ranks(row) for row in values])
        else:  # the signs of all differences
            later, earlier = values[:, :, None], values[:, None]
            features = ((later > earlier).double() - (later < earlier).double()).flatten(1)
        products = features @ features.T
        squares = products.diagonal()
        tables.append(products / (squares[:, None] * squares).sqrt())
    return torch.stack(tables)

"""Explains answers by linear models of what they lose without sources: of one answer, or of what heads read for any."""

import json
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from captum_norm.attr.alti_logit import ALTILogit
from captum_norm.attr.norms import NormAttribution
from captum_norm.attr.weights import AttentionWeights
from captum_norm.bars import bar, hidden
from captum_norm.checks import check_choice, check_count, check_index, quoted_name
from captum_norm.errors import InvalidInputError
from captum_norm.generation import GenerationResult, Segmentation
from captum_norm.generation.ablations import SourceAblations, SourceAttribution
from captum_norm.lab.answers.measures import logit_probability
from captum_norm.lab.answers.run import source_prompt
from captum_norm.text.files import place_of, write_whole

__all__ = ["ContextCite", "HeadFeatures", "HeadWeighted"]

HeadFeatures = Literal["weights", "norms", "updates"]
"""What each head reads of a source, see :class:`HeadWeighted`."""

FORMAT = "captum-norm head weights 1"
PENALTY = 0.01  # of ContextCite, for log-odds divided by the number of the answer's tokens, as in the authors' code
PENALTIES, FOLDS = (10.0, 1.0, 0.1, 0.01), 4
CONVERGED, MOST_SWEEPS = 1e-10, 10_000  # change of a weight, relative to the outputs, that ends coordinate descent


class ContextCite(SourceAttribution):
    r"""ContextCite [Cohen-Wang et al. 2024]: the weights of a sparse linear model of the answer under ablations.

    Each of ``ablations`` random ones keeps a source with probability ½; the model predicts log p/(1 − p), with p the
    probability of the whole answer, from which sources are kept. A source's score is its weight: by how much the
    answer's log-odds rise with it.

    Args:
        model, tokenizer: as for :class:`captum_norm.generation.ablations.SourceAttribution`.
        ablations: how many, 32 to 256 in the paper.
        seed: of the ablations.

    Example:
        >>> from captum_norm.loading import LANGUAGE_MODEL, load
        >>> passages = ["Clara found a tiny silver ring in the garden.", "Victor works as a baker near the river."]
        >>> prompt = "\n".join([*passages, "What did Clara find? Clara found"])
        >>> method = ContextCite(*load(LANGUAGE_MODEL))
        >>> method.attribute(prompt, " a tiny silver ring", segments=passages).top(1)[0][0]
        'Clara found a tiny silver ring in the garden.'
    """

    def __init__(self, model: nn.Module, tokenizer: Any, ablations: int = 64, *, seed: int = 0) -> None:
        super().__init__(model, tokenizer)
        self.ablations, self.seed = check_count("ablations", ablations), check_index("seed", seed)

    def explain(self, ablations: SourceAblations) -> GenerationResult:
        """Fit the linear model."""
        kept, outputs = drawn(ablations, self.ablations, torch.Generator().manual_seed(self.seed))
        count = len(ablations.answer)
        weights = lasso(kept, outputs / count, PENALTY) * count
        return ablations.result(weights, f"context-cite, {self.ablations} ablations", "part of the answer's log-odds")


class HeadWeighted(SourceAttribution):
    r"""Scores sources by what heads read of them, each head with a weight that is learned from ablations.

    The score of a source is Σ_h w_h φ_h over the heads h of all layers, with φ_h a mean over the answer's tokens of

    - ``"weights"``: the attention weights on its tokens, added up, as in AT2 [Cohen-Wang et al. 2025];
    - ``"norms"``: the norm of the vectors that the head receives from its tokens, ‖Σ_j α_j f_h(x_j)‖;
    - ``"updates"``: what these vectors add directly to the token's logit, Σ_j α_j ⟨f_h(x_j), g⟩, as in ALTI-Logit.

    w is learned from random ablations of some prompts, in which the kept sources' scores are to predict the answer's
    log-odds. AT2 maximises the correlation of both by gradient descent over thousands of prompts; here ridge regression
    fits both, standardised in each prompt, by penalised least squares, which tens of prompts suffice for.

    Args:
        model, tokenizer: as for :class:`captum_norm.generation.ablations.SourceAttribution`.
        features: what φ is.

    Attributes:
        coefficients: w, (L, H), with Σ|w| = 1; None before :meth:`fit`.

    Example:
        >>> from captum_norm.lab.prompts import evidence_prompts
        >>> from captum_norm.loading import LANGUAGE_MODEL, load
        >>> prompts = list(evidence_prompts("conflict", 5, passages=5))
        >>> method = HeadWeighted(*load(LANGUAGE_MODEL), features="norms").fit(prompts[:4], ablations=8)
        >>> method.attribute(prompts[4].text, prompts[4].answer, segments=prompts[4].passages).segment_attr.shape
        torch.Size([5])
    """

    def __init__(self, model: nn.Module, tokenizer: Any, features: HeadFeatures = "norms") -> None:
        super().__init__(model, tokenizer)
        self.features: HeadFeatures = check_choice("features", features, get_args(HeadFeatures))
        self.coefficients: Tensor | None = None

    def features_of(self, ablations: SourceAblations) -> Tensor:
        """Compute φ of each head for the sources, (L, H, K)."""
        count, inputs = len(ablations.answer), dict(ablations.inputs)
        crossed, padding = "decoder_input_ids" in inputs, inputs["input_ids"].shape[1] - len(ablations.numbers)
        numbers = torch.tensor([[*ablations.numbers, *[-1] * padding]])
        if self.features == "updates":
            method, places = ALTILogit(self.model), [list(range(-count, 0))]
            updates = method.head_updates(inputs, [list(ablations.answer)], segments=numbers, position=places)
            return updates[0].mean(0).double().cpu()
        options: dict[str, Any] = {"last": count, "per_head": True, "stacks": ["cross"] if crossed else None}
        if self.features == "norms":
            maps = NormAttribution(self.model).maps(inputs, segments=numbers, **options)
        else:
            maps = AttentionWeights(self.model).maps(inputs, **options)
        stack: Any = maps.cross if crossed else maps.self_attention
        found: Tensor = stack[0].mean(2).double().cpu()
        if self.features == "norms":
            return found
        inside = numbers[0] >= 0
        sums = found.new_zeros(*found.shape[:2], len(ablations.sources))
        return sums.index_add(2, numbers[0, inside], found[..., inside])

    def fit(
        self,
        prompts: Iterable[Any],
        *,
        ablations: int = 32,
        segments: Segmentation = "line",
        gen_args: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> Self:
        """Learn the weights of heads, and return the method.

        Args:
            prompts: texts, messages, :class:`captum_norm.lab.answers.SourcePrompt`, or those of
                ``captum_norm.lab.prompts.evidence_prompts``; some 50.
            ablations: random ablations of each prompt, which keep a source with probability ½.
            segments: the sources of prompts that name none.
            gen_args: arguments of the model's ``generate`` for prompts without an answer.
            seed: of the ablations.
        """
        check_count("ablations", ablations)
        asked, draw = list(prompts), torch.Generator().manual_seed(check_index("seed", seed))
        if not asked:
            raise InvalidInputError("got no prompts to learn from; give some 50")
        inputs, outputs = list[Tensor](), list[Tensor]()
        with bar("learning", len(asked), "prompts") as shown:
            for given in asked:
                prompt = source_prompt(given, segments)
                options: Any = {"segments": prompt.segments, "gen_args": gen_args if prompt.answer is None else None}
                with hidden():
                    one = SourceAblations(self.model, self.tokenizer, prompt.prompt, prompt.answer, **options)
                    kept, values = drawn(one, ablations, draw)
                    features = self.features_of(one)
                inputs.append(kept.double() @ features.flatten(0, 1).T)
                outputs.append(values)
                shown.update()
        self.coefficients = ridge(torch.stack(inputs), torch.stack(outputs)).view(features.shape[:2])
        return self

    def explain(self, ablations: SourceAblations) -> GenerationResult:
        """Add up what heads read of each source."""
        features, weights = self.features_of(ablations), self._learned()
        if features.shape[:2] != weights.shape:
            had, has = ("{} × {}".format(*shape) for shape in (weights.shape, features.shape))
            raise InvalidInputError(
                f"got weights of {had} heads, but {type(self.model).__name__} has {has}: load those of this model, or "
                "learn them by fit(prompts)"
            )
        scores, unit = torch.einsum("lh,lhk->k", weights, features), f"weighted {self.features}"
        return ablations.result(scores, f"head-weighted {self.features}", unit)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the weights of heads to a JSON file, and return its path."""
        content = {"format": FORMAT, "features": self.features, "coefficients": self._learned().tolist()}
        return write_whole(path, json.dumps(content).encode())

    @classmethod
    def load(cls, path: str | PathLike[str], model: nn.Module, tokenizer: Any) -> Self:
        """Read the weights of a model's heads; those of another model are refused once an answer is explained."""
        try:
            content = json.loads(place_of(path).read())
            made = cls(model, tokenizer, content["features"])
            made.coefficients = weights = torch.tensor(content["coefficients"], dtype=torch.float64)
            if content["format"] != FORMAT or weights.dim() != 2 or not weights.isfinite().all():
                raise ValueError("other content")
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            called = f"cannot read {quoted_name(fspath(path))}; expected a file that HeadWeighted.save wrote"
            raise InvalidInputError(f"{called}: {' '.join(str(error).split())}") from error
        return made

    def _learned(self) -> Tensor:
        if self.coefficients is None:
            raise InvalidInputError("the heads have no weights yet: learn them by fit(prompts), or load them")
        return self.coefficients


def drawn(ablations: SourceAblations, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw ablations that keep each source with probability ½, (N, K), and the answer's log-odds in each, (N,)."""
    kept = torch.rand(count, len(ablations.sources), generator=draw) < 0.5
    return kept, logit_probability(ablations.log_probabilities(kept).sum(1))


def lasso(inputs: Tensor, outputs: Tensor, penalty: float) -> Tensor:
    """Fit a sparse linear model, (N, K) and (N,) -> (K,): w that minimises Σ_n (y_n − b − w·x̃_n)² / 2N + λ‖w‖₁.

    x̃ are the inputs divided by their standard deviations; returned are weights of the inputs themselves.
    """
    centred, targets = (part.double() - part.double().mean(0) for part in (inputs, outputs))
    scales = centred.square().mean(0).sqrt()
    columns = centred / scales.where(scales > 0, 1)
    products, pulls = columns.T @ columns / len(columns), columns.T @ targets / len(columns)
    weights, least = torch.zeros_like(scales), CONVERGED * float(targets.square().mean().sqrt())
    for _ in range(MOST_SWEEPS):
        before = weights.clone()
        for place in scales.nonzero().flatten().tolist():
            pull = pulls[place] - products[place] @ weights + weights[place]
            weights[place] = pull.sign() * (pull.abs() - penalty).clamp(min=0)
        if (weights - before).abs().max() <= least:
            break
    return weights / scales.where(scales > 0, 1)


def ridge(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Fit a linear model of P groups, (P, N, F) and (P, N) -> (F,): w that minimises Σ (ỹ − w·x̃)² + λ s‖w‖².

    x̃ is centred in each group and divided by its root mean square over all, ỹ standardised in each group, of which
    those where it is constant do not count, and s the mean over inputs of Σ x̃². The λ taken correlates best in groups
    left out, by four folds. Returned are weights of the inputs themselves, with Σ|w| = 1.
    """
    columns, targets = (part.double() - part.double().mean(1, keepdim=True) for part in (inputs, outputs))
    deviations = targets.square().mean(1).sqrt()
    columns, targets = columns[deviations > 0], (targets / deviations[:, None])[deviations > 0]
    scales = columns.square().mean((0, 1)).sqrt()
    if not scales.nansum():
        raise InvalidInputError("no ablation changes any answer, or no head reads any source; give other prompts")
    columns = columns / scales.where(scales > 0, 1)
    products, pulls = columns.mT @ columns, (columns.mT @ targets[..., None])[..., 0]
    identity, folds = torch.eye(len(scales), dtype=scales.dtype), torch.arange(len(columns)) % FOLDS

    def fitted(groups: Tensor, penalty: float) -> Tensor:
        whole = products[groups].sum(0)
        damped = whole + penalty * whole.diagonal().mean() * identity
        made: Tensor = torch.linalg.solve(damped, pulls[groups].sum(0))
        return made

    def correlation(penalty: float) -> float:
        """Return the mean correlation in groups left out."""
        found = [columns.new_zeros(1)]
        for left in folds.unique() if len(columns) > 1 else ():
            predicted = columns[folds == left] @ fitted(folds != left, penalty)
            found.append(nn.functional.cosine_similarity(predicted, targets[folds == left], dim=1))
        return float(torch.cat(found).mean())

    weights = fitted(folds >= 0, max(PENALTIES, key=correlation)) / scales.where(scales > 0, 1)
    return weights / weights.abs().sum()

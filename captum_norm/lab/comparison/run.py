"""Compares methods on one model and its inputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from captum.attr import Attribution
from torch import Tensor

from captum_norm.bars import bar
from captum_norm.checks import check_index
from captum_norm.errors import CaptumNormError, InvalidInputError
from captum_norm.lab.comparison.methods import (
    checked_seed,
    chosen_methods,
    make_method,
    seeded_scores,
    signature_of,
    timed,
)
from captum_norm.lab.comparison.results import Comparison, MethodResult
from captum_norm.lab.comparison.targets import (
    PROJECTION,
    Batch,
    batches_of,
    count_outputs,
    in_order,
    own_directions,
    target_names,
    tokens_of,
)
from captum_norm.lab.evaluation import ERASER_BINS, Faithfulness, FaithfulnessScores, Perturbation, agreement
from captum_norm.lab.evaluation.perturbation import Output, PerturbedInputs, has_sigmoids
from captum_norm.methods import METHODS
from captum_norm.models import (
    Difference,
    Explainable,
    Inputs,
    Position,
    SentenceSimilarity,
    bind_tokens,
    opened,
    replacement,
)
from captum_norm.models.embeddings import StandIn
from captum_norm.models.outputs import Readout, Target
from captum_norm.versions import versions

_FORWARD_PASSES = 3


def compare(
    model: Explainable,
    inputs: Inputs,
    additional_forward_args: Any = None,
    *,
    methods: Sequence[str] | Mapping[str, str | Attribution] | None = None,
    target: Target = None,
    position: Position = None,
    readout: Readout | None = None,
    tokenizer: Any = None,
    tokens: Sequence[Sequence[str]] | None = None,
    labels: Sequence[int] | Tensor | None = None,
    removal: StandIn | Literal["delete"] | int | Tensor | None = None,
    keep_special: bool = True,
    output: Output | None = None,
    bins: Sequence[float] = ERASER_BINS,
    steps: int = 10,
    seed: int = 0,
    batch_size: int = 32,
    name: str | None = None,
) -> Comparison:
    """Explain inputs by several methods, and score the methods: faithfulness, agreement and cost.

    All methods explain the same output of each example. Faithfulness is measured by
    :class:`captum_norm.lab.evaluation.Faithfulness`. Methods that do not support the model are listed with the reason.

    For a model that only returns hidden states, the output is the projection of the mean-pooled hidden states on their
    own direction for the whole input; results say so.

    Args:
        model: a model of Hugging Face that reads one sequence; not changed.
        inputs: token ids (B, S), embeddings (B, S, D), a tuple of tensors, a mapping such as a tokenizer's output, or
            texts.
        additional_forward_args: the model's further positional arguments (attention mask first).
        methods: names in :data:`captum_norm.methods.METHODS`, or a mapping from names for the results to such names or
            methods of your own, which have the same interface. None: all of :data:`captum_norm.methods.METHODS`.
        target: the class or next token to explain, as for every method; None for the model's prediction.
        position: where to read the logits if every position has some; None for the position that the head reads.
        readout: the output to explain instead of logits, see :data:`captum_norm.models.outputs.Readout`.
        tokenizer: tokenizes texts, and knows mask, padding and special tokens, and the texts of tokens; None for that
            of a pipeline or a SentenceTransformer.
        tokens: the texts of the tokens, S for each example; None to take them from the inputs or the tokenizer.
        labels: the right class of each example, for the model's accuracy.
        removal: how to remove a token, see :class:`captum_norm.lab.evaluation.Perturbation`; also the baseline of
            Captum's methods, unless it is ``"delete"``. None: the mask token, or else the padding token, or else
            the mean of all embeddings.
        keep_special: never remove nor rank special tokens such as [CLS]; Captum's methods keep them in their baseline.
            Needs the tokenizer.
        output: the output to observe, ``"probability"`` (softmax) or ``"logit"``. None: the probability if the model
            returns logits of mutually exclusive classes, else the number itself.
        bins: shares of tokens for comprehensiveness, sufficiency and log-odds.
        steps: the number of steps of the curves and of AOPC.
        seed: the seed of methods that draw random numbers, for each batch; 0 to 2³² − 1. The global generators are
            restored.
        batch_size: the number of inputs in one forward pass. It changes which random numbers an example gets.
        name: the model's name in results; None for its class.

    Returns:
        the comparison.

    Raises:
        InvalidInputError: an option is invalid, no method supports the model, or an example has no token to remove.
        UnsupportedModelError: the model is an encoder–decoder, does not name its embedding module, or returns neither
            logits nor hidden states.

    Example:
        >>> from types import SimpleNamespace
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)
        >>> model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes)).eval()
        >>> tokenizer = SimpleNamespace(mask_token_id=4, pad_token_id=0, all_special_ids=[0, 2, 3, 4])
        >>> ids = torch.tensor([[2, 7, 9, 8, 3]])
        >>> comparison = compare(model, ids, methods=["norm", "alti", "saliency"], tokenizer=tokenizer)
        >>> list(comparison.results), comparison.agreement.shape
        (['norm', 'alti', 'saliency'], torch.Size([3, 3]))
    """
    chosen, seed = chosen_methods(methods), checked_seed(seed)
    model, tokenizer = opened(model, tokenizer)
    replacement(model, "zero", tokenizer)  # refuses models whose tokens cannot be replaced, before they are run
    bound = bind_tokens(model, inputs, additional_forward_args, tokenizer=tokenizer, position=position)
    count = None if readout is not None else count_outputs(bound)
    explained = "readout" if count is None else "logit"
    if readout is None and count is None:
        if target is not None:
            raise InvalidInputError(f"{type(model).__name__} has no head, so it has no target; take a model with one")
        readout, explained, target = own_directions(bound, batch_size), PROJECTION, torch.arange(len(bound))
    if labels is not None:
        _check_labels(labels, len(bound), count)
    if output is None:
        single = count is None or count < 2 or isinstance(target, Difference)
        exclusive = not (single or has_sigmoids(model) or isinstance(model, SentenceSimilarity))
        output = "probability" if exclusive else "logit"
    options: dict[str, Any] = {"tokenizer": tokenizer, "keep_special": keep_special, "readout": readout}
    perturbation = Perturbation(model, removal, output=output, batch_size=batch_size, **options)
    faithfulness = Faithfulness(perturbation, bins=bins, steps=steps)
    batches = list(batches_of(bound, target, batch_size))
    perturbed = [_perturbed(perturbation, batch) for batch in batches]
    batches = [replace(batch, target=_target(one.target)) for batch, one in zip(batches, perturbed, strict=True)]
    forward = sum(_forward_seconds(batch) for batch in batches)
    make = partial(make_method, model=model, removal=removal, batch_size=batch_size, **options)
    ready, refused = _warmed_up(chosen, make, batches, seed, mean=explained == PROJECTION)
    removing = forward * faithfulness.passes * len(ready)
    work = removing + sum(method.seconds * len(bound) for method in ready.values())
    with bar("comparing", work, "") as progress:
        scored, failed = _scored(ready, batches, progress.update)
        refused |= failed
        if not scored:
            first, reason = next(iter(refused.items()))
            raise InvalidInputError(f"no method supports the model and these inputs; {first}: {reason}")
        width = bound.real.shape[1]
        scores = {name: in_order(method.scores, batches, width) for name, method in scored.items()}
        removable = in_order([one.removable for one in perturbed], batches, width)
        progress.update(work - removing - progress.n)
        each, by_batch = removing / len(bound), {name: method.scores for name, method in scored.items()}
        faithful = _faithfulness(faithfulness, batches, by_batch, lambda count: progress.update(count * each))
    known = [one.target for one in perturbed if one.target is not None]
    if explained == PROJECTION or not known:
        targets = ["own direction" if explained == PROJECTION else "the only number"] * len(bound)
    else:
        targets = target_names(model, in_order(known, batches), readout, tokenizer)
    settings = [faithfulness.signature, f"batch:{batch_size}", f"seed:{seed}"]
    return Comparison(
        model=name or type(model).__name__,
        explained=explained if output == "logit" else "probability",
        targets=targets,
        tokens=tokens_of(bound, tokens, tokenizer),
        real=bound.to_user(bound.real).cpu(),
        removable=bound.to_user(removable).cpu(),
        results={
            name: MethodResult(
                title=METHODS[name].title if chosen[name] == name else name,
                signature=method.signature,
                scores=bound.to_user(scores[name]).cpu(),
                faithfulness=faithful[name],
                seconds=method.seconds,
                forward_ratio=method.seconds / forward,
            )
            for name, method in scored.items()
        },
        refused=refused,
        agreement=agreement(scores, removable).cpu(),
        forward_seconds=forward,
        accuracy=None if labels is None else _accuracy(perturbation, batches, labels),
        signature="|".join([*settings, *(f"{package}:{version}" for package, version in versions().items())]),
    )


def _check_labels(labels: Sequence[int] | Tensor, examples: int, classes: int | None) -> None:
    if classes is None or classes < 2 or len(labels) != examples:
        raise InvalidInputError(
            f"got {len(labels)} labels for {examples} examples and "
            f"{'no logits' if classes is None else f'{classes} logits'}; expected one label each, and several classes"
        )
    for example, label in enumerate(torch.as_tensor(labels).tolist()):
        if not 0 <= check_index("the label", label) < classes:
            raise InvalidInputError(f"got the label {label} for example {example}; expected 0 to {classes - 1}")


def _perturbed(perturbation: Perturbation, batch: Batch) -> PerturbedInputs:
    perturbed = perturbation.bind(batch.inputs.arguments, target=batch.target, position=batch.position)
    empty = batch.index[(~perturbed.removable.any(1)).to(batch.index.device)].tolist()
    if empty:
        raise InvalidInputError(f"example {min(empty)} has no token that may be removed")
    return perturbed


def _target(chosen: Tensor | None) -> Target:
    """Convert what :func:`captum_norm.models.chosen_target` returns to a target."""
    return chosen if chosen is None or chosen.dim() < 2 else Difference(*chosen.unbind(1))


def _forward_seconds(batch: Batch) -> float:
    """Time the plain forward pass of some examples: the fastest of a few runs."""
    batch.inputs.run()
    return min(timed(batch.inputs.run)[1] for _ in range(_FORWARD_PASSES))


@dataclass(frozen=True, eq=False)
class _Method:
    """A method, its seconds, and its scores by batch, (N, S) each."""

    signature: str
    explain: Callable[[Batch], Tensor]
    seconds: float
    scores: Sequence[Tensor] = ()


def _warmed_up(
    methods: Mapping[str, str | Attribution],
    make: Callable[[str], Attribution],
    batches: Sequence[Batch],
    seed: int,
    *,
    mean: bool,
) -> tuple[dict[str, _Method], dict[str, str]]:
    """Run every method on one example, which shows what it costs; the reasons of refused methods, too."""
    ready, refused, first = {}, {}, batches[0].first()
    with bar("preparing", len(methods), "methods") as progress:
        for name, method in methods.items():
            try:
                made = make(method) if isinstance(method, str) else method
                explain = partial(_explain, made, seed, mean=mean)
                seconds = timed(partial(explain, first))[1]
                ready[name] = _Method(signature_of(made), explain, seconds)
            except CaptumNormError as error:
                refused[name] = " ".join(str(error).split())
            progress.update()
    return ready, refused


def _explain(method: Attribution, seed: int, batch: Batch, *, mean: bool) -> Tensor:
    return seeded_scores(method, batch.inputs, batch.target, seed, mean=mean)


def _scored(
    methods: Mapping[str, _Method], batches: Sequence[Batch], done: Callable[[float], object]
) -> tuple[dict[str, _Method], dict[str, str]]:
    """Run methods on all examples; ``done`` is told of the seconds that finished work was expected to take."""
    scored, refused = {}, {}
    for name, method in methods.items():
        parts, seconds = [], 0.0
        try:
            for batch in batches:
                scores, taken = timed(partial(method.explain, batch))
                parts.append(scores)
                seconds += taken
                done(method.seconds * len(batch.index))
            scored[name] = replace(method, seconds=seconds, scores=parts)
        except CaptumNormError as error:
            refused[name] = " ".join(str(error).split())
    return scored, refused


def _faithfulness(
    faithfulness: Faithfulness,
    batches: Sequence[Batch],
    scores: Mapping[str, Sequence[Tensor]],
    done: Callable[[int], object],
) -> dict[str, FaithfulnessScores]:
    """Measure the faithfulness of every method, on all examples in their order."""
    parts = []
    for place, batch in enumerate(batches):
        of_batch = {name: methods[place] for name, methods in scores.items()}
        parts.append(faithfulness.evaluate(batch.inputs.arguments, of_batch, batch.target, position=batch.position))
        done(len(batch.index))
    order = torch.cat([batch.index for batch in batches]).argsort()
    by_method = {name: FaithfulnessScores.concatenate([part[name] for part in parts]) for name in scores}
    return {name: one[order.cpu()] for name, one in by_method.items()}


def _accuracy(perturbation: Perturbation, batches: Sequence[Batch], labels: Sequence[int] | Tensor) -> float:
    """The share of examples whose label the model predicts."""
    bound = (perturbation.bind(batch.inputs.arguments, position=batch.position) for batch in batches)
    predicted = in_order([one.target for one in bound if one.target is not None], batches).cpu()
    return float((predicted == torch.as_tensor(labels)).double().mean())

"""Compares methods on one model and its inputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Literal, TypeVar

import torch
from captum.attr import Attribution
from torch import Tensor

from captum_norm import models
from captum_norm.bars import bar
from captum_norm.errors import CaptumNormError, InvalidInputError
from captum_norm.lab import evaluation
from captum_norm.lab.comparison.methods import (
    PROJECTION,
    Batch,
    batches_of,
    check_methods,
    check_seed,
    count_outputs,
    in_order,
    make_method,
    own_directions,
    signature_of,
    token_scores,
)
from captum_norm.lab.comparison.results import Comparison, MethodResult
from captum_norm.models.embeddings import StandIn
from captum_norm.models.outputs import Readout, Target
from captum_norm.results.outputs import NamedOutput
from captum_norm.versions import versions

T = TypeVar("T")


def compare(
    model: models.Explainable,
    inputs: models.Inputs,
    additional_forward_args: Any = None,
    *,
    methods: Sequence[str] | Mapping[str, str | Attribution] | None = None,
    target: Target = None,
    position: models.Position = None,
    readout: Readout | None = None,
    tokenizer: Any = None,
    removal: StandIn | Literal["delete"] | int | Tensor | None = None,
    keep_special: bool = True,
    output: evaluation.Output | None = None,
    bins: Sequence[float] = evaluation.ERASER_BINS,
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
        >>> list(comparison.results)
        ['norm', 'alti', 'saliency']
    """
    named, seed = check_methods(methods), check_seed(seed)
    model, tokenizer = models.opened(model, tokenizer)
    models.replacement(model, "zero", tokenizer)  # refuses models whose tokens cannot be replaced, before they are run
    bound = models.bind_tokens(model, inputs, additional_forward_args, tokenizer=tokenizer, position=position)
    count = None if readout is not None else count_outputs(bound)
    explained = "readout" if count is None else "logit"
    if readout is None and count is None:
        if target is not None:
            raise InvalidInputError(f"{type(model).__name__} has no head, so it has no target; take a model with one")
        readout, explained, target = own_directions(bound, batch_size), PROJECTION, torch.arange(len(bound))
    if output is None:
        single = count is None or isinstance(target, models.Difference)
        output = "logit" if single or models.probability_kind(model, count or 1) != "softmax" else "probability"
    options: dict[str, Any] = {"tokenizer": tokenizer, "keep_special": keep_special, "readout": readout}
    perturbation = evaluation.Perturbation(model, removal, output=output, batch_size=batch_size, **options)
    faithfulness = evaluation.Faithfulness(perturbation, bins=bins, steps=steps)
    batches, outputs, removable = _perturbed(perturbation, bound, list(batches_of(bound, target, batch_size)))
    forward = 0.0
    for batch in batches:  # the fastest of three runs after a first one
        batch.inputs.run()
        forward += min(timed(batch.inputs.run)[1] for _ in range(3))
    make = partial(make_method, model=model, removal=removal, batch_size=batch_size, **options)
    with bar("comparing", (len(named) + 1) * len(batches), "batches") as shown:
        parts, cost, refused = _scored(named, make, batches, seed, shown.update, mean=explained == PROJECTION)
        faithful = _faithfulness(faithfulness, batches, parts, shown.update)
    scores = {name: in_order(of_batches, batches, bound.real.shape[1]) for name, of_batches in parts.items()}
    if explained == PROJECTION:
        outputs = [replace(named, name=PROJECTION, top=()) for named in outputs]
    settings = [faithfulness.signature, f"batch:{batch_size}", f"seed:{seed}"]
    return Comparison(
        model=name or type(model).__name__,
        explained=explained if output == "logit" else "probability",
        outputs=outputs,
        tokens=_token_texts(bound, tokenizer),
        real=bound.to_user(bound.real).cpu(),
        removable=bound.to_user(removable).cpu(),
        results={
            name: MethodResult(
                signature=signature,
                scores=bound.to_user(scores[name]).cpu(),
                faithfulness=faithful[name],
                seconds=seconds,
                forward_ratio=seconds / forward,
            )
            for name, (signature, seconds) in cost.items()
        },
        refused=refused,
        agreement=evaluation.agreement(scores, removable).cpu(),
        forward_seconds=forward,
        signature="|".join([*settings, *(f"{package}:{version}" for package, version in versions().items())]),
    )


def _perturbed(
    perturbation: evaluation.Perturbation, inputs: models.TokenInputs, batches: Sequence[Batch]
) -> tuple[list[Batch], list[NamedOutput], Tensor]:
    """Return batches with the targets that are explained, and for all examples the outputs and the removable tokens."""
    perturbed = [
        perturbation.bind(batch.inputs.arguments, target=batch.target, position=batch.position) for batch in batches
    ]
    removable = in_order([part.removable for part in perturbed], batches, inputs.real.shape[1])
    empty = (~removable.any(1)).nonzero()
    if len(empty):
        raise InvalidInputError(f"example {int(empty[0])} has no token that may be removed; give more words")
    targets = [part.target for part in perturbed]
    explained = [
        replace(batch, target=target if target is None or target.dim() < 2 else models.Difference(*target.unbind(1)))
        for batch, target in zip(batches, targets, strict=True)
    ]
    order = torch.cat([batch.index for batch in batches]).argsort().tolist()
    named = [output for part in perturbed for output in part.named]
    return explained, [named[place] for place in order], removable


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


def _scored(
    methods: Mapping[str, str | Attribution],
    make: Callable[[str], Attribution],
    batches: Sequence[Batch],
    seed: int,
    done: Callable[[], object],
    *,
    mean: bool,
) -> tuple[dict[str, list[Tensor]], dict[str, tuple[str, float]], dict[str, str]]:
    """Run methods on all examples, after a warm-up on one: scores by batch, signatures and seconds, and refusals."""
    scored, cost, refused = dict[str, list[Tensor]](), dict[str, tuple[str, float]](), dict[str, str]()
    first = next(batches_of(batches[0].inputs, batches[0].target, 1))
    for name, named in methods.items():
        try:
            method = make(named) if isinstance(named, str) else named
            token_scores(method, first, seed, mean=mean)
            parts, seconds = [], 0.0
            for batch in batches:
                scores, taken = timed(partial(token_scores, method, batch, seed, mean=mean))
                parts.append(scores)
                seconds += taken
                done()
        except CaptumNormError as error:
            refused[name] = " ".join(str(error).split())
        else:
            scored[name], cost[name] = parts, (signature_of(method), seconds)
    if not scored:
        name, reason = next(iter(refused.items()))
        raise InvalidInputError(f"no method supports the model and these inputs; {name}: {reason}")
    return scored, cost, refused


def _faithfulness(
    faithfulness: evaluation.Faithfulness,
    batches: Sequence[Batch],
    scores: Mapping[str, Sequence[Tensor]],
    done: Callable[[], object],
) -> dict[str, evaluation.FaithfulnessScores]:
    """Measure the faithfulness of every method, on all examples in their order."""
    parts = []
    for place, batch in enumerate(batches):
        of_batch = {name: rows[place] for name, rows in scores.items()}
        parts.append(faithfulness.evaluate(batch.inputs.arguments, of_batch, batch.target, position=batch.position))
        done()
    order = torch.cat([batch.index for batch in batches]).argsort().cpu()
    return {name: evaluation.FaithfulnessScores.concatenate([part[name] for part in parts])[order] for name in scores}


def _token_texts(inputs: models.TokenInputs, tokenizer: Any) -> list[list[str]]:
    """Return the texts of the tokens at the positions of the user's inputs; ids or indices if texts are not known."""
    if inputs.tokens is not None:
        return [list(texts) for texts in inputs.tokens]
    ids = inputs.arguments.get("input_ids")
    if not isinstance(ids, Tensor):
        return [[str(place) for place in range(inputs.real.shape[1])] for _ in range(len(inputs))]
    convert = getattr(tokenizer, "convert_ids_to_tokens", lambda row: list(map(str, row)))
    return [convert(row) for row in inputs.to_user(ids).tolist()]

"""Compares methods on what answers rest on."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from captum.attr import Attribution
from torch import Tensor

from captum_norm import models
from captum_norm.bars import bar, hidden
from captum_norm.checks import check_choice, check_count
from captum_norm.errors import CaptumNormError, InvalidInputError
from captum_norm.generation import GenerationAttribution, Segmentation
from captum_norm.generation.ablations import SourceAblations, SourceAttribution
from captum_norm.lab.answers.measures import (
    deletion_curve,
    lds,
    mas,
    recovery,
    rise,
    soft_nc,
    soft_removal,
    without_best,
)
from captum_norm.lab.answers.results import ANSWER_MEASURES, AnswerComparison, AnswerScores
from captum_norm.lab.comparison.methods import check_methods, check_seed, make_method, seeded, signature_of
from captum_norm.lab.comparison.run import timed
from captum_norm.lab.prompts import EvidencePrompt
from captum_norm.methods import METHODS
from captum_norm.versions import versions

RANDOM, LEAVING_OUT = "random", "leave one out"
"""Rows that every comparison has: random numbers, and what the answer's log-probability loses without each source."""


class SourcePrompt(NamedTuple):
    """A prompt whose sources an answer rests on.

    Attributes:
        prompt: a text, or the messages of a conversation.
        segments: its sources; None for those that the comparison names.
        answer: the answer; None for the one that the model generates.
        evidence: the indices of the sources that the answer rests on; empty if they are not known.
    """

    prompt: str | Sequence[Mapping[str, str]]
    segments: Segmentation | None = None
    answer: str | None = None
    evidence: tuple[int, ...] = ()


def read_prompts(lines: Iterable[str]) -> list[SourcePrompt]:
    r"""Read prompts from JSON, one a line.

    A line has ``prompt``, a text or messages, or ``passages`` and ``question``, which are put together as lines;
    ``passages`` beside ``prompt`` are its sources. It may have ``answer``, and ``evidence``, the indices of passages.

    Raises:
        InvalidInputError: a line is something else; the message has its number.

    Example:
        >>> read_prompts(['{"passages": ["Ann owns a boat."], "question": "Who owns a boat?"}'])[0].prompt
        'Ann owns a boat.\nWho owns a boat?'
    """
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found += [_read(**json.loads(line))] if line.strip() else []
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInputError(
                f'line {number} of the prompts cannot be read; expected {{"prompt": text or messages}} or '
                '{"passages": [text, …], "question": text}, and perhaps "answer": text and "evidence": [index of a '
                "passage, …]"
            ) from error
    return found


def _read(
    *, prompt: Any = None, passages: Any = None, question: Any = None, answer: Any = None, evidence: Any = ()
) -> SourcePrompt:
    given = [] if passages is None and question is None else passages
    texts = [*given, question or "", answer or ""]
    fits = [
        isinstance(given, list),
        (prompt is None) != (question is None),
        all(isinstance(text, str) for text in texts),
    ]
    if not all(fits) or not all(type(index) is int and 0 <= index < len(given) for index in evidence):
        raise ValueError
    whole = "\n".join([*given, question]) if prompt is None else prompt
    return SourcePrompt(whole, passages, answer, tuple(evidence))


def compare_answers(
    model: models.Explainable,
    prompts: Sequence[Any],
    *,
    methods: Sequence[str] | Mapping[str, str | Attribution] | None = None,
    tokenizer: Any = None,
    segments: Segmentation = "line",
    gen_args: Mapping[str, Any] | None = None,
    ablations: int = 64,
    steps: int = 20,
    top: int = 1,
    baseline: str = RANDOM,
    seed: int = 0,
    name: str | None = None,
) -> AnswerComparison:
    """Explain answers by several methods, and measure how well each says which sources they rest on.

    Beside the methods stand the rows ``"random"`` and ``"leave one out"``.

    Args:
        model: a language model or a translation model of Hugging Face; not changed.
        prompts: texts, messages, :class:`SourcePrompt`, or those of ``captum_norm.lab.prompts.evidence_prompts``.
        methods: names in :data:`captum_norm.methods.METHODS`, or a mapping from names for the results to such names or
            methods of your own, :mod:`captum_norm.lab.surrogates` included. None: all that take a few forward passes.
        tokenizer: the model's; None for that of a pipeline.
        segments: the sources of prompts that name none, see :data:`captum_norm.generation.Segmentation`.
        gen_args: arguments of the model's ``generate`` for prompts without an answer.
        ablations: random ablations for the LDS, each keeping a source with probability ½.
        steps: the most steps of a deletion curve, one a source if there are fewer; and the ablations for π-Soft-NC.
        top: how many best sources are taken out for the drop.
        baseline: the row that p-values compare with.
        seed: the seed of ablations, random scores and methods that draw random numbers.
        name: the model's name in results; None for its class.

    Returns:
        the comparison. A prompt that a method refuses is missing in its row, one that does not fit the model in all.

    Raises:
        InvalidInputError: an option is invalid, or no prompt or no method fits the model.

    Example:
        >>> from captum_norm.lab.prompts import evidence_prompts
        >>> from captum_norm.loading import LANGUAGE_MODEL, load
        >>> model, tokenizer = load(LANGUAGE_MODEL)
        >>> prompts = list(evidence_prompts("conflict", 2, passages=5))
        >>> list(compare_answers(model, prompts, methods=["decompx"], tokenizer=tokenizer, ablations=8).results)
        ['random', 'leave one out', 'decompx']
    """
    quick = [key for key, method in METHODS.items() if method.maps and key != "value-zeroing"]
    named = {
        key: method for key, method in check_methods(quick if methods is None else methods).items() if key != RANDOM
    }
    check_choice("baseline", baseline, [RANDOM, LEAVING_OUT, *named])
    sizes = {key: check_count(key, size) for key, size in (("ablations", ablations), ("steps", steps), ("top", top))}
    if isinstance(prompts, str) or not len(prompts):
        raise InvalidInputError("got no list of prompts; give some, such as [text, ...]")
    model, tokenizer = models.opened(model, tokenizer)
    make = partial(make_method, model=model, tokenizer=tokenizer, keep_special=False, batch_size=16)
    explainers = {
        key: method
        if isinstance(method, SourceAttribution)
        else GenerationAttribution(make(method) if isinstance(method, str) else method, tokenizer)
        for key, method in named.items()
    }
    settings = [f"{key}:{size}" for key, size in (*sizes.items(), ("seed", check_seed(seed)), *versions().items())]
    common = {"model": name or type(model).__name__, "baseline": baseline, "signature": "|".join(settings)}
    parts, skipped = list[AnswerComparison](), list[str]()
    with bar("comparing", len(prompts), "prompts") as shown:
        for number, given in enumerate(prompts):
            prompt = source_prompt(given, segments)
            options: Any = {"segments": prompt.segments, "gen_args": gen_args if prompt.answer is None else None}
            try:
                with seeded(model, seed + number), hidden():
                    ablated = SourceAblations(model, tokenizer, prompt.prompt, prompt.answer, **options)
                    parts.append(_compared(ablated, prompt, explainers, sizes, common))
            except CaptumNormError as error:
                skipped.append(f"prompt {number}: {_sentence(error)}")
            shown.update()
    if not parts:
        raise InvalidInputError(f"no prompt fits the model; {skipped[0]}")
    return replace(AnswerComparison.concatenate(parts), skipped=skipped)


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())


def source_prompt(given: Any, segments: Segmentation) -> SourcePrompt:
    """Return a prompt with its sources, ``segments`` where it names none."""
    if isinstance(given, EvidencePrompt):
        return SourcePrompt(given.text, given.passages, given.answer, given.evidence)
    prompt = given if isinstance(given, SourcePrompt) else SourcePrompt(given)
    return prompt._replace(segments=segments) if prompt.segments is None else prompt


def _compared(
    ablated: SourceAblations,
    prompt: SourcePrompt,
    explainers: Mapping[str, GenerationAttribution | SourceAttribution],
    sizes: Mapping[str, int],
    common: Mapping[str, str],
) -> AnswerComparison:
    """Explain one answer by all methods, and measure them by ablations that they share."""

    def run(kept: Tensor) -> Tensor:
        return ablated.log_probabilities(kept).sum(1)

    count = len(ablated.sources)
    scores = {RANDOM: torch.rand(count, dtype=torch.float64)}
    kept = torch.rand(sizes["ablations"], count) < 0.5
    drawn = torch.rand(sizes["steps"], count, dtype=torch.float64)
    everything = torch.ones(1, count, dtype=torch.bool)
    values = run(torch.cat([kept, ~everything]))  # before anything is timed
    (every,), forward = timed(partial(run, everything))
    alone, taken = timed(partial(run, ~torch.eye(count, dtype=torch.bool)))
    scores[LEAVING_OUT] = every - alone
    seconds, refused = {RANDOM: 0.0, LEAVING_OUT: taken}, dict[str, str]()
    for key, explainer in explainers.items():
        where: Any = prompt.segments
        explain = partial(explainer.attribute, prompt.prompt, list(ablated.answer), segments=where)
        if isinstance(explainer, GenerationAttribution):
            explain = partial(explain, per_token=False)
        try:
            result, seconds[key] = timed(explain)
            scores[key] = result.segment_attr.double().cpu()
        except CaptumNormError as error:
            refused[key] = _sentence(error)
    points = min(sizes["steps"], count)
    counts = [math.ceil(count * step / points) for step in range(points + 1)]
    removals = [
        torch.cat([without_best(each, [*counts, min(sizes["top"], count)]), drawn >= soft_removal(each)])
        for each in scores.values()
    ]
    curves = dict(zip(scores, run(torch.cat(removals)).view(len(scores), -1), strict=True))

    def scored(key: str, signature: str) -> AnswerScores:
        found = dict.fromkeys([measure.name for measure in ANSWER_MEASURES], math.nan)
        if key in scores:
            each, outputs = scores[key], curves[key]
            curve, soft = deletion_curve(outputs[: points + 1]), outputs[points + 2 :]
            found |= {"lds": lds(each, kept, values[:-1]), "drop": float(every - outputs[points + 1])}
            found |= {"rise": rise(curve), "mas": mas(curve, each, counts), "soft_nc": soft_nc(soft, every, values[-1])}
            if prompt.evidence:
                found["recovery"] = recovery(each, prompt.evidence, math.ceil(count / 10))
                found["precision"] = recovery(each, prompt.evidence, len(prompt.evidence))
        return AnswerScores(
            signature=signature,
            scores=scores.get(key, torch.full((count,), math.nan, dtype=torch.float64))[None],
            measures={name: torch.tensor([value], dtype=torch.float64) for name, value in found.items()},
            refused=[refused.get(key, "")],
            seconds=seconds[key] if key in scores else 0.0,
            forward_seconds=forward if key in scores else 0.0,
        )

    signatures = {RANDOM: RANDOM, LEAVING_OUT: LEAVING_OUT}
    signatures |= {key: signature_of(getattr(explainer, "method", explainer)) for key, explainer in explainers.items()}
    return AnswerComparison(
        answers=[ablated.answer_text],
        sources=[list(ablated.sources)],
        evidence=[list(prompt.evidence)],
        log_probabilities=torch.stack([every, values[-1]])[None],
        results={key: scored(key, signature) for key, signature in signatures.items()},
        skipped=[],
        **common,
    )

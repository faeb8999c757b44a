"""Explains texts by one method: from a sentence to scores in one call."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from captum.attr import Attribution
from torch import Tensor

from captum_norm.attr import AttentionMapAttribution, MeterOptions, TokenAttribution
from captum_norm.checks import check_choice, check_index, check_indices, quoted
from captum_norm.errors import InvalidInputError
from captum_norm.explanation.result import Explanation
from captum_norm.explanation.targets import (
    default_position,
    load_subject,
    numbered,
    refuse_encoder_decoder,
    target_name,
    texts_of,
)
from captum_norm.forward.request import layer_indices
from captum_norm.lab.comparison.methods import checked_seed, make_method, seeded
from captum_norm.lab.comparison.targets import PROJECTION, count_outputs, own_directions
from captum_norm.loading import DEFAULT_MODEL
from captum_norm.methods import METHODS
from captum_norm.models import bind_tokens
from captum_norm.models.objects import Explainable, SentenceEncoder, SentenceSimilarity, opened, tokenized
from captum_norm.models.outputs import Position, Readout, Target, read_position
from captum_norm.results.maps import AttributionMaps
from captum_norm.text.words import WORD_MEASURES, WordMeasure, words_of

_BATCH = 32


def explain(
    texts: str | Sequence[str],
    model: str | Explainable | None = None,
    tokenizer: Any = None,
    *,
    method: str | Attribution = "norm",
    target: Target | str = None,
    position: Position = None,
    layer: int | None = None,
    head: int | None = None,
    per_head: bool = False,
    words: WordMeasure | None = None,
    seed: int = 0,
    name: str | None = None,
    **options: Any,
) -> Explanation:
    """Explain how much each token of a text contributes, by any method.

    A notebook shows the result as a page with the text, its scores and the maps of all layers.

    Args:
        texts: a text, or several, which go through the model as one batch.
        model: a folder or a name on the Hugging Face hub, of a model or a PEFT adapter; a model, a pipeline or a
            SentenceTransformer; None for a small sentence encoder, :data:`captum_norm.loading.DEFAULT_MODEL`.
        tokenizer: the model's, unless the model is named or brings one.
        method: a name in :data:`captum_norm.methods.METHODS`, or a method for its own model.
        target: the output to explain, for methods that explain one: its index, one for each text, a label of a
            classifier, a token of a language model, or for a sentence encoder a text, whose similarity is explained;
            or a :class:`captum_norm.Difference` of two. None: what the model predicts. Methods that need an output
            explain models without a head by the projection of their mean-pooled output on its own direction, as
            :func:`captum_norm.compare` does.
        position: the output position to explain, see :meth:`captum_norm.NormAttribution.attribute`; None for what the
            model's head or pooling reads.
        layer: explain one layer, counted from 0, or from −1 backwards; None for all together.
        head: explain one head of this layer, counted from 0, or from −1 backwards.
        per_head: compute maps of single heads.
        words: explain words instead of tokens: by the ``"sum"``, ``"mean"`` or ``"max"`` of their tokens' scores, see
            :meth:`Explanation.words`, or by the ``"norm"`` of their tokens' vectors added, with methods that have them.
        seed: the seed of methods that draw random numbers.
        name: the model's name in the result.
        options: arguments of the method, such as ``scope="attn_res_ln"`` or ``aggregation="mean"``.

    Returns:
        the explanation.

    Raises:
        InvalidInputError: there is no such model, method, output, position or layer, or a text has no tokens.
        CaptumNormError: the method does not support the model.

    Example:
        >>> explanation = explain("A man is playing a guitar on stage.")
        >>> [token for token, score in explanation.top(2)]
        ['guitar', 'man']
    """
    listed = _checked(texts)
    subject = _subject(model, tokenizer, method, target, name)
    inputs = tokenized(subject.model, listed, subject.tokenizer)
    # The tokenizer must neither truncate a text that is too long nor warn about it: the method refuses it.
    ids_of = partial(subject.tokenizer, add_special_tokens=False, verbose=False)
    _refuse(lambda text: not ids_of(text)["input_ids"], listed, "has no tokens that the model knows; give some words")
    place = DEFAULT_MODEL if model is None else model
    if position is None and isinstance(place, str) and isinstance(method, str) and METHODS[method].maps:
        position = default_position(subject.model, place)
    target = numbered(subject.model, subject.tokenizer, subject.target)
    task = _task(method, subject, inputs, target, position, options)
    if words is not None:
        check_choice("words", words, WORD_MEASURES)
    if head is not None and (layer is None or per_head or words == "norm"):
        raise InvalidInputError(f"got head={head}; expected it with layer=, and without per_head= or words='norm'")
    with seeded(subject.model, checked_seed(seed)):
        found = _explained(listed, subject, inputs, task, layer, head, per_head=per_head or head is not None)
    if words != "norm":
        return found if words is None else found.words(words)
    if per_head or not isinstance(task.method, AttentionMapAttribution):
        raise InvalidInputError(f"got words='norm', but {task.name} has no vectors to add, or heads have their own")
    return _with_norms(found, subject, task)


class _Subject(NamedTuple):
    """What is explained: the module, its tokenizer, the model's name in the result, and the target as given."""

    model: Any
    tokenizer: Any
    name: str
    target: Any


class _Task(NamedTuple):
    """How it is explained; ``projection``: by an output that is the projection of a model without a head."""

    method: Any
    name: str
    target: Any
    position: Any
    projection: bool = False


def _checked(texts: Any) -> list[str]:
    listed: list[Any] = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Sequence) else []
    if not listed or not all(isinstance(text, str) for text in listed):
        raise InvalidInputError(f"got the texts {quoted(texts)}; expected a text or a list of texts")
    _refuse(lambda text: not text.strip(), listed, "is empty; give some words")
    return listed


def _refuse(wrong: Callable[[str], bool], texts: Sequence[str], why: str) -> None:
    for index, text in enumerate(texts):
        if wrong(text):
            raise InvalidInputError(f"{'the text' if len(texts) == 1 else f'text {index}'} {why}")


def _subject(model: Any, tokenizer: Any, method: Any, target: Any, name: str | None) -> _Subject:
    if isinstance(method, Attribution):
        if model is not None:
            raise InvalidInputError(
                f"got the method {type(method).__name__}, which has its model, and another one; leave model= out, or "
                'pass the method by its name, such as "norm"'
            )
        model = getattr(method, "model", None)
        known = [tokenizer, getattr(getattr(method, "session", None), "tokenizer", None)]
        tokenizer = next((found for found in [*known, getattr(method, "_tokenizer", None)] if found is not None), None)
    elif method not in METHODS:
        raise InvalidInputError(f"got the method {quoted(method)}; expected one of {', '.join(METHODS)}, or a method")
    if model is None or isinstance(model, str):
        found = DEFAULT_MODEL if model is None else model
        module, own = load_subject(found, target)
        return _Subject(module, own if tokenizer is None else tokenizer, name or found, target)
    module, tokenizer = opened(model, tokenizer)
    refuse_encoder_decoder(module)
    if texts_of(target) and type(module) is SentenceEncoder:
        module = SentenceSimilarity(module.whole, *texts_of(target))
    if tokenizer is None:
        raise InvalidInputError(f"got {type(module).__name__} without a tokenizer; pass tokenizer=, the model's")
    return _Subject(module, tokenizer, name or type(module).__name__, target)


def _task(
    wanted: Any, subject: _Subject, inputs: Mapping[str, Any], target: Any, position: Any, options: Mapping[str, Any]
) -> _Task:
    """Create the method, for a model without a head with the projection for an output."""
    if isinstance(wanted, Attribution):
        if options:
            raise InvalidInputError(f"got {min(options)}= for a method that is made; pass it when it is created")
        name = getattr(wanted, "name", type(wanted).__name__)
        return _Task(wanted, name, target, position)
    entry = METHODS[wanted]
    if entry.target == "never" and target is not None:
        raise InvalidInputError(f"the method {wanted} has no target; its scores depend on no output")
    if entry.maps:
        known = inspect.signature(entry.load()).parameters.keys() | MeterOptions.__annotations__.keys()
        for option in options.keys() - known:
            raise InvalidInputError(f"the method {wanted} has no {option}")
    readout: Readout | None = None
    if entry.target == "always" or target is not None:
        bound = bind_tokens(subject.model, inputs)
        if count_outputs(bound) is None:
            if target is not None:
                kind = type(subject.model).__name__
                raise InvalidInputError(f"{kind} has no head, so it has no target; take a model with one")
            readout, target = own_directions(bound, _BATCH), torch.arange(len(bound))
    method = make_method(
        wanted,
        subject.model,
        removal=None,
        tokenizer=subject.tokenizer,
        keep_special=True,
        readout=readout,
        batch_size=_BATCH,
        options=options,
    )
    if readout is not None and position is None and entry.maps:
        position = "mean"
    return _Task(method, wanted, target, position, readout is not None)


def _explained(
    texts: Sequence[str],
    subject: _Subject,
    inputs: Mapping[str, Any],
    task: _Task,
    layer: int | None,
    head: int | None,
    *,
    per_head: bool,
) -> Explanation:
    method = task.method
    real = _real(inputs)
    if isinstance(method, AttentionMapAttribution):
        count = method.count_layers(inputs)
        layers = layer_indices(None if layer is None else [layer], count)
        layer = None if layer is None else layers[0]
        maps, scores, delta = _mapped(task, inputs, layer, layers, per_head=per_head)
        if maps is not None and head is not None:
            maps, head = _of_head(maps, head)
            scores = method.scores(maps, task.position, aggregate=False)
    else:
        if layer is not None or per_head:
            given = "per_head=True" if layer is None else f"layer={layer}"
            raise InvalidInputError(f"got {given}; the method {task.name} has no layers")
        maps = None
        scores, delta = _tokenwise(task, inputs)
    virtual = scores.shape[1] - real.shape[1]
    names = [f"[virtual {place}]" for place in range(1, virtual + 1)]
    words = [
        words_of(subject.tokenizer, row[kept].tolist(), text).behind(names)
        for row, kept, text in zip(inputs["input_ids"].cpu(), real, texts, strict=True)
    ]
    real = torch.nn.functional.pad(real, (virtual, 0), value=True)
    tokens = []
    for own, row in zip(words, real.tolist(), strict=True):
        pieces = iter(own.pieces)
        tokens.append([next(pieces) if kept else "" for kept in row])
    position = task.position
    if position is None and maps is not None:
        position = read_position(subject.model, causal=maps.decoder is not None)
    return Explanation(
        texts=texts,
        model=subject.name,
        method=task.name,
        scope=method.scope if "scope" in inspect.signature(type(method)).parameters else None,
        target=PROJECTION if task.projection else target_name(subject.target),
        aggregation=_aggregation(method) if layer is None else None,
        layer=layer,
        position="what the head reads" if position is None else _shown_position(position),
        tokens=tokens,
        real=real,
        scores=scores.detach().cpu(),
        unit=_unit(task, maps, layer),
        maps=None if maps is None else maps.with_tokens(_key_tokens(maps, subject, inputs)),
        map_unit=method.units.entry if maps is not None else "",
        convergence_delta=None if delta is None else delta.detach().cpu(),
        words_of_tokens=words,
        head=head,
    )


def _key_tokens(maps: AttributionMaps, subject: _Subject, inputs: Mapping[str, Any]) -> list[list[str]]:
    """Return the tokens of the maps' keys as the tokenizer writes them, virtual ones first."""
    names = [f"[virtual {place}]" for place in range(1, 1 + maps.virtual)]
    return [[*names, *subject.tokenizer.convert_ids_to_tokens(row)] for row in inputs["input_ids"].tolist()]


def _of_head(maps: AttributionMaps, head: int) -> tuple[AttributionMaps, int]:
    """Return the maps of one head, and its index."""
    count = maps.self_attention.shape[2]
    if not -count <= check_index("head", head) < count:
        raise InvalidInputError(f"got head {head}; the layer has {count} heads, 0 to {count - 1}")
    name = "encoder" if maps.decoder is None else "decoder"
    own: dict[str, Any] = {name: maps.self_attention[:, :, head % count]}
    return replace(maps, **own, mixing_ratio=None), head % count


def _with_norms(explanation: Explanation, subject: _Subject, task: _Task) -> Explanation:
    """Explain words by the norms of their tokens' vectors added, one text after the other."""
    method, scores, squares = task.method, [], []
    if not (method.segmented and method.decomposes):
        raise InvalidInputError(f"the method {task.name} has no vectors to add; score words by sum, mean or max")
    for text, words in zip(explanation.texts, explanation.words_of_tokens, strict=True):
        inputs, count = tokenized(subject.model, [text], subject.tokenizer), len(words.numbers)
        maps = method.maps(inputs, layers=explanation.layers, segments=words.segments())
        position = task.position
        if isinstance(position, int):
            if not -count <= position < count:
                raise InvalidInputError(
                    f"got position {position}; the sequence has {count} positions, 0 to {count - 1}"
                )
            position = words.numbers[position]
        real = maps.real.new_ones(1, len(words.texts))
        # A word's row is the mean of its tokens' rows.
        squares.append(words.rows(maps.self_attention))
        stack: dict[str, Any] = {"encoder" if maps.decoder is None else "decoder": squares[-1]}
        maps = replace(maps, **stack, real=real, mixing_ratio=None, tokens=[words.texts], segmented=False)
        of_words = method.scores(maps, position, aggregate=explanation.layer is None)
        scores.append(of_words[0, : len(words.texts)].cpu())
    return explanation.with_words(scores, squares)


def _mapped(
    task: _Task, inputs: Mapping[str, Any], layer: int | None, layers: Sequence[int], *, per_head: bool
) -> tuple[AttributionMaps | None, Tensor, Tensor | None]:
    """Compute maps, if the method has some, scores and completeness error of a method with layers."""
    method, output = task.method, {"target": task.target, "position": task.position}
    maps = None
    if method.mapped:
        given = output if method.target == "always" else {}
        maps = method.maps(inputs, layers=layers, per_head=per_head, **given)
    elif per_head:
        raise InvalidInputError(f"got per_head=True; the method {task.name} has no maps")
    if maps is not None and not per_head and (method.target != "optional" or task.target is None):
        scores = method.scores(maps, task.position, aggregate=layer is None)
        return maps, scores, None if maps.convergence_delta is None else maps.convergence_delta.amax(1)
    if not method.has_convergence_delta():
        return maps, method.attribute(inputs, **output, layer=layer), None
    return maps, *method.attribute(inputs, **output, layer=layer, return_convergence_delta=True)


def _tokenwise(task: _Task, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Compute scores and convergence delta of a method without layers."""
    given = {"target": task.target, "position": task.position}
    known = inspect.signature(task.method.attribute).parameters
    options = {name: value for name, value in given.items() if value is not None and name in known}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*Setting forward, backward hooks", UserWarning)
        if isinstance(task.method, TokenAttribution) and task.method.has_convergence_delta():
            scores, delta = task.method.attribute(inputs, **options, return_convergence_delta=True)
            return scores, delta
        return task.method.attribute(inputs, **options), None


def _real(inputs: Mapping[str, Any]) -> Tensor:
    mask = inputs.get("attention_mask")
    found: Tensor = inputs["input_ids"] >= 0 if mask is None else mask.bool()
    return found.cpu()


def _unit(task: _Task, maps: AttributionMaps | None, layer: int | None) -> str:
    method = task.method
    if not isinstance(method, AttentionMapAttribution):
        return str(getattr(method, "unit", "score"))
    units = method.units
    if layer is not None:
        return units.entry
    if (task.target is not None or maps is None) and units.target is not None:
        return units.target
    aggregated = f"mean {units.entry}" if method.aggregation == "mean" else f"share of {method.aggregation}"
    return units.together or aggregated


def _aggregation(method: Any) -> str | None:
    return method.units.aggregation or method.aggregation if isinstance(method, AttentionMapAttribution) else None


def _shown_position(position: Any) -> int | str:
    return position if isinstance(position, int | str) else ", ".join(map(str, check_indices("position", position)))

"""Explains texts by one method, from a sentence to scores in one call, with outputs named by label, token or text."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from captum.attr import Attribution
from torch import Tensor, nn
from torch.nn.functional import pad

from captum_norm.attr import AttentionMapAttribution, MeterOptions, TokenAttribution
from captum_norm.checks import check_choice, check_index, check_indices, quoted
from captum_norm.errors import InvalidInputError
from captum_norm.explanation.result import Explanation, with_stack
from captum_norm.forward.request import layer_indices
from captum_norm.generation.attribution import aggregated_unit, tokenizer_of
from captum_norm.lab.comparison.methods import checked_seed, make_method, seeded
from captum_norm.lab.comparison.targets import PROJECTION, count_outputs, own_directions
from captum_norm.loading import DEFAULT_MODEL, Quantization, load, load_poolings, load_sentence_transformer
from captum_norm.methods import METHODS
from captum_norm.models import bind_tokens
from captum_norm.models.model import encoder_of
from captum_norm.models.objects import Explainable, SentenceEncoder, SentenceSimilarity, opened, tokenized
from captum_norm.models.outputs import (
    POOLINGS,
    Difference,
    Position,
    Readout,
    Target,
    has_labels,
    read_position,
)
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
    listed = _check_texts(texts)
    module, tokenizer, model_name = _subject(model, tokenizer, method, target)
    inputs = tokenized(module, listed, tokenizer)
    # The tokenizer must neither truncate a text that is too long nor warn about it: the method refuses it.
    ids_of = partial(tokenizer, add_special_tokens=False, verbose=False)
    _refuse(lambda text: not ids_of(text)["input_ids"], listed, "has no tokens that the model knows; give some words")
    place = DEFAULT_MODEL if model is None else model
    if position is None and isinstance(place, str) and isinstance(method, str) and METHODS[method].maps:
        position = default_position(module, place)
    task = _task(module, tokenizer, name or model_name, method, inputs, target, position, options)
    if words is not None:
        check_choice("words", words, WORD_MEASURES)
    if head is not None and (layer is None or per_head or words == "norm"):
        raise InvalidInputError(f"got head={head}; expected it with layer=, and without per_head= or words='norm'")
    with seeded(module, checked_seed(seed)):
        explanation = _explained(listed, inputs, task, layer, head, per_head=per_head or head is not None)
    if words != "norm":
        return explanation if words is None else explanation.words(words)
    if per_head or not isinstance(task.method, AttentionMapAttribution):
        raise InvalidInputError(
            f"got words='norm', but {task.method_name} has no vectors to add, or heads have their own"
        )
    return _with_norms(explanation, task)


class _Task(NamedTuple):
    """What is explained by what; the names are those in the result."""

    model: Any
    tokenizer: Any
    model_name: str
    method: Any
    method_name: str
    target: Any
    target_name: str | None
    position: Any


def _check_texts(texts: Any) -> list[str]:
    listed: list[Any] = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Sequence) else []
    if not listed or not all(isinstance(text, str) for text in listed):
        raise InvalidInputError(f"got the texts {quoted(texts)}; expected a text or a list of texts")
    _refuse(lambda text: not text.strip(), listed, "is empty; give some words")
    return listed


def _refuse(wrong: Callable[[str], bool], texts: Sequence[str], why: str) -> None:
    for index, text in enumerate(texts):
        if wrong(text):
            raise InvalidInputError(f"{'the text' if len(texts) == 1 else f'text {index}'} {why}")


def _subject(model: Any, tokenizer: Any, method: Any, target: Any) -> tuple[Any, Any, str]:
    """Return the module, its tokenizer and its name."""
    if isinstance(method, Attribution):
        if model is not None:
            raise InvalidInputError(
                f"got the method {type(method).__name__}, which has its model, and another one; leave model= out, or "
                'pass the method by its name, such as "norm"'
            )
        model, tokenizer = getattr(method, "model", None), tokenizer_of(method, tokenizer)
    elif method not in METHODS:
        raise InvalidInputError(f"got the method {quoted(method)}; expected one of {', '.join(METHODS)}, or a method")
    if model is None or isinstance(model, str):
        name = DEFAULT_MODEL if model is None else model
        module, loaded = load_subject(name, target)
        return module, loaded if tokenizer is None else tokenizer, name
    module, tokenizer = opened(model, tokenizer)
    refuse_encoder_decoder(module)
    if _names_of(target) and type(module) is SentenceEncoder:
        module = SentenceSimilarity(module.whole, *_names_of(target))
    if tokenizer is None:
        raise InvalidInputError(f"got {type(module).__name__} without a tokenizer; pass tokenizer=, the model's")
    return module, tokenizer, type(module).__name__


def _task(
    model: Any,
    tokenizer: Any,
    model_name: str,
    method: Any,
    inputs: Mapping[str, Any],
    named_target: Any,
    position: Any,
    options: Mapping[str, Any],
) -> _Task:
    """Create the method, for a model without a head with the projection for an output."""
    target, target_name = numbered(model, tokenizer, named_target), _target_name(named_target)
    if isinstance(method, Attribution):
        if options:
            raise InvalidInputError(f"got {min(options)}= for a method that is made; pass it when it is created")
        method_name = getattr(method, "name", type(method).__name__)
        return _Task(model, tokenizer, model_name, method, method_name, target, target_name, position)
    entry = METHODS[method]
    if entry.target == "never" and target is not None:
        raise InvalidInputError(f"the method {method} has no target; its scores depend on no output")
    if entry.maps:
        known = inspect.signature(entry.load()).parameters.keys() | MeterOptions.__annotations__.keys()
        for option in options.keys() - known:
            raise InvalidInputError(f"the method {method} has no {option}")
    readout: Readout | None = None
    if entry.target == "always" or target is not None:
        call = bind_tokens(model, inputs)
        if count_outputs(call) is None:
            if target is not None:
                kind = type(model).__name__
                raise InvalidInputError(f"{kind} has no head, so it has no target; take a model with one")
            readout, target, target_name = own_directions(call, _BATCH), torch.arange(len(call)), PROJECTION
            if position is None and entry.maps:
                position = "mean"
    created = make_method(
        method,
        model,
        removal=None,
        tokenizer=tokenizer,
        keep_special=True,
        readout=readout,
        batch_size=_BATCH,
        options=options,
    )
    return _Task(model, tokenizer, model_name, created, method, target, target_name, position)


def _explained(
    texts: Sequence[str],
    inputs: Mapping[str, Any],
    task: _Task,
    layer: int | None,
    head: int | None,
    *,
    per_head: bool,
) -> Explanation:
    method, position, maps = task.method, task.position, None
    if isinstance(method, AttentionMapAttribution):
        layers = layer_indices(None if layer is None else [layer], method.count_layers(inputs))
        layer = None if layer is None else layers[0]
        maps, scores, delta = _mapped(task, inputs, layer, layers, per_head=per_head)
        if maps is not None and head is not None:
            maps, head = _of_head(maps, head)
            scores = method.scores(maps, position, aggregate=False)
    else:
        if layer is not None or per_head:
            option = "per_head=True" if layer is None else f"layer={layer}"
            raise InvalidInputError(f"got {option}; the method {task.method_name} has no layers")
        scores, delta = _tokenwise(task, inputs)

    ids, mask = inputs["input_ids"].cpu(), inputs.get("attention_mask")
    real = ids >= 0 if mask is None else mask.bool().cpu()
    virtual = [f"[virtual {place}]" for place in range(1, 1 + scores.shape[1] - real.shape[1])]
    words = [
        words_of(task.tokenizer, row[is_real].tolist(), text).behind(virtual)
        for row, is_real, text in zip(ids, real, texts, strict=True)
    ]
    real = pad(real, (len(virtual), 0), value=True)
    tokens = []
    for of_text, row in zip(words, real.tolist(), strict=True):
        pieces = iter(of_text.pieces)
        tokens.append([next(pieces) if is_real else "" for is_real in row])
    if maps is not None:
        names = [f"[virtual {place}]" for place in range(1, 1 + maps.virtual)]
        maps = maps.with_tokens([[*names, *task.tokenizer.convert_ids_to_tokens(row)] for row in ids.tolist()])
        if position is None:
            position = read_position(task.model, causal=maps.decoder is not None)
    aggregation = None
    if layer is None and isinstance(method, AttentionMapAttribution):
        aggregation = method.units.aggregation or method.aggregation
    return Explanation(
        texts=texts,
        model=task.model_name,
        method=task.method_name,
        scope=method.scope if "scope" in inspect.signature(type(method)).parameters else None,
        target=task.target_name,
        aggregation=aggregation,
        layer=layer,
        position=_position_name(position),
        tokens=tokens,
        real=real,
        scores=scores.detach().cpu(),
        unit=_unit(task, maps, layer),
        maps=maps,
        map_unit="" if maps is None else method.units.entry,
        convergence_delta=None if delta is None else delta.detach().cpu(),
        words_of_tokens=words,
        head=head,
    )


def _mapped(
    task: _Task, inputs: Mapping[str, Any], layer: int | None, layers: Sequence[int], *, per_head: bool
) -> tuple[AttributionMaps | None, Tensor, Tensor | None]:
    """Compute maps, if the method has some, scores and completeness error of a method with layers."""
    method, output = task.method, {"target": task.target, "position": task.position}
    maps = None
    if method.mapped:
        options = output if method.target == "always" else {}
        maps = method.maps(inputs, layers=layers, per_head=per_head, **options)
    elif per_head:
        raise InvalidInputError(f"got per_head=True; the method {task.method_name} has no maps")
    if maps is not None and not per_head and (method.target != "optional" or task.target is None):
        scores = method.scores(maps, task.position, aggregate=layer is None)
        return maps, scores, None if maps.convergence_delta is None else maps.convergence_delta.amax(1)
    if not method.has_convergence_delta():
        return maps, method.attribute(inputs, **output, layer=layer), None
    return maps, *method.attribute(inputs, **output, layer=layer, return_convergence_delta=True)


def _of_head(maps: AttributionMaps, head: int) -> tuple[AttributionMaps, int]:
    """Return the maps of one head, and its index."""
    count = maps.self_attention.shape[2]
    if not -count <= check_index("head", head) < count:
        raise InvalidInputError(f"got head {head}; the layer has {count} heads, 0 to {count - 1}")
    return with_stack(maps, maps.self_attention[:, :, head % count]), head % count


def _tokenwise(task: _Task, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Compute scores and convergence delta of a method without layers."""
    output = {"target": task.target, "position": task.position}
    known = inspect.signature(task.method.attribute).parameters
    options = {name: value for name, value in output.items() if value is not None and name in known}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*Setting forward, backward hooks", UserWarning)
        if isinstance(task.method, TokenAttribution) and task.method.has_convergence_delta():
            scores, delta = task.method.attribute(inputs, **options, return_convergence_delta=True)
            return scores, delta
        return task.method.attribute(inputs, **options), None


def _with_norms(explanation: Explanation, task: _Task) -> Explanation:
    """Explain words by the norms of their tokens' vectors added, one text after the other."""
    method, scores, squares = task.method, [], []
    if not (method.segmented and method.decomposes):
        raise InvalidInputError(f"the method {task.method_name} has no vectors to add; score words by sum, mean or max")
    for text, words in zip(explanation.texts, explanation.words_of_tokens, strict=True):
        inputs, count = tokenized(task.model, [text], task.tokenizer), len(words.numbers)
        maps = method.maps(inputs, layers=explanation.layers, segments=words.segments())
        position = task.position
        if isinstance(position, int):
            if not -count <= position < count:
                raise InvalidInputError(
                    f"got position {position}; the sequence has {count} positions, 0 to {count - 1}"
                )
            position = words.numbers[position]
        # A word's row is the mean of its tokens' rows.
        squares.append(words.rows(maps.self_attention))
        real = maps.real.new_ones(1, len(words.texts))
        maps = with_stack(maps, squares[-1], real=real, tokens=[words.texts], segmented=False)
        of_words = method.scores(maps, position, aggregate=explanation.layer is None)
        scores.append(of_words[0, : len(words.texts)].cpu())
    return explanation.with_words(scores, squares)


def _unit(task: _Task, maps: AttributionMaps | None, layer: int | None) -> str:
    method = task.method
    if not isinstance(method, AttentionMapAttribution):
        return str(getattr(method, "unit", "score"))
    if layer is not None:
        return method.units.entry
    if (task.target is not None or maps is None) and method.units.target is not None:
        return method.units.target
    return aggregated_unit(method)


def _position_name(position: Any) -> int | str:
    if position is None:
        return "what the head reads"
    return position if isinstance(position, int | str) else ", ".join(map(str, check_indices("position", position)))


def load_subject(name_or_path: str, target: Any = None, quantization: Quantization | None = None) -> tuple[Any, Any]:
    """Load a model to explain and its tokenizer; with texts for a target, a sentence encoder's similarity to them."""
    if _names_of(target):
        sentences = load_sentence_transformer(name_or_path, quantization)
        if sentences is not None:
            return SentenceSimilarity(sentences, *_names_of(target)), sentences.tokenizer
    model, tokenizer = load(name_or_path, quantization)
    refuse_encoder_decoder(model)
    return model, tokenizer


def refuse_encoder_decoder(model: nn.Module) -> None:
    """Refuse encoder–decoder models."""
    if encoder_of(model) is not None:
        raise InvalidInputError(
            f"got the encoder–decoder model {type(model).__name__}; this explains models with one stack of layers. "
            "Its answers are explained with --generate N or --answer TEXT, in Python by GenerationAttribution; there "
            "maps() of NormAttribution, AttentionBlockAttribution, ALTI, InformationFlow, ValueZeroing, DecompX, "
            "AttentionWeights and AttentionRollout explains all three stacks of it"
        )


def default_position(model: nn.Module, name_or_path: str) -> Any:
    """Return what the pooling of a sentence encoder reads; None for another model, whose head decides."""
    poolings = [] if isinstance(model, SentenceEncoder) else load_poolings(name_or_path)
    if not poolings:
        return None
    position = POOLINGS.get(poolings[0]) if len(poolings) == 1 else None
    if position not in ("first", "last", "mean"):
        pooling = " and ".join(poolings)
        raise InvalidInputError(f"the pooling of {name_or_path} is {pooling}, not one position; choose a position")
    return position


def _names_of(target: Any) -> list[str]:
    """Return the names in a target."""
    parts = (target.target, target.other) if isinstance(target, Difference) else (target,)
    return [part for part in parts if isinstance(part, str)]


def numbered(model: Any, tokenizer: Any, target: Any) -> Any:
    """Replace the names in a target by the numbers of these outputs."""
    if isinstance(target, Difference):
        return Difference(numbered(model, tokenizer, target.target), numbered(model, tokenizer, target.other))
    return output_number(model, tokenizer, target, f"the target {target}") if isinstance(target, str) else target


def _target_name(target: Any) -> str | None:
    """Format a target for people."""
    if isinstance(target, Difference):
        return f"{_target_name(target.target)} − {_target_name(target.other)}"
    if target is None or isinstance(target, str):
        return target
    listed = target.tolist() if hasattr(target, "tolist") else target
    return ", ".join(map(str, listed)) if isinstance(listed, list | tuple) else str(listed)


def output_number(model: Any, tokenizer: Any, name: str, named: str) -> int:
    """Return the index of an output by its number, text, label or token; ``named`` is its name in messages."""
    # Only the right kind is looked up: a misspelt label may be a token, and language models have labels, too.
    if isinstance(model, SentenceEncoder) and name in model.texts:
        return model.texts.index(name)
    kind = type(model).__name__
    labels = {label: number for number, label in model.config.id2label.items()} if has_labels(model) else {}
    if name in labels:
        return int(labels[name])
    try:
        return int(name)
    except ValueError:
        pass
    if labels:
        raise InvalidInputError(
            f"got {named}, which is no number and no label of {kind}; its labels are {', '.join(labels)}"
        )
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise InvalidInputError(f"got {named}, but the outputs of {kind} are neither labels nor tokens")
    pieces = [name] if name in tokenizer.get_vocab() else tokenizer.tokenize(name)
    if len(pieces) != 1 or tokenizer.unk_token in pieces:
        raise InvalidInputError(f"got {named}, which is no number and no single token of {kind}")
    return int(tokenizer.convert_tokens_to_ids(pieces[0]))

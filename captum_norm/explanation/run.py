"""Explains texts by one method, from a sentence to scores in one call, with outputs named by label, token or text."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from captum.attr import Attribution
from torch import Tensor, nn
from torch.nn.functional import pad

from captum_norm.attr.base import AttentionMapAttribution
from captum_norm.attr.flow_graph import FlowGraph
from captum_norm.attr.frozen.decompx import DecompX
from captum_norm.attr.information_flow import InformationFlow
from captum_norm.attr.tokens import TokenAttribution
from captum_norm.checks import check_bool, check_indices, did_you_mean, quoted
from captum_norm.errors import InvalidInputError, UnsupportedModelError, UnsupportedScopeError
from captum_norm.explanation.result import Explanation
from captum_norm.forward.request import Request
from captum_norm.forward.session import MeterOptions
from captum_norm.generation.attribution import aggregated_unit, tokenizer_of
from captum_norm.lab.comparison import methods
from captum_norm.loading import DEFAULT_MODEL, Quantization, load, load_poolings, load_sentence_transformer
from captum_norm.methods import METHODS
from captum_norm.models import bind_tokens, outputs
from captum_norm.models.call import ModelCall
from captum_norm.models.model import encoder_of
from captum_norm.models.objects import Explainable, SentenceEncoder, SentenceSimilarity, opened, tokenized
from captum_norm.models.token_inputs import with_outputs
from captum_norm.models.wrappers import class_of
from captum_norm.results.maps import AttributionMaps
from captum_norm.results.outputs import NamedOutput
from captum_norm.text.lines import text_of_file
from captum_norm.text.words import Words, words_of

_BATCH = 32
# Maps of single heads are computed for pages whose maps of layers, (B, L, S, S), have no more entries than that.
_AXES_OF_LAYERS = 4
_MOST_ENTRIES = 1_000_000
_ANSWER_OPTIONS = ("contrast", "gen_args", "generate", "max_new_tokens", "segments")
_OF_ANSWERS = "; GenerationAttribution(method, tokenizer) explains generated answers"
LEAST_IMPORTANCE = 0.01
"""What the flow on a page can show at most; it begins with the authors' threshold."""


def explain(
    texts: str | Sequence[str],
    model: str | Explainable | None = None,
    tokenizer: Any = None,
    *,
    method: str | Attribution = "norm",
    target: outputs.Target | str = None,
    position: outputs.Position = None,
    layer: int | None = None,
    per_head: bool = False,
    seed: int = 0,
    name: str | None = None,
    page: bool = True,
    **options: Any,
) -> Explanation:
    """Explain how much each token of a text contributes, by any method.

    A notebook shows the result as a page: the text, its scores, and the maps of all layers beside attention weights.

    Args:
        texts: a text, or the name of a file that contains it; or a list of texts, each as it is, which go through the
            model as one batch.
        model: a folder or a name on the Hugging Face hub, of a model or a PEFT adapter; a model, a pipeline or a
            SentenceTransformer; None for a small sentence encoder, :data:`captum_norm.loading.DEFAULT_MODEL`.
        tokenizer: the model's, unless the model is named or brings one.
        method: a name in :data:`captum_norm.methods.METHODS`, or a method for its own model.
        target: the output to explain, for methods that explain one: its index, one for each text, a label of a
            classifier, a token of a language model, or for a sentence encoder a text, whose similarity is explained;
            or a :class:`captum_norm.Difference` of two. None: what the model predicts; without a head the projection of
            the mean-pooled output on its own direction, as for :func:`captum_norm.compare`. Hidden states are named
            by ``layer``, the last one by −1.
        position: the output position to explain, see :meth:`captum_norm.NormAttribution.attribute`; None for what the
            model's head or pooling reads.
        layer: explain one layer, counted from 0, or from −1 backwards; None for all together.
        per_head: compute maps of single heads.
        seed: the seed of methods that draw random numbers.
        name: the model's name in the result.
        page: also compute what the page shows beside: attention weights, or norms beside these, single heads of short
            texts, and the routes of information flow. False leaves that out, which takes two to four times as long.
        options: arguments of the method, such as ``scope="attn_res_ln"`` or ``aggregation="mean"``.

    Returns:
        the explanation.

    Raises:
        InvalidInputError: there is no such model, method, output, position or layer, or a text has no tokens.
        CaptumNormError: the method does not support the model.

    Example:
        >>> explanation = explain("A man is playing a guitar on stage.")
        >>> [best.token for best in explanation.top(2)]
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
    made, output = _method(module, tokenizer, method, inputs, _Output(target, position), layer, options)
    method_name = method if isinstance(method, str) else getattr(method, "name", type(method).__name__)
    if layer is not None and not isinstance(made, AttentionMapAttribution):
        raise InvalidInputError(f"got layer={layer}; the method {method_name} has no layers: leave layer= out")
    if check_bool("per_head", per_head) and not getattr(made, "mapped", False):
        raise InvalidInputError(f"got per_head=True; the method {method_name} has no maps: leave per_head= out")
    request = Request(None if layer is None else [layer], target=output.target)
    predicted = isinstance(made, DecompX) and not made.explains_states(*made.call_of(inputs, None, request))
    kind = METHODS[method].target if isinstance(method, str) else getattr(method, "target", "always")
    explained = predicted or (kind != "never" and not isinstance(made, DecompX))
    named = partial(_named, len(listed), made, output, tokenizer, explained)
    work = partial(_computed, made, inputs, output, layer, per_head=per_head, mapped=not predicted)
    with methods.seeded(module, methods.check_seed(seed)):
        (maps, scores, delta), explained_outputs = with_outputs(work, named, module, inputs)
    if maps is not None:
        layer = layer if layer is None else next(iter(maps.layers.values()))[0]
    words, real, tokens = _tokens(listed, tokenizer, inputs, scores.shape[1])
    read: Any = output.position
    if maps is not None:
        names = [f"[virtual {place}]" for place in range(1, 1 + maps.virtual)]
        ids = inputs["input_ids"].tolist()
        maps = maps.with_tokens([[*names, *tokenizer.convert_ids_to_tokens(row)] for row in ids])
        if read is None:
            read = outputs.read_position(module, causal=maps.decoder is not None)
    aggregation = None
    if layer is None and isinstance(made, AttentionMapAttribution):
        aggregation = made.units.aggregation or made.aggregation
    found = Explanation(
        texts=listed,
        model=name or model_name,
        method=method_name,
        scope=made.scope if "scope" in inspect.signature(type(made)).parameters else None,
        outputs=explained_outputs,
        aggregation=aggregation,
        layer=layer,
        position=_position_name(read),
        tokens=tokens,
        real=real,
        scores=scores.detach().cpu(),
        unit=_unit(made, maps, layer, explained=explained),
        maps=maps,
        map_unit="" if maps is None else made.units.entry,
        convergence_delta=None if delta is None else delta.detach().cpu(),
        words_of_tokens=words,
    )
    if not check_bool("page", page) or found.squares is None:
        return found
    where: dict[str, Any] = {"position": position, "layer": layer, "seed": seed, "name": found.model, "page": False}
    again = partial(explain, listed, tokenizer=tokenizer, **where)
    subject = None if isinstance(method, Attribution) else module
    beside = _beside(again, module, found, partial(again, model=subject, method=method, target=target, **options))
    return replace(found, beside=beside, graphs=_flows(module, found, tokenizer))


def _beside(again: Any, model: nn.Module, found: Explanation, itself: Any) -> list[Explanation]:
    """Explain by another method, and both by single heads if there are few entries; what a model lacks is left out."""
    squares, other = cast(Tensor, found.squares), "norm" if found.method == "weights" else "weights"
    choices = [partial(again, model=model, method=other)]
    if squares.dim() == _AXES_OF_LAYERS and squares.numel() <= _MOST_ENTRIES:
        choices += [partial(itself, per_head=True), partial(choices[0], per_head=True)]
    beside = []
    for choice in choices:
        with suppress(InvalidInputError, UnsupportedModelError, UnsupportedScopeError):
            beside.append(choice())
    return beside


def _flows(model: Any, found: Explanation, tokenizer: Any) -> list[FlowGraph]:
    """Follow information flow routes to every position of each text; none by another method."""
    if found.method != InformationFlow.name or found.layer is not None:
        return []
    # Heads added up, as in the authors' tool: single ones rarely exceed its threshold.
    options: dict[str, Any] = {"position": "all", "threshold": LEAST_IMPORTANCE, "per_head": False}
    method, texts = InformationFlow(model), found.texts
    return [graph for text in texts for graph in method.graphs(tokenized(model, [text], tokenizer), **options)]


class _Output(NamedTuple):
    """The output explained: its index or indices, where it is read, and its name if it is a readout."""

    target: Any
    position: Any
    title: str | None = None


def _check_texts(texts: Any) -> list[str]:
    if isinstance(texts, str):
        content = text_of_file(texts, f"pass it in a list, [{quoted(texts)}]")
        texts = [texts if content is None else content.strip()]
    listed: list[Any] = list(texts) if isinstance(texts, Sequence) else []
    if not listed or not all(isinstance(text, str) for text in listed):
        raise InvalidInputError(
            f"got the texts {quoted(texts)}; expected a text, the name of a file, or a list of texts"
        )
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
    elif not isinstance(method, str) or method not in METHODS:
        made = f": make one first, {method.__name__}(model)" if isinstance(method, type) else ""
        hint = made or did_you_mean(method, METHODS)
        raise InvalidInputError(
            f"got the method {quoted(method)}; expected one of {', '.join(METHODS)}, or a method{hint}"
        )
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


def _method(
    model: Any, tokenizer: Any, method: Any, inputs: Mapping[str, Any], output: _Output, layer: Any, options: Any
) -> tuple[Any, _Output]:
    """Create the method, and number its output; that of a model without a head is a projection."""
    output = output._replace(target=numbered(model, tokenizer, output.target))
    if isinstance(method, Attribution):
        if options:
            raise InvalidInputError(f"got {min(options)}= for a method that is made; pass it when it is created")
        return method, output
    entry = METHODS[method]
    if "readout" in options:
        raise InvalidInputError("got readout=; pass a method that has it, such as AttnLRP(model, readout=...)")
    if entry.target == "never" and output.target is not None:
        raise InvalidInputError(
            f"the method {method} has no target; its scores depend on no output: leave it out, or take a method that "
            "explains outputs, such as decompx or attnlrp"
        )
    if entry.maps:
        known = inspect.signature(entry.load()).parameters.keys() | MeterOptions.__annotations__.keys()
        for option in options.keys() - known:
            has = sorted(known - {"model", "options", "readout", "tokenizer", "unknown"})
            hint = _OF_ANSWERS if option in _ANSWER_OPTIONS else did_you_mean(option, has)
            raise InvalidInputError(f"the method {method} has no {option}; it has {', '.join(has)}{hint}")
    readout: outputs.Readout | None = None
    states = entry.target == "optional" and output.target is None and layer is not None
    if entry.target != "never" and not states:
        call = bind_tokens(model, inputs)
        if methods.count_outputs(call) is None:
            if output.target is not None:
                kind = type(model).__name__
                raise InvalidInputError(f"{kind} has no head, so it has no target; take a model with one")
            readout = methods.own_directions(call, _BATCH)
            position = "mean" if output.position is None and entry.maps else output.position
            output = _Output(torch.arange(len(call)), position, methods.PROJECTION)
    made = methods.make_method(method, model, tokenizer=tokenizer, readout=readout, batch_size=_BATCH, options=options)
    return made, output


def _computed(
    method: Any, inputs: Mapping[str, Any], output: _Output, layer: int | None, *, per_head: bool, mapped: bool
) -> tuple[AttributionMaps | None, Tensor, Tensor | None]:
    """Compute maps, if the method has some, scores, of these if ``mapped``, and completeness error."""
    where: dict[str, Any] = {"target": output.target, "position": output.position}
    maps = None
    if isinstance(method, AttentionMapAttribution):
        if method.mapped:
            layers = None if layer is None else [layer]
            maps = method.maps(inputs, layers=layers, per_head=per_head, **where if method.target == "always" else {})
        if maps is not None and not per_head and mapped:
            scores = method.scores(maps, output.position, aggregate=layer is None)
            return maps, scores, None if maps.convergence_delta is None else maps.convergence_delta.amax(1)
        where["layer"] = layer
    else:
        known = inspect.signature(method.attribute).parameters
        where = {name: value for name, value in where.items() if value is not None and name in known}
    if isinstance(method, AttentionMapAttribution | TokenAttribution) and method.has_convergence_delta():
        return maps, *method.attribute(inputs, **where, return_convergence_delta=True)
    return maps, method.attribute(inputs, **where), None


def _named(
    count: int, method: Any, output: _Output, tokenizer: Any, explained: bool, call: ModelCall, returned: Any
) -> list[NamedOutput] | None:
    """Name each text's output that is explained, or predicted; none if none is read, None of copies of one text."""
    if call.batch != count:
        return None
    readout = getattr(method, "readout", None)
    try:
        scores = outputs.output_scores(call, returned, output.position, readout)
        chosen = outputs.chosen_target(output.target, scores)
    except (InvalidInputError, UnsupportedModelError):  # a method that needs an output says why there is none
        return []
    options: dict[str, Any] = {"title": output.title, "readout": readout is not None, "explained": explained}
    return outputs.name_outputs(call.model, scores, chosen, tokenizer, **options)


def _tokens(
    texts: Sequence[str], tokenizer: Any, inputs: Mapping[str, Any], size: int
) -> tuple[list[Words], Tensor, list[list[str]]]:
    """Return the words of each text, where its tokens are, (B, S), and its tokens with padding."""
    ids, mask = inputs["input_ids"].cpu(), inputs.get("attention_mask")
    real = ids >= 0 if mask is None else mask.bool().cpu()
    virtual = [f"[virtual {place}]" for place in range(1, 1 + size - real.shape[1])]
    words = [
        words_of(tokenizer, row[is_real].tolist(), text).behind(virtual)
        for row, is_real, text in zip(ids, real, texts, strict=True)
    ]
    real = pad(real, (len(virtual), 0), value=True)
    tokens = []
    for of_text, row in zip(words, real.tolist(), strict=True):
        pieces = iter(of_text.pieces)
        tokens.append([next(pieces) if is_real else "" for is_real in row])
    return words, real, tokens


def _unit(method: Any, maps: AttributionMaps | None, layer: int | None, *, explained: bool) -> str:
    if not isinstance(method, AttentionMapAttribution):
        return str(getattr(method, "unit", "score"))
    if layer is not None:
        return method.units.entry
    if (explained or maps is None) and method.units.target is not None:
        return method.units.target
    return aggregated_unit(method)


def _position_name(position: Any) -> int | str:
    if position is None:
        return "what the head reads"
    return position if isinstance(position, int | str) else ", ".join(map(str, check_indices("position", position)))


def load_subject(
    name_or_path: str, target: Any = None, quantization: Quantization | None = None, *, answers: bool = False
) -> tuple[Any, Any]:
    """Load a model and its tokenizer: for texts as a target a sentence encoder as its similarities to them."""
    if _names_of(target):
        sentences = load_sentence_transformer(name_or_path, quantization)
        if sentences is not None:
            return SentenceSimilarity(sentences, *_names_of(target)), sentences.tokenizer
    model, tokenizer = load(name_or_path, quantization)
    if not answers:
        refuse_encoder_decoder(model)
    return model, tokenizer


def refuse_encoder_decoder(model: nn.Module) -> None:
    """Refuse encoder–decoder models."""
    if encoder_of(model) is not None:
        raise InvalidInputError(
            f"got the encoder–decoder model {type(model).__name__}; expected a model with one stack of layers: "
            "explain its answers with --generate N or --target TEXT, in Python by GenerationAttribution, or its stacks "
            "by maps() of a method such as NormAttribution"
        )


def is_answer(model: Any, tokenizer: Any, target: Any) -> bool:
    """Whether a target is an answer: of an encoder–decoder model, or several tokens of a language model."""
    if not hasattr(model, "generate"):
        return False
    if encoder_of(model) is not None:
        return True
    if not isinstance(target, str) or target.isdecimal() or target in tokenizer.get_vocab():
        return False
    pieces = tokenizer.tokenize(target)
    return len(pieces) > 1 and tokenizer.unk_token not in pieces


def default_position(model: nn.Module, name_or_path: str) -> Any:
    """Return what the pooling of a sentence encoder reads; None for another model, whose head decides."""
    poolings = [] if isinstance(model, SentenceEncoder) else load_poolings(name_or_path)
    if not poolings:
        return None
    position = outputs.POOLINGS.get(poolings[0]) if len(poolings) == 1 else None
    if position not in ("first", "last", "mean"):
        pooling = " and ".join(poolings)
        raise InvalidInputError(
            f"the pooling of {name_or_path} is {pooling}, not one position; choose a position, such as mean"
        )
    return position


def _names_of(target: Any) -> list[str]:
    """Return the names in a target."""
    parts = (target.target, target.other) if isinstance(target, outputs.Difference) else (target,)
    return [part for part in parts if isinstance(part, str)]


def numbered(model: Any, tokenizer: Any, target: Any) -> Any:
    """Replace the names in a target by the numbers of these outputs."""
    if isinstance(target, outputs.Difference):
        return outputs.Difference(numbered(model, tokenizer, target.target), numbered(model, tokenizer, target.other))
    return _output_number(model, tokenizer, target) if isinstance(target, str) else target


def _output_number(model: Any, tokenizer: Any, name: str) -> int:
    """Return the index of an output by its number, text, label or token."""
    # Only the right kind is looked up: a misspelt label may be a token, and language models have labels, too.
    if isinstance(model, SentenceEncoder) and name in model.texts:
        return model.texts.index(name)
    kind = type(model).__name__
    labelled = class_of(model).__name__.endswith(outputs.LABELLED)
    labels = {label: number for number, label in model.config.id2label.items()} if labelled else {}
    if name in labels:
        return int(labels[name])
    try:
        return int(name)
    except ValueError:
        pass
    if labels:
        raise InvalidInputError(
            f"got the target {name}, which is no number and no label of {kind}; its labels are {', '.join(labels)}"
            f"{did_you_mean(name, labels)}"
        )
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise InvalidInputError(
            f"got the target {name}, but the outputs of {kind} are neither labels nor tokens; give the number of one"
        )
    pieces = [name] if name in tokenizer.get_vocab() else tokenizer.tokenize(name)
    if len(pieces) != 1 or tokenizer.unk_token in pieces:
        raise InvalidInputError(
            f"got the target {quoted(name)}, which is neither a number nor a single token of {kind}; give one token or "
            "its number, or explain an answer of several tokens by GenerationAttribution"
        )
    return int(tokenizer.convert_tokens_to_ids(pieces[0]))

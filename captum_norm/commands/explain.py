"""Runs ``captum-norm explain``, which shows how much each token of a text, or of a prompt, contributes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from captum_norm.bars import progress
from captum_norm.commands import shared
from captum_norm.commands.models import verification
from captum_norm.commands.program import Command, Options, argument, option
from captum_norm.errors import InvalidInputError, UnsupportedModelError
from captum_norm.loading import DEFAULT_MODEL, LANGUAGE_MODEL
from captum_norm.methods import METHODS
from captum_norm.text.lines import read_text

if TYPE_CHECKING:
    from captum_norm.explanation import Explanation
    from captum_norm.generation import GenerationResult
    from captum_norm.results.components import ComponentScores

_NOT_OF_ANSWERS = ("against", "layer", "position", "scope", "aggregation", "words", "lines")
_OF_ANSWERS = ("generate", "chat", "response", "segments", "contrast", "context")
_NOT_OF_COMPONENTS = ("layer", "scope", "aggregation", "words", *_OF_ANSWERS)
_OF_COMPONENTS = ("decompx", "cp-lrp", "attnlrp", "relp", "gim", "alti-logit", "gradient")


@dataclass(frozen=True, kw_only=True)
class Answers(Options, title="generated text: the text is a prompt, and the answer of a language model is explained"):
    """The answer that is explained."""

    generate: int | None = option(
        "generate an answer of at most N tokens, greedily", parse=shared.positive, metavar="N"
    )
    chat: Path | None = option(
        'a conversation to use as the prompt instead of the text, [{"role": "user", "content": "…"}, …]',
        metavar="FILE.json",
    )
    response: Path | None = option("what a server answered: a file with request and response", metavar="FILE.json")
    choice: int = option("which of the answers in the response, counted from 0", 0, parse=shared.natural, metavar="N")
    max_gap: float = option("refuse a response farther from the model's log-probabilities", 0.5, metavar="NATS")
    segments: Literal["word", "sentence", "line", "paragraph", "message"] | None = option(
        "also score these parts of the prompt as a whole"
    )
    contrast: str | None = option(
        "explain why the answer begins to differ from this one, with a method that explains outputs", metavar="TEXT"
    )
    context: str | None = option("also say which tokens depend on this part of the prompt", metavar="TEXT|FILE")


@dataclass(frozen=True, kw_only=True)
class Inside(Options, title="components: what parts of the model contribute, instead of tokens"):
    """The components that are explained."""

    components: tuple[str, ...] | None = option(
        "explain heads, feed_forward, residual, neurons, experts or edges, several with commas; by --method decompx, "
        "cp-lrp, attnlrp, relp, gim, alti-logit or gradient",
        parse=lambda text: tuple(text.split(",")),
        metavar="KIND,...",
    )
    counterfactual: str | None = option(
        "estimate how the output changes if components had their activations for this text, of as many tokens",
        metavar="TEXT",
    )


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(shared.Subject, Answers, Inside):
    """The options of ``captum-norm explain``."""

    texts: list[str] = argument(
        "the text to explain, a file that contains it, or - for standard input; several are explained one by one; "
        "the prompt, if an answer is explained",
        [],
        metavar="TEXT|FILE",
        nargs="*",
    )
    text: bool = shared.text_option()
    lines: bool = option("explain each line of a file as a text of its own", False)
    method: str = option(
        f"the method: {', '.join(METHODS)}, gradient for components, or package.module:Class for one of your own",
        "norm",
        parse=lambda text: text if text == "gradient" else shared.method_name(text),
        metavar="NAME",
    )
    scope: str | None = option(
        "how far to follow the vectors through the layer: attn, attn_res or attn_res_ln for norm; atb, atb_ln, atb_ff, "
        "atb_ff_res or atb_ff_res_ln for attention-block; attn or attn_res for weights (default: the first); other "
        "methods have none"
    )
    layer: int | None = option(
        "explain one layer, counted from 0, or from -1 backwards (default: all layers together)", metavar="N"
    )
    position: int | str | None = option(
        "the output position to explain, counted from 0, or from -1 backwards (default: the one that the model's head "
        "reads)",
        parse=shared.index_or("first", "last", "mean"),
        metavar="N|first|last|mean",
    )
    aggregation: Literal["rollout", "product", "mean"] | None = option(
        "how to combine the layers (default: mean for weights and in causal models, product for globenc, else rollout; "
        "rollout, alti-logit, decompx, cp-lrp, attnlrp and gim have no choice)"
    )
    words: bool = option("show words instead of tokens, with the sums of their tokens' scores", False)
    top: int | None = option("print only the N tokens with the highest scores", parse=shared.positive, metavar="N")
    out: list[Path] = shared.out_option(".png", ".html", ".json", ".csv")

    def has_page(self) -> bool:
        """Whether a page is written."""
        return any(path.suffix.lower() == ".html" for path in self.out)


def _run(options: ExplainOptions) -> None:
    from captum_norm.explanation.run import is_answer

    result: Any
    page: Any
    given, loaded, texts = [shared.given_text(word, is_text=options.text) for word in options.texts], None, list[str]()
    _check_components(options)
    answered = any(getattr(options, name) is not None for name in _OF_ANSWERS)
    if (answered or options.components is not None) and options.model == DEFAULT_MODEL:  # it has no output
        options = replace(options, model=LANGUAGE_MODEL)
    if options.components is None and not answered:
        texts, loaded = _texts(options, given), options.load(answers=True)
    if options.components is not None:
        result = page = _components(options, _texts(options, given))
    elif loaded is None or (options.against is None and is_answer(*loaded, options.target)):
        result = page = _answer(options, given, loaded)
    else:
        page = _explanation(options, texts, *loaded)  # which has both, tokens and words
        result = page.words() if options.words else page
    shared.show(result, options.out, page=page, top=options.top)
    if options.model not in (DEFAULT_MODEL, LANGUAGE_MODEL):
        from captum_norm.commands.terminal import Terminal

        Terminal(stderr=True).say(verification(options.model))


def _check_components(options: ExplainOptions) -> None:
    if options.components is None:
        if options.counterfactual is not None or options.method == "gradient":
            wrong = "method gradient" if options.counterfactual is None else "counterfactual"
            raise InvalidInputError(f"got --{wrong} without --components; say --components heads, for example")
        return
    if options.method not in _OF_COMPONENTS:
        expected = ", ".join(_OF_COMPONENTS)
        raise InvalidInputError(f"got --components with the method {options.method}; expected --method {expected}")
    for name in _NOT_OF_COMPONENTS:
        if getattr(options, name) not in (None, False):
            raise InvalidInputError(f"got --{name} with --components; leave it out")


def _components(options: ExplainOptions, texts: list[str]) -> "ComponentScores":
    """Explain what components of the model contribute to an output of each text."""
    from captum_norm import ComponentAttribution
    from captum_norm.explanation.run import numbered
    from captum_norm.lab.comparison.methods import make_method
    from captum_norm.models.objects import tokenized

    model, tokenizer = options.load()
    named = {"tokenizer": tokenizer}
    method = model if options.method == "gradient" else make_method(options.method, model, options=named)
    listed = [texts] if options.counterfactual is None else [texts, [options.counterfactual]]
    inputs, *others = [tokenized(model, some, tokenizer) for some in listed]
    sizes = [" × ".join(map(str, encoded["input_ids"].shape)) for encoded in (inputs, *others)]
    if len(set(sizes)) > 1:
        raise InvalidInputError(f"got a counterfactual of {sizes[1]} texts × tokens for {sizes[0]}; expected as many")
    where: dict[str, Any] = {"position": options.position, "components": options.components}
    where |= {"target": numbered(model, tokenizer, options.named_target()), "counterfactual": next(iter(others), None)}
    attribution = ComponentAttribution(method, tokenizer=tokenizer)
    with progress(terminal_only=True):
        try:
            scores: ComponentScores = attribution.attribute(inputs, **where, promoted=5)
        except UnsupportedModelError:  # of models and components that write to no vocabulary directly
            scores = attribution.attribute(inputs, **where)
    return replace(scores, model=options.model)


def _explanation(options: ExplainOptions, texts: list[str], model: Any, tokenizer: Any) -> "Explanation":
    """Explain the texts; for a page with what it shows beside."""
    from captum_norm.explanation import explain
    from captum_norm.explanation.run import default_position

    position: Any = options.position
    if position is None and METHODS[options.method].maps:
        position = default_position(model, options.model)
    settings = {"target": options.named_target(), "scope": options.scope, "aggregation": options.aggregation}
    with progress(terminal_only=True):
        return explain(
            texts,
            model,
            tokenizer,
            method=options.method,
            position=position,
            layer=options.layer,
            name=options.model,
            page=options.has_page(),
            **{name: value for name, value in settings.items() if value is not None},
        )


def _texts(options: ExplainOptions, given: list[str]) -> list[str]:
    """Return the texts; with ``--lines`` each line that is not blank is one."""
    if not given:
        raise InvalidInputError("got no text; give a text, a file with it, or - for standard input")
    texts = [text.strip() for text in given]
    if options.lines:
        texts = [line.strip() for text in texts for line in text.split("\n") if line.strip()] or [""]
    if len(texts) > 1 and any(path.suffix.lower() == ".png" for path in options.out):
        raise InvalidInputError(f"got {len(texts)} texts and a .png file, which shows one; write .html, .json or .csv")
    return texts


def _answer(options: ExplainOptions, given: list[str], loaded: Any) -> "GenerationResult":
    """Explain an answer to a prompt or a conversation."""
    _check_answer(options)
    prompt = _prompt(options, given)
    model, tokenizer = loaded or options.load(answers=True)
    with progress(terminal_only=True):
        return explain_answer(options, prompt, model, tokenizer)


def explain_answer(options: ExplainOptions, prompt: Any, model: Any, tokenizer: Any) -> "GenerationResult":
    """Explain an answer to a prompt, or the content of a response."""
    from captum_norm.explanation.run import LEAST_IMPORTANCE
    from captum_norm.generation import GenerationAttribution, read_response
    from captum_norm.lab.comparison.methods import make_method

    method = make_method(options.method, model, tokenizer=tokenizer, keep_special=False, batch_size=16)
    followed = options.method == "information-flow" and options.has_page()
    response = None if options.response is None else read_response(prompt, tokenizer, choice=options.choice)
    result: GenerationResult = GenerationAttribution(method, tokenizer).attribute(
        prompt if response is None else response.prompt,
        options.target if response is None else response.answer,
        gen_args=options.generate and {"max_new_tokens": options.generate, "do_sample": False},
        segments=options.segments,
        contrast=options.contrast,
        context=options.context and shared.given_text(options.context, is_text=options.text).strip(),
        graph_threshold=LEAST_IMPORTANCE if followed else None,
    )
    result.explained = replace(result.explained, model=options.model, method=options.method)
    return result if response is None else response.checked(result, options.max_gap)


def _check_answer(options: ExplainOptions) -> None:
    if [options.generate, options.target, options.response].count(None) != 2:
        raise InvalidInputError("give either --generate N or --target TEXT, or --response FILE.json, for the answer")
    if options.chat is not None and options.texts:
        raise InvalidInputError("got a text and --chat; the conversation is the prompt: leave the text out")
    if options.response is not None and (options.chat or options.texts):
        raise InvalidInputError("got a prompt and --response; the file has the prompt: leave it out")
    for name in _NOT_OF_ANSWERS:
        if getattr(options, name) not in (None, False):
            raise InvalidInputError(f"got --{name} with an answer, whose tokens are what is explained; leave it out")
    if len(options.texts) > 1:
        raise InvalidInputError("got several texts with an answer; give one prompt")


def _prompt(options: ExplainOptions, given: list[str]) -> Any:
    """The text of the prompt, the conversation, or the content of the response."""
    from captum_norm.generation.responses import parsed

    if (file := options.response or options.chat) is not None:
        return parsed(read_text(file), str(file))
    if not given:
        raise InvalidInputError("got no prompt; give a text, a file with it, or --chat FILE.json")
    # The last line of a file ends, the prompt does not.
    return given[0].removesuffix("\n")


COMMAND = Command(
    "explain",
    "show how much each token of a text contributes",
    ExplainOptions,
    _run,
    example='captum-norm explain "A man is playing a guitar on stage." --layer 4 --out guitar.html',
    common=("method", "target", "layer", "model", "generate", "segments", "components", "words", "top", "out"),
)

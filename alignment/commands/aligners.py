"""Declares how alignments are extracted from one translation model or two, and builds the aligner."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from alignment import symmetrization
from alignment.commands import models
from alignment.commands.models import ModelOptions, RunOptions
from alignment.recipes import MEAN_ERROR, PIECE_RECIPES, RECIPES, Recipe, read_recipe
from alignment.tokenization import IdentifiedTokenizer
from captum_norm import InvalidInputError
from captum_norm.commands.program import Options, option
from captum_norm.commands.shared import index_or
from captum_norm.methods import METHODS

if TYPE_CHECKING:
    from torch import nn

    from alignment.aligner import Pairs, TextAligner, WordAligner
    from alignment.lexicon import Lexicon

CHECKED = 50
"""How many sentence pairs, the first ones, show whether the sides are exchanged."""

layer_option = partial(option, parse=index_or("auto", "highest-norm"), metavar="N|auto|highest-norm")
HEAD = index_or("auto", "all")
_FAR_BETTER = 1.15
_PARTNERS = {"fr-en": "en-fr", "en-fr": "fr-en"}
_OF_TWO = ("combine", "reverse_data", "reverse_source_prefix", "reverse_layer", "reverse_head")


@dataclass(frozen=True, kw_only=True)
class MapOptions(Options, title="the maps"):
    """The maps that alignments are read from."""

    method: Literal["norm", "attention-block", "weights", "alti", "value-zeroing", "similarity"] | None = option(
        "norms of the vectors that cross-attention sums, norms of the whole attention block, weights, alti or "
        "value-zeroing; of an encoder, these of both sides joined, or the similarity of their states (default: norm; "
        "similarity for an encoder)",
    )
    scope: str | None = option(
        "how far through the layer to go: attn, attn_res or attn_res_ln for norm; attn or attn_res for weights "
        "(default: attn)"
    )
    layer: int | Literal["auto", "highest-norm"] = layer_option(
        "the decoder layer, numbered from 0, or from -1 for the last; auto: the one with the most consistent "
        "alignments of the first sentence pairs; highest-norm: the one with the highest mean",
        "auto",
    )
    setting: Literal["AWI", "AWO", "auto"] = option(
        "AWI: alignment with input, from the step that reads a word; AWO: with output, from the step that emits it; "
        "auto: chosen with the layer",
        "AWI",
    )
    head: int | Literal["auto", "all"] | None = option(
        "one head, numbered like layers; auto: chosen with the layer; all: all heads together (default: auto, but all "
        "for the recipe paper and for maps without heads)",
        parse=HEAD,
        metavar="N|auto|all",
    )
    add_similarity: bool = option(
        "add the similarity of the model's input embeddings to its maps, with the weight that makes the alignments of "
        "the first sentence pairs most consistent; for few sentences or without --lexicon",
        False,
    )


@dataclass(frozen=True, kw_only=True)
class LinkOptions(Options, title="the links"):
    """How maps become links."""

    recipe: Recipe = option(
        "how maps become links; a name, a name with other settings, as in hmm,jump_penalty=0.2, or a file of settings; "
        "the names, with their error rates in %% on three stories in one direction: "
        f"{', '.join(f'{name} {error:.0f}' for name, error in MEAN_ERROR.items())}; paper is that of Kobayashi et al. "
        f"2020; of an encoder's pieces, {', '.join(PIECE_RECIPES)} (default: hmm)",
        RECIPES["hmm"],
        parse=read_recipe,
        metavar="NAME[,KEY=VALUE]|FILE.json",
    )


@dataclass(frozen=True, kw_only=True)
class DirectionOptions(Options, title="the second model, of the opposite direction"):
    """The second model."""

    reverse_model: str | None = option(
        "the model of the opposite direction, or none; a multilingual model serves both directions if "
        "--source-language and --target-language are given. With a recipe that has a null column, such as paper, none "
        "is the default (default: that of a shipped or multilingual model)",
        metavar="NAME_OR_PATH",
    )
    keep_sides: bool = option(
        "align text even if its source and target seem to be swapped, which is otherwise an error; the first pairs "
        f"are checked, if there are at least {CHECKED // 2}",
        False,
    )
    combine: str | None = option(
        "how to combine both models; add and multiply combine their maps, the others their links as Moses does "
        "(default: add; grow-diag with a recipe that has a null column)",
        choices=symmetrization.COMBINATIONS,
    )
    reverse_data: str | None = option("as --data, for the second model (default: --data)", metavar="DIR")
    reverse_source_prefix: str | None = option("as --source-prefix, for the second model", metavar="TEXT")
    reverse_layer: int | Literal["auto", "highest-norm"] | None = layer_option("as --layer (default: --layer)")
    reverse_head: int | Literal["auto", "all"] | None = option("as --head (default: --head)", parse=HEAD, metavar="N")


@dataclass(frozen=True, kw_only=True)
class LexiconOptions(Options, title="the lexicon: links then depend on other sentences, too"):
    """The lexicon of another text."""

    use_lexicon: str | None = option(
        "use counts that extract --save-lexicon wrote for a text of this direction; also for streams", metavar="FILE"
    )

    def load_lexicon(self) -> "Lexicon | None":
        """Read the counts; None if there are none."""
        from alignment.lexicon import Lexicon

        return None if self.use_lexicon is None else Lexicon.load(self.use_lexicon)


@dataclass(frozen=True, kw_only=True)
class OneModelOptions(ModelOptions, MapOptions, LinkOptions, RunOptions):
    """The options that :func:`word_aligner` reads."""


@dataclass(frozen=True, kw_only=True)
class AlignerOptions(ModelOptions, DirectionOptions, LexiconOptions, MapOptions, LinkOptions, RunOptions):
    """The options that :func:`load` reads."""


def word_aligner(
    model: "nn.Module", tokenizer: Any, options: OneModelOptions | AlignerOptions, **further: Any
) -> "WordAligner":
    """Build the aligner of one model, and check its options as far as possible without text."""
    from alignment.aligner import WordAligner, without_head
    from alignment.encoder import EncoderAligner, encoder_of

    encoder = is_encoder(model, options)
    similar = encoder and options.method in (None, "similarity")
    if encoder and options.add_similarity:
        raise InvalidInputError("got --add-similarity for an encoder; give a translation model, or omit it")
    if encoder and (options.setting != "AWI" or (similar and options.scope is not None)):
        raise InvalidInputError("got --setting, or --scope of similarities, for an encoder, which has none; omit it")
    scope = {} if options.scope is None else {"scope": options.scope}
    explained = encoder_of(model) if encoder else without_head(model)
    method = None if similar else METHODS[options.method or "norm"].load()(explained, **scope)
    reach = getattr(method, "scope", None)
    if options.head not in (None, "all") and method is not None and reach != "attn":
        name = options.method or "norm"
        raise InvalidInputError(f'the method {name} has no maps of single heads at the scope "{reach}"; omit --head')
    further |= {"head": options.head, "recipe": options.recipe, "max_tokens": options.max_tokens}
    if encoder:
        aligner: WordAligner = EncoderAligner(model, tokenizer, options.layer, method or "similarity", **further)
    else:
        if options.add_similarity:
            shared: Any = {"recipe": options.recipe, "max_tokens": options.max_tokens}
            further["similarity"] = EncoderAligner(model, tokenizer, source="embeddings", **shared)
        aligner = WordAligner(model, tokenizer, method, options.layer, options.setting, **further)
    if aligner.choice is not None:
        dict(aligner.map_each([(["a"], ["a"])]))
    return aligner


def is_encoder(model: "nn.Module", options: MapOptions) -> bool:
    """Whether an encoder aligns: the model is one, or similarities of its states are asked for."""
    return options.method == "similarity" or not getattr(getattr(model, "config", None), "is_encoder_decoder", True)


def load(
    options: AlignerOptions, device: str, *, count_text: bool | None = False
) -> tuple["TextAligner", dict[str, str | int | None]]:
    """Load one model or two; return the aligner, and what must not change when a run is resumed.

    ``count_text`` is whether the text is its own lexicon; None for two directions whose maps become one.
    """
    from alignment.aligner import BidirectionalAligner
    from alignment.huggingface import HuggingFaceTokenizer

    reverse = None if options.method == "similarity" else _reverse_options(options)
    _check(options, reverse)
    used, lexicon = options.use_lexicon, options.load_lexicon()
    model, tokenizer = models.load(options, device, encoders=True)
    if reverse is not None and is_encoder(model, options):
        raise InvalidInputError(f"got {options.model}, an encoder, which reads both sides; omit --reverse-model")
    identity: dict[str, str | int | None] = dict(models.identity(options, model, tokenizer, device))
    aligner: TextAligner
    if reverse is None:
        aligner = word_aligner(model, tokenizer, options, lexicon=lexicon, count_text=bool(count_text))
        return aligner, identity | {"lexicon": counts(aligner, used)}
    reverse_tokenizer: IdentifiedTokenizer
    if reverse.model == options.model and isinstance(tokenizer, HuggingFaceTokenizer):
        reverse_model, reverse_tokenizer = model, tokenizer.reversed(reverse.source_prefix or "")
    else:
        reverse_model, reverse_tokenizer = models.load(reverse, device)
    forward = word_aligner(model, tokenizer, options)
    backward = word_aligner(reverse_model, reverse_tokenizer, reverse)
    both = BidirectionalAligner(forward, backward, options.combine, lexicon=lexicon, count_text=count_text)
    names = models.identity(reverse, reverse_model, reverse_tokenizer, device)
    identity |= {f"reverse_{name}": value for name, value in names.items()} | {"combine": both.combine}
    return both, identity | {"lexicon": counts(both, used)}


def counts(aligner: "TextAligner", used: str | None) -> str | None:
    """What word pairs take part in the links."""
    counts = ["the text"] * aligner.count_text
    if used is not None:
        counts.append(blake2b(Path(used).read_bytes(), digest_size=16).hexdigest())
    return " and ".join(counts) or None


def _reverse_options(options: AlignerOptions) -> AlignerOptions | None:
    """The options of the second model; None for none."""
    name = options.reverse_model
    if name is None and not options.recipe.null:
        multilingual = options.source_language and options.target_language
        name = _PARTNERS.get(options.model) or (options.model if multilingual else None)
    if name in (None, "none"):
        return None
    return replace(
        options,
        model=name,
        codes=options.codes and options.codes[::-1],
        source_language=options.target_language,
        target_language=options.source_language,
        source_prefix=options.reverse_source_prefix,
        data=options.data if options.reverse_data is None else options.reverse_data,
        layer=options.layer if options.reverse_layer is None else options.reverse_layer,
        head=options.head if options.reverse_head is None else options.reverse_head,
    )


def _check(options: AlignerOptions, reverse: AlignerOptions | None) -> None:
    if reverse is None:
        for name in _OF_TWO:
            if getattr(options, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise InvalidInputError(f"got {flag} and only one model; give the other one with --reverse-model")
    # A shipped model refuses itself by its languages.
    elif (
        reverse.model == options.model
        and reverse.model not in _PARTNERS
        and not (options.source_language and options.target_language)
    ):
        raise InvalidInputError(
            f"got the same model for both directions, {options.model}; give a multilingual one's --source-language and "
            "--target-language, or the model of the opposite direction"
        )


def identity(options: AlignerOptions, aligner: "TextAligner") -> dict[str, str | int | None]:
    """What else must not change when a run is resumed: the method, the choices of maps and the recipe."""
    (forward, _), *_ = aligner.directions
    chosen = [part.choice for part, _ in aligner.directions]
    return {
        "method": (options.method or ("norm" if forward.method is not None else "similarity"))
        + " + similarity" * options.add_similarity,
        "scope": getattr(forward.method, "scope", None),
        "maps": None if None in chosen else ", ".join(map(str, chosen)),
        "recipe": str(forward.recipe),
        "max_tokens": options.max_tokens,
    }


def choose(aligner: "TextAligner", pairs: "Pairs", report: Callable[[str], None] | None) -> None:
    """Let one aligner or two choose what was left open from sentence pairs, if there are any; report the choice."""
    for name, (part, exchanged) in zip(("forward", "reverse"), aligner.directions, strict=False):
        if part.choice is None and pairs:
            choice = part.choose([(target, source) for source, target in pairs] if exchanged else pairs)
            if report is not None:
                report(f"{name}: chose {choice}" if aligner.both_directions else f"chose {choice}")


def check_sides(aligner: "TextAligner", pairs: "Pairs") -> None:
    """Refuse sentence pairs whose sides look exchanged: words agree far better when the models read them so."""
    from alignment.decoding import mutual_argmax
    from alignment.documents import in_proportion
    from alignment.selection import consistency

    sample = [pair for pair in in_proportion(pairs) if all(pair)][:CHECKED]
    exchanged = [(target, source) for source, target in sample]
    if len(sample) < CHECKED // 2:
        return

    def agreement(part: "WordAligner", read: "Pairs") -> float:
        maps = {index: answer for index, answer in part.map_each(read) if not isinstance(answer, InvalidInputError)}
        links = [mutual_argmax(word_map, null=part.recipe.null) for word_map in maps.values()]
        return consistency(links, *zip(*(read[index] for index in maps), strict=True)) if maps else 0.0

    as_given = as_exchanged = 0.0
    for part, turned in aligner.directions:
        as_given += agreement(part, exchanged if turned else sample)
        as_exchanged += agreement(part, sample if turned else exchanged)
    if as_exchanged > _FAR_BETTER * as_given:
        raise InvalidInputError(
            f"got sides that look exchanged: their words agree with each other by {as_given:.2f} as given, and by "
            f"{as_exchanged:.2f} with source and target exchanged; exchange the files, or give --keep-sides if they "
            "are right"
        )


def page(aligner: "TextAligner", pairs: "Pairs", facts: Mapping[str, str], **settings: Any) -> bytes:
    """Render the page of the first sentence pairs, or sections of them; see :func:`alignment.pages.aligner_page`."""
    from alignment.pages import aligner_page
    from captum_norm.show import render_page

    sections = [section.words for section in aligner.cut(pairs)]
    return render_page(aligner_page(aligner, sections, facts=facts, **settings)).encode()

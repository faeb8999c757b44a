"""Declares the options for a second model, of the opposite direction, and for a lexicon; builds the aligner."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment.commands import aligners, models
from alignment.symmetrization import COMBINATIONS
from alignment.tokenization import IdentifiedTokenizer
from captum_norm import InvalidInputError

if TYPE_CHECKING:
    from alignment.aligner import Pairs, TextAligner, WordAligner
    from alignment.lexicon import Lexicon

NONE = "none"
CHECKED = 50
"""How many sentence pairs, the first ones, show whether the sides are exchanged."""

_FAR_BETTER = 1.15
_PARTNERS = {"fr-en": "en-fr", "en-fr": "fr-en"}
_FURTHER = ("data", "source_prefix", "layer", "head")


def add_arguments(parser: argparse.ArgumentParser, *, counting: bool = True) -> None:
    """Declare the options that :func:`load` reads.

    Args:
        parser: the parser of the command.
        counting: whether the command can count the words that its text links.
    """
    group = parser.add_argument_group("the second model, of the opposite direction")
    group.add_argument(
        "--reverse-model",
        metavar="NAME_OR_PATH",
        help="a model that translates the target into the source, given as for --model, or none; the same multilingual "
        "model may serve both (default: that of a shipped model, or the same model if --source-language and "
        "--target-language are given; none with a recipe that has a null column, such as paper)",
    )
    group.add_argument(
        "--keep-sides",
        action="store_true",
        help="align text whose source and target look exchanged, which is otherwise an error; the first pairs are "
        f"looked at, if there are at least {CHECKED // 2}",
    )
    group.add_argument(
        "--combine",
        choices=COMBINATIONS,
        help="add or multiply the maps of both; mutual: the links that are most probable in both directions; the "
        "others merge the links of both as Moses does (default: add; grow-diag with a recipe that has a null column)",
    )
    group.add_argument("--reverse-data", metavar="DIR", help="as --data, for the second model (default: --data)")
    group.add_argument("--reverse-source-prefix", metavar="TEXT", help="as --source-prefix, for the second model")
    group.add_argument("--reverse-layer", type=aligners.LAYER, metavar="N", help="as --layer (default: --layer)")
    group.add_argument("--reverse-head", type=aligners.HEAD, metavar="N", help="as --head (default: --head)")
    lexicon = parser.add_argument_group("the lexicon; the links then hold statistics of other sentences")
    lexicon.add_argument(
        "--use-lexicon",
        metavar="FILE",
        help="use what extract --save-lexicon wrote for another text of the same direction; also for streams",
    )
    if counting:
        lexicon.add_argument(
            "--lexicon",
            action="store_true",
            help="first count which words the whole text links, and use the counts",
        )
        lexicon.add_argument("--save-lexicon", metavar="FILE", help="with --lexicon: also write the counts to FILE")
    else:
        parser.set_defaults(lexicon=False, save_lexicon=None)


def load(options: argparse.Namespace, device: str) -> tuple["TextAligner", dict[str, str | int | None]]:
    """Load one model or two, and build the aligner.

    Returns:
        The aligner, and what must not change when a run is resumed.

    Raises:
        CaptumNormError: a model or lexicon cannot be loaded, the two models do not belong together, or an option does
            not apply.
    """
    from alignment.aligner import BidirectionalAligner

    reverse = _reverse_options(options)
    _check(options, reverse)
    lexicon: dict[str, Any] = {"lexicon": _lexicon(options), "count_text": options.lexicon}
    model, tokenizer = models.load(options, device)
    identity: dict[str, str | int | None] = dict(models.identity(options, model, tokenizer, device))
    identity |= {"lexicon": _identity_of(options)}
    if reverse is None:
        return aligners.word_aligner(model, tokenizer, options, **lexicon), identity
    other_tokenizer: IdentifiedTokenizer
    if reverse.model == options.model and options.source_language:
        from alignment.huggingface import HuggingFaceTokenizer

        assert isinstance(tokenizer, HuggingFaceTokenizer)
        other, other_tokenizer = model, tokenizer.reversed(reverse.source_prefix or "")
    else:
        other, other_tokenizer = models.load(reverse, device)
    forward = aligners.word_aligner(model, tokenizer, options)
    backward = aligners.word_aligner(other, other_tokenizer, reverse)
    combine = options.combine or ("grow-diag" if forward.recipe.null else "add")
    aligner = BidirectionalAligner(forward, backward, combine, **lexicon)
    names = models.identity(reverse, other, other_tokenizer, device)
    identity |= {f"reverse_{name}": value for name, value in names.items()} | {"combine": combine}
    return aligner, identity


def choose(aligner: "TextAligner", pairs: "Pairs", report: Callable[[str], None] | None) -> None:
    """Let one aligner or two choose what was left open from sentence pairs, and report the choice."""
    for number, (one, turned) in enumerate(parts(aligner)):
        own = [(target, source) for source, target in pairs] if turned else pairs
        name = "" if len(parts(aligner)) == 1 else ("forward", "reverse")[number]
        aligners.choose(one, own, report, name)


def check_sides(aligner: "TextAligner", pairs: "Pairs") -> None:
    """Refuse sentence pairs whose sides look exchanged: words agree far better when the models read them so.

    Compares :func:`alignment.consistency` of the links of :data:`CHECKED` pairs; fewer than half as many say nothing.

    Raises:
        InvalidInputError: the sides look exchanged.
    """
    from alignment.decoding import mutual_argmax
    from alignment.selection import consistency

    sample = [pair for pair in pairs if all(pair)][:CHECKED]
    exchanged = [(target, source) for source, target in sample]
    if len(sample) < CHECKED // 2:
        return

    def agreement(one: "WordAligner", turned: "Pairs") -> float:
        maps = {index: found for index, found in one.map_each(turned) if not isinstance(found, InvalidInputError)}
        links = [mutual_argmax(word_map, null=one.recipe.null) for word_map in maps.values()]
        return consistency(links, *zip(*(turned[index] for index in maps), strict=True)) if maps else 0.0

    given = other = 0.0
    for one, turned in parts(aligner):
        given += agreement(one, exchanged if turned else sample)
        other += agreement(one, sample if turned else exchanged)
    if other > _FAR_BETTER * given:
        raise InvalidInputError(
            f"got sides that look exchanged: their words agree with each other by {given:.2f} as given, and by "
            f"{other:.2f} with source and target exchanged; exchange the files, or give --keep-sides if they are right"
        )


class SideCheck:
    """Calls :func:`check_sides` once, with pairs that come a few at a time."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Sequence[str], Sequence[str]]] = []
        self._done = False

    def __call__(self, aligner: "TextAligner", pairs: "Pairs") -> None:
        """Take further pairs; check the sides as soon as there are enough.

        Raises:
            InvalidInputError: the sides look exchanged.
        """
        if self._done:
            return
        self._pairs += (pair for pair in pairs if all(pair))
        if len(self._pairs) >= CHECKED // 2:
            check_sides(aligner, self._pairs)
            self._pairs, self._done = [], True


def parts(aligner: "TextAligner") -> list[tuple["WordAligner", bool]]:
    """The aligners of one direction, and whether each reads the sides exchanged."""
    from alignment.aligner import BidirectionalAligner, WordAligner

    if isinstance(aligner, BidirectionalAligner):
        return [(aligner.forward, False), (aligner.reverse, True)]
    assert isinstance(aligner, WordAligner)
    return [(aligner, False)]


def _reverse_options(options: argparse.Namespace) -> argparse.Namespace | None:
    """The options of the second model; None for none."""
    name = options.reverse_model
    if name is None and not aligners.recipe_of(options).null:
        multilingual = options.source_language and options.target_language
        name = _PARTNERS.get(options.model) or (options.model if multilingual else None)
    if name in (None, NONE):
        return None
    given = vars(options)
    changed: dict[str, Any] = {
        "model": name,
        "codes": options.codes and options.codes[::-1],
        "source_language": options.target_language,
        "target_language": options.source_language,
        "source_prefix": options.reverse_source_prefix,
    }
    for option in ("data", "layer", "head"):
        changed[option] = given[option] if given[f"reverse_{option}"] is None else given[f"reverse_{option}"]
    return argparse.Namespace(**{**given, **changed})


def _check(options: argparse.Namespace, reverse: argparse.Namespace | None) -> None:
    if reverse is None:
        for name in ("combine", *(f"reverse_{name}" for name in _FURTHER)):
            if getattr(options, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise InvalidInputError(f"got {flag} and only one model; give the other one with --reverse-model")
    elif reverse.model == options.model and not (options.source_language and options.target_language):
        known = reverse.model in _PARTNERS  # which refuses itself by its languages
        if not known:
            raise InvalidInputError(
                f"got the same model for both directions, {options.model}; give a multilingual one's --source-language "
                "and --target-language, or the model of the opposite direction"
            )
    if options.save_lexicon is not None and not options.lexicon:
        raise InvalidInputError("got --save-lexicon without --lexicon, so nothing is counted; add --lexicon")


def _lexicon(options: argparse.Namespace) -> "Lexicon | None":
    from alignment.lexicon import Lexicon

    return None if options.use_lexicon is None else Lexicon.load(options.use_lexicon)


def _identity_of(options: argparse.Namespace) -> str | None:
    """What the lexicon is counted from."""
    used = None
    if options.use_lexicon is not None:
        import hashlib

        used = hashlib.blake2b(Path(options.use_lexicon).read_bytes(), digest_size=16).hexdigest()
    parts = [*(["the text"] if options.lexicon else []), *([used] if used else [])]
    return " and ".join(parts) or None

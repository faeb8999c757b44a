"""Measures alignment error rates of checkpoints of a training, and keeps them in a file."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from torch import nn

from alignment.aer import AER, paired_significance
from alignment.aligner import SAMPLE
from alignment.corpora import ParallelGold
from alignment.fairseq import load_fairseq_checkpoint
from alignment.fairseq.loading import load_shipped_model, shipped_models
from alignment.links import Alignment
from alignment.normalization import Language, NormalizedWords
from alignment.recipes import RECIPES
from alignment.selection import Choice, most_consistent
from alignment.sweep import AttentionMethod, Method, attention_word_maps, maps_to_read
from alignment.word_maps import WordMap
from captum_norm.text.files import write_whole

MODELS = Path(__file__).parents[1] / "captum_norm_models"
SHIPPED = "shipped"
SHIPPED_UPDATES = 4000
DIRECTIONS = ("fr-en", "en-fr")
READ: Mapping[str, bool] = {"paper": False, "hmm": True}
"""The recipes, and whether one head is read instead of all heads of a layer."""


@dataclass(frozen=True)
class Trained:
    """A model at some point of its training.

    Attributes:
        training: the name of the training.
        direction: source and target language.
        layers: of the decoder, and as many of the encoder.
        width: of the model.
        parameters: their number.
        updates: of the parameters.
        digest: a hash of the file.
    """

    training: str
    direction: str
    layers: int
    width: int
    parameters: int
    updates: int
    digest: str


@dataclass(frozen=True)
class Rate:
    """The place that was read, without gold alignments, and its error rate ± half the 95 % interval."""

    place: str
    aer: float
    interval: float

    def __str__(self) -> str:
        return f"{self.aer:.1f} ± {self.interval:.1f}"


@dataclass(frozen=True)
class Measurement:
    """Norms and weights of one model on one corpus by one recipe, and the p-value of their difference."""

    model: Trained
    corpus: str
    recipe: str
    norms: Rate
    weights: Rate
    p: float


@dataclass(frozen=True)
class Source:
    """A file with the weights of a model.

    Attributes:
        training: the name of the training, or ``shipped``.
        path: the file.
        updates: of the parameters.
    """

    training: str
    path: Path
    updates: int

    def digest(self) -> str:
        """Return a hash of the file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    def load(self) -> tuple[nn.Module, NormalizedWords]:
        """Load the model and its tokenizer."""
        if self.training == SHIPPED:
            return load_shipped_model(self.path.parent.name)
        model, plain = load_fairseq_checkpoint(self.path, MODELS)
        return model, NormalizedWords(plain, *map(_language, (plain.source_language, plain.target_language)))


def _language(code: str) -> Language:
    known: dict[str, Language] = {language: language for language in get_args(Language)}
    if code not in known:
        raise SystemExit(f"got a model of {code}; expected one of {' and '.join(known)}")
    return known[code]


def sources(trainings: Sequence[Path]) -> list[Source]:
    """Return the shipped models, and the checkpoints of every training in the order of their updates."""
    found = [Source(SHIPPED, MODELS / name / "model.safetensors", SHIPPED_UPDATES) for name in shipped_models()]
    for folder in trainings:
        named = {path: re.fullmatch(r"checkpoint_\d+_(\d+)\.pt", path.name) for path in folder.glob("*.pt")}
        saved = [Source(folder.name, path, int(match[1])) for path, match in named.items() if match is not None]
        if not saved:
            raise SystemExit(f"got the training {folder}, expected a folder with files such as checkpoint_1_250.pt")
        found += saved
    return sorted(found, key=lambda source: source.updates)


def joined(name: str, corpora: Sequence[ParallelGold]) -> ParallelGold:
    """Return several corpora of one direction as one."""
    languages = corpora[0].source_language, corpora[0].target_language
    fields = ("sources", "targets", "gold")
    parts = ([entry for corpus in corpora for entry in getattr(corpus, field)] for field in fields)
    return ParallelGold(name, *languages, *parts)


def measured(source: Source, digest: str, corpora: Sequence[ParallelGold]) -> Iterator[Measurement]:
    """Measure a model on every corpus by every recipe."""
    if not corpora:
        return
    model, tokenizer = source.load()
    config: Any = model.config
    trained = Trained(
        source.training,
        f"{tokenizer.source_language}-{tokenizer.target_language}",
        config.decoder_layers,
        config.d_model,
        sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        source.updates,
        digest,
    )
    for corpus in corpora:
        turned = corpus if corpus.source_language == tokenizer.source_language else corpus.swapped()
        pairs = list(zip(turned.sources, turned.targets, strict=True))
        maps = attention_word_maps(model, tokenizer, pairs)
        for recipe in READ:
            norms, weights = (aligned(turned, maps, method, recipe) for method in ("norm", "weights"))
            p = paired_significance(norms[1], [weights[1]], turned.gold).p_values[0]
            yield Measurement(trained, corpus.name, recipe, rate(turned, *norms), rate(turned, *weights), round(p, 4))


def aligned(
    corpus: ParallelGold,
    maps: Mapping[tuple[Method, Choice], Sequence[WordMap]],
    method: AttentionMethod,
    recipe: str,
) -> tuple[Choice, list[Alignment]]:
    """Return the place that a method chooses by its own maps, and the alignments there."""
    candidates = {
        place: stack[:SAMPLE]
        for (kind, place), stack in maps.items()
        if kind == method and (place.head is not None) == READ[recipe]
    }
    place = most_consistent(candidates, corpus.sources[:SAMPLE], corpus.targets[:SAMPLE])
    read = maps_to_read(maps, method, place, RECIPES[recipe])
    return place, [RECIPES[recipe](pair, place.setting) for pair in read]


def rate(corpus: ParallelGold, place: Choice, alignments: Sequence[Alignment]) -> Rate:
    """Score alignments."""
    score = AER([corpus.gold]).corpus_score(alignments, None, 1000)
    assert score.interval is not None
    return Rate(str(place), round(score.aer, 3), round(score.interval, 3))


def read_measurements(path: Path) -> list[Measurement]:
    """Read what was measured before; nothing if there is no file."""
    records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return [
        Measurement(
            **record
            | {"model": Trained(**record["model"])}
            | {method: Rate(**record[method]) for method in ("norms", "weights")}
        )
        for record in records
    ]


def write_measurements(path: Path, found: Sequence[Measurement]) -> None:
    """Write all measurements, one a line."""
    ordered = sorted(found, key=lambda one: (*order(one), one.model.updates, one.corpus, one.recipe))
    lines = ",\n".join(json.dumps(asdict(one)) for one in ordered)
    write_whole(path, f"[\n{lines}\n]\n".encode())


def order(one: Measurement) -> tuple[int, int, int, str]:
    """Return what identifies a training: direction, width, layers and name."""
    return DIRECTIONS.index(one.model.direction), one.model.width, one.model.layers, one.model.training


def completed(path: Path, trainings: Sequence[Path], corpora: Sequence[ParallelGold]) -> list[Measurement]:
    """Measure what the file lacks, and write it after each model; return everything.

    Measurements of a file that has changed since are replaced.
    """
    found = read_measurements(path)
    for source in sources(trainings):
        digest = source.digest()
        state = source.training, source.updates, digest
        done = {one.corpus for one in found if (one.model.training, one.model.updates, one.model.digest) == state}
        new = list(measured(source, digest, [corpus for corpus in corpora if corpus.name not in done]))
        if new:
            found = [one for one in found if not outdated(one.model, new[0].model)] + new
            write_measurements(path, found)
        for one in new:
            print(f"{source.path} on {one.corpus}, {one.recipe}: {one.norms} / {one.weights}", flush=True)
    return read_measurements(path)


def outdated(old: Trained, new: Trained) -> bool:
    """Whether a model was at the same point of the same training as a new one, and differs from it."""
    points = ((model.training, model.direction, model.updates) for model in (old, new))
    return old.digest != new.digest and len(set(points)) == 1

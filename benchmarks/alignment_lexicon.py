"""The section on corpus statistics of the page of alignment error rates, see :mod:`benchmarks.alignment_error`."""

import re
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from alignment import AER, Alignment, BidirectionalAligner, EncoderAligner, Lexicon, WordAligner, load_shipped_model
from alignment.aligner import Pairs, TextAligner, without_head
from alignment.corpora import ParallelGold
from alignment.word_maps import WordMap
from benchmarks import eflomal
from captum_norm import AttentionWeights, InvalidInputError, NormAttribution

HEADING = "## Corpus statistics"
NOTE = """\
Norms / weights; one head, chosen without gold alignments, and the recipe `hmm`. The rows named *lexicon* multiply in
[counts of word pairs](alignment.md#the-text-as-its-own-lexicon), of the text alone or of all these texts together;
*similarity* adds that of the [models' input embeddings](how-to/which-aligner.md#norms-and-similarity-added). Rows of
eflomal [Östling & Tiedemann 2016] name what it was trained on; they have the links that both of its directions find,
which are better here than those of either. Seconds of processor time are for all texts together, from text to links,
loading apart. The lexicon's constants were chosen on the three stories; nothing was chosen on WPT03.
"""
METHODS = {"norms": NormAttribution, "weights": AttentionWeights}

System = tuple[str, Sequence[Sequence[Alignment]], float]
"""A name, links of each corpus, and processor seconds."""


class Kept(WordAligner):
    """An aligner that computes the maps of a sentence pair once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.maps: dict[str, WordMap] = {}

    def map_each(self, pairs: Pairs) -> Iterator[tuple[int, WordMap | InvalidInputError]]:
        """Yield the maps, in order."""
        new = [pair for pair in pairs if str(pair) not in self.maps]
        for index, word_map in super().map_each(new):
            assert not isinstance(word_map, InvalidInputError)
            self.maps[str(new[index])] = word_map
        yield from ((index, self.maps[str(pair)]) for index, pair in enumerate(pairs))


Ways = tuple[list[Kept], list[Kept]]
"""Aligners of both directions, one for each corpus."""


def section(corpora: Sequence[ParallelGold], stories: Container[str], executable: str | None, data: Path | None) -> str:
    """Align the texts with both shipped models, with a lexicon and without, and with eflomal; return the section."""
    turned = [corpus if corpus.source_language == "fr" else corpus.swapped() for corpus in corpora]
    ours = [list(_systems(method, turned)) for method in METHODS.values()]
    rows = [_row([systems[0][0], *_rates(turned, stories, systems)]) for systems in zip(*ours, strict=True)]
    if executable is not None and data is not None:
        learnt = eflomal.systems(executable, data, turned)
        rows += [_row([system[0], *_rates(turned, stories, [system])]) for system in learnt]
    head = ["system", *(corpus.name for corpus in corpora), "mean", "seconds"]
    lines = [_row(head), _row(["---", *["--:"] * (len(head) - 1)]), *rows]
    return "\n".join([f"{HEADING}\n", NOTE, *lines, ""])


def updated(page: str, text: str) -> str:
    """Replace the section of a page, or add it before the sections of single texts."""
    found = re.search(rf"^{HEADING}\n.*?(?=^## )", page, re.MULTILINE | re.DOTALL)
    second = [match.start() for match in re.finditer("^## ", page, re.MULTILINE)][1]
    start, end = found.span() if found else (second, second)
    return f"{page[:start]}{text}\n{page[end:]}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rates(corpora: Sequence[ParallelGold], stories: Container[str], systems: Sequence[System]) -> list[str]:
    """A cell for each corpus, for the mean over the stories, and for seconds."""
    rates = [
        [AER([corpus.gold]).corpus_score(links[place], None).aer for _, links, _ in systems]
        for place, corpus in enumerate(corpora)
    ]
    told = [rate for corpus, rate in zip(corpora, rates, strict=True) if corpus.name in stories]
    cells = [*rates, [fmean(column) for column in zip(*told, strict=True)]]
    seconds = " / ".join(f"{seconds:.0f}" for _, _, seconds in systems)
    return [*(" / ".join(f"{rate:.1f}" for rate in cell) for cell in cells), seconds]


def _systems(method: Any, corpora: Sequence[ParallelGold]) -> Iterator[System]:
    loaded = [load_shipped_model(name) for name in ("fr-en", "en-fr")]

    def kept(*, similar: bool) -> tuple[Ways, list[float]]:
        """Aligners that have their maps, and the processor seconds of each direction."""
        aligners: Ways = ([], [])
        seconds = list[float]()
        for turned, (model, tokenizer) in enumerate(loaded):
            start = time.process_time()
            for corpus in corpora:
                similarity = EncoderAligner(model, tokenizer, source="embeddings") if similar else None
                options: Any = {"head": "auto", "recipe": "hmm", "similarity": similarity}
                aligner = Kept(model, tokenizer, method(without_head(model)), **options)
                sides = (corpus.targets, corpus.sources) if turned else (corpus.sources, corpus.targets)
                list(aligner.map_each(list(zip(*sides, strict=True))))
                aligners[turned].append(aligner)
            seconds.append(time.process_time() - start)
        return aligners, seconds

    alone, (one, other) = kept(similar=False)
    added, similar = kept(similar=True)
    both = one + other

    def two(**options: Any) -> Callable[[Kept, Kept], TextAligner]:
        return lambda forward, reverse: BidirectionalAligner(forward, reverse, **options)

    systems: Mapping[str, tuple[float, Ways, Callable[[Kept, Kept], TextAligner]]] = {
        "one direction, fr-en": (one, alone, lambda forward, _: forward),
        "one direction, fr-en, lexicon of the text": (one, alone, lambda forward, _: _with_text(forward)),
        "both directions, maps added": (both, alone, two(count_text=False)),
        "both directions, maps multiplied": (both, alone, two(combine="multiply", count_text=False)),
        "both directions, maps and similarity added": (sum(similar), added, two(count_text=False)),
        "both directions, maps added, lexicon of the text": (both, alone, two(count_text=True)),
        "both directions, maps and similarity added, lexicon of the text": (sum(similar), added, two(count_text=True)),
    }
    for name, (before, aligners, build) in systems.items():
        start = time.process_time()
        links = [
            build(*pair).align(corpus.sources, corpus.targets) for corpus, *pair in zip(corpora, *aligners, strict=True)
        ]
        yield name, links, before + time.process_time() - start
    start = time.process_time()
    everything, begun = Lexicon(), []
    for corpus, forward, reverse in zip(corpora, *alone, strict=True):
        combined = BidirectionalAligner(forward, reverse, count_text=False)
        pairs = list(zip(corpus.sources, corpus.targets, strict=True))
        for index, word_map in combined.map_each(pairs):
            assert not isinstance(word_map, InvalidInputError)
            begun.append((combined, word_map, *pairs[index], combined.counted(word_map)))
            everything.count(*begun[-1][2:])
    found = iter(
        combined.read(word_map, source, target, everything, own).links
        for combined, word_map, source, target, own in begun
    )
    every = [[next(found) for _ in corpus.gold] for corpus in corpora]
    yield "both directions, maps added, lexicon of all texts", every, both + time.process_time() - start


def _with_text(aligner: Kept) -> Kept:
    """The same aligner, with the text as its own lexicon; shares its maps."""
    other = Kept(aligner.model, aligner.tokenizer, aligner.method, head="auto", recipe=aligner.recipe, count_text=True)
    other.maps, other.choice = aligner.maps, aligner.choice
    return other

"""The section on corpus statistics of the page of alignment error rates, see :mod:`benchmarks.alignment_error`."""

import re
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from textwrap import fill
from typing import Any

from alignment import AER, Alignment, BidirectionalAligner, Lexicon, WordAligner, load_shipped_model
from alignment.aligner import without_head
from alignment.corpora import ParallelGold
from alignment.text_aligner import Pairs, TextAligner
from alignment.word_maps import WordMap
from captum_norm import AttentionWeights, InvalidInputError, NormAttribution

HEADING = "## Corpus statistics"
NOTE = """\
Norms / weights; one head, chosen without gold alignments, and the recipe `hmm`. The rows named *lexicon* multiply in
[counts of word pairs](alignment.md#the-text-as-its-own-lexicon): of the text alone, or of all these texts together, as
eflomal above is given them, but without its 100,000 training pairs. The lexicon's constants were chosen on the three
stories; nothing was chosen on WPT03.
"""
METHODS = {"norms": NormAttribution, "weights": AttentionWeights}


class Kept(WordAligner):
    """An aligner that computes the maps of a sentence pair once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.maps: dict[str, WordMap] = {}

    def map_each(self, pairs: Pairs, known: Container[int] = ()) -> Iterator[tuple[int, WordMap | InvalidInputError]]:
        """Yield the maps, in order."""
        new = [pair for pair in pairs if str(pair) not in self.maps]
        for index, word_map in super().map_each(new, known):
            assert not isinstance(word_map, InvalidInputError)
            self.maps[str(new[index])] = word_map
        yield from ((index, self.maps[str(pair)]) for index, pair in enumerate(pairs))


@dataclass
class Times:
    """Processor seconds: of the maps of both models, of reading links off them, and of that with a lexicon."""

    maps: float = 0.0
    reading: float = 0.0
    lexicon: float = 0.0


def section(corpora: Sequence[ParallelGold], stories: Container[str]) -> str:
    """Align the texts with both shipped models, with a lexicon and without; return the section."""
    times, found = Times(), dict[str, dict[str, dict[str, float]]]()
    turned = [corpus if corpus.source_language == "fr" else corpus.swapped() for corpus in corpora]
    for title, method in METHODS.items():
        for corpus, (system, links) in _aligned(method, turned, times):
            rate = AER([corpus.gold]).corpus_score(links, None).aer
            found.setdefault(system, {}).setdefault(corpus.name, {})[title] = rate
    rows = []
    for system, rates in found.items():
        cells = [[rates[corpus.name][title] for title in METHODS] for corpus in corpora]
        told = [cell for corpus, cell in zip(corpora, cells, strict=True) if corpus.name in stories]
        cells.append([fmean(column) for column in zip(*told, strict=True)])
        rows.append([system, *(" / ".join(f"{rate:.1f}" for rate in cell) for cell in cells)])
    pairs = 2 * sum(map(len, corpora))
    head = ["system", *(corpus.name for corpus in corpora), "mean"]
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    share = (times.lexicon - times.reading) / (times.maps + times.reading)
    cost = (
        f"Maps of both directions took {1000 * times.maps / pairs:.1f} ms of processor time a sentence pair, reading "
        f"links {1000 * times.reading / pairs:.1f} ms, and counting and reading with a lexicon "
        f"{1000 * times.lexicon / pairs:.1f} ms: {100 * share:.0f} % more in all."
    )
    return "\n".join([f"{HEADING}\n", NOTE, f"{table}\n", f"{fill(cost, 120)}\n"])


def updated(page: str, text: str) -> str:
    """Replace the section of a page, or add it before the sections of single texts."""
    found = re.search(rf"^{HEADING}\n.*?(?=^## )", page, re.MULTILINE | re.DOTALL)
    second = [match.start() for match in re.finditer("^## ", page, re.MULTILINE)][1]
    start, end = found.span() if found else (second, second)
    return f"{page[:start]}{text}\n{page[end:]}"


def _aligned(
    method: Any, corpora: Sequence[ParallelGold], times: Times
) -> Iterator[tuple[ParallelGold, tuple[str, Sequence[Alignment]]]]:
    loaded = {name: load_shipped_model(name) for name in ("fr-en", "en-fr")}
    everything = Lexicon()
    begun = []
    for corpus in corpora:
        forward, reverse = (
            Kept(model, tokenizer, method(without_head(model)), head="auto", recipe="hmm")
            for model, tokenizer in loaded.values()
        )
        both = BidirectionalAligner(forward, reverse)
        start = time.process_time()
        pairs = list(zip(corpus.sources, corpus.targets, strict=True))
        maps: dict[int, Any] = dict(both.map_each(pairs))
        times.maps += time.process_time() - start
        owns = [both.counted(maps[index]) for index in range(len(pairs))]
        for pair, own in zip(pairs, owns, strict=True):
            everything.count(*pair, own)
        begun.append((corpus, both, maps, owns))
        systems: dict[str, TextAligner] = {
            "one direction, fr-en": forward,
            "one direction, fr-en, lexicon of the text": _with_text(forward),
            "both directions, maps added": both,
            "both directions, maps multiplied": BidirectionalAligner(forward, reverse, "multiply"),
            "both directions, mutual": BidirectionalAligner(forward, reverse, "mutual"),
            "both directions, maps added, lexicon of the text": BidirectionalAligner(forward, reverse, count_text=True),
        }
        for name, system in systems.items():
            start = time.process_time()
            links = system.align(corpus.sources, corpus.targets)
            taken = time.process_time() - start
            times.reading += taken if system is both else 0.0
            times.lexicon += taken if name == "both directions, maps added, lexicon of the text" else 0.0
            yield corpus, (name, links)
    for corpus, both, maps, owns in begun:
        pairs = list(zip(corpus.sources, corpus.targets, strict=True))
        found = [
            both.read(maps[index], *pair, everything, own).links
            for index, (pair, own) in enumerate(zip(pairs, owns, strict=True))
        ]
        yield corpus, ("both directions, maps added, lexicon of all texts", found)


def _with_text(aligner: Kept) -> Kept:
    """The same aligner, with the text as its own lexicon; shares its maps."""
    other = Kept(aligner.model, aligner.tokenizer, aligner.method, head="auto", recipe=aligner.recipe, count_text=True)
    other.maps, other.choice = aligner.maps, aligner.choice
    return other

"""Word alignments by eflomal [Östling & Tiedemann 2016], trained on texts and on the models' own training pairs."""

import resource
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from alignment import Alignment, read_pharaoh
from alignment.corpora import ParallelGold
from alignment.normalization import Language, normalize_word
from alignment.symmetrization import intersection

TRAINING_PAIRS = 100_000
"""How many of the training pairs are given, the first ones."""

LANGUAGES: tuple[Language, Language] = ("fr", "en")

Tokens = list[tuple[str, int]]
"""The tokens of a sentence, and the index of each one's word."""


def systems(
    executable: str, data: Path, corpora: Sequence[ParallelGold]
) -> Iterator[tuple[str, list[Sequence[Alignment]], float]]:
    """Yield what eflomal was trained on, the links that it finds in each corpus, and processor seconds.

    Links are the intersection of both directions.

    Args:
        executable: the program ``eflomal-align``.
        data: what ``benchmarks.translation.prepare`` wrote.
        corpora: French–English corpora.
    """
    alone = [align(executable, [corpus]) for corpus in corpora]
    yield "eflomal, the text", [links for [links], _ in alone], sum(seconds for _, seconds in alone)
    yield "eflomal, all texts", *align(executable, corpora)
    yield f"eflomal, all texts and {TRAINING_PAIRS:,} training pairs", *align(executable, corpora, data)


def align(
    executable: str, corpora: Sequence[ParallelGold], data: Path | None = None
) -> tuple[list[Sequence[Alignment]], float]:
    """Align corpora together, and with training pairs; return the links of each, and processor seconds."""
    both, seconds = directions(executable, corpora, data)
    links = (intersection(*ways) for ways in both)
    return [list(islice(links, len(corpus))) for corpus in corpora], seconds


def directions(
    executable: str, corpora: Sequence[ParallelGold], data: Path | None = None
) -> tuple[list[tuple[Alignment, Alignment]], float]:
    """Align corpora together, and with training pairs; return both directions' links, and processor seconds."""
    pairs = [pair for corpus in corpora for pair in zip(corpus.sources, corpus.targets, strict=True)]
    tokens = [(_tokens(source, "fr"), _tokens(target, "en")) for source, target in pairs]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for side, code in enumerate(LANGUAGES):
            with (folder / code).open("w", encoding="utf-8") as text:
                for both in tokens:
                    text.write(" ".join(token for token, _ in both[side]) + "\n")
                if data is not None:
                    with (data / f"train.{code}").open(encoding="utf-8") as training:
                        text.writelines(islice(training, TRAINING_PAIRS))
        files = ["-s", folder / "fr", "-t", folder / "en", "-f", folder / "forward", "-r", folder / "reverse"]
        before = children_seconds()
        subprocess.run([executable, *map(str, files)], check=True)
        seconds = children_seconds() - before
        forward, reverse = (
            map(_to_words, islice(read_pharaoh(folder / way), len(tokens)), tokens) for way in ("forward", "reverse")
        )
        return list(zip(forward, reverse, strict=True)), seconds


def children_seconds() -> float:
    """Return the processor time of all processes that this one waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _tokens(words: Sequence[str], code: Language) -> Tokens:
    return [(token, index) for index, word in enumerate(words) for token in normalize_word(word, code)]


def _to_words(links: Alignment, tokens: tuple[Tokens, Tokens]) -> Alignment:
    source, target = tokens
    return Alignment({(source[left][1], target[right][1]) for left, right in links})

"""Word alignments by eflomal [Östling & Tiedemann 2016], trained on the models' own training pairs."""

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from alignment import Alignment, read_pharaoh
from alignment.corpora import ParallelGold
from alignment.normalization import Language, normalize_word
from alignment.symmetrization import SYMMETRIZATIONS

Alignments = Sequence[tuple[str, Sequence[Alignment]]]
LANGUAGES: tuple[Language, Language] = ("fr", "en")


def align(executable: str, data: Path, corpora: Sequence[ParallelGold]) -> dict[str, Alignments]:
    """Align each corpus with eflomal, together with the training pairs: forward, reverse and symmetrised."""
    pairs = [pair for corpus in corpora for pair in zip(corpus.sources, corpus.targets, strict=True)]
    owners = [tuple(_tokens(words, code) for words, code in zip(pair, LANGUAGES, strict=True)) for pair in pairs]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for side, code in enumerate(LANGUAGES):
            with (folder / code).open("w", encoding="utf-8") as text:
                for both in owners:
                    text.write(" ".join(token for token, _ in both[side]) + "\n")
                with (data / f"train.{code}").open(encoding="utf-8") as training:
                    shutil.copyfileobj(training, text)
        files = ["-s", folder / "fr", "-t", folder / "en", "-f", folder / "forward", "-r", folder / "reverse"]
        subprocess.run([executable, *map(str, files)], check=True)
        read = [list(islice(read_pharaoh(folder / way), len(owners))) for way in ("forward", "reverse")]
    found = dict[str, Alignments]()
    start = 0
    for corpus in corpora:
        part = slice(start, start + len(corpus))
        start = part.stop
        forward, reverse = (
            [_to_words(links, *both) for links, both in zip(way[part], owners[part], strict=True)] for way in read
        )
        systems = [("eflomal, forward", forward), ("eflomal, reverse", reverse)]
        systems += [
            (f"eflomal, {heuristic}", list(map(SYMMETRIZATIONS[heuristic], forward, reverse)))
            for heuristic in ("intersection", "grow-diag-final-and")
        ]
        found[corpus.name] = systems
    return found


def _tokens(words: Sequence[str], code: Language) -> list[tuple[str, int]]:
    return [(token, index) for index, word in enumerate(words) for token in normalize_word(word, code)]


def _to_words(links: Alignment, source: list[tuple[str, int]], target: list[tuple[str, int]]) -> Alignment:
    return Alignment({(source[left][1], target[right][1]) for left, right in links})

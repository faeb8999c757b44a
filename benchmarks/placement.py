"""How often tags go where a translator puts them: ``python -m benchmarks.placement``.

The sentences in ``placement.txt`` have tags on both sides, set by hand. Those of each side are transferred to the other
by several aligners' links. A tag is right if its edges have the same characters before them, white space apart; one
whose words are not beside each other, if the pair is around all of them, and with ``split`` if each of its parts is.

.. code-block:: console

    $ python -m benchmarks.placement --eflomal eflomal-align --data build/translation
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from alignment import (
    Alignment,
    BidirectionalAligner,
    GoldAlignment,
    WordAligner,
    load_shipped_model,
    parse_markup,
    split_text,
    transfer_tags,
)
from alignment.corpora import ParallelGold
from alignment.markup import Markup, Span, TextWord
from alignment.symmetrization import SYMMETRIZATIONS
from benchmarks import eflomal

SENTENCES = Path(__file__).with_name("placement.txt")

Places = Mapping[str, Counter[Span]]
"""By their opening tags, where elements begin and end, in characters other than white space."""


@dataclass(frozen=True)
class Pair:
    """A sentence with tags on both sides, and its words, French first."""

    kind: str
    sides: tuple[Markup, Markup]
    words: tuple[list[TextWord], list[TextWord]]


def read_pairs(path: Path = SENTENCES) -> Iterator[Pair]:
    """Read pairs of lines, English and French, under headings of their kinds."""
    kind, english = "", None
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            kind = line[3:]
        elif line and not line.startswith("# ") and english is None:
            english = line
        elif line and english is not None:
            sides = parse_markup(line), parse_markup(english)
            words = [split_text(side.text, code) for side, code in zip(sides, eflomal.LANGUAGES, strict=True)]
            yield Pair(kind, sides, (words[0], words[1]))
            english = None


def places(markup: Markup) -> Places:
    """Return where the elements of a line are."""
    found: defaultdict[str, Counter[Span]] = defaultdict(Counter)
    for element in markup.elements:
        start, end = (len("".join(markup.text[:place].split())) for place in (element.start, element.end))
        found[element.opening][start, end] += 1
    return found


def around(parts: Counter[Span]) -> Counter[Span]:
    """Return the one span around several."""
    return Counter([(min(start for start, _ in parts), max(end for _, end in parts))])


def results(pair: Pair, links: Alignment, side: int, *, split: bool) -> list[bool]:
    """Return whether each tag of one side goes to its place on the other."""
    source, target = pair.sides[side], pair.sides[1 - side]
    source_words, target_words = pair.words[side], pair.words[1 - side]
    gold, given = places(target), places(source)
    if any(len(parts) > 1 for parts in given.values()):
        return []
    one_way = links if side == 0 else Alignment((right, left) for left, right in links)
    written = transfer_tags(source, target.text, one_way, source_words, target_words, split=split)
    found = places(parse_markup(written))
    expected = gold if split else {opening: around(parts) for opening, parts in gold.items()}
    return [found.get(opening, Counter()) == parts for opening, parts in expected.items()]


def diagonal(pair: Pair) -> Alignment:
    """Return links of each word to the one as far from the start."""
    left, right = map(len, pair.words)
    return Alignment((index * left // right, index) for index in range(right))


System = tuple[str, Sequence[Alignment]]
"""A name, and the links of each pair."""


def shipped(pairs: Sequence[Pair]) -> Iterator[System]:
    """Yield the links of both shipped models: as ``norm-align transfer-tags`` combines them, and otherwise."""
    forward, reverse = (
        WordAligner(*load_shipped_model(name), head="auto", recipe="hmm") for name in ("fr-en", "en-fr")
    )
    french, english = zip(*(pair.words for pair in pairs), strict=True)
    for name, combine, counted in (
        ("norms", "add", False),
        ("norms, lexicon", "add", True),
        ("norms, union", "union", False),
    ):
        aligner = BidirectionalAligner(forward, reverse, combine, count_text=counted)
        yield name, aligner.align(french, english)


def learnt(pairs: Sequence[Pair], executable: str, data: Path | None) -> Iterator[System]:
    """Yield the links of eflomal, of both directions together; it draws at random."""
    french, english = zip(*(pair.words for pair in pairs), strict=True)
    corpus = ParallelGold("", "fr", "en", french, english, [GoldAlignment(Alignment())] * len(pairs))
    both, _ = eflomal.directions(executable, [corpus], data)
    for name in ("intersection", "grow-diag", "grow-diag-final-and"):
        yield f"eflomal, {name}", [SYMMETRIZATIONS[name](*ways) for ways in both]


def shares(pairs: Sequence[Pair], links: Sequence[Alignment], *, split: bool) -> dict[str, tuple[int, float]]:
    """Return the number of tags, and the percentage of right ones, of all pairs and of each kind."""
    right: defaultdict[str, list[bool]] = defaultdict(list)
    for pair, alignment in zip(pairs, links, strict=True):
        values = [value for side in (0, 1) for value in results(pair, alignment, side, split=split)]
        right["all"] += values
        right[pair.kind] += values
    return {kind: (len(values), 100 * fmean(values)) for kind, values in right.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--eflomal", help="the program eflomal-align")
    parser.add_argument("--data", type=Path, help="what benchmarks.translation.prepare wrote; for eflomal")
    arguments = parser.parse_args()
    pairs = list(read_pairs())
    systems: list[System] = [*shipped(pairs), ("diagonal", list(map(diagonal, pairs)))]
    if arguments.eflomal is not None:
        systems[-1:-1] = learnt(pairs, arguments.eflomal, arguments.data)
    rows: defaultdict[str, list[str]] = defaultdict(list)
    for _, links in systems:
        for split in (False, True):
            for kind, (count, share) in shares(pairs, links, split=split).items():
                if not split or kind in ("all", "discontinuous"):
                    rows[f"{kind}{', split' * split} | {count}"].append(f"{share:.1f}")
    print(f"{len(pairs)} sentence pairs\n")
    print(" | ".join(["| tags", "number", *(name for name, _ in systems)]), "|")
    print("|---" + "|--:" * (len(systems) + 1) + "|")
    for row, cells in rows.items():
        print(" | ".join([f"| {row}", *cells]), "|")


if __name__ == "__main__":
    main()

r"""Joins sentence pairs into documents and aligns these: ``python -m benchmarks.documents --corpus wpt03=DIR``.

As in OmniAlign's test, n pairs that follow each other become one. Both shipped models align them, without a lexicon and
with that of the text. It prints AER in % and milliseconds per source word on one thread, the mean over both.
"""

import argparse
from time import perf_counter

import torch

from alignment import Alignment, BidirectionalAligner, WordAligner, alignment_error_rate, load_shipped_model
from alignment.commands.sweep import corpora as corpora_of
from alignment.corpora import ParallelGold
from alignment.links import GoldAlignment
from benchmarks.alignment_error import table

SIZES = (1, 2, 5, 10, 20, 50)


def documents(corpus: ParallelGold, size: int) -> ParallelGold:
    """Join so many pairs each, and their gold links."""
    joined = []
    for start in range(0, len(corpus), size):
        source, target, sure, possible = list[str](), list[str](), Alignment(), Alignment()
        for index in range(start, min(start + size, len(corpus))):
            gold, begin = corpus.gold[index], (len(source), len(target))
            sure |= Alignment((begin[0] + i, begin[1] + j) for i, j in gold.sure)
            possible |= Alignment((begin[0] + i, begin[1] + j) for i, j in gold.possible)
            source += corpus.sources[index]
            target += corpus.targets[index]
        joined.append((source, target, GoldAlignment(sure, possible)))
    return ParallelGold(corpus.name, corpus.source_language, corpus.target_language, *zip(*joined, strict=True))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--corpus", action="append", default=[], help="wpt03=DIR; the stories are always included")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for corpus in [corpus for text in [*arguments.corpus, "alibi"] for corpus in corpora_of(text)]:
        forward, reverse = (WordAligner(*load_shipped_model(name)) for name in ("fr-en", "en-fr"))
        pairs = list(zip(corpus.sources, corpus.targets, strict=True))
        forward.choose(pairs)
        reverse.choose([(target, source) for source, target in pairs])
        for size in SIZES:
            text, rates, begun = documents(corpus, size), [], perf_counter()
            for lexicon in (False, True):
                aligner = BidirectionalAligner(forward, reverse, count_text=lexicon)
                rates.append(alignment_error_rate(aligner.align(text.sources, text.targets), text.gold).aer)
            cost = 500 * (perf_counter() - begun) / sum(map(len, text.sources))
            longest = max(map(len, text.sources))
            rows.append([corpus.name, str(size), str(longest), *(f"{rate:.1f}" for rate in rates), f"{cost:.2f}"])
            print(*rows[-1], flush=True)
    print(table(["system", "n", "longest", "AER", "with a lexicon", "ms a word"], rows))


if __name__ == "__main__":
    main()

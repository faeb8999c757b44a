r"""How often projected spans are right: ``python -m benchmarks.tag_transfer``.

Spans of one to five words, drawn from the three stories that come with the package, are projected by gold links and by
those of both shipped models, combined. A span is drawn if the gold links of its words lead to target words without
links to other source words [a consistent phrase pair, Koehn et al. 2003], so that its translation is not in doubt.
"""

import random
from collections.abc import Iterator, Mapping, Sequence

from alignment import Alignment, BidirectionalAligner, WordAligner, load_alibi, project_spans
from alignment.corpora import ALIBI_STORIES, ParallelGold
from alignment.fairseq.loading import load_shipped_model, shipped_models
from alignment.markup import Span
from captum_norm.methods import METHODS

SPANS = 10
"""How many spans are drawn from each sentence, at most."""

LONGEST = 5
SEED = 0
CHOICES = {"norms": "norm", "weights": "weights"}

Drawn = tuple[int, Span, Span]
"""The index of a sentence pair, a source span and its gold projection."""


def consistent_span(span: Span, gold: Alignment) -> Span | None:
    """The target span of a consistent phrase pair, from the first to the last linked word; None if there is none."""
    words = [target for source, target in gold if span[0] <= source < span[1]]
    if not words:
        return None
    start, end = min(words), max(words) + 1
    leaving = any(start <= target < end and not span[0] <= source < span[1] for source, target in gold)
    return None if leaving else (start, end)


def drawn_spans(story: ParallelGold, draw: random.Random) -> Iterator[Drawn]:
    """Draw spans that are consistent with all gold links, possible ones included."""
    for index, source in enumerate(story.sources):
        spans = [(start, start + n) for n in range(1, LONGEST + 1) for start in range(len(source) - n + 1)]
        kept = [(span, consistent_span(span, story.gold[index].possible)) for span in spans if span != (0, len(source))]
        consistent = [(index, span, gold) for span, gold in kept if gold is not None]
        yield from draw.sample(consistent, min(SPANS, len(consistent)))


def overlap(found: Span, gold: Span) -> float:
    """The F1 of a span's words."""
    both = len(set(range(*found)) & set(range(*gold)))
    return 2 * both / (found[1] - found[0] + gold[1] - gold[0])


def scores(story: ParallelGold, drawn: Sequence[Drawn], links: Sequence[Alignment]) -> list[tuple[bool, float]]:
    """Whether each projected span is the gold one, and the F1 of its words."""
    return [
        (found == gold, overlap(found, gold))
        for index, span, gold in drawn
        for found in project_spans([span], links[index], story.sources[index], story.targets[index])
    ]


def alignments(story: ParallelGold) -> Mapping[str, Sequence[Alignment]]:
    """The links of both shipped models, by norms and by weights, as ``norm-align transfer-tags`` combines them."""
    found: dict[str, Sequence[Alignment]] = {}
    for name, choice in CHOICES.items():
        aligners = {}
        for direction in shipped_models():
            model, tokenizer = load_shipped_model(direction)
            method = METHODS[choice].load()(model.base_model)
            aligners[direction] = WordAligner(model, tokenizer, method, head="auto", recipe="hmm")
        both = BidirectionalAligner(aligners["fr-en"], aligners["en-fr"], count_text=False)
        found[name] = both.align(story.sources, story.targets)
    return found


def main() -> None:
    """Print the table."""
    draw = random.Random(SEED)
    results: dict[str, list[tuple[bool, float]]] = {name: [] for name in CHOICES}
    for name in ALIBI_STORIES:
        story = load_alibi(name)
        drawn = list(drawn_spans(story, draw))
        for links, alignment in alignments(story).items():
            results[links] += scores(story, drawn, alignment)
    print("| links by | spans | exact | F1 of words |")
    print("|---|--:|--:|--:|")
    for links, found in results.items():
        exact, words = (100 * sum(values) / len(found) for values in zip(*found, strict=True))
        print(f"| {links} | {len(found):,} | {exact:.1f} % | {words:.1f} % |")


if __name__ == "__main__":
    main()

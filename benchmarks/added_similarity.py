r"""Adds the similarity of embeddings to norms: ``python -m benchmarks.added_similarity --corpus wpt03=DIR``.

Both shipped models align each text by norms, and by norms and the similarity of their input embeddings added, without a
lexicon and with that of the text. It prints AER in %, p of the difference (approximate randomisation) and the weights
that were chosen without gold links, of each model; the last row is of all texts together. ``--joint CHECKPOINT --data
PREPARED`` aligns with one model of both directions (``benchmarks/translation``) instead, and ``--source similarity``
adds the similarity of encoder states.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from alignment import (
    BidirectionalAligner,
    EncoderAligner,
    WordAligner,
    alignment_error_rate,
    load_fairseq_checkpoint,
    load_shipped_model,
    paired_significance,
)
from alignment.commands.sweep import corpora as corpora_of
from alignment.fairseq.tokenizer import find_dictionary, read_dictionary
from alignment.normalization import Language, NormalizedWords
from alignment.tokenization import EncodedSentence
from benchmarks.alignment_error import table
from benchmarks.translation.prepare import TAGS

DIRECTIONS: tuple[tuple[Language, Language], ...] = (("fr", "en"), ("en", "fr"))


class Tagged:
    """A joint model's tokenizer: the tag of the other language before sources, and before targets for an encoder."""

    def __init__(self, words: NormalizedWords, tags: tuple[int, int | None]) -> None:
        self._words, self._tags, self.decode_target = words, tags, words.decode_target

    def encode_source(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        """Encode source sentences."""
        return _tagged(self._words.encode_source(sentences), self._tags[0])

    def encode_target(self, sentences: Sequence[Sequence[str]]) -> list[EncodedSentence]:
        """Encode target sentences."""
        return _tagged(self._words.encode_target(sentences), self._tags[1])


def _tagged(sentences: list[EncodedSentence], tag: int | None) -> list[EncodedSentence]:
    if tag is None:
        return sentences
    return [EncodedSentence([tag, *sentence.ids], [None, *sentence.word_ids]) for sentence in sentences]


def joint_models(checkpoint: Path, data: Path) -> list[tuple[Any, Any, Any]]:
    """A joint model with its tokenizers for the decoder and for the encoder, for each direction."""
    folder = data / "joint" / "binary"
    model, tokenizer = load_fairseq_checkpoint(checkpoint, folder, codes=data / "pieces.model")
    dictionary = read_dictionary(find_dictionary(folder, "source"), model.config.vocab_size)
    tags = {language: dictionary.index(tag) for language, tag in TAGS.items()}
    models = []
    for source, target in DIRECTIONS:
        words = NormalizedWords(tokenizer, source, target)
        models.append((model, Tagged(words, (tags[target], None)), Tagged(words, (tags[target], tags[source]))))
    return models


class _Links(NamedTuple):
    norms: list[Any]
    both: list[Any]
    gold: list[Any]

    def cells(self) -> list[str]:
        """Both error rates and p of their difference."""
        rates = [alignment_error_rate(links, self.gold).aer for links in (self.norms, self.both)]
        [p_value] = paired_significance(self.norms, [self.both], self.gold).p_values
        return [*(f"{rate:.2f}" for rate in rates), f"{p_value:.4f}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--corpus", action="append", default=[], help="wpt03=DIR; the stories are always included")
    parser.add_argument("--joint", type=Path, metavar="CHECKPOINT", help="a model of both directions")
    parser.add_argument(
        "--data", type=Path, metavar="PREPARED", help="what benchmarks.translation.prepare wrote for it"
    )
    parser.add_argument("--source", choices=("embeddings", "similarity"), default="embeddings")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = [(*model, model[1]) for model in map(load_shipped_model, ("fr-en", "en-fr"))]
    if arguments.joint is not None:
        models = joint_models(arguments.joint, arguments.data)
    rows, together = list[list[str]](), [_Links([], [], []) for _ in (False, True)]
    for corpus in [corpus for text in [*arguments.corpus, "alibi"] for corpus in corpora_of(text)]:
        alone = [WordAligner(model, tokenizer) for model, tokenizer, _ in models]
        similar = [EncoderAligner(model, tokenizer, source=arguments.source) for model, _, tokenizer in models]
        added = [
            WordAligner(model, tokenizer, similarity=one)
            for (model, tokenizer, _), one in zip(models, similar, strict=True)
        ]
        cells = list[str]()
        for lexicon, all_links in zip((False, True), together, strict=True):
            norms, both = (
                BidirectionalAligner(forward, reverse, count_text=lexicon).align(corpus.sources, corpus.targets)
                for forward, reverse in (alone, added)
            )
            links = _Links(norms, both, list(corpus.gold))
            cells += links.cells()
            for kept, new in zip(all_links, links, strict=True):
                kept.extend(new)
        rows.append([corpus.name, *cells, " ".join(str(aligner.choose([]).weight) for aligner in added)])
        print(*rows[-1], flush=True)
    rows.append(["all", *(cell for links in together for cell in links.cells()), ""])
    columns = ["norms", "added", "p"]
    print(table(["system", *columns, *columns, "weights"], rows))


if __name__ == "__main__":
    main()

"""Computes the statistics of each block of a corpus and merges those of all blocks."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice

from captum_norm.lab.analysis.analysis import Analysis, AnalysisContext
from captum_norm.lab.analysis.corpus import Corpus
from captum_norm.lab.analysis.sequences import Encoder
from captum_norm.lab.analysis.tokens import TokenStore
from captum_norm.runs import Attempt, Record


@dataclass(frozen=True)
class BlockAnalysis:
    """Computes the statistics of a block; a saved record of an unfinished block is continued.

    A record consists of the size of the analysis's state, that state, and the stored tokens of the block. Its notes
    count texts (lines or documents), sequences, tokens (with special ones) and masked tokens.
    """

    kind: type[Analysis]
    context: AnalysisContext
    encoder: Encoder
    corpus: Corpus
    batch_tokens: int
    store: TokenStore | None

    def __call__(self, attempt: Attempt) -> Record:
        """Analyze a block."""
        texts, saved = self.corpus.read(attempt.block), attempt.saved
        analysis, done = self.kind(self.context), 0
        state, tokens = b"", b""
        if saved is not None:
            done = saved.notes["batches"]
            state, tokens = split_content(saved.content)
            analysis.restore(state)
        if self.store is not None:
            self.store.restore(tokens)

        def record(**notes: object) -> Record:
            state = analysis.state()
            return Record(notes, join_content(state, b"" if self.store is None else self.store.state()))

        sequences = self.encoder.sequences(texts)
        batches = self.encoder.batches(sequences, self.batch_tokens)
        for number, batch in enumerate(islice(batches, done, None), done + 1):
            measured = analysis.measure(batch)
            analysis.update(batch, measured)
            if self.store is not None:
                self.store.add(batch, analysis.token_values(batch, measured), self.context)
            attempt.save(partial(record, batches=number))
        counts = {
            "texts": len(texts),
            "sequences": len(sequences),
            "tokens": sum(len(found.ids) for found in sequences),
            "masked": sum(len(found.masked) for found in sequences),
        }
        return record(counts=counts)


def merged(kind: type[Analysis], context: AnalysisContext, records: Iterable[Record]) -> tuple[Analysis, Counter[str]]:
    """Merge the statistics and counts of all blocks, in the order of the corpus."""
    whole, part, counts = kind(context), kind(context), Counter[str]()
    for record in records:
        counts.update(record.notes["counts"])
        if not record.content:  # the block was set aside
            continue
        part.restore(split_content(record.content)[0])
        whole.merge(part)
    return whole, counts


def join_content(state: bytes, tokens: bytes = b"") -> bytes:
    """Join the states of the analysis and of the token store to the content of a record."""
    return len(state).to_bytes(8) + state + tokens


def split_content(content: bytes) -> tuple[bytes, bytes]:
    """Split the content of a record into the states of the analysis and of the token store."""
    end = 8 + int.from_bytes(content[:8])
    return content[8:end], content[end:]

"""What an analysis makes of the blocks of a corpus, kept in a journal, and how the blocks are added up."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from captum_norm import bars
from captum_norm.analysis.analysis import Analysis, Setting
from captum_norm.analysis.corpus import Block
from captum_norm.analysis.sequences import Encoder
from captum_norm.analysis.tokens import TokenStore
from captum_norm.runs import Journal, Team


@dataclass(frozen=True)
class Counts:
    """How much of a corpus has been read.

    Attributes:
        texts: lines or documents.
        sequences: inputs of the model.
        tokens: their tokens, special ones included.
        masked: those of them that were masked.
    """

    texts: int = 0
    sequences: int = 0
    tokens: int = 0
    masked: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Work:
    """What makes a block's statistics, and goes on with those that were saved before all of its batches were measured.

    In a journal they are the analysis's state, its size before it, and what the store has of the block's tokens.
    """

    kind: type[Analysis]
    setting: Setting
    encoder: Encoder
    batch_tokens: int
    store: TokenStore | None
    journal: Journal

    def __call__(self, block: Block, digest: str) -> None:
        """Finish a block, whose text has the digest."""
        analysis, done = self.kind(self.setting), 0
        if self.store is not None:
            self.store.restore(b"")
        if half := self.journal.unfinished(block.index, digest):
            done = half.notes["batches"]
            state, tokens = parted(half.content)
            analysis.restore(state)
            if self.store is not None:
                self.store.restore(tokens)

        def content() -> bytes:
            state = analysis.state()
            return len(state).to_bytes(8) + state + (b"" if self.store is None else self.store.state())

        sequences = self.encoder.sequences(block.texts)
        batches = self.encoder.batches(sequences, self.batch_tokens)
        for number, batch in enumerate(islice(batches, done, None), done + 1):
            measured = analysis.measure(batch)
            analysis.update(batch, measured)
            if self.store is not None:
                self.store.add(batch, analysis.token_values(batch, measured), self.setting)
            if self.journal.is_due():
                self.journal.save(block.index, digest, {"batches": number}, content())
        counts = Counts(
            texts=len(block.texts),
            sequences=len(sequences),
            tokens=sum(len(found.ids) for found in sequences),
            masked=sum(len(found.masked) for found in sequences),
        )
        self.journal.write(block.index, digest, {"counts": vars(counts)}, content())


def finish_share(work: Work, blocks: Iterator[Block], team: Team, texts: int) -> int:
    """Finishes the blocks of this process, and in the first one waits for the others; the number of all blocks."""
    journal = work.journal
    with journal.plainly():
        team.begin()
    journal.check_job()
    count = 0
    with bars.bar(work.kind.name, texts, "texts") as bar, bars.hidden():
        for block in blocks:
            count += 1
            if block.index % team.size == team.rank:
                digest = block.digest()
                if journal.finished(block.index, digest, str(block)) is None:
                    work(block, digest)
                elif not bar.disable:
                    bar.initial += len(block.texts)  # it was finished before and does not count towards the speed
            # The blocks of the others are taken to be as far as the last one of this process.
            bar.update(len(block.texts))
    with journal.plainly():
        team.end()
    return count


def merged(kind: type[Analysis], setting: Setting, journal: Journal, blocks: int) -> tuple[Analysis, Counts]:
    """All blocks' statistics, added up in the order of the corpus."""
    whole, part, counts = kind(setting), kind(setting), Counts()
    for index in range(blocks):
        record = journal.read(index)
        counts += Counts(**record.notes["counts"])
        part.restore(parted(record.content)[0])
        whole.merge(part)
    return whole, counts


def parted(content: bytes) -> tuple[bytes, bytes]:
    """The analysis's state, and the store's, in what a journal has of a block."""
    end = 8 + int.from_bytes(content[:8])
    return content[8:end], content[end:]

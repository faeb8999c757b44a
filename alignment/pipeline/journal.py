"""The finished blocks of an extraction, in the folder ``OUT.parts``, from which in the end ``OUT`` is made."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from alignment.formats import format_pharaoh, parse_pharaoh
from alignment.formats.text import write_lines
from alignment.links import Alignment
from alignment.pipeline.blocks import AlignedBlock, Block, ExtractionCounts
from captum_norm import InvalidInputError, runs


class Journal(runs.Journal):
    """The folder of one run.

    Args:
        out: the output file; ``.gz`` and ``.xz`` are compressed.
        job: what must be the same for all blocks of the output.
        report: told of blocks that are damaged.
    """

    def __init__(
        self, out: Path, job: Mapping[str, runs.Setting], report: Callable[[str], None] = lambda _: None
    ) -> None:
        super().__init__(out.with_name(f"{out.name}.parts"), str(out), job, report)
        self.out = out

    def counts(self, block: Block) -> ExtractionCounts | None:
        """The counts of a block that is finished, else None.

        Raises:
            InvalidInputError: the block was made from other lines.
        """
        lines = f"lines {block.first} to {block.first + len(block.pairs) - 1} of the input"
        notes = self.finished(block.index, block.digest(), lines)
        return None if notes is None else ExtractionCounts(**notes["counts"])

    def known(self, block: Block) -> dict[int, Alignment]:
        """The alignments that were saved of a block that is not finished."""
        half = self.unfinished(block.index, block.digest())
        links = {} if half is None else json.loads(half.content)
        return {int(key): parse_pharaoh(line) for key, line in links.items()}

    def save_known(self, block: Block, known: Mapping[int, Alignment]) -> None:
        """Saves the alignments that are known of a block, if it is time."""
        if self.is_due():
            links = {key: format_pharaoh(alignment) for key, alignment in known.items()}
            self.save(block.index, block.digest(), {}, json.dumps(links).encode())

    def finish(self, block: Block, aligned: AlignedBlock) -> None:
        """Finishes a block."""
        content = "".join(f"{line}\n" for line in aligned.lines).encode("ascii")
        self.write(block.index, block.digest(), {"counts": asdict(aligned.counts)}, content)

    def merge(self, blocks: int, *, overwrite: bool) -> ExtractionCounts:
        """Makes the output from its blocks, and gives the counts of all lines.

        Raises:
            InvalidInputError: somebody else has made the output meanwhile, and it is not to be overwritten.
        """
        counts = ExtractionCounts()

        def lines() -> Iterator[str]:
            nonlocal counts
            for index in range(blocks):
                record = self.read(index)
                counts += ExtractionCounts(**record.notes["counts"])
                yield from record.content.decode("ascii").split("\n")[:-1]

        merged = self.folder / f"merged{self.out.suffix}"
        with self.plainly():
            write_lines(merged, lines())
            if self.out.exists() and not overwrite:
                raise InvalidInputError(f"{self.out} has come to exist; move it away and start again: no work is lost")
            merged.replace(self.out)
            runs.sync(self.out.parent)
        return counts

"""The finished blocks of an extraction, in the folder ``OUT.parts``, from which in the end ``OUT`` is made."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from alignment.formats.text import write_lines
from alignment.pipeline.blocks import AlignedBlock, Block, ExtractionCounts
from captum_norm import runs


class Journal(runs.Journal):
    """The folder of one run.

    Args:
        out: the output file; ``.gz`` and ``.xz`` are compressed.
        job: what must be the same for all blocks of the output.
    """

    def __init__(self, out: Path, job: Mapping[str, runs.Setting]) -> None:
        super().__init__(out.with_name(f"{out.name}.parts"), str(out), job)
        self.out = out

    def counts(self, block: Block) -> ExtractionCounts | None:
        """The counts of a block that is finished, else None.

        Raises:
            InvalidInputError: the block was made from other lines.
        """
        lines = f"lines {block.first} to {block.first + len(block.pairs) - 1} of the input"
        notes = self.finished(block.index, block.digest(), lines)
        return None if notes is None else ExtractionCounts(**notes["counts"])

    def finish(self, block: Block, aligned: AlignedBlock) -> None:
        """Finishes a block."""
        content = "".join(f"{line}\n" for line in aligned.lines).encode("ascii")
        self.write(block.index, block.digest(), {"counts": asdict(aligned.counts)}, content)

    def merge(self, blocks: int) -> ExtractionCounts:
        """Makes the output from its blocks, removes what else is in the folder, and gives the counts of all lines."""
        counts = ExtractionCounts()

        def lines() -> Iterator[str]:
            nonlocal counts
            for index in range(blocks):
                with self.path(index).open(encoding="ascii") as part:
                    counts += ExtractionCounts(**json.loads(part.readline())["counts"])
                    for line in part:
                        yield line.removesuffix("\n")

        merged = self.folder / f"merged{self.out.suffix}"
        write_lines(merged, lines())
        merged.replace(self.out)
        self.clear()
        return counts

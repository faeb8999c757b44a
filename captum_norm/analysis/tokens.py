"""What is measured of each token, one row for each, as a Parquet file."""

from collections.abc import Mapping
from os import getpid
from pathlib import Path
from typing import Any

from torch import Tensor

from captum_norm.analysis.analysis import Setting
from captum_norm.analysis.sequences import Batch
from captum_norm.errors import InvalidInputError


class TokenStore:
    """Parquet files of blocks in a folder, and of these one file in the end.

    Its columns are ``line``, ``window``, ``position`` (from 0), ``token``, ``category``, and one for each value that is
    stored: numbers, or lists of one number for each layer.

    Args:
        folder: where the blocks' files are.

    Raises:
        InvalidInputError: pyarrow is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise InvalidInputError("a store of tokens needs pyarrow: pip install 'captum-norm[tables]'") from error
        self._arrow: Any = pyarrow
        self._folder = folder
        self._batches: list[Any] = []

    def add(self, batch: Batch, values: Mapping[str, Tensor], setting: Setting) -> None:
        """Take in the tokens of a batch; ``values`` are (B, S) or (B, S, L) by name."""
        rows, positions = batch.real.nonzero(as_tuple=True)
        sequences = [batch.sequences[row] for row in rows.tolist()]
        columns: dict[str, Any] = {
            "line": [sequence.line for sequence in sequences],
            "window": [sequence.window for sequence in sequences],
            "position": positions.tolist(),
            "token": [setting.texts[token] for token in batch.ids[batch.real].tolist()],
            "category": [setting.categories.names[place] for place in batch.categories[batch.real].tolist()],
        }
        for name, value in values.items():
            found = value.detach().float().cpu()[batch.real]
            columns[name] = self._arrow.array(list(found.numpy()), None if found.dim() == 1 else self._layers())
        self._batches.append(self._arrow.table(columns))

    def finish(self, block: int) -> None:
        """Write the tokens of a block, in the order of the text."""
        if self._batches:
            table = self._arrow.concat_tables(self._batches)
            order = [(name, "ascending") for name in ("line", "window", "position")]
            self._write([table.sort_by(order)], self._path(block))
            self._batches.clear()

    def merge(self, blocks: int, path: Path) -> None:
        """Write the tokens of all blocks to one file.

        Raises:
            InvalidInputError: it cannot be written.
        """
        try:
            tables = (self._arrow.parquet.read_table(self._path(block)) for block in range(blocks))
            self._write(tables, path)
        except OSError as error:
            raise InvalidInputError(f"cannot write {path}: {error}") from error

    def _write(self, tables: Any, path: Path) -> None:
        temporary = path.with_name(f".{path.name}.{getpid()}.tmp")
        writer = None
        try:
            for table in tables:
                writer = writer or self._arrow.parquet.ParquetWriter(temporary, table.schema)
                writer.write_table(table)
            if writer is not None:
                writer.close()
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _path(self, block: int) -> Path:
        return self._folder / f"tokens-{block:09d}"

    def _layers(self) -> Any:
        return self._arrow.list_(self._arrow.float32())

"""Writes the values of each token to a Parquet file."""

from collections.abc import Iterable, Mapping
from io import BytesIO
from itertools import chain
from typing import Any

from torch import Tensor

from captum_norm.errors import InvalidInputError
from captum_norm.lab.analysis.analysis import AnalysisContext
from captum_norm.lab.analysis.sequences import TokenBatch
from captum_norm.text.files import whole_file


class TokenStore:
    """Collects the tokens of a block as Parquet, and merges those of all blocks into one file.

    The columns are ``line``, ``window``, ``position`` (from 0), ``token``, ``category``, and one for each value:
    numbers, or lists with a number for each layer.

    Raises:
        InvalidInputError: pyarrow is not installed.
    """

    def __init__(self) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise InvalidInputError("the token store needs pyarrow: pip install 'captum-norm[tables]'") from error
        self._arrow: Any = pyarrow
        self._batches: list[Any] = []

    def add(self, batch: TokenBatch, values: Mapping[str, Tensor], context: AnalysisContext) -> None:
        """Add the tokens of a batch; ``values`` are (B, S) or (B, S, L) by name."""
        rows, positions = batch.real.nonzero(as_tuple=True)
        sequences = [batch.sequences[row] for row in rows.tolist()]
        columns: dict[str, Any] = {
            "line": [sequence.line for sequence in sequences],
            "window": [sequence.window for sequence in sequences],
            "position": positions.tolist(),
            "token": [context.texts[token] for token in batch.ids[batch.real].tolist()],
            "category": [context.categories.names[place] for place in batch.categories[batch.real].tolist()],
        }
        for name, value in values.items():
            found = value.detach().float().cpu()[batch.real]
            columns[name] = self._arrow.array(list(found.numpy()), None if found.dim() == 1 else self._layers())
        self._batches.append(self._arrow.table(columns))

    def state(self) -> bytes:
        """Serialize the tokens added, in the order of the text; empty if there are none."""
        if not self._batches:
            return b""
        order = [(name, "ascending") for name in ("line", "window", "position")]
        table = self._arrow.concat_tables(self._batches).sort_by(order).combine_chunks()
        stream = BytesIO()
        self._arrow.parquet.write_table(table, stream)
        return stream.getvalue()

    def restore(self, state: bytes) -> None:
        """Replace the tokens by those that :meth:`state` returned."""
        self._batches = [self._read(state)] if state else []

    def merge(self, states: Iterable[bytes], path: str) -> None:
        """Write the tokens of all blocks to one file, at a path or URL, unless there are none.

        Raises:
            InvalidInputError: it cannot be written.
        """
        tables = map(self._read, filter(None, states))
        for first in tables:  # at most once: the inner loop consumes the rest
            try:
                with whole_file(path) as file, self._arrow.parquet.ParquetWriter(file, first.schema) as writer:
                    for table in chain([first], tables):
                        writer.write_table(table)
            except OSError as error:
                raise InvalidInputError(f"cannot write {path}: {error.strerror or error}") from error

    def _read(self, state: bytes) -> Any:
        return self._arrow.parquet.read_table(BytesIO(state))

    def _layers(self) -> Any:
        return self._arrow.list_(self._arrow.float32())

"""Pickles objects such that processes on one machine can share the weights of their models."""

import pickle
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = list[NDArray[np.uint8]]

_LEAST_BYTES = 1 << 16


def dumps(value: object) -> tuple[bytes, Arrays]:
    """Pickle an object, with functions and classes of scripts; the memory of large CPU tensors comes apart, as arrays.

    Ray stores arrays once on each machine and maps them into the memory of its workers.
    """
    from ray import cloudpickle

    torch = sys.modules.get("torch")  # if nothing has imported it, there are no tensors
    arrays: Arrays = []
    indices: dict[tuple[int, int], int] = {}

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, item: Any) -> Any:
            if torch is None or not isinstance(item, torch.storage.TypedStorage):
                return None
            storage = item.untyped()
            if storage.device.type != "cpu" or storage.nbytes() < _LEAST_BYTES:
                return None
            place = storage.data_ptr(), storage.nbytes()
            if place not in indices:
                indices[place] = len(arrays)
                arrays.append(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
            return indices[place], item.dtype

    stream = BytesIO()
    with _quiet():
        Pickler(stream, protocol=5).dump(value)  # type: ignore[no-untyped-call]  # Ray's has no types
    return stream.getvalue(), arrays


def loads(content: bytes, arrays: Arrays) -> Any:
    """Restore an object from :func:`dumps`; its large tensors share memory with the arrays."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            import torch

            index, dtype = pid
            storage = torch.from_numpy(arrays[index]).untyped_storage()
            return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype)

    with _quiet():
        return Unpickler(BytesIO(content)).load()


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch itself pickles storages so.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        # Nothing here writes into weights.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        yield

"""Seeds the global random generators, and restores them."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from captum_norm.checks import as_index
from captum_norm.errors import InvalidInputError

_SEEDS = 2**32


def checked_seed(seed: int) -> int:
    """Check a seed for torch and numpy.

    Raises:
        InvalidInputError: it is out of range or no integer.
    """
    number = as_index("the seed", seed)
    if not 0 <= number < _SEEDS:
        raise InvalidInputError(f"got the seed {number}; expected 0 to {_SEEDS - 1}")
    return number


@contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """Seed torch's and numpy's global generators inside the context, then restore them.

    Args:
        model: the generators of its devices are seeded, too.
        seed: a seed from :func:`checked_seed`.

    Example:
        >>> with seeded(nn.Linear(1, 1), 0):
        ...     first = torch.rand(1)
        >>> with seeded(nn.Linear(1, 1), 0):
        ...     bool(torch.rand(1) == first)
        True
    """
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    # Captum's GradientSHAP draws from numpy's global generator.
    state = np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(state)  # noqa: NPY002

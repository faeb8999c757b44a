"""Turns gradients on, in inference mode, too."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def gradients_on() -> Iterator[None]:
    """Enable gradients, in inference mode, too."""
    with torch.inference_mode(False), torch.enable_grad():
        yield

"""Turns gradients on, whatever mode the caller is in."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def gradients_on() -> Iterator[None]:
    """Gradients, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.enable_grad():
        yield

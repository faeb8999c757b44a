"""Gradients of a call's output, whatever mode the caller is in."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from captum_norm.models.inputs import ModelCall


@contextmanager
def gradients_on() -> Iterator[None]:
    """Gradients, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def outside_inference(call: ModelCall) -> ModelCall:
    """The call with tensors that may be part of a graph; those made in inference mode may not."""
    arguments: Mapping[str, Any] = {
        name: value.clone() if isinstance(value, Tensor) and value.is_inference() else value
        for name, value in call.arguments.items()
    }
    return replace(call, arguments=dict(arguments))

"""Models are pickled with the memory of their weights apart, which processes then share."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from captum_norm.runs.ray_workers import dumps, loads


class Tied(nn.Module):
    """Weights that are tied, in part of another's memory, small, in half precision, and no weights at all."""

    part: torch.Tensor
    small: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.head = nn.Linear(64, 500)
        self.head.weight = self.embedding.weight
        self.coarse = nn.Linear(300, 300).bfloat16()
        self.register_buffer("part", self.embedding.weight.detach()[100:200].T)
        self.register_buffer("small", torch.arange(5))
        self.activation: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden.tanh()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.activation(self.embedding(ids) @ self.part)
        coarse: torch.Tensor = self.coarse(hidden.repeat(1, 3).bfloat16()).sum()
        logits: torch.Tensor = self.head(self.embedding(ids))
        return coarse + logits.sum() + self.small.sum()


def read_only(model: Any) -> tuple[bytes, list[Any]]:
    content, arrays = dumps(model)
    copies = [array.copy() for array in arrays]
    for copy in copies:
        copy.flags.writeable = False  # as Ray hands them out
    return content, copies


def test_weights_come_once_and_are_shared() -> None:
    model = Tied()
    model.coarse.requires_grad_(False)
    content, arrays = read_only(model)
    assert len(content) < 1 << 14
    assert sorted(array.nbytes for array in arrays) == [500 * 64 * 4, 300 * 300 * 2]
    first, second = loads(content, arrays), loads(content, arrays)
    for found in (first, second):
        assert found.head.weight is found.embedding.weight
        assert found.part.data_ptr() == found.embedding.weight.data_ptr() + 100 * 64 * 4
        assert found.embedding.weight.data_ptr() in {array.ctypes.data for array in arrays}
        assert not found.coarse.weight.requires_grad
        assert found.embedding.weight.requires_grad
        assert found.state_dict().keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor), name
    ids = torch.tensor([3, 1, 4])
    assert torch.equal(first(ids), model(ids))
    first.small.add_(1)
    assert not torch.equal(first.small, second.small)
    assert torch.equal(second.small, model.small)


def test_memory_that_starts_at_the_same_place_may_end_elsewhere() -> None:
    memory = np.arange(1 << 16)
    values = torch.from_numpy(memory[: 1 << 15]), torch.from_numpy(memory)
    assert values[0].data_ptr() == values[1].data_ptr()
    for found, value in zip(loads(*read_only(values)), values, strict=True):
        assert torch.equal(found, value)


def test_what_has_no_tensors_needs_no_torch() -> None:
    program = "from captum_norm.runs.ray_workers import dumps, loads; loads(*dumps(print))"
    program = f"{program}; import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

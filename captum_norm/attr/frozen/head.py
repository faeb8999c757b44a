"""Reads an output value as a linear function of the last layer's output, through a head with frozen norms."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captum_norm.attr.frozen.network import FrozenNetwork, HookedModules
from captum_norm.errors import UnsupportedModelError
from captum_norm.forward.gradients import gradients_on, gradients_through
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import Hook, first_tensor, hooked, with_result
from captum_norm.models.outputs import OutputValues, real_positions
from captum_norm.models.precision import accumulation_dtype


@dataclass(frozen=True)
class HeadReading:
    """Output values, O in all, as Σ ⟨direction, last layer's output⟩ + bias, summed over the N positions read."""

    examples: Tensor  # the example of each position, (N,)
    positions: Tensor  # its index in the sequence that the model received, (N,)
    outputs: Tensor  # the value that it is read for, (N,)
    directions: Tensor  # (N, D)
    number: Tensor  # the values, (O,)
    bias: Tensor  # what the head's biases contribute to each, (O,)
    rounded: Tensor  # the size of the outputs that each value is, or is the difference of, (O,)
    deviation: Tensor  # the frozen head's relative deviation from the model's own


class HeadNetwork(FrozenNetwork):
    """What comes behind the last layer, frozen; the layers run without gradients, their outputs perhaps (Q, B, D)."""

    def __init__(self, modules: HookedModules, call: ModelCall) -> None:
        super().__init__(modules, call)
        self._behind = False

    def hooks(self) -> list[tuple[Literal["before", "after"], Iterable[nn.Module], Hook]]:
        """Return the functions to call before and after modules, in the order of their calls."""
        return [*super().hooks(), ("after", self.modules.layers, self._leave)]

    @property
    def is_active(self) -> bool:
        """Whether the model runs what comes behind a layer."""
        return self._behind and self._inside is None

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[list[Any]]:
        """Run the model inside; its outputs come in a list."""
        outputs: list[Any] = []
        seen = hooked([(model, "result", lambda _, output: outputs.append(output))])
        with torch.inference_mode(False), torch.no_grad(), self.hooking(), gradients_through(model), seen:
            yield outputs

    def _enter(self, module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        self._entered.add(module in self.modules.encoder)
        self._behind = False
        torch.set_grad_enabled(False)

    def _leave(self, *seen: Any) -> Any:
        """Begin the graph anew at a layer's output, of which the last one stays."""
        output = seen[-1]
        stream = first_tensor(output)
        if stream is None:
            return None
        torch.set_grad_enabled(True)
        self._behind = True
        self.dtype = accumulation_dtype(stream.dtype)
        self.streams[:] = [stream.detach().clone().requires_grad_()]
        self.lengths.clear()
        self._see_axes(stream)
        self.deviations.clear()
        # The model may write in place, which a leaf does not allow.
        return with_result(output, stream, self.streams[0].clone())

    def _shares_of(self, shares: Tensor, times: int) -> Tensor:  # noqa: ARG002 - no experts are behind the layers
        return self._batch_first(shares, 2).reshape(self._batch, -1)

    def gradient(self, number: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return a number's gradient at the last layer's output, (B, Q, D), and the biases' shares at each position."""
        self._shares.clear()
        (gradient,) = torch.autograd.grad(number, self.streams, retain_graph=True, materialize_grads=True)
        gradient = self._batch_first(gradient)
        return gradient.reshape(self._batch, -1, gradient.shape[-1]), [share for _, share in self._shares]


def read_head(network: HeadNetwork, call: ModelCall, output: Any, values: OutputValues) -> HeadReading:
    """Read values of the output that the network returned at the last layer's, by a backward pass through the head."""
    with gradients_on():
        numbers, rounded = (column.flatten() for column in values.read(call, output))
        if not numbers.requires_grad:
            raise UnsupportedModelError(
                f"the output of {type(call.model).__name__} does not depend on what its last layer returns; take "
                "another method, such as norm or alti"
            )
        dtype = accumulation_dtype(numbers.dtype)
        read = [_read(network, call, numbers, values, group) for group in _distinct(values)]
    *columns, biases = zip(*read, strict=True)
    examples, positions, outputs, directions = map(torch.cat, columns)
    bias, _, deviation = torch.stack(biases).sum(0), *network.largest_deviation()
    number = numbers.detach().to(dtype)
    directions, bias, rounded = directions.to(dtype), bias.to(dtype), rounded.to(dtype)
    return HeadReading(examples, positions, outputs, directions, number, bias, rounded, deviation.to(dtype))


def _distinct(values: OutputValues) -> list[Tensor]:
    """Group the values so that no position is read twice in one backward pass."""
    if values.rows is None:
        return list(torch.arange(values.batch * values.count, device="cpu").view(-1, values.count).T)
    seen: dict[tuple[int, int], int] = {}
    rank = []
    for example, places in enumerate(values.rows.tolist()):
        for place in places:
            rank.append(seen.get((example, place), 0))
            seen[example, place] = rank[-1] + 1
    ranks = torch.tensor(rank, device="cpu")
    return [(ranks == time).nonzero().flatten() for time in range(max(rank) + 1)]


def _read(
    network: HeadNetwork, call: ModelCall, numbers: Tensor, values: OutputValues, group: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return examples, positions, outputs and directions of the positions read, and the biases of all values."""
    gradient, biases = network.gradient(numbers[group.to(numbers.device)].sum())
    group = group.to(gradient.device)
    read, bias = gradient.ne(0).any(-1), gradient.new_zeros(len(numbers), dtype=accumulation_dtype(numbers.dtype))
    if values.rows is None:
        examples, positions = read.nonzero(as_tuple=True)
        for shares in biases:
            bias[group] += shares.sum(1).to(bias)
        return examples, positions, group[examples], gradient[examples, positions], bias
    # Virtual tokens come before the inputs' positions.
    virtual = gradient.shape[1] - real_positions(call).shape[1]
    examples = group // values.count
    positions = values.rows.flatten().to(gradient.device)[group] + virtual
    expected = torch.zeros_like(read)
    expected[examples, positions] = True
    if (read & ~expected).any() or any(shares.shape != read.shape for shares in biases):
        raise UnsupportedModelError(
            f"the output of {type(call.model).__name__} at one position depends on others behind its last layer; pass "
            "one position of each example"
        )
    for shares in biases:
        bias[group] += shares[examples, positions].to(bias)
    return examples, positions, group, gradient[examples, positions], bias

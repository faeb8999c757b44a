"""Finds output projections that receive attention's output times something else: a gate, a norm."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from captum_norm.models.attention import AttentionCall
from captum_norm.models.call import ModelCall
from captum_norm.models.hooks import End, Hook, hooked
from captum_norm.models.libraries.replaced_forward import not_compared
from captum_norm.models.precision import coarsest
from captum_norm.models.projections import equal


def gated_projections(call: ModelCall, randomized: tuple[type[nn.Module], ...]) -> dict[nn.Module, nn.Module]:
    """Map attention modules to a module that receives their output times factors that do not depend on the key.

    The model runs twice, with the same random numbers as outputs of its linear maps; in the second run each number of
    attention's output is multiplied by another one. A module is found if what it receives is multiplied likewise, up to
    one number for each head and query, such as the σ of a norm.

    Args:
        call: the model with few and short examples.
        randomized: the modules whose outputs are replaced.
    """
    watches = [_Watch(call.model, randomized, changed=changed) for changed in (False, True)]
    for watch in watches:
        with torch.no_grad(), not_compared(), call.attention_through(watch.attend), hooked(watch.hooks()):
            call.run()
    first, second = (watch.seen for watch in watches)
    found: dict[nn.Module, nn.Module] = {}
    for module, before in first.items():
        after = second.get(module)
        for candidate, received in before.received.items():
            if after is None or candidate not in after.received or equal(received, before.output):
                continue
            if _is_multiplied(received, after.received[candidate], after.factors):
                found.setdefault(module, candidate)
    return found


@dataclass
class _Seen:
    """What modules received after one attention call, whose output was multiplied by ``factors``, (B, Q, H, d)."""

    output: Tensor
    factors: Tensor
    received: dict[nn.Module, Tensor] = field(default_factory=dict)


class _Watch:
    """Watches one run."""

    def __init__(self, model: nn.Module, randomized: tuple[type[nn.Module], ...], *, changed: bool) -> None:
        self.seen: dict[nn.Module, _Seen] = {}
        self._model, self._randomized, self._changed = model, randomized, changed
        self._open: _Seen | None = None
        self._numbers, self._signs = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)

    def attend(self, call: AttentionCall) -> Tensor:
        output, _ = call.run()
        factors = torch.rand(output.shape, generator=self._signs) + 0.5
        factors = (factors * torch.randn(output.shape, generator=self._signs).sign()).to(output)
        self._open = self.seen.setdefault(call.module, _Seen(output, factors))
        return output * factors if self._changed else output

    def hooks(self) -> Iterator[tuple[nn.Module, End, Hook]]:
        for module in self._model.modules():
            yield module, "input", self._note
            if isinstance(module, self._randomized):
                yield module, "result", self._replace

    def _note(self, module: nn.Module, received: Tensor | None) -> None:
        opened = self._open
        if opened is not None and received is not None and received.numel() == opened.factors.numel():
            opened.received.setdefault(module, received.clone())

    def _replace(self, _: nn.Module, result: Any) -> Tensor | None:
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return None
        return torch.randn(result.shape, generator=self._numbers).to(result)


def _is_multiplied(before: Tensor, after: Tensor, factors: Tensor) -> bool:
    """Whether ``after`` is ``before`` times ``factors``, up to one number for each head and query."""
    before, after = (tensor.double().reshape(factors.shape) for tensor in (before, after))
    expected = before * factors.double()
    if not expected.all() or expected.shape[-1] < 2:
        return False
    ratios = after / expected
    spread = ratios.amax(-1) - ratios.amin(-1)
    precision = torch.finfo(coarsest(factors.dtype, torch.float32)).eps
    return bool((spread <= 64 * precision * ratios.abs().amax(-1)).all())

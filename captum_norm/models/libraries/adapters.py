"""Caches the weight norms of DoRA adapters while a model is analysed.

A DoRA adapter takes the norm of the whole adapted matrix at every run, however few positions there are. To understand a
model takes a few forward passes and many runs of single modules, between which no weight changes.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

DORA = "DoraLinearLayer"  # PEFT's class of them; those of embeddings and convolutions derive from it
PRODUCT, NORM = "get_lora_weight", "get_weight_norm"  # of two small matrices, of which only the norm is computed


@contextmanager
def norms_taken_once(model: nn.Module) -> Iterator[None]:
    """Take the norms, not the matrices, of DoRA adapters once while open, in this thread; weights must not change."""
    with ExitStack() as stack:
        for module in model.modules():
            if any(base.__name__ == DORA for base in type(module).__mro__):
                for name, method in _once(getattr(module, PRODUCT), getattr(module, NORM)).items():
                    stack.callback(vars(module).pop, name, None)  # which uncovers its class's
                    vars(module)[name] = method
        yield


def _once(product: Callable[..., Tensor], norm: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    """Return the substitutes of an adapter's two methods."""
    thread, norms, unknown = get_ident(), dict[object, Tensor](), dict[object, Tensor]()

    def key(adapter: object) -> object:
        """Return what the norm depends on; None in another thread, and where PEFT itself never keeps it."""
        # Autograd cannot use tensors of inference mode.
        return None if adapter is None or get_ident() != thread else (adapter, torch.is_inference_mode_enabled())

    def product_once(*args: Any, **kwargs: Any) -> Tensor:
        asked = key(kwargs.get("adapter_name"))
        if asked in norms:
            return unknown[asked]
        made = product(*args, **kwargs)
        # Takes no memory, and would show if anything else were computed of it.
        unknown[asked] = made.new_full((), torch.nan).expand(made.shape)
        return made

    def norm_once(*args: Any, **kwargs: Any) -> Tensor:
        asked = key(kwargs.get("adapter_name"))
        if asked in norms:
            return norms[asked]
        taken = norm(*args, **kwargs)
        if asked is not None and asked in unknown:
            norms[asked] = taken.detach()
        return taken

    return {PRODUCT: product_once, NORM: norm_once}

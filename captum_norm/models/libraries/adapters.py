"""Caches the weight norms of DoRA adapters while a model is analysed.

A DoRA adapter takes the norm of the whole adapted matrix at every run, however few positions there are. To understand a
model takes a few forward passes and many runs of single modules, between which no weight changes.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

DORA = "DoraLinearLayer"
"""PEFT's class of them; those of embeddings and convolutions derive from it."""
PRODUCT, NORM = "get_lora_weight", "get_weight_norm"
"""Its methods: the product of the two small matrices, which only the norm is computed of; and the norm, detached."""


@contextmanager
def norms_taken_once(model: nn.Module) -> Iterator[None]:
    """Take the norms, not the matrices, of DoRA adapters once while open, in this thread; weights must not change."""
    if any(_is_dora(module) for module in model.modules()):
        with ExitStack() as stack:
            for module in filter(_is_dora, model.modules()):
                for name, method in list(_once(module)):
                    stack.callback(vars(module).pop, name, None)  # which uncovers its class's
                    vars(module)[name] = method
            yield
    else:
        yield


def _is_dora(module: nn.Module) -> bool:
    return any(base.__name__ == DORA for base in type(module).__mro__)


def _once(module: nn.Module) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Yield the two methods' substitutes."""
    compute_product, compute_norm = getattr(module, PRODUCT), getattr(module, NORM)
    thread = threading.get_ident()
    shapes: dict[object, torch.Size] = {}
    norms: dict[object, Tensor] = {}

    def key(arguments: dict[str, Any]) -> object:
        """Return what the norm depends on; None for another thread's call, and for those that PEFT itself never keeps.

        Autograd cannot use tensors of inference mode.
        """
        adapter = arguments.get("adapter_name")
        ours = adapter is not None and threading.get_ident() == thread
        return (adapter, torch.is_inference_mode_enabled()) if ours else None

    def product(*args: Any, **kwargs: Any) -> Tensor:
        asked = key(kwargs)
        if asked in norms:
            # Takes no memory, and would show if anything else were computed of it.
            return norms[asked].new_full((), torch.nan).expand(shapes[asked])
        made: Tensor = compute_product(*args, **kwargs)
        shapes[asked] = made.shape
        return made

    def norm(*args: Any, **kwargs: Any) -> Tensor:
        asked = key(kwargs)
        if asked in norms:
            return norms[asked]
        taken: Tensor = compute_norm(*args, **kwargs)
        if asked is not None and asked in shapes:
            norms[asked] = taken.detach()
        return taken

    yield PRODUCT, product
    yield NORM, norm

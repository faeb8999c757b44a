"""Finds whole layers: attention and feed-forward network, from one residual stream to the next."""

from collections.abc import Iterable

from torch import nn

from captum_norm.errors import UnsupportedModelError


def layer_of(model: nn.Module, attention: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
    """The layer around each attention module: the largest element of a list of modules that holds no other one.

    Args:
        model: the model.
        attention: its attention modules.

    Raises:
        UnsupportedModelError: if an attention module is in no such element.
    """
    wanted = set(attention)
    names = {module: name for name, module in model.named_modules() if module in wanted}
    return {module: _layer(model, name, wanted) for module, name in names.items()}


def _layer(model: nn.Module, name: str, attention: set[nn.Module]) -> nn.Module:
    path = name.split(".")
    for length in range(1, len(path) + 1):
        parent = model.get_submodule(".".join(path[: length - 1]))
        layer = model.get_submodule(".".join(path[:length]))
        if isinstance(parent, (nn.ModuleList, nn.Sequential)) and len(attention.intersection(layer.modules())) == 1:
            return layer
    raise UnsupportedModelError(
        f'the layer around the attention module "{name}" of {type(model).__name__} is not found; expected an element '
        "of a ModuleList that holds one attention module"
    )

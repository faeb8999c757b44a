"""Finds the layer (attention and feed-forward network) around each attention module."""

from collections.abc import Collection, Iterable

from torch import nn

from captum_norm.errors import UnsupportedModelError


def layer_of(
    model: nn.Module, attention: Iterable[nn.Module], cross: Collection[nn.Module] = ()
) -> dict[nn.Module, nn.Module]:
    """Map each attention module to its layer: the largest element of a module list without another attention module.

    Args:
        model: the model.
        attention: its attention modules.
        cross: those of them that read another sequence, beside which a layer may attend to its own.

    Raises:
        UnsupportedModelError: if an attention module has no such layer.
    """
    modules = set(attention)
    kinds = modules.intersection(cross), modules.difference(cross)
    names = {module: name for name, module in model.named_modules() if module in modules}
    return {module: _layer(model, name, kinds) for module, name in names.items()}


def _layer(model: nn.Module, name: str, kinds: Iterable[set[nn.Module]]) -> nn.Module:
    path = name.split(".")
    for length in range(1, len(path) + 1):
        parent = model.get_submodule(".".join(path[: length - 1]))
        if not isinstance(parent, (nn.ModuleList, nn.Sequential)):
            continue
        layer = model.get_submodule(".".join(path[:length]))
        if all(len(kind.intersection(layer.modules())) <= 1 for kind in kinds):
            return layer
    raise UnsupportedModelError(
        f'found no layer around the attention module "{name}" of {type(model).__name__}; expected an element of a '
        "ModuleList with one attention module"
    )


def not_run(model: nn.Module, layers: Iterable[nn.Module]) -> UnsupportedModelError:
    """Make the error for layers whose forward functions did not run, such as lists of their parts."""
    kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
    return UnsupportedModelError(
        f"the layers of {type(model).__name__} around attention ({kinds}) are not called as modules, so what enters "
        "and leaves them is unknown; expected modules with a forward function, with attention and feed-forward network "
        "inside"
    )

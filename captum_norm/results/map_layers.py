"""The numbers of the layers that maps are of: from 0, in each stack."""

from collections.abc import Sequence

from captum_norm.checks import as_index, as_indices
from captum_norm.errors import InvalidInputError

STACKS = ("encoder", "decoder", "cross")
"""The stacks of an encoder–decoder model; any other has one of the first two."""


def numbered(name: str, layers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Check the numbers of ``count`` layers; without any they are 0 to ``count`` − 1.

    Raises:
        InvalidInputError: there are not as many, or one is no number of a layer.
    """
    if not layers:
        return tuple(range(count))
    numbers = tuple(as_indices("layer", layers))
    if len(numbers) != count or min(numbers) < 0:
        raise InvalidInputError(
            f"got {named_layers(numbers)} for {name} of {count} layers; expected a number from 0 for each"
        )
    return numbers


def place_of_layer(name: str, layer: int, layers: Sequence[int]) -> int:
    """Return the place of a layer among those that there are, from −1 backwards in their order.

    Raises:
        InvalidInputError: it is not among them.
    """
    number = as_index("layer", layer)
    if number in layers:
        return layers.index(number)
    if -len(layers) <= number < 0:
        return number % len(layers)
    raise InvalidInputError(f"got layer {number}; {name} are of {named_layers(layers)}")


def named_layers(layers: Sequence[int]) -> str:
    """Name layers, runs of them by their ends.

    Example:
        >>> named_layers([4]), named_layers([4, 5]), named_layers([0, 1, 2, 3, 8])
        ('layer 4', 'layers 4, 5', 'layers 0–3, 8')
    """
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(parts)}"

"""Numbers to draw: tensors, arrays of numpy and nested lists."""

from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.colors import ListedColormap
from torch import Tensor

from captum_norm.checks import shown
from captum_norm.errors import InvalidInputError
from captum_norm.show.colors import color_table

Numbers = Any
"""A tensor of any dtype on any device, an array of numpy, or a list of numbers or of such lists."""


def as_array(numbers: Numbers, what: str = "numbers") -> npt.NDArray[np.float64]:
    """Convert numbers to an array.

    Raises:
        InvalidInputError: they are no numbers, or lists of different lengths.
    """
    given = numbers.detach().double().cpu().numpy() if isinstance(numbers, Tensor) else numbers
    try:
        return np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"got {what} {shown(numbers)}; expected a tensor, an array or a list of numbers"
        ) from error


def color_map(*, signed: bool) -> ListedColormap:
    """Return the colours of numbers: from white to blue, and if they may be negative from orange over white to blue."""
    colors = [color_table(below=True)[::-1], color_table()] if signed else [color_table()]
    return ListedColormap(np.concatenate(colors) / 255, name="captum_norm")

"""In which tier a case of a costly test is that the short one lacks."""

import pytest


def later(place: int) -> list[pytest.MarkDecorator]:
    """Marks of the case at this place among them: CI runs a sixth of them."""
    return [pytest.mark.long, *[pytest.mark.rest] * (place % 6 > 0)]

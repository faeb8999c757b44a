"""Says why architectures are refused, by the table ``refused.toml``."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Literal

from torch import nn

Table = Literal["refused", "without_feed_forward"]


@cache
def refusals(table: Table = "refused") -> Sequence[Mapping[str, Any]]:
    """Return the rows of a table: of refused architectures, or of those without scopes through their networks."""
    text = resources.files("captum_norm.models").joinpath("refused.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)[table]  # type: ignore[no-any-return]


def refusal_of(model: nn.Module, table: Table = "refused") -> str | None:
    """Return why a model is refused, or the reason of another table; None if it is not in the table."""
    classes = {type(module).__name__ for module in model.modules()}
    for refusal in refusals(table):
        others = refusal.get("beside", refusal["modules"])
        if not classes.isdisjoint(refusal["modules"]) and not classes.isdisjoint(others):
            return str(refusal["reason"])
    return None

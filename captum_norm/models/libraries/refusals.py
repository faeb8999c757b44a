"""Says why architectures are refused, by the table ``refused.toml``."""

import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Literal, NamedTuple

from torch import nn

Table = Literal["refused", "without_feed_forward"]


class Refusal(NamedTuple):
    """A reason, by types of configurations, and the classes of modules that tell these models."""

    model_types: Sequence[str]
    modules: Sequence[str]
    reason: str
    beside: Sequence[str] = ()


@cache
def refusals(table: Table = "refused") -> tuple[Refusal, ...]:
    """Return why architectures are refused, or why they have no scopes through the feed-forward network."""
    text = resources.files("captum_norm.models").joinpath("refused.toml").read_text(encoding="utf-8")
    return tuple(Refusal(**row) for row in tomllib.loads(text)[table])


def refusal_of(model: nn.Module, table: Table = "refused") -> str | None:
    """Return why a model is refused, or the reason of another table; None if it is not in the table."""
    classes = {type(module).__name__ for module in model.modules()}
    for refusal in refusals(table):
        if not classes.isdisjoint(refusal.modules) and (not refusal.beside or not classes.isdisjoint(refusal.beside)):
            return refusal.reason
    return None

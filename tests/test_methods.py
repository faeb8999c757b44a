"""The registry: every name leads to a method."""

from importlib import import_module

import pytest
from captum.attr import Attribution

from captum_norm.methods import METHODS


@pytest.mark.parametrize("name", METHODS)
def test_every_name_leads_to_a_method(name: str) -> None:
    method = METHODS[name]
    kind = getattr(import_module(method.package), method.class_name)
    assert issubclass(kind, Attribution)
    assert hasattr(kind, "maps") == (method.units is not None)


def test_titles_are_different() -> None:
    titles = [method.title for method in METHODS.values()]
    assert len(set(titles)) == len(titles)

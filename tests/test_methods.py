"""The registry: every name leads to a method."""

import pytest
from captum.attr import Attribution

from captum_norm import AttentionMapAttribution
from captum_norm.methods import METHODS


@pytest.mark.parametrize("name", METHODS)
def test_every_name_leads_to_a_method(name: str) -> None:
    method = METHODS[name]
    assert issubclass(method.load(), Attribution)
    assert issubclass(method.load(), AttentionMapAttribution) == method.maps
    if method.maps:
        assert method.load().name == name


def test_titles_are_different() -> None:
    titles = [method.title for method in METHODS.values()]
    assert len(set(titles)) == len(titles)

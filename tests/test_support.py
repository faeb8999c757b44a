"""The list of supported models is that of the families in the tests."""

from captum_norm.commands.models import supported_models
from tests import support


def test_the_list_and_its_page_are_those_of_the_test_matrix() -> None:
    found = list(support.supported())
    assert support.DATA.read_text(encoding="utf-8") == support.data(found), "run python -m tests.support"
    assert support.PAGE.read_text(encoding="utf-8") == support.page(found), "run python -m tests.support"
    assert supported_models() == found
    assert len({model["model_type"] for model in found}) >= 50

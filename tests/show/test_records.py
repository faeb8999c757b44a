"""Records for Captum's own text viewer."""

import pytest
import torch
from captum.attr import visualization

from captum_norm.show import text_record


def test_record_holds_the_scores_as_shares_and_their_sum() -> None:
    record = text_record(["a", "b"], torch.tensor([0.5, 2.0]), label="norm", convergence_delta=1e-6)
    assert isinstance(record, visualization.VisualizationDataRecord)
    assert record.word_attributions.tolist() == [0.25, 1.0]
    assert record.attr_score == 2.5
    assert record.convergence_score == 1e-6
    assert str(record.attr_class) == "norm"


def test_tokens_and_label_are_escaped_because_captum_does_not() -> None:
    record = text_record(["<script>", "[SEP]"], torch.ones(2), label="<b>")
    assert record.raw_input_ids == ["&lt;script&gt;", "[SEP]"]
    assert str(record.attr_class) == "&lt;b&gt;"


def test_captum_renders_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    viewer = visualization.visualize_text.__globals__
    monkeypatch.setitem(viewer, "HAS_IPYTHON", True)
    monkeypatch.setitem(viewer, "HTML", str)
    monkeypatch.setitem(viewer, "display", lambda _: None)
    page = visualization.visualize_text([text_record(["<i>", "b"], torch.tensor([0.0, 3.0]), label="norm")])
    assert isinstance(page, str)
    assert "&lt;i&gt;" in page
    assert "hsl(120, 75%, 50%)" in page  # Captum's strongest green, for the largest score
    assert "norm (1.00)" in page


def test_zeros_stay_zeros() -> None:
    assert text_record(["a"], torch.zeros(1), label="norm").word_attributions.tolist() == [0.0]


def test_scores_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="shape \\(1, 2\\)"):
        text_record(["a", "b"], torch.ones(1, 2), label="norm")
    with pytest.raises(ValueError, match="1 tokens do not fit scores of 2"):
        text_record(["a"], torch.ones(2), label="norm")

"""Shows what a generated answer rests on: as a page, as a picture, in Captum's text viewer."""

from captum.attr import visualization
from matplotlib.figure import Figure

from captum_norm.generation.result import GenerationResult
from captum_norm.results import make_figure
from captum_norm.show.heatmap import Panel, draw_heatmaps
from captum_norm.show.page import render
from captum_norm.show.page.answer import answer_page
from captum_norm.show.records import text_record


def render_answer(result: GenerationResult) -> str:
    """Render what an answer rests on as one page: the input, coloured for each token of the answer, and segments.

    Args:
        result: of :class:`captum_norm.GenerationAttribution`.

    Returns:
        A complete HTML document, for :func:`captum_norm.show.write_page`.

    Example:
        >>> import torch
        >>> from captum_norm import GenerationResult
        >>> from captum_norm.generation import Explained
        >>> explained = Explained("norms", "norm", "a b", " c", (0, 1))
        >>> scores = torch.tensor([0.5, 2.0])
        >>> result = GenerationResult(
        ...     input_tokens=["a", " b"], output_tokens=[" c"], seq_attr=scores, token_attr=scores[None],
        ...     prompt_length=2, template=[False, False], explained=explained,
        ... )
        >>> "What “c” rests on" in render_answer(result)
        True
    """
    return render(answer_page(result))


@make_figure.register
def draw_answer(result: GenerationResult) -> Figure:
    """Draw the scores of each output token, or of the whole, as a heat map.

    Args:
        result: see :func:`render_answer`.

    Returns:
        The figure; :func:`captum_norm.show.save_figure` writes it.
    """
    rows = [result.explained.answer] if result.token_attr is None else result.output_tokens
    return draw_heatmaps([_panel(result, result.explained.method)], rows, result.input_tokens)


def answer_records(result: GenerationResult) -> list[visualization.VisualizationDataRecord]:
    """Make records for ``captum.attr.visualization.visualize_text``: of the whole, and of each output token.

    Args:
        result: see :func:`render_answer`.
    """
    rows = [] if result.token_attr is None else list(zip(result.output_tokens, result.token_attr, strict=True))
    delta = result.convergence_delta
    return [
        text_record(result.input_tokens, row.clamp(min=0), label=label, convergence_delta=delta)
        for label, row in [(result.explained.answer, result.seq_attr), *rows]
    ]


def _panel(result: GenerationResult, title: str) -> Panel:
    rows = result.seq_attr[None] if result.token_attr is None else result.token_attr
    return Panel(title, rows, result.explained.unit)

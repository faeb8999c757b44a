"""Shows results: in the terminal, as figures, as pages, and in Captum's own text viewer."""

from captum_norm.show.canvas import StandaloneFigure, figure_bytes, save_figure
from captum_norm.show.figures import Panel, draw_answer, draw_comparison, draw_heatmaps, draw_patches
from captum_norm.show.page import render as render_page
from captum_norm.show.page import write_page
from captum_norm.show.pages import render_answer, render_comparison, render_explanation, render_patches, write_report
from captum_norm.show.plots import draw_plot, plot_bytes
from captum_norm.show.terminal import (
    answer_records,
    colored_tokens,
    marked_tokens,
    score_table,
    show_comparison,
    show_tokens,
    text_record,
)

__all__ = [
    "Panel",
    "StandaloneFigure",
    "answer_records",
    "colored_tokens",
    "draw_answer",
    "draw_comparison",
    "draw_heatmaps",
    "draw_patches",
    "draw_plot",
    "figure_bytes",
    "marked_tokens",
    "plot_bytes",
    "render_answer",
    "render_comparison",
    "render_explanation",
    "render_page",
    "render_patches",
    "save_figure",
    "score_table",
    "show_comparison",
    "show_tokens",
    "text_record",
    "write_page",
    "write_report",
]

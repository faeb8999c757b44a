"""Shows results: in the terminal, as figures, as pages, and in Captum's own text viewer."""

from captum_norm.show.analysis.plots import draw_plot, plot_bytes
from captum_norm.show.analysis.report import write_report
from captum_norm.show.comparison.figure import draw_comparison
from captum_norm.show.comparison.page import render_comparison
from captum_norm.show.comparison.terminal import show_comparison
from captum_norm.show.figures import StandaloneFigure, figure_bytes, save_figure
from captum_norm.show.generation import answer_records, draw_answer, render_answer
from captum_norm.show.heatmap import Panel, draw_heatmaps
from captum_norm.show.page import render as render_page
from captum_norm.show.page import write_page
from captum_norm.show.page.explanation import render_explanation
from captum_norm.show.page.maps import maps_page as maps_page
from captum_norm.show.page.patches import render_patches
from captum_norm.show.pictures import draw_patches
from captum_norm.show.records import text_record
from captum_norm.show.terminal import colored_tokens, marked_tokens, score_table, show_tokens

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

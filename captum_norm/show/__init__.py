"""Shows results: in the terminal, as figures and as pages."""

from captum_norm.show.figures import Panel, StandaloneFigure, draw_heatmaps, draw_patches, figure_bytes
from captum_norm.show.page import render as render_page
from captum_norm.show.pages import explanation_page, patches_page, write_report
from captum_norm.show.plots import draw_plot, plot_bytes
from captum_norm.show.terminal import print_result, show_tokens

__all__ = [
    "Panel",
    "StandaloneFigure",
    "draw_heatmaps",
    "draw_patches",
    "draw_plot",
    "explanation_page",
    "figure_bytes",
    "patches_page",
    "plot_bytes",
    "print_result",
    "render_page",
    "show_tokens",
    "write_report",
]

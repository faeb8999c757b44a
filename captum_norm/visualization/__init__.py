"""Scores and maps to look at: in the terminal, as figures, as a page, and in Captum's own text viewer."""

from captum_norm.visualization.figures import save_figure
from captum_norm.visualization.heatmap import Panel, draw_heatmaps
from captum_norm.visualization.page import render_page, write_page
from captum_norm.visualization.records import text_record
from captum_norm.visualization.terminal import colored_tokens, marked_tokens, score_table, show_tokens

__all__ = [
    "Panel",
    "colored_tokens",
    "draw_heatmaps",
    "marked_tokens",
    "render_page",
    "save_figure",
    "score_table",
    "show_tokens",
    "text_record",
    "write_page",
]

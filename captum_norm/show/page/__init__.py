"""The living page: data (``document``), arrays as text (``encoding``), one self-contained file (``html``)."""

from captum_norm.show.page.document import (
    Column,
    Example,
    Figure,
    Graph,
    Links,
    Maps,
    Page,
    Picture,
    Scores,
    Table,
    Tokens,
)
from captum_norm.show.page.html import render, write_page

__all__ = [
    "Column",
    "Example",
    "Figure",
    "Graph",
    "Links",
    "Maps",
    "Page",
    "Picture",
    "Scores",
    "Table",
    "Tokens",
    "render",
    "write_page",
]

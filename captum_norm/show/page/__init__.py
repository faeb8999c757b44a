"""The living page: the data of its examples (``document``), and the page as one self-contained file (``html``)."""

from captum_norm.show.page.document import (
    Column,
    Example,
    Figure,
    Graph,
    Links,
    Maps,
    Picture,
    Scores,
    Table,
    Tokens,
)
from captum_norm.show.page.html import Page, render, write_page

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
